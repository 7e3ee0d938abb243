"""The AscendC kernel alone on the emulation: bytes, transfers, buffers, errors, mutants of its source."""

import ctypes
import random
from collections.abc import Callable
from pathlib import Path

import ascend_sim
import pytest
from ascend_emulation import GUARD, Group, Kernel, Side, reference
from ascend_sim import Simulator
from ascend_sim.build import build_kernel

pytestmark = pytest.mark.skipif(not ascend_sim.FOLDER, reason=ascend_sim.REASON)

SCHEDULES = [(backward, stores_first) for backward in (False, True) for stores_first in (False, True)]
SLOTS = (40, 37)


@pytest.fixture(scope="module")
def sim() -> Simulator:
    return Simulator()


@pytest.fixture(scope="module")
def kernel(sim: Simulator) -> Kernel:
    return Kernel(Path(ascend_sim.FOLDER) / "_ascend_kernel.so", sim)


@pytest.fixture(
    params=SCHEDULES, ids=lambda schedule: f"backward{schedule[0]:d}-stores_first{schedule[1]:d}"
)
def schedule(request: pytest.FixtureRequest, kernel: Kernel) -> None:
    kernel.set(backward=request.param[0], stores_first=request.param[1])


def make_group(
    sim: Simulator,
    chunk: int,
    *,
    planes: int = 1,
    loops: tuple[int, ...] = (),
    dst_gap: int = 0,
    src_gap: int = 0,
    is_dst_host: bool = False,
) -> tuple[Group, bytearray, bytes]:
    """Pools of random bytes with guards, one on the device and one of registered host memory."""
    sides, contents = [], []
    generator = random.Random(chunk)
    for slots, gap, is_host in ((SLOTS[0], dst_gap, is_dst_host), (SLOTS[1], src_gap, not is_dst_host)):
        strides = []
        row = chunk
        for size in reversed(loops):
            strides.insert(0, row + gap)
            row = size * (row + gap)
        slot_stride = row + gap
        plane_bytes = slots * slot_stride
        nbytes = planes * plane_bytes + 2 * GUARD
        data = generator.randbytes(nbytes)
        if is_host:
            host = sim.malloc_host(nbytes)
            ctypes.memmove(host, data, nbytes)
            base = sim.register(host, nbytes)
        else:
            base = sim.malloc(nbytes)
            sim.write(base, data)
        offsets = [GUARD + plane * plane_bytes for plane in range(planes)]
        sides.append(Side(base, nbytes, offsets, slot_stride, strides))
        contents.append(data)
    return Group(chunk, list(loops), *sides), bytearray(contents[0]), contents[1]


def check(
    kernel: Kernel,
    made: tuple[Group, bytearray, bytes],
    dst_indices: list[int],
    src_indices: list[int],
    *,
    count: int | None = None,
    blocks: int = 1,
    buffer_bytes: int = 94208,
    index_format: str = "q",
) -> None:
    """All bytes of the destination, guards and gaps too."""
    group, expected, src = made
    result = kernel.launch(
        [group],
        dst_indices,
        src_indices,
        slots=SLOTS,
        count=count,
        blocks=blocks,
        buffer_bytes=buffer_bytes,
        index_format=index_format,
    )
    assert result == 0, kernel.last_error
    moved = list(zip(dst_indices, src_indices, strict=True))[: None if count is None else max(count, 0)]
    reference(group, expected, src, moved, SLOTS)
    assert kernel.sim.read(group.dst.base, group.dst.nbytes) == bytes(expected)


def scattered(n: int, seed: int = 0) -> tuple[list[int], list[int]]:
    generator = random.Random(seed)
    return generator.sample(range(SLOTS[0]), n), [generator.randrange(SLOTS[1]) for _ in range(n)]


CASES: dict[str, Callable[[Simulator], tuple[Group, bytearray, bytes]]] = {
    "one byte": lambda sim: make_group(sim, 1),
    "odd rows": lambda sim: make_group(sim, 577, planes=3, dst_gap=5, src_gap=3),
    "joined": lambda sim: make_group(sim, 96, planes=2),
    "gap on one side": lambda sim: make_group(sim, 64, dst_gap=32, is_dst_host=True),
    "loops": lambda sim: make_group(sim, 40, planes=2, loops=(3, 2), dst_gap=7),
    "longer than a buffer": lambda sim: make_group(sim, 5000, src_gap=1),
}


