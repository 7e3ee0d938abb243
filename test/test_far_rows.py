"""Sizes that 32 bits do not hold: rows past 4 GiB, strides and planes as far, millions of entries.

On the CPU and on the simulated NPU the pools are sparse files in memory: only touched pages exist, and
all of them are known.
"""

import mmap
import os
from collections.abc import Iterator

import ascend_sim
import pytest
import torch
from torch import Tensor

from torch_hicache import empty_host
from torch_hicache.testing import Placement, allocate_bytes, byte_view, entries_that_move, fingerprints

transfer_kv = torch.ops.hicache.transfer_kv

FAR = (1 << 32) + (1 << 20)
ROW = 256


class FarPool:
    """Zeros, twice as long as FAR."""

    nbytes = 2 * FAR + (1 << 20)

    def __init__(self, device: str) -> None:
        self._file = -1
        if device == "cpu":
            self._file = os.memfd_create("far_pool")
            os.ftruncate(self._file, self.nbytes)
            self.flat = torch.frombuffer(mmap.mmap(self._file, self.nbytes), dtype=torch.uint8)
        else:
            self.flat = torch.zeros(self.nbytes, dtype=torch.uint8, device=device)

    def num_nonzero(self) -> int:
        if self.flat.device.type == "npu" and ascend_sim.FOLDER:
            torch.npu.synchronize()
            used = ascend_sim.Simulator().used(self.flat.data_ptr(), self.nbytes)
        elif self._file >= 0:
            used = self._used()
        else:
            return int(torch.count_nonzero(self.flat))
        total = 0
        for begin, end in used:
            assert end - begin < 1 << 28, "the transfer touched what it should not"
            total += num_nonzero(self.flat[begin:end])
        return total

    def _used(self) -> Iterator[tuple[int, int]]:
        end = 0
        while True:
            try:
                begin = os.lseek(self._file, end, os.SEEK_DATA)
            except OSError:  # no more data
                return
            end = os.lseek(self._file, begin, os.SEEK_HOLE)
            yield begin, end

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)


def num_nonzero(tensor: Tensor) -> int:
    """On the CPU: the simulated NPU has no such operator, nor those for comparing and indexing."""
    return int(torch.count_nonzero(tensor.cpu()))


