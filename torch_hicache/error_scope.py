"""Bad device indices of one ticket: recorded by its own kernels into a record of its own."""

import threading
from types import TracebackType

import torch
from torch import Tensor


class ErrorScope:
    """While it is entered, transfers of the calling thread report into this record, not the device's.

    Without a device that reads the indices (`on_device` is None) it does nothing: the host has checked
    them.
    """

    def __init__(self, on_device: Tensor | None) -> None:
        self._on_device = on_device
        self._lock = threading.Lock()
        self._error: IndexError | None = None
        self._handle = 0  # none
        if on_device is not None:
            self._handle = torch.ops.hicache.new_error_record(on_device)

    def __enter__(self) -> None:
        if self._handle:
            torch.ops.hicache.use_error_record(self._on_device, self._handle)

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        if self._handle:
            torch.ops.hicache.use_error_record(self._on_device, 0)

    def check(self) -> IndexError | None:
        """The bad index that a kernel has met so far. Waits for nothing."""
        with self._lock:
            if self._handle and self._error is None:
                try:
                    torch.ops.hicache.check_error_record(self._on_device, self._handle)
                except IndexError as error:
                    self._error = error
            return self._error

    def close(self) -> IndexError | None:
        """The last check. Only once the device has finished, since it gives the record back."""
        error = self.check()
        with self._lock:
            handle, self._handle = self._handle, 0
        if handle:
            torch.ops.hicache.free_error_record(self._on_device, handle)
        return error
