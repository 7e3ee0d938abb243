"""HiCacheMooncakeTier: a Mooncake Store as a secondary tier of vLLM's TieringOffloadingSpec.

    lookup   asked of the store in vLLM's lookup thread: RETRY until it has answered, then HIT or MISS
    store    vLLM's chunk -> page of our own -> store                in a thread of ours, in order
    load     store -> page of our own, verified -> vLLM's chunk      in another, in order

vLLM calls all of it under one lock. Only `drain_jobs` and `shutdown` wait, and what they wait for has a
deadline.
"""

import json
import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

import torch
import vllm
from torch import Tensor
from vllm.v1.kv_offload.base import (
    LookupResult,
    OffloadingSpec,
    OffloadKey,
    ReqContext,
    RequestOffloadingContext,
    ScheduleEndContext,
)
from vllm.v1.kv_offload.file_mapper import FileMapper
from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager, TransferJob

from torch_hicache.deadline import Calls
from torch_hicache.integrations.staged_pages import DEFAULT_PAGES, StagedPages
from torch_hicache.integrations.vllm import check_version

_CLOSE_SECONDS = 10.0

_Moved = tuple[list[bool], float]  # which keys, and the seconds that it took


class HiCacheMooncakeTier(SecondaryTierManager):
    """Chunks of vLLM's primary tier in a Mooncake Store, by vLLM's keys.

    Args:
        master: "host:port".
        namespace: what else makes chunks different, beside what vLLM's configuration says of model,
            dtype, layers and parallelism: the model's revision, say. Engines that are equal in all of it
            share their chunks.
        staging_pages: chunks of memory of our own, for what is under way.
        options: those of MooncakeTier that are left.

    Raises:
        RuntimeError: a vLLM that this adapter does not know.
        ValueError, TypeError, ImportError, RuntimeError: as MooncakeTier does.
    """

    def __init__(
        self,
        offloading_spec: OffloadingSpec,
        primary_kv_view: memoryview,
        tier_type: str,
        backpressure_detector: Any = None,  # vLLM 0.31 and newer
        *,
        master: str,
        namespace: str = "",
        staging_pages: int = DEFAULT_PAGES,
        **options: Any,
    ) -> None:
        check_version()
        detector = () if backpressure_detector is None else (backpressure_detector,)
        super().__init__(offloading_spec, primary_kv_view, tier_type, *detector)
        self._chunks = torch.frombuffer(primary_kv_view, dtype=torch.uint8).view(primary_kv_view.shape)
        self._staged = StagedPages(
            self._chunks.shape[1],
            staging_pages,
            master=master,
            namespace=_namespace(offloading_spec, namespace),
            **options,
        )
        self._lookups = _Lookups(self._staged, tier_type)
        self._stores, self._loads = (Calls(f"hicache-{name}", 1) for name in ("store", "load"))
        self._jobs: dict[int, tuple[TransferJob, Future[_Moved]]] = {}

    def on_new_request(self, req_context: ReqContext) -> RequestOffloadingContext:
        return RequestOffloadingContext()

    def on_request_finished(self, req_context: ReqContext) -> None:
        self._lookups.cleanup(req_context.req_id)

    def on_schedule_end(self, context: ScheduleEndContext) -> None:
        self._lookups.flush()

    def lookup(self, key: OffloadKey, req_context: ReqContext) -> LookupResult:
        found = self._lookups.lookup(key, req_context)
        if found is None:
            return LookupResult.RETRY
        return LookupResult.HIT if found else LookupResult.MISS

    def submit_store(self, job_metadata: TransferJob) -> None:
        chunks = self._chunks_of(job_metadata)
        move = partial(self._staged.put, fill=lambda i, page: page.copy_(chunks[i]))
        self._start(self._stores, job_metadata, move)

    def submit_load(self, job_metadata: TransferJob) -> None:
        chunks = self._chunks_of(job_metadata)
        move = partial(self._staged.get, take=lambda i, page: chunks[i].copy_(page))
        self._start(self._loads, job_metadata, move)

    def get_finished_jobs(self) -> Iterable[JobResult]:
        """A load that failed is a miss from here on for all requests that have asked for its keys: vLLM
        would start it again, for ever."""
        finished = [job_id for job_id, (_, moved) in self._jobs.items() if moved.done()]
        results = []
        for job_id in finished:
            job, future = self._jobs.pop(job_id)
            moved, seconds = future.result()
            if job.is_promotion:
                self._lookups.mark_miss(_where(job.keys, moved, False))
            successful = _where(job.keys, moved, True)
            results.append(JobResult(job_id, all(moved), successful or None, transfer_time=seconds))
        return results

    def drain_jobs(self) -> None:
        wait([moved for _, moved in self._jobs.values()])

    def shutdown(self) -> None:
        """
        Raises:
            RuntimeError: a job has not ended. vLLM then leaves its memory as it is.
        """
        self._lookups.shutdown()
        self._staged.close()  # the jobs that are left fail
        if not all([calls.close(_CLOSE_SECONDS) for calls in (self._stores, self._loads)]):
            raise RuntimeError("[HiCacheMooncakeTier] a job still uses the memory of vLLM's chunks.")

    def _chunks_of(self, job: TransferJob) -> list[Tensor]:
        # vLLM up to 0.30 counts chunks as blocks.
        ids = job.chunk_ids if hasattr(job, "chunk_ids") else job.block_ids
        return [self._chunks[int(chunk)] for chunk in ids]

    def _start(self, calls: Calls, job: TransferJob, move: Callable[[list[str]], list[bool]]) -> None:
        self._jobs[job.job_id] = job, calls.start(partial(_moved, move, _names(job.keys)))


class _Lookups(AsyncLookupManager):
    """One answer for a key, as long as requests that have asked for it run."""

    def __init__(self, staged: StagedPages, tier_type: str) -> None:
        self._staged = staged  # before the thread starts
        super().__init__(tier_type=tier_type)

    def batch_lookup(self, keys: list[OffloadKey], req_context: ReqContext) -> Iterable[bool]:
        return self._staged.contains(_names(keys))


def _moved(move: Callable[[list[str]], list[bool]], names: list[str]) -> _Moved:
    started = time.perf_counter()
    try:
        moved = move(names)
    except Exception as error:  # the tier was closed
        logging.getLogger("torch_hicache").warning("a job of vLLM's failed: %r", error)
        moved = [False] * len(names)
    return moved, time.perf_counter() - started


def _names(keys: Iterable[OffloadKey]) -> list[str]:
    return [key.hex() for key in keys]


def _where(keys: Iterable[OffloadKey], moved: list[bool], wanted: bool) -> list[OffloadKey]:
    return [key for key, has_moved in zip(keys, moved, strict=True) if has_moved is wanted]


def _namespace(spec: Any, namespace: str) -> str:
    """All that vLLM knows of what a chunk is. The size of one is in the tier's keys already."""
    mapper = FileMapper.from_offloading_spec("", spec, blocks_per_file=spec.blocks_per_chunk)
    described = mapper.get_run_config() | {
        "rank": mapper.rank,
        "bytes_of_worker": spec.cpu_page_size_per_worker,
        "replicated": getattr(spec, "replicated_layout", False),
        "vllm": vllm.__version__,
        "namespace": namespace,
    }
    return json.dumps(described, sort_keys=True)
