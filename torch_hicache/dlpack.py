"""A tensor at an address that keeps an owner alive.

from_blob with a deleter exists in torch's stable ABI from 2.11 only, and is not in Python; DLPack is in
every torch. The structs are those of DLPack 0.8 ("dltensor" capsules).
"""

import ctypes

import torch
from torch import Tensor


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

_DL_CPU, _DL_CUDA, _DL_ROCM, _DL_EXTENSION = 1, 2, 10, 12
_DL_UINT8 = _DLDataType(1, 8, 1)
_alive: dict[int, tuple[object, ...]] = {}  # address of a managed struct -> all that it needs


@_Deleter
def _delete_managed(managed: "ctypes._Pointer[_DLManagedTensor]") -> None:
    _alive.pop(ctypes.addressof(managed.contents), None)


def _device_number(device: torch.device) -> int:
    if device.type == "cpu":
        return _DL_CPU
    if device.type == "cuda":
        return _DL_CUDA if torch.version.hip is None else _DL_ROCM
    if device.type == "hip":  # which torch makes of that number, unless it is built for ROCm
        return _DL_ROCM
    if device.type == torch._C._get_privateuse1_backend_name():
        return _DL_EXTENSION
    raise ValueError(f"[device_view] tensors on {device} can't be made from an address.")


def tensor_at(address: int, nbytes: int, device: torch.device, *, owner: object) -> Tensor:
    """A flat uint8 tensor over `nbytes` at `address`, which holds `owner` until its storage dies.

    ValueError for a device that DLPack has no number for.
    """
    shape = (ctypes.c_int64 * 1)(nbytes)
    dl_device = _DLDevice(_device_number(device), device.index or 0)
    dl_tensor = _DLTensor(address, dl_device, 1, _DL_UINT8, shape, None, 0)
    managed = _DLManagedTensor(dl_tensor, None, _delete_managed)
    _alive[ctypes.addressof(managed)] = (managed, shape, owner)
    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype = ctypes.py_object
    new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    capsule = new_capsule(ctypes.addressof(managed), b"dltensor", None)
    return torch.utils.dlpack.from_dlpack(capsule)
