"""The bounded queue of an engine: which tickets are in flight, who waits for room, and the counters."""

import threading
import time
from typing import Any

from torch_hicache.ticket import Ticket

DIRECTIONS = ("load", "store")


class _Counters:
    """Of one direction, under the lock of InFlight."""

    def __init__(self) -> None:
        self.transfers = self.moved_bytes = self.errors = self.cancelled = 0
        self.waiting = 0  # calls that wait for room
        self.reserved = self.reserved_bytes = 0
        self.tickets: dict[int, Ticket] = {}
        self.busy_seconds = 0.0
        self.busy_since = 0.0

    def as_dict(self, now: float) -> dict[str, Any]:
        seconds = self.busy_seconds + (now - self.busy_since if self.reserved else 0.0)
        return {
            "transfers": self.transfers,
            "bytes": self.moved_bytes,
            "busy_seconds": seconds,
            "gb_per_s": self.moved_bytes / seconds / 1e9 if seconds else 0.0,
            "queue_depth": self.waiting,
            "in_flight": self.reserved,
            "in_flight_bytes": self.reserved_bytes,
            "errors": self.errors,
            "cancelled": self.cancelled,
        }


class InFlight:
    """Tickets of an engine between their submission and their end.

    Args:
        max_tickets, max_bytes: the most in flight, of both directions together. A transfer larger than
            `max_bytes` is taken when nothing else is in flight.
        blocks: whether a call waits for room or raises.
    """

    def __init__(self, max_tickets: int, max_bytes: int | None, *, blocks: bool) -> None:
        self._max_tickets, self._max_bytes, self._blocks = max_tickets, max_bytes, blocks
        # Taken by itself: an interrupt inside Condition's own __enter__ would leave it locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._of = {direction: _Counters() for direction in DIRECTIONS}
        self._closed = False

    @property
    def closed(self) -> bool:
        return self._closed

    def reserve(self, direction: str, nbytes: int) -> None:
        """Room for one more ticket; blocks, or raises RuntimeError, until there is.

        Raises:
            RuntimeError: the engine is closed, or was closed meanwhile.
        """
        counters = self._of[direction]
        with self._lock:
            counters.waiting += 1
            try:
                while not self._closed and not self._has_room(nbytes):
                    if not self._blocks:
                        raise RuntimeError(
                            f"[TransferEngine] transfers in flight must be {self._limits()}, got "
                            f"one more {direction} of {nbytes:,} bytes. Wait for a ticket, or use "
                            "on_full='block'."
                        )
                    self._changed.wait()
            finally:
                counters.waiting -= 1
            if self._closed:
                raise RuntimeError("[TransferEngine] the engine must be open, it was closed.")
            if not counters.reserved:
                counters.busy_since = time.monotonic()
            counters.reserved += 1
            counters.reserved_bytes += nbytes

    def add(self, ticket: Ticket) -> None:
        """A ticket that reserved its room and is being submitted."""
        with self._lock:
            self._of[ticket.direction].tickets[ticket.number] = ticket

    def remove(self, direction: str, nbytes: int, ticket: Ticket | None = None) -> None:
        """Give the room back, of a ticket that has ended or that never came to be."""
        counters = self._of[direction]
        with self._lock:
            counters.reserved -= 1
            counters.reserved_bytes -= nbytes
            if not counters.reserved:
                counters.busy_seconds += time.monotonic() - counters.busy_since
            if ticket is not None:
                counters.tickets.pop(ticket.number, None)
                if ticket.cancelled:
                    counters.cancelled += 1
                elif ticket.error is not None:
                    counters.errors += 1
                else:
                    counters.transfers += 1
                    counters.moved_bytes += nbytes
            self._changed.notify_all()

    def ticket(self, direction: str, number: int) -> Ticket | None:
        """None once it has ended."""
        with self._lock:
            return self._of[direction].tickets.get(number)

    def newest_first(self, direction: str) -> list[Ticket]:
        with self._lock:
            return list(self._of[direction].tickets.values())[::-1]

    def stats(self) -> dict[str, dict[str, Any]]:
        with self._lock:
            now = time.monotonic()
            return {direction: counters.as_dict(now) for direction, counters in self._of.items()}

    def close(self) -> None:
        """Take no more, and wait until nothing is in flight."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()
            while any(counters.reserved for counters in self._of.values()):
                self._changed.wait()

    def _has_room(self, nbytes: int) -> bool:
        tickets = sum(counters.reserved for counters in self._of.values())
        used = sum(counters.reserved_bytes for counters in self._of.values())
        if tickets == 0:
            return True
        fits = self._max_bytes is None or used + nbytes <= self._max_bytes
        return tickets < self._max_tickets and fits

    def _limits(self) -> str:
        limits = f"at most {self._max_tickets}"
        return limits if self._max_bytes is None else f"{limits} and {self._max_bytes:,} bytes"
