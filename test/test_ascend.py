"""The Ascend backend on npu tensors: order, waiting, lifetime, faults, refusals, and what it submits.

On the simulated driver with the emulated kernel; what needs neither runs on an NPU too.
"""

import ctypes
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import ascend_sim
import pytest
import torch
from ascend_emulation import Kernel
from ascend_sim import Simulator
from bad_calls import BAD_PLACES, arguments, fake_text_of, text_of
from torch import Tensor

from torch_hicache import check_errors, device_view, empty_host, to_device_no_sync
from torch_hicache.testing import check_transfer, fill_pool, random_entries, unchanged

pytestmark = pytest.mark.backend("npu")
transfer_kv = torch.ops.hicache.transfer_kv
LAUNCH = "aclrtlaunch_hicache_kv_exchange"
DEVICE_TO_DEVICE = 3
ROUNDS = 300


def pools(memory: str = "memfabric", layers: int = 2, row: int = 24) -> tuple[Tensor, Tensor]:
    """On the device and on the host: [layers, slots, row]."""
    device_pool = torch.empty(layers, 23, row, dtype=torch.uint8, device="npu")
    if memory == "page_locked":
        host_pool = torch.empty(layers, 19, row, dtype=torch.uint8, pin_memory=True)
    else:
        host_pool = empty_host((layers, 19, row), torch.uint8, "npu", kind=memory)
    fill_pool([device_pool], 1)
    fill_pool([host_pool], 1, seed=1)
    return device_pool, host_pool


def out_of_order(copy: Callable[[], object], src: Tensor, dst: Tensor) -> int:
    """Rounds in which `copy` does not see the fills before it, or sees the one behind it."""
    wrong = 0
    for number in range(ROUNDS):
        for value in range(5):
            src.fill_(value)
        src.fill_(number % 100 + 100)
        copy()
        src.fill_(99)
        wrong += not bool((dst.cpu() == number % 100 + 100).all())
    return wrong


IN_A_MODE = """
import torch, torch_hicache
from test_ascend import out_of_order, transfer_kv
src, dst = (torch.zeros(3, 64, dtype=torch.uint8, device="npu") for _ in range(2))
host = torch.zeros(3, 64, dtype=torch.uint8, pin_memory=True)
at = torch.arange(3)
at_device = at.to("npu")
def by_way_of_the_host():
    transfer_kv([host], [src], at, at, method="copy_engine")
    transfer_kv([dst], [host], at, at, method="copy_engine")
wrong = []
for stream in (torch.npu.current_stream(), torch.npu.Stream()):
    torch.npu.synchronize()
    with torch.npu.stream(stream):
        wrong.append(out_of_order(lambda: transfer_kv([dst], [src], at_device, at_device), src, dst))
        wrong.append(out_of_order(by_way_of_the_host, src, dst))
print(wrong)
"""


class TestOrder:
    def test_work_is_in_order_with_the_task_queue(self) -> None:
        """torch_npu's own operators are submitted by another thread, some time later."""
        src = torch.zeros(3, 64, dtype=torch.uint8, device="npu")
        dst = torch.zeros(3, 64, dtype=torch.uint8, device="npu")
        for at in (torch.arange(3), torch.arange(3).to("npu")):
            assert out_of_order(lambda at=at: transfer_kv([dst], [src], at, at), src, dst) == 0

    def test_a_submission_past_the_queue_is_not(self, sim: Simulator) -> None:
        """The control: the same copy on the same stream, by a handle that was asked for once."""
        src = torch.zeros(3, 64, dtype=torch.uint8, device="npu")
        dst = torch.zeros(3, 64, dtype=torch.uint8, device="npu")
        stream = torch.npu.current_stream().npu_stream
        to, at = dst.data_ptr(), src.data_ptr()
        assert out_of_order(lambda: sim.copy_async(to, at, 192, DEVICE_TO_DEVICE, stream), src, dst) > 0

    @pytest.mark.parametrize("mode", ["0", "1", "2"])
    def test_in_every_mode_of_the_task_queue(self, sim: Simulator, mode: str) -> None:
        """torch_npu reads it once a process. Kernel and copy engine, on a stream of their own too."""
        code = f"import sys; sys.path[:] = {sys.path!r}\n{IN_A_MODE}"
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"TASK_QUEUE_ENABLE": mode},
            capture_output=True,
            text=True,
            timeout=200,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == "[0, 0, 0, 0]"

    def test_the_stream_that_an_older_torch_is_asked_for(self, sim: Simulator) -> None:
        """torch before 2.13 has no handle to ask for; torch_npu's own function gives the same order."""
        ask = ctypes.CDLL("libtorch_npu.so").aoti_torch_get_current_npu_stream
        src = torch.zeros(3, 64, dtype=torch.uint8, device="npu")
        dst = torch.zeros(3, 64, dtype=torch.uint8, device="npu")
        to, at = dst.data_ptr(), src.data_ptr()

        def copy() -> None:
            stream = ctypes.c_void_p()
            assert ask(0, ctypes.byref(stream)) == 0
            assert sim.copy_async(to, at, 192, DEVICE_TO_DEVICE, stream.value or 0) == 0

        assert out_of_order(copy, src, dst) == 0

    def test_on_a_stream_of_ones_own(self) -> None:
        src = torch.zeros(3, 64, dtype=torch.uint8, device="npu")
        dst = torch.zeros(3, 64, dtype=torch.uint8, device="npu")
        torch.npu.synchronize()
        at = torch.arange(3)
        with torch.npu.stream(torch.npu.Stream()):
            assert out_of_order(lambda: transfer_kv([dst], [src], at, at), src, dst) == 0


