"""Loads the libraries that this torch can use, and knows why it did not load the others.

Loading registers kernels and touches no device. `_C` (schemas, CPU) must load; a vendor's library is
loaded only under a torch built for that vendor, and without it the op says how to get it.
"""

import ctypes
import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch

_FOLDER = Path(__file__).parent
_MIN_TORCH = (2, 10)
_REFUSED_OPS = (
    "transfer_kv",
    "explain",
    "check_errors",
    "set_method_table",
    "register_host_memory",
    "unregister_host_memory",
    "host_device_address",
)


@dataclass(frozen=True)
class Backend:
    """One vendor's library: `key` is its dispatch key, `reason` says why it is not loaded."""

    name: str
    key: str
    built: bool
    loaded: bool
    reason: str = ""
    remedy: str = ""
    details: dict[str, str] = field(default_factory=dict)


_backends: dict[str, Backend] = {}
# A torch.library.Library undoes its registrations when it is collected.
_fallbacks: list[torch.library.Library] = []


def backends() -> list[Backend]:
    """All backends, loaded or not, in the order cpu, cuda, hip, ascend."""
    return list(_backends.values())


def _backend_name(device_type: str) -> str:
    """A ROCm torch calls its devices cuda as well."""
    if device_type == "cuda" and torch.version.hip:
        return "hip"
    return {"npu": "ascend"}.get(device_type, device_type)


def backend_of(device_type: str) -> Backend:
    """The backend, loaded or not, of cpu, cuda, hip or npu devices."""
    return _backends[_backend_name(device_type)]


def why_missing(backend: Backend) -> str:
    return f"the {backend.name} backend is not loaded: {backend.reason}. To get it, {backend.remedy}."


def empty_on(device: torch.device | str | int, *, caller: str) -> torch.Tensor:
    """No elements on `device`: knows its index, and leads an op to its backend.

    Raises:
        RuntimeError: this torch has no such device, and what to do; or what its runtime says.
    """
    try:
        return torch.empty(0, device=device)
    except (AssertionError, RuntimeError):  # torch's ways to say so
        device_type = "cuda" if isinstance(device, int) else str(device).partition(":")[0]
        backend = _backends.get(_backend_name(device_type))
        if backend is not None and backend.loaded:
            raise
        others = f"there are backends for cpu, cuda, hip and npu, none for {device_type}."
        why = why_missing(backend) if backend else others
        raise RuntimeError(f"[{caller}] device {device} can't be used: {why}") from None


def load() -> None:
    """Load `_C` and what else fits this torch. A second call does nothing."""
    if _backends:
        return
    _check_torch_version()
    build = _build_record()
    library = _FOLDER / "_C.so"
    if not library.is_file():
        raise ImportError(
            f"torch_hicache: {library} is missing. Build it with `pip install .` in the source tree."
        )
    torch.ops.load_library(library)
    _backends["cpu"] = Backend("cpu", "CPU", True, True, details=build["built"].get("cpu", {}))
    _backends["cuda"] = _load_cuda(build)
    _backends["hip"] = _load_hip(build)
    _backends["ascend"] = _load_ascend(build)
    gpu = _backends["hip" if _hip_key() == "CUDA" else "cuda"]
    if not gpu.loaded:
        _register_fallback(gpu, "CUDA")
    if not _backends["ascend"].loaded and _private_device() == "npu":
        _register_fallback(_backends["ascend"], "PrivateUse1")


def _check_torch_version() -> None:
    found = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if found < _MIN_TORCH:
        raise ImportError(f"torch_hicache needs torch 2.10 or newer, found {torch.__version__}.")


def _build_record() -> dict[str, dict[str, Any]]:
    """What setup.py wrote about the build; empty for libraries put here by hand."""
    try:
        return json.loads((_FOLDER / "_build.json").read_text())
    except FileNotFoundError:
        return {"built": {}, "missing": {}}


def _build_remedy(reason: str, install: str) -> str:
    """What to do about a library that is not built: tools are not what one lacks that was left out."""
    if "HICACHE_BACKENDS" in reason:
        return "build torch_hicache again without HICACHE_BACKENDS"
    return f"{install} and build torch_hicache again"


def _load_cuda(build: dict[str, dict[str, Any]]) -> Backend:
    library = _FOLDER / "_cuda.so"
    details = build["built"].get("cuda", {})
    if not library.is_file():
        reason = build["missing"].get("cuda", "_cuda.so is missing")
        remedy = _build_remedy(reason, "install the CUDA toolkit (nvcc 12.x or 13.x)")
        return Backend("cuda", "CUDA", False, False, reason, remedy)
    if torch.version.hip is not None:
        reason = "this torch is a ROCm build"
        return Backend("cuda", "CUDA", True, False, reason, "use the hip backend", details)
    if torch.version.cuda is None:
        reason = f"this torch ({torch.__version__}) is a CPU build"
        return Backend("cuda", "CUDA", True, False, reason, "install a CUDA build of torch", details)
    try:
        torch.ops.load_library(library)
    except OSError as error:
        remedy = "build torch_hicache again against this torch"
        return Backend("cuda", "CUDA", True, False, str(error), remedy, details)
    return Backend("cuda", "CUDA", True, True, details=details)


