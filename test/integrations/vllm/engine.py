"""vLLM's real scheduler and connectors around a model that is only a rule for the bytes of its KV cache.

Scheduler, KV cache manager, the connector of both roles, vLLM's own calls of the connector around a
forward pass (KVConnectorModelRunnerMixin): all are vLLM's. Only the forward pass is ours. It checks that
every token that it attends to has the bytes of its prefix, and writes those of the tokens that it
computes. A wrong or missing block fails there.
"""

import json
import pathlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from vllm import SamplingParams
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    SchedulerConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.distributed.kv_transfer import (
    ensure_kv_transfer_initialized,
    ensure_kv_transfer_shutdown,
    get_kv_transfer_group,
)
from vllm.distributed.parallel_state import (
    init_distributed_environment,
    initialize_model_parallel,
    model_parallel_is_initialized,
)
from vllm.forward_context import set_forward_context
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    KVCacheTensor,
    SlidingWindowSpec,
)
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.kv_connector_model_runner_mixin import KVConnectorModelRunnerMixin

BLOCK_TOKENS = 16
MODULE = "torch_hicache.integrations.vllm"
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "torch_dtype": "float16",
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def offloading(connector: str = "HiCacheOffloadingConnector", **extra: Any) -> KVTransferConfig:
    """What a user writes: docs/integrations/vllm.md."""
    settings = {
        "spec_name": "HiCacheOffloadingSpec",
        "spec_module_path": MODULE,
        "cpu_bytes_to_use": 1 << 20,
        **extra,
    }
    return KVTransferConfig(
        kv_connector=connector,
        kv_connector_module_path=MODULE if connector.startswith("HiCache") else None,
        kv_role="kv_both",
        kv_load_failure_policy=settings.pop("policy", "recompute"),
        kv_connector_extra_config=settings,
    )


def make_config(folder: pathlib.Path, transfer: KVTransferConfig) -> VllmConfig:
    (folder / "config.json").write_text(json.dumps(LLAMA))
    return VllmConfig(
        model_config=ModelConfig(
            model=str(folder), tokenizer=str(folder), skip_tokenizer_init=True, dtype="float16", seed=0
        ),
        cache_config=CacheConfig(
            block_size=BLOCK_TOKENS, gpu_memory_utilization=0.5, enable_prefix_caching=True
        ),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8, max_num_batched_tokens=512, max_model_len=512, is_encoder_decoder=False
        ),
        kv_transfer_config=transfer,
        device_config=DeviceConfig("cpu"),
    )


@dataclass
class Outcome:
    """What has become of a request."""

    tokens: list[int] = field(default_factory=list)
    computed: int = 0  # tokens that the model computed for it
    finish_reason: str | None = None


