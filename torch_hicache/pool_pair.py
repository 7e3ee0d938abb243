"""What an engine knows of its two pools: views for some layers, checked indices, holds on slots."""

import operator
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_hicache.layout import PlaneSpec
from torch_hicache.pool import DevicePool, HostPool

# Views are made once for each choice of layers; an engine uses a few choices again and again.
_MAX_GROUPS = 1024

# Of the device pool, of the host pool: slots (or pages) without -1; None where the host can't read them.
Slots = tuple[Tensor | None, Tensor | None]


@dataclass(frozen=True)
class LayerGroup:
    """Layers that move in one submission."""

    layers: tuple[int, ...]
    device_views: list[Tensor]
    host_views: list[Tensor]
    slot_dim: int
    entry_bytes: int  # of one slot or page


class PoolPair:
    """Two pools with the same layers and rows.

    Args:
        unit: what an index addresses, "slot" or "page".
        method: of `transfer_kv`.

    Raises:
        ValueError: pools that no transfer can serve, in the words of `transfer_kv`.
    """

    def __init__(
        self, device_pool: DevicePool, host_pool: HostPool, unit: str, method: str = "auto"
    ) -> None:
        self.device_pool, self.host_pool, self.unit = device_pool, host_pool, unit
        self.pools = (device_pool, host_pool)
        if device_pool.specs != host_pool.specs:
            raise ValueError(
                "[TransferEngine] both pools must have the same planes in the same order, got "
                f"{_shown(device_pool.specs)} (device) and {_shown(host_pool.specs)} (host)."
            )
        if device_pool.layer_ids != host_pool.layer_ids:
            raise ValueError(
                "[TransferEngine] both pools must have the same layers in the same order, got "
                f"{list(device_pool.layer_ids)} (device) and {list(host_pool.layer_ids)} (host)."
            )
        if unit == "page" and device_pool.page_size != host_pool.page_size:
            raise ValueError(
                "[TransferEngine] pools that move by page must have one page size, got "
                f"{device_pool.page_size} (device) and {host_pool.page_size} (host)."
            )
        self.layers = device_pool.layer_ids
        self._position = {layer: i for i, layer in enumerate(self.layers)}
        self._stacked = device_pool.has_stacks and host_pool.has_stacks
        # Slots that are whole pages move by page: an index then stands for many slots.
        self._page_size = device_pool.page_size if unit == "slot" else 1
        if host_pool.page_size != device_pool.page_size:
            self._page_size = 1
        self._groups: dict[tuple[tuple[int, ...], str], LayerGroup] = {}
        self.device_size, self.host_size = (
            pool.num_slots // (pool.page_size if unit == "page" else 1) for pool in self.pools
        )
        self.hazard_sizes = tuple(
            -(-size // self._page_size) for size in (self.device_size, self.host_size)
        )
        self._layer_bytes = {
            layer_unit: [self._entry_bytes(layer, layer_unit) for layer in self.layers]
            for layer_unit in {unit, "page" if self._page_size > 1 else unit}
        }
        # An empty transfer makes all checks that do not depend on the indices.
        everything, nothing = self.all_layers(unit), torch.empty(0, dtype=torch.int64)
        for dst, src in (
            (everything.device_views, everything.host_views),
            (everything.host_views, everything.device_views),
        ):
            torch.ops.hicache.transfer_kv(
                dst, src, nothing, nothing, slot_dim=everything.slot_dim, method=method
            )

    def read_indices(
        self, device_indices: Tensor, host_indices: Tensor
    ) -> tuple[tuple[Tensor, Tensor], Slots, str]:
        """Copies of both, since the caller may overwrite its own at once; what the host knows; and the
        unit of the copies.

        Indices on the device are copied in the order of the caller's stream. Indices on the CPU that name
        whole pages on both sides become page ids.

        Raises:
            ValueError, IndexError: indices that no transfer can take.
        """
        self._check_form(device_indices, "device_indices")
        self._check_form(host_indices, "host_indices")
        if len(device_indices) != len(host_indices):
            raise ValueError(
                "[TransferEngine] device_indices and host_indices must have the same length, got "
                f"{len(device_indices)} and {len(host_indices)}."
            )
        copies = device_indices.to(torch.int64, copy=True), host_indices.to(torch.int64, copy=True)
        slots = (
            self._read(copies[0], "device_indices", self.device_size),
            self._read(copies[1], "host_indices", self.host_size),
        )
        if self._page_size > 1 and len(copies[0]) and all(of_pool is not None for of_pool in slots):
            device_pages, host_pages = (self._whole_pages(indices) for indices in copies)
            if device_pages is not None and host_pages is not None:
                return (device_pages, host_pages), slots, "page"
        return copies, slots, self.unit

    def _whole_pages(self, indices: Tensor) -> Tensor | None:
        """The pages whose slots these are, each whole and in order; None where they are not."""
        if len(indices) % self._page_size:
            return None
        rows = indices.view(-1, self._page_size)
        pages = rows[:, 0] // self._page_size
        whole = pages.unsqueeze(1) * self._page_size + torch.arange(self._page_size)
        return pages if torch.equal(rows, whole) else None

    def hazards_of(self, slots: Slots, unit: str) -> Slots:
        """Pages where slots may move as such, else slots: what `Hazards` of `hazard_sizes` is told."""
        if self._page_size == 1 or unit != self.unit:
            return slots
        device_slots, host_slots = (None if part is None else part // self._page_size for part in slots)
        return device_slots, host_slots

    def hold(self, slots: Slots, unit: str) -> None:
        """In both pools, or in none."""
        device_slots, host_slots = slots
        self._hold(self.device_pool, device_slots, unit)
        try:
            self._hold(self.host_pool, host_slots, unit)
        except BaseException:
            self.release((device_slots, None), unit)
            raise

    def release(self, slots: Slots, unit: str) -> None:
        for pool, of_pool in zip(self.pools, slots, strict=True):
            if of_pool is not None:
                pool.release(of_pool, unit=unit)

    def all_layers(self, unit: str) -> LayerGroup:
        return self._group(self.layers, unit)

    def groups(
        self, layers: Sequence[int] | str, num_entries: int, group_bytes: int, unit: str
    ) -> list[LayerGroup]:
        """The layers in the order given, merged until a submission has `group_bytes`; views by `unit`, of
        which there are `num_entries`.

        Raises:
            ValueError: no layers, a layer that the pools do not have, or one that comes twice.
        """
        if isinstance(layers, str):
            if layers != "all":
                raise ValueError(f"[TransferEngine] layers must be layer ids or 'all', got '{layers}'.")
            layers = self.layers
        try:
            layers = [operator.index(layer) for layer in layers]
        except TypeError:
            raise ValueError(
                f"[TransferEngine] layers must be layer ids or 'all', got {layers!r}."
            ) from None
        if not layers or len(set(layers)) < len(layers):
            raise ValueError(
                f"[TransferEngine] layers must be one or more, once each, got {list(layers)}."
            )
        merged: list[list[int]] = []
        size = group_bytes
        for layer in layers:
            if layer not in self._position:
                raise ValueError(
                    f"[TransferEngine] layers must be among {list(self.layers)}, got {layer}."
                )
            if size >= group_bytes:
                merged.append([])
                size = 0
            merged[-1].append(layer)
            size += self._layer_bytes[unit][self._position[layer]] * num_entries
        return [self._group(tuple(group), unit) for group in merged]

    def _hold(self, pool: DevicePool | HostPool, of_pool: Tensor | None, unit: str) -> None:
        if of_pool is not None:
            pool.hold(of_pool, unit=unit)

    def _check_form(self, indices: Tensor, name: str) -> None:
        if not isinstance(indices, Tensor) or indices.layout != torch.strided:
            raise ValueError(
                f"[TransferEngine] {name} must be a plain tensor, got {type(indices).__name__}"
                f"{f' of layout {indices.layout}' if isinstance(indices, Tensor) else ''}."
            )
        if indices.dtype not in (torch.int32, torch.int64) or indices.dim() != 1:
            raise ValueError(
                f"[TransferEngine] {name} must be 1-D, int32 or int64, got {list(indices.shape)} of "
                f"{str(indices.dtype).removeprefix('torch.')}."
            )
        device = self.device_pool.device
        if indices.device.type != "cpu" and indices.device != device:
            where = "cpu" if device.type == "cpu" else f"cpu or {device}"
            raise ValueError(f"[TransferEngine] {name} must be on {where}, got {indices.device}.")

    def _read(self, indices: Tensor, name: str, size: int) -> Tensor | None:
        """The slots without entries of -1."""
        if indices.device.type != "cpu":
            return None
        if not len(indices):
            return indices
        lowest, highest = (int(value) for value in indices.aminmax())
        if lowest < -1 or highest >= size:
            position = int(((indices < -1) | (indices >= size)).nonzero()[0])
            raise IndexError(
                f"[TransferEngine] {name} must be {self.unit}s from 0 to {size - 1:,} or -1, got "
                f"{int(indices[position]):,} at position {position:,}."
            )
        return indices if lowest >= 0 else indices[indices >= 0]

    def _entry_bytes(self, layer: int, unit: str) -> int:
        return sum(plane[:1].nbytes for plane in self.device_pool.planes(layer, unit))

    def _group(self, layers: tuple[int, ...], unit: str) -> LayerGroup:
        group = self._groups.get((layers, unit))
        if group is None:
            if len(self._groups) >= _MAX_GROUPS:
                self._groups.clear()
            group = self._groups[layers, unit] = self._make_group(layers, unit)
        return group

    def _make_group(self, layers: tuple[int, ...], unit: str) -> LayerGroup:
        first = self._position[layers[0]]
        entry_bytes = sum(self._layer_bytes[unit][self._position[layer]] for layer in layers)
        if self._stacked and layers == self.layers[first : first + len(layers)]:
            device_views, host_views = (
                [stack.narrow(0, first, len(layers)) for stack in pool.stacks(unit)]
                for pool in self.pools
            )
            return LayerGroup(layers, device_views, host_views, 1, entry_bytes)
        device_views, host_views = (
            [plane for layer in layers for plane in pool.planes(layer, unit)] for pool in self.pools
        )
        return LayerGroup(layers, device_views, host_views, 0, entry_bytes)


def _shown(specs: Sequence[PlaneSpec]) -> str:
    return ", ".join(
        f"'{spec.name}' {list(spec.row_shape)} {str(spec.dtype).removeprefix('torch.')}" for spec in specs
    )
