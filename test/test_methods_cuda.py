"""copy_engine and staged on a GPU: the reference's bytes, whatever runs, rings and streams there are."""

import gc
import mmap
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import torch_hicache
from torch_hicache.plan import MethodTable, explain, set_method_table
from torch_hicache.testing import (
    Snapshot,
    allocate_bytes,
    check_transfer,
    fill_pool,
    random_entries,
    strided_tensor,
    unchanged,
)

pytestmark = pytest.mark.backend("cuda")
transfer_kv = torch.ops.hicache.transfer_kv
METHODS = ["copy_engine", "staged"]
DELAY_CYCLES = 200_000_000  # about 0.1 s


@pytest.fixture(params=[1 << 16, 32 << 20], ids=["small_ring", "ring"])
def ring(request: pytest.FixtureRequest) -> Iterator[int]:
    """A ring whose buffers are filled many times, and the default one."""
    set_method_table("cuda", MethodTable(staging_bytes=request.param))
    yield request.param
    set_method_table("cuda", MethodTable())


def pools(
    direction: str,
    layout: str = "layer_first",
    layers: int = 5,
    slots: int = 300,
    *,
    row: int = 200,
    host_memory: str = "pinned",
) -> tuple[Tensor, Tensor]:
    """Destination and source, `[layers, slots, row]`."""
    order = (1, 0, 2) if layout == "page_first" else None
    host = strided_tensor((layers, slots, row), torch.uint8, host_memory, "cuda", order=order)
    device = strided_tensor((layers, slots + 7, row), torch.uint8, "device", "cuda", padding={1: 8})
    fill_pool([host], 1)
    fill_pool([device], 1, seed=1)
    return (device, host) if direction == "load" else (host, device)


