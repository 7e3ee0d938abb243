"""The spec and its worker with vLLM's real factory, manager and types, without an engine around them."""

import pickle
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
import vllm
from configs import keys_of, make_config
from torch import Tensor
from vllm.v1.kv_offload.base import (
    CanonicalKVCacheRef,
    CanonicalKVCaches,
    CanonicalKVCacheTensor,
    GPULoadStoreSpec,
    LookupResult,
    ReqContext,
)
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from torch_hicache import testing

MODULE = "torch_hicache.integrations.vllm"
BLOCKS, PAGES = 20, (96, 40)


def make_spec(*, chunks: int = 6, **changes: Any) -> Any:
    extra_config = {
        "spec_name": "HiCacheOffloadingSpec",
        "spec_module_path": MODULE,
        # vLLM counts chunks in whole pages of the system
        "cpu_bytes_to_use": chunks * 4096,
    }
    fields = {"worker_kv_bytes_per_block": sum(PAGES)} | changes
    return OffloadingSpecFactory.create_spec(make_config(extra_config, **fields))


def make_caches(groups: int = 1) -> tuple[CanonicalKVCaches, list[Tensor]]:
    tensors = [testing.strided_tensor((BLOCKS, page), torch.int8) for page in PAGES]
    testing.fill_pool(tensors)
    refs = [CanonicalKVCacheRef(0, 90), CanonicalKVCacheRef(1, 40)]
    caches = CanonicalKVCaches(
        tensors=[
            CanonicalKVCacheTensor(tensor, page) for tensor, page in zip(tensors, PAGES, strict=True)
        ],
        group_data_refs=[refs] if groups == 1 else [[ref] for ref in refs],
    )
    return caches, tensors


def context_of(manager: Any, name: str = "request") -> ReqContext:
    context = ReqContext(req_id=name)
    manager.on_new_request(context)
    return context


def finish(worker: Any, *job_ids: int) -> list[Any]:
    worker.wait(set(job_ids))
    results = worker.get_finished()
    assert {result.job_id for result in results} == set(job_ids)
    assert all(result.success for result in results)
    return results


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
def test_what_the_manager_places_comes_back(groups: int, blocks_per_chunk: int) -> None:
    spec = make_spec(groups=groups, blocks_per_chunk=blocks_per_chunk)
    manager = spec.get_manager()
    caches, tensors = make_caches(groups)
    worker = spec.get_worker(caches)
    assert spec.get_worker(caches) is worker
    context = context_of(manager)
    keys = [key for group in range(groups) for key in keys_of(1, 2, group=group)]
    assert manager.lookup(keys[0], context) == LookupResult.MISS
    output = manager.prepare_store(keys, context)
    assert output.keys_to_store == keys

    per_group = 2 * blocks_per_chunk
    blocks = list(range(1, 1 + groups * per_group))
    gpu = GPULoadStoreSpec(blocks, group_sizes=[per_group] * groups, block_indices=[0] * groups)
    assert worker.submit_store(1, gpu, output.store_spec) is True
    (result,) = finish(worker, 1)
    assert result.transfer_size == per_group * (90 + 40)
    assert result.transfer_time >= 0
    assert manager.lookup(keys[0], context) == LookupResult.HIT_PENDING
    manager.complete_store(keys, context)
    assert manager.lookup(keys[0], context) == LookupResult.HIT

    before = [tensor.clone() for tensor in tensors]
    for tensor in tensors:
        tensor.zero_()
    source = manager.prepare_load(keys, context)
    assert worker.submit_load(2, source, gpu) is True
    finish(worker, 2)
    manager.complete_load(keys, context)
    for i, (tensor, width) in enumerate(zip(tensors, (90, 40), strict=True)):
        mine = blocks if groups == 1 else blocks[i * per_group : (i + 1) * per_group]
        expected = torch.zeros_like(before[i])
        expected[mine, :width] = before[i][mine, :width]
        assert torch.equal(tensor, expected)
    worker.shutdown()


def test_a_load_takes_the_second_half_of_a_chunk() -> None:
    spec = make_spec()
    manager = spec.get_manager()
    caches, tensors = make_caches()
    worker = spec.get_worker(caches)
    context = context_of(manager)
    keys = keys_of(1, 2)
    output = manager.prepare_store(keys, context)
    worker.submit_store(1, GPULoadStoreSpec([4, 9, 2, 7], [4], [0]), output.store_spec)
    finish(worker, 1)
    manager.complete_store(keys, context)
    expected = [tensor.clone() for tensor in tensors]
    worker.submit_load(2, manager.prepare_load(keys, context), GPULoadStoreSpec([15, 16, 17], [3], [1]))
    finish(worker, 2)
    for plane, width in zip(expected, (90, 40), strict=True):
        plane[[15, 16, 17], :width] = plane[[9, 2, 7], :width]
    for tensor, plane in zip(tensors, expected, strict=True):
        assert torch.equal(tensor, plane)
    worker.shutdown()


