"""Pools: the planes of a KV cache in device or host memory, and the slots in them.

A pool owns its memory: dropping the last reference to it and to its views frees it. What is in the slots
is the caller's, what moves them is `transfer_kv`.
"""

from collections.abc import Mapping, Sequence
from typing import NoReturn

import torch
from torch import Tensor

from torch_hicache._backends import empty_on
from torch_hicache.host_kinds import choose_kind
from torch_hicache.host_memory import device_view, empty_host
from torch_hicache.layout import UNITS, PlaneSpec, PoolShape
from torch_hicache.memory_budget import host_memory_budget
from torch_hicache.slot_allocator import SlotAllocator


class Pool:
    """What HostPool and DevicePool share: views of the planes, and the allocation of slots.

    Attributes:
        specs: the planes, a PlaneSpec each.
        layer_ids: the layers as they were declared.
        num_slots, page_size, num_pages: how many slots; slots of a page; pages.
        layout: one of `LAYOUTS`, or "adopted".
        device: where the planes of a DevicePool lie; the device that reaches a HostPool.
    """

    specs: tuple[PlaneSpec, ...]
    layer_ids: tuple[int, ...]
    num_slots: int
    page_size: int
    layout: str
    device: torch.device

    _shapes: list[PoolShape]  # of each plane
    # Memory is kept as it was allocated and views are made when asked for: a compiled graph that closes
    # over a pool then takes this memory as its input, not slices of it, which inductor copies.
    _buffers: list[Tensor]  # [planes of one row shape and dtype, *base_shape]
    _places: list[tuple[int, int]]  # of each plane: its buffer, and which plane of that
    _layer_tensors: list[list[Tensor]] | None = None  # of a pool without buffers: [plane][layer]
    _layer_index: dict[int, int]
    _allocator: SlotAllocator

    def _declare(self, specs: Sequence[PlaneSpec], layers: int | Sequence[int]) -> None:
        """Check and set what a slot holds."""
        names = [spec.name for spec in specs]
        if not names or len(set(names)) < len(names):
            raise ValueError(
                f"[{self._name}] planes must be one or more, of different names, got {names}."
            )
        ids: tuple[int, ...] = ()
        is_count = isinstance(layers, int) and not isinstance(layers, bool)
        if isinstance(layers, int):
            ids = tuple(range(layers)) if is_count else ()
        elif isinstance(layers, Sequence):
            ids = tuple(layers)
        if (
            not ids
            or any(not isinstance(layer, int) or isinstance(layer, bool) or layer < 0 for layer in ids)
            or len(set(ids)) < len(ids)
        ):
            shown = list(ids) if ids and not is_count else layers
            raise ValueError(
                f"[{self._name}] num_layers must be 1 or more, or ids of 0 or more, once each, "
                f"got {shown}."
            )
        self.specs, self.layer_ids = tuple(specs), ids
        self._layer_index = {layer: i for i, layer in enumerate(ids)}

    def _set_slots(self, num_slots: int, page_size: int, layout: str) -> None:
        """Check and set how many slots there are, and where a row lies."""
        base_layout = "layer_first" if layout == "adopted" else layout
        self._shapes = [
            PoolShape(base_layout, self.num_layers, num_slots, page_size, spec.row_shape)
            for spec in self.specs
        ]
        self.num_slots, self.page_size, self.layout = num_slots, page_size, layout
        # What the allocator keeps for each page, before it asks for as much.
        host_memory_budget().check(self._name, self.num_pages * SlotAllocator.BYTES_PER_PAGE)
        self._allocator = SlotAllocator(num_slots, page_size)

    @property
    def _name(self) -> str:
        return type(self).__name__

    # --- What it is -----------------------------------------------------------------------------

    @property
    def plane_names(self) -> tuple[str, ...]:
        return tuple(spec.name for spec in self.specs)

    @property
    def num_layers(self) -> int:
        return len(self.layer_ids)

    @property
    def num_pages(self) -> int:
        return self.num_slots // self.page_size

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of one slot in all planes and layers."""
        return self.num_layers * sum(spec.row_bytes for spec in self.specs)

    @property
    def nbytes(self) -> int:
        """Bytes of all slots in all planes and layers."""
        return self.num_slots * self.bytes_per_slot

    @property
    def has_slots(self) -> bool:
        """Whether views by slot exist; some layouts are addressable by page only."""
        return self._shapes[0].has_slots

    @property
    def has_stacks(self) -> bool:
        """Whether the layers of a plane are one tensor, so that `stacks` works."""
        return self._layer_tensors is None

    @property
    def buffers(self) -> list[Tensor]:
        """The memory of the pool in its layout, for those who register or save it whole.

        Planes of one row shape and dtype in host memory share a buffer `[planes, *base_shape]`, as K
        and V do in SGLang; a plane alone is `[*base_shape]`. Of an adopted pool: the tensors as they are.
        """
        if self._layer_tensors is not None:
            return [tensor for tensors in self._layer_tensors for tensor in tensors]
        return [buffer[0] if len(buffer) == 1 else buffer for buffer in self._buffers]

    def __repr__(self) -> str:
        return (
            f"{self._name}({', '.join(self.plane_names)}; {self.num_layers} layers, {self.num_slots:,} "
            f"slots in pages of {self.page_size}, {self.layout}, {self.nbytes:,} bytes, {self.device})"
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            f"[{self._name}] a pool can't be pickled or copied: its memory belongs to this process. "
            "Pickle what describes it, and make another."
        )

    # --- Views ----------------------------------------------------------------------------------

    def planes(self, layer: int | None = None, unit: str = "slot") -> list[Tensor]:
        """Views for `transfer_kv` with slot_dim=0.

        Args:
            layer: a layer id gives one view for each PlaneSpec; None gives those of all layers, all
                planes of the first layer in front, then those of the next.
            unit: "slot" gives `[slots, *row]`, "page" gives `[pages, page_size, *row]`.

        Raises:
            ValueError: an unknown layer or unit, or a layout that has no views by slot.
        """
        index = None if layer is None else self._index_of(layer)
        if self._layer_tensors is not None:
            columns = [[self._by_unit(t, unit) for t in tensors] for tensors in self._layer_tensors]
        elif index is not None:
            return [stack[index] for stack in self.stacks(unit)]
        else:
            columns = [list(stack.unbind(0)) for stack in self.stacks(unit)]
        if index is not None:
            return [column[index] for column in columns]
        return [view for row in zip(*columns, strict=True) for view in row]

    def stacks(self, unit: str = "slot") -> list[Tensor]:
        """Views for `transfer_kv` with slot_dim=1, one for each PlaneSpec: `[layers, slots, *row]` or
        `[layers, pages, page_size, *row]`. A call with them costs less than one with `planes()`.

        Raises:
            ValueError: an unknown unit, a layout that has no views by slot, or a pool whose layers are
                tensors of their own (`has_stacks` is False): `planes()` is the way then.
        """
        if self._layer_tensors is not None:
            raise ValueError(
                f"[{self._name}] stacks need one tensor for all layers of a plane, this pool adopted one "
                "for each layer. Use planes()."
            )
        return [
            shape.stack(self._buffers[buffer][plane], unit=unit)
            for shape, (buffer, plane) in zip(self._shapes, self._places, strict=True)
        ]

    def _by_unit(self, tensor: Tensor, unit: str) -> Tensor:
        if unit not in UNITS:
            raise ValueError(f"[{self._name}] unit must be 'slot' or 'page', got '{unit}'.")
        return tensor if unit == "slot" else tensor.unflatten(0, (self.num_pages, self.page_size))

    def _index_of(self, layer: int) -> int:
        if layer not in self._layer_index:
            raise ValueError(
                f"[{self._name}] layer must be one of {_shown(self.layer_ids)}, got {layer}."
            )
        return self._layer_index[layer]

    # --- Slots: see SlotAllocator -----------------------------------------------------------------

    @property
    def available(self) -> int:
        """Slots that can be handed out now: neither allocated nor held."""
        return self._allocator.available

    def allocate(self, n: int, unit: str = "slot") -> Tensor:
        """Take `n` slots (whole pages), or `n` pages, in runs as long as can be: int64, ascending, on the
        CPU. `MemoryError` where fewer are available, `ValueError` for a bad `n`; nothing is taken then.
        """
        return self._allocator.allocate(n, unit=unit)

    def free(self, indices: Tensor | Sequence[int], unit: str = "slot") -> None:
        """Give slots back, once, whole pages in any order. A slot that a transfer holds becomes available
        when that releases it. `IndexError` for what is no slot, `ValueError` for what is not allocated;
        nothing is freed then. Indices on a device are copied to the CPU, which waits for them.
        """
        self._allocator.free(indices, unit=unit)

    def hold(self, indices: Tensor | Sequence[int], unit: str = "slot") -> None:
        """Keep slots from being handed out while a transfer uses them, allocated or not. Counted: each
        index needs a `release`. -1 is skipped. `IndexError` for what is no slot; nothing is held then.
        """
        self._allocator.hold(indices, unit=unit)

    def release(self, indices: Tensor | Sequence[int], unit: str = "slot") -> None:
        """Undo one `hold`. `ValueError` for what is not held; nothing is released then."""
        self._allocator.release(indices, unit=unit)


class DevicePool(Pool):
    """A pool in the memory of `device`, a tensor `[layers, slots, *row]` for each plane, of zeros.

    Args:
        planes: what a slot holds in each layer.
        num_layers: how many, or their ids: a pipeline stage may hold range(16, 32).
        num_slots: whole pages.
        device: may be "cpu".
        page_size: slots in a page.

    Raises:
        ValueError: sizes that can't be.
        MemoryError: the device has not that much memory.
        RuntimeError: this torch has no such device.
    """

    def __init__(
        self,
        planes: Sequence[PlaneSpec],
        num_layers: int | Sequence[int],
        num_slots: int,
        device: torch.device | str,
        page_size: int = 1,
    ) -> None:
        self._declare(planes, num_layers)
        self._set_slots(num_slots, page_size, "layer_first")
        self.device = empty_on(device, caller=self._name).device  # with its index
        self._buffers, self._places = [], []
        for spec, shape in zip(self.specs, self._shapes, strict=True):
            try:
                # Zeros: attention kernels multiply rows that nobody wrote with 0, and 0 * NaN is NaN.
                buffer = torch.zeros((1, *shape.base_shape), dtype=spec.dtype, device=self.device)
            except RuntimeError as error:
                raise MemoryError(
                    f"[DevicePool] {self.device} gave no memory for plane '{spec.name}' of a pool of "
                    f"{self.nbytes:,} bytes: {error}"
                ) from None
            self._places.append((len(self._buffers), 0))
            self._buffers.append(_with_static_address(buffer))

    @classmethod
    def adopt(
        cls,
        planes: Mapping[str, Tensor | Sequence[Tensor]],
        page_size: int = 1,
        layer_ids: Sequence[int] | None = None,
    ) -> "DevicePool":
        """A pool over tensors that exist, which costs nothing and copies nothing.

        Args:
            planes: for each plane's name a stack `[layers, slots, *row]`, or a tensor `[slots, *row]` for
                each layer; any strides. The pool keeps them alive. Compiled graphs that close over the
                pool take their addresses for static.
            page_size: slots in a page.
            layer_ids: 0, 1, 2 ... without them.

        `allocate` and `free` start with all slots available. An engine that manages slots itself leaves
        them alone; `hold` and `release` need no allocation.

        Raises:
            ValueError: tensors that are not the same layers, slots, rows and device, or that
                `transfer_kv` can't write.
        """
        if not planes:
            raise ValueError("[DevicePool] adopt needs a plane, got none.")
        columns = {name: _column(name, tensors) for name, tensors in planes.items()}
        first_name, first = next(iter(columns.items()))
        specs = []
        for name, column in columns.items():
            spec = PlaneSpec(name, tuple(column[0].shape[1:]), column[0].dtype)
            for i, tensor in enumerate(column):
                found = (tensor.dtype, tensor.device, *tensor.shape)
                wanted = (spec.dtype, first[0].device, first[0].shape[0], *spec.row_shape)
                if found != wanted:
                    raise ValueError(
                        "[DevicePool] all layers of a plane must be alike, and all planes on one device "
                        f"and of as many slots: layer {i} of '{name}' must be {_described(*wanted)}, "
                        f"got {_described(*found)}."
                    )
            if len(column) != len(first):
                raise ValueError(
                    f"[DevicePool] all planes must have the same layers, got {len(first)} of "
                    f"'{first_name}' and {len(column)} of '{name}'."
                )
            specs.append(spec)
        layers = len(first) if layer_ids is None else tuple(layer_ids)
        if not isinstance(layers, int) and len(layers) != len(first):
            raise ValueError(
                f"[DevicePool] layer_ids must name the {len(first)} layers of the planes, "
                f"got {len(layers)}."
            )
        everything = [tensor for column in columns.values() for tensor in column]
        nothing = torch.empty(0, dtype=torch.int64)
        torch.ops.hicache.transfer_kv(everything, everything, nothing, nothing)  # all its refusals
        pool = cls.__new__(cls)
        pool._declare(specs, layers)
        pool._set_slots(first[0].shape[0], page_size, "adopted")
        pool.device = first[0].device
        stacks = [tensor for tensor in planes.values() if isinstance(tensor, Tensor)]
        if len(stacks) == len(planes):
            pool._buffers = [_with_static_address(stack.unsqueeze(0)) for stack in stacks]
            pool._places = [(i, 0) for i in range(len(stacks))]
        else:
            pool._buffers, pool._places = [], []
            pool._layer_tensors = [
                [_with_static_address(tensor) for tensor in column] for column in columns.values()
            ]
        return pool


class HostPool(Pool):
    """A pool in host memory that `device` can reach, from `empty_host`; its contents are undefined.

    Args:
        planes: what a slot holds in each layer.
        num_layers: how many, or their ids.
        num_slots: whole pages. Or:
        budget_bytes: as many whole pages as fit, all planes and layers counted.
        device: the accelerator, or "cpu".
        layout: one of `torch_hicache.layout.LAYOUTS`, in SGLang's shapes.
        page_size: slots in a page.
        kind: as in `empty_host`.

    Raises:
        ValueError: sizes that can't be, or a budget below one page.
        MemoryError: there is not that much memory.
        RuntimeError: this torch has no such device.
    """

    _view: "HostPool | None" = None

    def __init__(  # noqa: PLR0917 - the order is fixed
        self,
        planes: Sequence[PlaneSpec],
        num_layers: int | Sequence[int],
        num_slots: int | None = None,
        device: torch.device | str = "cpu",
        layout: str = "layer_first",
        page_size: int = 1,
        kind: str = "auto",
        *,
        budget_bytes: int | None = None,
    ) -> None:
        if (num_slots is None) == (budget_bytes is None):
            raise ValueError(
                f"[HostPool] needs one of num_slots and budget_bytes, got {num_slots} and {budget_bytes}."
            )
        self._declare(planes, num_layers)
        if num_slots is None:
            num_slots = self._slots_in(budget_bytes or 0, page_size)
        self._set_slots(num_slots, page_size, layout)
        self.device = empty_on(device, caller=self._name).device  # with its index
        groups: dict[tuple[object, ...], list[int]] = {}
        for i, spec in enumerate(self.specs):
            groups.setdefault((spec.row_shape, spec.dtype), []).append(i)
        self._buffers = []
        places: dict[int, tuple[int, int]] = {}
        sizes = [
            len(group) * self.num_layers * self.num_slots * self.specs[group[0]].row_bytes
            for group in groups.values()
        ]
        choose_kind(kind, self.device).prepare(sizes, self.device)
        for group in groups.values():
            spec, shape = self.specs[group[0]], self._shapes[group[0]]
            layers_together = 1 if layout == "layer_first" else self.num_layers
            row_bytes = layers_together * spec.row_bytes
            buffer = empty_host(
                (len(group), *shape.base_shape),
                spec.dtype,
                self.device,
                kind=kind,
                piece_unit_bytes=page_size * row_bytes,
                plane_unit_bytes=self.num_slots * row_bytes,
            )
            places |= {plane: (len(self._buffers), i) for i, plane in enumerate(group)}
            self._buffers.append(_with_static_address(buffer))
        self._places = [places[i] for i in range(len(self.specs))]

    def _slots_in(self, budget_bytes: int, page_size: int) -> int:
        page_bytes = page_size * self.bytes_per_slot
        if budget_bytes < page_bytes:
            raise ValueError(
                f"[HostPool] budget_bytes must hold a page of {page_bytes:,} bytes ({page_size} slots of "
                f"{self.bytes_per_slot:,} bytes in {self.num_layers} layers), got {budget_bytes:,}."
            )
        # A page of no bytes has a size that is refused afterwards, with its own text.
        return budget_bytes // max(1, page_bytes) * page_size

    def device_view(self) -> "HostPool":
        """The same pool as its device sees it, for compiled and captured graphs: same memory and slots,
        but views whose device is the accelerator. On the CPU: the pool itself.

        Raises:
            ValueError: the device can't reach memory of this kind.
        """
        if self.device.type == "cpu":
            return self
        if self._view is None:
            view = HostPool.__new__(HostPool)
            view.__dict__.update(self.__dict__)
            view._buffers = [
                _with_static_address(device_view(buffer, self.device)) for buffer in self._buffers
            ]
            self._view = view
        return self._view


def _with_static_address(tensor: Tensor) -> Tensor:
    # What torch._dynamo.mark_static_address sets; importing dynamo for it takes a second.
    tensor._dynamo_static_input_type = "unguarded"
    return tensor


def _column(name: str, tensors: Tensor | Sequence[Tensor]) -> list[Tensor]:
    """The tensor of each layer."""
    if isinstance(tensors, Tensor):
        column = list(tensors.unbind(0)) if tensors.dim() > 2 else []
    else:
        column = list(tensors)
    if not column or min(tensor.dim() for tensor in column) < 2:
        raise ValueError(
            f"[DevicePool] plane '{name}' must be a stack [layers, slots, *row], or a tensor "
            "[slots, *row] for each layer."
        )
    return column


def _described(dtype: torch.dtype, device: torch.device, *sizes: int) -> str:
    return f"{list(sizes)} of {dtype} on {device}"


def _shown(ids: Sequence[int]) -> str:
    if len(ids) > 1 and list(ids) == list(range(ids[0], ids[0] + len(ids))):
        return f"{ids[0]} to {ids[-1]}"
    return ", ".join(map(str, ids))
