"""Slots: runs as long as can be, every slot handed out once, nothing half done, holds that count."""

import random
import threading
from collections import Counter
from itertools import pairwise

import pytest
import torch

from torch_hicache.slot_allocator import FreeRuns, SlotAllocator


def slots_of(pages: list[int], page_size: int) -> list[int]:
    return [page * page_size + token for page in pages for token in range(page_size)]


class Model:
    """The same meaning, page by page."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self.allocated: set[int] = set()
        self.holds: Counter[int] = Counter()

    @property
    def available(self) -> set[int]:
        return {p for p in range(self.num_pages) if p not in self.allocated and not self.holds[p]}


def check_runs(slots: SlotAllocator, available: set[int]) -> None:
    """The runs are the free pages, and no two of them touch; lengths and starts are found."""
    runs = slots._runs.runs()
    pages = {page for start, length in runs for page in range(start, start + length)}
    assert len(pages) == sum(length for _, length in runs)
    assert all(a + length < b for (a, length), (b, _) in pairwise(runs))
    # A hold leaves a free page in its run; it is set aside when the run is taken.
    assert available <= pages
    assert all(slots._holds[page] > 0 for page in pages - available)
    assert slots._runs._lengths == sorted(slots._runs._starts)
    assert Counter(length for _, length in runs) == slots._runs._num_runs
    assert all(start in slots._runs._starts[length] for start, length in runs)


@pytest.mark.parametrize("page_size", [1, 3])
@pytest.mark.parametrize("seed", range(6))
def test_random_operations_agree_with_a_model(page_size: int, seed: int) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    num_pages = 41
    slots, model = SlotAllocator(num_pages * page_size, page_size), Model(num_pages)
    held: list[tuple[str, list[int]]] = []
    seen: Counter[str] = Counter()
    for step in range(1500):
        action = rng.choice(["allocate", "allocate", "free", "free", "hold", "release"])
        unit = rng.choice(["slot", "page"])
        sizes = {"slot": page_size, "page": 1}
        available = model.available
        if action == "allocate":
            wanted = rng.randint(0, 12)
            if wanted > len(available):
                action = "no room"
                with pytest.raises(MemoryError, match=rf" {len(available) * page_size} of "):
                    slots.allocate(wanted * sizes[unit], unit=unit)
            else:
                got = slots.allocate(wanted * sizes[unit], unit=unit)
                assert got.dtype == torch.int64
                pages = sorted(set((got // sizes[unit]).tolist()))
                assert got.tolist() == slots_of(pages, sizes[unit])
                assert len(pages) == wanted
                assert available >= set(pages)
                model.allocated |= set(pages)
        elif action == "free":
            pages = rng.sample(sorted(model.allocated), rng.randint(0, len(model.allocated)))
            indices = torch.tensor(
                slots_of(pages, sizes[unit]), dtype=rng.choice([torch.int32, torch.int64])
            )
            slots.free(indices[torch.randperm(len(indices))], unit=unit)
            model.allocated -= set(pages)
        elif action == "hold":
            pages = rng.choices(range(num_pages), k=rng.randint(0, 5))
            slots.hold(slots_of(pages, sizes[unit]), unit=unit)
            held.append((unit, pages))
            model.holds.update(pages)
        elif held:
            unit, pages = held.pop(rng.randrange(len(held)))
            slots.release(slots_of(pages, sizes[unit]), unit=unit)
            model.holds.subtract(pages)
        seen[action] += 1
        assert slots.available == len(model.available) * page_size, (step, action)
        check_runs(slots, model.available)
    assert min(seen.values()) > 50
    for unit, pages in held:
        slots.release(slots_of(pages, sizes[unit]), unit=unit)
    slots.free(sorted(model.allocated), unit="page")
    assert (slots.available, slots.num_free_runs()) == (num_pages * page_size, 1)


# --- Runs ------------------------------------------------------------------------------------------


def with_holes(*holes: tuple[int, int], num_slots: int = 100) -> SlotAllocator:
    """All slots allocated but those of (start, length)."""
    slots = SlotAllocator(num_slots)
    slots.allocate(num_slots)
    for start, length in holes:
        slots.free(range(start, start + length))
    return slots


def test_the_shortest_run_that_is_long_enough_is_taken() -> None:
    slots = with_holes((10, 20), (40, 5), (50, 7), (80, 5))
    assert slots.allocate(5).tolist() == [*range(40, 45)]  # of two, the lower address
    assert slots.allocate(6).tolist() == [*range(50, 56)]
    assert slots.allocate(8).tolist() == [*range(10, 18)]
    assert slots.allocate(1).tolist() == [56]


def test_what_no_run_holds_is_of_as_few_runs_as_can_be() -> None:
    slots = with_holes((10, 3), (20, 9), (40, 4), (60, 6))
    # The two longest, and of the rest the run that fits: in the order of their addresses.
    assert slots.allocate(18).tolist() == [10, 11, 12, *range(20, 29), *range(60, 66)]
    assert slots.available == 4


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)])
def test_neighbours_become_one_run(order: tuple[int, ...]) -> None:
    slots = with_holes()
    for part in order:
        slots.free(range(10 + part * 5, 15 + part * 5))
    assert slots.num_free_runs() == 1
    assert slots.allocate(15).tolist() == [*range(10, 25)]


def test_the_ends_of_the_pool_are_no_neighbours() -> None:
    slots = with_holes((0, 2), (98, 2))
    assert slots.num_free_runs() == 2
    assert slots.allocate(4).tolist() == [0, 1, 98, 99]


def test_the_index_of_runs_does_not_grow_with_time() -> None:
    """Runs that are gone stay in a heap for a while, where runs of length 1 are there all the time."""
    runs = FreeRuns(1000)
    runs.take(1000)
    for start in (999, 995, 997):
        runs.add(start, 1)
    for i in range(5000):
        start = 1 + i % 400 * 2
        runs.add(start, 1)
        runs.add(start + 1, 1)  # a run of two: the entry of the run of one is left behind
        assert runs.take(2) == (start, 2)
        assert runs._starts[1][0] == min(runs._starts[1])
    assert sum(map(len, runs._starts.values())) < 100
    assert [runs.take(1) for _ in range(3)] == [(995, 1), (997, 1), (999, 1)]


def test_pages_are_handed_out_whole() -> None:
    slots = SlotAllocator(40, page_size=4)
    assert slots.allocate(8).tolist() == [*range(8)]
    assert slots.allocate(2, unit="page").tolist() == [2, 3]
    slots.free([1], unit="page")
    assert slots.allocate(4).tolist() == [4, 5, 6, 7]
    assert slots.available == 24
    assert slots.allocate(0).tolist() == []


# --- What is refused, and that nothing is done then --------------------------------------------------


@pytest.mark.parametrize(
    ("n", "unit", "text"),
    [
        (6, "slot", "n must be whole pages of 4, 0 or more, got 6"),
        (-4, "slot", "n must be whole pages of 4, 0 or more, got -4"),
        (-1, "page", "n must be whole pages of 4, 0 or more, got -1"),
    ],
)
def test_what_is_no_number_of_pages_is_refused(n: int, unit: str, text: str) -> None:
    slots = SlotAllocator(40, page_size=4)
    with pytest.raises(ValueError, match=rf"^\[allocate\] {text}\.$"):
        slots.allocate(n, unit=unit)
    assert slots.available == 40


def test_too_much_is_refused_with_the_numbers() -> None:
    slots = SlotAllocator(4000, page_size=4)
    taken = slots.allocate(1200)
    slots.hold(taken[:8])
    slots.free(taken[:400])
    slots.hold([3999])
    with pytest.raises(
        MemoryError,
        match=r"^\[allocate\] 4,000 slots were asked for, 3,188 of 4,000 are available \(transfers hold "
        r"12 more\)\.$",
    ):
        slots.allocate(4000)
    assert slots.available == 3188
    assert len(slots.allocate(3188)) == 3188


@pytest.mark.parametrize(
    ("indices", "unit", "error", "text"),
    [
        ([8, 9, 10, 11, 0, 1, 2, 3], "slot", ValueError, "slots must be allocated, slot 8 is not"),
        ([0, 2], "page", ValueError, "slots must be allocated, page 2 is not"),
        ([0, 0], "page", ValueError, "indices must come once each, got page 0 twice"),
        ([0, 1, 2, 3, 2], "slot", ValueError, "indices must come once each, got slot 2 twice"),
        (
            [0, 1, 2, 3, 5, 6, 7],
            "slot",
            ValueError,
            "indices must be whole pages of 4, got 3 slots of page 1",
        ),
        ([2, 3, 4, 5], "slot", ValueError, "indices must be whole pages of 4, got 2 slots of page 0"),
        (
            [0, 1, 2, 3, 40],
            "slot",
            IndexError,
            "indices must be slots from 0 to 39, got 40 at position 4",
        ),
        ([-1, 0], "page", IndexError, "indices must be pages from 0 to 9, got -1 at position 0"),
        ([10], "page", IndexError, "indices must be pages from 0 to 9, got 10 at position 0"),
        ([2**40], "slot", IndexError, "indices must be slots from 0 to 39, got 1,099,511,627,776 at"),
        ([0.0], "page", ValueError, r"indices must be 1-D, int32 or int64, got \[1\] of torch.float32"),
        (
            [[0, 1]],
            "page",
            ValueError,
            r"indices must be 1-D, int32 or int64, got \[1, 2\] of torch.int64",
        ),
        ([0], "token", ValueError, "unit must be 'slot' or 'page', got 'token'"),
    ],
    ids=str,
)
def test_nothing_is_freed_of_what_can_not_be_freed(
    indices: list, unit: str, error: type[Exception], text: str
) -> None:
    slots = SlotAllocator(40, page_size=4)
    slots.allocate(8)
    with pytest.raises(error, match=rf"^\[(free|pool)\] {text}"):
        slots.free(indices, unit=unit)
    assert slots.available == 32
    slots.free([*range(8)])
    assert (slots.available, slots.num_free_runs()) == (40, 1)


def test_a_second_free_is_refused() -> None:
    slots = SlotAllocator(10)
    taken = slots.allocate(6)
    slots.free(taken[2:4])
    for again in (taken, taken[2:4], taken[3:5]):
        with pytest.raises(ValueError, match=r"slot [23] is not\. Was it freed before\?$"):
            slots.free(again)
    assert slots.available == 6


def test_a_second_free_of_held_slots_is_refused() -> None:
    slots = SlotAllocator(10)
    taken = slots.allocate(6)
    slots.hold(taken)
    slots.free(taken)
    with pytest.raises(ValueError, match=r"slot 0 is not\. Was it freed before\?$"):
        slots.free(taken)
    slots.release(taken)
    assert slots.available == 10


# --- Holds -------------------------------------------------------------------------------------------


def test_held_slots_come_back_at_the_last_release() -> None:
    slots = SlotAllocator(10)
    taken = slots.allocate(10)
    slots.hold(taken[:4])
    slots.hold(taken[2:6])
    slots.free(taken)
    assert slots.available == 4
    assert slots.allocate(4).tolist() == [6, 7, 8, 9]
    slots.release(taken[2:6])
    assert slots.available == 2
    assert slots.allocate(2).tolist() == [4, 5]
    with pytest.raises(MemoryError):
        slots.allocate(1)
    slots.release(taken[:4])
    assert slots.allocate(4).tolist() == [0, 1, 2, 3]


def test_a_hold_does_not_free() -> None:
    slots = SlotAllocator(10)
    taken = slots.allocate(10)
    slots.hold(taken)
    slots.release(taken)
    assert slots.available == 0


def test_an_index_that_comes_twice_is_held_twice() -> None:
    slots = SlotAllocator(4)
    slots.hold([1, 1, 2])
    slots.release([1, 2])
    assert slots.available == 3
    slots.release([1])
    assert slots.available == 4


def test_padding_is_not_held() -> None:
    slots = SlotAllocator(8, page_size=2)
    slots.hold([-1, 3, -1])
    assert slots.available == 6
    slots.release([-1, 3, -1])
    slots.hold(torch.full((3,), -1))
    assert slots.available == 8


def test_slots_that_were_never_allocated_can_be_held() -> None:
    slots = SlotAllocator(10)
    slots.hold([4, 7])
    assert slots.available == 8
    assert slots.allocate(8).tolist() == [0, 1, 2, 3, 5, 6, 8, 9]
    slots.release([7])
    assert slots.allocate(1).tolist() == [7]
    slots.release([4])
    slots.free(range(4))
    assert slots.allocate(5).tolist() == [0, 1, 2, 3, 4]


def test_a_slot_holds_its_page() -> None:
    slots = SlotAllocator(12, page_size=4)
    slots.hold([5])
    assert slots.available == 8
    slots.hold([5, 6])
    slots.release([5, 6])
    assert slots.available == 8
    slots.release([5])
    assert slots.available == 12


@pytest.mark.parametrize(
    ("verb", "indices", "error"),
    [
        ("hold", [0, 10], IndexError),
        ("hold", [0, -2], IndexError),
        ("release", [0, 10], IndexError),
        ("release", [0, 1], ValueError),
        ("release", [0, 0], ValueError),
    ],
)
def test_nothing_is_done_of_a_bad_hold_or_release(
    verb: str, indices: list[int], error: type[Exception]
) -> None:
    slots = SlotAllocator(10)
    slots.hold([0])
    with pytest.raises(error, match=rf"^\[{verb}\] (indices|slots) must be "):
        getattr(slots, verb)(indices)
    assert slots.available == 9
    slots.release([0])
    assert slots.available == 10
    assert slots.allocate(10).tolist() == [*range(10)]


# --- Threads and devices -------------------------------------------------------------------------------


def test_threads_never_get_the_same_slot() -> None:
    slots = SlotAllocator(512)
    owners = torch.full((512,), -1)
    failures: list[str] = []

    def work(me: int) -> None:
        rng = random.Random(me)
        for _ in range(300):
            try:
                taken = slots.allocate(rng.randint(1, 120))
            except MemoryError:
                continue
            if bool((owners[taken] != -1).any()):
                failures.append(f"thread {me} got slots of another")
            owners[taken] = me
            slots.hold(taken)
            if bool((owners[taken] != me).any()):
                failures.append(f"slots of thread {me} went to another")
            owners[taken] = -1
            slots.release(taken)
            slots.free(taken)

    threads = [threading.Thread(target=work, args=(me,)) for me in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert (slots.available, slots.num_free_runs()) == (512, 1)


def test_indices_may_be_on_the_device(device: str) -> None:
    slots = SlotAllocator(16, page_size=2)
    taken = slots.allocate(8).to(device)
    slots.hold(taken)
    slots.free(taken)
    assert slots.available == 8
    slots.release(taken.int())
    assert slots.available == 16
