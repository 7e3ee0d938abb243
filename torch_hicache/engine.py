"""TransferEngine: loads and stores between two pools that run beside the computation.

    caller's stream  --- produces slots ---o----------------------------o--- reads layer 0 --- ...
                                           | event                      | event of layer 0
    store stream                           o--- device -> host          |
    load stream        ---- waits for the hazards ---- layer 0 ---------o--- layer 1 --- ...

One stream for each direction. Order between streams is made by events only: the host never waits for the
device but where the caller asks for it. docs/design.md has the rules.
"""

import atexit
import contextlib
import itertools
import os
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor

from torch_hicache.error_scope import ErrorScope
from torch_hicache.hazards import Hazards
from torch_hicache.in_flight import DIRECTIONS, InFlight
from torch_hicache.plan import use_stored_method_table
from torch_hicache.pool import DevicePool, HostPool
from torch_hicache.pool_pair import PoolPair, Slots
from torch_hicache.streams import LayerEvent, Runtime, runtime_for
from torch_hicache.ticket import Ticket, check_process

# By handle, for torch.ops.hicache.wait_layer and for the end of the process.
_engines: "weakref.WeakValueDictionary[int, TransferEngine]" = weakref.WeakValueDictionary()
_handles = itertools.count(1)


class TransferEngine:
    """Moves slots between a device pool and a host pool, asynchronously. Several threads may use it.

    Args:
        device_pool, host_pool: pools with the same layers and planes. The engine keeps them alive.
        unit: what indices address, "slot" or "page"; by default slots where both pools can, else pages.
        on_full: what a call does when the queue is full: "block" until there is room, or "raise".
        max_in_flight: the most tickets in flight, of both directions together.
        max_in_flight_bytes: the most bytes; None for any number. A larger transfer runs alone.
        method: of `transfer_kv`, for every transfer. "auto" on CUDA decides by the table that `hicache
            calibrate` stored, if there is one and `set_method_table` has set none.
        group_bytes: layers that are asked for by name move in groups of at least so many bytes.
        runtime: where streams and events come from; that of the device pool's device without one.

    Attributes:
        handle: the engine's number, for `torch.ops.hicache.wait_layer`.

    One engine for a pair of pools: transfers of two engines know nothing of each other's slots.

    Raises:
        ValueError: pools that do not fit together, or a bad option, or a method that can't serve them.
    """

    def __init__(
        self,
        device_pool: DevicePool,
        host_pool: HostPool,
        *,
        unit: str | None = None,
        method: str = "auto",
        on_full: str = "block",
        max_in_flight: int = 256,
        max_in_flight_bytes: int | None = None,
        group_bytes: int = 4 << 20,
        runtime: Runtime | None = None,
    ) -> None:
        if not isinstance(device_pool, DevicePool) or not isinstance(host_pool, HostPool):
            raise ValueError(
                "[TransferEngine] device_pool must be a DevicePool and host_pool a HostPool, got "
                f"{type(device_pool).__name__} and {type(host_pool).__name__}."
            )
        if unit is None:
            unit = "slot" if device_pool.has_slots and host_pool.has_slots else "page"
        if on_full not in ("block", "raise"):
            raise ValueError(f"[TransferEngine] on_full must be 'block' or 'raise', got '{on_full}'.")
        limits = {"max_in_flight": max_in_flight, "group_bytes": group_bytes}
        if max_in_flight_bytes is not None:
            limits["max_in_flight_bytes"] = max_in_flight_bytes
        for name, value in limits.items():
            if value < 1:
                raise ValueError(f"[TransferEngine] {name} must be 1 or more, got {value}.")
        self._pair = PoolPair(device_pool, host_pool, unit, method)
        self._method = method
        self._group_bytes = group_bytes
        device = device_pool.device
        if device.type == "cuda":
            use_stored_method_table(device)
        self._on_device = None if device.type == "cpu" else torch.empty(0, device=device)
        self._runtime: Runtime = runtime_for(device) if runtime is None else runtime
        self._streams = {name: self._runtime.new_stream(f"hicache-{name}") for name in DIRECTIONS}
        self._in_flight = InFlight(max_in_flight, max_in_flight_bytes, blocks=on_full == "block")
        self._submitting = threading.Lock()  # order of submissions; all below belongs to it
        self._hazards = Hazards(DIRECTIONS, self._pair.hazard_sizes)
        self._numbers = itertools.count(1)
        self._layer_events: dict[int, LayerEvent] = {}
        self._newest_load: dict[int, int] = {}  # of each layer: the number of its ticket
        # Failed loads that have ended: their layers are not ready.
        self._failed_loads: deque[Ticket] = deque(maxlen=max_in_flight)
        self._process = os.getpid()
        self.handle = next(_handles)
        _engines[self.handle] = self

    # --- Transfers ------------------------------------------------------------------------------

    def load(
        self, host_indices: Tensor, device_indices: Tensor, layers: Sequence[int] | str | None = None
    ) -> Ticket:
        """Move slots from the host pool to the device pool. Returns at once; see `store`."""
        return self._submit("load", device_indices, host_indices, layers)

    def store(
        self, device_indices: Tensor, host_indices: Tensor, layers: Sequence[int] | str | None = None
    ) -> Ticket:
        """Move slots from the device pool to the host pool. Returns at once.

        Args:
            device_indices, host_indices: 1-D, int32 or int64, of one length, on the CPU or on the device;
                -1 skips an entry. They may be overwritten or freed as soon as the call has returned.
            layers: None moves all layers in one submission; they are ready together. A list of layer
                ids moves these, in this order, and each can be waited for: `Ticket.wait_layer`. "all"
                names all.

        Streams: the transfer waits for the work that the caller's current stream has at the time of
        the call, which produced the slots or still reads them, and for transfers of the other direction
        in flight that share a slot. Indices on the device count as all slots there, since the host can't
        read them. Work that comes later and writes slots a store reads, or reads slots a load writes,
        must wait for the ticket. A big transfer is submitted by a thread after the call has returned: the
        ticket's methods know of it at once, `torch.cuda.synchronize()` may not.

        Lifetime: slots named by indices on the CPU are held until the device has finished: if they are
        freed meanwhile, the pool hands them out no earlier. Slots named by indices on the device must not
        be freed before the ticket is done.

        Raises, before anything is submitted:
            ValueError, IndexError: bad indices or layers; for indices on the CPU every value is checked.
            RuntimeError: the queue is full and on_full is "raise"; the engine is closed, or belongs to
                the parent of this process; the current stream is capturing.
        Later errors are the ticket's, also of a submission that the device refused.
        """
        return self._submit("store", device_indices, host_indices, layers)

    def _submit(
        self,
        direction: str,
        device_indices: Tensor,
        host_indices: Tensor,
        layers: Sequence[int] | str | None,
    ) -> Ticket:
        self._check_process()
        if self._runtime.is_capturing():
            raise RuntimeError(
                f"[TransferEngine] a {direction} can't be captured. Capture transfer_kv itself, or "
                "torch.ops.hicache.wait_layer for loads that run beside the graph."
            )
        indices, slots, unit = self._pair.read_indices(device_indices, host_indices)
        if layers is None:
            groups = [self._pair.all_layers(unit)]
        else:
            groups = self._pair.groups(layers, len(indices[0]), self._group_bytes, unit)
        nbytes = len(indices[0]) * sum(group.entry_bytes for group in groups)
        # Slots that move as whole pages are held as such: a pool holds pages anyway.
        held = slots if unit == self._pair.unit else indices
        self._pair.hold(held, unit)
        has_room = False
        ticket = None
        try:
            self._in_flight.reserve(direction, nbytes)
            has_room = True
            host_reads_all = all(of_pool is not None for of_pool in slots)
            errors = ErrorScope(None if host_reads_all else self._on_device)
            ticket = Ticket(direction, groups, indices, self._runtime, errors, method=self._method)
            ticket.num_entries = len(device_indices)
            ticket._on_finish = partial(self._finish, held, unit)
            with self._submitting:
                self._send(ticket, self._pair.hazards_of(held, unit))
        except BaseException:
            if ticket is None or not ticket._is_sent:  # whose end would give both back
                if has_room:
                    self._in_flight.remove(direction, nbytes)
                self._pair.release(held, unit)
            raise
        if direction == "load" and self._layer_events:
            self._streams["load"].flush()  # a graph that is replayed next waits for the newest record
        if ticket.error is not None and not isinstance(ticket.error, Exception):
            raise ticket.error  # an interrupt of this thread is no matter of the ticket alone
        return ticket

    def _send(self, ticket: Ticket, touched: Slots) -> None:
        """Submit. Whatever fails on the way, what was submitted has an event and a watcher at the end."""
        stream = self._streams[ticket.direction]
        ticket.number = next(self._numbers)
        conflicts = self._hazards.conflicts(ticket.direction, touched)
        self._hazards.add(ticket.direction, touched, ticket.number)
        if ticket.direction == "load":
            self._newest_load |= dict.fromkeys(ticket.layers, ticket.number)
        events = ticket._events
        ticket._is_sent = True
        try:
            waits = [self._runtime.record_current()]
            for other, number in conflicts.items():
                earlier = self._in_flight.ticket(other, number)
                if earlier is not None:
                    waits.append(earlier._events[-1])
            stream.begin(ticket.nbytes, waits)
            for position, group in enumerate(ticket._groups):
                stream.run(partial(ticket._move, position))
                events.append(stream.record())
                self._record_layers(ticket.direction, group.layers)
        except BaseException as error:
            ticket._fail(len(events), error)
        try:
            while len(events) < len(ticket._groups):
                events.append(stream.record())
            self._in_flight.add(ticket)
            stream.when_done(events[-1], ticket._finish)
        except BaseException as error:  # the device has failed: there is nothing to wait for
            ticket._finish(error)
            raise

    def _finish(self, held: Slots, unit: str, ticket: Ticket) -> None:
        try:
            self._pair.release(held, unit)
        finally:
            if ticket.direction == "load" and ticket.error is not None and not ticket.cancelled:
                self._failed_loads.append(ticket)
            self._in_flight.remove(ticket.direction, ticket.nbytes, ticket)

    # --- torch.ops.hicache.wait_layer -----------------------------------------------------------

    def _wait_layer(self, layer: int) -> None:
        """Let the caller's current stream wait for the newest load of a layer; see layer_wait.py."""
        self._check_process()
        if layer not in self._pair.layers:
            raise ValueError(
                f"[wait_layer] layer must be one of the engine's, {list(self._pair.layers)}, got {layer}."
            )
        if self._runtime.is_capturing():
            self._layer_event(layer).current_wait()
            return
        loads = [ticket for ticket in self._in_flight.newest_first("load") if ticket._has(layer)]
        if loads:  # one stream: the older ones come first
            self._runtime.current_wait(loads[0]._event_of(layer))
        newest = self._newest_load.get(layer)
        for ticket in (*loads, *self._failed_loads.copy()):
            error = ticket._error_for_layer(layer, is_newest=ticket.number == newest)
            if error is not None:
                raise error

    def _layer_event(self, layer: int) -> LayerEvent:
        with self._submitting:
            event = self._layer_events.get(layer)
            if event is None:
                event = self._runtime.new_layer_event()
                if event is None:
                    raise RuntimeError(
                        f"[wait_layer] a wait can't be captured on {self._pair.device_pool.device}: this "
                        "torch has no external events there. Wait before the capture."
                    )
                # Behind all that was submitted. A wait for an event without a record would be no wait.
                self._streams["load"].begin(0, ())
                event.record(self._streams["load"])
                self._streams["load"].flush()
                self._layer_events[layer] = event
        return event

    def _record_layers(self, direction: str, layers: Sequence[int]) -> None:
        """For graphs that have captured a wait; others cost nothing."""
        if direction == "load" and self._layer_events:
            for layer in layers:
                if layer in self._layer_events:
                    self._layer_events[layer].record(self._streams["load"])

    # --- State ----------------------------------------------------------------------------------

    def stats(self) -> dict[str, dict[str, Any]]:
        """For "load" and "store" each, since the engine was made:

        transfers, bytes: what has moved whole; entries of -1 count.
        busy_seconds, gb_per_s: time with a ticket in flight, as the host saw it; bytes in that time.
        queue_depth: calls that wait for room.
        in_flight, in_flight_bytes: tickets that have not ended.
        errors, cancelled: tickets that ended so.
        """
        self._check_process()
        return self._in_flight.stats()

    def close(self) -> None:
        """Take no more transfers and wait for those in flight; calls that wait for room raise. A second
        call does nothing. In a child of the process that made the engine, it does nothing at all.
        """
        if os.getpid() != self._process:
            return
        self._in_flight.close()
        for stream in self._streams.values():
            stream.close()

    def __enter__(self) -> "TransferEngine":
        return self

    def __exit__(
        self,
        _kind: type[BaseException] | None,
        _error: BaseException | None,
        _trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check_process(self) -> None:
        check_process(self._process)


def find_engine(handle: int) -> TransferEngine | None:
    """The engine of a handle, while it is alive."""
    return _engines.get(handle)


@atexit.register
def _close_engines() -> None:
    """Before the interpreter goes: a thread inside a transfer must not outlive it."""
    for engine in list(_engines.values()):
        with contextlib.suppress(Exception):
            engine.close()
