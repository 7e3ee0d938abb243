"""torch.ops.hicache.wait_layer: eager, opcheck, compiled, and captured with fakes."""

import gc
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from compiling import allocations, assert_same, copy_of
from engine_fakes import (
    LAYERS,
    FakeRuntime,
    GatedRuntime,
    Model,
    failing_layers,
    fake_engine,
    gated_engine,
    ints,
    make_pools,
    same,
)
from torch import Tensor
from torch.export import Dim

from torch_hicache import DevicePool, HostPool, PlaneSpec, TransferEngine, transfer_kv, wait_layer

D, H = ints(3, 4, 9), ints(30, 2, 31)


@pytest.fixture
def gated() -> Iterator[tuple[TransferEngine, GatedRuntime, Model]]:
    with gated_engine() as parts:
        yield parts


def test_waits_for_the_newest_load_of_the_layer() -> None:
    with fake_engine(group_bytes=1) as (engine, runtime, model):
        pool = model.pools["device"]
        engine.load(H, D, layers=[2, 3])
        engine.load(ints(7, 8, 9), D, layers=[5, 2])
        model.load(H, D, [2, 3])
        model.load(ints(7, 8, 9), D, [5, 2])
        seen: list[int] = []

        def read(layer: int) -> None:
            assert same(pool.planes(layer), model.rows["device"][layer]), f"layer {layer} was not ready"
            seen.append(layer)

        for layer in (5, 2, 3, 8):
            wait_layer(pool.planes(layer), engine.handle, layer)
            runtime.compute.run(lambda layer=layer: read(layer))
        runtime.drain(first=("compute",))
        assert seen == [5, 2, 3, 8]


def test_nothing_outstanding_is_no_wait(gated: tuple) -> None:
    engine, runtime, model = gated
    wait_layer([], engine.handle, 5)
    engine.load(H, D).wait()
    with runtime.blocked():
        engine.load(H, D, layers=[2])
        engine.store(D, H)
        wait_layer(model.pools["device"].planes(5), engine.handle, 5)
        wait_layer([], engine.handle, 5)


@pytest.mark.parametrize(
    ("handle", "layer", "text"),
    [
        (-1, 2, "[wait_layer] engine must be the handle of a TransferEngine, got -1."),
        (None, 4, "[wait_layer] layer must be one of the engine's, [2, 3, 5, 8], got 4."),
    ],
)
def test_unknown(gated: tuple, handle: int | None, layer: int, text: str) -> None:
    engine, _, model = gated
    planes = model.pools["device"].planes(2)
    with pytest.raises(ValueError, match=re.escape(text)):
        wait_layer(planes, engine.handle if handle is None else handle, layer)


def test_handle_of_an_engine_that_is_gone() -> None:
    engine = TransferEngine(*make_pools())
    handle = engine.handle
    wait_layer([], handle, 2)
    engine.close()
    wait_layer([], handle, 2)
    del engine
    gc.collect()
    with pytest.raises(ValueError, match="engine must be the handle"):
        wait_layer([], handle, 2)


def test_a_failed_load_is_told_once_though_another_followed(gated: tuple) -> None:
    engine, _, _ = gated
    with failing_layers(5):
        engine.load(H, D, layers="all")
        engine.load(H, D, layers=[2]).wait()
    engine.load(H, D, layers="all").wait()
    for layer in (2, 3):
        wait_layer([], engine.handle, layer)
    for layer in (8, 5):
        with pytest.raises(RuntimeError, match="the link is down"):
            wait_layer([], engine.handle, layer)
    for layer in LAYERS:
        wait_layer([], engine.handle, layer)


def test_no_layer_of_the_newest_load_is_ready_once_it_failed(gated: tuple) -> None:
    engine, _, _ = gated
    with failing_layers(3):
        ticket = engine.load(H, D, layers="all")
        with pytest.raises(RuntimeError, match="the link is down"):
            ticket.wait()
    for _ in range(2):  # whoever has been told
        wait_layer([], engine.handle, 2)
        for layer in (3, 5, 8):
            with pytest.raises(RuntimeError, match="the link is down"):
                wait_layer([], engine.handle, layer)
    engine.load(H, D, layers=[5]).wait()
    wait_layer([], engine.handle, 5)
    with pytest.raises(RuntimeError, match="the link is down"):
        wait_layer([], engine.handle, 8)


