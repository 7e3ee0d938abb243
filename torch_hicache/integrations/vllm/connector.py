"""HiCacheOffloadingConnector: vLLM's OffloadingConnector, which also says which loads have failed.

worker     a job fails -> its blocks (one KV cache group) or its request (several) go into the step's
           output, and the request into the step's metadata
scheduler  with kv_load_failure_policy "recompute" vLLM computes what was not loaded, with "fail" (its
           default) it ends the request with an error; the connector offers the request no load again,
           which would fail for ever
"""

import logging
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.outputs import KVConnectorOutput

from torch_hicache.integrations.vllm.spec import HiCacheOffloadingSpec, HiCacheOffloadingWorker


@dataclass
class HiCacheWorkerMetadata(OffloadingWorkerMetadata):
    """What workers tell the scheduler after a step."""

    failed_requests: set[str] = field(default_factory=set)

    def aggregate(self, other: Any) -> "HiCacheWorkerMetadata":
        merged = super().aggregate(other)
        return HiCacheWorkerMetadata(
            **vars(merged),
            failed_requests=self.failed_requests | getattr(other, "failed_requests", set()),
        )


class HiCacheOffloadingConnector(OffloadingConnector):
    """Configured as OffloadingConnector is, with the spec of this package.

    Raises:
        ValueError: another spec, or a model with several KV cache groups where vLLM has no way to be told
            of a failed load: vLLM 0.29, or loads within the step (`sync_load_budget_bytes`).
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        transfer_config = vllm_config.kv_transfer_config
        self._several_groups = len(kv_cache_config.kv_cache_groups) > 1
        if self._several_groups:
            if not hasattr(KVConnectorOutput(), "failed_recving"):
                raise ValueError(
                    "[HiCacheOffloadingConnector] a model with several KV cache groups needs vLLM 0.30 "
                    "or newer: older ones can't be told of a load that failed."
                )
            if int(transfer_config.kv_connector_extra_config.get("sync_load_budget_bytes", 0)):
                raise ValueError(
                    "[HiCacheOffloadingConnector] sync_load_budget_bytes must be 0 for a model with "
                    "several KV cache groups: vLLM can't be told of such a load that failed."
                )
        super().__init__(vllm_config, role, kv_cache_config)
        if transfer_config.kv_load_failure_policy != "recompute":
            logging.getLogger("torch_hicache").warning(
                "kv_load_failure_policy is '%s': a request whose load fails ends with an error. "
                "'recompute' computes it instead.",
                transfer_config.kv_load_failure_policy,
            )
        self._load_requests: dict[int, str] = {}  # of load jobs in flight
        self._invalid_blocks: set[int] = set()
        self._failed_receives: set[str] = set()
        self._newly_failed: set[str] = set()  # not in a step's metadata yet
        self._not_again: set[str] = set()  # scheduler: requests whose load has failed
        if self.connector_worker is not None:
            spec = self.connector_worker.spec
            if not isinstance(spec, HiCacheOffloadingSpec):
                raise ValueError(
                    "[HiCacheOffloadingConnector] spec_name must be HiCacheOffloadingSpec with "
                    "spec_module_path torch_hicache.integrations.vllm, got "
                    f"{type(spec).__name__}."
                )
            spec.failures_are_collected = True

    # --- Worker ---------------------------------------------------------------------------------

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        for job_id, job in self._connector_metadata.load_jobs.items():
            self._load_requests[job_id] = job.req_id
        super().start_load_kv(forward_context, **kwargs)

    def get_finished(self, finished_req_ids: set[str]) -> Any:
        finished = super().get_finished(finished_req_ids)
        worker = self.connector_worker.worker
        assert isinstance(worker, HiCacheOffloadingWorker)
        for job_id, blocks in worker.take_failed_loads().items():
            request = self._load_requests[job_id]
            self._newly_failed.add(request)
            if self._several_groups:  # block ids may mean other blocks in another group
                self._failed_receives.add(request)
            else:
                self._invalid_blocks |= blocks
        if self._load_requests:
            in_flight = worker.transfers.in_flight()
            self._load_requests = {j: r for j, r in self._load_requests.items() if j in in_flight}
        return finished

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving |= self._failed_receives
        self._failed_receives = set()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        blocks, self._invalid_blocks = self._invalid_blocks, set()
        return blocks

    def build_connector_worker_meta(self) -> HiCacheWorkerMetadata | None:
        meta = super().build_connector_worker_meta()
        if meta is None:
            return None
        failed, self._newly_failed = self._newly_failed, set()
        return HiCacheWorkerMetadata(**vars(meta), failed_requests=failed)

    # --- Scheduler ------------------------------------------------------------------------------

    def update_connector_output(self, connector_output: KVConnectorOutput) -> None:
        meta = connector_output.kv_connector_worker_meta
        if isinstance(meta, HiCacheWorkerMetadata):
            self._not_again |= meta.failed_requests
        super().update_connector_output(connector_output)

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        num_tokens, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if request.request_id in self._not_again and num_tokens is not None:
            return 0, False
        return num_tokens, is_async

    def request_finished(self, request: Any, block_ids: Any) -> Any:
        self._not_again.discard(request.request_id)
        return super().request_finished(request, block_ids)

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> Any:
        self._not_again.discard(request.request_id)
        return super().request_finished_all_groups(request, block_ids)
