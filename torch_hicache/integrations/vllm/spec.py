"""HiCacheOffloadingSpec: vLLM's CPU offloading with torch_hicache's memory and transfers.

The scheduler's side (which chunk holds what, eviction) is vLLM's own CPUOffloadingManager.
"""

from typing import Any

import torch
from torch import Tensor
from vllm.distributed.kv_transfer import has_kv_transfer_group
from vllm.v1.kv_offload.base import (
    CanonicalKVCaches,
    GPULoadStoreSpec,
    LoadStoreSpec,
    OffloadingWorker,
    TransferResult,
)
from vllm.v1.kv_offload.config import OffloadingConfig
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from torch_hicache.integrations.vllm import check_version
from torch_hicache.integrations.vllm.chunk_transfers import ChunkTransfers, GroupPlane


class HiCacheOffloadingSpec(CPUOffloadingSpec):
    """Takes what CPUOffloadingSpec takes; `cpu_bytes_to_use` are of all workers together.

    Each worker keeps its own bytes in its own memory: there is no region that workers share.

    Raises:
        RuntimeError: a vLLM that this adapter does not know.
        ValueError: `canonical_layout`, which only vLLM's TieringOffloadingSpec serves.
    """

    def __init__(self, config: OffloadingConfig) -> None:
        check_version()
        super().__init__(config)
        if config.canonical_layout:
            raise ValueError(
                "[HiCacheOffloadingSpec] canonical_layout must be off: TieringOffloadingSpec serves it."
            )
        self.failures_are_collected = False  # set by HiCacheOffloadingConnector
        self._hicache_worker: HiCacheOffloadingWorker | None = None

    def _uses_shared_region(self) -> bool:
        return False

    def get_worker(self, kv_caches: CanonicalKVCaches) -> OffloadingWorker:
        """One for this process, on whichever device the caches are.

        Raises:
            ValueError: vLLM was started with a connector that can't say that a load has failed.
        """
        if has_kv_transfer_group() and not self.failures_are_collected:
            raise ValueError(
                "[HiCacheOffloadingSpec] kv_connector must be HiCacheOffloadingConnector with "
                "kv_connector_module_path torch_hicache.integrations.vllm, got another: it would use "
                "blocks whose load has failed."
            )
        if self._hicache_worker is None:
            # vLLM 0.29 counts chunks as blocks.
            num_chunks = self.num_chunks if hasattr(self, "num_chunks") else self.num_blocks
            self._hicache_worker = HiCacheOffloadingWorker(kv_caches, self.blocks_per_chunk, num_chunks)
        return self._hicache_worker


class HiCacheOffloadingWorker(OffloadingWorker):
    """Moves blocks between a worker's KV cache and its host memory; see ChunkTransfers for the order.

    A failed job is logged and reported as finished: vLLM ends the engine on any other report. Which
    blocks a failed load has left without their contents is said by `take_failed_loads`; a failed store
    makes later loads of its chunks fail.
    """

    def __init__(self, kv_caches: CanonicalKVCaches, blocks_per_chunk: int, num_chunks: int) -> None:
        self.transfers = ChunkTransfers(
            [_block_rows(cache.tensor, cache.page_size_bytes) for cache in kv_caches.tensors],
            [
                [GroupPlane(ref.tensor_idx, ref.page_size_bytes) for ref in refs]
                for refs in kv_caches.group_data_refs
            ],
            blocks_per_chunk=blocks_per_chunk,
            num_chunks=num_chunks,
        )
        self._failed_loads: dict[int, set[int]] = {}

    def submit_store(self, job_id: int, src_spec: GPULoadStoreSpec, dst_spec: LoadStoreSpec) -> bool:
        self.transfers.store(job_id, *_blocks_and_chunks(src_spec, dst_spec))
        return True

    def submit_load(
        self,
        job_id: int,
        src_spec: LoadStoreSpec,
        dst_spec: GPULoadStoreSpec,
        expedited: bool = False,
    ) -> bool:
        self.transfers.load(job_id, *_blocks_and_chunks(dst_spec, src_spec), expedited=expedited)
        return True

    def get_finished(self) -> list[TransferResult]:
        results = []
        for job in self.transfers.finished():
            if job.error is None:
                results.append(TransferResult(job.job_id, True, job.nbytes, job.seconds))
                continue
            if not job.is_store:
                self._failed_loads[job.job_id] = set(job.block_ids)
            results.append(TransferResult(job.job_id, True))
        return results

    def take_failed_loads(self) -> dict[int, set[int]]:
        """The failed loads that `get_finished` has returned since the last call: job -> its block ids."""
        failed, self._failed_loads = self._failed_loads, {}
        return failed

    def wait(self, job_ids: set[int]) -> None:
        self.transfers.wait(job_ids)

    def shutdown(self) -> None:
        self.transfers.close()


def _block_rows(tensor: Tensor, page_bytes: int) -> Tensor:
    """`[blocks, page bytes]`, where blocks may lie further apart than a page."""
    rows = tensor.view(torch.int8)
    return rows if rows.dim() == 2 and rows.shape[1] == page_bytes else rows.view(-1, page_bytes)


def _blocks_and_chunks(blocks: GPULoadStoreSpec, chunks: Any) -> tuple[Any, Any, Any, Any]:
    return blocks.block_ids, blocks.group_sizes, blocks.block_indices, chunks.block_ids