def test_an_error_that_the_ticket_has_told_is_not_told_again(gated: tuple) -> None:
    engine, _, _ = gated
    with failing_layers(2):
        told, given_up = engine.load(H, D), engine.load(H, D)
        with pytest.raises(RuntimeError, match="the link is down"):
            told.wait()
        while not given_up.done():
            given_up._events[-1].wait()
        assert given_up.cancel() is False
    wait_layer([], engine.handle, 8)


def test_a_captured_wait_follows_the_loads_that_come_later() -> None:
    """The graph is captured before the load, and again replayed with another."""
    with fake_engine(group_bytes=1) as (engine, runtime, model):
        pool = model.pools["device"]
        runtime.capturing = True
        wait_layer(pool.planes(5), engine.handle, 5)
        wait_layer(pool.planes(5), engine.handle, 5)
        runtime.capturing = False
        (event,) = runtime.layer_events
        assert event.records == 1, "recorded once, so that the wait is no wait for nothing"
        for host_slots, layers in ((H, "all"), (ints(1, 2, 3), None), (ints(4, 5, 6), [3])):
            engine.load(host_slots, D, layers=layers)
            model.load(host_slots, D, LAYERS if layers != [3] else [3])
            event.replay()
            runtime.compute.run(
                lambda: (
                    same(pool.planes(5), model.rows["device"][5])
                    or pytest.fail("the replay did not wait for the load")
                )
            )
            runtime.run_ahead("compute")
            runtime.drain()
        assert event.records == 3, "one for each load of the layer"


def test_what_cannot_be_captured_says_so() -> None:
    with fake_engine() as (engine, runtime, _):
        ticket = engine.load(H, D)
        runtime.capturing = True
        for call in (lambda: engine.load(H, D), lambda: engine.store(D, H)):
            with pytest.raises(RuntimeError, match=r"\[TransferEngine\] a .* can't be captured"):
                call()
        for call in (ticket.wait_stream, lambda: ticket.wait_layer(2)):
            with pytest.raises(RuntimeError, match="a ticket's wait can't be captured"):
                call()
        runtime.capturing = False
        assert engine.stats()["load"]["in_flight"] == 1

    class Plain(FakeRuntime):
        def new_layer_event(self) -> None:  # type: ignore[override]
            return None

    with TransferEngine(*make_pools(), runtime=Plain()) as engine:
        engine._runtime.capturing = True
        with pytest.raises(RuntimeError, match="a wait can't be captured on cpu"):
            wait_layer([], engine.handle, 2)


# --- Compiled -------------------------------------------------------------------------------------


def test_opcheck(gated: tuple) -> None:
    engine, _, model = gated
    planes = model.pools["device"].planes(2)
    torch.library.opcheck(torch.ops.hicache.wait_layer.default, (planes, engine.handle, 2))
    torch.library.opcheck(torch.ops.hicache.wait_layer.default, ([], engine.handle, 2))


FLOATS = (PlaneSpec("kv", (8,), torch.float32),)


def _float_pools(slots: int) -> tuple[DevicePool, HostPool]:
    device_pool = DevicePool(FLOATS, 3, slots, "cpu")
    host_pool = HostPool(FLOATS, 3, slots, device="cpu")
    for pool in (device_pool, host_pool):
        pool.stacks()[0].copy_(torch.randint(1, 90, pool.stacks()[0].shape))
    return device_pool, host_pool


def read_behind(pool: Tensor, engine: int) -> Any:
    """A lazy read of each layer before its wait, and one behind it."""
    before, behind = [], []
    for layer in range(3):
        before.append(pool[layer, :4] * 2)
        wait_layer([pool[layer]], engine, layer)
        behind.append(pool[layer, :4] * 2)
    return [b.sum(1) for b in before], behind, behind[0] + before[2]


def read_list_behind(planes: list[Tensor], engine: int) -> Any:
    kept = [plane[:4] + 1 for plane in planes]
    for layer, plane in enumerate(planes):
        wait_layer([plane], engine, layer)
        kept.append(plane[:4] + 1)
    return kept


def load_then_wait(pool: Tensor, source: Tensor, at: Tensor, engine: int) -> Any:
    kept = pool[1, :4] * 1
    transfer_kv([pool[1]], [source[1]], at, at)
    middle = pool[1, :4] * 3
    wait_layer([pool[1]], engine, 1)
    return kept, middle, pool[1, :4] * 5, pool[1].sum(1)


