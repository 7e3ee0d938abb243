"""Raw addresses and tables of them, made into tensors that transfer_kv takes: the only place that does.

A tensor made here describes bytes at an address and owns nothing. It serves only calls to which the
caller passed that memory (or a table of its addresses): see calls.py.
"""

import itertools
import weakref
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_hicache.dlpack import tensor_at

Side = Sequence[Tensor]

_END_OF_ADDRESSES = 1 << 56  # of user space, the largest there is on x86-64 and AArch64
_STRIDED = torch.strided


def bad(text: str) -> ValueError:
    """For `raise`: what a caller got wrong."""
    return ValueError(f"[sglang] {text}")


class Plane(NamedTuple):
    """`slots` rows at an address: `sizes` and `strides` (bytes) are those of one row."""

    address: int
    device: torch.device
    slots: int
    slot_stride: int  # bytes
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Call:
    """The lists that transfer_kv takes."""

    dst: list[Tensor]
    src: list[Tensor]
    slot_dim: int


def check_type(tensor: object, name: str) -> None:
    """
    Raises:
        TypeError: no tensor.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"[sglang] {name} must be a tensor, got {type(tensor).__name__}.")


def check_tensor(tensor: Tensor, name: str, *, writes: bool = False) -> None:
    """Refuse what transfer_kv refuses: an address no longer shows it.

    Raises:
        TypeError: no tensor.
        ValueError: no strided tensor, a quantized one, a conjugate or negated view, a scalar, one without
            memory of its own (a fake tensor, a wrapper of others, a storage resized to 0), or (if the
            call `writes` to it, in grad mode) one that requires grad.
    """
    check_type(tensor, name)
    if tensor.layout is not _STRIDED or tensor.is_nested:
        raise bad(f"{name} must be a strided tensor, got {tensor.layout}.")
    if tensor.is_quantized:
        raise bad(f"{name} must hold its values (int_repr), got a quantized tensor.")
    if tensor.is_conj() or tensor.is_neg():
        raise bad(
            f"{name} must hold its values (resolve_conj, resolve_neg), got a view that changes them."
        )
    if writes and tensor.requires_grad and torch.is_grad_enabled():
        raise bad(f"{name} must not require grad, got one that does; use torch.no_grad() or detach it.")
    if not tensor.dim():
        raise bad(f"{name} must have a dimension of tokens or pages, got a scalar.")
    if tensor.numel() and not tensor.is_meta and not tensor.data_ptr():
        raise bad(f"{name} must have memory of its own, got a {type(tensor).__name__} without.")


# --- Planes -------------------------------------------------------------------------------------


def _tensor(plane: Plane, count: int = 0, step: int = 0) -> Tensor:
    """`[slots, *row]` bytes, or `[count, slots, *row]` of as many planes `step` bytes apart."""
    sizes, strides = (plane.slots, *plane.sizes), (plane.slot_stride, *plane.strides)
    if count:
        sizes, strides = (count, *sizes), (step, *strides)
    if 0 in sizes:
        return torch.empty(sizes, dtype=torch.uint8, device=plane.device)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
    return tensor_at(plane.address, extent, plane.device, owner=None).as_strided(sizes, strides)


def _step(planes: Sequence[Plane]) -> int:
    """Bytes between neighbours, 0 where they are not one distance apart, upwards."""
    if len(planes) == 1:
        return 1
    steps = {b.address - a.address for a, b in itertools.pairwise(planes)}
    return max(steps.pop(), 0) if len(steps) == 1 else 0


def call_of(components: Sequence[tuple[Sequence[Plane], Sequence[Plane]]]) -> Call:
    """Destination and source planes of K and of V (or of one latent row), as one call.

    Layers at one distance are stacked, which costs less in each call than a list. A layer alone is not.
    """
    components = [both for both in components if both[0]]
    is_one_layer = all(len(dst) == 1 for dst, _ in components)
    pairs = [(_step(dst), _step(src)) for dst, src in components]
    if not is_one_layer and all(dst_step and src_step for dst_step, src_step in pairs):
        dst_stacks = [
            _tensor(dst[0], len(dst), step) for (dst, _), (step, _) in zip(components, pairs, strict=True)
        ]
        src_stacks = [
            _tensor(src[0], len(src), step) for (_, src), (_, step) in zip(components, pairs, strict=True)
        ]
        return Call(dst_stacks, src_stacks, slot_dim=1)
    dst_planes = [_tensor(plane) for dst, _ in components for plane in dst]
    src_planes = [_tensor(plane) for _, src in components for plane in src]
    return Call(dst_planes, src_planes, slot_dim=0)


def token_rows(tensor: Tensor, row_bytes: int, name: str) -> Plane:
    """A tensor as rows of `row_bytes`, in the order of its elements. A distance between rows is kept.

    Raises:
        ValueError: where it has no such rows.
    """
    text = f"{name} must hold contiguous rows of {row_bytes} bytes, got {tensor.dtype} "
    text += f"{list(tensor.shape)} with strides {list(tensor.stride())}"
    if tensor.is_contiguous():
        if tensor.nbytes % row_bytes:
            raise bad(f"{text}, {tensor.nbytes} bytes.")
        slots, slot_stride = tensor.nbytes // row_bytes, row_bytes
    else:
        item_bytes = tensor.element_size()
        try:
            rows = tensor.view(-1, row_bytes // item_bytes)
        except RuntimeError:
            raise bad(f"{text}.") from None
        if row_bytes % item_bytes or rows.stride(1) != 1:
            raise bad(f"{text}.")
        slots, slot_stride = rows.shape[0], rows.stride(0) * item_bytes
    return Plane(tensor.data_ptr(), tensor.device, slots, slot_stride, (row_bytes,), (1,))


# --- Tables -------------------------------------------------------------------------------------


class AddressTable:
    """The addresses that a table held when it was read."""

    def __init__(self, addresses: Sequence[int], device: torch.device, version: object) -> None:
        self.addresses = tuple(addresses)
        self.device = device
        self.version = version


_tables: dict[int, AddressTable] = {}  # by id of the table's tensor, kept with it


def keep_with(tensor: Tensor, kept: dict[int, Any], value: object) -> None:
    """In `kept` by the tensor's id, until the tensor dies. On it, it would be copied with it."""
    if id(tensor) not in kept:
        weakref.finalize(tensor, kept.pop, id(tensor), None).atexit = False
    kept[id(tensor)] = value


