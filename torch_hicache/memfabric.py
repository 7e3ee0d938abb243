"""Host memory of Ascend's Memfabric, which the AI cores of an NPU reach.

Memfabric has one entity a process: one device, and one size that is fixed when it is made. It is made
with the first allocation, as large as `reserve` has asked for by then, and made anew for a larger request
while nothing of it is in use. Pools allocate through `empty_host(kind="memfabric")`, a HostPool after
`prepare` for all of its buffers together; an engine with pools of its own calls `allocate`,
`device_address` and `free`, or `adopt` for memory that it got itself.
"""

import contextlib
import threading
from collections.abc import Sequence
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch

from torch_hicache.host_kinds import HostMemory, HostMemoryKind, HostRequest, register_host_kind
from torch_hicache.memory_budget import Budget, host_memory_budget

GIB = 1 << 30
_PAGE = 4096  # Memfabric packs allocations at 16 bytes; a DMA engine wants better
_PACKAGE = "memfabric_hybrid"
# Chips whose Memfabric has pages of 1 GiB (Atlas A3). For others it wants the system's huge pages.
_GIANT_PAGE_CHIPS = ("Ascend910_93",)


def missing_reason() -> str:
    """Why there is no Memfabric memory in this process; empty when it can be tried."""
    if torch._C._get_privateuse1_backend_name() != "npu":
        return "needs an NPU, but torch_npu is not imported"
    if find_spec(_PACKAGE) is None:
        return f"needs the package {_PACKAGE} (pip install memfabric-hybrid)"
    return ""


class MemfabricBlock:
    """`nbytes` of host memory at `address`, seen by the device at `device_address`.

    Released by `free`, once, or when collected; either waits for the work of the device that uses it.
    """

    def __init__(
        self, owner: "Memfabric", raw: int, address: int, device_address: int, nbytes: int
    ) -> None:
        self.address = address
        self.device_address = device_address
        self.nbytes = nbytes
        self._raw = raw  # what Memfabric knows it by
        self._owner: Memfabric | None = owner

    def free(self) -> None:
        owner, self._owner = self._owner, None
        if owner is not None:
            owner._release(self.address, self._raw)

    def __del__(self) -> None:
        # A destructor has nobody to tell, and at interpreter exit anything may be gone.
        with contextlib.suppress(Exception):
            self.free()