@pytest.fixture
def writes_when_it_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each wait writes into its layer, as a load would, at the one moment that matters."""

    def wait(engine: TransferEngine, layer: int) -> None:
        engine._pair.device_pool.planes(layer)[0].add_(1000)

    monkeypatch.setattr(TransferEngine, "_wait_layer", wait)


def _compare_compiled(function: Callable, make: Callable[[int], tuple[list[Any], DevicePool]]) -> None:
    compiled = torch.compile(function, fullgraph=True)
    for slots in (40, 56):
        results = []
        for run in (function, compiled):
            torch.manual_seed(slots)
            args, pool = make(slots)
            host_pool = HostPool(FLOATS, 3, slots, device="cpu")
            with TransferEngine(pool, host_pool) as engine, allocations() as sizes:
                results.append(copy_of([run(*args, engine.handle), pool.planes()]))
        assert_same(*results, what=f"{slots} slots")
        assert max(sizes) < slots * 8 * 4, "a plane was copied"


@pytest.mark.usefixtures("writes_when_it_waits")
def test_no_read_moves_over_a_wait_in_a_compiled_graph() -> None:
    def make(slots: int) -> tuple[list[Any], DevicePool]:
        pool, _ = _float_pools(slots)
        return [pool.stacks()[0]], pool

    _compare_compiled(read_behind, make)


@pytest.mark.usefixtures("writes_when_it_waits")
def test_no_read_moves_over_a_wait_for_a_list() -> None:
    def make(slots: int) -> tuple[list[Any], DevicePool]:
        pool, _ = _float_pools(slots)
        own = [plane.clone() for plane in pool.planes()]
        pool = DevicePool.adopt({"kv": own})
        return [own], pool

    _compare_compiled(read_list_behind, make)


@pytest.mark.usefixtures("writes_when_it_waits")
def test_transfers_and_waits_in_one_graph() -> None:
    def make(slots: int) -> tuple[list[Any], DevicePool]:
        pool, source = _float_pools(slots)
        return [pool.stacks()[0], source.stacks()[0], torch.randperm(slots)[:9]], pool

    _compare_compiled(load_then_wait, make)


@pytest.mark.usefixtures("writes_when_it_waits")
@pytest.mark.parametrize("slots_vary", [False, True])
def test_aot_inductor(tmp_path: Path, *, slots_vary: bool) -> None:
    """Reads that are pending at a wait, waits between transfers; the engine's handle is a constant."""

    class LoadThenWait(torch.nn.Module):
        def forward(self, pool: Tensor, source: Tensor, at: Tensor) -> Any:
            return read_behind(pool, engine.handle), load_then_wait(pool, source, at, engine.handle)

    device_pool, source = _float_pools(64)
    with TransferEngine(device_pool, HostPool(FLOATS, 3, 64, device="cpu")) as engine, torch.no_grad():
        args = (device_pool.stacks()[0], source.stacks()[0], torch.randperm(64)[:9])
        slots = Dim("slots", min=16)
        shapes = ({1: slots}, {1: slots}, None) if slots_vary else None
        program = torch.export.export(LoadThenWait(), copy_of(args), dynamic_shapes=shapes)
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "m.pt2"))
        loaded, before = torch._inductor.aoti_load_package(path), args[0].clone()
        results = []
        for run in (LoadThenWait(), loaded):
            device_pool.stacks()[0].copy_(before)
            results.append(copy_of([run(*args), args]))
        assert_same(*results)


def test_a_compiled_step_with_a_real_load() -> None:
    pool, host_pool = _float_pools(64)
    expected = [plane.clone() for plane in host_pool.planes()]

    @torch.compile(fullgraph=True)
    def step(pool: Tensor, engine: int) -> list[Tensor]:
        sums = []
        for layer in range(3):
            wait_layer([pool[layer]], engine, layer)
            sums.append(pool[layer].sum())
        return sums

    everything = torch.arange(64)
    with TransferEngine(pool, host_pool) as engine:
        for value in (0, 5):
            host_pool.stacks()[0].add_(value)
            engine.load(everything, everything, layers="all")
            sums = step(pool.stacks()[0], engine.handle)
            assert [float(s) for s in sums] == [float((plane + value).sum()) for plane in expected]
