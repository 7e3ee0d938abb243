"""Stores and loads of block tensors in chunks, against plain copies of blocks, byte for byte."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from engine_fakes import FakeRuntime, FakeStream, GatedRuntime, wait_until
from torch import Tensor

from torch_hicache import testing
from torch_hicache.integrations.vllm.chunk_transfers import ChunkTransfers, GroupPlane, Job

BLOCKS, CHUNKS = 23, 9
PAGES = (64, 40, 97)  # bytes; the second lies in blocks of 56, of the third the first group uses 33
GROUPS = (
    (GroupPlane(0, 64), GroupPlane(2, 20), GroupPlane(2, 33)),
    (GroupPlane(1, 40),),
    (GroupPlane(2, 97), GroupPlane(0, 64)),
)


def make_tensors(device: str) -> list[Tensor]:
    memory = "cpu" if device == "cpu" else "device"
    tensors = [
        testing.strided_tensor((BLOCKS, page), torch.int8, memory, device, padding={0: 16 * (i == 1)})
        for i, page in enumerate(PAGES)
    ]
    testing.fill_pool(tensors)
    return tensors


class Plain:
    """What blocks and chunks must hold, kept by copying one block after the other."""

    def __init__(self, transfers: ChunkTransfers, tensors: list[Tensor], per_chunk: int) -> None:
        self.transfers, self.tensors, self.per_chunk = transfers, tensors, per_chunk
        testing.fill_pool(transfers.host_tensors, seed=1)
        self.blocks = [tensor.to("cpu", copy=True) for tensor in tensors]
        self.slots = [tensor.clone() for tensor in transfers.host_tensors]

    def move(
        self, is_store: bool, sizes: list[int], indices: list[int], blocks: list[int], chunks: list[int]
    ) -> None:
        blocks, chunks = list(blocks), list(chunks)
        for group, size, index in zip(GROUPS, sizes, indices, strict=True):
            chunk = -1
            for position in range(index, index + size):
                if chunk < 0 or position % self.per_chunk == 0:
                    chunk = chunks.pop(0)
                block, slot = blocks.pop(0), chunk * self.per_chunk + position % self.per_chunk
                for plane in group:
                    block_row = self.blocks[plane.tensor][block, : plane.row_bytes]
                    slot_row = self.slots[plane.tensor][slot, : plane.row_bytes]
                    if is_store:
                        slot_row.copy_(block_row)
                    else:
                        block_row.copy_(slot_row)
        assert not blocks
        assert not chunks

    def compare(self) -> None:
        for expected, tensor in zip(self.blocks, self.tensors, strict=True):
            assert torch.equal(expected, tensor.cpu())
        for expected, tensor in zip(self.slots, self.transfers.host_tensors, strict=True):
            assert torch.equal(expected, tensor)


@contextmanager
def transfers_on(
    device: str, per_chunk: int = 1, runtime: object = None
) -> Iterator[tuple[ChunkTransfers, Plain]]:
    tensors = make_tensors(device)
    transfers = ChunkTransfers(
        tensors,
        GROUPS,
        blocks_per_chunk=per_chunk,
        num_chunks=CHUNKS,
        runtime=runtime,  # type: ignore[arg-type]
    )
    plain = Plain(transfers, tensors, per_chunk)
    try:
        yield transfers, plain
    finally:
        if isinstance(runtime, FakeRuntime):
            runtime.drain()
        transfers.close()


def ended(transfers: ChunkTransfers) -> list[Job]:
    """All jobs in flight, once they have ended."""
    transfers.wait(transfers.in_flight())
    return transfers.finished()


def one_group(
    blocks: list[int], chunks: list[int], index: int = 0
) -> tuple[list[int], list[int], list[int], list[int]]:
    return blocks, [len(blocks), 0, 0], [index, 0, 0], chunks


@pytest.mark.parametrize("per_chunk", [1, 3])
def test_blocks_of_all_groups_come_back_from_chunks(device: str, per_chunk: int) -> None:
    choose = random.Random(per_chunk)
    with transfers_on(device, per_chunk) as (transfers, plain):
        for job_id in range(40):
            is_store = bool(choose.randrange(2))
            sizes = [choose.randrange(5) for _ in GROUPS]
            indices = [choose.randrange(20) for _ in GROUPS]
            reach = [
                -(-(i % per_chunk + s) // per_chunk) if s else 0
                for s, i in zip(sizes, indices, strict=True)
            ]
            blocks, chunks = (
                choose.sample(range(BLOCKS), sum(sizes)),
                choose.sample(range(CHUNKS), min(CHUNKS, sum(reach))),
            )
            if sum(reach) > CHUNKS:
                continue
            submit = transfers.store if is_store else transfers.load
            submit(job_id, blocks, sizes, indices, chunks)
            plain.move(is_store, sizes, indices, blocks, chunks)
            (job,) = ended(transfers)
            assert (job.job_id, job.is_store, job.error) == (job_id, is_store, None)
            assert job.seconds is not None
            assert job.seconds >= 0
            moved = [(64 + 33), 40, (97 + 64)]
            assert job.nbytes == sum(s * b for s, b in zip(sizes, moved, strict=True))
            plain.compare()


def test_a_transfer_may_begin_and_end_inside_a_chunk(device: str) -> None:
    """Blocks 4 to 8 of a sequence in chunks of 3: the last two of one, and all of the next."""
    with transfers_on(device, 3) as (transfers, plain):
        transfers.store(1, *one_group([11, 2, 7, 20, 5], [8, 1], index=4))
        assert ended(transfers)[0].error is None
        for plane in (GroupPlane(0, 64), GroupPlane(2, 33)):
            rows = [8 * 3 + 1, 8 * 3 + 2, 3, 4, 5]
            plain.slots[plane.tensor][rows, : plane.row_bytes] = plain.blocks[plane.tensor][
                [11, 2, 7, 20, 5], : plane.row_bytes
            ]
        plain.compare()


def test_a_job_without_blocks_ends(device: str) -> None:
    with transfers_on(device) as (transfers, plain):
        transfers.store(1, [], [0, 0, 0], [0, 0, 0], [])
        (job,) = ended(transfers)
        assert (job.error, job.nbytes) == (None, 0)
        plain.compare()


@pytest.mark.parametrize(
    ("job", "kind", "text"),
    [
        (one_group([1, -1], [0, 1]), IndexError, r"block_ids must be in \[0, 23\), got -1 at position 1"),
        (one_group([1, BLOCKS], [0, 1]), IndexError, r"block_ids must be in \[0, 23\), got 23"),
        (
            one_group([1, 2], [CHUNKS, 1]),
            IndexError,
            r"chunk_ids must be in \[0, 9\), got 9 at position 0",
        ),
        (
            one_group([1, 2], [0]),
            ValueError,
            "chunk_ids must be 2, as many as the blocks reach into, got 1",
        ),
        (one_group([1, 2], [0, 1, 2]), ValueError, "chunk_ids must be 2.*, got 3"),
        (([1, 2], [1, 0, 0], [0, 0, 0], [0, 1]), ValueError, r"add up to 2 block ids, got \[1, 0, 0\]"),
        (([1, 2], [3, -1, 0], [0, 0, 0], [0, 1]), ValueError, "add up to 2 block ids"),
        (([1, 2], [2], [0], [0, 1]), ValueError, "must have 3 entries, got 1 and 1"),
        (([1, 2, -1], [2, 0, 1], [0, 0, 0], [0, 1, 2]), IndexError, "block_ids"),
        (
            one_group([1, 1 << 63], [0, 1]),
            ValueError,
            r"block_ids must be a list of int64 values, got \[1,",
        ),
        (one_group([1, 2], [0, -(1 << 70)]), ValueError, "chunk_ids must be a list of int64 values"),
        (one_group([1, 2], [0, 1 << 62]), IndexError, "chunk_ids must be in"),
        (one_group([1 << 62, 2], [0, 1]), IndexError, "block_ids must be in"),
    ],
)
def test_a_bad_job_moves_nothing_and_only_it_fails(
    device: str, job: tuple, kind: type[Exception], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    for direction in ("store", "load"):
        check_bad_job(device, direction, job, kind, text)
        assert f"{direction} 7" in caplog.text


def check_bad_job(device: str, direction: str, job: tuple, kind: type[Exception], text: str) -> None:
    with transfers_on(device) as (transfers, plain):
        getattr(transfers, direction)(7, *job)
        transfers.store(8, *one_group([3], [5]))
        plain.move(True, [1, 0, 0], [0, 0, 0], [3], [5])
        by_id = {done.job_id: done for done in ended(transfers)}
        assert sorted(by_id) == [7, 8]
        assert by_id[8].error is None
        assert isinstance(by_id[7].error, kind)
        with pytest.raises(kind, match=text):
            raise by_id[7].error
        assert by_id[7].block_ids == list(job[0])
        plain.compare()


@pytest.mark.parametrize(
    ("ids", "integers"),
    [([None, 2], [2]), ([1.9, 2], [2]), ([[1, 2]], []), (7, []), (None, []), (["1", 2], [2])],
)
@pytest.mark.parametrize("direction", ["store", "load"])
@pytest.mark.parametrize("name", ["block_ids", "chunk_ids"])
def test_what_is_no_list_of_integers_is_the_jobs_error(
    direction: str, name: str, ids: object, integers: list[int]
) -> None:
    with transfers_on("cpu") as (transfers, plain):
        blocks, sizes, indices, chunks = one_group([3, 4], [5, 6])
        is_blocks = name == "block_ids"
        submit = getattr(transfers, direction)
        submit(7, ids if is_blocks else blocks, sizes, indices, chunks if is_blocks else ids)
        (job,) = ended(transfers)
        with pytest.raises(ValueError, match=rf"\[ChunkTransfers\] {name} must be a list of int64"):
            raise job.error  # type: ignore[misc]
        assert getattr(job, name) == integers
        plain.compare()


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.int64])
def test_ids_may_be_tensors_and_arrays(dtype: torch.dtype) -> None:
    with transfers_on("cpu") as (transfers, plain):
        blocks = torch.tensor([3, 9], dtype=dtype)
        transfers.store(1, blocks, [2, 0, 0], [0, 0, 0], torch.tensor([6, 2], dtype=dtype))
        plain.move(True, [2, 0, 0], [0, 0, 0], [3, 9], [6, 2])
        (job,) = ended(transfers)
        assert (job.error, job.block_ids, job.chunk_ids) == (None, [3, 9], [6, 2])
        plain.compare()
        transfers.store(2, blocks.float(), [2, 0, 0], [0, 0, 0], [0, 1])
        assert isinstance(ended(transfers)[0].error, ValueError)
        plain.compare()


def test_a_job_id_in_flight_is_refused() -> None:
    runtime = GatedRuntime()
    with transfers_on("cpu", runtime=runtime) as (transfers, plain):
        with runtime.blocked("store"):
            transfers.store(1, *one_group([1], [1]))
            for submit in (transfers.store, transfers.load):
                with pytest.raises(ValueError, match="job_id must not be in flight, got 1, which is"):
                    submit(1, *one_group([2], [2]))
        plain.move(True, [1, 0, 0], [0, 0, 0], [1], [1])
        assert [job.error for job in ended(transfers)] == [None]
        transfers.store(1, *one_group([2], [2]))
        plain.move(True, [1, 0, 0], [0, 0, 0], [2], [2])
        assert [job.error for job in ended(transfers)] == [None]
        plain.compare()


@pytest.mark.parametrize("fails", [{1}, {2}, {1, 2}])
def test_of_stores_to_a_chunk_the_newest_counts(fails: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where an older one fails when the newer is already queued."""
    move = ChunkTransfers._move

    def failing(transfers: ChunkTransfers, job: Job, moves: list) -> None:
        if job.job_id in fails:
            moves = [(group, blocks + BLOCKS, slots) for group, blocks, slots in moves]
        move(transfers, job, moves)

    monkeypatch.setattr(ChunkTransfers, "_move", failing)
    runtime = GatedRuntime()
    with transfers_on("cpu", 2, runtime=runtime) as (transfers, plain):
        stores = {1: [1, 2], 2: [4]}  # the second writes the first half of the chunk
        with runtime.blocked("store"):
            for job_id, blocks in stores.items():
                transfers.store(job_id, *one_group(blocks, [3]))
        for job in ended(transfers):
            assert (job.error is not None) == (job.job_id in fails)
            if job.error is None:
                plain.move(True, [len(job.block_ids), 0, 0], [0, 0, 0], job.block_ids, [3])
        for index, block in enumerate([7, 8]):
            transfers.load(3, *one_group([block], [3], index=index))
            (job,) = ended(transfers)
            # A store that fails leaves the rest of its chunk in doubt, too.
            assert isinstance(job.error, RuntimeError) == (2 in fails or index == 1)
            if job.error is None:
                plain.move(False, [1, 0, 0], [index, 0, 0], [block], [3])
        plain.compare()


