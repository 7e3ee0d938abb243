"""vLLM's KV cache offloading through torch_hicache: see docs/integrations/vllm.md.

    kv_connector="HiCacheOffloadingConnector"
    kv_connector_module_path="torch_hicache.integrations.vllm"
    kv_connector_extra_config={
        "spec_name": "HiCacheOffloadingSpec",
        "spec_module_path": "torch_hicache.integrations.vllm",
        "cpu_bytes_to_use": ...,
    }

and, with vLLM's own TieringOffloadingSpec, a third tier in Mooncake Store:

    "secondary_tiers": [
        {"type": "HiCacheMooncakeTier", "module_path": "torch_hicache.integrations.vllm", "master": ...}
    ]

vLLM takes the classes from here by name; it is imported when one of them is asked for.
"""

from typing import Any

from torch_hicache.integrations.engine_version import require_engine

FIRST_VERSION, LAST_VERSION = (0, 29), (0, 33)


def check_version() -> None:
    """
    Raises:
        ModuleNotFoundError: vLLM is not installed.
        RuntimeError: another version than 0.29 to 0.33 is.
    """
    require_engine("vllm", FIRST_VERSION, LAST_VERSION, "pip install vllm==0.33.0")


def __getattr__(name: str) -> Any:
    if name in ("HiCacheOffloadingSpec", "HiCacheOffloadingWorker"):
        check_version()
        from torch_hicache.integrations.vllm import spec

        return getattr(spec, name)
    if name == "HiCacheOffloadingConnector":
        check_version()
        from torch_hicache.integrations.vllm.connector import HiCacheOffloadingConnector

        return HiCacheOffloadingConnector
    if name == "HiCacheMooncakeTier":
        check_version()
        from torch_hicache.integrations.vllm.tier import HiCacheMooncakeTier

        return HiCacheMooncakeTier
    raise AttributeError(f"module '{__name__}' has no attribute '{name}'")
