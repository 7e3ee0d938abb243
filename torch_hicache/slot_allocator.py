"""Which slots of a pool are free, and which a transfer still uses.

Slots are handed out in whole pages and in runs as long as can be: neighbouring slots are one copy for a
copy engine, and scattered rows of a big host pool collapse (docs/design.md, "Pools"). Indices only: no
memory, no device.
"""

import heapq
import operator
import threading
from array import array
from bisect import bisect_left, insort
from collections.abc import Sequence

import torch
from torch import Tensor

from torch_hicache.layout import UNITS

_FREE, _ALLOCATED, _DRAINING = 0, 1, 2  # _DRAINING: freed, but a transfer holds it


class FreeRuns:
    """Free pages as runs, each as long as it can be.

    The lengths of a run stand at both of its ends, so that a neighbour is found at once. By length,
    starts are in heaps; the lengths that occur are a sorted list, which is short: runs of k lengths
    need k * k / 2 pages. A heap keeps entries of runs that are gone until they reach its top.
    """

    def __init__(self, num_pages: int) -> None:
        self._length_at_start = array("q", bytes(8 * num_pages))
        self._length_at_last = array("q", bytes(8 * num_pages))
        self._num_pages = num_pages
        self._lengths: list[int] = []
        self._starts: dict[int, list[int]] = {}  # length -> heap of starts
        self._num_runs: dict[int, int] = {}  # length -> runs in use of its heap
        self.add(0, num_pages)

    def add(self, start: int, length: int) -> None:
        """Pages that become free, joined with free neighbours."""
        if start and (before := self._length_at_last[start - 1]):
            self._remove(start - before, before)
            start, length = start - before, length + before
        end = start + length
        if end < self._num_pages and (behind := self._length_at_start[end]):
            self._remove(end, behind)
            length += behind
        self._length_at_start[start] = self._length_at_last[start + length - 1] = length
        if length not in self._starts:
            insort(self._lengths, length)
            self._starts[length], self._num_runs[length] = [], 0
        self._num_runs[length] += 1
        starts = self._starts[length]
        if len(starts) > 2 * self._num_runs[length] + 64:
            # Mostly runs that are gone, and starts that came back. This one is among the valid.
            starts[:] = {s for s in starts if self._length_at_start[s] == length} | {start}
            heapq.heapify(starts)
        else:
            heapq.heappush(starts, start)

    def take(self, wanted: int) -> tuple[int, int]:
        """Remove (start, length) of a run: the shortest that holds `wanted` pages, of equals the one of
        the lowest address. Where none does, the longest there is. There must be a run.
        """
        at = bisect_left(self._lengths, wanted)
        length = self._lengths[min(at, len(self._lengths) - 1)]
        starts = self._starts[length]
        while self._length_at_start[starts[0]] != length:
            heapq.heappop(starts)
        start = heapq.heappop(starts)
        self._remove(start, length)
        return start, length

    def runs(self) -> list[tuple[int, int]]:
        """(start, length) of every run, by address."""
        return [(s, length) for s, length in enumerate(self._length_at_start) if length]

    def _remove(self, start: int, length: int) -> None:
        self._length_at_start[start] = self._length_at_last[start + length - 1] = 0
        self._num_runs[length] -= 1
        if not self._num_runs[length]:
            del self._lengths[bisect_left(self._lengths, length)]
            del self._starts[length], self._num_runs[length]


