"""A device's runtime on the CPU, for tests of host memory: strict in what it takes, and with a log."""

import ctypes
import mmap
import os
from dataclasses import dataclass, field

import pytest
import torch

from torch_hicache.registrations import REGISTRARS

FAR = 1 << 45  # what a device's addresses are off the host's, where they are
_MREMAP_MAYMOVE = 1
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mremap.restype = ctypes.c_void_p


@dataclass
class FakeRuntime:
    """Registrations of one process.

    alias: "same" (a device's addresses are the host's), "far" (off by one distance), "scattered" (each
        registration somewhere else) or "mapped" (a second mapping of shared memory: bytes can be read).
    fail_at: the number of the register call that fails, from 1.
    locks: also lock the pages, so that the kernel counts them.
    """

    alias: str = "same"
    fail_at: int = 0
    locks: bool = False
    log: list[tuple[str, int, int]] = field(default_factory=list)  # verb, address, bytes
    registered: dict[int, tuple[int, int]] = field(default_factory=dict)  # host -> bytes, device
    foreign: list[tuple[int, int]] = field(default_factory=list)  # registered by others: host, bytes
    waits: int = 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> "FakeRuntime":
        monkeypatch.setitem(REGISTRARS, "cpu", lambda device: FakeRegistrar(self, device))
        return self

    def verbs(self) -> list[str]:
        return [verb for verb, _, _ in self.log]

    def pieces(self) -> list[int]:
        """Bytes of what is registered, by address."""
        return [nbytes for _, (nbytes, _) in sorted(self.registered.items())]


class FakeRegistrar:
    def __init__(self, runtime: FakeRuntime, device: torch.device) -> None:
        self._runtime = runtime
        self.device = device

    def register(self, address: int, nbytes: int) -> None:
        runtime = self._runtime
        runtime.log.append(("register", address, nbytes))
        if nbytes <= 0:
            raise RuntimeError("fakeErrorInvalidValue: zero bytes.")
        if runtime.verbs().count("register") == runtime.fail_at:
            raise RuntimeError("fakeErrorMemoryAllocation: out of memory.")
        known = [(host, size) for host, (size, _) in runtime.registered.items()] + runtime.foreign
        for host, size in known:
            # By whole pages: two registrations that share one are refused by some drivers.
            page = mmap.PAGESIZE
            if address // page <= (host + size - 1) // page and host // page <= (
                (address + nbytes - 1) // page
            ):
                raise RuntimeError("fakeErrorHostMemoryAlreadyRegistered: here already.")
        if runtime.locks and _libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(nbytes)):
            raise RuntimeError(f"fakeErrorMemoryAllocation: {os.strerror(ctypes.get_errno())}.")
        runtime.registered[address] = (nbytes, self._device_of(address, nbytes))

    def _device_of(self, address: int, nbytes: int) -> int:
        runtime = self._runtime
        if runtime.alias == "mapped":
            size = ctypes.c_size_t(nbytes)
            return _libc.mremap(ctypes.c_void_p(address), ctypes.c_size_t(0), size, _MREMAP_MAYMOVE)
        distance = {"same": 0, "far": FAR, "scattered": FAR * (1 + len(runtime.registered))}
        return address + distance[runtime.alias]

    def unregister(self, address: int) -> None:
        runtime = self._runtime
        runtime.log.append(("unregister", address, 0))
        if address not in runtime.registered:
            raise RuntimeError("fakeErrorHostMemoryNotRegistered: not here.")
        nbytes, device = runtime.registered.pop(address)
        if runtime.locks:
            _libc.munlock(ctypes.c_void_p(address), ctypes.c_size_t(nbytes))
        if runtime.alias == "mapped":
            _libc.munmap(ctypes.c_void_p(device), ctypes.c_size_t(nbytes))

    def device_address(self, address: int, nbytes: int) -> int:
        runtime = self._runtime
        if nbytes <= 0:
            raise ValueError("[fake] zero bytes.")
        for host, size in runtime.foreign:
            if host <= address and address + nbytes <= host + size:
                return address
        at, found = address, None
        while at < address + nbytes:
            for host, (size, device) in runtime.registered.items():
                if host <= at < host + size:
                    if found not in (None, device - host):
                        raise ValueError("[fake] not in one stretch.")
                    found, at = device - host, host + size
                    break
            else:
                raise ValueError("[fake] pageable host memory.")
        return address + (found or 0)

    def wait(self) -> None:
        self._runtime.waits += 1