class TestAsynchrony:
    @pytest.mark.parametrize("memory", ["memfabric", "pinned", "page_locked"])
    def test_calls_return_while_the_device_stands_still(self, sim: Simulator, memory: str) -> None:
        """With indices that change and go at once; staging memory is not used again too early."""
        device_pool, host_pool = pools(memory)
        expected = device_pool.cpu()
        torch.npu.synchronize()
        sim.forget()
        with sim.held():
            for number in range(60):
                dst_indices, src_indices = random_entries(7, 23, 19, seed=number)
                expected[:, dst_indices] = host_pool[:, src_indices]
                transfer_kv([device_pool], [host_pool], dst_indices, src_indices, slot_dim=1)
                dst_indices.fill_(22)
                src_indices.fill_(18)
        assert sim.host_syncs == 0
        torch.npu.synchronize()
        assert torch.equal(device_pool.cpu(), expected)

    def test_device_indices_and_their_errors_wait_for_nothing(self, sim: Simulator) -> None:
        device_pool, host_pool = pools()
        torch.npu.synchronize()
        sim.forget()
        with sim.held():
            at = to_device_no_sync(torch.tensor([3, 23, 5]), "npu")
            for _ in range(3):
                transfer_kv([device_pool], [host_pool], at, at, slot_dim=1)
            del at
            assert sim.host_syncs == 0
        text = r"call \d+ on npu:0: dst_indices\[1\] is 23, out of range for 23 slots"
        with pytest.raises(IndexError, match=text):
            check_errors("npu")
        check_errors("npu")
        assert torch.equal(device_pool[:, 5].cpu(), host_pool[:, 5])

    def test_memory_is_kept_until_the_device_has_used_it(self, sim: Simulator) -> None:
        """Indices on the device and Memfabric's memory, both dropped by the caller."""
        device_pool, host_pool = pools()
        expected = host_pool[:, :9].clone()
        torch.npu.synchronize()
        with sim.held():
            at = to_device_no_sync(torch.arange(9), "npu")
            transfer_kv([device_pool], [host_pool], at, at, slot_dim=1)
            del at
            other = torch.empty(9, dtype=torch.int64, device="npu")  # may be the same memory
            other.fill_(-7)
        del host_pool  # waits
        assert torch.equal(device_pool[:, :9].cpu(), expected)

    def test_to_device_no_sync(self, sim: Simulator) -> None:
        torch.npu.synchronize()
        sim.forget()
        given = torch.arange(60, dtype=torch.int32).view(6, 10)
        with sim.held():
            copies = []
            for number in range(20):
                changing = given + number
                copies.append(to_device_no_sync(changing[::2], "npu"))
                changing.zero_()
        assert sim.host_syncs == 0
        for number, copy in enumerate(copies):
            assert torch.equal(copy.cpu(), (given + number)[::2])
        with pytest.raises(ValueError, match="tensor must be on the CPU, got npu:0"):
            to_device_no_sync(copies[0], "npu")


