"""For tests and benchmarks: devices, pools of fingerprints, and the reference that judges transfer_kv.

Everything is compared as bytes, and not only the rows: the whole memory under the destination, with the
gaps and guards around its planes, must be what index assignment leaves behind.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_hicache import memfabric
from torch_hicache._backends import backends
from torch_hicache.host_memory import device_view, empty_host

GUARD_BYTES = 64  # on either side of a strided_tensor; keeps the alignment of the allocation

# --- Devices ------------------------------------------------------------------------------------


def missing_reason(device: str) -> str:
    """Why tests can't run on "cpu", on an accelerator such as "cuda" or on a second one ("cuda:1"); empty
    when they can."""
    name, _, index = device.partition(":")
    if name == "cpu":
        return ""
    key = "CUDA" if name == "cuda" else "HIP" if name == "hip" else "PrivateUse1"
    if key == "PrivateUse1" and name != torch._C._get_privateuse1_backend_name():
        return f"there is no backend for '{name}' here"
    if name == "cuda" and not torch.cuda.is_available():
        return "torch.cuda.is_available() is False"
    served = [backend for backend in backends() if backend.key == key]
    if not any(backend.loaded for backend in served):
        reasons = "; ".join(f"{backend.name}: {backend.reason}" for backend in served)
        return f"no backend for '{name}' is loaded: {reasons}"
    count = torch.accelerator.device_count()
    return "" if int(index or 0) < count else f"there are {count} devices of type '{name}'"


def devices() -> list[str]:
    """The devices that this machine, this torch and this build can run on."""
    known = ("cpu", "cuda", "hip", torch._C._get_privateuse1_backend_name())
    return [device for device in known if not missing_reason(device)]


@dataclass(frozen=True)
class Placement:
    """Where the parts of a call live.

    Memory is "cpu" (plain), "pinned" or "memfabric" (empty_host), "view" (the device's view of pinned
    memory), "page_locked" (by torch: no kernel of an NPU reaches it) or "device".
    """

    name: str
    device: str
    dst_memory: str = "cpu"
    src_memory: str = "cpu"
    dst_indices_device: str = "cpu"
    src_indices_device: str = "cpu"

    def __str__(self) -> str:
        return self.name

    @property
    def methods(self) -> tuple[str, ...]:
        """Those that serve all of its calls."""
        if "page_locked" in (self.dst_memory, self.src_memory):
            return ("auto", "copy_engine")
        is_npu = self.device.startswith("npu") and self.checks_indices
        return ("auto", "kernel", "copy_engine") if is_npu else ("auto", "kernel")

    @property
    def checks_indices(self) -> bool:
        """Whether the host can read all indices: it then refuses bad ones and resolves duplicates."""
        return self.dst_indices_device == self.src_indices_device == "cpu"

    def dst(self, sizes: Sequence[int], dtype: torch.dtype = torch.uint8, **layout: object) -> Tensor:
        """A strided_tensor in the destination's memory."""
        return strided_tensor(sizes, dtype, self.dst_memory, self.device, **layout)  # type: ignore[arg-type]

    def src(self, sizes: Sequence[int], dtype: torch.dtype = torch.uint8, **layout: object) -> Tensor:
        """A strided_tensor in the source's memory."""
        return strided_tensor(sizes, dtype, self.src_memory, self.device, **layout)  # type: ignore[arg-type]

    def dst_indices(self, values: Tensor | Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.as_tensor(values).to(self.dst_indices_device, dtype)

    def src_indices(self, values: Tensor | Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.as_tensor(values).to(self.src_indices_device, dtype)

    def count(self, value: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """A count where the op wants it: on the device when both index tensors are."""
        on_device = "cpu" not in (self.dst_indices_device, self.src_indices_device)
        return torch.tensor(value, dtype=dtype, device=self.device if on_device else "cpu")


def placements(device: str) -> list[Placement]:
    """All combinations of pool memory and index location that `device` serves."""
    if device == "cpu":
        return [Placement("cpu", "cpu")]
    pools = {
        "load": ("device", "pinned"),
        "store": ("pinned", "device"),
        "on_device": ("device", "device"),
        "load_view": ("device", "view"),
        "store_view": ("view", "device"),
    }
    indices = {
        "cpu_indices": ("cpu", "cpu"),
        "device_indices": (device, device),
        "dst_indices_on_device": (device, "cpu"),
        "src_indices_on_device": ("cpu", device),
    }
    if device.startswith("npu"):
        return _npu_placements(device, indices)
    return [
        Placement(f"{device}-{pool}-{where}", device, *memory, *locations)
        for pool, memory in pools.items()
        for where, locations in indices.items()
    ]


def _npu_placements(device: str, indices: dict[str, tuple[str, str]]) -> list[Placement]:
    """Each kind of host memory, and with Memfabric's each place for the indices."""
    mapped = "pinned" if memfabric.missing_reason() else "memfabric"
    pools = {
        "load": ("device", mapped, tuple(indices)),
        "store": (mapped, "device", tuple(indices)),
        "on_device": ("device", "device", ("cpu_indices", "device_indices")),
        "load_view": ("device", "view", ("device_indices",)),
        "store_view": ("view", "device", ("device_indices",)),
        "load_pinned": ("device", "pinned", ("cpu_indices",)),
        "store_pinned": ("pinned", "device", ("cpu_indices",)),
        "load_page_locked": ("device", "page_locked", ("cpu_indices",)),
        "store_page_locked": ("page_locked", "device", ("cpu_indices",)),
    }
    return [
        Placement(f"{device}-{pool}-{where}", device, dst_memory, src_memory, *indices[where])
        for pool, (dst_memory, src_memory, wheres) in pools.items()
        for where in wheres
    ]


# --- Pools --------------------------------------------------------------------------------------


def allocate_bytes(nbytes: int, memory: str, device: str) -> Tensor:
    """Flat bytes in one of Placement's kinds of memory."""
    if memory == "cpu":
        return torch.empty(nbytes, dtype=torch.uint8)
    if memory == "device":
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    if memory == "page_locked":
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    if memory == "memfabric":
        return empty_host((nbytes,), torch.uint8, device, kind="memfabric")
    host = empty_host((nbytes,), torch.uint8, device, kind="pinned")
    return host if memory == "pinned" else device_view(host, device)


def strided_tensor(
    sizes: Sequence[int],
    dtype: torch.dtype = torch.uint8,
    memory: str = "cpu",
    device: str = "cpu",
    *,
    order: Sequence[int] | None = None,
    padding: dict[int, int] | None = None,
    offset_bytes: int = 0,
) -> Tensor:
    """A view of its own storage, with guards around it.

    Args:
        order: the dimensions from the slowest to the fastest; as they come without one.
        padding: elements that a dimension's stride is longer than what lies inside it.
        offset_bytes: what the first byte's address is off an alignment of 64.
    """
    strides = [0] * len(sizes)
    step = 1
    for dim in reversed(order if order is not None else range(len(sizes))):
        strides[dim] = step + (padding or {}).get(dim, 0)
        step = strides[dim] * max(sizes[dim], 1)
    item_bytes = dtype.itemsize
    nbytes = GUARD_BYTES + offset_bytes + step * item_bytes + GUARD_BYTES
    flat = allocate_bytes((nbytes + 15) // 16 * 16, memory, device)
    return flat.view(dtype).as_strided(tuple(sizes), strides, (GUARD_BYTES + offset_bytes) // item_bytes)


def storage_bytes(tensor: Tensor) -> Tensor:
    """The whole memory under a tensor."""
    return torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())


def view_on(device: str, tensor: Tensor) -> Tensor:
    """A copy with the same strides, of all memory under the tensor."""
    flat = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(tensor.untyped_storage())
    return flat.to(device).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def byte_view(tensor: Tensor, flat: Tensor | None = None) -> Tensor:
    """A tensor's elements as a last dimension of bytes; in `flat`, a copy of its storage, if given."""
    item_bytes = tensor.element_size()
    return (storage_bytes(tensor) if flat is None else flat).as_strided(
        (*tensor.shape, item_bytes),
        (*(stride * item_bytes for stride in tensor.stride()), 1),
        tensor.storage_offset() * item_bytes,
    )


def _mix(values: Tensor) -> Tensor:
    """Bytes 1 to 255 that depend on all of each integer."""
    values = values * -7046029254386353131  # 0x9E3779B97F4A7C15
    values = (values ^ (values >> 29)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    return ((values >> 37) % 255 + 1).to(torch.uint8)


def fingerprints(planes: Tensor, slots: Tensor, row_bytes: int) -> Tensor:
    """[planes, slots, row_bytes]: bytes that encode plane, slot and place in the row; never zero."""
    places = torch.arange(row_bytes, device=slots.device)
    return _mix((planes.view(-1, 1, 1) << 48) + (slots.view(-1, 1) << 20) + places)


def fill_pool(tensors: Sequence[Tensor], slot_dim: int = 0, *, seed: int = 0) -> None:
    """Fingerprints into all slots of all planes, a canary into what else their storages hold.

    Planes are numbered through the list from `seed` on, so two seeds give two pools without a common row.
    """
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
    for tensor in storages.values():
        flat = storage_bytes(tensor)
        flat.copy_(_mix(torch.arange(flat.numel()) - (seed << 40) - 1))
    plane = seed << 10
    for tensor in tensors:
        view = byte_view(tensor)
        dim = slot_dim + tensor.dim() if slot_dim < 0 else slot_dim
        stack, slots, row = view.shape[:dim], view.shape[dim], view.shape[dim + 1 :]
        planes = torch.arange(plane, plane + stack.numel())
        values = fingerprints(planes, torch.arange(slots), row.numel())
        view.copy_(values.view(view.shape))
        plane += stack.numel()


def random_entries(
    num_entries: int, dst_slots: int, src_slots: int, *, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """Indices on the CPU in random order: each destination once, sources perhaps again."""
    generator = torch.Generator().manual_seed(seed)
    dst_indices = torch.randperm(dst_slots, generator=generator)[:num_entries]
    return dst_indices, torch.randint(src_slots, (len(dst_indices),), generator=generator)


# --- The reference ------------------------------------------------------------------------------


def entries_that_move(
    dst_indices: Tensor, src_indices: Tensor, count: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """On the CPU, without padding and what lies behind `count`; of one destination's entries the last."""
    n = len(dst_indices) if count is None else int(count)
    dst_cpu, src_cpu = dst_indices[:n].cpu().long(), src_indices[:n].cpu().long()
    keep = (dst_cpu >= 0) & (src_cpu >= 0)
    dst_cpu, src_cpu = dst_cpu[keep], src_cpu[keep]
    slots, group = torch.unique(dst_cpu, return_inverse=True)
    last = torch.zeros(len(slots), dtype=torch.long)
    last = last.scatter_reduce(0, group, torch.arange(len(dst_cpu)), "amax")
    return dst_cpu[last], src_cpu[last]


def reference_transfer(
    dst: Sequence[Tensor],
    src: Sequence[Tensor],
    dst_indices: Tensor,
    src_indices: Tensor,
    *,
    slot_dim: int = 0,
    count: Tensor | None = None,
) -> None:
    """What transfer_kv means: index assignment, of bytes."""
    snapshot = Snapshot([*dst, *src])
    snapshot.transfer(dst, src, dst_indices, src_indices, slot_dim=slot_dim, count=count)
    snapshot.restore()


class Snapshot:
    """Copies on the CPU of all memory under some tensors."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._flat: dict[tuple[str, int], Tensor] = {}
        self._copies: dict[tuple[str, int], Tensor] = {}
        _wait_for(tensors)
        for tensor in tensors:
            key = self._key(tensor)
            if key not in self._flat:
                self._flat[key] = storage_bytes(tensor)
                self._copies[key] = self._flat[key].to("cpu", copy=True)

    @staticmethod
    def _key(tensor: Tensor) -> tuple[str, int]:
        return str(tensor.device), tensor.untyped_storage().data_ptr()

    def twin(self, tensor: Tensor) -> Tensor:
        """The byte_view of a tensor in the copy."""
        return byte_view(tensor, self._copies[self._key(tensor)])

    def transfer(
        self,
        dst: Sequence[Tensor],
        src: Sequence[Tensor],
        dst_indices: Tensor,
        src_indices: Tensor,
        *,
        slot_dim: int = 0,
        count: Tensor | None = None,
    ) -> None:
        """The reference, in the copies."""
        dst_slots, src_slots = entries_that_move(dst_indices, src_indices, count)
        dim = slot_dim if slot_dim >= 0 else slot_dim - 1  # behind the row come an element's bytes
        for d, s in zip(dst, src, strict=True):
            self.twin(d).movedim(dim, 0)[dst_slots] = self.twin(s).movedim(dim, 0)[src_slots]

    def restore(self) -> None:
        """Write the copies back."""
        for key, flat in self._flat.items():
            flat.copy_(self._copies[key])

    def compare(self, what: str) -> None:
        """AssertionError unless all memory holds what the copies hold."""
        _wait_for(list(self._flat.values()))
        for key, flat in self._flat.items():
            now, expected = flat.cpu(), self._copies[key]
            if torch.equal(now, expected):
                continue
            wrong = (now != expected).nonzero().flatten()
            first = int(wrong[0])
            raise AssertionError(
                f"{what}: {len(wrong)} of {len(now)} bytes differ in memory on {key[0]}; the first is "
                f"byte {first}: {int(now[first])}, expected {int(expected[first])}"
            )


def _wait_for(tensors: Sequence[Tensor]) -> None:
    """Until the device is done: what it writes into host memory is not ordered with the CPU."""
    for device in {tensor.device for tensor in tensors if tensor.device.type != "cpu"}:
        torch.accelerator.synchronize(device)


def describe(tensors: Sequence[Tensor]) -> str:
    """Geometry of the first tensors, for a failed comparison."""
    parts = [
        f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)} strides "
        f"{list(tensor.stride())} at {tensor.data_ptr() % 64}"
        for tensor in tensors[:3]
    ]
    return "; ".join(parts) + (f"; ... {len(tensors)} tensors" if len(tensors) > 3 else "")


def check_transfer(
    dst: Sequence[Tensor],
    src: Sequence[Tensor],
    dst_indices: Tensor,
    src_indices: Tensor,
    *,
    slot_dim: int = 0,
    count: Tensor | None = None,
    method: str = "auto",
    max_blocks: int = 0,
) -> None:
    """Run transfer_kv. AssertionError unless all memory of both sides is as the reference leaves it."""
    snapshot = Snapshot([*dst, *src])
    snapshot.transfer(dst, src, dst_indices, src_indices, slot_dim=slot_dim, count=count)
    torch.ops.hicache.transfer_kv(
        list(dst),
        list(src),
        dst_indices,
        src_indices,
        slot_dim=slot_dim,
        count=count,
        method=method,
        max_blocks=max_blocks,
    )
    snapshot.compare(f"dst {describe(dst)} from src {describe(src)}, {len(dst_indices)} entries")


@contextmanager
def unchanged(tensors: Sequence[Tensor]) -> Iterator[None]:
    """AssertionError when a byte under the tensors has moved at the end of the block."""
    snapshot = Snapshot(tensors)
    yield
    snapshot.compare(f"memory changed under {describe(tensors)}")
