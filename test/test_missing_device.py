"""What names a device that this torch lacks says so in one line, with the reason and what to do."""

import re
from collections.abc import Callable

import pytest
import torch

import torch_hicache
from torch_hicache import DevicePool, HostPool, MethodTable, PlaneSpec

PLANES = [PlaneSpec("key", (4,), torch.float16)]
BACKENDS = {backend.name: backend for backend in torch_hicache.backends()}
CALLS: dict[str, Callable[[str], object]] = {
    "DevicePool": lambda device: DevicePool(PLANES, 2, 8, device),
    "HostPool": lambda device: HostPool(PLANES, 2, 8, device),
    "check_errors": torch_hicache.check_errors,
    "set_method_table": lambda device: torch_hicache.set_method_table(device, MethodTable()),
}


@pytest.mark.parametrize("tag", CALLS)
@pytest.mark.parametrize(("device", "name"), [("cuda:1", "cuda"), ("npu", "ascend")])
def test_a_device_whose_backend_is_missing(tag: str, device: str, name: str) -> None:
    backend = BACKENDS[name]
    if backend.loaded or torch.version.hip:
        pytest.skip(f"this torch has {device}")
    text = (
        f"[{tag}] device {device} can't be used: the {name} backend is not loaded: {backend.reason}. "
        f"To get it, {backend.remedy}."
    )
    with pytest.raises(RuntimeError, match=f"^{re.escape(text)}$"):
        CALLS[tag](device)


@pytest.mark.skipif(torch.xpu.is_available(), reason="this torch has xpu")
def test_a_device_that_has_no_backend() -> None:
    reason = "device xpu can't be used: there are backends for cpu, cuda, hip and npu, none for xpu."
    calls = CALLS | {"host_memory": lambda device: torch_hicache.register_host(torch.ones(4), device)}
    for tag, call in calls.items():
        with pytest.raises(RuntimeError, match=rf"^\[{tag}\] {reason}$"):
            call("xpu")
