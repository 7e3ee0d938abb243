"""Stores and loads between an engine's block tensors and host memory that is kept in chunks of blocks.

    device   [blocks, page bytes]                  ... | block 2 | ... | block 7 | ... | block 9 | ...
    host     [chunks * blocks a chunk, page bytes]     |      chunk 5: 7, 2      |      chunk 0: 9, -

This file imports no engine. It speaks of blocks, chunks and groups as vLLM's offloading does: a group of
layers has block ids of its own, and the tensors that hold its layers; a chunk is `blocks_per_chunk`
consecutive blocks of one group. Host slot `chunk * blocks_per_chunk + i` is block i of the chunk.
"""

import logging
import operator
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from torch_hicache.host_memory import empty_host
from torch_hicache.plan import use_stored_method_table
from torch_hicache.streams import Runtime, runtime_for

_LANES = ("store", "load", "expedited")
Ids: TypeAlias = Sequence[int] | Tensor


@dataclass(frozen=True)
class GroupPlane:
    """A tensor that holds layers of a group, and the bytes of a block there that the group uses."""

    tensor: int
    row_bytes: int


@dataclass
class Job:
    """One store or load. `error` is final once the job is finished."""

    job_id: int
    is_store: bool
    block_ids: list[int]  # of the device; of a job that fails for what is no integer, the others
    chunk_ids: list[int]
    number: int = 0  # in the order of the calls
    nbytes: int = 0
    seconds: float | None = None  # between its first and its last byte
    error: Exception | None = None
    event: Any = None
    started: Any = None
    ended: Any = None


