"""Pools: SGLang's shapes, every view a view of the right bytes, sizes that count everything."""

import copy
import gc
import pickle
import subprocess
import sys
from collections.abc import Sequence

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

from torch_hicache import DevicePool, HostPool, PlaneSpec, transfer_kv
from torch_hicache import pool as pool_module
from torch_hicache.layout import LAYOUTS, PoolShape
from torch_hicache.pool import Pool

KEY = PlaneSpec("key", (2, 11), torch.bfloat16)
VALUE = PlaneSpec("value", (2, 11), torch.bfloat16)
NARROW_VALUE = PlaneSpec("value", (2, 5), torch.bfloat16)
LATENT = PlaneSpec("latent", (1, 13), torch.float8_e4m3fn)
SCALES = PlaneSpec("scales", (1, 3), torch.float32)
INDEXER = PlaneSpec("indexer_key", (1, 17), torch.uint8)

MODELS = {
    "mha": [KEY, VALUE],
    "mha_narrow_value": [KEY, NARROW_VALUE],
    "k_only": [KEY],
    "mla": [LATENT],
    "mla_extra_planes": [LATENT, SCALES, INDEXER],
    "apart": [KEY, SCALES, VALUE],  # two of one shape with another between them
}
LAYERS, SLOTS, PAGE_SIZE = 3, 35, 7
BY_SLOT = ("layer_first", "page_first")


def units_of(layout: str) -> tuple[str, ...]:
    return ("slot", "page") if layout in BY_SLOT else ("page",)


def fingerprint(pool: Pool, seed: int) -> None:
    """Random bytes, in all planes: two that agree by chance are rare enough."""
    generator = torch.Generator().manual_seed(seed)
    for buffer in pool.buffers:
        flat = buffer.view(torch.uint8)
        flat.copy_(torch.randint(0, 256, flat.shape, dtype=torch.uint8, generator=generator))


def bytes_of(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.cpu().contiguous().view(torch.uint8) for tensor in tensors]