@pytest.mark.usefixtures("schedule")
@pytest.mark.parametrize("blocks", [1, 3, 48])
@pytest.mark.parametrize("case", CASES)
def test_bytes(kernel: Kernel, sim: Simulator, case: str, blocks: int) -> None:
    """Small buffers, so that there are many; scattered slots, runs, padding and int32."""
    for dst_indices, src_indices in (
        scattered(30),
        (list(range(4, 34)), list(range(2, 32))),
        ([5, 6, 7, -1, 8, 9, 30, 31, 3], [5, 6, 7, 8, 9, -1, 11, 12, 30]),
    ):
        made = CASES[case](sim)
        check(kernel, made, dst_indices, src_indices, blocks=blocks, buffer_bytes=1024)
        check(kernel, made, dst_indices, src_indices, blocks=blocks, buffer_bytes=2048, index_format="i")


@pytest.mark.usefixtures("schedule")
@pytest.mark.parametrize("count", [0, 1, 7, 30])
def test_count(kernel: Kernel, sim: Simulator, count: int) -> None:
    dst_indices, src_indices = scattered(30)
    for i in range(count, 30):
        dst_indices[i] = 1 << 40
    kernel.clear_errors()
    check(kernel, CASES["odd rows"](sim), dst_indices, src_indices, count=count, blocks=5)
    assert kernel.errors() == []


def first_error(kernel: Kernel) -> tuple[int, ...] | None:
    """By call, then by position."""
    return min(kernel.errors(), key=lambda error: error[1:3], default=None)


@pytest.mark.usefixtures("schedule")
def test_bad_entries_are_skipped_and_the_first_is_recorded(kernel: Kernel, sim: Simulator) -> None:
    """By whichever core meets it; later ones of a core, and later launches, do not replace it."""
    kernel.clear_errors()
    dst_indices, src_indices = scattered(30)
    dst_indices[11], dst_indices[12], src_indices[20] = 40, -2, 1 << 62
    for blocks in (1, 30):
        check(kernel, CASES["odd rows"](sim), dst_indices, src_indices, blocks=blocks)
        assert first_error(kernel) == (0, 1, 11, 40, 40)
    check(kernel, CASES["odd rows"](sim), [50, *dst_indices], [0, *src_indices])
    assert first_error(kernel) == (0, 1, 11, 40, 40)
    kernel.clear_errors()
    check(kernel, CASES["odd rows"](sim), dst_indices, src_indices, count=-5)
    assert kernel.errors() == [(2, 1, -1, -5, 30)]


def counted(kernel: Kernel, run: Callable[[], None]) -> dict[str, int]:
    kernel.lib.emulation_reset_counters()
    run()
    return vars(kernel.counters())


@pytest.mark.usefixtures("schedule")
class TestTransfers:
    def test_a_row_is_read_once_and_written_once(self, kernel: Kernel, sim: Simulator) -> None:
        """One launch, and a transfer for each row where none are neighbours."""
        made = make_group(sim, 577, planes=3, dst_gap=5)
        dst_indices, src_indices = list(range(0, 30, 2)), list(range(29, -1, -2))
        seen = counted(kernel, lambda: check(kernel, made, dst_indices, src_indices, blocks=4))
        assert seen["launches"] == 1
        assert seen["load_requests"] == seen["store_requests"] == 15 * 3
        assert seen["loaded_bytes"] == seen["stored_bytes"] == 15 * 3 * 577

    def test_runs_of_a_page_are_one_transfer(self, kernel: Kernel, sim: Simulator) -> None:
        runs = [*range(0, 8), *range(20, 28), *range(10, 18)]
        for made in (make_group(sim, 576), make_group(sim, 576, src_gap=64)):
            seen = counted(kernel, lambda made=made: check(kernel, made, runs, [*range(24)]))
            assert seen["load_requests"] == seen["store_requests"] == 3

    def test_a_long_row_takes_as_many_as_it_has_buffers(self, kernel: Kernel, sim: Simulator) -> None:
        made = make_group(sim, 10_000)
        seen = counted(kernel, lambda: check(kernel, made, [3], [4], blocks=7, buffer_bytes=4096))
        assert seen["load_requests"] == seen["store_requests"] == 3

    def test_both_buffers_are_in_flight(self, kernel: Kernel, sim: Simulator) -> None:
        made = make_group(sim, 600, src_gap=8)
        seen = counted(kernel, lambda: check(kernel, made, *scattered(20), buffer_bytes=1024))
        assert seen["max_buffers_in_flight"] == 2


