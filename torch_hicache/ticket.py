"""The ticket of one transfer: what the caller waits for, and what keeps the buffers until it is done."""

import os
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_hicache.error_scope import ErrorScope
from torch_hicache.pool_pair import LayerGroup
from torch_hicache.streams import Runtime


def check_process(owner: int) -> None:
    """RuntimeError in a child of the process that owns an engine: it has no threads there."""
    if os.getpid() != owner:
        raise RuntimeError(
            f"[TransferEngine] an engine must be used in the process that made it, {owner}, got "
            f"{os.getpid()}: make a new one after the fork."
        )


class TransferCancelled(RuntimeError):
    """The error of a ticket, part of which was dropped by `cancel`."""


class Ticket:
    """One load or store of a TransferEngine. Its methods are safe to use from several threads.

    Attributes:
        direction: "load" or "store".
        layers: the layer ids that move.
        num_entries, nbytes: what moves, entries of -1 counted too.
    """

    def __init__(
        self,
        direction: str,
        groups: Sequence[LayerGroup],
        indices: tuple[Tensor, Tensor],  # of the device pool, of the host pool
        runtime: Runtime,
        errors: ErrorScope,
        *,
        method: str,
    ) -> None:
        self.direction = direction
        self.number = 0  # in the order of submission; from the engine
        self.layers = tuple(layer for group in groups for layer in group.layers)
        self.num_entries = len(indices[0])
        self.nbytes = self.num_entries * sum(group.entry_bytes for group in groups)
        self._groups, self._num_groups = groups, len(groups)
        self._group_of = {layer: i for i, group in enumerate(groups) for layer in group.layers}
        self._indices: tuple[Tensor, Tensor] | None = indices
        self._runtime = runtime
        self._errors = errors
        self._method = method
        self._process = os.getpid()
        self._on_finish: Callable[[Ticket], None] | None = None
        self._events: list[Any] = []  # one for each group, recorded by the engine
        self._is_sent = False  # from here on its end gives back what it holds
        self._started = 0  # groups
        self._failed_group: int | None = None
        self._error: BaseException | None = None
        self._cancelled = False
        self._finishing = False
        self._finished = threading.Event()
        self._lock = threading.Lock()
        self._told = False  # the error has been raised to someone who waited for the ticket
        self._told_layers: set[int] = set()  # and to whom, by wait_layer
        self._given_up = False

    def __repr__(self) -> str:
        state = "running"
        if self._finished.is_set():
            state = "done" if self._error is None else f"failed: {self._error}"
        return f"Ticket({self.direction} {self.number}, {self.nbytes:,} bytes, {state})"

    # --- For the caller -------------------------------------------------------------------------

    @property
    def error(self) -> BaseException | None:
        """What went wrong, as far as it is known; None is final only once `done()` is True."""
        return self._error

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` dropped a part of it."""
        return self._cancelled

    def done(self) -> bool:
        """Whether nothing of it runs any more: all has moved, or `error` says why not. Never blocks."""
        check_process(self._process)
        return self._finished.is_set() or self._ends(lambda event: event.query())

    def wait(self, timeout: float | None = None) -> None:
        """Block the host until `done()`. No lock of the engine or of the interpreter is held meanwhile.

        Args:
            timeout: seconds; None waits for ever.

        Raises:
            TimeoutError: it still runs; it goes on, and may be waited for again.
            The ticket's error: see `error`.
        """
        check_process(self._process)
        if not self._finished.is_set() and not self._ends(lambda event: event.wait(timeout)):
            raise TimeoutError(f"[Ticket] {self.direction} must end within {timeout} s, it still runs.")
        self._raise(self._error)

    def wait_stream(self) -> None:
        """Let the caller's current stream wait until all has moved. The host waits until all has been
        submitted, milliseconds after the call that gave a big ticket; on the CPU it is the stream, and
        waits for the end.

        Raises:
            The ticket's error, if it is known by now; the stream waits all the same, so that the buffers
            may be used for something else.
            RuntimeError: the current stream is capturing.
        """
        self._order_current(len(self._events) - 1)

    def wait_layer(self, layer: int) -> None:
        """The same for one layer of those that the ticket has.

        Raises:
            ValueError: the ticket does not have this layer.
            The ticket's error, for the layer in which it happened and those behind it.
            RuntimeError: the current stream is capturing; `torch.ops.hicache.wait_layer` serves graphs.
        """
        if layer not in self._group_of:
            raise ValueError(
                f"[Ticket] layer must be one of the ticket's, {list(self.layers)}, got {layer}."
            )
        self._order_current(self._group_of[layer])

    def cancel(self) -> bool:
        """Drop what has not been submitted to the device yet; whether there was any.

        What runs goes on, and keeps its slots and buffers until the device has finished. If something was
        dropped, `error` is a TransferCancelled, and layers that were dropped are never ready. On an
        accelerator a small transfer has been submitted by the call that gave the ticket: nothing of it
        can be dropped.
        A failed ticket is given up: `torch.ops.hicache.wait_layer` no longer raises its error.
        """
        check_process(self._process)
        with self._lock:
            self._told = self._given_up = True
            if self._started == self._num_groups or self._failed_group is not None:
                return False
            self._cancelled = True
            error = TransferCancelled(f"[Ticket] this {self.direction} was cancelled.")
            self._fail_from(self._started, error)
        return True

    def _ends(self, has_ended: Callable[[Any], bool]) -> bool:
        """Ask the last event; this thread then does what the watching thread would do a little later."""
        failure = None
        try:
            if not has_ended(self._events[-1]):
                return False
        except RuntimeError as error:  # the device has failed
            failure = error
        self._finish(failure)
        return True

    def _order_current(self, group: int) -> None:
        check_process(self._process)
        if self._runtime.is_capturing():
            raise RuntimeError(
                "[Ticket] a ticket's wait can't be captured, it would name this one transfer for ever: "
                "wait before the capture, or use torch.ops.hicache.wait_layer in the graph."
            )
        self._runtime.current_wait(self._events[group])
        self._raise(self._error_at(group))

    def _error_at(self, group: int) -> BaseException | None:
        """The error that keeps a group of layers from being ready."""
        if self._failed_group is None:
            bad_index = self._errors.check()
            if bad_index is not None:  # the entry was skipped in every layer
                self._fail(0, bad_index)
        return self._error if self._failed_group is not None and self._failed_group <= group else None

    def _raise(self, error: BaseException | None) -> None:
        if error is None:
            return
        self._told = True
        raise error

    # --- For the engine -------------------------------------------------------------------------

    def _has(self, layer: int) -> bool:
        return layer in self._group_of

    def _event_of(self, layer: int) -> Any:
        return self._events[self._group_of[layer]]

    def _error_for_layer(self, layer: int, *, is_newest: bool) -> BaseException | None:
        """The error that keeps a layer from being ready, for `torch.ops.hicache.wait_layer`.

        Of the newest load of the layer: always, until `cancel` gives the ticket up. Of an older one,
        which another load has followed: once, and only if nobody has been told yet.
        """
        if layer not in self._group_of or self._given_up:
            return None
        if not is_newest and (self._told or layer in self._told_layers):
            return None
        error = self._error_at(self._group_of[layer])
        if error is not None:
            self._told_layers.add(layer)
        return error

    def _move(self, position: int) -> None:
        """Move one group, on its stream, unless an earlier one failed or the rest was cancelled."""
        with self._lock:
            if self._failed_group is not None or self._indices is None:
                return
            self._started = position + 1
            device_indices, host_indices = self._indices
            group = self._groups[position]
        device = (group.device_views, device_indices)
        host = (group.host_views, host_indices)
        dst, src = (device, host) if self.direction == "load" else (host, device)
        try:
            with torch.no_grad(), self._errors:
                self._transfer(dst[0], src[0], dst[1], src[1], group.slot_dim)
        except BaseException as error:  # kept for the ticket, whatever it is
            self._fail(position, error)

    def _transfer(
        self, dst: list[Tensor], src: list[Tensor], dst_at: Tensor, src_at: Tensor, slot_dim: int
    ) -> None:
        torch.ops.hicache.transfer_kv(dst, src, dst_at, src_at, slot_dim=slot_dim, method=self._method)

    def _fail(self, group: int, error: BaseException) -> None:
        with self._lock:
            self._fail_from(group, error)

    def _fail_from(self, group: int, error: BaseException) -> None:
        if self._failed_group is None or group < self._failed_group:
            self._error = error.with_traceback(None)  # whose frames would keep the pools alive
            self._failed_group = group

    def _finish(self, failure: BaseException | None) -> None:
        """Once, when the device has finished. Who comes second waits for the first."""
        is_first = False
        try:
            with self._lock:
                is_first, self._finishing = not self._finishing, True
            if is_first:
                failure = failure or self._errors.close()
                if failure is not None:
                    self._fail(0, failure)
        finally:  # also where this thread is interrupted
            if is_first:
                self._end()
        self._finished.wait()

    def _end(self) -> None:
        try:
            if self._on_finish is not None:
                self._on_finish(self)
        except BaseException as error:
            self._fail(0, error)
            raise
        finally:
            # A ticket that is kept for its result keeps neither pools nor the engine.
            self._indices = self._on_finish = None
            self._groups = ()
            self._finished.set()