def version_of(tensor: Tensor) -> tuple[int, int]:
    """Differs once torch has written to the tensor or given it other memory.

    Writes past torch or through `.data` do not show; inference tensors have no counter at all.
    """
    try:
        return tensor.data_ptr(), tensor._version
    except RuntimeError:  # an inference tensor; to ask first costs more
        return tensor.data_ptr(), 0


def _version_of_table(table: Tensor) -> object:
    """On the CPU the values themselves: a microsecond, and no write to them goes unseen."""
    return table.tolist() if table.is_cpu else version_of(table)


def read_table(table: Tensor, name: str) -> AddressTable:
    """The addresses in a 1-D uint64 or int64 tensor, as the device sees them.

    The first read of a table on an accelerator waits for it, and is kept while the tensor lives. It is
    read again once torch has written to the tensor or given it other memory. In no other way may a table
    on a device change (through `.data`, say), and an inference tensor there not at all. A table on the
    CPU is read in each call.

    Raises:
        ValueError: no such tensor, an address that can't be one, or a first read while a stream captures.
    """
    known = _tables.get(id(table))
    if known is not None and known.version == _version_of_table(table):
        return known
    if (
        not isinstance(table, Tensor)
        or table.layout is not _STRIDED
        or table.dtype not in (torch.uint64, torch.int64)
        or table.dim() != 1
    ):
        got = f"{table.dtype} {list(table.shape)}" if isinstance(table, Tensor) else type(table).__name__
        raise bad(f"{name} must be a 1-D uint64 tensor of addresses, got {got}.")
    if table.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise bad(f"{name} must have been used once before a stream captures: reading it waits.")
    version = _version_of_table(table)
    addresses = table.tolist()
    for i, address in enumerate(addresses):
        if not 0 < address < _END_OF_ADDRESSES:
            raise bad(f"{name}[{i}] must be an address, got {address}.")
    read = AddressTable(addresses, table.device, version)
    keep_with(table, _tables, read)
    return read