class Memfabric:
    """The entity of this process. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._on_device: torch.Tensor | None = None  # leads the ops to the backend
        self._size_bytes = 0
        self._reserved_bytes = 0
        self._used_bytes: dict[int, int] = {}  # by address

    @property
    def size_bytes(self) -> int:
        """Of the entity; 0 before the first allocation."""
        return self._size_bytes

    @property
    def used_bytes(self) -> int:
        return sum(self._used_bytes.values())

    def reserve(self, nbytes: int) -> None:
        """Announce a pool of `nbytes`, before the first one is allocated: the entity fits all."""
        if nbytes < 0:
            raise ValueError(f"[memfabric] nbytes must not be negative, got {nbytes}.")
        with self._lock:
            self._reserved_bytes += _padded(nbytes)

    def prepare(self, sizes: Sequence[int], device: torch.device | str) -> None:
        """See that allocations of these sizes fit together; nothing is allocated yet.

        Raises:
            MemoryError: they do not fit beside what is in use, or into the memory of the machine.
            RuntimeError, ValueError: as `allocate`.
        """
        nbytes = sum(_padded(size) for size in sizes)
        if nbytes:
            with self._lock:
                self._ready(nbytes, torch.empty(0, device=device), host_memory_budget())
                if nbytes > self._size_bytes - self.used_bytes:
                    raise self._too_large(nbytes)

    def allocate(
        self, nbytes: int, device: torch.device | str, *, budget: Budget | None = None
    ) -> MemfabricBlock:
        """Page-aligned memory that `device` reaches, and that transfer_kv's kernel takes.

        Args:
            budget: for the entity, if it is made now; by default what this machine has.

        Raises:
            MemoryError: it does not fit into the entity, whose size is fixed while it is in use, or the
                entity does not fit into the budget.
            RuntimeError: Memfabric or its driver is missing or refuses.
            ValueError: `nbytes` is not positive, or the entity belongs to another device.
        """
        if nbytes <= 0:
            raise ValueError(f"[memfabric] nbytes must be positive, got {nbytes}.")
        with self._lock:
            padded = _padded(nbytes)
            offload = self._ready(padded, torch.empty(0, device=device), budget or host_memory_budget())
            raw = offload.malloc(padded)
            if raw % _PAGE:  # behind somebody else's odd size
                offload.free(raw)
                padded += _PAGE
                raw = offload.malloc(padded)
            if raw == 0:
                raise self._too_large(nbytes)
            address = (raw + _PAGE - 1) // _PAGE * _PAGE
            device_address = offload.get_dva(address)
            try:
                self._map(address, nbytes, device_address)
            except BaseException:
                offload.free(raw)
                raise
            self._used_bytes[address] = padded
        return MemfabricBlock(self, raw, address, device_address, nbytes)

    def _too_large(self, nbytes: int) -> MemoryError:
        return MemoryError(
            f"[memfabric] {nbytes:,} bytes do not fit: of {self._size_bytes:,} bytes "
            f"{self.used_bytes:,} are in use. Call torch_hicache.memfabric.reserve() with the "
            "size of each pool before the first one is allocated."
        )

    def device_address(self, address: int) -> int:
        """Where the device finds a byte of Memfabric memory, whoever allocated it; 0 for others."""
        return _offload().get_dva(address)

    def adopt(self, address: int, nbytes: int, device: torch.device | str) -> None:
        """Let transfer_kv's kernel take memory that others got from Memfabric; `disown` before it ends.

        ValueError if it is not Memfabric's.
        """
        first, last = self.device_address(address), self.device_address(address + nbytes - 1)
        if first == 0 or last != first + nbytes - 1:
            raise ValueError(f"[memfabric] {nbytes:,} bytes at {address:#x} are not Memfabric's memory.")
        with self._lock:
            if self._on_device is None:
                self._on_device = torch.empty(0, device=device)
            self._map(address, nbytes, first)

    def disown(self, address: int) -> None:
        """Undo `adopt`, after waiting for the work of the device that uses the memory."""
        torch.ops.hicache.unregister_host_memory(self._on_device, address)

    def _map(self, address: int, nbytes: int, device_address: int) -> None:
        if device_address == 0:
            raise RuntimeError(f"[memfabric] Memfabric has no device address for {address:#x}.")
        torch.ops.hicache.map_host_memory(self._on_device, address, nbytes, device_address)

    def _release(self, address: int, raw: int) -> None:
        with self._lock:
            torch.ops.hicache.unregister_host_memory(self._on_device, address)  # waits for the device
            _offload().free(raw)
            del self._used_bytes[address]

    def _ready(self, nbytes: int, on_device: torch.Tensor, budget: Budget) -> ModuleType:
        """The module, with an entity in which `nbytes` may fit."""
        offload = _offload()
        known = self._on_device
        if known is not None and known.device != on_device.device and self._used_bytes:
            raise ValueError(
                f"[memfabric] Memfabric serves one device a process: this one's is {known.device}, got "
                f"{on_device.device}."
            )
        is_new_device = known is None or known.device != on_device.device
        wanted = (max(self._reserved_bytes, nbytes) + GIB - 1) // GIB * GIB  # what Memfabric rounds to
        if self._size_bytes and not self._used_bytes and (wanted > self._size_bytes or is_new_device):
            offload.uninitialize()
            self._size_bytes = 0
        self._on_device = on_device
        if self._size_bytes == 0:
            budget.check("memfabric", wanted)
            _create(offload, on_device.device, wanted)
            self._size_bytes = wanted
        return offload


def _padded(nbytes: int) -> int:
    """Whole pages, so that the next allocation is aligned too."""
    return (nbytes + _PAGE - 1) // _PAGE * _PAGE


def _offload() -> ModuleType:
    if reason := missing_reason():
        raise RuntimeError(f"[memfabric] Memfabric memory {reason}.")
    try:
        from memfabric_hybrid import offload
    except (ImportError, OSError) as error:
        raise RuntimeError(f"[memfabric] {_PACKAGE} can't be loaded: {error}.") from None
    return offload


def _create(offload: Any, device: torch.device, size_bytes: int) -> None:
    """Make the entity."""
    config = offload.OffloadConfig()
    config.device_id = device.index
    config.scene = offload.Scene.LOCAL
    config.reserve_size = config.alloc_size = size_bytes  # must be equal for one process alone
    if torch.npu.get_device_name(device.index).startswith(_GIANT_PAGE_CHIPS):
        config.flags = int(offload.OFFLOAD_FLAG_GIANT_PAGE)
    if offload.initialize(config) != 0:
        raise RuntimeError(
            f"[memfabric] Memfabric refused an entity of {size_bytes:,} bytes on {device}: it needs that "
            "much free host memory (for chips without giant pages in /proc/sys/vm/nr_hugepages), an "
            "Ascend driver that it knows, and its kernels built (docs/ascend.md). Its log says more: "
            "memfabric_hybrid.set_log_level(0)."
        )


_entity = Memfabric()
prepare = _entity.prepare
allocate = _entity.allocate
device_address = _entity.device_address
reserve = _entity.reserve
adopt = _entity.adopt
disown = _entity.disown


def free(block: MemfabricBlock) -> None:
    """Release what `allocate` gave."""
    block.free()


def entity() -> Memfabric:
    """This process's, for its sizes."""
    return _entity


class MemfabricKind(HostMemoryKind):
    """What `empty_host` gives for an NPU, where the package is installed."""

    name = "memfabric"

    def refusal(self, device: torch.device) -> str:
        if device.type != "npu":
            return f"needs an NPU as device, got {device}"
        return missing_reason()

    def is_default_for(self, device: torch.device) -> bool:
        return device.type == "npu" and not self.refusal(device)

    def prepare(self, sizes: Sequence[int], device: torch.device) -> None:
        _entity.prepare(sizes, device)

    def allocate(self, request: HostRequest) -> HostMemory:
        block = _entity.allocate(request.nbytes, request.device, budget=request.budget())
        return HostMemory(block.address, request.nbytes, block.free)


register_host_kind(MemfabricKind())
