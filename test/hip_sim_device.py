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

import torch  # noqa: E402

KEY = os.environ["HIP_SIM_KEY"]
device = {"PrivateUse1": "hipsim", "HIP": "hip", "CUDA": "cuda"}[KEY]


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


if KEY == "PrivateUse1":
    torch.utils.rename_privateuse1_backend(device)
torch.ops.load_library(os.environ["HIP_SIM_DEVICE"])
if KEY == "PrivateUse1":
    torch._register_device_module(device, DeviceModule(f"torch.{device}"))
else:
    os.environ["HICACHE_HIP_KEY"] = KEY
