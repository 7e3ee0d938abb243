"""vLLM's OffloadingConfig without an engine that makes it."""

from typing import Any

from vllm.v1.kv_offload.base import make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)


def make_config(
    extra_config: dict[str, Any], *, blocks_per_chunk: int = 2, groups: int = 1, **changes: Any
) -> OffloadingConfig:
    fields = OffloadingGroupConfig.__dataclass_fields__
    config = {
        "groups": tuple(
            OffloadingGroupConfig(
                tokens_per_block=16,
                layer_names=(f"layer{i}",),
                **({"group_id": i} if "group_id" in fields else {}),
            )
            for i in range(groups)
        ),
        "enable_kv_cache_events": False,
        "extra_config": extra_config,
        "engine_id": "test",
        "model": OffloadingModelConfig(name="model", dtype="float16"),
        "cache": OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=blocks_per_chunk),
        "parallel": OffloadingParallelConfig(
            rank=0,
            world_size=1,
            tp_size=1,
            pp_size=1,
            pcp_size=1,
            dcp_size=1,
            data_parallel_index=0,
            data_parallel_size=1,
            data_parallel_rank_local=None,
            is_parallelism_agnostic=True,
        ),
        **changes,
    }
    return OffloadingConfig(**config)


def keys_of(*numbers: int, group: int = 0) -> list[Any]:
    return [make_offload_key(bytes([number]) * 8, group) for number in numbers]
