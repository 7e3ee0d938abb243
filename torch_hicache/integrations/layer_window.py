"""Layers of K and V that live in a host pool, with two of them at a time on the device.

    host pool       [layer 0][layer 1][layer 2][layer 3] ...   every token of every layer
                         |  ^ store: the new tokens, after each update
              load ahead v  |
    device window   [   A   ][   B   ]   the layer that is read, and the next one on its way

Layers take turns in the window: 0, 2, 4 ... in A and 1, 3, 5 ... in B. The last of an odd number has a
part of its own, since layer 0 follows it. Nothing here knows who reads the layers.

To the pools the layers are ranges of slots, so that one part of the window serves many layers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from torch_hicache._backends import empty_on
from torch_hicache.engine import TransferEngine
from torch_hicache.layout import PlaneSpec
from torch_hicache.pool import DevicePool, HostPool
from torch_hicache.slot_allocator import SlotAllocator
from torch_hicache.ticket import Ticket

# Host slots that a sequence reserves at once: its tokens then lie in runs, not one by one between
# those of the other sequences.
_RUN = 64


class LayerWindow:
    """K and V of a batch of sequences, appended to and read layer after layer, round and round.

    Each sequence has a row in a table of host slots, one for each of its tokens. Reordering sequences is
    a change of the table; rows may share slots, as what is stored is never written again.

    Args:
        name: who speaks in the errors.
        layers: layer ids, in the order of their updates. Another order is right too, but loads late.
        max_tokens: of all sequences together, in each layer.
        device: of K and V; that of the first update without one.

    Raises:
        ValueError: no layers, a layer twice, or max_tokens below 1.

    Streams: the caller's current stream is the one that computes K and V and reads what `update` gives.
    """

    def __init__(
        self, name: str, layers: Sequence[int], max_tokens: int, device: torch.device | str | None = None
    ) -> None:
        if not isinstance(max_tokens, int) or isinstance(max_tokens, bool) or max_tokens < 1:
            raise ValueError(f"[{name}] max_tokens must be an integer of 1 or more, got {max_tokens!r}.")
        self._name = name
        self._layers = tuple(layers)
        if not self._layers or len(set(self._layers)) < len(self._layers):
            raise ValueError(
                f"[{name}] layers must be one or more, and each must come once, got {list(layers)}."
            )
        self._index_of = {layer: i for i, layer in enumerate(self._layers)}
        self._next = dict(zip(self._layers, (*self._layers[1:], self._layers[0]), strict=True))
        self._part_of = {layer: i % 2 for layer, i in self._index_of.items()}
        if len(self._layers) % 2:
            self._part_of[self._layers[-1]] = min(2, len(self._layers) - 1)
        self._num_parts = max(self._part_of.values()) + 1
        self._max_tokens = max_tokens
        self._device = None if device is None else empty_on(device, caller=name).device
        self._specs: tuple[PlaneSpec, ...] = ()
        self._host_pool: HostPool | None = None
        with torch.inference_mode(False):  # whose tensors could not be written outside of it
            self._slots = SlotAllocator(max_tokens)  # of one layer; they are the same in every layer
        self._table = torch.empty((0, 0), dtype=torch.int64)  # [sequences, tokens] slots
        self._spare = self._table  # [sequences, slots] reserved for tokens to come
        self._lengths = dict.fromkeys(self._layers, 0)
        self._stores: dict[int, Ticket] = {}  # of each layer the newest
        self._engine: TransferEngine | None = None
        self._device_pool: DevicePool | None = None
        self._window_slots = 0  # of a part
        self._forget_window()

    @property
    def num_sequences(self) -> int:
        return len(self._table)

    @property
    def host_bytes(self) -> int:
        return 0 if self._host_pool is None else self._host_pool.nbytes

    @property
    def device_bytes(self) -> int:
        return 0 if self._device_pool is None else self._device_pool.nbytes

    def length(self, layer: int) -> int:
        """Tokens of each sequence."""
        return self._lengths[layer]

    def prepare(self, keys: Tensor, values: Tensor) -> HostPool:
        """The host pool for K and V like these, `[sequences, heads, tokens, width]`; made once.

        Raises:
            ValueError, MemoryError: as `HostPool`.
        """
        self._check(keys, values)
        if self._host_pool is None:
            specs = _specs(keys, values)
            with torch.inference_mode(False):
                num_slots = len(self._layers) * self._max_tokens
                self._host_pool = HostPool(specs, 1, num_slots, device=keys.device)
            self._device, self._specs = keys.device, specs
        return self._host_pool

    def update(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Append tokens to a layer; all its tokens so far.

        Args:
            keys, values: `[sequences, heads, tokens, width]`.

        Returns:
            K and V with all tokens: views of the window, on the device. They hold until the next layer
            but one is updated.

        Raises:
            ValueError: tensors unlike those before, or that need a gradient.
            MemoryError: more than `max_tokens`. Nothing has changed then.
            The error of an earlier load or store of the layer.
        """
        pool = self.prepare(keys, values)
        batch, new = keys.shape[0], keys.shape[2]
        start = self._lengths[layer]
        end = start + new
        engine = self._reserve(pool, batch, end)
        part = self._part_of[layer]
        self._load(engine, layer)
        waits = (self._loads.get(part), self._part_stores.get(part), self._stores.get(layer))
        for ticket in waits:
            if ticket is not None:
                ticket.wait_stream()
        planes = self._planes(part)
        for plane, rows in zip(planes, (keys, values), strict=True):
            plane[:, start:end].copy_(rows.transpose(1, 2))
        if batch * new:
            self._stores[layer] = self._part_stores[part] = engine.store(
                self._device_slots(part, start, end), self._host_slots(layer, start, end)
            )
        self._lengths[layer] = end
        self._load(engine, self._next[layer])
        all_keys, all_values = (plane[:, :end].transpose(1, 2) for plane in planes)
        return all_keys, all_values

    def select(self, rows: Tensor) -> None:
        """Let sequence i be what sequence `rows[i]` was; moves nothing.

        Without sequences there is nothing to select from, and nothing happens. To select none is `clear`.

        Raises:
            MemoryError: more than `max_tokens`. Nothing has changed then.
        """
        if not len(self._table):
            return
        if not len(rows):
            self.clear()
            return
        table = self._table[rows.to("cpu", torch.int64)]
        if table.shape == self._table.shape and torch.equal(table, self._table):
            return
        self._check_room(len(table), table.shape[1])
        if len(table) != len(self._table):
            self._free(self._spare)
            self._spare = torch.empty((len(table), 0), dtype=torch.int64)
        self._replace_table(table)
        self._in_part.clear()

    def crop(self, tokens: int) -> None:
        """Drop the last tokens of every sequence, at most all."""
        self._lengths = {layer: max(0, length - tokens) for layer, length in self._lengths.items()}
        self._replace_table(self._table[:, : max(self._lengths.values())])

    def clear(self) -> None:
        """Drop all sequences, and the errors of their loads and stores. The pools stay.

        Waits for the transfers in flight.
        """
        for ticket in {*self._loads.values(), *self._stores.values(), *self._part_stores.values()}:
            _give_up(ticket)
        for of_sequences in (self._loads, self._stores, self._part_stores, self._in_part):
            of_sequences.clear()
        self._lengths = dict.fromkeys(self._layers, 0)
        self._free(self._table)
        self._free(self._spare)
        self._table = self._spare = torch.empty((0, 0), dtype=torch.int64)

    def evict(self) -> None:
        """Give the device memory back; all tokens are in the host pool. The next update loads from there.

        Waits for the transfers in flight.

        Raises:
            The error of a store. Nothing is given back then.
        """
        if self._engine is None:
            return
        for ticket in self._stores.values():
            ticket.wait()
        self._engine.close()
        self._engine = self._device_pool = None
        self._window_slots = 0
        self._forget_window()

    # --- Checks ---------------------------------------------------------------------------------

    def _check(self, keys: Tensor, values: Tensor) -> None:
        if keys.dim() != 4 or values.dim() != 4 or keys.shape[:3] != values.shape[:3]:
            raise ValueError(
                f"[{self._name}] K and V must be [sequences, heads, tokens, width], alike but for the "
                f"width, got {list(keys.shape)} and {list(values.shape)}."
            )
        if torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad):
            raise ValueError(
                f"[{self._name}] K and V can't carry a gradient through the host pool. Run the model "
                "under torch.no_grad() or torch.inference_mode()."
            )
        if not keys.shape[0]:
            raise ValueError(f"[{self._name}] K and V must be of one sequence or more, got none.")
        if self._device is not None and (keys.device != self._device or values.device != self._device):
            raise ValueError(
                f"[{self._name}] K and V of all layers must be on {self._device}, got {keys.device} and "
                f"{values.device}."
            )
        if self._specs and self._specs != _specs(keys, values):
            raise ValueError(
                f"[{self._name}] all layers must have the same heads, widths and dtypes, "
                f"{_shown(self._specs)}, got {_shown(_specs(keys, values))}."
            )
        if len(self._table) not in (0, keys.shape[0]):
            raise ValueError(
                f"[{self._name}] the cache holds {len(self._table)} sequences, got {keys.shape[0]}. "
                "Use another cache, or reset this one."
            )

    def _check_room(self, batch: int, tokens: int) -> None:
        if batch * tokens > self._max_tokens:
            raise MemoryError(
                f"[{self._name}] max_tokens must hold all sequences: {batch} of {tokens:,} tokens need "
                f"{batch * tokens:,}, got {self._max_tokens:,}."
            )

    # --- Slots ----------------------------------------------------------------------------------

    def _reserve(self, pool: HostPool, batch: int, tokens: int) -> TransferEngine:
        """Host slots for so many tokens of each sequence, and a window that holds a layer of them."""
        self._check_room(batch, tokens)
        if self._engine is None or batch * tokens > self._window_slots:
            self.evict()
            # Twice as many as now, so that growing stays rare.
            self._engine = self._open(pool, min(self._max_tokens, max(1, 2 * batch * tokens)))
        if len(self._table) != batch:
            self._table = self._spare = torch.empty((batch, 0), dtype=torch.int64)
        missing = tokens - self._table.shape[1]
        if missing > self._spare.shape[1]:
            more = self._allocate(missing - self._spare.shape[1])
            self._spare = torch.cat([self._spare, more], 1)
        if missing > 0:
            self._table = torch.cat([self._table, self._spare[:, :missing]], 1)
            self._spare = self._spare[:, missing:]
        return self._engine

    def _allocate(self, least: int) -> Tensor:
        """`[sequences, slots]`: `least` slots for each sequence, in long runs while there is room."""
        batch = len(self._table)
        each = max(least, min(_RUN, self._slots.available // batch))
        return self._slots.allocate(batch * each).view(batch, each)

    def _replace_table(self, table: Tensor) -> None:
        before = self._table.unique()
        self._free(before[~torch.isin(before, table.flatten())])
        self._table = table

    def _free(self, slots: Tensor) -> None:
        # Transfers may still use them. Who stores there next waits for these: a hazard of the engine's.
        self._slots.free(slots.unique())

    def _host_slots(self, layer: int, start: int, end: int) -> Tensor:
        """Of tokens `start` to `end` of each sequence."""
        return self._table[:, start:end].flatten() + self._index_of[layer] * self._max_tokens

    def _device_slots(self, part: int, start: int, end: int) -> Tensor:
        """The same in the window, where the tokens of a sequence lie together."""
        batch = len(self._table)
        first = part * self._window_slots + torch.arange(batch) * (self._window_slots // batch)
        return (first.unsqueeze(1) + torch.arange(start, end)).flatten()

    def _planes(self, part: int) -> list[Tensor]:
        """K and V of a part of the window, `[sequences, room, heads, width]`."""
        batch = len(self._table)
        room = self._window_slots // max(1, batch)
        pool = self._device_pool
        return [
            plane.narrow(0, part * self._window_slots, batch * room).unflatten(0, (batch, room))
            for plane in (pool.planes(0) if pool is not None else ())
        ]

    # --- The window -----------------------------------------------------------------------------

    def _open(self, pool: HostPool, slots: int) -> TransferEngine:
        with torch.inference_mode(False):
            device_pool = DevicePool(self._specs, 1, self._num_parts * slots, pool.device)
            engine = TransferEngine(device_pool, pool)
        self._device_pool, self._window_slots = device_pool, slots
        return engine

    def _forget_window(self) -> None:
        self._in_part: dict[int, int] = {}  # the layer that each part holds, or will after its load
        self._loads: dict[int, Ticket] = {}  # into each part, the newest
        self._part_stores: dict[int, Ticket] = {}  # out of each part, the newest
        self._stray_loads: set[int] = set()  # parts whose newest load was interrupted

    def _load(self, engine: TransferEngine, layer: int) -> None:
        """Start to bring a layer into its part of the window, unless it is there or on its way.

        The load waits for what the current stream has so far, so for those who read the part's layer
        of now, and for the stores of the slots that it reads.
        """
        part = self._part_of[layer]
        if self._in_part.get(part) == layer:
            return
        # A load that is interrupted may run on, and nobody has its ticket: nothing is known of the part
        # then. The next load ends after it, also one of no tokens.
        self._in_part.pop(part, None)
        end = self._lengths[layer]
        if end or part in self._stray_loads:
            self._stray_loads.add(part)
            self._loads[part] = engine.load(
                self._host_slots(layer, 0, end), self._device_slots(part, 0, end)
            )
            self._stray_loads.remove(part)
        self._in_part[part] = layer


def _give_up(ticket: Ticket) -> None:
    """Wait for its end; its error concerns nobody any more."""
    try:
        ticket.wait()
    except BaseException as error:
        if error is not ticket.error:
            raise
        ticket.cancel()


def _specs(keys: Tensor, values: Tensor) -> tuple[PlaneSpec, ...]:
    return tuple(
        PlaneSpec(name, (rows.shape[1], rows.shape[3]), rows.dtype)
        for name, rows in (("k", keys), ("v", values))
    )


def _shown(specs: Sequence[PlaneSpec]) -> str:
    return " and ".join(
        f"{spec.name.upper()} {list(spec.row_shape)} {str(spec.dtype).removeprefix('torch.')}"
        for spec in specs
    )
