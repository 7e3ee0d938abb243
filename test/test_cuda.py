"""What only a GPU shows: streams, lifetimes, capture, recorded errors, the sort, unreachable memory."""

import gc
import subprocess
import sys

import pytest
import torch

import torch_hicache
from torch_hicache.testing import (
    allocate_bytes,
    check_transfer,
    fill_pool,
    random_entries,
    strided_tensor,
    unchanged,
)

pytestmark = pytest.mark.backend("cuda")
transfer_kv = torch.ops.hicache.transfer_kv
DELAY_CYCLES = 200_000_000  # about 0.1 s, far longer than any call here takes on the host


def pools(slots: int = 64, row: int = 256, layers: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    """A host pool and a device pool, [layers, slots, row], filled with different fingerprints."""
    host = strided_tensor((layers, slots, row), torch.uint8, "pinned", "cuda")
    device = strided_tensor((layers, slots, row), torch.uint8, "device", "cuda")
    fill_pool([host], 1)
    fill_pool([device], 1, seed=1)
    return host, device


def cuda(*values: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device="cuda")


# --- Order and lifetime ---------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_the_call_does_not_wait_for_the_stream(where: str) -> None:
    host, device = pools()
    indices = torch.arange(64, device=where)  # a delayed copy of the indices would be seen as well
    transfer_kv([device], [host], indices, indices, slot_dim=1)
    torch.cuda.synchronize()
    torch.cuda._sleep(DELAY_CYCLES)
    transfer_kv([device], [host], indices, indices, slot_dim=1)
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()


@pytest.mark.parametrize("where", ["cpu", "cuda"])
def test_store_waits_for_the_producer_on_the_current_stream(where: str) -> None:
    host, device = pools()
    indices = torch.arange(64, device=where)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(DELAY_CYCLES)
        device.fill_(7)
        transfer_kv([host], [device], indices, indices, slot_dim=1)
        device.fill_(9)  # must not overtake the store that reads
    stream.synchronize()
    assert bool((host == 7).all())


@pytest.mark.parametrize("entries", [3, 64, 65, 5000])
def test_temporaries_may_be_dropped_while_the_transfer_waits(entries: int) -> None:
    host, device = pools(slots=entries)
    order, _ = random_entries(entries, entries, entries)
    expected = host.cpu().clone()
    torch.cuda.synchronize()
    torch.cuda._sleep(DELAY_CYCLES)
    transfer_kv([device], [host], order.cuda(), order.cuda(), slot_dim=1)
    transfer_kv([device], [host], order.clone(), order.clone(), slot_dim=1)
    for _ in range(20):  # whoever gets the temporaries' memory overwrites it
        torch.full((entries,), -7, device="cuda")
        torch.full((entries,), -7, dtype=torch.int32).pin_memory()
        torch.full((2 * entries,), -7, dtype=torch.int32).pin_memory()
    torch.cuda.synchronize()
    assert torch.equal(device.cpu(), expected)
    torch_hicache.check_errors("cuda")


def test_host_memory_outlives_the_transfer_that_uses_it() -> None:
    host, device = pools()
    expected = host.clone()
    torch.cuda.synchronize()
    torch.cuda._sleep(DELAY_CYCLES)
    indices = torch.arange(64, device="cuda")
    transfer_kv([device], [host], indices, indices, slot_dim=1)
    del host
    gc.collect()
    torch.cuda.synchronize()
    assert torch.equal(device.cpu(), expected)


# --- Capture --------------------------------------------------------------------------------------


def test_replay_follows_indices_contents_and_count() -> None:
    host, device = pools()
    dst, src, count = cuda(1, 2, 3), cuda(4, 5, 6), cuda(3, dtype=torch.int32)
    graph = torch.cuda.CUDAGraph()
    before = device.clone()
    with torch.cuda.graph(graph):
        transfer_kv([device], [host], dst, src, slot_dim=1, count=count)
    assert torch.equal(device, before)  # nothing runs while it is recorded
    for new_dst, new_src, n in (
        ((9, 8, 7), (1, 1, 2), 3),
        ((0, 63, 5), (63, 0, 9), 2),
        ((1, 2, 3), (7, 7, 7), 0),
    ):
        dst.copy_(torch.tensor(new_dst))
        src.copy_(torch.tensor(new_src))
        count.fill_(n)
        host.copy_(host.roll(1, 1))
        expected = device.cpu()
        expected[:, list(new_dst[:n])] = host[:, list(new_src[:n])]
        # Between capture and replay others use the allocator and the op.
        torch.full((1 << 20,), -7, device="cuda")
        other_host, other_device = pools(8, 16)
        transfer_kv([other_device], [other_host], cuda(1), cuda(2), slot_dim=1)
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(device.cpu(), expected)


def test_the_first_call_of_a_process_may_be_captured() -> None:
    code = """
import torch, torch_hicache
host = torch_hicache.empty_host((8, 64), torch.uint8, "cuda").fill_(5)
device = torch.zeros(8, 64, dtype=torch.uint8, device="cuda")
at = torch.arange(8, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph, capture_error_mode="global"):
    torch.ops.hicache.transfer_kv([device], [host], at, at)
graph.replay()
torch.cuda.synchronize()
raise SystemExit(0 if bool((device == 5).all()) else 1)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_sorted_transfer_can_be_captured() -> None:
    slots, entries = 1 << 20, 1 << 14
    host = torch_hicache.empty_host((slots, 1024), torch.uint8, "cuda")
    host.view(torch.int64)[:, 0] = torch.arange(slots)
    device = torch.zeros(entries, 1024, dtype=torch.uint8, device="cuda")
    src = torch.randperm(slots)[:entries].cuda()
    dst = torch.randperm(entries).cuda()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        transfer_kv([device], [host], dst, src)
    for shift in (0, 1):
        src.copy_((src + shift) % slots)
        device.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(device.view(torch.int64)[:, 0][dst], src)


def test_cpu_indices_are_refused_while_capturing_and_the_capture_goes_on() -> None:
    host, device = pools()
    at = cuda(1, 2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with pytest.raises(ValueError, match="indices on the CPU can't be captured"):
            transfer_kv([device], [host], torch.tensor([1]), torch.tensor([2]), slot_dim=1)
        transfer_kv([device], [host], at, at, slot_dim=1)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(device[:, 1:3].cpu(), host[:, 1:3])


def test_replays_record_errors_and_capture_raises_none() -> None:
    host, device = pools()
    bad, good = cuda(1, 99), cuda(1, 2)
    transfer_kv([device], [host], bad, good, slot_dim=1)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):  # the error of the call above is not raised in here
        transfer_kv([device], [host], bad, good, slot_dim=1)
    with pytest.raises(IndexError, match=r"dst_indices\[1\] is 99"):
        torch_hicache.check_errors("cuda")
    torch_hicache.check_errors("cuda")
    graph.replay()
    with pytest.raises(IndexError, match=r"dst_indices\[1\] is 99"):
        torch_hicache.check_errors("cuda")
    bad.fill_(3)
    graph.replay()
    torch_hicache.check_errors("cuda")


# --- Recorded errors ------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [64, -2, 1 << 31, (1 << 32) + 1, -(1 << 63), (1 << 63) - 1])
@pytest.mark.parametrize("side", ["dst", "src"])
def test_a_bad_index_is_skipped_in_all_planes_and_reported_once(side: str, value: int) -> None:
    host, device = pools()
    good, bad = cuda(5, 6, 7, 8), cuda(1, value, 3, value)
    dst, src = (bad, good) if side == "dst" else (good, bad)
    expected = device.cpu()
    for i in (0, 2):
        expected[:, int(dst[i])] = host[:, int(src[i])]
    with unchanged([host]):
        transfer_kv([device], [host], dst, src, slot_dim=1)
    assert torch.equal(device.cpu(), expected)
    text = rf"on cuda:0: {side}_indices\[1\] is {value}, out of range for 64 slots"
    with pytest.raises(IndexError, match=text):
        torch_hicache.check_errors("cuda")
    torch_hicache.check_errors("cuda")


def test_a_later_call_raises_before_it_submits() -> None:
    host, device = pools()
    transfer_kv([device], [host], cuda(-5), cuda(0), slot_dim=1)
    torch.cuda.synchronize()
    with (
        unchanged([device]),
        pytest.raises(IndexError, match=r"an earlier call failed: .*dst_indices\[0\] is -5"),
    ):
        transfer_kv([device], [host], cuda(1), cuda(1), slot_dim=1)
    check_transfer([device], [host], cuda(1), cuda(1), slot_dim=1)


def test_the_first_bad_entry_wins() -> None:
    host, device = pools(slots=100_000, row=16, layers=1)
    for _ in range(5):
        bad = torch.full((100_000,), 100_000, device="cuda")
        bad[:1234] = 0
        torch.cuda._sleep(DELAY_CYCLES // 10)  # else the second call may see the first one's error
        transfer_kv([device], [host], bad, torch.zeros_like(bad), slot_dim=1)
        transfer_kv([device], [host], bad[2000:], torch.zeros_like(bad[2000:]), slot_dim=1)
        with pytest.raises(IndexError, match=r"dst_indices\[1234\]"):
            torch_hicache.check_errors("cuda")


@pytest.mark.parametrize("value", [-1, 5, 1 << 40])
def test_a_count_out_of_range_is_clamped_and_reported(value: int) -> None:
    host, device = pools()
    dst, src = cuda(1, 2, 3, 4), cuda(5, 6, 7, 8)
    expected = device.cpu()
    if value > 0:
        expected[:, [1, 2, 3, 4]] = host[:, [5, 6, 7, 8]]
    transfer_kv([device], [host], dst, src, slot_dim=1, count=cuda(value))
    assert torch.equal(device.cpu(), expected)
    with pytest.raises(IndexError, match=f"count is {value}, outside 0 to 4"):
        torch_hicache.check_errors("cuda")


def test_entries_behind_count_may_hold_anything() -> None:
    host, device = pools()
    check_transfer([device], [host], cuda(1, 1 << 60), cuda(2, -9), slot_dim=1, count=cuda(1))
    torch_hicache.check_errors("cuda")


# --- The sort, sizes, memory ----------------------------------------------------------------------


@pytest.mark.parametrize("where", ["cpu", "cuda"])
@pytest.mark.parametrize("direction", ["load", "store"])
def test_entries_of_a_big_scattered_pool(direction: str, where: str) -> None:
    """Above every threshold of the sort, with padding, and bad indices where the device reads them."""
    slots, entries, row = 1 << 21, 1 << 15, 512
    host = torch_hicache.empty_host((slots, row), torch.uint8, "cuda")
    host.view(torch.int64)[:, 0] = torch.arange(slots)
    device = torch.zeros(entries, row, dtype=torch.uint8, device="cuda")
    device.view(torch.int64)[:, 0] = -torch.arange(1, entries + 1, device="cuda")
    host_slots, device_slots = torch.randperm(slots)[:entries], torch.randperm(entries)
    moves = torch.rand(entries) < 0.9
    given = torch.where(moves, host_slots, -1)
    if where == "cuda":
        given[100] = slots
        moves[100] = False
    given, others = given.to(where), device_slots.to(where)
    before = device.view(torch.int64)[:, 0].cpu().clone()
    if direction == "load":
        transfer_kv([device], [host], others, given)
        now = device.view(torch.int64)[:, 0].cpu()
        assert torch.equal(now[device_slots[moves]], host_slots[moves])
        assert torch.equal(now[device_slots[~moves]], before[device_slots[~moves]])
    else:
        transfer_kv([host], [device], given, others)
        torch.cuda.synchronize()
        now = host.view(torch.int64)[:, 0]
        assert torch.equal(now[host_slots[moves]], before[device_slots[moves]])
        assert torch.equal(now[host_slots[~moves]], host_slots[~moves])
    if where == "cuda":
        side = "src" if direction == "load" else "dst"
        with pytest.raises(IndexError, match=rf"{side}_indices\[100\] is {slots}"):
            torch_hicache.check_errors("cuda")


def test_more_than_one_launch() -> None:
    """Several parts of 256 MiB, cut in entries and in planes, with a tail in each row."""
    layers, slots, row = 5, 4099, 16387
    host = torch_hicache.empty_host((layers, slots, row), torch.uint8, "cuda")
    fill_pool([host], 1)
    device = torch.zeros((layers, slots, row + 13), dtype=torch.uint8, device="cuda")[:, :, :row]
    dst, src = torch.randperm(slots), torch.randperm(slots)
    transfer_kv([device], [host], dst.cuda(), src.cuda(), slot_dim=1)
    assert torch.equal(device[:, dst].cpu(), host[:, src])


def test_slots_past_32_bits() -> None:
    """A byte pool of more than 2^32 slots on the device: rows of one byte, the last ones."""
    slots = (1 << 32) + 5
    device = torch.zeros(slots, 1, dtype=torch.uint8, device="cuda")
    host = torch_hicache.empty_host((16, 1), torch.uint8, "cuda")
    host[:, 0] = torch.arange(1, 17)
    at = cuda(slots - 1, 3, slots - 2)
    transfer_kv([device], [host], at, cuda(0, 1, 2))
    assert device[at, 0].tolist() == [1, 2, 3]
    assert int(torch.count_nonzero(device)) == 3


@pytest.mark.parametrize("max_blocks", [1, 2, 100_000])
def test_max_blocks_changes_no_byte(max_blocks: int) -> None:
    host, device = pools(slots=3000)
    dst, src = random_entries(2000, 3000, 3000)
    check_transfer([device], [host], dst.cuda(), src.cuda(), slot_dim=1, max_blocks=max_blocks)


@pytest.mark.parametrize("method", ["auto", "kernel"])
def test_pageable_memory_is_refused_with_the_remedy(method: str) -> None:
    device = torch.zeros(8, 16, dtype=torch.uint8, device="cuda")
    host = torch.ones(8, 16, dtype=torch.uint8)
    for dst, src, name in ((device, host, "src"), (host, device, "dst")):
        text = rf"{name}\[0\] is pageable host memory.*torch_hicache\.empty_host"
        with unchanged([dst]), pytest.raises(ValueError, match=text):
            transfer_kv([dst], [src], cuda(1), cuda(2), method=method)


def test_torch_pinned_memory_is_reachable() -> None:
    host = torch.arange(64, dtype=torch.uint8).view(4, 16).pin_memory()
    device = torch.zeros(4, 16, dtype=torch.uint8, device="cuda")
    check_transfer([device], [host], cuda(0, 3), cuda(2, 1))


def test_a_device_view_is_the_same_memory_and_keeps_it() -> None:
    host = torch_hicache.empty_host((4, 6), torch.float16, "cuda").fill_(2)
    view = torch_hicache.device_view(host.t()[1:], "cuda")
    assert (view.device.type, view.dtype, view.shape, view.stride()) == (
        "cuda",
        torch.float16,
        (5, 4),
        (1, 6),
    )
    view.fill_(3)
    torch.cuda.synchronize()
    assert bool((host[:, 1:] == 3).all())
    assert bool((host[:, 0] == 2).all())
    del host
    gc.collect()
    junk = [allocate_bytes(4096, "pinned", "cuda") for _ in range(8)]
    assert bool((view == 3).all())
    assert len(junk) == 8
    with pytest.raises(ValueError, match="pageable host memory"):
        torch_hicache.device_view(torch.ones(4), "cuda")
