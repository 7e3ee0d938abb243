"""The views of a device pool and a host pool that one transfer of some layers takes."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torch_hicache.pool import DevicePool, HostPool

# Views are made once for each choice of layers; an engine uses a few choices again and again.
_MAX_GROUPS = 1024


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

    Raises:
        ValueError: pools that no transfer can serve, in the words of `transfer_kv`.
    """

    def __init__(self, device_pool: DevicePool, host_pool: HostPool, unit: str) -> None:
        self.device_pool, self.host_pool, self.unit = device_pool, host_pool, unit
        self.pools = (device_pool, host_pool)
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
        self._groups: dict[tuple[int, ...], LayerGroup] = {}
        self.device_size, self.host_size = (
            pool.num_slots // (pool.page_size if unit == "page" else 1) for pool in self.pools
        )
        self._layer_bytes = [self._entry_bytes(layer) for layer in self.layers]
        # An empty transfer makes all checks that do not depend on the indices.
        everything, nothing = self._group(self.layers), torch.empty(0, dtype=torch.int64)
        for dst, src in (
            (everything.device_views, everything.host_views),
            (everything.host_views, everything.device_views),
        ):
            torch.ops.hicache.transfer_kv(dst, src, nothing, nothing, slot_dim=everything.slot_dim)

    def all_layers(self) -> LayerGroup:
        return self._group(self.layers)

    def groups(self, layers: Sequence[int] | str, num_entries: int, group_bytes: int) -> list[LayerGroup]:
        """The layers in the order given, merged until a submission has `group_bytes`.

        Raises:
            ValueError: no layers, a layer that the pools do not have, or one that comes twice.
        """
        if isinstance(layers, str):
            if layers != "all":
                raise ValueError(f"[TransferEngine] layers must be layer ids or 'all', got '{layers}'.")
            layers = self.layers
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
            size += self._layer_bytes[self._position[layer]] * num_entries
        return [self._group(tuple(group)) for group in merged]

    def _entry_bytes(self, layer: int) -> int:
        return sum(plane[:1].nbytes for plane in self.device_pool.planes(layer, self.unit))

    def _group(self, layers: tuple[int, ...]) -> LayerGroup:
        group = self._groups.get(layers)
        if group is None:
            if len(self._groups) >= _MAX_GROUPS:
                self._groups.clear()
            group = self._groups[layers] = self._make_group(layers)
        return group

    def _make_group(self, layers: tuple[int, ...]) -> LayerGroup:
        first = self._position[layers[0]]
        entry_bytes = sum(self._layer_bytes[self._position[layer]] for layer in layers)
        if self._stacked and layers == self.layers[first : first + len(layers)]:
            device_views, host_views = (
                [stack.narrow(0, first, len(layers)) for stack in pool.stacks(self.unit)]
                for pool in self.pools
            )
            return LayerGroup(layers, device_views, host_views, 1, entry_bytes)
        device_views, host_views = (
            [plane for layer in layers for plane in pool.planes(layer, self.unit)] for pool in self.pools
        )
        return LayerGroup(layers, device_views, host_views, 0, entry_bytes)