class ChunkTransfers:
    """Moves blocks beside the computation. For one thread.

    Args:
        tensors: `[blocks, page bytes]` each, of one byte an element, all on one device.
        groups: for each group the tensors that it lives in.
        blocks_per_chunk, num_chunks: the host memory that is made for each tensor.
        runtime: where streams and events come from; that of the tensors' device without one.

    Streams: a transfer waits for the work that the caller's current stream has at the time of the call.
    Stores run in their order, so do loads, and so do expedited loads, on a stream each: an expedited load
    does not queue behind others. Between directions there is no order but the caller's: who stores to a
    chunk or overwrites blocks waits for the jobs that still use them.

    Failures: no call raises for a job. What is wrong with one, a bad block id as well as a refusal by the
    device, is the job's error. Slots that a store has failed to write are remembered, and a load that
    reads one fails too, until a later store has written it. Only a job_id that is in flight raises, a
    ValueError: the two could not be told apart.

    Raises:
        ValueError: tensors or groups that do not fit together.
        MemoryError: there is not as much host memory.
    """

    def __init__(
        self,
        tensors: Sequence[Tensor],
        groups: Sequence[Sequence[GroupPlane]],
        *,
        blocks_per_chunk: int,
        num_chunks: int,
        runtime: Runtime | None = None,
    ) -> None:
        self.device = _check_tensors(tensors, groups)
        if blocks_per_chunk < 1 or num_chunks < 0:
            raise ValueError(
                "[ChunkTransfers] blocks_per_chunk must be 1 or more and num_chunks 0 or more, got "
                f"{blocks_per_chunk} and {num_chunks}."
            )
        self._blocks_per_chunk, self._num_chunks = blocks_per_chunk, num_chunks
        self._num_blocks = min(len(tensor) for tensor in tensors)
        if self.device.type == "cuda":
            use_stored_method_table(self.device)
        num_slots = num_chunks * blocks_per_chunk
        self.host_tensors = [
            empty_host(
                (num_slots, tensor.shape[1]),
                tensor.dtype,
                self.device,
                piece_unit_bytes=max(1, tensor.shape[1]),
            )
            for tensor in tensors
        ]
        self._views = [
            (
                [tensors[plane.tensor][:, : plane.row_bytes] for plane in group],
                [self.host_tensors[plane.tensor][:, : plane.row_bytes] for plane in group],
            )
            for group in (_without_repeats(group) for group in groups)
        ]
        self._runtime: Runtime = runtime_for(self.device) if runtime is None else runtime
        self._streams = {lane: self._runtime.new_stream(f"hicache-{lane}") for lane in _LANES}
        self._jobs: dict[str, deque[Job]] = {lane: deque() for lane in _LANES}
        self._num_jobs = 0
        # For each host slot: the number of the newest store there, and whether its contents are those of
        # a store that failed. Stores fail in their stream's thread, while others are submitted.
        self._marking = threading.Lock()
        with torch.inference_mode(False):
            self._newest_store = torch.zeros(num_slots, dtype=torch.int64, device="cpu")
            self._is_unwritten = torch.zeros(num_slots, dtype=torch.bool, device="cpu")
        self._closed = False

    def store(
        self,
        job_id: int,
        block_ids: Ids,
        group_sizes: Sequence[int],
        block_indices: Sequence[int],
        chunk_ids: Ids,
    ) -> None:
        """Move blocks of the device into chunks. Returns at once.

        Args:
            job_id: the caller's, one that is not in flight.
            block_ids: of all groups, one group after the other.
            group_sizes: how many of them are each group's.
            block_indices: for each group, which block of its sequence its first one is: the transfer
                begins `block_index % blocks_per_chunk` blocks into the group's first chunk.
            chunk_ids: of all groups, exactly as many as the blocks reach into.
        """
        self._submit("store", job_id, block_ids, chunk_ids, (group_sizes, block_indices))

    def load(
        self,
        job_id: int,
        block_ids: Ids,
        group_sizes: Sequence[int],
        block_indices: Sequence[int],
        chunk_ids: Ids,
        *,
        expedited: bool = False,
    ) -> None:
        """Move blocks out of chunks to the device. Returns at once; see `store`."""
        lane = "expedited" if expedited else "load"
        self._submit(lane, job_id, block_ids, chunk_ids, (group_sizes, block_indices))

    def finished(self) -> list[Job]:
        """Jobs that have ended since the last call, a direction's in order. Waits for nothing."""
        done: list[Job] = []
        for jobs in self._jobs.values():
            while jobs and self._has_ended(jobs[0]):
                job = jobs.popleft()
                self._finish(job)
                done.append(job)
        return done

    def wait(self, job_ids: set[int]) -> None:
        """Block until these jobs have ended; `finished` still returns them. Unknown ids are ignored."""
        for jobs in self._jobs.values():
            for job in jobs:
                if job.job_id in job_ids:
                    self._wait(job)

    def in_flight(self) -> set[int]:
        """Jobs that `finished` has not returned yet."""
        return {job.job_id for jobs in self._jobs.values() for job in jobs}

    def close(self) -> None:
        """Take no more jobs, wait for those in flight, release the memory. Later calls do nothing."""
        if self._closed:
            return
        self._closed = True
        for jobs in self._jobs.values():
            for job in jobs:
                self._wait(job)
            jobs.clear()
        for stream in self._streams.values():
            stream.close()
        self._views.clear()
        self.host_tensors.clear()

    # --- A job's way ----------------------------------------------------------------------------

    def _submit(
        self,
        lane: str,
        job_id: int,
        block_ids: Ids,
        chunk_ids: Ids,
        groups: tuple[Sequence[int], Sequence[int]],
    ) -> None:
        if self._closed:
            raise RuntimeError("[ChunkTransfers] must be open, it was closed.")
        if job_id in self.in_flight():
            raise ValueError(f"[ChunkTransfers] job_id must not be in flight, got {job_id}, which is.")
        self._num_jobs += 1
        job = Job(job_id, lane == "store", _integers(block_ids), _integers(chunk_ids), self._num_jobs)
        stream = self._streams[lane]
        try:
            blocks, chunks = _read_ids(block_ids, "block_ids"), _read_ids(chunk_ids, "chunk_ids")
            moves = self._plan(blocks, chunks, *groups)
            self._check_values(blocks, "block_ids", self._num_blocks)
            self._check_values(chunks, "chunk_ids", self._num_chunks)
            self._check_written(job, moves)
            job.nbytes = sum(
                len(slots) * sum(view.shape[1] for view in self._views[group][0])
                for group, _, slots in moves
            )
            stream.begin(job.nbytes, [self._runtime.record_current()])
            stream.run(partial(self._move, job, moves))
        except Exception as error:
            self._fail(job, error)
        try:
            job.event = stream.record()
        except RuntimeError as error:  # the device has failed: there is nothing to wait for
            self._fail(job, error)
        self._jobs[lane].append(job)

    def _plan(
        self, blocks: Tensor, chunks: Tensor, group_sizes: Sequence[int], block_indices: Sequence[int]
    ) -> list[tuple[int, Tensor, Tensor]]:
        """For each group with blocks: its number, its blocks, and their slots in host memory."""
        if not len(group_sizes) == len(block_indices) == len(self._views):
            raise ValueError(
                f"[ChunkTransfers] group_sizes and block_indices must have {len(self._views)} entries, "
                f"got {len(group_sizes)} and {len(block_indices)}."
            )
        if sum(group_sizes) != len(blocks) or min(group_sizes, default=0) < 0:
            raise ValueError(
                f"[ChunkTransfers] group_sizes must add up to {len(blocks)} block ids, got "
                f"{list(group_sizes)}."
            )
        per_chunk = self._blocks_per_chunk
        moves = []
        first_block = first_chunk = 0
        for group, (size, index) in enumerate(zip(group_sizes, block_indices, strict=True)):
            if size == 0:
                continue
            skipped = index % per_chunk
            num_chunks = -(-(skipped + size) // per_chunk)
            of_group = chunks[first_chunk : first_chunk + num_chunks]
            slots = (of_group.unsqueeze(1) * per_chunk + torch.arange(per_chunk)).flatten()
            moves.append(
                (group, blocks[first_block : first_block + size], slots[skipped : skipped + size])
            )
            first_block += size
            first_chunk += num_chunks
        if first_chunk != len(chunks):
            raise ValueError(
                f"[ChunkTransfers] chunk_ids must be {first_chunk}, as many as the blocks reach into, "
                f"got {len(chunks)}."
            )
        return moves

    def _check_values(self, ids: Tensor, name: str, limit: int) -> None:
        """transfer_kv skips -1, which no engine means here, and would move one group before it refuses
        the next."""
        bad = ((ids < 0) | (ids >= limit)).nonzero().flatten().tolist()
        if bad:
            raise IndexError(
                f"[ChunkTransfers] {name} must be in [0, {limit}), got {int(ids[bad[0]])} at position "
                f"{bad[0]}."
            )

    def _check_written(self, job: Job, moves: list[tuple[int, Tensor, Tensor]]) -> None:
        if not moves:
            return
        slots = torch.cat([of_group for _, _, of_group in moves])
        with self._marking:
            if job.is_store:  # in order: should this store fail, that comes later
                self._newest_store[slots] = job.number
                self._is_unwritten[slots] = False
                return
            bad = slots[self._is_unwritten[slots]]
        if len(bad):
            raise RuntimeError(
                "[ChunkTransfers] a load must read chunks that were stored, got chunk "
                f"{int(bad.min()) // self._blocks_per_chunk}, whose store failed."
            )

    def _move(self, job: Job, moves: list[tuple[int, Tensor, Tensor]]) -> None:
        """On the job's stream: on an accelerator within the call, on the CPU in the stream's thread."""
        try:
            job.started = self._now()
            for group, blocks, slots in moves:
                device_views, host_views = self._views[group]
                sides = ((device_views, blocks), (host_views, slots))
                (src, src_ids), (dst, dst_ids) = sides if job.is_store else sides[::-1]
                with torch.no_grad():
                    torch.ops.hicache.transfer_kv(dst, src, dst_ids, src_ids)
            job.ended = self._now()
        except Exception as error:
            self._fail(job, error)

    def _now(self) -> Any:
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event

    def _has_ended(self, job: Job) -> bool:
        try:
            return job.event is None or job.event.query()
        except RuntimeError as error:  # the device has failed
            self._fail(job, error)
            return True

    def _wait(self, job: Job) -> None:
        try:
            if job.event is not None:
                job.event.wait()
        except RuntimeError as error:
            self._fail(job, error)

    def _fail(self, job: Job, error: Exception) -> None:
        if job.error is not None:
            return
        job.error = error.with_traceback(None)  # whose frames would keep the tensors alive
        if job.is_store:  # whatever the chunks hold now, it is not what the caller will look for there
            with self._marking:
                newest = self._newest_store.view(-1, self._blocks_per_chunk)
                is_unwritten = self._is_unwritten.view(-1, self._blocks_per_chunk)
                for chunk in job.chunk_ids:
                    if 0 <= chunk < self._num_chunks:  # but for what a later store writes
                        is_unwritten[chunk] |= newest[chunk] <= job.number

    def _finish(self, job: Job) -> None:
        if job.error is None:
            job.seconds = _seconds(job.started, job.ended)
        else:
            logging.getLogger("torch_hicache").error(
                "%s %d of %d blocks failed: %s",
                "store" if job.is_store else "load",
                job.job_id,
                len(job.block_ids),
                job.error,
            )
        job.event = job.started = job.ended = None


def _integers(ids: Any) -> list[int]:
    """Those of `ids` that are integers, whatever `ids` may be."""
    if isinstance(ids, Tensor):
        ids = ids.tolist()
    try:
        return [operator.index(i) for i in ids if hasattr(i, "__index__")]
    except TypeError:
        return []


def _read_ids(ids: Any, name: str) -> Tensor:
    try:
        read = torch.as_tensor(ids, device="cpu")
    except (TypeError, ValueError, RuntimeError, OverflowError):
        read = None
    if read is None or read.dim() != 1 or (len(read) and not _is_integral(read.dtype)):
        raise ValueError(f"[ChunkTransfers] {name} must be a list of int64 values, got {ids!r}.")
    return read.to(torch.int64)


def _is_integral(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)


def _seconds(started: Any, ended: Any) -> float:
    if isinstance(started, float):
        return ended - started
    return started.elapsed_time(ended) * 1e-3


def _without_repeats(group: Sequence[GroupPlane]) -> list[GroupPlane]:
    """Layers that share a tensor are moved together, by the widest."""
    widths: dict[int, int] = {}
    for plane in group:
        widths[plane.tensor] = max(plane.row_bytes, widths.get(plane.tensor, 0))
    return [GroupPlane(tensor, row_bytes) for tensor, row_bytes in widths.items()]


def _check_tensors(tensors: Sequence[Tensor], groups: Sequence[Sequence[GroupPlane]]) -> torch.device:
    if not tensors:
        raise ValueError("[ChunkTransfers] tensors must be one or more, got none.")
    for i, tensor in enumerate(tensors):
        if tensor.dim() != 2 or tensor.element_size() != 1 or tensor.device != tensors[0].device:
            raise ValueError(
                f"[ChunkTransfers] tensors must be [blocks, page bytes], of one byte an element and on "
                f"{tensors[0].device}, got {list(tensor.shape)} of {tensor.dtype} on {tensor.device} "
                f"(tensor {i})."
            )
    for number, group in enumerate(groups):
        for plane in group:
            if not 0 <= plane.tensor < len(tensors):
                raise ValueError(
                    f"[ChunkTransfers] tensors of group {number} must be in [0, {len(tensors)}), got "
                    f"{plane.tensor}."
                )
            if not 0 < plane.row_bytes <= tensors[plane.tensor].shape[1]:
                raise ValueError(
                    f"[ChunkTransfers] row_bytes of group {number} must be in "
                    f"[1, {tensors[plane.tensor].shape[1]}], got {plane.row_bytes}."
                )
    return tensors[0].device