def _private_device() -> str:
    """What the owner of PrivateUse1 has named it: "npu" once torch_npu is imported."""
    return torch._C._get_privateuse1_backend_name()


def _load_ascend(build: dict[str, dict[str, Any]]) -> Backend:
    library = _FOLDER / "_ascend.so"
    details = build["built"].get("ascend", {})
    if not library.is_file():
        reason = build["missing"].get("ascend", "_ascend.so is missing")
        remedy = "build torch_hicache again without HICACHE_BACKENDS"
        return Backend("ascend", "PrivateUse1", False, False, reason, remedy)
    if _private_device() != "npu":
        reason = "torch_npu is not imported"
        remedy = "install torch_npu and import it before torch_hicache"
        return Backend("ascend", "PrivateUse1", True, False, reason, remedy, details)
    try:
        torch.ops.load_library(library)
    except OSError as error:
        remedy = "build torch_hicache again against this torch"
        return Backend("ascend", "PrivateUse1", True, False, str(error), remedy, details)
    return Backend("ascend", "PrivateUse1", True, True, details=details)


def _hip_key() -> str:
    """The dispatch key that AMD GPUs have in this process; empty where torch has no HIP device.

    HICACHE_HIP_KEY names it for a device that is not recognised here.
    """
    if key := os.environ.get("HICACHE_HIP_KEY"):
        return key
    if torch.version.hip is not None:
        return "CUDA"
    if _private_device().startswith(("hip", "rocm")):
        return "PrivateUse1"
    accelerator = torch.accelerator.current_accelerator()
    return "HIP" if accelerator is not None and accelerator.type == "hip" else ""


def _load_hip(build: dict[str, dict[str, Any]]) -> Backend:
    library = _FOLDER / "_hip.so"
    details = build["built"].get("hip", {})
    key = _hip_key()
    shown_key = key or "CUDA on ROCm, HIP, PrivateUse1"

    def missing(reason: str, remedy: str) -> Backend:
        return Backend("hip", shown_key, library.is_file(), False, reason, remedy, details)

    if not library.is_file():
        reason = build["missing"].get("hip", "_hip.so is missing")
        remedy = _build_remedy(reason, "install ROCm, or clang 19 and HIP's headers,")
        return missing(reason, remedy)
    if not key:
        return missing(
            f"this torch ({torch.__version__}) has no HIP device", "install a ROCm build of torch"
        )
    if key not in ("CUDA", "HIP", "PrivateUse1"):
        return missing(f"HICACHE_HIP_KEY is '{key}'", "set it to CUDA, HIP or PrivateUse1")
    if _backends["cuda"].loaded:
        return missing("the cuda backend is loaded", "use a torch that is not built for CUDA")
    if key == "PrivateUse1" and _private_device() == "npu":
        return missing("PrivateUse1 belongs to the NPU", "use a process without torch_npu")
    try:
        torch.ops.load_library(library)
    except OSError as error:
        return missing(str(error), f"install ROCm {details.get('hip', '')}, or build torch_hicache again")
    register = ctypes.CDLL(str(library)).hicache_register_hip
    register.argtypes, register.restype = [ctypes.c_char_p], ctypes.c_char_p
    if failure := register(key.encode()):
        return missing(failure.decode(), "build torch_hicache again against this torch")
    if key == "HIP":
        _skip_autograd_of_hip()
    return Backend("hip", key, True, True, details=details)


def _skip_autograd_of_hip() -> None:
    """A call with tensors of HIP and of the CPU reaches AutogradHIP, where torch has no fallback.

    That key has no name of its own.
    """
    library = torch.library.Library("hicache", "IMPL")
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("hicache::"):
            library.impl(name.partition("::")[2], torch.library.fallthrough_kernel, "Autograd")
    _fallbacks.append(library)


def _register_fallback(backend: Backend, key: str) -> None:
    """Let the ops on `key` say how to get the backend, instead of torch's list of all kernels."""

    def refuse(name: str) -> Callable[..., NoReturn]:
        def kernel(*_args: object, **_kwargs: object) -> NoReturn:
            raise RuntimeError(f"[{name}] {why_missing(backend)}")

        return kernel

    library = torch.library.Library("hicache", "IMPL")
    for name in _REFUSED_OPS:
        library.impl(name, refuse(name), key)
    _fallbacks.append(library)
