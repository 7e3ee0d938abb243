"""Which slots move: index dtypes and views, padding, count, duplicates, bounds, far and many slots."""

import subprocess
import sys

import pytest
import torch

from torch_hicache import check_errors
from torch_hicache.testing import (
    Placement,
    Snapshot,
    check_transfer,
    fill_pool,
    placements,
    random_entries,
    unchanged,
    view_on,
)

transfer_kv = torch.ops.hicache.transfer_kv
INTEGERS = (torch.int32, torch.int64)


def pools(placement: Placement, dst_slots: int = 23, src_slots: int = 19) -> tuple[list, list]:
    """Two planes of unlike rows."""
    dst = [placement.dst((dst_slots, 24)), placement.dst((dst_slots, 3, 5), torch.int16)]
    src = [placement.src((src_slots, 24)), placement.src((src_slots, 3, 5), torch.int16)]
    fill_pool(dst)
    fill_pool(src, seed=1)
    return dst, src


# Each makes a view that holds `values`, in its dtype.
VIEWS = {
    "contiguous": lambda values: values.clone(),
    "every_second": lambda values: torch.stack([values, values + 99], 1).flatten()[::2],
    "a_slice": lambda values: torch.cat([values + 99, values, values + 99])[len(values) : -len(values)],
    "a_column": lambda values: torch.stack([values + 99, values, values + 99], 1)[:, 1],
    "a_row_of_columns": lambda values: torch.stack([values, values + 99], 1).t()[0],
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("dst_dtype", INTEGERS, ids=str)
@pytest.mark.parametrize("src_dtype", INTEGERS, ids=str)
def test_views_of_indices(
    placement: Placement, view: str, dst_dtype: torch.dtype, src_dtype: torch.dtype
) -> None:
    """A reader that ignores a stride meets indices that are out of range."""
    dst, src = pools(placement)
    make = VIEWS[view]
    for n in (1, 2, 17):
        dst_indices, src_indices = random_entries(n, 23, 19, seed=n)
        for order in (slice(None), torch.arange(n - 1, -1, -1)):
            dst_view = view_on(placement.dst_indices_device, make(dst_indices[order].to(dst_dtype)))
            src_view = view_on(placement.src_indices_device, make(src_indices[order].to(src_dtype)))
            check_transfer(dst, src, dst_view, src_view)
            check_transfer(dst, src, dst_view.contiguous(), src_view)
            check_transfer(dst, src, dst_view, src_view.contiguous())


def test_expanded_indices(placement: Placement) -> None:
    """One source for many destinations, and a stride of zero on both sides."""
    dst, src = pools(placement)
    everywhere = placement.src_indices([7]).expand(11)
    check_transfer(dst, src, placement.dst_indices(range(2, 13)), everywhere)
    check_transfer(dst, src, placement.dst_indices([22]).expand(5), everywhere[:5])


@pytest.mark.parametrize("side", ["dst", "src", "both", "all"])
def test_padding_skips_an_entry(placement: Placement, side: str) -> None:
    """-1 is no slot of either pool: neither the last one nor what lies in front of the first."""
    dst, src = pools(placement)
    for n in (1, 5, 19):
        dst_indices, src_indices = random_entries(n, 23, 19, seed=n)
        if side in ("dst", "both"):
            dst_indices[::2] = -1
        if side in ("src", "both"):
            src_indices[1::3] = -1
        if side == "all":
            dst_indices[:], src_indices[:] = -1, -1
        for dtype in INTEGERS:
            check_transfer(
                dst,
                src,
                placement.dst_indices(dst_indices, dtype),
                placement.src_indices(src_indices, dtype),
            )


@pytest.mark.parametrize("dtype", INTEGERS, ids=str)
def test_count_ends_the_work(placement: Placement, dtype: torch.dtype) -> None:
    """Whatever lies behind `count`: it is neither copied nor judged."""
    dst, src = pools(placement)
    dst_indices, src_indices = random_entries(17, 23, 19)
    for count in (0, 1, 2, 16, 17):
        fill_pool(dst)
        dst_given, src_given = dst_indices.clone(), src_indices.clone()
        dst_given[count:] = torch.tensor([1 << 30, -(1 << 30), -2])[torch.arange(17 - count) % 3]
        src_given[count:] = 19
        for shape in ((), (1,), (1, 1)):
            check_transfer(
                dst,
                src,
                placement.dst_indices(dst_given),
                placement.src_indices(src_given),
                count=placement.count(count, dtype).view(shape),
            )


def test_a_view_of_a_count(placement: Placement) -> None:
    dst, src = pools(placement)
    counts = torch.tensor([9, 2, 9]).to(placement.count(0).device)
    dst_indices, src_indices = placement.dst_indices([3, 1, 0]), placement.src_indices([0, 1, 2])
    check_transfer(dst, src, dst_indices, src_indices, count=counts[1])


def test_duplicate_sources_are_exact(placement: Placement) -> None:
    dst, src = pools(placement)
    src_indices = torch.arange(23) % 2 * 18
    check_transfer(
        dst, src, placement.dst_indices(torch.randperm(23)), placement.src_indices(src_indices)
    )


@pytest.mark.parametrize("slots", [23, 3000, 1_000_000])
def test_of_duplicate_destinations_the_last_wins(checked_placement: Placement, slots: int) -> None:
    """In all planes; a duplicate that is padding does not count. Few entries of many slots are hashed."""
    placement = checked_placement
    dst = [placement.dst((slots, 2)), placement.dst((2, slots, 1))[0]]
    src = [placement.src((19, 2)), placement.src((2, 19, 1))[1]]
    fill_pool(dst)
    fill_pool(src, seed=1)
    generator = torch.Generator().manual_seed(slots)
    for n, different in ((2, 1), (19, 3), (400, 11), (400, 390)):
        choice = torch.randint(slots, (min(different, slots),), generator=generator)
        dst_indices = choice[torch.randint(len(choice), (n,), generator=generator)]
        src_indices = torch.randint(-1, 19, (n,), generator=generator)
        dst_indices[torch.rand(n, generator=generator) < 0.1] = -1
        check_transfer(dst, src, dst_indices, src_indices)


@pytest.mark.parametrize(
    ("dst_indices", "src_indices"),
    [
        ([2, 3, 4, 5, 6, 4], [0, 1, 2, 3, 4, 9]),
        ([2, 3, 4, 2, 3, 4], [0, 1, 2, 10, 11, 12]),
        ([6, 5, 4, 5, 6], [6, 5, 4, 11, 12]),
        ([1, 1, 2, 2, 3, 3], [1, 2, 3, 4, 5, 6]),
        ([1, 2, 1, 2, 1], [1, 2, 3, -1, 5]),
    ],
)
def test_duplicates_around_runs(
    checked_placement: Placement, dst_indices: list[int], src_indices: list[int]
) -> None:
    """A run that a later entry cuts in two, one that is written twice whole, and their like."""
    dst, src = pools(checked_placement)
    check_transfer(dst, src, torch.tensor(dst_indices), torch.tensor(src_indices))


BAD = (-2, 23, 24, 1 << 20, -(1 << 31), (1 << 31) - 1)
BAD_INT64 = (1 << 31, (1 << 32) + 1, -(1 << 62), -(1 << 63), (1 << 63) - 1)


@pytest.mark.parametrize("side", ["dst", "src"])
def test_bad_indices_never_touch_memory(placement: Placement, side: str) -> None:
    """On the CPU an IndexError before the first byte; on a device the entry is skipped and recorded."""
    dst, src = pools(placement, 23, 23)
    where = placement.dst_indices_device if side == "dst" else placement.src_indices_device
    for dtype, values in ((torch.int32, BAD), (torch.int64, BAD + BAD_INT64)):
        for value in values:
            given = torch.tensor([4, 7, value, 9, value], dtype=dtype)
            good = torch.tensor([1, 2, 3, 4, 5], dtype=dtype)
            dst_indices = placement.dst_indices(given if side == "dst" else good, dtype)
            src_indices = placement.src_indices(given if side == "src" else good, dtype)
            text = rf"{side}_indices\[2\] is {value}, out of range for 23 slots"
            if where == "cpu":
                with unchanged([*dst, *src]), pytest.raises(IndexError, match=text):
                    transfer_kv(dst, src, dst_indices, src_indices)
                continue
            skipped = torch.tensor([0, 1, -1, 3, -1])  # the entries 2 and 4
            snapshot = Snapshot([*dst, *src])
            snapshot.transfer(
                dst,
                src,
                torch.where(skipped < 0, -1, dst_indices.cpu()),
                torch.where(skipped < 0, -1, src_indices.cpu()),
            )
            transfer_kv(dst, src, dst_indices, src_indices)
            with pytest.raises(IndexError, match=text):
                check_errors(placement.device)
            snapshot.compare(f"{side} index {value}")


def test_the_smallest_tensor_of_a_side_limits(checked_placement: Placement) -> None:
    placement = checked_placement
    dst = [placement.dst((23, 8)), placement.dst((21, 8)), placement.dst((22, 0))]
    src = [placement.src((23, 8)), placement.src((25, 8)), placement.src((20, 0))]
    fill_pool(dst)
    fill_pool(src, seed=1)
    check_transfer(dst, src, torch.tensor([20]), torch.tensor([19]))
    with unchanged(dst), pytest.raises(IndexError, match=r"dst_indices\[0\] is 21, .* 21 slots"):
        transfer_kv(dst, src, torch.tensor([21]), torch.tensor([19]))
    with unchanged(dst), pytest.raises(IndexError, match=r"src_indices\[1\] is 20, .* 20 slots"):
        transfer_kv(dst, src, torch.tensor([2, 3]), torch.tensor([19, 20]))


# Where bounds, strides or padding went wrong, the process would crash: so in one of its own.
ABUSE = """
import sys, torch, torch_hicache
from torch_hicache.testing import fill_pool, placements, unchanged
transfer_kv = torch.ops.hicache.transfer_kv
values = [-(1 << 63), (1 << 63) - 1, -2, 1 << 62, 1 << 40, 1 << 32, (1 << 32) - 1, -(1 << 31), 8]
refused = 0
for placement in placements(sys.argv[1]):
    dst, src = placement.dst((2, 8, 640), torch.float32), placement.src((2, 8, 640), torch.float32)
    fill_pool([dst], 1)
    fill_pool([src], 1, seed=1)
    for value in values:
        for side in ("dst", "src", "both"):
            given, good = torch.full((300,), value), torch.full((300,), -1)
            dst_indices = placement.dst_indices(good if side == "src" else given)
            src_indices = placement.src_indices(good if side == "dst" else given)
            with unchanged([dst, src]):
                try:
                    transfer_kv([dst], [src], dst_indices, src_indices, slot_dim=1)
                    torch_hicache.check_errors(placement.device)
                except IndexError:
                    refused += 1
    for count in (-1, 301, -(1 << 63), (1 << 63) - 1):
        ones = torch.full((300,), -1)
        try:
            dst_indices, src_indices = placement.dst_indices(ones), placement.src_indices(ones)
            count_tensor = placement.count(count)
            transfer_kv([dst], [src], dst_indices, src_indices, slot_dim=1, count=count_tensor)
            torch_hicache.check_errors(placement.device)
        except (IndexError, ValueError):
            refused += 1
print("refused", refused)
"""


def test_index_abuse_crashes_nothing(device: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ABUSE, device], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == f"refused {len(placements(device)) * (9 * 3 + 4)}"


def test_indices_may_lie_in_a_destination() -> None:
    """They are read before the first byte moves: what the call writes over them does not count."""
    for wild in (5, 10**14):
        first, second = (torch.zeros(8, 1, dtype=torch.int64) for _ in range(2))
        first[:4, 0] = torch.arange(4)
        src = torch.full((8, 1), wild, dtype=torch.int64)
        transfer_kv([first, second], [src, src], first[:4, 0], torch.arange(4))
        assert second[:4, 0].tolist() == [wild] * 4
        assert second[4:, 0].tolist() == [0] * 4