FIRST_CALL = """
import torch
from ascend_sim import Simulator
from torch_hicache import check_errors, transfer_kv
sim, streams = Simulator(), [torch.npu.Stream() for _ in range(3)]
host = torch.arange(12, dtype=torch.uint8).view(3, 4)
src, dst = host.to("npu"), torch.zeros(3, 4, dtype=torch.uint8).to("npu")
good, bad = torch.tensor([0, 1]).to("npu"), torch.tensor([2, 7]).to("npu")
torch.npu.synchronize()
sim.forget()
with sim.blocked(streams[0].npu_stream):
    with torch.npu.stream(streams[0]):
        transfer_kv([dst], [src], good, good)
    with torch.npu.stream(streams[1]):
        transfer_kv([dst], [src], bad, bad)
    assert sim.host_syncs == 0
streams[1].synchronize()
for stream in reversed(streams):  # the last has called nothing yet
    with torch.npu.stream(stream):
        try:
            check_errors("npu")
        except IndexError as error:
            print(error)
assert torch.equal(dst.cpu(), host)
there = [tensor.to("npu:1") for tensor in (dst, src, good)]
with torch.npu.device(1), sim.capturing():
    sim.forget()
    transfer_kv([there[0]], [there[1]], there[2], there[2])
    print(sim.calls("aclrtMemset"), sim.calls("aclrtMemsetAsync"))
"""


def test_the_first_call_of_a_device_waits_for_nothing(sim: Simulator) -> None:
    """It makes the error record, whose zeros every stream finds; a captured one would zero it again."""
    code = f"import sys; sys.path[:] = {sys.path!r}\n{FIRST_CALL}"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stderr
    *errors, memsets = done.stdout.splitlines()
    (error,) = [line for line in errors if line.startswith("[transfer_kv]")]
    assert "call 2 on npu:0: dst_indices[1] is 7, out of range for 3 slots" in error
    assert memsets == "1 0"


class TestSubmissions:
    @pytest.mark.parametrize("planes", [1, 5, 200])
    @pytest.mark.parametrize("entries", [1, 17])
    def test_one_launch_and_one_upload(self, sim: Simulator, planes: int, entries: int) -> None:
        pairs = [pools(layers=1, row=(24, 40)[i % 2]) for i in range(planes)]
        dst, src = ([pair[side][0] for pair in pairs] for side in (0, 1))
        torch.npu.synchronize()
        sim.forget()
        transfer_kv(dst, src, *[torch.arange(entries)] * 2)
        torch.npu.synchronize()
        assert sim.calls(LAUNCH) == 1
        assert sim.calls("aclrtMemcpyAsync") == 1

    def test_max_blocks_caps_the_cores(self, sim: Simulator) -> None:
        """Never more than the chip has, nor than there is work for."""
        device_pool, host_pool = pools()
        kernel = Kernel(Path(os.environ["HICACHE_ASCEND_KERNEL"]), sim)
        for max_blocks, entries, blocks in (
            (0, 17, 8),
            (1, 17, 1),
            (3, 17, 3),
            (1 << 40, 17, 34),
            (0, 1, 2),
        ):
            at = torch.arange(entries)
            transfer_kv([device_pool], [host_pool], at, at, slot_dim=1, max_blocks=max_blocks)
            torch.npu.synchronize()
            assert kernel.counters().blocks == blocks

    def test_the_copy_engine_batches_rows(self, sim: Simulator) -> None:
        """At most 4,096 in one call of the driver."""
        host = torch.empty(2, 5001, 8, dtype=torch.uint8, pin_memory=True)
        device = torch.zeros(2, 5000, 8, dtype=torch.uint8, device="npu")
        fill_pool([host], 1)
        order = torch.randperm(2500) * 2
        torch.npu.synchronize()
        sim.forget()
        check_transfer([device], [host], order, order + 1, slot_dim=1)
        assert sim.calls("aclrtMemcpyBatchAsync") == 2

    def test_the_copy_engine_takes_strided_runs_as_rectangles(self, sim: Simulator) -> None:
        host = torch.empty(40, 3, 8, dtype=torch.uint8, pin_memory=True)
        device = torch.zeros(50, 8, dtype=torch.uint8, device="npu")
        fill_pool([host])
        sim.forget()
        check_transfer([device], [host[:, 1]], torch.arange(5, 35), torch.arange(30))
        assert sim.calls("aclrtMemcpy2dAsync") == 1

    def test_rectangles_beyond_the_limit_of_the_driver_are_rows(self, sim: Simulator) -> None:
        row = 5 * 1024 * 1024 + 1
        host = torch.empty(3, row + 7, dtype=torch.uint8, pin_memory=True)
        device = torch.zeros(3, row, dtype=torch.uint8, device="npu")
        fill_pool([host])
        sim.forget()
        check_transfer([device], [host[:, :row]], torch.tensor([0, 1]), torch.tensor([1, 2]))
        assert sim.calls("aclrtMemcpy2dAsync") == 0

    @pytest.mark.parametrize("name", ["aclrtMemcpyBatchAsync", "aclrtMemcpy2dAsync"])
    def test_copies_that_the_driver_lacks_fall_back(self, sim: Simulator, name: str) -> None:
        device_pool, host_pool = pools("page_locked")
        sim.fail(name, ascend_sim.NOT_SUPPORTED)
        for dst_indices, src_indices in (random_entries(9, 23, 19), (torch.arange(9), torch.arange(9))):
            check_transfer(
                [device_pool.transpose(0, 1)[:, :1]],
                [host_pool.transpose(0, 1)[:, :1]],
                dst_indices,
                src_indices,
            )
            check_transfer([device_pool], [host_pool], dst_indices, src_indices, slot_dim=1)