def test_chunks_of_a_failed_store_are_not_loaded_until_stored_again(device: str) -> None:
    with transfers_on(device, 2) as (transfers, plain):
        transfers.store(1, *one_group([1, 2, 3, BLOCKS], [6, 4]))
        assert isinstance(ended(transfers)[0].error, IndexError)
        for chunk in (6, 4):
            transfers.load(2, *one_group([8, 9], [chunk]))
            (job,) = ended(transfers)
            with pytest.raises(RuntimeError, match=f"got chunk {chunk}, whose store failed"):
                raise job.error  # type: ignore[misc]
        plain.compare()
        transfers.store(3, *one_group([5], [4]))  # the first half of chunk 4
        plain.move(True, [1, 0, 0], [0, 0, 0], [5], [4])
        transfers.wait({3})
        transfers.load(4, *one_group([8], [4]))
        plain.move(False, [1, 0, 0], [0, 0, 0], [8], [4])
        transfers.load(5, *one_group([9], [4], index=1))
        by_id = {done.job_id: done.error for done in ended(transfers)}
        assert by_id[3] is by_id[4] is None
        assert isinstance(by_id[5], RuntimeError)
        plain.compare()


@pytest.mark.parametrize("direction", ["store", "load"])
def test_what_the_stream_refuses_is_the_jobs_error(device: str, direction: str) -> None:
    with transfers_on(device) as (transfers, _):
        transfers._views[1][1][0] = transfers._views[1][1][0][:4]  # the second group's host rows are few
        getattr(transfers, direction)(1, [1, 2, 3], [1, 2, 0], [0, 0, 0], [0, 7, 8])
        (job,) = ended(transfers)
        assert isinstance(job.error, IndexError)
        transfers.load(2, *one_group([4], [8]))
        (job,) = ended(transfers)
        assert (job.error is None) == (direction == "load")


