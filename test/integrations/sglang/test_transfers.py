"""SGLang's real pools, calling our kvcacheio and jit functions in place of its kernels.

On a CPU machine SGLang's modules bind no name of sgl_kernel.kvcacheio; here they get ours. The methods
are SGLang's own, also where the plug-in has wrapped them.
"""

import inspect
from collections.abc import Iterator

import pytest
import torch
from pools import DIM, HEADS, LAYERS, Pools, page_tokens
from sglang.kernels.ops.kvcache import hicache
from sglang.srt.mem_cache.pool_host import mha, mla
from torch import Tensor

from torch_hicache.integrations.sglang import jit, kvcacheio

CASES = [
    ("mha", "kernel", "layer_first"),
    ("mha", "kernel", "page_first"),
    ("mha", "kernel", "page_head"),
    ("mha", "direct", "layer_first"),
    ("mha", "direct", "page_first_direct"),
    ("asymmetric", "kernel", "page_first"),
    ("asymmetric", "direct", "page_first_direct"),
    ("mla", "kernel", "layer_first"),
    ("mla", "kernel", "page_first"),
    ("mla", "direct", "layer_first"),
    ("mla", "direct", "page_first_direct"),
]
LAYER_TOKENS = (page_tokens(5, 1, 8), page_tokens(0, 15, 3))
called: list[str] = []


@pytest.fixture(autouse=True)
def _our_functions(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    def counted(name: str, function: object) -> object:
        def call(*args: object, **kwargs: object) -> None:
            called.append(name)
            function(*args, **kwargs)  # type: ignore[operator]

        return call

    for module in (mha, mla):
        for name, function in inspect.getmembers(kvcacheio, inspect.isfunction):
            if name.startswith("transfer_kv_"):
                monkeypatch.setattr(module, name, counted(name, function), raising=False)
        for name in [name for name in vars(module) if name.startswith("jit_transfer_hicache_")]:
            function = getattr(jit, name.removeprefix("jit_"))
            monkeypatch.setattr(module, name, counted(name, function))
    called.clear()
    yield
    assert called, "the pool has called none of our functions"


def load(pools: Pools, tokens: tuple[Tensor, Tensor], layer: int, io_backend: str) -> None:
    method = inspect.unwrap(type(pools.host).load_to_device_per_layer)
    method(pools.host, pools.device, tokens[1], tokens[0], layer, io_backend)


def store(pools: Pools, tokens: tuple[Tensor, Tensor], io_backend: str) -> None:
    method = inspect.unwrap(type(pools.host).backup_from_device_all_layer)
    method(pools.host, pools.device, tokens[1], tokens[0], io_backend)


@pytest.mark.parametrize(("kind", "io_backend", "layout"), CASES)
def test_functions_of_kvcacheio(kind: str, io_backend: str, layout: str) -> None:
    pools = Pools(kind, layout)
    for layer in range(LAYERS):
        expected = pools.expect_load(*LAYER_TOKENS, layer)
        load(pools, LAYER_TOKENS, layer, io_backend)
        pools.check(expected)
    tokens = page_tokens(2, 7), page_tokens(4, 1)
    expected = pools.expect_store(*tokens)
    store(pools, tokens, io_backend)
    pools.check(expected)
    assert all(name.startswith("transfer_kv_") for name in called)


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
@pytest.mark.parametrize("kind", ["mha", "mla"])
@pytest.mark.parametrize("staged", [True, False])
def test_functions_of_the_jit_module(kind: str, layout: str, staged: bool) -> None:
    pools = Pools(kind, layout)
    pools.host.can_use_jit = True
    pools.host.can_use_write_back_jit = staged
    if staged:  # what the pool makes on a GPU
        shape = (8, LAYERS, 1, 22) if kind == "mla" else (8, LAYERS, HEADS, DIM)
        staging = torch.empty(shape, dtype=torch.bfloat16)
        pools.host.staging_buffer = pools.host.staging_k_buffer = pools.host.staging_v_buffer = staging
    elif layout == "page_first":  # SGLang takes this way for rows that lie a stride apart
        pools.host._strided_device_row_bytes = pools.host.token_stride_size
    expected = pools.expect_load(*LAYER_TOKENS, 1)
    load(pools, LAYER_TOKENS, 1, "kernel")
    pools.check(expected)
    tokens = page_tokens(2, 7), page_tokens(4, 1)
    expected = pools.expect_store(*tokens)
    store(pools, tokens, "kernel")
    pools.check(expected)
    assert all(name.startswith("jit_transfer_") for name in called)
    assert ("staged" in called[-1]) == (staged and layout == "page_first")


def test_all_names_of_the_jit_module_are_here() -> None:
    called.append("nothing to call")
    for name, function in inspect.getmembers(hicache, inspect.isfunction):
        if name.startswith(("transfer_hicache_", "can_use_")):
            ours = list(inspect.signature(getattr(jit, name)).parameters.values())
            theirs = list(inspect.signature(function).parameters.values())
            assert [(p.name, p.kind) for p in ours] == [(p.name, p.kind) for p in theirs], name
