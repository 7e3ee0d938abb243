"""Indices that only the GPU reads, or of which the host reads one side: duplicates, overlap, the sort."""

import pytest
import torch

import torch_hicache
from torch_hicache.testing import (
    Snapshot,
    byte_view,
    check_transfer,
    entries_that_move,
    fill_pool,
    random_entries,
    strided_tensor,
    unchanged,
)

pytestmark = pytest.mark.backend("cuda")
transfer_kv = torch.ops.hicache.transfer_kv
DELAY_CYCLES = 200_000_000  # about 0.1 s
MIXED = [("cuda", "cpu"), ("cpu", "cuda")]


def pools(layers: int = 3, slots: int = 64, row: int = 200) -> tuple[torch.Tensor, torch.Tensor]:
    """A host pool and a device pool, [layers, slots, row], filled with different fingerprints."""
    host = strided_tensor((layers, slots, row), torch.uint8, "pinned", "cuda")
    device = strided_tensor((layers, slots, row), torch.uint8, "device", "cuda", padding={1: 8})
    fill_pool([host], 1)
    fill_pool([device], 1, seed=1)
    return host, device


@pytest.mark.parametrize("entries", [8, 2000])
@pytest.mark.parametrize("direction", ["load", "store"])
def test_duplicate_destinations_on_the_device_stay_in_bounds(direction: str, entries: int) -> None:
    """Each byte is one of its sources'; slots named once are exact, all other memory is untouched."""
    host, device = pools()
    dst, src = (device, host) if direction == "load" else (host, device)
    generator = torch.Generator().manual_seed(entries)
    dst_indices = torch.randint(20, (entries,), generator=generator)
    dst_indices[0] = 40
    src_indices = torch.randint(64, (entries,), generator=generator)
    rows = src.cpu()
    snapshot = Snapshot([dst, src])
    transfer_kv([dst], [src], dst_indices.cuda(), src_indices.cuda(), slot_dim=1)
    torch.cuda.synchronize()
    now = dst.cpu()
    for slot in set(dst_indices.tolist()):
        candidates = rows[:, src_indices[dst_indices == slot]]  # [layers, candidates, row]
        assert bool((candidates == now[:, slot].unsqueeze(1)).any(1).all())
        snapshot.twin(dst)[:, slot] = byte_view(now)[:, slot]
    snapshot.compare("duplicates on the device")


@pytest.mark.parametrize("entries", [2, 64, 400])
def test_of_duplicate_destinations_on_the_cpu_the_last_wins(entries: int) -> None:
    """Their sources are on the device."""
    host, device = pools()
    dst_indices = torch.arange(entries) % 17
    src_indices = torch.randint(64, (entries,))
    check_transfer([device], [host], dst_indices, src_indices.cuda(), slot_dim=1)
    check_transfer([host], [device], dst_indices.int(), src_indices.int().cuda(), slot_dim=1)


def test_overlap_by_device_indices_stays_in_bounds() -> None:
    """Unspecified what arrives; nothing outside the destinations changes."""
    _, pool = pools()
    snapshot = Snapshot([pool])
    dst_indices = torch.arange(1, 40)
    transfer_kv([pool], [pool], dst_indices.cuda(), (dst_indices - 1).cuda(), slot_dim=1)
    torch.cuda.synchronize()
    snapshot.twin(pool)[:, 1:40] = byte_view(pool.cpu())[:, 1:40]
    snapshot.compare("overlap by device indices")


def test_overlap_of_a_host_pool_and_its_device_view_is_seen() -> None:
    host, _ = pools()
    view = torch_hicache.device_view(host, "cuda")
    expected = host.clone()
    expected[:, 1:3] = host[:, 3:5]
    transfer_kv([view], [host], torch.tensor([1, 2]), torch.tensor([3, 4]), slot_dim=1)
    torch.cuda.synchronize()
    assert torch.equal(host, expected)
    with unchanged([host]), pytest.raises(ValueError, match="destination and source overlap"):
        transfer_kv([view], [host], torch.tensor([1, 2]), torch.tensor([2, 4]), slot_dim=1)


@pytest.mark.parametrize(("dst_at", "src_at"), MIXED)
def test_the_side_on_the_cpu_is_refused_and_the_other_recorded(dst_at: str, src_at: str) -> None:
    host, device = pools()
    good, bad = torch.tensor([3, 4, 5]), torch.tensor([1, 64, 2])
    for dst_list, src_list, side in ((bad, good, "dst"), (good, bad, "src")):
        text = rf"{side}_indices\[1\] is 64, out of range for 64 slots"
        call = ([device], [host], dst_list.to(dst_at), src_list.to(src_at))
        if (dst_at if side == "dst" else src_at) == "cpu":
            with unchanged([device]), pytest.raises(IndexError, match=text):
                transfer_kv(*call, slot_dim=1)
            continue
        snapshot = Snapshot([device, host])
        keep = torch.tensor([0, 2])
        snapshot.transfer([device], [host], dst_list[keep], src_list[keep], slot_dim=1)
        transfer_kv(*call, slot_dim=1)
        with pytest.raises(IndexError, match=text):
            torch_hicache.check_errors("cuda")
        snapshot.compare("a bad index on the device")