class Engine:
    """One worker, `num_blocks` blocks of a KV cache of two layers, in one or two groups."""

    def __init__(
        self, folder: pathlib.Path, transfer: KVTransferConfig, *, num_blocks: int = 12, groups: int = 1
    ) -> None:
        self.config = make_config(folder, transfer)
        self.config.cache_config.num_gpu_blocks = num_blocks
        shape = {"block_size": BLOCK_TOKENS, "num_kv_heads": 2, "head_size": 16, "dtype": torch.float16}
        specs = [FullAttentionSpec(**shape), SlidingWindowSpec(**shape, sliding_window=2 * BLOCK_TOKENS)]
        page = specs[0].page_size_bytes
        names = ["layer0", "layer1"]
        # Two groups overlay each other in one region: a block belongs to one of them at a time.
        layers = [names] if groups == 1 else [[name] for name in names]
        regions = [names] if groups == 1 else [[names[0]], [names[1]]]
        size = num_blocks * page * (2 if groups == 1 else 1)
        cache_config = KVCacheConfig(
            num_blocks=num_blocks,
            kv_cache_tensors=[
                KVCacheTensor(
                    size=size, layers=of_region, layer_stride=page * num_blocks, block_stride=page
                )
                for of_region in regions
            ],
            kv_cache_groups=[
                KVCacheGroupSpec(of_group, spec) for of_group, spec in zip(layers, specs, strict=False)
            ],
        )
        memory = torch.zeros(size, dtype=torch.int8)
        each = page * num_blocks
        self.caches = {
            name: memory[i * each % size :][:each]
            .view(torch.float16)
            .view(num_blocks, 2, BLOCK_TOKENS, 2, 16)
            for i, name in enumerate(names)
        }
        self.group_layers = layers
        self.window = [None, 2 * BLOCK_TOKENS]
        self.scheduler = Scheduler(
            vllm_config=self.config,
            kv_cache_config=cache_config,
            structured_output_manager=StructuredOutputManager(self.config),
            block_size=BLOCK_TOKENS,
            log_stats=False,
        )
        init_none_hash(sha256)
        with set_current_vllm_config(self.config):
            if not model_parallel_is_initialized():
                init_distributed_environment(1, 0, f"file://{folder}/rendezvous", 0, "gloo")
                initialize_model_parallel()
        ensure_kv_transfer_initialized(self.config, cache_config)
        self.connector = get_kv_transfer_group()
        self.outcomes: dict[str, Outcome] = {}
        self.unchecked: set[str] = set()  # requests whose forward passes read without a check
        self._all_tokens: dict[str, list[int]] = {}

    def start(self) -> "Engine":
        self.connector.register_kv_caches(self.caches)
        return self

    @property
    def transfers(self) -> Any:
        return self.connector.connector_worker.worker.transfers

    def add(self, name: str, prompt: list[int], max_tokens: int = 2) -> Outcome:
        self.scheduler.add_request(
            Request(
                request_id=name,
                prompt_token_ids=prompt,
                sampling_params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
                pooling_params=None,
                block_hasher=get_request_block_hasher(BLOCK_TOKENS, sha256),
            )
        )
        self._all_tokens[name] = list(prompt)
        return self.outcomes.setdefault(name, Outcome())

    def run(self, max_steps: int = 60) -> None:
        """Until all requests have ended and all transfers have been reported."""
        for _ in range(max_steps):
            if (
                not self.scheduler.has_requests()
                and not self.transfers.in_flight()
                and not self._stores_left()
            ):
                return
            self.step()
        raise AssertionError(f"still running after {max_steps} steps: {self.outcomes}")

    def step(self) -> None:
        plan = self.scheduler.schedule()
        with set_forward_context(None, self.config):
            self.connector.handle_preemptions(plan.kv_connector_metadata)
            with KVConnectorModelRunnerMixin.maybe_get_kv_connector_output(plan) as transfer_output:
                names = list(plan.num_scheduled_tokens)
                sampled = [self._forward(name, plan.num_scheduled_tokens[name], plan) for name in names]
                # What is in flight ends here, so that a test has one course only.
                self.transfers.wait(self.transfers.in_flight())
        result = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=sampled,
            kv_connector_output=transfer_output,
        )
        for outputs in self.scheduler.update_from_output(plan, result).values():
            for output in outputs.outputs:
                outcome = self.outcomes[output.request_id]
                outcome.tokens += output.new_token_ids
                self._all_tokens[output.request_id] += output.new_token_ids
                if output.finish_reason is not None:
                    outcome.finish_reason = str(output.finish_reason)

    def _stores_left(self) -> bool:
        return bool(self.connector.connector_worker._unsubmitted_store_jobs)

    def _forward(self, name: str, num_tokens: int, plan: Any) -> list[int]:
        """Compute the next tokens of a request, which attend to all before them."""
        computed = {new.req_id: new.num_computed_tokens for new in plan.scheduled_new_reqs}
        cached = plan.scheduled_cached_reqs
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        first, tokens = computed[name], self._all_tokens[name]
        last = first + num_tokens
        assert last <= len(tokens)
        rows = kv_rows(tokens)
        for group, block_ids in enumerate(self.scheduler.kv_cache_manager.get_block_ids(name)):
            window = self.window[group]
            seen = range(max(0, first - window) if window else 0, first)
            for layer in self.group_layers[group]:
                cache = self.caches[layer]
                for position in seen if name not in self.unchecked else ():
                    row = cache[block_ids[position // BLOCK_TOKENS], :, position % BLOCK_TOKENS]
                    assert torch.equal(row, row_of(rows, position, layer)), (name, layer, position)
                for position in range(first, last):
                    row = cache[block_ids[position // BLOCK_TOKENS], :, position % BLOCK_TOKENS]
                    row.copy_(row_of(rows, position, layer))
        self.outcomes[name].computed += num_tokens
        return [int(rows[last - 1]) % 100] if last == len(tokens) else []

    def close(self) -> None:
        ensure_kv_transfer_shutdown()
        self.scheduler.shutdown()


def kv_rows(tokens: list[int]) -> Tensor:
    """A number for each position, which depends on all tokens up to it."""
    mixed, rows = 7, []
    for token in tokens:
        mixed = (mixed * 31 + token + 1) % 1009
        rows.append(mixed)
    return torch.tensor(rows)


def row_of(rows: Tensor, position: int, layer: str) -> Tensor:
    """`[2, heads, head size]`"""
    values = torch.arange(64) + int(rows[position]) + 7 * int(layer[-1])
    return values.view(2, 2, 16).to(torch.float16)
