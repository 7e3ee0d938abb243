"""What explain says of calls on npu tensors, held against what the driver is then asked for."""

import os
import subprocess
import sys

import ascend_sim
import pytest
import torch
from ascend_sim import Simulator
from torch import Tensor

from torch_hicache import MethodTable, Plan, empty_host, explain, set_method_table
from torch_hicache.testing import check_transfer, fill_pool, random_entries, unchanged

pytestmark = pytest.mark.backend("npu")
transfer_kv = torch.ops.hicache.transfer_kv
LAUNCH = "aclrtlaunch_hicache_kv_exchange"
COPIES = ("aclrtMemcpyAsync", "aclrtMemcpy2dAsync", "aclrtMemcpyBatchAsync", "aclrtMemcpy")
RUN = torch.arange(9)
SCATTERED = torch.arange(9) * 2


def host(memory: str, shape: tuple[int, ...]) -> Tensor:
    if memory == "page_locked":
        return torch.empty(shape, dtype=torch.uint8, pin_memory=True)
    if memory == "pageable":
        return torch.empty(shape, dtype=torch.uint8)
    return empty_host(shape, torch.uint8, "npu", kind=memory)


def pools(memory: str, row: int = 24) -> tuple[Tensor, Tensor]:
    """[layers, slots, row]: layer_first on the device, page_first on the host."""
    device_pool = torch.empty(2, 23, row, dtype=torch.uint8, device="npu")
    host_pool = host(memory, (19, 2, row)).transpose(0, 1)
    fill_pool([device_pool], 1)
    fill_pool([host_pool], 1, seed=1)
    return device_pool, host_pool


@pytest.mark.parametrize("is_load", [True, False])
@pytest.mark.parametrize("memory", ["memfabric", "pinned"])
@pytest.mark.parametrize("where", ["cpu", "npu"])
def test_the_kernel_where_the_host_side_has_a_device_address(
    memory: str, where: str, is_load: bool
) -> None:
    device_pool, host_pool = pools(memory)
    dst, src = (device_pool, host_pool) if is_load else (host_pool, device_pool)
    at = RUN.to(where)
    expected = Plan("kernel", 0, 0, 1, 9 * 48, "the AI cores reach both pools")
    with unchanged([device_pool, host_pool]):
        assert explain([dst], [src], at, at, slot_dim=1) == expected
        asked = explain([dst], [src], at, at, slot_dim=1, method="kernel")
    assert asked == Plan("kernel", 0, 0, 1, 9 * 48, "asked for")
    padded = torch.tensor([1, -1, 3]).to(where)
    plan = explain([dst], [src], padded, padded, slot_dim=1)
    assert plan.bytes == (2 if where == "cpu" else 3) * 48  # the host can't read the device's indices
    nothing = RUN[:0].to(where)
    assert explain([dst], [src], nothing, nothing, slot_dim=1).batches == 0


@pytest.mark.parametrize("is_load", [True, False])
@pytest.mark.parametrize("memory", ["page_locked", "pageable"])
def test_else_the_copy_engine(memory: str, is_load: bool) -> None:
    device_pool, host_pool = pools(memory)
    dst, src = (device_pool, host_pool) if is_load else (host_pool, device_pool)
    plan = explain([dst], [src], RUN, RUN + 1, slot_dim=1)
    name = "src" if is_load else "dst"
    batches = 2 if memory == "page_locked" else 18  # rows of each layer, strided on the host
    assert plan == Plan("copy_engine", 1, 18, batches, 9 * 48, f"{name}[0] has no address for an AI core")


@pytest.mark.parametrize("memory", ["memfabric", "pinned", "page_locked", "pageable"])
@pytest.mark.parametrize("slots", ["run", "scattered", "many"])
def test_submissions_are_those_of_the_call(sim: Simulator, memory: str, slots: str) -> None:
    device_pool, host_pool = pools(memory)
    dst_indices, src_indices = {"run": (RUN, RUN), "scattered": (SCATTERED, RUN)}.get(slots, (RUN, RUN))
    if slots == "many":  # more rows than a batch holds
        device_pool = torch.zeros(2, 5001, 8, dtype=torch.uint8, device="npu")
        host_pool = host(memory, (2, 5001, 8))
        dst_indices, src_indices = random_entries(2500, 5001, 5001)
    call = ([device_pool], [host_pool], dst_indices, src_indices)
    for method in ("auto", "copy_engine"):
        plan = explain(*call, slot_dim=1, method=method)
        torch.npu.synchronize()
        sim.forget()
        transfer_kv(*call, slot_dim=1, method=method)
        torch.npu.synchronize()
        asked = sum(sim.calls(name) for name in COPIES)
        if plan.method == "kernel":
            assert (sim.calls(LAUNCH), asked) == (plan.batches, 1)  # and the upload
        else:
            assert (sim.calls(LAUNCH), asked) == (0, plan.batches)