def test_failures_end_as_finished_and_are_named(caplog: pytest.LogCaptureFixture) -> None:
    spec = make_spec(blocks_per_chunk=1)
    manager = spec.get_manager()
    caches, tensors = make_caches()
    worker = spec.get_worker(caches)
    context = context_of(manager)
    keys = keys_of(1, 2)
    stored = manager.prepare_store(keys, context).store_spec
    with testing.unchanged(tensors):
        assert worker.submit_store(1, GPULoadStoreSpec([3, BLOCKS], [2], [0]), stored) is True
        (result,) = finish(worker, 1)
        assert (result.transfer_size, result.transfer_time) == (None, None)
        assert worker.take_failed_loads() == {}
        manager.complete_store(keys, context)
        load = manager.prepare_load(keys, context)
        assert worker.submit_load(2, load, GPULoadStoreSpec([5, 6], [2], [0]), expedited=True) is True
        finish(worker, 2)
    assert worker.take_failed_loads() == {2: {5, 6}}
    assert worker.take_failed_loads() == {}
    assert "store 1 of 2 blocks failed" in caplog.text
    assert "load 2 of 2 blocks failed" in caplog.text
    worker.shutdown()


def test_jobs_of_a_direction_end_in_order_and_shutdown_ends_all() -> None:
    spec = make_spec(blocks_per_chunk=1)
    manager = spec.get_manager()
    caches, _ = make_caches()
    worker = spec.get_worker(caches)
    context = context_of(manager)
    stored = manager.prepare_store(keys_of(1), context).store_spec
    seen = []
    for job_id in range(20):
        worker.submit_store(job_id, GPULoadStoreSpec([job_id % BLOCKS], [1], [0]), stored)
        seen += [result.job_id for result in worker.get_finished()]
    worker.wait(set(range(20)))
    seen += [result.job_id for result in worker.get_finished()]
    assert seen == list(range(20))
    worker.submit_store(20, GPULoadStoreSpec([1], [1], [0]), stored)
    worker.shutdown()
    worker.shutdown()
    assert worker.get_finished() == []


def test_what_several_workers_say_after_a_step_is_joined() -> None:
    from torch_hicache.integrations.vllm.connector import HiCacheWorkerMetadata

    first = HiCacheWorkerMetadata(completed_jobs={1: 1}, failed_requests={"a"})
    second = HiCacheWorkerMetadata(completed_jobs={1: 1, 2: 1}, failed_requests={"b"})
    joined = pickle.loads(pickle.dumps(first.aggregate(pickle.loads(pickle.dumps(second)))))
    assert isinstance(joined, HiCacheWorkerMetadata)
    assert joined.completed_jobs == {1: 2, 2: 1}
    assert joined.failed_requests == {"a", "b"}


def test_host_memory_is_what_vllm_counts() -> None:
    spec = make_spec(blocks_per_chunk=2, chunks=6)
    worker = spec.get_worker(make_caches()[0])
    shapes = [tuple(tensor.shape) for tensor in worker.transfers.host_tensors]
    assert shapes == [(12, 96), (12, 40)]
    worker.shutdown()


def test_the_canonical_layout_is_refused() -> None:
    with pytest.raises(ValueError, match="canonical_layout must be off"):
        make_spec(canonical_layout=True)


@pytest.mark.parametrize("version", ["0.28.1", "0.34.0", "1.0.0", "0.1.dev7+g123", "unknown"])
def test_other_versions_are_refused_when_the_spec_is_created(
    version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = make_spec()
    monkeypatch.setattr(vllm, "__version__", version)
    text = re.escape(f"[vllm] version must be 0.29 to 0.33, got {version}: pip install")
    with pytest.raises(RuntimeError, match=text):
        make_spec()
    with pytest.raises(RuntimeError, match=text):
        type(spec)(spec.config)


@pytest.mark.parametrize("version", ["0.29.0", "0.30.1rc1", "0.33.4.dev2+cu130"])
def test_versions_between_are_taken(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__version__", version)
    assert make_spec() is not None


def test_a_missing_package_is_named_with_its_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(sys, "meta_path", [WithoutVllm(), *sys.meta_path])
    module = sys.modules[MODULE]
    with pytest.raises(ModuleNotFoundError, match=r"must be installed: pip install vllm==0\.33\.0"):
        _ = module.HiCacheOffloadingSpec


class WithoutVllm:
    """As if vLLM were not installed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == "vllm":
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)


def test_importing_the_adapter_imports_no_engine() -> None:
    code = (
        "import sys, torch_hicache.integrations.vllm as adapter\n"
        "import torch_hicache.integrations.vllm.chunk_transfers\n"
        "assert 'vllm' not in sys.modules\n"
        "assert not hasattr(adapter, 'Nothing')\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