def table_rows(
    tables: Sequence[AddressTable],
    names: Sequence[str],
    row_bytes: int,
    slot_stride: int,
    *,
    writes: bool,
) -> list[list[Plane]]:
    """Planes of `row_bytes` rows at the addresses of one side's tables, as many slots as can be there.

    A table does not say how long a plane is. It ends where the next plane of the same side would be
    overwritten, and where the memory around the address ends, as far as that is known.

    Raises:
        ValueError: an address at which no row can be.
    """
    device = tables[0].device
    for table, name in zip(tables, names, strict=True):
        if table.device != device:
            raise bad(f"{name} must be on {device} as {names[0]} is, got {table.device}.")
    addresses = sorted({address for table in tables for address in table.addresses})
    slots = _slots_between(addresses, row_bytes, slot_stride)
    spans = known_memory(device, writes=writes)
    starts = [span.begin for span in spans]
    for table, name in zip(tables, names, strict=True):
        for i, address in enumerate(table.addresses):
            at = bisect_right(starts, address) - 1
            span = spans[at] if at >= 0 else Span(0, 0, device)
            if span.end <= address:
                if device.type == "cpu":
                    raise bad(f"{name}[{i}] must be an address of this process, got {address}.")
                continue  # memory that torch did not allocate
            if span.device != device:
                raise bad(f"{name}[{i}] must be an address on {device}, got {address} of {span.device}.")
            room = span.end - address
            if room < row_bytes:
                raise bad(f"{name}[{i}] has {room} bytes behind it, a row has {row_bytes}.")
            slots = min(slots, (room - row_bytes) // slot_stride + 1)
    return [
        [Plane(address, device, slots, slot_stride, (row_bytes,), (1,)) for address in table.addresses]
        for table in tables
    ]


def _slots_between(addresses: Sequence[int], row_bytes: int, slot_stride: int) -> int:
    """The most slots at which no plane meets another: those of interleaved planes never do.

    ValueError where two addresses are less than a row apart.
    """
    most = (_END_OF_ADDRESSES - addresses[-1]) // slot_stride if addresses else 0
    for i, address in enumerate(addresses):
        for other in addresses[i + 1 :]:
            slot, rest = divmod(other - address, slot_stride)
            if slot >= most:
                break
            if rest < row_bytes:  # where `other` begins, row `slot` would lie
                most = slot
            elif rest > slot_stride - row_bytes:  # row `slot + 1` begins behind it, but too near
                most = slot + 1
    if addresses and most < 1:
        raise bad(f"the addresses of one side are less than a row of {row_bytes} bytes apart.")
    return most


class Span(NamedTuple):
    """Memory from `begin` up to `end`, of this device."""

    begin: int
    end: int
    device: torch.device


def known_memory(device: torch.device, *, writes: bool) -> list[Span]:
    """What is known of the memory at addresses given to `device`, in order. A plane stays in its span.

    On the CPU what the process may read (and write, if it `writes`), on CUDA the live blocks of torch's
    allocator (none of which is host memory that the device reaches) and all it has on other GPUs.
    """
    if device.type == "cuda":
        try:
            segments = torch.cuda.memory_snapshot()
        except RuntimeError:  # an allocator without one, such as cudaMallocAsync
            return []
        return sorted(
            (span for segment in segments for span in _spans_of(segment, device)),
            key=lambda span: span.begin,
        )
    if device.type != "cpu":
        return []
    spans: list[Span] = []
    with open("/proc/self/maps") as maps:
        for line in maps:
            bounds, permissions = line.split()[:2]
            begin, end = (int(part, 16) for part in bounds.split("-"))
            if not permissions.startswith("rw" if writes else "r"):
                continue
            if spans and spans[-1].end == begin:
                begin = spans.pop().begin
            spans.append(Span(begin, end, device))
    return spans


def _spans_of(segment: dict[str, Any], device: torch.device) -> list[Span]:
    """The live blocks of a segment on `device`, or all of one elsewhere."""
    owner = torch.device("cuda", segment["device"])
    if owner != device:
        begin = segment["address"]
        return [Span(begin, begin + segment["total_size"], owner)]
    return [
        Span(block["address"], block["address"] + block.get("requested_size", block["size"]), owner)
        for block in segment["blocks"]
        if block["state"].startswith("active")
    ]
