"""torch.ops.hicache.transfer_kv: KV cache between device and host memory, as one operator."""

from importlib.metadata import PackageNotFoundError, version

from torch_hicache import _backends

_backends.load()

# ops.py needs the schemas that load() has just brought in.
from torch_hicache import memfabric, ops  # noqa: E402
from torch_hicache._backends import Backend, backends  # noqa: E402
from torch_hicache.engine import TransferEngine  # noqa: E402
from torch_hicache.host_memory import (  # noqa: E402
    HostRegistration,
    device_view,
    empty_host,
    register_host,
)
from torch_hicache.layer_wait import wait_layer  # noqa: E402
from torch_hicache.layout import PlaneSpec  # noqa: E402
from torch_hicache.ops import check_errors, transfer_kv  # noqa: E402
from torch_hicache.plan import MethodTable, Plan, explain, set_method_table  # noqa: E402
from torch_hicache.pool import DevicePool, HostPool  # noqa: E402
from torch_hicache.shared_memory import SharedHostMemory  # noqa: E402
from torch_hicache.staging import to_device_no_sync  # noqa: E402
from torch_hicache.ticket import Ticket, TransferCancelled  # noqa: E402

try:
    __version__ = version("torch_hicache")
except PackageNotFoundError:  # a source tree that was built in place and not installed
    __version__ = "0+unknown"

__all__ = [
    "Backend",
    "DevicePool",
    "HostPool",
    "HostRegistration",
    "MethodTable",
    "Plan",
    "PlaneSpec",
    "SharedHostMemory",
    "Ticket",
    "TransferCancelled",
    "TransferEngine",
    "__version__",
    "backends",
    "check_errors",
    "device_view",
    "empty_host",
    "explain",
    "memfabric",
    "ops",
    "register_host",
    "set_method_table",
    "to_device_no_sync",
    "transfer_kv",
    "wait_layer",
]
