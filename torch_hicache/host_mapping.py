"""Memory of our own, straight from the kernel: exact, in huge pages, touched by many threads.

No device is known here. A mapping is anonymous, or of a file that several processes share.
"""

import ctypes
import errno
import mmap
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor

HUGE_PAGE_BYTES = 2 << 20
MAX_THREADS = 16  # more gain nothing (16 GiB in 0.3 s; one H200 machine, 2026-11-30)

_MAP_HUGETLB = 0x40000
_MAP_HUGE_2MB = 21 << 26
_MADV_DONTFORK = 10
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_MAP_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


class HostMapping:
    """`nbytes` of zeros at `address`; `length` counts the rest of the last page too.

    Given back by `free`, or when collected.

    With `stays_here` a forked child does not get the memory: what a device has locked must not be copied
    on write, or the device would go on with the page that this process has just left.

    OSError when the kernel gives none.
    """

    def __init__(
        self, nbytes: int, *, fd: int = -1, explicit_huge_pages: bool = False, stays_here: bool = False
    ) -> None:
        self.address = 0
        self.nbytes = nbytes
        self._is_shared = fd >= 0
        self._process = os.getpid()
        self._stays_here = stays_here and not self._is_shared
        self.length = round_up(nbytes, HUGE_PAGE_BYTES if explicit_huge_pages else mmap.PAGESIZE)
        if self._is_shared:
            self.address = _map(self.length, mmap.MAP_SHARED, fd)
        elif explicit_huge_pages:
            self.address = _map(self.length, _ANONYMOUS | _MAP_HUGETLB | _MAP_HUGE_2MB)
        else:
            self.address = _map_aligned(self.length)
        if not explicit_huge_pages:  # advice: a kernel without huge pages goes on without them
            _libc.madvise(self.address, self.length, _MADV_HUGEPAGE)
        if self._stays_here:
            _libc.madvise(self.address, self.length, _MADV_DONTFORK)

    def touch(self, cpus: Iterable[int] = ()) -> None:
        """Make the kernel find all pages now, with one thread on each of `cpus` (any, if none is given).

        MemoryError when it can't. Contents are kept. The interpreter lock is not held meanwhile.
        """
        allowed = set(cpus) or os.sched_getaffinity(0)
        threads = min(MAX_THREADS, len(allowed))
        step = max(HUGE_PAGE_BYTES, round_up(-(-self.length // threads), HUGE_PAGE_BYTES))
        starts = range(0, self.length, step)
        if len(starts) == 1 and not cpus:
            self._touch_part(0, self.length)
            return

        def work(start: int) -> None:
            if cpus:
                os.sched_setaffinity(0, allowed)  # of this thread, which ends with the pool
            self._touch_part(start, min(step, self.length - start))

        with ThreadPoolExecutor(threads, thread_name_prefix="hicache-touch") as pool:
            for _ in pool.map(work, starts):
                pass

    def _touch_part(self, start: int, nbytes: int) -> None:
        address = self.address + start
        while _libc.madvise(address, nbytes, _MADV_POPULATE_WRITE):
            code = ctypes.get_errno()
            if code == errno.EINVAL:  # an older kernel
                self._touch_by_hand(address, nbytes)
                return
            if code not in (errno.EAGAIN, errno.EINTR):
                raise MemoryError(f"the system gave no pages: {os.strerror(code)}")

    def _touch_by_hand(self, address: int, nbytes: int) -> None:
        if self._is_shared:  # others may have written: only read, which is enough for a file
            pages = memoryview((ctypes.c_char * nbytes).from_address(address)).cast("B")
            bytes(pages[:: mmap.PAGESIZE])
        else:
            ctypes.memset(address, 0, nbytes)

    def free(self) -> None:
        """Once; later calls do nothing. A forked child leaves what it never got."""
        address, self.address = self.address, 0
        if address and not (self._stays_here and self._process != os.getpid()):
            _libc.munmap(address, self.length)

    def __del__(self) -> None:
        # At interpreter exit anything may be gone.
        try:
            self.free()
        except Exception:
            return


_ANONYMOUS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS


def _map(length: int, flags: int, fd: int = -1) -> int:
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    try:
        address = _libc.mmap(None, length, protection, flags, fd, 0)
    except ctypes.ArgumentError as error:
        raise OSError(errno.ENOMEM, str(error)) from None
    if address == _MAP_FAILED:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return address


def _map_aligned(length: int) -> int:
    """Anonymous; at a huge page's edge where there is room for one. What sticks out is given back."""
    if length < HUGE_PAGE_BYTES:
        return _map(length, _ANONYMOUS)
    begin = _map(length + HUGE_PAGE_BYTES, _ANONYMOUS)
    address = round_up(begin, HUGE_PAGE_BYTES)
    end = begin + length + HUGE_PAGE_BYTES
    if address > begin:
        _libc.munmap(begin, address - begin)
    if end > address + length:
        _libc.munmap(address + length, end - address - length)
    return address
