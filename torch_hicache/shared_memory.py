"""Host memory that several processes of one machine map, such as the ranks of one server."""

import fcntl
import os
from multiprocessing import reduction
from types import TracebackType

from torch_hicache.memory_budget import host_memory_budget, readable


class SharedHostMemory:
    """An unnamed file in memory (memfd), for `empty_host(..., shared=memory)` in each process.

    One process creates it; the others get it as an argument of a `multiprocessing.Process`, as an
    inherited file descriptor (`fd`), or by its `path` ("/proc/PID/fd/N", for processes of the same user
    while this one has it open). Its size is final. It has no name, so nothing is left behind when
    processes are killed: the kernel takes it back when the last tensor and the last descriptor are gone.

    `close` gives up the descriptor; tensors keep the memory.
    """

    def __init__(self, fd: int) -> None:
        """Takes over a descriptor; `create` and `open` make one."""
        self.fd = fd
        self.nbytes = os.fstat(fd).st_size

    @classmethod
    def create(cls, nbytes: int, *, reserve_bytes: int | None = None) -> "SharedHostMemory":
        """New memory of zeros. The budget is checked once, for the memory as a whole.

        Raises:
            ValueError: `nbytes` is not positive.
            MemoryError: there is less than that.
        """
        if nbytes <= 0:
            raise ValueError(f"[SharedHostMemory] nbytes must be positive, got {nbytes}.")
        host_memory_budget(local_ranks=1, reserve_bytes=reserve_bytes).check("SharedHostMemory", nbytes)
        fd = os.memfd_create("torch_hicache", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(fd, nbytes)
            # A process that made the file shorter would kill the others by SIGBUS.
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
        except OSError as error:
            os.close(fd)
            raise MemoryError(
                f"[SharedHostMemory] the system gave no {readable(nbytes)}: {error}."
            ) from None
        return cls(fd)

    @classmethod
    def open(cls, source: int | str) -> "SharedHostMemory":
        """Another process's memory, by an inherited descriptor (which is duplicated) or by its `path`."""
        return cls(
            os.dup(source) if isinstance(source, int) else os.open(source, os.O_RDWR | os.O_CLOEXEC)
        )

    @property
    def path(self) -> str:
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def close(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __enter__(self) -> "SharedHostMemory":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __del__(self) -> None:
        if getattr(self, "fd", -1) >= 0:
            self.close()

    def __reduce__(self) -> tuple[object, ...]:
        return _from_duplicate, (reduction.DupFd(self.fd),)


def _from_duplicate(duplicate: object) -> SharedHostMemory:
    return SharedHostMemory(duplicate.detach())  # type: ignore[attr-defined]
