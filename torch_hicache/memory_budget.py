"""How much host memory this process may still take: of the machine, of its cgroups, beside its siblings.

Nothing here allocates. A pool that is refused here would otherwise be killed while it is being filled.
"""

import os
from dataclasses import dataclass
from pathlib import Path

# Kept free for everything else on the machine, unless the caller says how much.
RESERVE_SHARE = 16  # one part in 16 of the limit,
MAX_RESERVE_BYTES = 8 << 30  # and no more than this


@dataclass(frozen=True)
class Room:
    """What one authority (the machine, a cgroup) grants, and what it has left."""

    source: str
    limit_bytes: int
    free_bytes: int


@dataclass(frozen=True)
class Budget:
    """What one process may take now: `free_bytes`, and how that came about."""

    free_bytes: int
    room: Room
    reserve_bytes: int
    local_ranks: int

    def check(self, tag: str, nbytes: int) -> None:
        """MemoryError when `nbytes` are more than there is."""
        if nbytes > self.free_bytes:
            raise MemoryError(f"[{tag}] asked for {readable(nbytes)}, {self}.")

    def __str__(self) -> str:
        ranks = f", shared by {self.local_ranks} local ranks" if self.local_ranks > 1 else ""
        return (
            f"free for this process are {readable(self.free_bytes)}: {self.room.source} has a limit of "
            f"{readable(self.room.limit_bytes)} with {readable(self.room.free_bytes)} left, less a "
            f"reserve of {readable(self.reserve_bytes)}{ranks}"
        )


def host_memory_budget(*, local_ranks: int | None = None, reserve_bytes: int | None = None) -> Budget:
    """The host memory that this process may take now.

    The smallest of the machine's available memory and of what each cgroup (version 1 or 2) has left, less
    a reserve, divided by the ranks of this machine. It is a picture of the moment: let all ranks ask
    before the first of them allocates (or pass `local_ranks=1`), else the last see what others have left
    divided once more.

    Args:
        local_ranks: processes of this machine that allocate alike; by default LOCAL_WORLD_SIZE, else 1.
        reserve_bytes: kept free for all else; by default a sixteenth of the limit, at most 8 GiB.
    """
    if local_ranks is None:
        text = os.environ.get("LOCAL_WORLD_SIZE", "1")
        local_ranks = int(text) if text.isdigit() else 0
        if local_ranks < 1:
            raise ValueError(f"[host_memory] LOCAL_WORLD_SIZE must be a positive number, got '{text}'.")
    if local_ranks < 1:
        raise ValueError(f"[host_memory] local_ranks must be positive, got {local_ranks}.")
    if reserve_bytes is not None and reserve_bytes < 0:
        raise ValueError(f"[host_memory] reserve_bytes must not be negative, got {reserve_bytes}.")
    room = min(_rooms(), key=lambda room: room.free_bytes)
    if reserve_bytes is None:
        reserve_bytes = min(room.limit_bytes // RESERVE_SHARE, MAX_RESERVE_BYTES)
    free = max(0, room.free_bytes - reserve_bytes) // local_ranks
    return Budget(free, room, reserve_bytes, local_ranks)


def available_memory() -> int:
    """Bytes that the machine and the cgroups have left, with nothing held back."""
    return min(room.free_bytes for room in _rooms())


def readable(nbytes: int) -> str:
    """ "1,610,612,736 bytes (1.50 GiB)"."""
    value, unit = float(nbytes), ""
    for unit in ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"):
        if value < 1024 or unit == "EiB":
            break
        value /= 1024
    return f"{nbytes:,} bytes" if unit == "bytes" else f"{nbytes:,} bytes ({value:.2f} {unit})"


def _rooms() -> list[Room]:
    return [_machine(), *_cgroups()]


def _machine() -> Room:
    page = os.sysconf("SC_PAGE_SIZE")
    sizes = {"MemTotal": os.sysconf("SC_PHYS_PAGES") * page, "MemAvailable": 0}
    sizes["MemAvailable"] = os.sysconf("SC_AVPHYS_PAGES") * page
    for line in _lines(Path("/proc/meminfo")):
        name, _, value = line.partition(":")
        if name in sizes:
            sizes[name] = int(value.split()[0]) << 10
    return Room("the machine", sizes["MemTotal"], sizes["MemAvailable"])


@dataclass(frozen=True)
class _CgroupFiles:
    mount: Path
    limit: str
    used: str
    cache: str  # in memory.stat: page cache that the kernel gives up when asked


_VERSION_1 = _CgroupFiles(
    Path("/sys/fs/cgroup/memory"),
    "memory.limit_in_bytes",
    "memory.usage_in_bytes",
    "total_inactive_file",
)
_VERSION_2 = _CgroupFiles(Path("/sys/fs/cgroup"), "memory.max", "memory.current", "inactive_file")


def _cgroups() -> list[Room]:
    """Each cgroup with a limit that this process is in, the parents too.

    In a container the path may be the host's, which does not exist here; the last parent, where the
    hierarchy is mounted, is then the container's own group.
    """
    rooms = []
    for line in _lines(Path("/proc/self/cgroup")):
        number, controllers, path = line.split(":", 2)
        if number == "0":
            files = _VERSION_2
        elif "memory" in controllers.split(","):
            files = _VERSION_1
        else:
            continue
        group = files.mount / path.lstrip("/")
        for folder in (group, *group.parents):
            if room := _cgroup_room(folder, files):
                rooms.append(room)
            if folder == files.mount:
                break
    return rooms


def _cgroup_room(folder: Path, files: _CgroupFiles) -> Room | None:
    limit = "".join(_lines(folder / files.limit))
    used = "".join(_lines(folder / files.used))
    if not (limit.isdigit() and used.isdigit()):  # "max", or not there
        return None
    cache = [
        int(line.split()[1])
        for line in _lines(folder / "memory.stat")
        if line.startswith(files.cache + " ")
    ]
    free = max(0, int(limit) - int(used) + sum(cache))
    return Room(f"the cgroup {folder}", int(limit), free)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
