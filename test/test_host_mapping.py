"""Memory straight from the kernel: where it lies, that its pages are there, that it is given back."""

import ctypes
import mmap
import os
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fake_runtime import FakeRuntime

from torch_hicache import empty_host, host_kinds, host_mapping, numa
from torch_hicache.host_mapping import HUGE_PAGE_BYTES, HostMapping
from torch_hicache.shared_memory import SharedHostMemory

PAGE = mmap.PAGESIZE
MIB = 1 << 20
_libc = ctypes.CDLL(None, use_errno=True)


def resident_pages(mapping: HostMapping) -> int:
    """How many of its pages the kernel holds."""
    pages = -(-mapping.nbytes // PAGE)
    held = (ctypes.c_ubyte * pages)()
    size = ctypes.c_size_t(pages * PAGE)
    assert _libc.mincore(ctypes.c_void_p(mapping.address), size, held) == 0
    return sum(page & 1 for page in held)


def bytes_of(mapping: HostMapping) -> torch.Tensor:
    return torch.frombuffer(
        (ctypes.c_uint8 * mapping.nbytes).from_address(mapping.address), dtype=torch.uint8
    )


def is_mapped(address: int) -> bool:
    with open("/proc/self/maps") as maps:
        ranges = [line.split()[0].split("-") for line in maps]
    return any(int(begin, 16) <= address < int(end, 16) for begin, end in ranges)


@pytest.mark.parametrize("nbytes", [1, PAGE, PAGE + 1, 2 * MIB - 1, 2 * MIB, 5 * MIB + 3, 33 * MIB])
def test_a_mapping_is_as_large_as_asked(nbytes: int) -> None:
    """Rounded to a page, at a huge page's edge when there is room for one, and gone when freed."""
    mapping = HostMapping(nbytes)
    address, end = mapping.address, mapping.address + -(-nbytes // PAGE) * PAGE
    assert address % (HUGE_PAGE_BYTES if nbytes >= HUGE_PAGE_BYTES else PAGE) == 0
    assert is_mapped(address)
    assert is_mapped(end - 1)
    assert int(bytes_of(mapping).sum()) == 0
    mapping.free()
    mapping.free()
    assert not is_mapped(address)
    assert not is_mapped(end - 1)


def test_what_sticks_out_of_an_aligned_mapping_is_given_back() -> None:
    def mapped() -> int:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[0]) * PAGE

    before = mapped()
    kept = [HostMapping(5 * MIB) for _ in range(20)]
    assert mapped() - before <= 20 * 5 * MIB + 4 * MIB
    for mapping in kept:
        mapping.free()
    assert mapped() - before <= 4 * MIB


@pytest.mark.parametrize("cpus", [(), (min(os.sched_getaffinity(0)),)])
@pytest.mark.parametrize("nbytes", [5, 3 * MIB, 40 * MIB + 5])
@pytest.mark.parametrize("advice", ["populate", "older kernel"])
@pytest.mark.parametrize("kind", ["private", "shared"])
def test_touching_finds_all_pages_and_keeps_what_is_in_them(
    monkeypatch: pytest.MonkeyPatch, kind: str, advice: str, nbytes: int, cpus: tuple[int, ...]
) -> None:
    if advice == "older kernel":  # says EINVAL
        monkeypatch.setattr(host_mapping, "_MADV_POPULATE_WRITE", 9999)
    affinity = os.sched_getaffinity(0)
    if kind == "private":
        mapping = HostMapping(nbytes)
    else:
        with SharedHostMemory.create(nbytes) as shared:
            mapping = HostMapping(nbytes, fd=shared.fd)
        bytes_of(mapping)[-1] = 77
        assert resident_pages(mapping) <= 1
    mapping.touch(cpus)
    assert resident_pages(mapping) == -(-nbytes // PAGE)
    assert int(bytes_of(mapping)[-1]) == (0 if kind == "private" else 77)
    assert os.sched_getaffinity(0) == affinity


def test_pages_that_are_not_there_are_a_memory_error() -> None:
    """And no signal, which a page that is written to would raise."""
    fd = os.memfd_create("short")
    os.ftruncate(fd, 4 * MIB)
    mapping = HostMapping(8 * MIB, fd=fd)
    os.close(fd)
    with pytest.raises(MemoryError, match=r"^the system gave no pages: "):
        mapping.touch()


def test_pinned_memory_is_there_before_it_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Page by page under the runtime's lock it would take ten times as long."""
    runtime = FakeRuntime().install(monkeypatch)
    seen: list[int] = []
    touch = HostMapping.touch

    def watch(self: HostMapping, *arguments: object) -> None:
        assert not runtime.log
        touch(self, *arguments)  # type: ignore[arg-type]
        seen.append(resident_pages(self))

    monkeypatch.setattr(HostMapping, "touch", watch)
    empty_host((8 * MIB,), torch.uint8, "cpu", "pinned")
    assert seen == [8 * MIB // PAGE]
    assert runtime.verbs()[0] == "register"


def test_plain_memory_is_left_to_its_first_use() -> None:
    tensor = empty_host((64 * MIB,), torch.uint8, "cpu")
    tensor[-1] = 3
    where = SimpleNamespace(address=tensor.data_ptr(), nbytes=64 * MIB)
    assert 0 < resident_pages(where) <= HUGE_PAGE_BYTES // PAGE  # type: ignore[arg-type]


class TestNuma:
    @pytest.fixture
    def sysfs(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
        """Two nodes, with a device next to the second."""
        nodes = tmp_path / "devices/system/node"
        for node, cpus in enumerate(("0,64-66", "1-63")):
            (nodes / f"node{node}").mkdir(parents=True)
            (nodes / f"node{node}/cpulist").write_text(cpus + "\n")
        (nodes / "online").write_text("0-1\n")
        bus = tmp_path / "bus/pci/devices/0001:1b:00.0"
        bus.mkdir(parents=True)
        (bus / "numa_node").write_text("1\n")
        monkeypatch.setattr(numa, "SYSFS", tmp_path)
        properties = SimpleNamespace(pci_domain_id=1, pci_bus_id=0x1B, pci_device_id=0)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
        return tmp_path

    def test_what_the_system_says(self, sysfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 65})
        assert numa.nodes() == [0, 1]
        assert numa.cpus_of(0) == {0, 65}
        assert numa.cpus_of(1) == {1, 2}
        assert numa.cpus_of(2) == set()
        assert numa.node_of_device(torch.device("cuda", 0)) == 1
        assert numa.node_of_device(torch.device("cpu")) is None

    @pytest.mark.parametrize("answer", ["-1\n", None])
    def test_what_it_does_not_know(self, sysfs: Path, answer: str | None) -> None:
        file = sysfs / "bus/pci/devices/0001:1b:00.0/numa_node"
        file.unlink() if answer is None else file.write_text(answer)
        assert numa.node_of_device(torch.device("cuda", 0)) is None

    @pytest.mark.skipif(not Path("/proc/self/numa_maps").exists(), reason="no /proc/self/numa_maps")
    def test_memory_prefers_the_node_that_is_asked_for(self) -> None:
        node = numa.nodes()[-1]
        tensor = empty_host((4 * MIB,), torch.uint8, "cpu", numa_node=node)
        with open("/proc/self/numa_maps") as maps:
            policies = {line.split()[0]: line.split()[1] for line in maps}
        assert policies[f"{tensor.data_ptr():x}"] == f"prefer:{node}"

    def test_the_devices_own_node_is_tried_in_silence(
        self, sysfs: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Before the pages are touched, and by threads that run there."""
        FakeRuntime().install(monkeypatch)
        asked: list[object] = []

        def refuse(address: int, nbytes: int, node: int) -> None:
            asked.append((nbytes, node))
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr(numa, "prefer_node", refuse)
        monkeypatch.setattr(numa, "node_of_device", lambda device: 1)
        monkeypatch.setattr(numa, "cpus_of", lambda node: {1000 + node})
        monkeypatch.setattr(HostMapping, "touch", lambda self, cpus: asked.append(cpus))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            empty_host((MIB,), torch.uint8, "cpu", "pinned")
        assert asked == [(MIB, 1), {1001}]
        asked.clear()
        with pytest.warns(RuntimeWarning, match="not placed on NUMA node 0: .*Operation not permitted"):
            empty_host((MIB,), torch.uint8, "cpu", "pinned", numa_node=0)
        assert asked == [(MIB, 0), {1000}]
        asked.clear()
        empty_host((MIB,), torch.uint8, "cpu", "pinned", numa_node=None)
        assert asked == [()]

    def test_one_node_needs_no_placing(self, sysfs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (sysfs / "devices/system/node/online").write_text("0\n")
        monkeypatch.setattr(numa, "node_of_device", lambda device: 0)
        request = host_kinds.HostRequest(nbytes=1, device=torch.device("cuda"))
        assert host_kinds._node_of(request) is None

    def test_a_node_that_is_not_there_is_a_warning(self) -> None:
        with pytest.warns(RuntimeWarning, match=r"^\[empty_host\] memory was not placed on NUMA node 63"):
            tensor = empty_host((MIB,), torch.uint8, "cpu", numa_node=63)
        assert tensor.fill_(1).numel() == MIB

    def test_names(self) -> None:
        with pytest.raises(
            ValueError, match=r"numa_node must be 'auto', a number or None, got 'near'\.$"
        ):
            empty_host((1,), torch.uint8, "cpu", numa_node="near")