def slot_lists(kind: str, slots: int = 300) -> tuple[Tensor, Tensor]:
    if kind == "scattered":
        return random_entries(200, slots, slots)
    if kind == "runs":
        pages = torch.randperm(slots // 10)[:20]
        other = torch.randperm(slots // 10)[:20]
        within = torch.arange(10)
        return (pages.unsqueeze(1) * 10 + within).flatten(), (other.unsqueeze(1) * 10 + within).flatten()
    if kind == "descending":
        return torch.arange(250, 50, -1), torch.arange(290, 90, -1)
    if kind == "host_descends":
        return torch.arange(50, 250), torch.arange(290, 90, -1)
    if kind == "padded":
        dst, src = random_entries(200, slots, slots)
        dst[::7] = -1
        src[3::11] = -1
        return dst, src
    if kind == "duplicates":
        dst, src = random_entries(200, slots, slots)
        dst[100:150] = dst[20:70]
        src[5:9] = src[4]
        return dst, src
    return torch.tensor([17]), torch.tensor([3])


KINDS = ["scattered", "runs", "descending", "host_descends", "padded", "duplicates", "one"]


def host_index_first(direction: str, dst: Tensor, src: Tensor, device_side: str) -> tuple[Tensor, Tensor]:
    """The device pool's indices moved to `device_side`."""
    return (dst.to(device_side), src) if direction == "load" else (dst, src.to(device_side))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
@pytest.mark.parametrize("direction", ["load", "store"])
def test_copy_engine_is_the_reference(direction: str, layout: str, kind: str) -> None:
    dst, src = pools(direction, layout)
    check_transfer([dst], [src], *slot_lists(kind), slot_dim=1, method="copy_engine")


# Duplicates among indices on the device are the caller's error.
STAGED = [
    (direction, kind, where)
    for direction in ("load", "store")
    for kind in KINDS
    for where in ("cpu", "cuda")
    if (direction, kind, where) != ("load", "duplicates", "cuda")
]


@pytest.mark.parametrize(("direction", "kind", "device_side"), STAGED)
@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_staged_is_the_reference(
    direction: str, layout: str, kind: str, device_side: str, ring: int
) -> None:
    dst, src = pools(direction, layout)
    indices = host_index_first(direction, *slot_lists(kind), device_side)
    check_transfer([dst], [src], *indices, slot_dim=1, method="staged")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("row", [1, 3, 16, 576, 656, 4098])
@pytest.mark.parametrize("direction", ["load", "store"])
def test_rows_of_any_size(direction: str, row: int, method: str, ring: int) -> None:
    dst, src = pools(direction, row=row, layers=3)
    check_transfer([dst], [src], *slot_lists("scattered"), slot_dim=1, method=method)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("direction", ["load", "store"])
def test_lists_of_planes_of_several_shapes(direction: str, method: str, ring: int) -> None:
    """K and V of different width, scales, another layout, more planes than a launch takes."""
    pairs = [pools(direction, layers=1, row=row) for row in (128, 192, 4) * 60]
    pairs.append(pools(direction, "page_first", layers=1))
    dst, src = ([pair[side][0] for pair in pairs] for side in (0, 1))
    check_transfer(dst, src, *slot_lists("runs"), method=method)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("direction", ["load", "store"])
def test_pages_as_rows_and_permuted_heads(direction: str, method: str, ring: int) -> None:
    """page_head against layer_first, by page: no two dimensions continue each other on both sides."""
    layers, pages, size, heads, dim = 3, 20, 4, 5, 24
    host = strided_tensor(
        (layers, pages, size, heads, dim), torch.uint8, "pinned", "cuda", order=(1, 3, 2, 0, 4)
    )
    device = strided_tensor((layers, pages, size, heads, dim), torch.uint8, "device", "cuda")
    fill_pool([host], 1)
    fill_pool([device], 1, seed=1)
    dst, src = (device, host) if direction == "load" else (host, device)
    check_transfer([dst], [src], *random_entries(15, pages, pages), slot_dim=1, method=method)


@pytest.mark.parametrize("method", METHODS)
def test_a_row_larger_than_the_ring(method: str, ring: int) -> None:
    dst, src = pools("load", layers=2, slots=3, row=300_001)
    check_transfer([dst], [src], torch.tensor([2, 0]), torch.tensor([1, 1]), slot_dim=1, method=method)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("direction", ["load", "store"])
def test_pageable_memory_is_served(direction: str, method: str) -> None:
    dst, src = pools(direction, host_memory="cpu")
    check_transfer([dst], [src], *slot_lists("padded"), slot_dim=1, method=method)
    check_transfer([dst], [src], *slot_lists("runs"), slot_dim=1)
    if method == "staged":
        for index_dtype in (torch.int32, torch.int64):
            dst_list, src_list = (indices.to(index_dtype) for indices in slot_lists("padded"))
            indices = host_index_first(direction, dst_list, src_list, "cuda")
            check_transfer([dst], [src], *indices, slot_dim=1)


def test_a_count_shortens_them() -> None:
    dst, src = pools("load")
    for method in METHODS:
        check_transfer(
            [dst], [src], *slot_lists("padded"), slot_dim=1, method=method, count=torch.tensor(77)
        )


@pytest.mark.parametrize("host_memory", ["pinned", "cpu"])
def test_a_staged_store_leaves_rows_whose_index_on_the_device_is_bad(host_memory: str, ring: int) -> None:
    host, device = pools("store", host_memory=host_memory)
    dst_list, src_list = random_entries(200, 300, 300)
    bad = src_list.clone()
    bad[5], bad[77], bad[150] = 307, -2, -1
    good = bad.clone()
    good[[5, 77]] = -1
    snapshot = Snapshot([host, device])
    snapshot.transfer([host], [device], dst_list, good, slot_dim=1)
    transfer_kv([host], [device], dst_list, bad.cuda(), slot_dim=1, method="staged")
    with pytest.raises(IndexError, match=r"src_indices\[5\] is 307, out of range for 307 slots"):
        torch_hicache.check_errors("cuda")
    snapshot.compare("a bad index on the device")


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("legacy", [True, False], ids=["legacy", "side"])
def test_order_on_the_callers_stream(legacy: bool, method: str, ring: int) -> None:
    """Behind the work that the stream holds, before what comes after; the host does not wait."""
    # So few copies that a slow host has submitted them before the delay ends.
    host, device = pools("store", slots=200)
    at, _ = random_entries(150, 200, 200)
    transfer_kv([host], [device], at, at, slot_dim=1, method=method)
    torch.cuda.synchronize()
    stream = torch.cuda.default_stream() if legacy else torch.cuda.Stream()
    value = torch.full_like(device, 91)
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(DELAY_CYCLES)
        device.copy_(value)
        transfer_kv([host], [device], at, at, slot_dim=1, method=method)
        device.zero_()
        transfer_kv([device], [host], at, at, slot_dim=1, method=method)
        seen = device.clone()
        assert not stream.query()
    stream.synchronize()
    assert bool((host[:, at] == 91).all())
    assert bool((seen[:, at.cuda()] == 91).all())


@pytest.mark.parametrize("method", METHODS)
def test_two_streams_at_once(method: str, ring: int) -> None:
    sides = [pools(direction, slots=3000) for direction in ("load", "store", "load", "store")]
    at = slot_lists("runs")
    snapshots = [Snapshot(pair) for pair in sides]
    streams = [torch.cuda.Stream() for _ in sides]
    torch.cuda.synchronize()
    for _ in range(20):
        for stream, (dst, src) in zip(streams, sides, strict=True):
            with torch.cuda.stream(stream):
                transfer_kv([dst], [src], *at, slot_dim=1, method=method)
    for snapshot, (dst, src) in zip(snapshots, sides, strict=True):
        snapshot.transfer([dst], [src], *at, slot_dim=1)
        snapshot.compare("four streams")


def test_scratch_is_not_handed_out_while_it_is_used(ring: int) -> None:
    host, device = pools("load", slots=5000)[::-1]
    at, _ = random_entries(4000, 5000, 5000)
    torch.cuda.synchronize()
    torch.cuda._sleep(DELAY_CYCLES)
    transfer_kv([device], [host], at, at, slot_dim=1, method="staged")
    for _ in range(20):  # what the allocator gives next on this stream comes later in its order
        torch.full((1 << 20,), 7, dtype=torch.uint8, device="cuda")
    torch.cuda.synchronize()
    assert torch.equal(device[:, at.cuda()].cpu(), host[:, at])


def test_copies_do_not_lead_over_the_seam_of_two_registrations() -> None:
    page = mmap.PAGESIZE
    memory = mmap.mmap(-1, 16 * page)
    host = torch.frombuffer(memory, dtype=torch.uint8)
    on_device = torch.empty(0, device="cuda")
    first, second = host.data_ptr(), host.data_ptr() + 7 * page
    torch.ops.hicache.register_host_memory(on_device, first, 7 * page)
    torch.ops.hicache.register_host_memory(on_device, second, 9 * page)
    try:
        rows = host.view(-1, 1000 + 24)
        fill_pool([rows])
        device = torch.zeros_like(rows, device="cuda")
        fill_pool([device], seed=1)
        everything = torch.arange(len(rows))
        for method in [*METHODS, "kernel"]:
            check_transfer([device], [rows], everything, everything, method=method)
            fill_pool([device], seed=2)
            check_transfer([rows], [device], everything, everything, method=method)
        slot = 7 * page // 1024  # a strided block with the seam in its midst
        columns = rows[:, :512]
        some = torch.arange(slot - 3, slot + 3)
        check_transfer([columns], [device[:, :512]], some, some + 1, method="copy_engine")
    finally:
        torch.cuda.synchronize()
        torch.ops.hicache.unregister_host_memory(on_device, first)
        torch.ops.hicache.unregister_host_memory(on_device, second)
        del host, rows, columns
        gc.collect()
        memory.close()


def test_sixty_thousand_scattered_rows_fifty_times() -> None:
    slots, row = 60_000, 64
    host = allocate_bytes(slots * row, "pinned", "cuda").view(slots, row)
    device = torch.zeros(2 * slots, row, dtype=torch.uint8, device="cuda")
    fill_pool([host])
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        dst, src = (
            torch.randperm(2 * slots, generator=generator)[:slots],
            torch.randperm(slots, generator=generator),
        )
        transfer_kv([device], [host], dst, src, method="copy_engine")
    torch.cuda.synchronize()
    assert torch.equal(device[dst.cuda()].cpu(), host[src])


def test_methods_of_capture_and_of_two_device_pools() -> None:
    host, device = pools("store")
    at = torch.arange(5, device="cuda")
    text = "'staged' moves between host and device memory, but both pools are on the device"
    with unchanged([device]), pytest.raises(ValueError, match=text):
        transfer_kv([device], [device.clone()], at.cpu(), at.cpu(), slot_dim=1, method="staged")
    check_transfer([device], [device.clone()], at.cpu(), at.cpu() + 9, slot_dim=1, method="copy_engine")
    with (
        unchanged([device]),
        pytest.raises(ValueError, match="needs the indices of the host pool on the CPU"),
    ):
        transfer_kv([device], [host], at, at, slot_dim=1, method="staged")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for method in METHODS:  # refused, and the capture goes on
            with pytest.raises(ValueError, match=f"method '{method}' can't be captured"):
                transfer_kv([device], [host], at, at, slot_dim=1, method=method)
        transfer_kv([device], [host], at, at, slot_dim=1)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(device[:, :5].cpu(), host[:, :5])


def test_what_explain_says_is_what_runs() -> None:
    host = allocate_bytes(64 << 20, "pinned", "cuda").view(64, 1 << 20)
    device = torch.zeros(64, 1 << 20, dtype=torch.uint8, device="cuda")
    fill_pool([host])
    at = torch.arange(63, -1, -1)
    plan = explain([device], [host], at, at)
    assert (plan.method, plan.runs, plan.rows, plan.batches, plan.bytes) == (
        "copy_engine",
        1,
        1,
        1,
        64 << 20,
    )
    assert explain([device], [host], at.cuda(), at).method == "staged"
    assert explain([device], [host], at.cuda(), at.cuda()).method == "kernel"
    assert not bool(device.any())
    for indices in ((at, at), (at.cuda(), at), (at.cuda(), at.cuda())):
        device.zero_()
        transfer_kv([device], [host], *indices)
        torch.cuda.synchronize()
        assert torch.equal(device.cpu(), host)


def test_an_error_record_of_ones_own() -> None:
    """Errors of calls under it stay out of the device's record, and the other way round."""
    host, device = pools("store")
    ops, on_device = torch.ops.hicache, torch.empty(0, device="cuda")
    good, bad = torch.arange(3, device="cuda"), torch.tensor([1, 999, 2], device="cuda")
    records = [ops.new_error_record(on_device) for _ in range(70)]
    assert len(set(records)) == 70
    for record in records[60:]:
        ops.use_error_record(on_device, record)
        transfer_kv([device], [host], bad, good, slot_dim=1)
    ops.use_error_record(on_device, 0)
    transfer_kv([device], [host], good, good, slot_dim=1)  # raises nothing of theirs
    torch_hicache.check_errors("cuda")
    for record in records[60:]:
        with pytest.raises(IndexError, match=r"dst_indices\[1\] is 999, out of range for 307 slots"):
            ops.check_error_record(on_device, record)
        ops.check_error_record(on_device, record)
    ops.check_error_record(on_device, records[0])
    for record in records:
        ops.free_error_record(on_device, record)
    for call in (ops.check_error_record, ops.use_error_record, ops.free_error_record):
        with pytest.raises(ValueError, match=r"\[error_record\] there is no record 9999"):
            call(on_device, 9999)
    with pytest.raises(ValueError, match="was freed before"):
        ops.free_error_record(on_device, records[3])