class TestFaults:
    @pytest.mark.parametrize(
        ("name", "memory"),
        [
            (LAUNCH, "memfabric"),
            ("aclrtMemcpyAsync", "page_locked"),
            ("aclrtMemcpyBatchAsync", "page_locked"),
        ],
    )
    def test_a_refused_submission_raises_and_the_next_call_works(
        self, sim: Simulator, name: str, memory: str
    ) -> None:
        device_pool, host_pool = pools(memory)
        if name.endswith("BatchAsync"):
            at = torch.tensor([1, 3, 5])
        else:
            at = torch.tensor([1])
            device_pool, host_pool = device_pool[:1], host_pool[:1]
        torch.npu.synchronize()
        sim.fail(name, ascend_sim.AI_CORE_EXCEPTION)
        with pytest.raises(
            RuntimeError, match=r"\[transfer_kv\] .* failed with 507015: simulated driver"
        ):
            transfer_kv([device_pool], [host_pool], at, at, slot_dim=1)
        check_transfer([device_pool], [host_pool], at, at, slot_dim=1)

    def test_host_memory_that_can_not_be_registered(self, sim: Simulator) -> None:
        sim.fail("aclrtHostRegister", ascend_sim.NOT_SUPPORTED)
        with pytest.raises(MemoryError, match=r"aclrtHostRegister failed with 207000"):
            empty_host((4,), torch.uint8, "npu", kind="pinned")
        assert empty_host((4,), torch.uint8, "npu", kind="pinned").shape == (4,)


class TestRefusals:
    def test_page_locked_memory_is_not_for_the_kernel(self) -> None:
        device_pool, host_pool = pools("page_locked")
        at = torch.tensor([1, 2])
        text = re.escape(
            "[transfer_kv] src[0] is pageable or only page-locked host memory, which an AI core can't "
            "reach; allocate it with torch_hicache.empty_host(shape, dtype, 'npu:0'), or use method "
            "'copy_engine' with both index tensors on the CPU."
        )
        for indices, method in ((at, "kernel"), (at.to("npu"), "kernel"), (at.to("npu"), "auto")):
            with unchanged([device_pool]), pytest.raises(ValueError, match=f"^{text}$"):
                transfer_kv([device_pool], [host_pool], indices, indices, slot_dim=1, method=method)

    def test_pageable_memory_goes_by_the_copy_engine(self) -> None:
        device_pool, _ = pools()
        host_pool = torch.empty(2, 19, 24, dtype=torch.uint8)
        fill_pool([host_pool], 1, seed=2)
        check_transfer([device_pool], [host_pool], *random_entries(9, 23, 19), slot_dim=1)
        check_transfer([host_pool], [device_pool], *random_entries(9, 19, 23), slot_dim=1)

    def test_methods_that_can_not_serve_say_why(self) -> None:
        device_pool, host_pool = pools()
        at = torch.tensor([1])
        text = "method 'copy_engine' needs both index tensors on the CPU, but dst_indices is on npu:0"
        with pytest.raises(ValueError, match=text):
            transfer_kv([device_pool], [host_pool], at.to("npu"), at, slot_dim=1, method="copy_engine")
        with pytest.raises(ValueError, match="method 'staged' is not built yet"):
            transfer_kv([device_pool], [host_pool], at, at, slot_dim=1, method="staged")

    @pytest.mark.parametrize("name", BAD_PLACES)
    def test_bad_places_and_fakes_say_the_same(self, name: str) -> None:
        text = text_of(arguments("npu", BAD_PLACES[name]("npu")))
        assert text.startswith("ValueError: [transfer_kv] "), text
        assert fake_text_of(BAD_PLACES[name], "npu") == text

    def test_while_a_stream_captures(self, sim: Simulator) -> None:
        """Indices on the CPU are refused, and a recorded error waits for later."""
        device_pool, host_pool = pools()
        bad = torch.tensor([99]).to("npu")
        transfer_kv([device_pool], [host_pool], bad, bad, slot_dim=1)
        torch.npu.synchronize()
        at = torch.tensor([1])
        at_device = at.to("npu")
        with sim.capturing():
            with pytest.raises(ValueError, match="indices on the CPU can't be captured"):
                transfer_kv([device_pool], [host_pool], at, at, slot_dim=1)
            check_errors("npu")
            transfer_kv([device_pool], [host_pool], at_device, at_device, slot_dim=1)
        with pytest.raises(IndexError, match=r"an earlier call failed: .* dst_indices\[0\] is 99"):
            transfer_kv([device_pool], [host_pool], at, at, slot_dim=1)
        assert torch.equal(device_pool[:, 1].cpu(), host_pool[:, 1])