class SlotAllocator:
    """Hands slots out and takes them back. Safe to use from several threads; waits for no device
    (indices on a device are copied to the CPU, which waits for their stream).

    A slot can be handed out when it is neither allocated nor held. `hold` and `release` count, and
    may be used on slots that were never allocated here, as those of an engine that manages its own.

    Every method takes `unit`: whether its indices (and counts) are of slots or of pages.

    Args:
        num_slots: whole pages.
        page_size: slots in a page. Slots are allocated, freed and held by page.
    """

    BYTES_PER_PAGE = 8 + 8 + 1 + 4 + 8  # two tables of runs, state, holds, and what building them takes

    def __init__(self, num_slots: int, page_size: int = 1) -> None:
        self.num_slots, self.page_size = num_slots, page_size
        self.num_pages = num_slots // page_size
        self._runs = FreeRuns(self.num_pages)
        with torch.inference_mode(False):  # other threads write them, in a mode of their own
            self._state = torch.zeros(self.num_pages, dtype=torch.uint8)
            self._holds = torch.zeros(self.num_pages, dtype=torch.int32)
        self._num_free = self.num_pages  # in state _FREE, held or not
        self._holds_on_free = 0  # the sum of _holds of pages in state _FREE
        self._lock = threading.Lock()

    @property
    def available(self) -> int:
        """Slots that can be handed out now."""
        with self._lock:
            return self._available_pages() * self.page_size

    def allocate(self, n: int, *, unit: str = "slot") -> Tensor:
        """Take `n` slots, in as few runs as the free slots allow. Returns int64 on the CPU, ascending.

        Raises:
            ValueError: `n` is negative, or not whole pages.
            MemoryError: fewer are available.
        """
        try:
            n = operator.index(n)
        except TypeError:
            raise ValueError(f"[allocate] n must be an integer, got {n!r}.") from None
        num_pages = n if self._is_page(unit) else n // self.page_size
        if n < 0 or (unit == "slot" and n % self.page_size):
            raise ValueError(
                f"[allocate] n must be whole pages of {self.page_size}, 0 or more, got {n:,}."
            )
        with self._lock:
            available = self._available_pages()
            if num_pages > available:
                waiting = int(((self._holds > 0) & (self._state != _ALLOCATED)).sum())
                raise MemoryError(
                    f"[allocate] {num_pages * self.page_size:,} slots were asked for, "
                    f"{available * self.page_size:,} of {self.num_slots:,} are available "
                    f"(transfers hold {waiting * self.page_size:,} more)."
                )
            runs: list[tuple[int, int]] = []
            missing = num_pages
            while missing:
                start, length = self._runs.take(missing)
                if self._holds_on_free and self._set_held_aside(start, length):
                    continue
                if length > missing:
                    self._runs.add(start + missing, length - missing)
                    length = missing
                runs.append((start, length))
                missing -= length
            runs.sort()
            pages = _expand(runs, 1)
            self._state.index_fill_(0, pages, _ALLOCATED)
            self._num_free -= num_pages
        return pages if unit == "page" or self.page_size == 1 else _expand(runs, self.page_size)

    def free(self, indices: Tensor | Sequence[int], *, unit: str = "slot") -> None:
        """Give slots back, whole pages in any order. Those that are held become available at their last
        release. All are freed, or none.

        Raises:
            IndexError: an index is not a slot of this pool.
            ValueError: a slot is not allocated (it was freed before, say), comes twice, or is part of a
                page whose other slots are missing.
        """
        pages = self._whole_pages(self._checked("free", indices, unit, lowest=0), unit)
        if not len(pages):
            return
        with self._lock:
            state = self._state.index_select(0, pages)
            if _bounds(state) != (_ALLOCATED, _ALLOCATED):
                page = int(pages[state != _ALLOCATED][0])
                what = f"{unit} {page if unit == 'page' else page * self.page_size:,}"
                raise ValueError(f"[free] slots must be allocated, {what} is not. Was it freed before?")
            holds = self._holds.index_select(0, pages)
            if _bounds(holds)[1]:
                self._state.index_fill_(0, pages[holds > 0], _DRAINING)
                pages = pages[holds == 0]
            self._give_back(pages)

    def hold(self, indices: Tensor | Sequence[int], *, unit: str = "slot") -> None:
        """Keep slots from being handed out until they are released as often as they were held. An index
        that comes twice counts twice; -1 is skipped. A slot holds its whole page.

        Raises:
            IndexError: an index is not a slot of this pool.
        """
        pages = self._pages(self._checked("hold", indices, unit, lowest=-1), unit)
        with self._lock:
            self._add_holds(pages, 1)

    def release(self, indices: Tensor | Sequence[int], *, unit: str = "slot") -> None:
        """Undo one `hold` of the same indices. All are released, or none.

        Raises:
            IndexError: an index is not a slot of this pool.
            ValueError: a slot is not held as often.
        """
        pages = self._pages(self._checked("release", indices, unit, lowest=-1), unit)
        if not len(pages):
            return
        with self._lock:
            self._add_holds(pages, -1)
            left = self._holds.index_select(0, pages)
            if _bounds(left)[0] < 0:
                self._add_holds(pages, 1)
                page = int(pages[left < 0][0])
                raise ValueError(
                    f"[release] slots must be held, those of page {page:,} are not held so often. "
                    "Were they released before?"
                )
            state = self._state.index_select(0, pages)
            if _bounds(state)[1] == _DRAINING:
                self._give_back(pages[(left == 0) & (state == _DRAINING)].unique())

    def num_free_runs(self) -> int:
        """Runs that the free slots lie in: 1 is no fragmentation at all."""
        with self._lock:
            return len(self._runs.runs())

    # --- Under the lock -------------------------------------------------------------------------

    def _available_pages(self) -> int:
        if not self._holds_on_free:
            return self._num_free
        return self._num_free - int(((self._state == _FREE) & (self._holds > 0)).sum())

    def _add_holds(self, pages: Tensor, step: int) -> None:
        self._holds.index_add_(0, pages, torch.full((len(pages),), step, dtype=torch.int32))
        if self._num_free:
            num_used = int(torch.count_nonzero(self._state.index_select(0, pages)))
            self._holds_on_free += step * (len(pages) - num_used)

    def _set_held_aside(self, start: int, length: int) -> bool:
        """Of a run just taken: held pages wait for their release, the rest is free again."""
        pages = torch.arange(start, start + length)
        holds = self._holds[start : start + length]
        held = holds > 0
        if not bool(held.any()):
            return False
        self._holds_on_free -= int(holds.sum())
        self._num_free -= length
        self._state[pages[held]] = _DRAINING
        self._give_back(pages[~held])
        return True

    def _give_back(self, pages: Tensor) -> None:
        """Sorted pages that nobody uses become free."""
        if not len(pages):
            return
        self._state.index_fill_(0, pages, _FREE)
        self._num_free += len(pages)
        for start, length in _runs_of(pages):
            self._runs.add(start, length)

    # --- Indices --------------------------------------------------------------------------------

    def _is_page(self, unit: str) -> bool:
        if unit not in UNITS:
            raise ValueError(f"[pool] unit must be 'slot' or 'page', got '{unit}'.")
        return unit == "page"

    def _checked(self, verb: str, indices: Tensor | Sequence[int], unit: str, *, lowest: int) -> Tensor:
        limit = self.num_pages if self._is_page(unit) else self.num_slots
        if not isinstance(indices, Tensor):
            indices = torch.tensor(indices, dtype=None if len(indices) else torch.int64)
        if indices.dim() != 1 or indices.dtype not in (torch.int32, torch.int64):
            raise ValueError(
                f"[{verb}] indices must be 1-D, int32 or int64, got {list(indices.shape)} of "
                f"{indices.dtype}."
            )
        indices = indices.to("cpu", torch.int64)
        low, high = _bounds(indices)
        if low < lowest or high >= limit:
            position = int(((indices < lowest) | (indices >= limit)).nonzero()[0])
            raise IndexError(
                f"[{verb}] indices must be {unit}s from 0 to {limit - 1:,}, got "
                f"{int(indices[position]):,} at position {position:,}."
            )
        return indices

    def _pages(self, indices: Tensor, unit: str) -> Tensor:
        """The page of each index but those that are -1."""
        if _bounds(indices)[0] < 0:
            indices = indices[indices >= 0]
        return indices if unit == "page" else indices // self.page_size

    def _whole_pages(self, indices: Tensor, unit: str) -> Tensor:
        """Sorted pages, each once, whose slots `indices` are."""
        low, _ = _bounds(indices.diff())
        if low < 1:
            indices = indices.sort().values
            if bool((again := indices.diff() == 0).any()):
                twice = int(indices[1:][again][0])
                raise ValueError(f"[free] indices must come once each, got {unit} {twice:,} twice.")
        if unit == "page" or self.page_size == 1:
            return indices
        pages = indices[:: self.page_size] // self.page_size
        if not torch.equal(_slots_of(pages, self.page_size), indices):
            pages, counts = (indices // self.page_size).unique_consecutive(return_counts=True)
            torn = int((counts != self.page_size).nonzero()[0])
            raise ValueError(
                f"[free] indices must be whole pages of {self.page_size}, got "
                f"{int(counts[torn]):,} slots of page {int(pages[torn]):,}."
            )
        return pages


def _bounds(values: Tensor) -> tuple[int, int]:
    """The least and the largest of them; of none (1, 0)."""
    if not len(values):
        return 1, 0
    low, high = torch.aminmax(values)
    return int(low), int(high)


def _slots_of(pages: Tensor, page_size: int) -> Tensor:
    return (pages.unsqueeze(1) * page_size + torch.arange(page_size)).flatten()


def _expand(runs: list[tuple[int, int]], page_size: int) -> Tensor:
    """The slots (or, with a page size of 1, the pages) of runs of pages."""
    if len(runs) == 1:
        start, length = runs[0]
        return torch.arange(start * page_size, (start + length) * page_size)
    starts, lengths = torch.tensor(runs, dtype=torch.int64).view(-1, 2).mul_(page_size).unbind(1)
    ends = lengths.cumsum(0)
    # By sums: 1 inside a run, at its first slot what lies between it and the last of the run in front.
    # (repeat_interleave would wake all threads of torch, however short the runs are.)
    steps = torch.ones(int(lengths.sum()), dtype=torch.int64)
    steps[ends - lengths] = starts - (starts + lengths - 1).roll(1)
    steps[:1] = starts[:1]
    return steps.cumsum(0)


def _runs_of(pages: Tensor) -> list[tuple[int, int]]:
    """(start, length) of the runs of sorted pages."""
    first, last = int(pages[0]), int(pages[-1])
    if last - first + 1 == len(pages):
        return [(first, len(pages))]
    breaks = (pages.diff() != 1).nonzero().flatten() + 1
    starts = torch.cat((breaks.new_zeros(1), breaks))
    lengths = torch.cat((breaks, breaks.new_tensor([len(pages)]))) - starts
    return list(zip(pages[starts].tolist(), lengths.tolist(), strict=True))