@pytest.mark.parametrize(("dst_at", "src_at"), MIXED)
def test_a_count_on_the_cpu_ends_mixed_indices(dst_at: str, src_at: str) -> None:
    host, device = pools()
    dst_indices, src_indices = torch.tensor([3, 4, 999]), torch.tensor([5, 6, -77])
    for count in (0, 1, 2):
        check_transfer(
            [device],
            [host],
            dst_indices.to(dst_at),
            src_indices.to(src_at),
            slot_dim=1,
            count=torch.tensor(count),
        )
    torch_hicache.check_errors("cuda")


@pytest.mark.parametrize(("dst_at", "src_at"), MIXED)
def test_mixed_indices_may_be_dropped_while_the_transfer_waits(dst_at: str, src_at: str) -> None:
    host, device = pools(slots=5000)
    order, _ = random_entries(5000, 5000, 5000)
    expected = host.clone()
    torch.cuda.synchronize()
    torch.cuda._sleep(DELAY_CYCLES)
    transfer_kv([device], [host], order.clone().to(dst_at), order.clone().to(src_at), slot_dim=1)
    for _ in range(20):  # whoever gets the temporaries' memory overwrites it
        torch.full((5000,), -7, device="cuda")
        torch.full((5000,), -7).pin_memory()
    torch.cuda.synchronize()
    assert torch.equal(device.cpu(), expected)
    torch_hicache.check_errors("cuda")


def test_uploads_that_wait_keep_their_memory() -> None:
    """Kernels that fetch CPU indices wait for the delay: a later call must not reuse what they read."""
    host, device = pools(layers=8, slots=5000)
    orders = [torch.randperm(5000) for _ in range(8)]
    torch.cuda.synchronize()
    torch.cuda._sleep(DELAY_CYCLES)
    for layer, order in enumerate(orders):
        transfer_kv([device[layer]], [host[layer]], torch.arange(5000), order)
    torch.cuda.synchronize()
    for layer, order in enumerate(orders):
        assert torch.equal(device[layer].cpu(), host[layer][order])


def test_a_temporary_source_may_be_dropped_while_the_transfer_waits() -> None:
    """On the caller's current stream, as for any torch op: what takes its memory comes later."""
    host, device = pools()
    expected = device.cpu() + 1
    at = torch.arange(64, device="cuda")
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(DELAY_CYCLES)
        transfer_kv([host], [device + 1], at, at, slot_dim=1)
        for _ in range(8):
            torch.zeros_like(device)
    stream.synchronize()
    assert torch.equal(host, expected)


@pytest.mark.parametrize("where", [*MIXED, ("cpu", "cpu"), ("cuda", "cuda")])
@pytest.mark.parametrize("direction", ["load", "store"])
def test_the_sort_keeps_what_the_indices_say(direction: str, where: tuple[str, str]) -> None:
    """A host pool above every threshold; padding, a count, duplicates where the CPU sees them."""
    slots, entries, row = 1 << 21, 1 << 15, 512
    dst_at, src_at = where
    host = torch_hicache.empty_host((slots, row), torch.uint8, "cuda")
    numbers = host.view(torch.int64)[:, 0]
    numbers.copy_(torch.arange(slots))
    device = torch.zeros(entries + 1, row, dtype=torch.uint8, device="cuda")
    device.view(torch.int64)[:, 0] = -torch.arange(1, entries + 2, device="cuda")
    generator = torch.Generator().manual_seed(0)
    host_slots = torch.randperm(slots, generator=generator)[:entries]
    device_slots = torch.randperm(entries, generator=generator)
    dst_slots, src_slots = (
        (device_slots, host_slots) if direction == "load" else (host_slots, device_slots)
    )
    if dst_at == "cpu":
        dst_slots[100:200] = dst_slots[200:300]  # the later ones win
    src_slots[7::50] = -1 if dst_at == "cuda" else src_slots[7::50]
    count = entries - 321
    kept_dst, kept_src = entries_that_move(dst_slots, src_slots, torch.tensor(count))
    pools_of_call = ([device], [host]) if direction == "load" else ([host], [device])
    before = device.view(torch.int64)[:, 0].cpu()
    transfer_kv(
        *pools_of_call,
        dst_slots.to(dst_at),
        src_slots.to(src_at),
        count=torch.tensor(count, device="cuda" if dst_at == src_at == "cuda" else "cpu"),
    )
    torch.cuda.synchronize()
    now = device.view(torch.int64)[:, 0].cpu() if direction == "load" else numbers
    expected = before.clone() if direction == "load" else torch.arange(slots)
    expected[kept_dst] = kept_src if direction == "load" else before[kept_src]
    assert torch.equal(now, expected)
    torch_hicache.check_errors("cuda")
