"""How LMCache finds the plug-in, and that it leaves LMCache alone unless it is chosen. The package is
installed: its entry points are what LMCache reads."""

import logging
import os
import subprocess
import sys
import types

import lmcache
import pytest
from lmcache.v1.platform.base.device_ops import DeviceOps

from torch_hicache.integrations.lmcache import (
    HiCacheCpuSpec,
    HiCacheCudaOps,
    HiCacheCudaSpec,
    HiCacheOps,
)

VARIABLE = "LMCACHE_DEVICE_BACKEND"
SAY = "import lmcache; print('ops:', type(lmcache.device_ops).__name__, lmcache.torch_device_type)"


def start(backend: str | None, code: str = SAY) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if name != VARIABLE}
    if backend is not None:
        environment[VARIABLE] = backend
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_it_is_used_when_it_is_named() -> None:
    assert "ops: HiCacheCpuOps cpu" in start("hicache_cpu").stdout
    assert "ops: HiCacheCpuOps cpu" in start(" HiCache_CPU ").stdout


GATHER_AND_SCATTER = """
import hashlib, torch, lmcache
from lmcache.v1.multiprocess.transfer_context.base import gather_paged_kv_to_cpu, scatter_cpu_to_paged_kv
for shape in ((2, 11, 4, 2, 6), (11, 2, 4, 2, 6), (11, 4, 24)):
    torch.manual_seed(0)
    caches = {f"model.layers.{i}.attn": torch.randn(shape, dtype=torch.bfloat16) for i in range(3)}
    chunks = gather_paged_kv_to_cpu(caches, [7, 2, 9, 0, 10, 4], 3)
    for cache in caches.values():
        cache.zero_()
    scatter_cpu_to_paged_kv(caches, [1, 2, 3, 4, 5, 6], chunks, 3)
    digest = hashlib.sha256()
    for tensor in (*chunks, *caches.values()):
        digest.update(tensor.view(torch.uint8).numpy().tobytes())
    assert all(bool(cache.any()) for cache in caches.values())
    print("digest:", digest.hexdigest(), type(lmcache.device_ops).__name__)
"""


def test_lmcaches_gather_and_scatter_give_the_same_bytes() -> None:
    """What an engine-driven worker calls to move its blocks."""
    digests = []
    for backend, ops in ((None, "CpuDeviceOps"), ("hicache_cpu", "HiCacheCpuOps")):
        done = start(backend, GATHER_AND_SCATTER)
        assert done.returncode == 0, done.stderr
        lines = [line.split() for line in done.stdout.splitlines() if line.startswith("digest:")]
        assert [line[2] for line in lines] == [ops] * 3
        digests.append([line[1] for line in lines])
    assert digests[0] == digests[1]


def test_without_its_name_lmcache_is_as_it_was() -> None:
    done = start(None)
    assert done.returncode == 0
    assert "ops: CpuDeviceOps cpu" in done.stdout
    assert "device plugin" not in done.stdout + done.stderr
    named = start("cpu")  # LMCache's CPU backend never says that it is available
    assert "'cpu' is registered but not available" in named.stderr


def test_the_cuda_backend_is_known_and_says_that_there_is_no_gpu() -> None:
    done = start("hicache_cuda")
    if "ops: HiCacheCudaOps cuda" not in done.stdout:
        assert "'hicache_cuda' is registered but not available on this host" in done.stderr


@pytest.mark.parametrize("spec_class", [HiCacheCpuSpec, HiCacheCudaSpec])
@pytest.mark.parametrize("named", [None, "", "cuda", "cpu", "other"])
def test_a_spec_is_not_available_unless_named(
    spec_class: type, named: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.version.cuda", "13.0")
    if named is None:
        monkeypatch.delenv(VARIABLE, raising=False)
    else:
        monkeypatch.setenv(VARIABLE, named)
    assert spec_class().is_available() is False
    monkeypatch.setenv(VARIABLE, spec_class().backend_name)
    assert spec_class().is_available() is True


@pytest.mark.parametrize("version", ["0.4.9", "0.6.0", "1.0", "unknown"])
def test_other_versions_are_refused_when_it_is_chosen(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lmcache, "__version__", version)
    monkeypatch.setenv(VARIABLE, "hicache_cpu")
    with pytest.raises(RuntimeError, match=f"must be 0.5 to 0.5, got {version}: pip install lmcache"):
        HiCacheCpuSpec().is_available()
    monkeypatch.delenv(VARIABLE)
    assert HiCacheCpuSpec().is_available() is False


def test_compiled_ops_stay_behind_ours(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """lmcache.cuda_ops can't be loaded without CUDA, so a module takes its place."""
    native = types.ModuleType("lmcache.cuda_ops")
    calls: list[str] = []
    for name in ("multi_layer_block_kv_transfer", "multi_layer_kv_transfer", "only_native"):
        setattr(native, name, lambda *_, name=name, **__: calls.append(name))
    monkeypatch.setitem(sys.modules, "lmcache.cuda_ops", native)
    monkeypatch.setattr(lmcache, "cuda_ops", native, raising=False)
    ops = HiCacheCudaOps()
    with caplog.at_level(logging.WARNING):
        ops.ensure_native()
    assert ops.multi_layer_block_kv_transfer.__func__ is HiCacheOps.multi_layer_block_kv_transfer
    ops.only_native()
    ops._stock("multi_layer_kv_transfer")()
    assert calls == ["only_native", "multi_layer_kv_transfer"]
    assert ops._stock("single_layer_kv_transfer").__func__ is DeviceOps.single_layer_kv_transfer


def test_importing_torch_hicache_imports_no_lmcache() -> None:
    done = start(None, "import sys, torch_hicache; assert 'lmcache' not in sys.modules")
    assert done.returncode == 0, done.stderr
