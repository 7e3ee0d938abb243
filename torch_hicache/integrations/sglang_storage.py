"""SGLang's third tier in Mooncake Store, through its `dynamic` storage backend.

    --hicache-storage-backend dynamic --hicache-storage-backend-extra-config '{"interface_v1": 1,
      "backend_name": "torch_hicache", "module_path": "torch_hicache.integrations.sglang_storage",
      "class_name": "MooncakeStorage", "master": "10.0.0.5:50051"}'

Pages pass through pages of our own (StagedPages). That is one copy more than SGLang's own Mooncake
backend makes, and serves any of its pools and layouts.
"""

from importlib.metadata import version
from typing import Any

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage
from torch import Tensor

from torch_hicache.integrations.mooncake_client import require_version
from torch_hicache.integrations.staged_pages import DEFAULT_PAGES, StagedPages

_FIRST_VERSION, _BEFORE_VERSION = (0, 5, 23), (0, 5, 24)  # of SGLang
# Of the extra config, what goes to MooncakeTier as it is.
_TIER_OPTIONS = (
    "segment_bytes",
    "protocol",
    "local_hostname",
    "deadline_seconds",
    "slowest_bytes_per_second",
    "retry_seconds",
    "max_leased_pages",
    "lease_seconds",
)


class MooncakeStorage(HiCacheStorage):
    """Pages of SGLang's host pool, by the hashes that it gives them.

    Ranks share pages where SGLang lets them: MLA models among all tensor-parallel ranks. The extra config
    takes "master", "staging_pages" (128) and the options of MooncakeTier.

    Raises:
        RuntimeError: an unknown version of SGLang.
        ValueError, ImportError, RuntimeError: as MooncakeTier does, when the host pool is registered.
    """

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        require_version("MooncakeStorage", "sglang", version("sglang"), _FIRST_VERSION, _BEFORE_VERSION)
        self._config = storage_config
        self._extra = dict(storage_config.extra_config or {})
        if "master" not in self._extra:
            raise ValueError("[MooncakeStorage] the extra config must have 'master': 'host:port'.")
        self._staged: StagedPages | None = None

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        super().register_mem_pool_host(mem_pool_host)
        page = mem_pool_host.get_dummy_flat_data_page()
        self._dtype = page.dtype
        num_pages = int(self._extra.get("staging_pages", DEFAULT_PAGES))
        options = {name: self._extra[name] for name in _TIER_OPTIONS if name in self._extra}
        self._staged = StagedPages(
            page.nbytes,
            num_pages,
            master=self._extra["master"],
            namespace=self._namespace(page),
            **options,
        )

    # --- What the cache controller calls --------------------------------------------------------------

    def batch_set_v1(self, keys: list[str], host_indices: Tensor, extra_info: Any = None) -> list[bool]:
        firsts = self._first_tokens(keys, host_indices)

        def fill(i: int, page: Tensor) -> None:
            page.copy_(self.mem_pool_host.get_data_page(firsts[i]).view(torch.uint8))

        return self._opened.put(keys, fill)

    def batch_get_v1(self, keys: list[str], host_indices: Tensor, extra_info: Any = None) -> list[bool]:
        firsts = self._first_tokens(keys, host_indices)

        def take(i: int, page: Tensor) -> None:
            self.mem_pool_host.set_from_flat_data_page(firsts[i], page.view(self._dtype))

        return self._opened.get(keys, take)

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:
        found = self._opened.contains(keys)
        return found.index(False) if False in found else len(found)

    def exists(self, key: str) -> bool:
        return self._opened.contains([key])[0]

    # --- Its older interface: flat pages ----------------------------------------------------------------

    def batch_set(
        self,
        keys: list[str],
        values: Any = None,
        target_locations: Any = None,
        target_sizes: Any = None,
    ) -> bool:
        return all(
            self._opened.put(keys, lambda i, page: page.copy_(values[i].flatten().view(torch.uint8)))
        )

    def batch_get(
        self, keys: list[str], target_locations: Any = None, target_sizes: Any = None
    ) -> list[Tensor | None]:
        taken: dict[int, Tensor] = {}
        self._opened.get(keys, lambda i, page: taken.update({i: page.clone().view(self._dtype)}))
        return [taken.get(i) for i in range(len(keys))]

    def set(
        self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None
    ) -> bool:
        return self.batch_set([key], [value])

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> Tensor | None:
        return self.batch_get([key])[0]

    def close(self) -> None:
        if self._staged is not None:
            self._staged.close()

    @property
    def _opened(self) -> StagedPages:
        if self._staged is None:
            raise RuntimeError("[MooncakeStorage] register_mem_pool_host must come first.")
        return self._staged

    def _first_tokens(self, keys: list[str], host_indices: Tensor) -> list[int]:
        page_size = self.mem_pool_host.page_size
        if len(host_indices) != len(keys) * page_size:
            raise ValueError(
                f"[MooncakeStorage] host_indices must be {page_size} for each of {len(keys)} keys, got "
                f"{len(host_indices)}."
            )
        firsts: list[int] = host_indices[::page_size].tolist()
        return firsts

    def _namespace(self, page: Tensor) -> str:
        """What a page is, and whose. All ranks of an MLA model hold the same."""
        config, pool = self._config, self.mem_pool_host
        names = (
            "model_name",
            "pp_rank",
            "pp_size",
            "attn_cp_rank",
            "attn_cp_size",
            "dcp_rank",
            "dcp_size",
        )
        parts = [f"{name}={getattr(config, name, None)}" for name in names]
        if not config.is_mla_model:
            parts.append(f"tp={config.tp_rank} of {config.tp_size}")
        parts += [type(pool).__name__, pool.layout, str(page.dtype), f"{pool.page_size} tokens"]
        return ", ".join(parts)
