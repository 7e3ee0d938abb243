"""The simulated driver's functions, and what tests may do to it, through ctypes."""

import ctypes
import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

FOLDER = os.environ.get("HICACHE_ASCEND_SIM", "")
REASON = "HICACHE_ASCEND_SIM names no simulated driver (make test-ascend builds one)"

SUCCESS = 0
AI_CORE_EXCEPTION = 507015
COPY_EXCEPTION = 507899
NOT_SUPPORTED = 207000
HOST_TO_DEVICE, DEVICE_TO_HOST = 1, 2


class Simulator:
    """Raw calls give the driver's number; addresses are integers."""

    def __init__(self) -> None:
        self.lib = ctypes.CDLL(f"{FOLDER}/libascendcl.so")

    def malloc(self, nbytes: int) -> int:
        address = ctypes.c_void_p()
        assert self.lib.aclrtMalloc(ctypes.byref(address), ctypes.c_size_t(nbytes), 0) == SUCCESS
        return address.value or 0

    def free(self, address: int) -> int:
        return self.lib.aclrtFree(ctypes.c_void_p(address))

    def malloc_host(self, nbytes: int) -> int:
        address = ctypes.c_void_p()
        assert self.lib.aclrtMallocHost(ctypes.byref(address), ctypes.c_size_t(nbytes)) == SUCCESS
        return address.value or 0

    def register(self, host: int, nbytes: int) -> int:
        """The device's address of host memory."""
        address = ctypes.c_void_p()
        result = self.lib.aclrtHostRegister(
            ctypes.c_void_p(host), ctypes.c_uint64(nbytes), 0, ctypes.byref(address)
        )
        assert result == SUCCESS
        return address.value or 0

    def create_stream(self) -> int:
        stream = ctypes.c_void_p()
        assert self.lib.aclrtCreateStream(ctypes.byref(stream)) == SUCCESS
        return stream.value or 0

    def create_event(self) -> int:
        event = ctypes.c_void_p()
        assert self.lib.aclrtCreateEventExWithFlag(ctypes.byref(event), 0) == SUCCESS
        return event.value or 0

    def record(self, event: int, stream: int) -> int:
        return self.lib.aclrtRecordEvent(ctypes.c_void_p(event), ctypes.c_void_p(stream))

    def wait(self, stream: int, event: int) -> int:
        return self.lib.aclrtStreamWaitEvent(ctypes.c_void_p(stream), ctypes.c_void_p(event))

    def is_done(self, event: int) -> bool:
        status = ctypes.c_int()
        assert self.lib.aclrtQueryEventStatus(ctypes.c_void_p(event), ctypes.byref(status)) == SUCCESS
        return status.value == 1

    def synchronize(self, stream: int = 0) -> int:
        return self.lib.aclrtSynchronizeStream(ctypes.c_void_p(stream))

    def copy_async(self, dst: int, src: int, nbytes: int, kind: int, stream: int = 0) -> int:
        size = ctypes.c_size_t(nbytes)
        return self.lib.aclrtMemcpyAsync(
            ctypes.c_void_p(dst), size, ctypes.c_void_p(src), size, kind, ctypes.c_void_p(stream)
        )

    def write(self, address: int, data: bytes) -> None:
        size = ctypes.c_size_t(len(data))
        assert self.lib.aclrtMemcpy(ctypes.c_void_p(address), size, data, size, HOST_TO_DEVICE) == SUCCESS

    def read(self, address: int, nbytes: int) -> bytes:
        out = ctypes.create_string_buffer(nbytes)
        assert self.lib.sim_read(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), out) == SUCCESS
        return out.raw

    def used(self, address: int, nbytes: int) -> Iterator[tuple[int, int]]:
        """The stretches of device memory that were ever used, as distances from `address`."""
        at, begin, end = 0, ctypes.c_size_t(), ctypes.c_size_t()
        while at < nbytes:
            found = ctypes.byref(begin), ctypes.byref(end)
            assert self.lib.sim_used(ctypes.c_void_p(address + at), *found) == SUCCESS
            if end.value == 0 or at + begin.value >= nbytes:
                return
            yield at + begin.value, min(at + end.value, nbytes)
            at += end.value

    @contextmanager
    def held(self) -> Iterator[None]:
        """No stream starts anything meanwhile."""
        gc.disable()  # host memory that is collected meanwhile would wait for ever
        self.lib.sim_hold(1)
        try:
            yield
        finally:
            self.lib.sim_hold(0)
            gc.enable()

    @contextmanager
    def blocked(self, stream: int) -> Iterator[None]:
        """One stream does nothing of what is submitted meanwhile; the others go on."""
        gc.disable()
        reached, gate = threading.Event(), threading.Event()
        work = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: (reached.set(), gate.wait(60), None)[-1])
        assert self.lib.aclrtLaunchHostFunc(ctypes.c_void_p(stream), work, None) == SUCCESS
        assert reached.wait(60)
        try:
            yield
        finally:
            gate.set()
            gc.enable()
            self.lib.aclrtSynchronizeStream(ctypes.c_void_p(stream))  # `work` must live until it has run

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """The driver says that streams are being captured."""
        self.lib.sim_capture(1)
        try:
            yield
        finally:
            self.lib.sim_capture(0)

    def fail(self, name: str, error: int, passing: int = 0) -> None:
        """The call of `name` after `passing` more fails, once."""
        self.lib.sim_fail(name.encode(), passing, error)

    def calls(self, name: str) -> int:
        return self.lib.sim_calls(name.encode())

    @property
    def host_syncs(self) -> int:
        return self.lib.sim_host_syncs()

    def forget(self) -> None:
        """Counts and faults."""
        self.lib.sim_forget()