def assert_same_bytes(found: Sequence[torch.Tensor], wanted: Sequence[torch.Tensor]) -> None:
    pairs = zip(bytes_of(found), bytes_of(wanted), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


# --- Shapes: each against SGLang's, written out ------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "mha", "mla"),
    [
        ("layer_first", (2, 32, 4096, 8, 128), (61, 4096, 1, 576)),
        ("page_first", (2, 4096, 32, 8, 128), (4096, 61, 1, 576)),
        ("page_first_direct", (2, 64, 32, 64, 8, 128), (64, 61, 64, 1, 576)),
        ("page_head", (2, 64, 8, 64, 32, 128), None),
    ],
)
def test_buffers_have_sglangs_shapes(
    layout: str, mha: tuple[int, ...], mla: tuple[int, ...] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Shapes of real models, of which no byte is needed.
    def empty_host(
        sizes: tuple[int, ...], dtype: torch.dtype, _device: object, **options: object
    ) -> torch.Tensor:
        units.append((options["piece_unit_bytes"], options["plane_unit_bytes"]))
        return torch.empty(sizes, dtype=dtype)

    units: list[tuple[object, object]] = []
    monkeypatch.setattr(pool_module, "empty_host", empty_host)
    key, value = (PlaneSpec(name, (8, 128), torch.bfloat16) for name in ("key", "value"))
    pool = HostPool([key, value], 32, 4096, "cpu", layout, 64)
    assert [buffer.shape for buffer in pool.buffers] == [mha]
    # A page of one layer, or of all, is in one piece of registered memory.
    layers = 1 if layout == "layer_first" else 32
    assert units == [(64 * layers * 2048, 4096 * layers * 2048)]
    assert pool.nbytes == 2 * 32 * 4096 * 8 * 128 * 2 == sum(buffer.nbytes for buffer in pool.buffers)
    if mla:
        latent = PlaneSpec("latent", (1, 576), torch.bfloat16)
        pool = HostPool([latent], 61, 4096, "cpu", layout, 64)
        assert [buffer.shape for buffer in pool.buffers] == [mla]
        assert pool.bytes_per_slot == 61 * 1152


def test_key_and_value_of_different_width_have_a_buffer_each() -> None:
    key = PlaneSpec("key", (4, 192), torch.bfloat16)
    value = PlaneSpec("value", (4, 128), torch.bfloat16)
    pool = HostPool([key, value], 5, 12, "cpu", "page_first_direct", 4)
    assert [buffer.shape for buffer in pool.buffers] == [(3, 5, 4, 4, 192), (3, 5, 4, 4, 128)]
    assert pool.bytes_per_slot == 5 * 4 * (192 + 128) * 2


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_views_are_the_layouts_views_of_the_buffers(model: str, layout: str, device: str) -> None:
    specs = MODELS[model]
    pool = HostPool(specs, LAYERS, SLOTS, device, layout, PAGE_SIZE)
    fingerprint(pool, 1)
    # Planes of one row shape and dtype share a buffer, in the order of their declaration.
    groups: dict[tuple[object, ...], list[PlaneSpec]] = {}
    for spec in specs:
        groups.setdefault((spec.row_shape, spec.dtype), []).append(spec)
    expected: dict[str, torch.Tensor] = {}
    for buffer, group in zip(pool.buffers, groups.values(), strict=True):
        for i, spec in enumerate(group):
            expected[spec.name] = buffer[i] if len(group) > 1 else buffer
    for unit in units_of(layout):
        stacks = []
        for spec in specs:
            shape = PoolShape(layout, LAYERS, SLOTS, PAGE_SIZE, spec.row_shape)
            stacks.append(shape.stack(expected[spec.name], unit=unit))
        for found, wanted in zip(pool.stacks(unit), stacks, strict=True):
            assert found.data_ptr() == wanted.data_ptr()
            assert (found.shape, found.stride()) == (wanted.shape, wanted.stride())
            assert found.dtype == wanted.dtype
        rows = (SLOTS,) if unit == "slot" else (SLOTS // PAGE_SIZE, PAGE_SIZE)
        planes = [stack[layer] for layer in range(LAYERS) for stack in stacks]
        assert_same_bytes(pool.planes(unit=unit), planes)
        for layer in range(LAYERS):
            views = pool.planes(layer, unit)
            assert [view.shape for view in views] == [(*rows, *spec.row_shape) for spec in specs]
            assert_same_bytes(views, [stack[layer] for stack in stacks])


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
def test_all_of_a_slot_comes_back(model: str, layout: str, device: str) -> None:
    """Store, then load elsewhere; the rest of both pools keeps its bytes."""
    specs = MODELS[model]
    device_pool = DevicePool(specs, LAYERS, 28, device, PAGE_SIZE)
    host_pool = HostPool(specs, LAYERS, SLOTS, device, layout, PAGE_SIZE)
    fingerprint(device_pool, 2)
    fingerprint(host_pool, 3)
    host_before = [tensor.clone() for tensor in host_pool.planes(unit="page")]
    device_before = [tensor.to("cpu", copy=True) for tensor in device_pool.planes(unit="page")]
    pages = [torch.tensor(values) for values in ([3, 0], [4, 2], [1, 2])]
    transfer_kv(host_pool.planes(unit="page"), device_pool.planes(unit="page"), pages[1], pages[0])
    transfer_kv(
        device_pool.stacks("page"),
        host_pool.stacks("page"),
        pages[2],
        pages[1],
        slot_dim=1,
        method="kernel",
    )
    if device != "cpu":
        torch.accelerator.synchronize()
    for before, rows in zip(host_before, device_before, strict=True):
        before[pages[1]] = rows[pages[0]]
        rows[pages[2]] = before[pages[1]]
    assert_same_bytes(host_pool.planes(unit="page"), host_before)
    assert_same_bytes([tensor.cpu() for tensor in device_pool.planes(unit="page")], device_before)


# --- What a pool tells of itself -----------------------------------------------------------------------


def test_the_numbers_of_a_pool() -> None:
    pool = HostPool(MODELS["mla_extra_planes"], [0, 2, 6], 28, "cpu", "page_first", 7)
    assert pool.bytes_per_slot == 3 * (13 + 12 + 17)
    assert pool.nbytes == 28 * 126 == sum(buffer.nbytes for buffer in pool.buffers)
    assert (pool.num_layers, pool.layer_ids) == (3, (0, 2, 6))
    assert (pool.num_slots, pool.num_pages, pool.page_size) == (28, 4, 7)
    assert pool.plane_names == ("latent", "scales", "indexer_key")
    assert (pool.layout, pool.device, pool.has_slots) == ("page_first", torch.device("cpu"), True)
    assert repr(pool) == (
        "HostPool(latent, scales, indexer_key; 3 layers, 28 slots in pages of 7, page_first, "
        "3,528 bytes, cpu)"
    )


def test_a_device_pool_starts_with_zeros_and_the_index_of_its_device(device: str) -> None:
    pool = DevicePool(MODELS["mha_narrow_value"], 2, 8, device)
    assert all(not bool(stack.cpu().any()) for stack in pool.stacks())
    assert [stack.shape for stack in pool.stacks()] == [(2, 8, 2, 11), (2, 8, 2, 5)]
    assert pool.device == pool.stacks()[0].device
    assert HostPool(MODELS["mha"], 2, 8, device).device == pool.device


@pytest.mark.parametrize("layers", [[0, 2, 6], range(16, 19), (5,)])
def test_layers_go_by_their_ids(layers: Sequence[int]) -> None:
    pool = DevicePool([KEY], layers, 4, "cpu")
    fingerprint(pool, 4)
    for i, layer in enumerate(layers):
        assert_same_bytes(pool.planes(layer), [pool.stacks()[0][i]])
    shown = {3: "0, 2, 6" if 2 in layers else "16 to 18", 1: "5"}[len(layers)]
    for missing in (1, -1, 99):
        with pytest.raises(
            ValueError, match=rf"^\[DevicePool\] layer must be one of {shown}, got {missing}\.$"
        ):
            pool.planes(missing)


def test_a_budget_is_as_many_pages_as_fit() -> None:
    specs = MODELS["mla_extra_planes"]
    page_bytes = 4 * LAYERS * (13 + 12 + 17)
    for budget, num_slots in ((page_bytes, 4), (2 * page_bytes - 1, 4), (2 * page_bytes, 8)):
        pool = HostPool(specs, LAYERS, None, "cpu", "page_first", 4, budget_bytes=budget)
        assert pool.num_slots == num_slots
        assert pool.nbytes <= budget
    with pytest.raises(
        ValueError,
        match=r"^\[HostPool\] budget_bytes must hold a page of 504 bytes \(4 slots of 126 bytes in 3 "
        r"layers\), got 503\.$",
    ):
        HostPool(specs, LAYERS, None, "cpu", "page_first", 4, budget_bytes=503)


def test_a_pool_has_slots_to_give() -> None:
    pool = HostPool([KEY], 1, 28, "cpu", "page_head", 7)
    slots, pages = pool.allocate(14), pool.allocate(1, unit="page")
    assert (slots.tolist(), pages.tolist(), pool.available) == ([*range(14)], [2], 7)
    pool.hold(slots)
    pool.free(slots)
    pool.free(pages, unit="page")
    assert pool.available == 14
    pool.release(slots)
    assert pool.available == 28


# --- Adopted tensors -----------------------------------------------------------------------------------


def layer_tensors(num: int, *sizes: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    return [torch.zeros(sizes, dtype=dtype) for _ in range(num)]


def test_adopted_tensors_of_each_layer_are_the_planes() -> None:
    keys, scales = layer_tensors(3, 12, 2, 8), layer_tensors(3, 12, 4, dtype=torch.float32)
    pool = DevicePool.adopt({"key": keys, "scales": scales}, page_size=4, layer_ids=[0, 2, 6])
    assert pool.specs == (
        PlaneSpec("key", (2, 8), torch.bfloat16),
        PlaneSpec("scales", (4,), torch.float32),
    )
    assert (pool.num_slots, pool.layer_ids, pool.layout) == (12, (0, 2, 6), "adopted")
    assert pool.planes(2)[0] is keys[1]
    assert pool.planes(2)[1] is scales[1]
    wanted = [tensor for pair in zip(keys, scales, strict=True) for tensor in pair]
    assert all(a is b for a, b in zip(pool.planes(), wanted, strict=True))
    assert pool.planes(6, "page")[0].shape == (3, 4, 2, 8)
    assert pool.planes(6, "page")[0].data_ptr() == keys[2].data_ptr()
    assert {t.data_ptr() for t in pool.buffers} == {t.data_ptr() for t in keys + scales}
    assert not pool.has_stacks
    with pytest.raises(ValueError, match=r"^\[DevicePool\] stacks need one tensor .* Use planes\(\)\.$"):
        pool.stacks()
    with pytest.raises(ValueError, match="unit must be 'slot' or 'page', got 'token'"):
        pool.planes(unit="token")


def test_an_adopted_stack_keeps_its_strides() -> None:
    """Padded rows, and slots in front of layers."""
    base = torch.zeros(12, 3, 2, 10, dtype=torch.bfloat16)
    stack = base.transpose(0, 1)[..., :8]
    pool = DevicePool.adopt({"key": stack}, page_size=4)
    assert pool.has_stacks
    assert pool.stacks()[0].data_ptr() == base.data_ptr()
    assert pool.stacks()[0].stride() == stack.stride()
    assert pool.planes(2, "page")[0].stride() == (4 * 60, 60, 10, 1)
    assert pool.buffers[0].shape == stack.shape
    pool.planes(1)[0].fill_(3)
    assert float(base[:, 1, :, :8].float().mean()) == 3
    assert not bool(base[:, 1, :, 8:].any())


def test_a_stack_and_a_list_can_be_adopted_together() -> None:
    keys, values = torch.zeros(3, 12, 2, 8), layer_tensors(3, 12, 2, 8)
    pool = DevicePool.adopt({"key": keys, "value": values})
    assert [view.dtype for view in pool.planes(1)] == [torch.float32, torch.bfloat16]
    assert pool.planes(1)[0].data_ptr() == keys[1].data_ptr()


def test_holding_needs_no_allocation_in_an_adopted_pool() -> None:
    pool = DevicePool.adopt({"key": torch.zeros(2, 12, 4)})
    pool.hold(torch.tensor([5, 6, -1]))
    assert pool.available == 10
    pool.release(torch.tensor([5, 6, -1]))
    assert pool.available == 12


@pytest.mark.parametrize(
    ("planes", "options", "text"),
    [
        ({}, {}, "adopt needs a plane, got none"),
        ({"key": torch.zeros(3, 4)}, {}, r"plane 'key' must be a stack \[layers, slots, \*row\], or .*"),
        ({"key": []}, {}, r"plane 'key' must be a stack \[layers, slots, \*row\], or .*"),
        (
            {"key": layer_tensors(2, 4)},
            {},
            r"plane 'key' must be a stack \[layers, slots, \*row\], or .*",
        ),
        (
            {"key": [*layer_tensors(1, 4, 2), *layer_tensors(1, 4, 3)]},
            {},
            r".*: layer 1 of 'key' must be \[4, 2\] of torch.bfloat16 on cpu, got \[4, 3\] of "
            "torch.bfloat16 on cpu",
        ),
        (
            {"key": layer_tensors(2, 4, 2), "value": layer_tensors(2, 6, 3)},
            {},
            r".*: layer 0 of 'value' must be \[4, 3\] of .*, got \[6, 3\] of .*",
        ),
        (
            {"key": [*layer_tensors(1, 4, 2), *layer_tensors(1, 4, 2, dtype=torch.float32)]},
            {},
            r".*: layer 1 of 'key' must be .* of torch.bfloat16 .*, got .* of torch.float32 on cpu",
        ),
        (
            {"key": layer_tensors(2, 4, 2), "value": [torch.zeros(4, 2, device="meta")] * 2},
            {},
            r".*: layer 0 of 'value' must be .* on cpu, got .* on meta",
        ),
        (
            {"key": layer_tensors(2, 4, 2), "value": layer_tensors(3, 4, 2)},
            {},
            "all planes must have the same layers, got 2 of 'key' and 3 of 'value'",
        ),
        (
            {"key": layer_tensors(2, 4, 2)},
            {"layer_ids": [1]},
            "layer_ids must name the 2 layers of the planes, got 1",
        ),
    ],
)
def test_tensors_that_do_not_fit_together_are_refused(planes: dict, options: dict, text: str) -> None:
    with pytest.raises(ValueError, match=rf"^\[DevicePool\] {text}\.$"):
        DevicePool.adopt(planes, **options)


# --- Refusals ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"planes": []}, r"\[HostPool\] planes must be one or more, of different names, got \[\]"),
        (
            {"planes": [KEY, KEY]},
            r"\[HostPool\] planes must be one or more, of different names, got \['key', 'key'\]",
        ),
        ({"num_layers": 0}, r"\[HostPool\] num_layers must be 1 or more, .*, got 0"),
        ({"num_layers": [0, 3, 0]}, r"\[HostPool\] num_layers must be .*, got \[0, 3, 0\]"),
        ({"num_layers": [-1, 0]}, r"\[HostPool\] num_layers must be .*, got \[-1, 0\]"),
        ({"num_layers": []}, r"\[HostPool\] num_layers must be .*, got \[\]"),
        ({"num_slots": 10}, r"\[layout\] num_slots must be whole pages of 4, got 10"),
        ({"num_slots": 0}, r"\[layout\] num_slots must be 1 or more, got 0"),
        ({"page_size": 0}, r"\[layout\] page_size must be 1 or more, got 0"),
        ({"page_size": 0, "num_slots": None, "budget_bytes": 9}, r"\[layout\] num_slots must be 1 or .*"),
        ({"layout": "rows"}, r"\[layout\] layout must be one of .*, got 'rows'"),
        (
            {"layout": "page_head", "planes": [PlaneSpec("k", (8,), torch.int8)]},
            r"\[layout\] page_head .*",
        ),
        ({"planes": [PlaneSpec("k", (0,), torch.int8)]}, r"\[layout\] row_shape must have .*"),
        ({"num_slots": None}, r"\[HostPool\] needs one of .*, got None and None"),
        ({"budget_bytes": 1 << 20}, r"\[HostPool\] needs one of .*, got 8 and 1048576"),
        ({"kind": "velvet"}, r"\[empty_host\] kind must be one of .*, got 'velvet'"),
    ],
    ids=str,
)
def test_impossible_pools_are_refused(change: dict, text: str) -> None:
    arguments = {"planes": [KEY], "num_layers": 2, "num_slots": 8, "device": "cpu", "page_size": 4}
    with pytest.raises(ValueError, match=rf"^{text}\.$"):
        HostPool(**(arguments | change))


@pytest.mark.parametrize("layout", ["page_first_direct", "page_head"])
def test_layouts_without_slots_say_so(layout: str) -> None:
    pool = HostPool([KEY], 2, 8, "cpu", layout, 4)
    assert not pool.has_slots
    for views in (pool.stacks, pool.planes, lambda: pool.planes(1)):
        with pytest.raises(ValueError, match=rf"^\[layout\] {layout} is addressable by page only"):
            views()


def test_a_device_pool_that_does_not_fit_is_a_memory_error() -> None:
    spec = PlaneSpec("key", (1 << 20,), torch.uint8)
    with pytest.raises(
        MemoryError,
        match=r"^\[DevicePool\] cpu gave no memory for plane 'key' of a pool of "
        r"1,152,921,504,606,846,976 bytes",
    ):
        DevicePool([spec], 1 << 10, 1 << 30, "cpu", 1 << 30)


@pytest.mark.parametrize("duplicate", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_pool_is_not_duplicated(duplicate: object) -> None:
    for pool in (HostPool([KEY], 1, 4), DevicePool([KEY], 1, 4, "cpu")):
        with pytest.raises(
            TypeError, match=rf"^\[{type(pool).__name__}\] a pool can't be pickled or copied"
        ):
            duplicate(pool)  # type: ignore[operator]


def test_dropping_a_pool_and_its_views_frees_it(device: str) -> None:
    """No cycle keeps a pool, which would wait for the garbage collector."""
    pool = HostPool([KEY, SCALES], 2, 8, device)
    storages = [StorageWeakRef(buffer.untyped_storage()) for buffer in pool.buffers]
    view = pool.planes(1)[0]
    device_view = pool.device_view().planes(1)[1]
    gc.disable()
    try:
        del pool
        assert [storage.expired() for storage in storages] == [False, False]
        del device_view
        assert [storage.expired() for storage in storages] == [False, True]
        del view
        assert [storage.expired() for storage in storages] == [True, True]
    finally:
        gc.enable()


# --- Compiled graphs -----------------------------------------------------------------------------------


def test_addresses_are_static_as_dynamo_marks_them(device: str) -> None:
    marked = torch.zeros(1)
    torch._dynamo.mark_static_address(marked)
    host = HostPool([KEY, VALUE, SCALES], 2, 4, device)
    tensors = layer_tensors(2, 4, 2)
    adopted = DevicePool.adopt({"key": torch.zeros(2, 4, 2)})
    pools = [host, host.device_view(), DevicePool([KEY], 2, 4, device), adopted]
    inputs = [buffer for pool in pools for buffer in pool._buffers]
    for tensor in (*inputs, *DevicePool.adopt({"key": tensors}).planes()):
        assert tensor.__dict__ == marked.__dict__


def test_pools_are_made_without_dynamo() -> None:
    script = (
        "import sys, torch, torch_hicache as h; spec = h.PlaneSpec('key', (4,), torch.int8); "
        "h.HostPool([spec], 2, 8); h.DevicePool([spec], 2, 8, 'cpu'); "
        "raise SystemExit('torch._dynamo' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=120, check=False).returncode == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_compiled_graph_closes_over_pools(layout: str, device: str) -> None:
    """Layer by layer, reads between transfers, then all at once: the results of eager."""
    specs = MODELS["mha"]
    host_pool = HostPool(specs, LAYERS, SLOTS, device, layout, PAGE_SIZE)
    host = host_pool.device_view()
    pools = [DevicePool(specs, LAYERS, 28, device, PAGE_SIZE) for _ in range(2)]
    fingerprint(host_pool, 5)

    def step(pool: DevicePool, dst: torch.Tensor, src: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.int64, device=device)
        for layer in range(LAYERS):
            transfer_kv(pool.planes(layer, "page"), host.planes(layer, "page"), dst, src)
            total = total + sum(plane.view(torch.uint8).long().sum() for plane in pool.planes(layer))
        transfer_kv(pool.stacks("page"), host.stacks("page"), src % 4, src, slot_dim=1)
        return total

    dst, src = torch.tensor([3, 0], device=device), torch.tensor([4, 2], device=device)
    torch._dynamo.reset()
    found = torch.compile(step, fullgraph=True)(pools[0], dst, src)
    assert torch.equal(found, step(pools[1], dst, src))
    assert_same_bytes(pools[0].stacks(), pools[1].stacks())
    assert bool(pools[0].stacks()[1].view(torch.uint8).any())


@pytest.mark.backend("cuda")
def test_a_device_view_shares_memory_and_slots() -> None:
    pool = HostPool(MODELS["apart"], LAYERS, SLOTS, "cuda", "page_first", PAGE_SIZE)
    view = pool.device_view()
    assert pool.device_view() is view
    assert {tensor.device for tensor in view.planes()} == {pool.device}
    fingerprint(pool, 6)
    assert_same_bytes(view.planes(), pool.planes())
    taken = view.allocate(7)
    assert pool.available == SLOTS - 7
    pool.free(taken)
    assert view.available == SLOTS


def test_on_the_cpu_a_pool_is_its_own_view() -> None:
    pool = HostPool([KEY], 1, 4)
    assert pool.device_view() is pool


@pytest.mark.parametrize("layers", [[0.5, 2], True, ["a", "b"], [True, 0], 1.0, None])
def test_layer_ids_are_integers(layers: object) -> None:
    with pytest.raises(ValueError, match="num_layers must be 1 or more, or ids of 0 or more, once each"):
        DevicePool([KEY], layers, 4, "cpu")  # type: ignore[arg-type]


def test_a_row_shape_may_be_a_list() -> None:
    spec = PlaneSpec("key", [2, 4], torch.half)  # type: ignore[arg-type]
    assert spec == PlaneSpec("key", (2, 4), torch.half)
    assert HostPool([spec], 2, 4).planes(0)[0].shape == (4, 2, 4)


@pytest.mark.parametrize("num_slots", [1 << 45, 1 << 50, 1 << 62, 1 << 70])
@pytest.mark.parametrize("kind", ["host", "device"])
def test_a_pool_that_no_machine_holds_is_refused_before_anything_is_allocated(
    kind: str, num_slots: int
) -> None:
    plane = PlaneSpec("key", (2,), torch.uint8)
    with pytest.raises(MemoryError, match=r"Pool\] asked for .*free for this process are"):
        HostPool([plane], 1, num_slots) if kind == "host" else DevicePool([plane], 1, num_slots, "cpu")


def test_n_is_an_integer() -> None:
    pool = DevicePool([KEY], 1, 8, "cpu")
    for n in (2.0, "2", None):
        with pytest.raises(ValueError, match=r"\[allocate\] n must be an integer"):
            pool.allocate(n)  # type: ignore[arg-type]
    assert pool.allocate(torch.tensor(2)).tolist() == [0, 1]  # type: ignore[arg-type]
    assert pool.available == 6


def test_adopted_tensors_must_be_what_a_transfer_can_serve() -> None:
    one = torch.zeros(5, 3)
    for planes, text in (
        ({"key": [one, one]}, "share memory"),
        ({"key": torch.zeros(1, 5, 3).expand(2, 5, 3)}, "share memory"),
        ({"key": torch.zeros(2, 5, 3, requires_grad=True)}, "requires grad"),
        ({"key": [one.to_sparse(), one.to_sparse()]}, "sparse"),
    ):
        with pytest.raises(ValueError, match=text):
            DevicePool.adopt(planes)
