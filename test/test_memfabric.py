"""Memfabric's own allocator, by the package itself: sizes, growth, addresses, release, what is missing.

Each test that makes the entity anew needs a process of its own.
"""

import ctypes
import gc
import os
import re
import subprocess
import sys

import ascend_sim
import pytest
import torch

from torch_hicache import empty_host, memfabric
from torch_hicache.testing import check_transfer, fill_pool

GIB = 1 << 30


def in_process(code: str, *, whole: bool = False, **environment: str) -> str:
    """What the code prints last, or all of it."""
    preamble = """
import gc, os, torch, torch_hicache
from torch_hicache import HostPool, PlaneSpec, empty_host, memfabric
from torch_hicache.testing import check_transfer, fill_pool
GIB = 1 << 30
def raised(call, *args, **kwargs):
    try:
        call(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
"""
    done = subprocess.run(
        [sys.executable, "-c", preamble + code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout if whole else done.stdout.splitlines()[-1]


@pytest.mark.backend("npu")
@pytest.mark.skipif(bool(memfabric.missing_reason()), reason="Memfabric is not here")
class TestMemfabric:
    def test_it_is_what_auto_means_and_is_not_pinned(self) -> None:
        host = empty_host((5, 1000), torch.int32, "npu")
        assert host.device.type == "cpu"
        assert not host.is_pinned()
        assert memfabric.device_address(host.data_ptr()) != 0
        assert host.untyped_storage().nbytes() == 20_000
        plain = torch.empty(8)
        assert memfabric.device_address(plain.data_ptr()) == 0

    def test_memory_is_aligned_apart_and_given_back(self) -> None:
        gc.collect()  # what other tests have left must not go in the middle
        used = memfabric.entity().used_bytes
        tensors = [
            empty_host((size,), torch.uint8, "npu").fill_(i) for i, size in enumerate((1, 5000, 3))
        ]
        assert all(tensor.data_ptr() % 4096 == 0 for tensor in tensors)
        assert memfabric.entity().used_bytes == used + 4096 + 8192 + 4096
        view = tensors[1][100:]
        del tensors
        gc.collect()
        assert memfabric.entity().used_bytes == used + 8192
        assert bool((view == 1).all())
        del view
        gc.collect()
        assert memfabric.entity().used_bytes == used

    def test_the_three_verbs_and_adoption(self) -> None:
        """As an engine's own pool uses them; the block is released once."""
        block = memfabric.allocate(8 * 16, "npu")
        assert block.device_address == memfabric.device_address(block.address) != 0
        at = torch.tensor([3, 7]).to("npu")
        device = torch.zeros(9, 16, dtype=torch.uint8, device="npu")
        whole = (ctypes.c_uint8 * block.nbytes).from_address(block.address)
        rows = torch.frombuffer(whole, dtype=torch.uint8).view(8, 16)
        fill_pool([rows])
        for dst, src in ((device, rows), (rows, device)):
            check_transfer([dst], [src], at, at, method="kernel")
        memfabric.free(block)
        memfabric.free(block)

        from memfabric_hybrid import offload

        host = offload.empty((8, 16), torch.uint8)
        fill_pool([host])
        with pytest.raises(ValueError, match="which an AI core can't reach"):
            torch.ops.hicache.transfer_kv([device], [host], at, at)
        for begin in (0, 64):  # neighbours, of which a tensor may cover both
            memfabric.adopt(host.data_ptr() + begin, 64, "npu")
        check_transfer([device], [host], at, at)
        for begin in (0, 64):
            memfabric.disown(host.data_ptr() + begin)
        with pytest.raises(ValueError, match="which an AI core can't reach"):
            torch.ops.hicache.transfer_kv([device], [host], at, at)
        with pytest.raises(ValueError, match=r"are not Memfabric's memory"):
            memfabric.adopt(torch.empty(64).data_ptr(), 64, "npu")
        offload.free(host.data_ptr())

    @pytest.mark.parametrize("nbytes", [0, -1])
    def test_sizes_that_are_none(self, nbytes: int) -> None:
        with pytest.raises(ValueError, match=f"nbytes must be positive, got {nbytes}"):
            memfabric.allocate(nbytes, "npu")

    def test_a_second_pool_fits_when_both_were_announced(self) -> None:
        code = """
memfabric.reserve(GIB)
memfabric.reserve(GIB)
one, two = (empty_host((GIB,), torch.uint8, "npu") for _ in range(2))
print(memfabric.entity().size_bytes == 2 * GIB, one.data_ptr() != two.data_ptr())
"""
        assert in_process(code) == "True True"

    def test_a_second_pool_that_does_not_fit_says_how_to_size_the_first(self) -> None:
        code = """
one = empty_host((GIB // 2,), torch.uint8, "npu")
text = raised(empty_host, (GIB,), torch.uint8, "npu")
small = empty_host((GIB // 4,), torch.uint8, "npu")
print(text)
"""
        assert in_process(code) == (
            "MemoryError: [memfabric] 1,073,741,824 bytes do not fit: of 1,073,741,824 bytes 536,870,912 "
            "are in use. Call torch_hicache.memfabric.reserve() with the size of each pool before the "
            "first one is allocated."
        )

    def test_the_entity_grows_while_nothing_of_it_is_in_use(self) -> None:
        code = """
device = torch.zeros(4, 8, dtype=torch.uint8, device="npu")
sizes = []
for slots in (8, (2 * GIB) // 8, 8):
    host = empty_host((slots, 8), torch.uint8, "npu")
    sizes.append(memfabric.entity().size_bytes // GIB)
    host[:4].fill_(7)
    check_transfer([device], [host[:4]], torch.tensor([1]), torch.tensor([2]))
    del host
    gc.collect()
print(sizes)
"""
        assert in_process(code) == "[1, 2, 2]"

    def test_a_pool_of_several_buffers_sizes_the_entity_for_all(self) -> None:
        """Keys and values of different width have a buffer each; the first must not fix the size."""
        code = """
planes = [PlaneSpec("key", (3 << 20,), torch.uint8), PlaneSpec("value", (2 << 20,), torch.uint8)]
pool = HostPool(planes, 1, 500, "npu", "page_first")
entity = memfabric.entity()
print(entity.size_bytes // GIB, entity.used_bytes == pool.nbytes, len(pool.buffers))
"""
        assert in_process(code) == "3 True 2"

    def test_a_pool_that_does_not_fit_takes_nothing(self) -> None:
        code = """
memfabric.reserve(GIB)
plane = [PlaneSpec("key", (1 << 20,), torch.uint8), PlaneSpec("value", (1 << 19,), torch.uint8)]
one = HostPool(plane, 1, 512, "npu")
used = memfabric.entity().used_bytes
text = raised(HostPool, plane, 1, 512, "npu")
gc.collect()
print(memfabric.entity().used_bytes == used, text)
"""
        assert in_process(code) == (
            "True MemoryError: [memfabric] 805,306,368 bytes do not fit: of 1,073,741,824 bytes "
            "805,306,368 are in use. Call torch_hicache.memfabric.reserve() with the size of each pool "
            "before the first one is allocated."
        )

    def test_the_budget_is_of_the_entity(self) -> None:
        """Which is checked once, before it is made: what lies in it is paid for."""
        code = """
host = empty_host((8,), torch.uint8, "npu", reserve_bytes=0)
full = raised(empty_host, (8,), torch.uint8, "npu", reserve_bytes=1 << 50)
del host
gc.collect()
print(full, raised(empty_host, (2 * GIB,), torch.uint8, "npu", reserve_bytes=1 << 50))
"""
        assert re.match(
            r"None MemoryError: \[memfabric\] asked for 2,147,483,648 bytes .* for this process are 0",
            in_process(code),
        )

    @pytest.mark.parametrize(("chip", "pages"), [("Ascend910_9391", "giant"), ("Ascend910B3", "plain")])
    def test_giant_pages_are_the_chips(self, chip: str, pages: str) -> None:
        """Without them Memfabric asks the system for huge pages, which it need not have."""
        if not ascend_sim.FOLDER:
            pytest.skip(ascend_sim.REASON)
        code = """
from memfabric_hybrid import offload
create = offload.initialize
seen = []
offload.initialize = lambda config: (seen.append(config.flags), create(config))[1]
device = torch.zeros(4, 8, dtype=torch.uint8, device="npu")
try:
    host = empty_host((9, 8), torch.uint8, "npu").fill_(7)
    check_transfer([device], [host], torch.tensor([1]), torch.tensor([2]))
    more = empty_host((9, 8), torch.uint8, "npu")  # of the same entity
except RuntimeError as error:
    print("refused" if "/proc/sys/vm/nr_hugepages" in str(error) else error)
print("giant" if seen == [int(offload.OFFLOAD_FLAG_GIANT_PAGE)] else "plain" if seen == [0] else seen)
"""
        *_, before, last = ["", *in_process(code, whole=True, SIM_SOC_NAME=chip).splitlines()]
        assert last == pages
        assert before != "refused" or pages == "plain"

    def test_the_argument_overrides_the_environment_and_auto(self) -> None:
        code = """
used = lambda tensor: memfabric.device_address(tensor.data_ptr()) != 0
os.environ["HICACHE_HOST_KIND"] = "pinned"
pool = lambda kind: HostPool([PlaneSpec("key", (8,), torch.uint8)], 1, 8, "npu", kind=kind).buffers[0]
found = [used(empty_host((8,), torch.uint8, "npu", kind=kind)) for kind in ("auto", "memfabric")]
found += [used(pool(kind)) for kind in ("auto", "memfabric")]
os.environ["HICACHE_HOST_KIND"] = "memfabric"
found += [used(empty_host((8,), torch.uint8, "npu", kind=kind)) for kind in ("auto", "pinned")]
print(found)
"""
        assert in_process(code) == "[False, True, False, True, True, False]"

    def test_the_package_missing(self) -> None:
        """Reported as such; "auto" then is registered memory, which the kernel takes too."""
        code = """
import importlib.util
find = importlib.util.find_spec
memfabric.find_spec = lambda name: None if name == "memfabric_hybrid" else find(name)
host = empty_host((9, 8), torch.uint8, "npu").fill_(7)
device = torch.zeros(4, 8, dtype=torch.uint8, device="npu")
at = torch.tensor([1]).to("npu")
check_transfer([device], [host], at, at)
print(raised(empty_host, (8,), torch.uint8, "npu", kind="memfabric"))
print(raised(memfabric.allocate, 8, "npu"))
"""
        *_, first, second = in_process(code, whole=True).splitlines()
        text = "needs the package memfabric_hybrid (pip install memfabric-hybrid)."
        assert first == f"ValueError: [empty_host] kind 'memfabric' {text}"
        assert second == f"RuntimeError: [memfabric] Memfabric memory {text}"

    def test_one_device_a_process(self) -> None:
        code = """
one = empty_host((8,), torch.uint8, "npu:0")
print(raised(empty_host, (8,), torch.uint8, "npu:1"))
"""
        text = "[memfabric] Memfabric serves one device a process: this one's is npu:0, got npu:1."
        assert in_process(code) == f"ValueError: {text}"

    def test_the_environment_overrides_auto(self) -> None:
        code = """
os.environ["HICACHE_HOST_KIND"] = "pinned"
host = empty_host((8,), torch.uint8, "npu")
os.environ["HICACHE_HOST_KIND"] = "disk"
print(memfabric.entity().size_bytes, raised(empty_host, (8,), torch.uint8, "npu"))
"""
        assert in_process(code) == (
            "0 ValueError: [empty_host] HICACHE_HOST_KIND must be one of pinned, pageable, memfabric, "
            "got 'disk'."
        )

    def test_a_driver_that_refuses(self) -> None:
        code = """
import ascend_sim
ascend_sim.Simulator().fail("halMemCreate", 207001)
ascend_sim.Simulator().fail("halMemMap", 207001)
print(raised(empty_host, (8,), torch.uint8, "npu"))
"""
        path = f"import sys; sys.path[:] = {sys.path!r}\n"
        assert re.match(
            r"RuntimeError: \[memfabric\] Memfabric refused an entity of 1,073,741,824 bytes on npu:0",
            in_process(path + code),
        )


@pytest.mark.backend("cpu")
def test_it_needs_an_npu() -> None:
    with pytest.raises(ValueError, match=r"kind 'memfabric' needs an NPU as device, got cpu"):
        empty_host((4,), torch.uint8, "cpu", kind="memfabric")
    if torch._C._get_privateuse1_backend_name() != "npu":
        assert memfabric.missing_reason() == "needs an NPU, but torch_npu is not imported"
        with pytest.raises(RuntimeError, match=r"\[memfabric\] Memfabric memory needs an NPU"):
            memfabric.device_address(1)
