"""Puts the simulated GPU into this process: import it before torch_hicache (pytest: `-p hip_sim_device`).

The environment comes from hip_simulator.environment().
"""

import ctypes
import os
import types

# First, so that every library that names the runtime gets this one.
sim = ctypes.CDLL(os.environ["HIP_SIM_RUNTIME"], mode=ctypes.RTLD_GLOBAL)
sim.hip_sim_launches.restype = ctypes.c_long
sim.hip_sim_waiting.restype = ctypes.c_size_t

KEY = os.environ["HIP_SIM_KEY"]
device = {"PrivateUse1": "hipsim", "CUDA": "cuda", "HIP": "hip"}[KEY]
if KEY != "PrivateUse1":  # torch asks once, when it starts, who answers for CUDA, or for HIP
    ctypes.CDLL(os.environ["HIP_SIM_DEVICE"], mode=ctypes.RTLD_GLOBAL)

import torch  # noqa: E402


class DeviceModule(types.ModuleType):
    """What torch looks for under torch.<device>."""

    def is_available(self) -> bool:
        return self.device_count() > 0

    def device_count(self) -> int:
        return int(os.environ.get("HIP_SIM_DEVICES", "1"))

    def current_device(self) -> int:
        return 0

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def get_rng_state(self, device: object = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: object = None) -> None:
        torch.set_rng_state(state)


if KEY == "PrivateUse1":
    torch.utils.rename_privateuse1_backend(device)
    torch.ops.load_library(os.environ["HIP_SIM_DEVICE"])
    torch._register_device_module(device, DeviceModule(f"torch.{device}"))
elif KEY == "HIP":
    torch._register_device_module(device, DeviceModule(f"torch.{device}"))
else:  # as on a torch for ROCm, of which this torch has nothing but the name
    os.environ["HICACHE_HIP_KEY"] = KEY
    torch.cuda._initialized = True


def enable_compile() -> None:
    """Let torch.compile take the device: graphs of calls, without generated kernels."""
    from torch._dynamo.device_interface import DeviceInterface, register_interface_for_device
    from torch._inductor.codegen.common import register_backend_for_device, register_device_op_overrides
    from torch._inductor.codegen.cpp import CppScheduling
    from torch._inductor.codegen.cpu_device_op_overrides import CpuDeviceOpOverrides
    from torch._inductor.codegen.wrapper import PythonWrapperCodegen

    class Interface(DeviceInterface):
        Stream = torch.Stream
        Event = torch.Event
        is_available = staticmethod(lambda: True)
        current_device = staticmethod(lambda: 0)
        device_count = staticmethod(lambda: 1)
        set_device = staticmethod(lambda device: None)
        synchronize = staticmethod(torch.accelerator.synchronize)
        get_raw_stream = staticmethod(lambda index: 0)
        is_bf16_supported = staticmethod(lambda including_emulation=False: True)

        class Worker(DeviceInterface.Worker):
            current_device = staticmethod(lambda: 0)
            set_device = staticmethod(lambda device: None)

    register_interface_for_device(device, Interface)
    register_device_op_overrides(device, CpuDeviceOpOverrides())
    register_backend_for_device(device, CppScheduling, PythonWrapperCodegen)