def test_memory_that_is_only_page_locked_is_out_of_reach(kernel: Kernel, sim: Simulator) -> None:
    """What the product refuses before; an AI core faults."""
    group, _, _ = make_group(sim, 64)
    group.src.base = sim.malloc_host(group.src.nbytes)
    assert kernel.launch([group], [1], [2], slots=SLOTS) == ascend_sim.AI_CORE_EXCEPTION
    assert "can't reach 64 bytes" in kernel.last_error
    assert sim.synchronize() == 0


# --- Mutants -------------------------------------------------------------------------------------

SOURCE = Path(__file__).parent.parent / "csrc" / "ascend" / "kv_exchange_kernel.cpp"
MTE2_S = "    AscendC::{}<AscendC::HardEvent::MTE2_S>(EVENT_ID0);\n"
S_MTE3 = "    AscendC::{}<AscendC::HardEvent::S_MTE3>(EVENT_ID0);\n"
ALLOC = "    Buffer buffer = queue_.AllocTensor<uint8_t>();\n"
DEQUE = "    Buffer buffer = queue_.DeQue<uint8_t>();\n"
ENQUE, FREE = "    queue_.EnQue(buffer);\n", "    queue_.FreeTensor(buffer);\n"

# Each synchronisation removed, or moved to where it protects nothing.
MUTANTS: dict[str, list[tuple[str, str]]] = {
    "loads are not waited for": [(ENQUE, ""), (ALLOC, ALLOC + ENQUE)],
    "a buffer is free before it is stored": [(FREE, ""), (DEQUE, DEQUE + FREE)],
    "no buffer is freed": [(FREE, "")],
    "nothing is queued": [(ENQUE, "")],
    "the old record is not waited for": [(MTE2_S.format("SetFlag"), ""), (MTE2_S.format("WaitFlag"), "")],
    "a flag is set for nobody": [(MTE2_S.format("WaitFlag"), "")],
    "the new record is not waited for": [(S_MTE3.format("SetFlag"), ""), (S_MTE3.format("WaitFlag"), "")],
    "a wait for no flag": [(S_MTE3.format("SetFlag"), "")],
    "the last buffers stay": [("    Finish();\n", "")],
    "destinations are not checked": [("dst_slot >= dst_slots_;", "false;")],
    "sources are not checked": [("src_slot >= src_slots_;", "false;")],
    "padding is not skipped": [(" && dst_slot >= 0 && src_slot >= 0", "")],
    "an earlier report is replaced": [("if (lines.GetValue(0) != 0)", "if (false)")],
    "runs ignore the source": [(" && next_src == src_slot + rows", "")],
}


def survives(kernel: Kernel, sim: Simulator) -> bool:
    """Whether nothing that the tests above look at is wrong."""
    try:
        for backward, stores_first in SCHEDULES:
            kernel.set(backward=backward, stores_first=stores_first)
            for case in ("odd rows", "joined"):
                for indices in (scattered(30), ([5, 6, 7, -1, 8], [5, 6, 9, 8, -1])):
                    check(kernel, CASES[case](sim), *indices, buffer_bytes=1024)
            test_bad_entries_are_skipped_and_the_first_is_recorded(kernel, sim)
    except AssertionError:
        sim.synchronize()
        return False
    return True


def test_the_kernel_itself_survives(kernel: Kernel, sim: Simulator) -> None:
    assert survives(kernel, sim)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_do_not(sim: Simulator, tmp_path: Path, name: str) -> None:
    source = SOURCE.read_text()
    for old, new in MUTANTS[name]:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    (tmp_path / "kernel.cpp").write_text(source)
    mutant = build_kernel(Path(ascend_sim.FOLDER), tmp_path / "kernel.cpp", str(tmp_path / "mutant.so"))
    assert not survives(Kernel(mutant, sim), sim)
