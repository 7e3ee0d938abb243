"""torch.ops.hicache.transfer_kv: KV cache between device and host memory, as one operator."""

from importlib.metadata import PackageNotFoundError, version

from torch_hicache import _backends

_backends.load()

# ops.py needs the schemas that load() has just brought in.
from torch_hicache import memfabric, ops  # noqa: E402
from torch_hicache._backends import Backend, backends  # noqa: E402
from torch_hicache.host_memory import device_view, empty_host  # noqa: E402
from torch_hicache.ops import check_errors, transfer_kv  # noqa: E402
from torch_hicache.staging import to_device_no_sync  # noqa: E402

try:
    __version__ = version("torch_hicache")
except PackageNotFoundError:  # a source tree that was built in place and not installed
    __version__ = "0+unknown"

__all__ = [
    "Backend",
    "__version__",
    "backends",
    "check_errors",
    "device_view",
    "empty_host",
    "memfabric",
    "ops",
    "to_device_no_sync",
    "transfer_kv",
]