def test_polling_waits_for_nothing_and_keeps_the_order() -> None:
    runtime = GatedRuntime()
    with transfers_on("cpu", runtime=runtime) as (transfers, plain), runtime.blocked("store", "load"):
        transfers.store(1, *one_group([1], [1]))
        transfers.store(2, *one_group([BLOCKS], [2]))  # failed at once, and yet not ahead of the first
        transfers.load(3, *one_group([3], [3]))
        transfers.load(4, *one_group([4], [4]), expedited=True)
        plain.move(False, [1, 0, 0], [0, 0, 0], [4], [4])
        transfers.wait({4, 99})
        assert [job.job_id for job in transfers.finished()] == [4]
        assert transfers.in_flight() == {1, 2, 3}
        plain.compare()
        assert transfers.finished() == []


def test_closing_ends_what_is_in_flight() -> None:
    runtime = GatedRuntime()
    with transfers_on("cpu", runtime=runtime) as (transfers, plain):
        host_tensors = list(transfers.host_tensors)
        with runtime.blocked("store") as gate:
            for job_id in range(5):
                transfers.store(job_id, *one_group([job_id], [job_id]))
                plain.move(True, [1, 0, 0], [0, 0, 0], [job_id], [job_id])
            gate.set()
            transfers.close()
        transfers.close()
        for expected, tensor in zip(plain.slots, host_tensors, strict=True):
            assert torch.equal(expected, tensor)
        assert transfers.finished() == []
        with pytest.raises(RuntimeError, match="it was closed"):
            transfers.store(9, *one_group([1], [1]))


