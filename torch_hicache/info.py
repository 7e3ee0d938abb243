"""What `hicache info` shows: versions, backends, devices and their links.

Everything is asked without starting a device: torch's flags, the driver's own tool, /proc.
"""

import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import torch_hicache
from torch_hicache._backends import Backend
from torch_hicache.memory_budget import available_memory

_CUDA_FIELDS = {  # what nvidia-smi calls it -> what we call it
    "name": "name",
    "memory.total": "memory",
    "compute_cap": "compute_capability",
    "pci.bus_id": "bus_id",
    "pcie.link.gen.max": "link_gen",
    "pcie.link.width.max": "link_width",
    "pcie.link.gen.current": "link_gen_now",
    "pcie.link.width.current": "link_width_now",
}
_OLD_DRIVER_ADVICE = (
    "For an older driver (525 or newer), build from source with your own nvcc 12.x: "
    "CUDA_HOME=/path/to/cuda-12 pip install --no-build-isolation . in the source tree."
)


def collect_info() -> dict[str, Any]:
    """All of it, as plain values for JSON. Missing things are None or say why."""
    driver = cuda_driver()
    return {
        "versions": {
            "torch_hicache": torch_hicache.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "cuda_of_torch": torch.version.cuda,
            "hip_of_torch": torch.version.hip,
            "cuda_driver": driver,
            "torch_npu": _version_of("torch-npu"),
            "memfabric": _version_of("memfabric-hybrid"),
        },
        "backends": [_backend(backend) for backend in torch_hicache.backends()],
        "devices": [cpu_device(), *cuda_devices(), *npu_devices()],
        "cuda_build": cuda_build_advice(torch_hicache.backends(), driver),
    }


def _backend(backend: Backend) -> dict[str, Any]:
    return {
        "name": backend.name,
        "key": backend.key,
        "built": backend.built,
        "loaded": backend.loaded,
        "reason": backend.reason,
        "remedy": backend.remedy,
        "details": dict(backend.details),
    }


def cuda_build_advice(backends: list[Backend], driver: str | None) -> str:
    """Which driver the CUDA library needs, whether this one will do, and what to do if not."""
    details = next((b.details for b in backends if b.name == "cuda" and b.built), None)
    if details is None:
        return f"The CUDA library is not built. {_OLD_DRIVER_ADVICE}"
    needed = details.get("min_driver", "unknown")
    text = f"Built with CUDA {details.get('cuda_toolkit', 'unknown')}: needs driver {needed} or newer"
    if driver and needed.isdigit() and _major(driver) < int(needed):
        text += f", but this machine's is {driver}, too old"
    return f"{text}. {_OLD_DRIVER_ADVICE}"


def _major(version: str) -> int:
    major = version.split(".", maxsplit=1)[0]
    return int(major) if major.isdigit() else 0


def cuda_driver() -> str | None:
    """The version of NVIDIA's kernel driver, or None."""
    try:
        return Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        rows = _nvidia_smi(["driver_version"])
        return rows[0][0] if rows else None


def cuda_devices() -> list[dict[str, Any]]:
    """NVIDIA devices as the driver numbers and knows them, whatever this torch can use."""
    devices = []
    for index, row in enumerate(_nvidia_smi(list(_CUDA_FIELDS))):
        found = dict(zip(_CUDA_FIELDS.values(), row, strict=False))
        devices.append(
            {
                "type": "cuda",
                "index": index,
                "name": found["name"],
                "memory": found["memory"],
                "compute_capability": found["compute_capability"],
                "bus_id": found["bus_id"],
                "link": _link(found),
            }
        )
    return devices


def npu_devices() -> list[dict[str, Any]]:
    """Ascend devices as torch_npu counts them; the driver names the chip without starting one."""
    if torch._C._get_privateuse1_backend_name() != "npu":
        return []
    return [
        {
            "type": "npu",
            "index": index,
            "name": torch.npu.get_device_name(index),
            "memory": "memory not asked for",
            "link": None,
        }
        for index in range(torch.npu.device_count())
    ]


def _version_of(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _link(found: dict[str, str]) -> str | None:
    """ "PCIe gen 5 x16", and what it runs at now where that is less (an idle link is slower)."""
    best = (found["link_gen"], found["link_width"])
    now = (found["link_gen_now"], found["link_width_now"])
    if not all(value.isdigit() for value in best):
        return None
    text = f"PCIe gen {best[0]} x{best[1]}"
    return text if now == best else f"{text} (now gen {now[0]} x{now[1]})"


def _nvidia_smi(fields: list[str]) -> list[list[str]]:
    """One row a device; empty where there is no driver or it does not answer."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return []
    command = [tool, f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    rows = [[value.strip() for value in line.split(",")] for line in answer.stdout.splitlines()]
    return [row for row in rows if len(row) == len(fields)]


def cpu_device() -> dict[str, Any]:
    return {
        "type": "cpu",
        "index": 0,
        "name": cpu_name(),
        "memory": f"{available_memory() >> 20} MiB free",
        "threads": torch.get_num_threads(),
        "link": None,
    }


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()
