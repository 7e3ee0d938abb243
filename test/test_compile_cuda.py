"""Transfers in CUDA graphs: captured by hand, compiled, and by mode="reduce-overhead"."""

from typing import Any

import pytest
import torch
from compiling import indices, pool
from torch import Tensor
from torch._dynamo.utils import counters

from torch_hicache import check_errors, device_view, empty_host, transfer_kv

pytestmark = pytest.mark.backend("cuda")

ROW = 8
LAYERS = 3
SLOTS = 256


def _host_view(*shape: int) -> tuple[Tensor, Tensor]:
    """Host memory with random contents, and the device's view of it."""
    host = empty_host(shape, torch.float32, "cuda")
    host.copy_(pool(*shape))
    return host, device_view(host, "cuda")


def _slots(length: int) -> Tensor:
    return indices(length, SLOTS, "cuda")


def _loaded(before: Tensor, host: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    """[layers, slots, row] after a load, by index assignment."""
    after = before.clone()
    after[:, dst] = host.to(before.device)[:, src]
    return after


def _refill(tensor: Tensor) -> None:
    tensor.copy_(pool(*tensor.shape))


class _CapturedLoad:
    """A layer-wise load with `count`, captured in global mode."""

    def __init__(self) -> None:
        self.host, self.view = _host_view(LAYERS, SLOTS, ROW)
        self.device = pool(LAYERS, SLOTS, ROW, device="cuda")
        self.dst, self.src = _slots(16), _slots(16)
        self.count = torch.tensor([16], device="cuda")
        self.run()  # what is set up once is set up outside of the capture
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph, capture_error_mode="global"):
            self.run()

    def run(self) -> None:
        for layer in range(LAYERS):
            transfer_kv([self.device[layer]], [self.view[layer]], self.dst, self.src, count=self.count)

    def check_replay(self, count: int) -> None:
        torch.cuda.synchronize()
        _refill(self.host)
        _refill(self.device)
        self.dst.copy_(_slots(16))
        self.src.copy_(_slots(16))
        self.count.fill_(count)
        expected = _loaded(self.device, self.host, self.dst[:count], self.src[:count])
        self.graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(self.device, expected)


def test_replays_follow_indices_contents_and_count() -> None:
    load = _CapturedLoad()
    for count in (16, 3, 0, 11):
        load.check_replay(count)


def test_replay_after_disturbance() -> None:
    """Other memory, other transfers with CPU and device indices, other streams in between."""
    load = _CapturedLoad()
    for round_ in range(4):
        noise = [torch.full((1 << 18,), -1.0, device="cuda") for _ in range(8)]
        other = pool(SLOTS, ROW, device="cuda")
        transfer_kv([other], [load.view[0]], _slots(200), _slots(200))
        transfer_kv([other], [load.host[0]], indices(100, SLOTS), indices(100, SLOTS))
        with torch.cuda.stream(torch.cuda.Stream()):
            transfer_kv([pool(SLOTS, ROW, device="cuda")], [load.view[1]], _slots(90), _slots(90))
        del noise
        load.check_replay(5 + round_)


def test_bad_index_in_a_replay_is_reported() -> None:
    load = _CapturedLoad()
    load.dst[2] = SLOTS
    load.graph.replay()
    with pytest.raises(IndexError, match=str(SLOTS)):
        check_errors("cuda")
    load.check_replay(16)


def test_refusal_leaves_the_capture_usable() -> None:
    host, view = _host_view(SLOTS, ROW)
    device = pool(SLOTS, ROW, device="cuda")
    dst, src = _slots(16), _slots(16)
    on_cpu = dst.cpu(), src.cpu()
    transfer_kv([device], [view], dst, src)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        for method in ("auto", "kernel", "copy_engine"):
            with pytest.raises((ValueError, RuntimeError), match=r"\[transfer_kv\]"):
                transfer_kv([device], [host], *on_cpu, method=method)
        transfer_kv([device], [view], dst, src)
    _refill(device)
    expected = device.clone()
    expected[dst] = view[src]
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(device, expected)


def _step(pool_: Tensor, view: Tensor, dst: Tensor, src: Tensor) -> Tensor:
    kept = pool_[0, :4] * 2
    state = kept + 1
    for layer in range(LAYERS):
        transfer_kv([pool_[layer]], [view[layer]], dst, src)
        state = state + pool_[layer, :4] * 2
    return state + kept


class _Step(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("pool", pool(LAYERS, SLOTS, ROW, device="cuda"))

    def forward(self, view: Tensor, dst: Tensor, src: Tensor) -> Tensor:
        return _step(self.pool, view, dst, src)


def _check_step(compiled: Any, held: Tensor, host: Tensor, view: Tensor) -> None:
    """The compiled step reads `held`; eager works on a copy of it."""
    dst, src = _slots(16), _slots(16)
    torch.cuda.synchronize()
    _refill(host)
    _refill(held)
    reference = held.clone()
    expected = _step(reference, view, dst, src)
    torch.compiler.cudagraph_mark_step_begin()
    actual = compiled(view, dst, src)
    assert torch.equal(actual, expected)
    assert torch.equal(held, reference)


def test_compiled_step_captured_by_hand() -> None:
    torch._dynamo.reset()
    module = _Step()
    host, view = _host_view(LAYERS, SLOTS, ROW)
    dst, src = _slots(16), _slots(16)
    with torch.no_grad():
        compiled = torch.compile(module, fullgraph=True)
        compiled(view, dst, src)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = compiled(view, dst, src)

        def replay(_view: Tensor, new_dst: Tensor, new_src: Tensor) -> Tensor:
            dst.copy_(new_dst)
            src.copy_(new_src)
            graph.replay()
            return output.clone()

        for _ in range(4):
            _check_step(replay, module.pool, host, view)


@pytest.mark.parametrize("place", ["buffer", "static closure"])
def test_reduce_overhead_keeps_its_graphs(place: str) -> None:
    torch._dynamo.reset()
    counters.clear()
    host, view = _host_view(LAYERS, SLOTS, ROW)
    module = _Step()
    held = module.pool
    if place == "static closure":
        torch._dynamo.mark_static_address(held)

        def function(view: Tensor, dst: Tensor, src: Tensor) -> Tensor:
            return _step(held, view, dst, src)

    target = module if place == "buffer" else function
    with torch.no_grad():
        compiled = torch.compile(target, mode="reduce-overhead", fullgraph=True)
        for _ in range(6):
            _check_step(compiled, held, host, view)
        torch.cuda.synchronize()
        launches = _graph_launches(lambda: _check_step(compiled, held, host, view))
    assert counters["inductor"]["cudagraph_skips"] == 0
    assert launches == 1


def _graph_launches(run: Any) -> int:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        torch.cuda.synchronize()
    return sum(event.count for event in profile.key_averages() if event.key == "cudaGraphLaunch")