# (sizes, strides in bytes, slot_dim): [.., slots, .., ROW].
FAR_GEOMETRIES = {
    "many_slots": ((2 * FAR // ROW, ROW), (ROW, 1), 0),
    "far_slots": ((5, ROW), (FAR // 2, 1), 0),
    "farther_slots": ((3, ROW), (FAR, 1), 0),
    "far_planes": ((2, 9, ROW), (FAR, ROW, 1), 1),
    "far_heads": ((9, 2, ROW), (ROW, FAR, 1), 0),
}


def check_far_rows(
    device: str, far_side: str, geometry: str, dtype: torch.dtype, method: str = ""
) -> None:
    """What 32 bits alias would be written, or read as zeros. With a method: to and from the host.

    Then one core takes all the entries, so that neighbours become one transfer with a gap between them.
    """
    sizes, strides, slot_dim = FAR_GEOMETRIES[geometry]
    item = dtype.itemsize
    sizes = (*sizes[:-1], ROW // item)
    strides = (*(stride // item for stride in strides[:-1]), 1)
    pool = FarPool(device)
    far = pool.flat[: pool.nbytes // item * item].view(dtype).as_strided(sizes, strides)
    near_sizes = (*sizes[:slot_dim], 5, *sizes[slot_dim + 1 :])
    if method:
        near = empty_host(near_sizes, dtype, device).zero_()
    else:
        near = torch.zeros(near_sizes, dtype=dtype, device=device)
    last = sizes[slot_dim] - 1
    # Two neighbours on both sides, and two more; of three slots all.
    far_slots = torch.tensor(list(dict.fromkeys([last - 1, last, 0, last // 2])))
    near_slots = torch.tensor([2, 3, 1, 4])[: len(far_slots)]
    rows = far if far_side == "src" else near
    slots = far_slots if far_side == "src" else near_slots
    shape = byte_view(near).movedim(slot_dim, 0)[: len(slots)].shape
    values = fingerprints(torch.arange(len(slots)), torch.arange(1), shape[1:].numel()).view(shape)
    for slot, value in zip(slots, values, strict=True):
        byte_view(rows).select(slot_dim, int(slot)).copy_(value)
    how = {"slot_dim": slot_dim, "method": method or "auto", "max_blocks": 1 if method else 0}
    if far_side == "dst":
        transfer_kv([far], [near], far_slots, near_slots, **how)
    else:
        transfer_kv([near], [far], near_slots, far_slots, **how)
    if device != "cpu":
        torch.accelerator.synchronize(device)
    for far_slot, near_slot, value in zip(far_slots, near_slots, values, strict=True):
        assert torch.equal(byte_view(far).select(slot_dim, int(far_slot)).cpu(), value)
        assert torch.equal(byte_view(near).select(slot_dim, int(near_slot)).cpu(), value)
    assert pool.num_nonzero() == values.numel()
    assert num_nonzero(byte_view(near)) == values.numel()
    pool.close()


DTYPES = pytest.mark.parametrize("dtype", [torch.uint8, torch.int64], ids=["bytes", "elements"])


@DTYPES
@pytest.mark.parametrize("geometry", FAR_GEOMETRIES)
@pytest.mark.parametrize("far_side", ["dst", "src"])
def test_rows_past_4_gib(device: str, far_side: str, geometry: str, dtype: torch.dtype) -> None:
    check_far_rows(device, far_side, geometry, dtype)


@DTYPES
@pytest.mark.parametrize("method", ["kernel", "copy_engine"])
@pytest.mark.parametrize("geometry", FAR_GEOMETRIES)
@pytest.mark.parametrize("far_side", ["dst", "src"])
@pytest.mark.backend("npu")
def test_rows_past_4_gib_of_an_npu_and_the_host(
    far_side: str, geometry: str, method: str, dtype: torch.dtype
) -> None:
    """The copy engine takes rectangles, whose pitch is as wide."""
    check_far_rows("npu", far_side, geometry, dtype, method)


def test_a_byte_pool_of_more_slots_than_32_bits_hold(device: str) -> None:
    """Indices of 64 bits reach the last slot; those of 32 bits what they can."""
    pool = FarPool(device)
    slots = len(pool.flat)
    near = torch.arange(1, 9, dtype=torch.uint8).to(device)
    places = torch.tensor([slots - 1, 5, (1 << 32) + 6, 1 << 31])
    transfer_kv([pool.flat], [near], places, torch.tensor([0, 1, 2, 3], dtype=torch.int32))
    places32 = torch.tensor([(1 << 31) - 1, 7], dtype=torch.int32)
    transfer_kv([pool.flat], [near], places32, torch.tensor([4, 5]))
    assert [int(pool.flat[place]) for place in places.tolist()] == [1, 2, 3, 4]
    assert [int(pool.flat[place]) for place in places32.tolist()] == [5, 6]
    assert pool.num_nonzero() == 6
    with pytest.raises(IndexError, match=f"is {slots}, out of range for {slots} slots"):
        transfer_kv([pool.flat], [near], torch.tensor([slots]), torch.tensor([0]))
    pool.close()


@pytest.mark.parametrize("many_slots", [False, True], ids=["bits", "hashed"])
@pytest.mark.parametrize("order", ["there_and_back", "pairs"])
def test_duplicates_are_resolved_before_threads_share_the_work(
    device: str, order: str, many_slots: bool
) -> None:
    """Without it the later entry, first of its thread, loses to the earlier one, last of another."""
    row, n = 8192, 1024
    pool = FarPool(device)
    slots = pool.nbytes // row if many_slots else n
    dst = pool.flat[: slots * row].view(slots, row)
    src = torch.zeros(n, row, dtype=torch.uint8, device=device)
    src[:, ::64] = fingerprints(torch.arange(1), torch.arange(n), row // 64)[0].to(device)
    step = slots // n
    if order == "pairs":  # ascending, and a pair astride every even position
        dst_indices = (torch.arange(n) + 1) // 2 * step
    else:
        dst_indices = torch.cat([torch.arange(n // 2), torch.arange(n // 2 - 1, -1, -1)]) * step
    src_indices = torch.arange(n)
    for _ in range(3):
        transfer_kv([dst], [src], dst_indices, src_indices)
        kept_dst, kept_src = entries_that_move(dst_indices, src_indices)
        assert torch.equal(dst[::step].cpu()[kept_dst // step], src.cpu()[kept_src])
    pool.close()


def test_rows_of_150_mb(checked_placement: Placement) -> None:
    """One row is more than one launch; its length is odd."""
    placement = checked_placement
    row = 150_000_001
    src = allocate_bytes(2 * row, placement.src_memory, placement.device).view(2, row)
    dst = allocate_bytes(2 * row, placement.dst_memory, placement.device).view(2, row)
    pattern = torch.arange(row, dtype=torch.int32) * 40503 >> 8
    src[1].copy_(pattern)
    dst.fill_(77)
    transfer_kv([dst], [src], placement.dst_indices([0]), placement.src_indices([1]))
    if placement.device != "cpu":
        torch.accelerator.synchronize(placement.device)
    assert torch.equal(dst[0].cpu(), pattern.to(torch.uint8))
    assert num_nonzero(dst[1].cpu() != 77) == 0


def test_five_million_entries(placement: Placement) -> None:
    """More than a grid axis holds; each row is its own number."""
    n = 5_000_000
    src = allocate_bytes(8 * n, placement.src_memory, placement.device).view(torch.int64)
    dst = allocate_bytes(8 * n, placement.dst_memory, placement.device).view(torch.int64)
    src.copy_(torch.arange(n))
    dst.fill_(-1)
    generator = torch.Generator().manual_seed(0)
    dst_indices = torch.randperm(n, generator=generator, dtype=torch.int32)
    src_indices = torch.arange(n - 1, -1, -1)
    transfer_kv(
        [dst],
        [src],
        placement.dst_indices(dst_indices, torch.int32),
        placement.src_indices(src_indices, torch.int64),
    )
    if placement.device != "cpu":
        torch.accelerator.synchronize(placement.device)
    assert torch.equal(dst.cpu()[dst_indices.long()], src_indices)
