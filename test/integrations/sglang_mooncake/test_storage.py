"""SGLang's `dynamic` storage backend over a real Mooncake Store, with SGLang's own pools and factory."""

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageConfig
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from sglang.srt.mem_cache.storage.backend_factory import StorageBackendFactory
from store_processes import Master, Owner
from torch import Tensor

PAGE, TOKENS, LAYERS = 4, 64, 3
KEYS = ["a", "b", "c"]


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Master]:
    with Master(tmp_path) as running:
        yield running


@pytest.fixture
def owner(master: Master) -> Iterator[Owner]:
    with Owner(master.address, 64 << 20) as running:
        yield running


def host_pool(kind: str, layout: str) -> Any:
    common = {"size": TOKENS, "page_size": PAGE, "dtype": torch.bfloat16, "layer_num": LAYERS}
    common |= {"device": "cpu", "enable_memory_saver": False}
    fields = {
        "pin_memory": False,
        "device_capacity_tokens": TOKENS,
        "start_layer": 0,
        "end_layer": LAYERS,
    }
    if kind == "mla":
        device = MLATokenToKVPool(kv_lora_rank=16, qk_rope_head_dim=6, **common)
        info = device._mla_buffer_info()
        pool = MLATokenToKVPoolHost(info, 2.0, 0, PAGE, layout, target_layer_num=LAYERS, **fields)
    else:
        device = MHATokenToKVPool(head_num=2, head_dim=10, **common)
        pool = MHATokenToKVPoolHost(device._mha_buffer_info(), 2.0, 0, PAGE, layout, **fields)
    pool.kv_buffer.view(torch.uint8).random_(generator=torch.Generator().manual_seed(1))
    return pool


def config(pool: Any, master: str, rank: int = 0, **extra: Any) -> HiCacheStorageConfig:
    return HiCacheStorageConfig(
        tp_rank=rank,
        tp_size=2,
        pp_rank=0,
        pp_size=1,
        attn_cp_rank=0,
        attn_cp_size=1,
        is_mla_model=isinstance(pool, MLATokenToKVPoolHost),
        enable_storage_metrics=False,
        is_page_first_layout=True,
        model_name="test",
        extra_config={
            "backend_name": "torch_hicache",
            "module_path": "torch_hicache.integrations.sglang_storage",
            "class_name": "MooncakeStorage",
            "interface_v1": 1,
            "master": master,
            "deadline_seconds": 5.0,
        }
        | extra,
    )


def open_backend(pool: Any, storage_config: HiCacheStorageConfig) -> Any:
    backend = StorageBackendFactory.create_backend("dynamic", storage_config, pool)
    backend.register_mem_pool_host(pool)
    return backend


def tokens_of(pages: list[int]) -> Tensor:
    return torch.tensor([page * PAGE + i for page in pages for i in range(PAGE)])


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_pages_of_sglangs_pools_come_back(kind: str, layout: str, master: Master, owner: Owner) -> None:
    pool = host_pool(kind, layout)
    backend = open_backend(pool, config(pool, master.address, staging_pages=2))
    try:
        assert backend.batch_set_v1(KEYS, tokens_of([1, 5, 9])) == [True] * 3
        assert backend.batch_exists([*KEYS, "d"]) == 3
        wanted = pool.kv_buffer.clone()
        for target, source in ((12, 1), (3, 5), (7, 9)):
            page = pool.get_data_page(source * PAGE).clone()
            pool.set_from_flat_data_page(target * PAGE, page)
        wanted, pool.kv_buffer[:] = pool.kv_buffer.clone(), wanted
        assert not torch.equal(wanted.view(torch.uint8), pool.kv_buffer.view(torch.uint8))
        found = backend.batch_get_v1([*KEYS, "d"], tokens_of([12, 3, 7, 8]))
        assert found == [True, True, True, False]
        assert torch.equal(wanted.view(torch.uint8), pool.kv_buffer.view(torch.uint8))
        pages = backend.batch_get(["b", "d"])
        assert torch.equal(pages[0].view(torch.uint8), pool.get_data_page(5 * PAGE).view(torch.uint8))
        assert pages[1] is None
        assert backend.batch_set(["e"], [pages[0]])
        assert backend.exists("e")
    finally:
        backend.close()


@pytest.mark.parametrize("kind", ["mha", "mla"])
def test_ranks_share_what_is_the_same_on_all(kind: str, master: Master, owner: Owner) -> None:
    pool = host_pool(kind, "page_first")
    first = open_backend(pool, config(pool, master.address, rank=0))
    second = open_backend(pool, config(pool, master.address, rank=1))
    try:
        assert first.batch_set_v1(["a"], tokens_of([1])) == [True]
        assert second.batch_exists(["a"]) == (1 if kind == "mla" else 0)
    finally:
        first.close()
        second.close()


def test_a_get_that_was_given_up_never_writes_to_sglangs_page(master: Master, owner: Owner) -> None:
    pool = host_pool("mha", "page_first")
    backend = open_backend(
        pool, config(pool, master.address, staging_pages=3, deadline_seconds=0.3, retry_seconds=0.2)
    )
    try:
        assert backend.batch_set_v1(KEYS, tokens_of([1, 5, 9])) == [True] * 3
        before = pool.kv_buffer.clone()
        owner.signal(signal.SIGSTOP)
        assert backend.batch_get_v1(KEYS, tokens_of([2, 3, 4])) == [False] * 3
        assert backend.batch_get_v1(KEYS, tokens_of([2, 3, 4])) == [False] * 3  # no page is left
        owner.signal(signal.SIGCONT)
        backend.close()  # waits for the call
        assert torch.equal(before.view(torch.uint8), pool.kv_buffer.view(torch.uint8))
    finally:
        backend.close()


def test_a_config_without_a_master_is_refused(master: Master) -> None:
    pool = host_pool("mha", "page_first")
    wrong = config(pool, master.address)
    assert wrong.extra_config is not None
    del wrong.extra_config["master"]
    with pytest.raises(ValueError, match="must have 'master': 'host:port'"):
        open_backend(pool, wrong)


@pytest.mark.parametrize("found", ["0.5.22", "0.5.24", "0.6.0"])
def test_an_unknown_sglang_is_refused(
    found: str, master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch_hicache.integrations import sglang_storage

    monkeypatch.setattr(sglang_storage, "version", lambda package: found)
    pool = host_pool("mha", "page_first")
    text = rf"sglang must be 0\.5\.23 or newer, and older than 0\.5\.24, got {found}"
    with pytest.raises(RuntimeError, match=text):
        open_backend(pool, config(pool, master.address))
