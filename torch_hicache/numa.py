"""NUMA nodes: which one a device is next to, and how memory comes to lie there."""

import ctypes
import os
import platform
from pathlib import Path

import torch

SYSFS = Path("/sys")

_MPOL_PREFERRED = 1
# libc has no mbind; libnuma, which has, is rarely installed.
_MBIND = {"x86_64": 237, "aarch64": 235, "riscv64": 235, "ppc64le": 259}
_libc = ctypes.CDLL(None, use_errno=True)


def nodes() -> list[int]:
    """The nodes of this machine that are online."""
    return sorted(_numbers(_read(SYSFS / "devices/system/node/online")))


def node_of_device(device: torch.device) -> int | None:
    """The node that a device's bus is attached to; None where that is not known."""
    if device.type != "cuda":
        return None
    properties = torch.cuda.get_device_properties(device)
    try:
        domain, bus = properties.pci_domain_id, properties.pci_bus_id
        address = f"{domain:04x}:{bus:02x}:{properties.pci_device_id:02x}.0"
    except AttributeError:  # an older torch
        return None
    text = _read(SYSFS / "bus/pci/devices" / address / "numa_node")
    return int(text) if text.isdigit() else None  # the kernel says -1 when it does not know


def cpus_of(node: int) -> set[int]:
    """The CPUs of a node that this process may use."""
    found = _numbers(_read(SYSFS / f"devices/system/node/node{node}/cpulist"))
    return found & os.sched_getaffinity(0)


def prefer_node(address: int, nbytes: int, node: int) -> None:
    """Pages that are touched from now on come from `node` while it has any. OSError if not allowed."""
    number = _MBIND.get(platform.machine())
    if number is None:
        raise OSError(f"mbind is not known for {platform.machine()}")
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (node // bits + 1))()
    mask[node // bits] = 1 << (node % bits)
    arguments = (address, nbytes, _MPOL_PREFERRED, ctypes.addressof(mask), len(mask) * bits + 1, 0)
    if _libc.syscall(ctypes.c_long(number), *(ctypes.c_ulong(value) for value in arguments)):
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _numbers(text: str) -> set[int]:
    """The kernel's lists, such as "0-3,8"."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return found