def test_the_second_device() -> None:
    if torch.npu.device_count() < 2:
        pytest.skip("one NPU only")
    assert torch.npu.current_device() == 0
    host = empty_host((19, 24), torch.uint8, "npu:1", kind="pinned")
    device = torch.zeros(23, 24, dtype=torch.uint8).to("npu:1")
    fill_pool([host])
    for at in (torch.tensor([3, 1]), torch.tensor([3, 1]).to("npu:1")):
        check_transfer([device], [host], at, at)
    bad = torch.tensor([70]).to("npu:1")
    transfer_kv([device], [host], bad, bad)
    check_errors("npu:0")
    with pytest.raises(IndexError, match=r"on npu:1: dst_indices\[0\] is 70"):
        check_errors("npu:1")
    assert torch.npu.current_device() == 0


def test_views_of_host_memory_keep_it() -> None:
    _, host_pool = pools("pinned")
    view = device_view(host_pool[:, 3:], "npu")
    assert view.device == torch.device("npu", 0)
    expected = host_pool[:, 3:].clone()
    del host_pool
    assert torch.equal(view.cpu(), expected)


def test_compiled_with_aot_eager() -> None:
    device_pool, host_pool = pools()
    host_view = device_view(empty_host((2, 19, 24), torch.uint8, "npu", kind="pinned"), "npu")
    host_view.copy_(host_pool)

    @torch.compile(backend="aot_eager", fullgraph=True, dynamic=True)
    def load(pool: Tensor, host: Tensor, dst: Tensor, src: Tensor) -> None:
        transfer_kv([pool], [host], dst, src, slot_dim=1)

    for n in (3, 9, 17):
        dst_indices, src_indices = random_entries(n, 23, 19, seed=n)
        expected = device_pool.cpu()
        expected[:, dst_indices] = host_pool[:, src_indices]
        load(device_pool, host_view, dst_indices.to("npu"), src_indices.to("npu"))
        assert torch.equal(device_pool.cpu(), expected)


WITHOUT_KERNEL = """
import torch, torch_hicache
dst, src = torch.zeros(4, 4).to("npu"), torch_hicache.empty_host((4, 4), torch.float32, "npu").fill_(3)
at = torch.tensor([1, 2])
torch.ops.hicache.transfer_kv([dst], [src], at, at)
assert dst.cpu()[1:3].eq(3).all()
for method, where in (("kernel", "cpu"), ("auto", "npu")):
    try:
        torch.ops.hicache.transfer_kv([dst], [src], at.to(where), at.to(where), method=method)
    except ValueError as error:
        print(error)
"""


def test_without_the_kernels_library_copies_still_work(sim: Simulator) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_KERNEL],
        env=os.environ | {"HICACHE_ASCEND_KERNEL": "/missing/kernel.so"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    refusals = [line for line in done.stdout.splitlines() if line.startswith("[transfer_kv]")]
    assert len(refusals) == 2
    for text in refusals:
        assert "the AI-vector kernel is not there: /missing/kernel.so" in text
        assert "docs/ascend.md" in text