def test_closing_waits_for_what_a_device_still_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """Closing a device's stream ends a thread of the host, and nothing on the device."""
    monkeypatch.setattr(FakeStream, "close", lambda stream: None)
    runtime = FakeRuntime()
    with transfers_on("cpu", runtime=runtime) as (transfers, _):
        transfers.store(1, *one_group([1], [1]))
        transfers.load(2, *one_group([2], [2]))
        transfers.close()
        assert [len(stream.commands) for stream in runtime.streams.values()] == [0] * 4


# --- Order, with streams that run when the test says so -------------------------------------------


def fill_block(tensors: list[Tensor], block: int) -> Callable[[], None]:
    return lambda: [tensor[block].fill_(77) for tensor in tensors] and None


def test_a_store_waits_for_the_work_that_writes_the_blocks() -> None:
    runtime = FakeRuntime()
    with transfers_on("cpu", runtime=runtime) as (transfers, plain):
        runtime.compute.run(fill_block(plain.tensors, 3))
        transfers.store(1, *one_group([3], [5]))
        runtime.run_ahead("store")
        runtime.drain()
        fill_block(plain.blocks, 3)()
        plain.move(True, [1, 0, 0], [0, 0, 0], [3], [5])
        plain.compare()


@pytest.mark.parametrize("expedited", [False, True])
def test_a_load_waits_for_the_work_that_still_uses_the_blocks(expedited: bool) -> None:
    runtime = FakeRuntime()
    with transfers_on("cpu", runtime=runtime) as (transfers, plain):
        runtime.compute.run(fill_block(plain.tensors, 3))
        transfers.load(1, *one_group([3], [5]), expedited=expedited)
        runtime.run_ahead("expedited" if expedited else "load")
        runtime.drain()
        fill_block(plain.blocks, 3)()
        plain.move(False, [1, 0, 0], [0, 0, 0], [3], [5])
        plain.compare()


