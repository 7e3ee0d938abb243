"""What of the host's memory a process may take: machine, cgroups, reserve, sibling ranks."""

import errno
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from torch_hicache import SharedHostMemory, empty_host, host_kinds, memory_budget
from torch_hicache.host_mapping import HUGE_PAGE_BYTES, HostMapping
from torch_hicache.memory_budget import available_memory, host_memory_budget, readable

GIB = 1 << 30
Machine = Callable[..., dict[str, list[str]]]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine of some memory, whose files a test may change."""
    files: dict[str, list[str]] = {}
    monkeypatch.setattr(memory_budget, "_lines", lambda path: files.get(str(path), []))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)

    def make(total: int, free: int, **more: list[str]) -> dict[str, list[str]]:
        files["/proc/meminfo"] = [
            f"MemTotal: {total >> 10} kB",
            "MemFree: 1 kB",
            f"MemAvailable: {free >> 10} kB",
        ]
        files.update(more)
        return files

    return make


def test_the_room_of_a_cgroup_counts(machine: Machine) -> None:
    """Version 2: of all groups up to the root; page cache that can be dropped is free."""
    files = machine(100 << 10, 90 << 10)
    files |= {
        "/proc/self/cgroup": ["0::/slice/job"],
        "/sys/fs/cgroup/slice/job/memory.max": ["max"],
        "/sys/fs/cgroup/slice/job/memory.current": ["30000"],
        "/sys/fs/cgroup/slice/memory.max": ["50000"],
        "/sys/fs/cgroup/slice/memory.current": ["40000"],
        "/sys/fs/cgroup/slice/memory.stat": ["anon 7", "inactive_file 1000", "inactive_file_x 9"],
    }
    assert available_memory() == 11_000
    files["/sys/fs/cgroup/slice/memory.max"] = ["max"]
    assert available_memory() == 90 << 10


@pytest.mark.parametrize("folder", ["/sys/fs/cgroup/memory/docker/abc", "/sys/fs/cgroup/memory"])
def test_version_1_counts_too(machine: Machine, folder: str) -> None:
    """Also where the path is the host's and only the mount's root can be seen."""
    files = machine(100 << 10, 90 << 10)
    files |= {
        "/proc/self/cgroup": ["9:name=systemd:/", "4:cpu,memory:/docker/abc", "0::/"],
        f"{folder}/memory.limit_in_bytes": ["50000"],
        f"{folder}/memory.usage_in_bytes": ["45000"],
        f"{folder}/memory.stat": ["inactive_file 9", "total_inactive_file 2000"],
    }
    assert available_memory() == 7_000
    files[f"{folder}/memory.limit_in_bytes"] = ["9223372036854771712"]  # none
    assert available_memory() == 90 << 10


def test_files_of_another_hierarchy_do_not_count(machine: Machine) -> None:
    files = machine(100 << 10, 90 << 10)
    files |= {
        "/proc/self/cgroup": ["3:cpuset:/job"],
        "/sys/fs/cgroup/memory/job/memory.limit_in_bytes": ["5"],
        "/sys/fs/cgroup/memory/job/memory.usage_in_bytes": ["1"],
        "/sys/fs/cgroup/job/memory.max": ["5"],
        "/sys/fs/cgroup/job/memory.current": ["1"],
    }
    assert available_memory() == 90 << 10


@pytest.mark.parametrize(
    ("limit", "free", "options", "expected"),
    [
        (64 * GIB, 48 * GIB, {}, 44 * GIB),
        (1024 * GIB, 1000 * GIB, {}, 992 * GIB),
        (64 * GIB, 48 * GIB, {"reserve_bytes": 0}, 48 * GIB),
        (64 * GIB, 48 * GIB, {"local_ranks": 4}, 11 * GIB),
        (64 * GIB, 48 * GIB, {"local_ranks": 4, "reserve_bytes": 8 * GIB}, 10 * GIB),
        (64 * GIB, 2 * GIB, {}, 0),
    ],
)
def test_reserve_and_ranks(
    machine: Machine, limit: int, free: int, options: dict[str, int], expected: int
) -> None:
    machine(limit, free)
    assert host_memory_budget(**options).free_bytes == expected


def test_ranks_come_from_the_environment(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine(64 * GIB, 44 * GIB)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert host_memory_budget().free_bytes == 5 * GIB
    assert host_memory_budget(local_ranks=1).free_bytes == 40 * GIB
    for value in ("0", "-1", "many", ""):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", value)
        with pytest.raises(ValueError, match="LOCAL_WORLD_SIZE must be a positive number, got"):
            host_memory_budget()


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match=r"^\[host_memory\] local_ranks must be positive, got 0\.$"):
        host_memory_budget(local_ranks=0)
    with pytest.raises(
        ValueError, match=r"^\[host_memory\] reserve_bytes must not be negative, got -1\."
    ):
        host_memory_budget(reserve_bytes=-1)


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 bytes"),
        (1023, "1,023 bytes"),
        (1536, "1,536 bytes (1.50 KiB)"),
        (1 << 30, "1,073,741,824 bytes (1.00 GiB)"),
        (1 << 72, "4,722,366,482,869,645,213,696 bytes (4096.00 EiB)"),
    ],
)
def test_sizes_are_readable(nbytes: int, text: str) -> None:
    assert readable(nbytes) == text


class TestAllocation:
    """empty_host asks before it allocates."""

    @pytest.fixture(autouse=True)
    def _nothing_is_mapped(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_args: object, **_options: object) -> None:
            raise AssertionError("memory was mapped")

        monkeypatch.setattr(host_kinds, "HostMapping", refuse)

    def test_one_byte_more_than_there_is(self, machine: Machine) -> None:
        """With what was asked, what is free and what the limit is."""
        machine(4 * GIB, 3 * GIB)
        options = {"local_ranks": 2, "reserve_bytes": GIB}
        text = (
            "[empty_host] asked for 1,073,741,825 bytes (1.00 GiB), free for this process are "
            "1,073,741,824 bytes (1.00 GiB): the machine has a limit of 4,294,967,296 bytes (4.00 GiB) "
            "with 3,221,225,472 bytes (3.00 GiB) left, less a reserve of 1,073,741,824 bytes (1.00 GiB), "
            "shared by 2 local ranks."
        )
        with pytest.raises(MemoryError, match=f"^{re.escape(text)}$"):
            empty_host((GIB + 1,), torch.uint8, "cpu", **options)
        with pytest.raises(AssertionError, match="memory was mapped"):
            empty_host((GIB,), torch.uint8, "cpu", **options)

    def test_the_cgroup_is_named(self, machine: Machine) -> None:
        files = machine(4 * GIB, 3 * GIB)
        files |= {
            "/proc/self/cgroup": ["0::/job"],
            "/sys/fs/cgroup/job/memory.max": [str(GIB)],
            "/sys/fs/cgroup/job/memory.current": [str(GIB // 2)],
        }
        with pytest.raises(
            MemoryError, match=r": the cgroup /sys/fs/cgroup/job has a limit of 1,073,741,"
        ):
            empty_host((GIB,), torch.uint8, "cpu")

    def test_shared_memory_is_counted_once_as_a_whole(
        self, machine: Machine, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """By the process that makes it, and not divided by ranks."""
        machine(4 * GIB, 3 * GIB)
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
        with SharedHostMemory.create(3 * GIB, reserve_bytes=0) as shared:
            assert shared.nbytes == 3 * GIB
        with pytest.raises(MemoryError, match=r"^\[SharedHostMemory\] asked for 3,221,225,473 bytes"):
            SharedHostMemory.create(3 * GIB + 1, reserve_bytes=0)


class TestHugePages:
    def test_explicit_ones_have_a_budget_of_their_own(
        self, machine: Machine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """What the administrator has set aside is no available memory, and the reverse."""
        machine(4 * GIB, 0)
        monkeypatch.setattr(host_kinds, "_FREE_HUGE_PAGES", tmp_path / "free")
        (tmp_path / "free").write_text("2\n")
        made: list[bool] = []

        def mapping(nbytes: int, *, explicit_huge_pages: bool = False, **options: bool) -> HostMapping:
            made.append(explicit_huge_pages)
            return HostMapping(nbytes, **options)

        monkeypatch.setattr(host_kinds, "HostMapping", mapping)
        empty_host((HUGE_PAGE_BYTES + 1,), torch.uint8, "cpu", huge_pages="explicit")
        assert made == [True]
        with (
            pytest.warns(RuntimeWarning, match=r"4,194,304 bytes \(4.00 MiB\) are free, 6,291,456 bytes"),
            pytest.raises(MemoryError, match="asked for"),
        ):
            empty_host((2 * HUGE_PAGE_BYTES + 1,), torch.uint8, "cpu", huge_pages="explicit")

    def test_without_them_transparent_ones_serve(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        """Also when others took them after they were counted."""

        def mapping(nbytes: int, *, explicit_huge_pages: bool = False, **options: bool) -> HostMapping:
            if explicit_huge_pages:
                raise OSError(errno.ENOMEM, "Cannot allocate memory")
            return HostMapping(nbytes, **options)

        monkeypatch.setattr(host_kinds, "HostMapping", mapping)
        monkeypatch.setattr(host_kinds, "_FREE_HUGE_PAGES", tmp_path / "free")
        for free in ("1000", "0", "?"):
            (tmp_path / "free").write_text(free)
            with pytest.warns(RuntimeWarning, match=r"^\[empty_host\] of the machine's huge pages"):
                tensor = empty_host((1 << 24,), torch.uint8, "cpu", huge_pages="explicit")
            assert tensor.fill_(1).numel() == 1 << 24

    def test_names(self) -> None:
        text = "[empty_host] huge_pages must be one of transparent, explicit, got 'giant'."
        with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
            empty_host((1,), torch.uint8, "cpu", huge_pages="giant")
