"""The copy kernel on the emulation, without torch: parameters, launch, counters and a reference."""

import ctypes
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path

from ascend_sim import Simulator

HEADER_WORDS, GROUP_WORDS = 16, 7
ERROR_LINE_BYTES = 64
GUARD = 64
CORES = 48
BUFFER_BYTES = 196608


@dataclass
class Side:
    """One pool in one piece: planes of `[slots, row]` with any distance, and loops inside the row."""

    base: int  # address for the kernel
    nbytes: int
    plane_offsets: list[int]
    slot_stride: int
    loop_strides: list[int] = field(default_factory=list)


@dataclass
class Group:
    chunk_bytes: int
    loop_sizes: list[int]
    dst: Side
    src: Side

    def words(self, at: int) -> tuple[list[int], list[int]]:
        """The group's own words and what they point to, which begins at word `at`."""
        loops = [
            word
            for size, *strides in zip(
                self.loop_sizes, self.dst.loop_strides, self.src.loop_strides, strict=True
            )
            for word in (size, *strides)
        ]
        planes = [
            word
            for dst, src in zip(self.dst.plane_offsets, self.src.plane_offsets, strict=True)
            for word in (self.dst.base + dst, self.src.base + src)
        ]
        own = [
            self.chunk_bytes,
            self.dst.slot_stride,
            self.src.slot_stride,
            len(self.loop_sizes),
            at,
            len(self.dst.plane_offsets),
            at + len(loops),
        ]
        return own, loops + planes

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Offsets on both sides of slot 0's chunks."""
        for dst, src in zip(self.dst.plane_offsets, self.src.plane_offsets, strict=True):
            for index in product(*map(range, self.loop_sizes)):
                yield (
                    dst + sum(i * stride for i, stride in zip(index, self.dst.loop_strides, strict=True)),
                    src + sum(i * stride for i, stride in zip(index, self.src.loop_strides, strict=True)),
                )


@dataclass(frozen=True)
class Counters:
    launches: int
    load_requests: int
    store_requests: int
    loaded_bytes: int
    stored_bytes: int
    max_buffers_in_flight: int
    blocks: int  # of the last launch


class Kernel:
    """One build of the kernel, and its error record."""

    def __init__(self, library: Path, sim: Simulator) -> None:
        self.sim = sim
        self.lib = ctypes.CDLL(str(library))
        self.lib.emulation_last_error.restype = ctypes.c_char_p
        self.record = sim.malloc(2 * CORES * ERROR_LINE_BYTES)

    def set(self, *, backward: bool, stores_first: bool) -> None:
        self.lib.emulation_set(ctypes.c_int64(BUFFER_BYTES), int(backward), int(stores_first))

    def counters(self) -> Counters:
        out = (ctypes.c_int64 * 7)()
        self.lib.emulation_counters(out)
        return Counters(*out)

    @property
    def last_error(self) -> str:
        return self.lib.emulation_last_error().decode()

    def upload(self, data: bytes) -> int:
        address = self.sim.malloc(len(data))
        self.sim.write(address, data)
        return address

    def clear_errors(self) -> None:
        """The whole record, as the host finds it at first."""
        self.sim.write(self.record, bytes(2 * CORES * ERROR_LINE_BYTES))

    def errors(self) -> list[tuple[int, ...]]:
        """(what, call, position, value, limit) of each core that has reported."""
        lines = self.sim.read(self.record, 2 * CORES * ERROR_LINE_BYTES)[CORES * ERROR_LINE_BYTES :]
        words = [struct.unpack_from("6q", lines, core * ERROR_LINE_BYTES) for core in range(CORES)]
        return [tuple(line[1:]) for line in words if line[0]]

    def launch(
        self,
        groups: Sequence[Group],
        dst_indices: Sequence[int],
        src_indices: Sequence[int],
        *,
        slots: tuple[int, int],
        blocks: int = 1,
        count: int | None = None,
        index_format: str = "q",
        buffer_bytes: int = 94208,
        reports: bool = True,
        call: int = 1,
    ) -> int:
        """Run to the end; the driver's number."""
        n = len(dst_indices)
        is_int64 = int(index_format == "q")
        packed = [
            struct.pack(f"{n}{index_format}", *indices) or b"\0" for indices in (dst_indices, src_indices)
        ]
        dst_address, src_address = (self.upload(indices) for indices in packed)
        count_address = 0 if count is None else self.upload(struct.pack("q", count))
        words = [dst_address, 1, is_int64, src_address, 1, is_int64, count_address, 1, n, *slots]
        words += [self.record if reports else 0, CORES, call, buffer_bytes, len(groups)]
        assert len(words) == HEADER_WORDS
        tail: list[int] = []
        for group in groups:
            own, rest = group.words(HEADER_WORDS + GROUP_WORDS * len(groups) + len(tail))
            words += own
            tail += rest
        words += tail
        params = self.upload(struct.pack(f"{len(words)}q", *words))
        launched = self.lib.aclrtlaunch_hicache_kv_exchange(blocks, None, ctypes.c_void_p(params))
        assert launched == 0
        return self.sim.synchronize()


def reference(
    group: Group, dst: bytearray, src: bytes, entries: Sequence[tuple[int, int]], slots: tuple[int, int]
) -> None:
    """The same copy in Python, of entries that are in range."""
    for dst_slot, src_slot in entries:
        if not (0 <= dst_slot < slots[0] and 0 <= src_slot < slots[1]):
            continue
        for dst_at, src_at in group.chunks():
            to = dst_at + dst_slot * group.dst.slot_stride
            at = src_at + src_slot * group.src.slot_stride
            dst[to : to + group.chunk_bytes] = src[at : at + group.chunk_bytes]
