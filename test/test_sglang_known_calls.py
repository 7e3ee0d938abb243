"""Calls of SGLang's functions that are known from an earlier one, and those that only look like it."""

import gc
import os
import subprocess
import sys
import textwrap
import weakref
from collections.abc import Callable

import pytest
import torch
from sglang_pools import DIM, DTYPE, HEADS, ITEM, PAGE, pages
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from torch_hicache.integrations.sglang import calls, kvcacheio
from torch_hicache.testing import fill_pool, unchanged

ROWS, WIDTH = 6, 8
AT, FROM = torch.tensor([1, 4]), torch.tensor([3, 0])


def load(dst: Tensor, src: Tensor) -> None:
    kvcacheio.transfer_kv_per_layer_mla(src, dst, FROM, AT, WIDTH)


@pytest.fixture
def only_known(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From now on no call is worked out anew."""

    def refuse(*_args: object, **_options: object) -> None:
        raise AssertionError("the call was not known")

    return lambda: monkeypatch.setattr(kvcacheio, "run", refuse)


def rows(seed: int) -> Tensor:
    """Six of eight bytes, with room for others of the same memory."""
    base = torch.zeros(16 * ROWS * WIDTH, dtype=torch.uint8)
    fill_pool([base], seed=seed)
    return base[: ROWS * WIDTH].view(ROWS, WIDTH)


def bytes_behind(tensor: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())


CHANGES: dict[str, Callable[[Tensor], object]] = {
    "rows_further_apart": lambda tensor: tensor.as_strided_((ROWS, WIDTH), (2 * WIDTH, 1)),
    "resized_to_more_rows": lambda tensor: tensor.resize_(3 * ROWS, WIDTH),
    "moved_within_its_memory": lambda tensor: tensor.set_(
        tensor.untyped_storage(), 5 * WIDTH, (ROWS, WIDTH), (WIDTH, 1)
    ),
    "set_to_other_memory": lambda tensor: tensor.set_(rows(9)),
    "data_swapped": lambda tensor: setattr(tensor, "data", rows(9)),
    "data_swapped_for_rows_apart": lambda tensor: setattr(
        tensor, "data", rows(9).as_strided((ROWS, WIDTH), (3 * WIDTH, 1))
    ),
}


@pytest.mark.parametrize("side", ["dst", "src"])
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_tensor_that_has_changed(change: Callable[[Tensor], object], side: str) -> None:
    """The same objects: what they are in this call counts."""
    dst, src = rows(1), rows(2)
    load(dst, src)
    change(dst if side == "dst" else src)
    expected = bytes_behind(dst).clone()
    expected.as_strided(dst.shape, dst.stride(), dst.storage_offset())[AT] = src[FROM]
    load(dst, src)
    assert torch.equal(bytes_behind(dst), expected)


def test_memory_that_is_used_again() -> None:
    """Tensors that come and go at one address, each with bytes, rows and a distance of its own."""
    memory, src = torch.zeros(1024, dtype=torch.uint8), rows(2)
    for _ in range(2):
        for dtype in (torch.uint8, torch.int16, torch.int64):
            for distance in (1, 2, 5):
                step = distance * WIDTH // dtype.itemsize
                dst = memory.view(dtype).as_strided((ROWS, WIDTH // dtype.itemsize), (step, 1))
                expected = memory.zero_().clone()
                expected.as_strided((ROWS, WIDTH), (distance * WIDTH, 1))[AT] = src[FROM]
                load(dst, src)
                assert torch.equal(memory, expected), (dtype, distance)
                del dst
        for dtype in (torch.uint8, torch.int16):  # equal in sizes and strides
            dst = memory.view(dtype)[: ROWS * WIDTH].view(ROWS, WIDTH)
            with pytest.raises(IndexError, match=f"for {ROWS * dtype.itemsize} slots"):
                kvcacheio.transfer_kv_per_layer_mla(src, dst, FROM, AT + 99, WIDTH)


def test_freed_memory_is_not_kept() -> None:
    dst, src = rows(1), rows(2)
    load(dst, src)
    watched = [weakref.ref(tensor.untyped_storage()) for tensor in (dst, src)]
    del dst, src
    gc.collect()
    assert [each() for each in watched] == [None, None]


def test_a_known_call_is_that_of_its_numbers(only_known: Callable[[], None]) -> None:
    """Equal tensors, but another layer, row or function."""
    dst = torch.zeros(4, 3 * WIDTH, dtype=torch.uint8)
    src = torch.empty_like(dst)
    fill_pool([src], seed=3)
    one = torch.tensor([1])

    def loads() -> None:
        for layer in (0, 2):
            expected = dst.zero_().clone().view(-1, WIDTH)
            expected[1] = src[1, layer * WIDTH :][:WIDTH]
            kvcacheio.transfer_kv_per_layer_mla_pf_lf(src, dst, one, one, layer, WIDTH, 3 * WIDTH)
            assert torch.equal(dst.view(-1, WIDTH), expected)
        for size in (WIDTH, 3 * WIDTH):
            expected = dst.zero_().clone().view(-1, size)
            expected[1] = src.view(-1, size)[1]
            kvcacheio.transfer_kv_per_layer_mla(src, dst, one, one, size)
            assert torch.equal(dst.view(-1, size), expected)

    loads()
    only_known()
    loads()


def page_calls(device: str = "cpu") -> tuple[Tensor, Tensor, list[Callable[[Tensor, Tensor], None]]]:
    """Device rows, a pool of pages of one layer (and one head), and calls between both."""
    layer = torch.zeros(7 * PAGE, HEADS, DIM, dtype=DTYPE, device=device)
    pool = torch.zeros(7, 1, PAGE, HEADS, DIM, dtype=DTYPE)
    fill_pool([pool], seed=4)
    pool = pool.to(device)
    k_and_v = pool, layer, pool.clone(), layer.clone()
    sizes = 0, ITEM, ITEM, PAGE, 1
    return (
        layer,
        pool,
        [
            lambda dst, src: kvcacheio.transfer_kv_per_layer_direct_pf_lf(
                [pool], [layer], src, dst, 0, PAGE
            ),
            lambda dst, src: kvcacheio.transfer_kv_all_layer_direct_lf_pf(
                [layer], [pool], dst, src, PAGE
            ),
            lambda dst, src: kvcacheio.transfer_kv_per_layer_ph_lf(*k_and_v, src, dst, *sizes),
        ],
    )


def test_tokens_here_and_on_the_device(device: str) -> None:
    """On a device Python makes pages of them: the same tensors in a call that counts in another way."""
    layer, pool, loads = page_calls(device)
    for call in (loads[0], loads[2]):
        for place, page in ((device, 1), ("cpu", 2), (device, 3)):
            expected = layer.zero_().cpu().view(7, PAGE, HEADS, DIM)
            expected[page] = pool[page + 2, 0].cpu()
            call(pages([page]).to(place), pages([page + 2]).to(place))
            assert torch.equal(layer.cpu().view_as(expected), expected)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("step", [1, 3])
def test_tokens_on_the_cpu_are_read_in_each_call(
    dtype: torch.dtype, step: int, only_known: Callable[[], None]
) -> None:
    """Whoever has written them, with padding, and a distance apart."""
    layer, pool, (load_pages, *_) = page_calls()
    load_pages(pages([0]), pages([0]))
    only_known()
    at, of = (torch.zeros(3 * PAGE * step, dtype=dtype)[::step] for _ in range(2))
    for to, source in (([2, 5, 3], [6, 0, 1]), ([5, 1, 0], [6, 0, 2])):
        at.numpy()[:], of.numpy()[:] = pages(to).numpy(), pages(source).numpy()
        at.numpy()[PAGE : 2 * PAGE] = -1
        expected = torch.zeros_like(layer).view(7, PAGE, HEADS, DIM)
        expected[[to[0], to[2]]] = pool[[source[0], source[2]], 0]
        layer.zero_()
        load_pages(at, of)
        assert torch.equal(layer.view_as(expected), expected)


BROKEN = [[1, 2, 3, 4], [4, 5, 6, 8], [4, 5, -1, 7], [-1, 5, 6, 7], [-4, -3, -2, -1], [-2] * 4, [4, 5, 6]]
LARGEST = [(1 << 63) - PAGE + i for i in range(PAGE - 1)] + [-(1 << 63)]


@pytest.mark.parametrize("side", ["dst", "src"])
@pytest.mark.parametrize("broken", [*BROKEN, LARGEST])
def test_tokens_that_are_no_page_in_a_known_call(broken: list[int], side: str) -> None:
    layer, pool, loads = page_calls()
    good = pages([1]), pages([2])
    for call in loads:
        call(*good)
        bad = torch.tensor(broken)
        tokens = (bad, good[1]) if side == "dst" else (good[0], bad)
        with unchanged([layer, pool]), pytest.raises(ValueError, match="must be whole pages of 4 tokens"):
            call(*tokens)
        with unchanged([layer, pool]), pytest.raises(ValueError, match="must be 1-D, int32 or int64"):
            call(good[0].int().view(torch.float32), good[1])


def test_refusals_of_a_known_call() -> None:
    dst, src = rows(1), rows(2)
    load(dst, src)
    with unchanged([dst]), pytest.raises(IndexError, match="is 9, out of range for 6 slots"):
        kvcacheio.transfer_kv_per_layer_mla(src, dst, torch.tensor([9]), torch.tensor([1]), WIDTH)
    for quota in (0, -1, 1 << 63):
        with unchanged([dst]), pytest.raises(ValueError, match="block_quota must be"):
            kvcacheio.transfer_kv_per_layer_mla(src, dst, FROM, AT, WIDTH, quota)
    with unchanged([dst]), pytest.raises(ValueError, match="num_warps_per_block must be 1 or more"):
        kvcacheio.transfer_kv_per_layer_mla(src, dst, FROM, AT, WIDTH, None, 0)


def test_lists_of_tensors_are_told_apart() -> None:
    """The same tensors, divided between the sides in another way, are another call."""
    pool = [torch.zeros(3, 1, PAGE, WIDTH, dtype=torch.uint8) for _ in range(2)]
    layers = [torch.zeros(3 * PAGE, WIDTH, dtype=torch.uint8) for _ in range(2)]
    kvcacheio.transfer_kv_per_layer_direct_pf_lf(pool, layers, pages([1]), pages([2]), 0, PAGE)
    for src, dst in ((pool[1:], [*layers, pool[0]]), ([layers[1], *pool], layers[:1])):
        with pytest.raises(ValueError, match="dst_ptrs"):
            kvcacheio.transfer_kv_per_layer_direct_pf_lf(src, dst, pages([1]), pages([2]), 0, PAGE)


def test_what_is_forgotten_is_worked_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """More forms, and more calls of one form, than are kept."""
    monkeypatch.setattr(calls, "_MOST_FORMS", 2)
    memory, src = torch.zeros(5000 + ROWS * WIDTH, dtype=torch.uint8), rows(2)
    for start in [*range(5000), *range(5)]:
        dst = memory[start:].as_strided((ROWS, WIDTH), (WIDTH, 1))
        load(dst, src)
        assert dst[1].tolist() == src[3].tolist()
    for size in (4, 8, 12, 4, 8, 12):
        memory.zero_()
        kvcacheio.transfer_kv_per_layer_mla(src, memory[: ROWS * WIDTH], FROM[:1], AT[:1], size)
        assert memory[size : 2 * size].tolist() == src.flatten()[3 * size : 4 * size].tolist()
    assert len(calls._forms) <= 2


def test_the_planes_that_are_kept_have_a_bound() -> None:
    """One call may have a thousand of them, each of which costs some memory."""
    plane, index = torch.zeros(1), torch.tensor([0])
    watched = weakref.ref(plane.untyped_storage())
    torch.ops.hicache.keep_call([], [], index, index, -1, [plane], [plane], 0, 0)
    del plane
    assert watched() is not None
    others = [torch.zeros(1)] * (1 << 14)
    torch.ops.hicache.keep_call([], [], index, index, -2, others, others, 0, 0)
    assert watched() is None


@pytest.mark.parametrize("written", ["first", "clone"])
def test_memory_that_is_shared_until_it_is_written(written: str) -> None:
    """A lazy clone has the address of the first tensor, a write to either is none to the other."""
    first, src = rows(1), rows(2)
    load(first, src)
    first.zero_()
    clone = torch._lazy_clone(first)
    dst, other = (first, clone) if written == "first" else (clone, first)
    load(dst, src)
    assert torch.equal(dst[AT], src[FROM])
    assert not other.any()


def test_a_size_that_is_a_tensor() -> None:
    """torch takes one for an int. What it holds in this call counts."""
    dst, src, size = torch.zeros(4 * WIDTH, dtype=torch.uint8), rows(2).view(-1), torch.tensor(WIDTH)
    one = torch.tensor([1])
    kvcacheio.transfer_kv_per_layer_mla(src, dst, one, one, size)
    size.fill_(4)
    dst.zero_()
    kvcacheio.transfer_kv_per_layer_mla(src, dst, one, one, size)
    assert torch.equal(dst[4:8], src[4:8])
    assert not dst[8:].any()


def test_modes_and_transforms_see_no_known_call() -> None:
    """Each is asked about transfer_kv, as it would be in a first call."""
    dst, src = rows(1), rows(2)
    load(dst, src)
    with unchanged([dst]), FakeTensorMode(allow_non_fake_inputs=True):
        load(dst, src.add_(1))
    for each in (dst, src):
        load(each, each.clone())
    with unchanged([dst]), pytest.raises(ValueError, match="memory of its own, got a TwoTensor"):
        load(TwoTensor(dst, dst), TwoTensor(src, src))

    def loads_of(indices: Tensor) -> Tensor:
        kvcacheio.transfer_kv_per_layer_mla(src, dst, indices, AT, WIDTH)
        return indices

    with unchanged([dst]), pytest.raises(RuntimeError, match="hicache::transfer_kv"):
        torch.func.vmap(loads_of)(torch.stack([FROM, FROM]))

    def loads_from(source: Tensor) -> Tensor:
        kvcacheio.transfer_kv_per_layer_mla(source, floats, FROM, AT, 4 * WIDTH)
        return source.sum()

    floats, sources = torch.zeros(ROWS, WIDTH), torch.ones(ROWS, WIDTH)
    loads_from(sources)
    with unchanged([floats]), pytest.raises(RuntimeError, match="data pointer"):
        torch.func.grad(loads_from)(sources.add_(1))


FORKS = """
    import os, signal, threading, time
    import torch
    from torch_hicache.integrations.sglang import kvcacheio

    one, tensors = torch.tensor([0]), [torch.zeros(1) for _ in range(600)]
    for last in tensors:  # long descriptions that differ at their ends, so that each look takes a while
        torch.ops.hicache.keep_call(tensors, [last], one, one, 1 << 40, [], [], 0, 0)
    unknown = torch.zeros(1)

    def look():
        while True:
            torch.ops.hicache.transfer_known(tensors, [unknown], one, one, 1 << 40, 0)

    def load():
        kvcacheio.transfer_kv_per_layer_mla(rows, rows.clone(), one, one, 8)

    rows = torch.zeros(4, 8, dtype=torch.uint8)
    for _ in range(2):
        threading.Thread(target=look, daemon=True).start()
    load()
    for _ in range(40):
        child = os.fork()
        if not child:
            load()
            os._exit(0)
        end = time.monotonic() + 20
        while os.waitpid(child, os.WNOHANG)[0] == 0:
            if time.monotonic() > end:
                os.kill(child, signal.SIGKILL)
                os._exit(1)
            time.sleep(0.001)
    os._exit(0)
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_child_of_a_process_whose_threads_look_for_calls() -> None:
    script = textwrap.dedent(FORKS)
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True, timeout=300)


@pytest.mark.parametrize("is_known", [False, True])
def test_what_is_no_tensor_is_named(is_known: bool) -> None:
    layers = [torch.zeros(8, 2, 4) for _ in "kv"]
    pool = [torch.zeros(8, 3, 2, 4) for _ in "kv"]
    at = torch.arange(2)
    good = (pool[0], layers[0], pool[1], layers[1], at, at, 1, 32, 96)
    if is_known:
        kvcacheio.transfer_kv_per_layer_pf_lf(*good)
    for place, name in enumerate(("src_k", "dst_k", "src_v", "dst_v", "src_indices", "dst_indices")):
        for wrong in (None, [1], "x"):
            call = [*good[:place], wrong, *good[place + 1 :]]
            with pytest.raises(TypeError, match=rf"\[sglang\] {name} must be a tensor, got"):
                kvcacheio.transfer_kv_per_layer_pf_lf(*call)