@pytest.mark.parametrize("direction", ["store", "load"])
def test_jobs_of_one_direction_run_in_order(direction: str) -> None:
    runtime = FakeRuntime()
    with transfers_on("cpu", runtime=runtime) as (transfers, plain):
        for job_id, (block, chunk) in enumerate([(1, 2), (1, 3), (4, 3), (1, 2)]):
            getattr(transfers, direction)(job_id, *one_group([block], [chunk]))
            plain.move(direction == "store", [1, 0, 0], [0, 0, 0], [block], [chunk])
        runtime.drain(seed=1)
        assert [job.job_id for job in transfers.finished()] == [0, 1, 2, 3]
        plain.compare()


def test_streams_do_not_wait_for_each_other() -> None:
    runtime = FakeRuntime()
    with transfers_on("cpu", runtime=runtime) as (transfers, _):
        transfers.store(1, *one_group([1], [1]))
        transfers.load(2, *one_group([2], [2]))
        transfers.load(3, *one_group([3], [3]), expedited=True)
        runtime.run_ahead("compute")
        for lane, job_id in (("expedited", 3), ("load", 2), ("store", 1)):
            runtime.run_ahead(lane)
            assert [job.job_id for job in transfers.finished()] == [job_id]


@pytest.mark.backend("cuda")
@pytest.mark.parametrize("direction", ["store", "load", "expedited"])
def test_on_a_gpu_a_transfer_waits_for_the_current_stream_and_the_host_does_not(direction: str) -> None:
    with transfers_on("cuda") as (transfers, plain):
        for is_store in (True, False):  # what is slow the first time
            (transfers.store if is_store else transfers.load)(1, *one_group([1], [1]))
            plain.move(is_store, [1, 0, 0], [0, 0, 0], [1], [1])
            ended(transfers)
        torch.cuda._sleep(1)
        torch.cuda.synchronize()
        torch.cuda._sleep(200_000_000)  # about 0.1 s
        fill_block(plain.tensors, 3)()
        if direction == "store":
            transfers.store(2, *one_group([3], [5]))
        else:
            transfers.load(2, *one_group([3], [5]), expedited=direction == "expedited")
        assert transfers.finished() == []
        (job,) = ended(transfers)
        assert job.error is None
        fill_block(plain.blocks, 3)()
        plain.move(direction == "store", [1, 0, 0], [0, 0, 0], [3], [5])
        plain.compare()


# --- What is refused when it is made ---------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensors", "groups", "text"),
    [
        ([], [], "tensors must be one or more, got none"),
        ([torch.zeros(3, 4)], [[]], r"of one byte an element and on cpu, got \[3, 4\] of torch.float32"),
        ([torch.zeros(3, dtype=torch.int8)], [[]], r"\[blocks, page bytes\]"),
        (
            [torch.zeros(3, 4, dtype=torch.int8)],
            [[GroupPlane(1, 4)]],
            r"group 0 must be in \[0, 1\), got 1",
        ),
        ([torch.zeros(3, 4, dtype=torch.int8)], [[GroupPlane(0, 5)]], r"must be in \[1, 4\], got 5"),
    ],
)
def test_bad_tensors_and_groups_are_refused(tensors: list[Tensor], groups: list, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        ChunkTransfers(tensors, groups, blocks_per_chunk=1, num_chunks=1)


def test_bad_counts_are_refused() -> None:
    with pytest.raises(ValueError, match="got 0 and 4"):
        ChunkTransfers(make_tensors("cpu"), GROUPS, blocks_per_chunk=0, num_chunks=4)


def test_it_is_made_and_used_inside_and_outside_inference_mode(device: str) -> None:
    with torch.inference_mode():
        tensors = make_tensors(device)
        transfers = ChunkTransfers(tensors, GROUPS, blocks_per_chunk=1, num_chunks=CHUNKS)
        transfers.store(1, *one_group([1], [1]))
        assert ended(transfers)[0].error is None
    transfers.store(2, *one_group([BLOCKS], [2]))
    transfers.load(3, *one_group([1], [1]))
    assert [job.error is None for job in ended(transfers)] == [False, True]
    transfers.close()


def test_a_job_in_flight_is_seen_to_end_without_a_call_that_waits() -> None:
    with transfers_on("cpu") as (transfers, _):
        transfers.store(1, *one_group([1], [1]))
        seen: list[Job] = []
        wait_until(lambda: bool(seen.extend(transfers.finished()) or seen))
        assert seen[0].job_id == 1