@pytest.mark.parametrize("is_load", [True, False])
def test_no_copy_goes_over_the_edge_of_a_registration(is_load: bool) -> None:
    """Large memory is registered in pieces, which the device sees at addresses apart."""
    pinned = empty_host(
        (4, 16384), torch.uint8, "npu", kind="pinned", plane_unit_bytes=16384, max_piece_bytes=16384
    )
    device_pool = torch.zeros(3, 65536, dtype=torch.uint8, device="npu")
    host_pool = pinned.view(1, 65536)
    fill_pool([host_pool], seed=1)
    fill_pool([device_pool])
    pools_of_call = ([device_pool], [host_pool]) if is_load else ([host_pool], [device_pool])
    at = torch.tensor([2]), torch.tensor([0])
    at = at if is_load else at[::-1]
    plan = explain(*pools_of_call, *at)
    assert (plan.method, plan.runs, plan.rows, plan.batches) == ("copy_engine", 1, 4, 1)
    check_transfer(*pools_of_call, *at)
    if is_load:  # planes that lie in one piece each are the kernel's
        planes = device_pool.view(3, 4, 16384).unbind(1), pinned.view(1, 4, 16384).unbind(1)
        assert explain(*planes, *at).method == "kernel"
        check_transfer(*planes, *at)


def test_what_can_not_be_served_is_refused_alike() -> None:
    device_pool, host_pool = pools("page_locked")
    at = RUN.to("npu")
    for indices, method in ((RUN, "kernel"), (at, "auto"), (at, "copy_engine"), (RUN, "staged")):
        texts = []
        for call in (transfer_kv, explain):
            with pytest.raises(ValueError, match=r"^\[transfer_kv\]") as caught:
                call([device_pool], [host_pool], indices, indices, slot_dim=1, method=method)
            texts.append(str(caught.value))
        assert texts[0] == texts[1]


def test_indices_on_the_cpu_are_refused_while_a_stream_captures(sim: Simulator) -> None:
    device_pool, host_pool = pools("memfabric")
    at = RUN.to("npu")
    with sim.capturing():
        with pytest.raises(ValueError, match="indices on the CPU can't be captured"):
            explain([device_pool], [host_pool], RUN, RUN, slot_dim=1)
        assert explain([device_pool], [host_pool], at, at, slot_dim=1).method == "kernel"


def test_nothing_is_waited_for(sim: Simulator) -> None:
    device_pool, host_pool = pools("page_locked")
    at = RUN.to("npu")
    torch.npu.synchronize()
    sim.forget()
    with sim.held():
        for _ in range(3):
            explain([device_pool], [host_pool], RUN, RUN, slot_dim=1)
            explain([device_pool], [device_pool], at, at, slot_dim=1)
        assert sim.host_syncs == 0
        assert sum(sim.calls(name) for name in (*COPIES, LAUNCH)) == 0


def test_there_is_no_table_to_set() -> None:
    with pytest.raises(ValueError, match=r"^\[method_table\] there is no table on npu:0: 'auto' takes"):
        set_method_table("npu", MethodTable())


def test_without_the_kernels_library_the_reason_says_so() -> None:
    if not ascend_sim.FOLDER:
        pytest.skip(ascend_sim.REASON)
    code = """
import torch, torch_hicache
dst, src = torch.zeros(4, 4).to("npu"), torch_hicache.empty_host((4, 4), torch.float32, "npu")
at = torch.tensor([1, 2])
plan = torch_hicache.explain([dst], [src], at, at)
print(plan.method, plan.reason)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"HICACHE_ASCEND_KERNEL": "/missing/kernel.so"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout.splitlines()[-1] == "copy_engine the AI-vector kernel is not built (docs/ascend.md)"
    )
