"""On the PYTHONPATH of a run on the simulated driver: loads it before anything imports torch.

HICACHE_ASCEND_SIM is the folder that build.py has filled. Loaded for everybody (RTLD_GLOBAL), the
libraries are what torch_npu and Memfabric find under the driver's names, also in a test's own processes.
"""

import ctypes
import os

LIBRARIES = (
    *("ascendcl", "hccl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel", "opapi"),
    *("ascend_hal", "ra", "tsdclient"),
)

if folder := os.environ.get("HICACHE_ASCEND_SIM"):
    os.environ.setdefault("ASCEND_MF_LOG_LEVEL", "3")  # errors only
    os.environ["ASCEND_HOME_PATH"] = os.environ["ASCEND_OPP_PATH"] = folder
    for name in LIBRARIES:
        ctypes.CDLL(f"{folder}/lib{name}.so", ctypes.RTLD_GLOBAL)
    os.environ.setdefault("HICACHE_ASCEND_KERNEL", f"{folder}/_ascend_kernel.so")
