"""Host memory that a device can reach: empty_host, device_view.

A pinned tensor is an anonymous mapping of our own, registered with the device's runtime. Its size is
exact: torch's own pinned allocator rounds up to a power of two.
"""

import contextlib
import ctypes
import math
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

KINDS = ("auto", "pinned", "pageable")


class _PinnedMemory(mmap.mmap):
    """Page-locked memory of one device. Unregistered when the last tensor over it is gone."""

    _on_device: Tensor
    _address: int = 0

    @classmethod
    def allocate(cls, nbytes: int, device: torch.device) -> "_PinnedMemory":
        try:
            memory = cls(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, ValueError, OverflowError) as error:
            raise MemoryError(f"[empty_host] the system gave no {nbytes:,} bytes: {error}.") from None
        memory._on_device = torch.empty(0, device=device)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        try:
            torch.ops.hicache.register_host_memory(memory._on_device, address, nbytes)
        except RuntimeError as error:
            raise MemoryError(f"[empty_host] page-locking {nbytes:,} bytes failed: {error}") from None
        memory._address = address
        return memory

    def __del__(self) -> None:
        # Also reached from a failed allocate() and at interpreter exit, where torch may be gone.
        if self._address:
            # A destructor has nobody to tell; the end of the process unregisters too.
            with contextlib.suppress(Exception):
                torch.ops.hicache.unregister_host_memory(self._on_device, self._address)


def empty_host(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str,
    kind: str = "auto",
) -> Tensor:
    """An uninitialised, contiguous CPU tensor that `device` can reach.

    Args:
        shape: sizes in elements.
        dtype: any dtype.
        device: the accelerator whose transfers use the memory, or "cpu".
        kind: "pinned" (page-locked through the device's runtime, exactly as large as asked, rounded up
            to a page), "pageable" (plain memory: for the CPU, no kernel may touch it) or "auto":
            pinned for an accelerator, pageable for the CPU.

    The memory is released when the last tensor over it is gone, after the work that uses it.

    Raises:
        ValueError: an unknown kind, a negative size, or "pinned" without an accelerator.
        MemoryError: the system or the device's runtime can't give that much.
    """
    device = torch.device(device)
    if kind not in KINDS:
        raise ValueError(f"[empty_host] kind must be one of {', '.join(KINDS)}, got '{kind}'.")
    if any(size < 0 for size in shape):
        raise ValueError(f"[empty_host] shape must not be negative, got {list(shape)}.")
    if kind == "auto":
        kind = "pageable" if device.type == "cpu" else "pinned"
    if kind == "pinned" and device.type == "cpu":
        raise ValueError(
            "[empty_host] kind 'pinned' needs an accelerator as device, got cpu; use 'pageable'."
        )
    nbytes = math.prod(shape) * dtype.itemsize
    if kind == "pageable" or nbytes == 0:
        try:
            return torch.empty(tuple(shape), dtype=dtype)
        except RuntimeError as error:
            raise MemoryError(f"[empty_host] the system gave no {nbytes:,} bytes: {error}") from None
    memory = _PinnedMemory.allocate(nbytes, device)
    return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes).view(dtype).view(tuple(shape))


def device_view(tensor: Tensor, device: torch.device | str) -> Tensor:
    """The same bytes as a tensor whose device is `device`, for compiled and captured graphs.

    `tensor` is a host tensor from `empty_host`, or other memory registered with the device's runtime;
    shape, strides and dtype carry over. The view keeps the memory alive. Kernels that read or write
    it go over the link: it is meant for `transfer_kv`, not for arithmetic.

    Raises:
        ValueError: `tensor` is not on the CPU, or the device can't reach its memory.
    """
    device = torch.device(device)
    if tensor.device.type != "cpu":
        raise ValueError(f"[device_view] tensor must be on the CPU, got {tensor.device}.")
    if device.type == "cpu":
        return tensor
    on_device = torch.empty(0, device=device)
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.numel() == 0:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
    nbytes = (last + 1) * tensor.element_size()
    address = torch.ops.hicache.host_device_address(on_device, tensor.data_ptr(), nbytes)
    flat = _tensor_at(address, nbytes, on_device.device, owner=tensor)
    return flat.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


# --- A tensor at an address that keeps an owner alive -------------------------------------------
# from_blob with a deleter exists in torch's stable ABI from 2.11 only, and is not in Python; DLPack
# is in every torch. The structs are those of DLPack 0.8 ("dltensor" capsules).


class _DLDevice(ctypes.Structure):
    _fields_ = (("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


class _DLDataType(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _DLDevice),
        ("ndim", ctypes.c_int32),
        ("dtype", _DLDataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


class _DLManagedTensor(ctypes.Structure):
    pass


_Deleter = ctypes.CFUNCTYPE(None, ctypes.POINTER(_DLManagedTensor))
_DLManagedTensor._fields_ = (
    ("dl_tensor", _DLTensor),
    ("manager_ctx", ctypes.c_void_p),
    ("deleter", _Deleter),
)

_DL_CUDA, _DL_ROCM, _DL_EXTENSION = 2, 10, 12  # the last is torch's PrivateUse1
_DL_UINT8 = _DLDataType(1, 8, 1)
_alive: dict[int, tuple[object, ...]] = {}  # address of a managed struct -> all that it needs


@_Deleter
def _delete_managed(managed: "ctypes._Pointer[_DLManagedTensor]") -> None:
    _alive.pop(ctypes.addressof(managed.contents), None)


def _dl_device_type(device: torch.device) -> int:
    if device.type == "cuda" and torch.version.hip is None:
        return _DL_CUDA
    return _DL_ROCM if device.type in ("cuda", "hip") else _DL_EXTENSION


def _tensor_at(address: int, nbytes: int, device: torch.device, *, owner: object) -> Tensor:
    """A flat uint8 tensor over `nbytes` at `address`, which holds `owner` until its storage dies."""
    shape = (ctypes.c_int64 * 1)(nbytes)
    dl_device = _DLDevice(_dl_device_type(device), device.index or 0)
    dl_tensor = _DLTensor(address, dl_device, 1, _DL_UINT8, shape, None, 0)
    managed = _DLManagedTensor(dl_tensor, None, _delete_managed)
    _alive[ctypes.addressof(managed)] = (managed, shape, owner)
    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype = ctypes.py_object
    new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    capsule = new_capsule(ctypes.addressof(managed), b"dltensor", None)
    return torch.utils.dlpack.from_dlpack(capsule)
