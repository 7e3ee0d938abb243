"""Host memory made known to a device's runtime, in pieces, and who still needs it to be.

A Registrar is a runtime in four words; a test puts its own into `REGISTRARS`. The table counts claims on
each range, so that a range is unregistered once, when nobody needs it any more.
"""

import enum
import itertools
import math
import mmap
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch

from torch_hicache._backends import empty_on
from torch_hicache.host_mapping import HUGE_PAGE_BYTES
from torch_hicache.memory_budget import readable

# One registration fails from 512 GiB on (NVIDIA, r580 and newer); this is well below.
MAX_PIECE_BYTES = 64 << 30


class Registrar(Protocol):
    """What a device's runtime does with host memory. Addresses are the host's but for the answer."""

    device: torch.device

    def register(self, address: int, nbytes: int) -> None:
        """RuntimeError when the runtime refuses; no error is left pending in it."""

    def unregister(self, address: int) -> None:
        """After the device has finished its work."""

    def device_address(self, address: int, nbytes: int) -> int:
        """Where the device finds these bytes. ValueError when it can't reach all in one stretch."""

    def wait(self) -> None:
        """Until the device has finished its work."""


class OpRegistrar:
    """The registrar of an accelerator whose backend is loaded."""

    def __init__(self, device: torch.device) -> None:
        self._on_device = empty_on(device, caller="host_memory")
        self.device = self._on_device.device

    def register(self, address: int, nbytes: int) -> None:
        torch.ops.hicache.register_host_memory(self._on_device, address, nbytes)

    def unregister(self, address: int) -> None:
        torch.ops.hicache.unregister_host_memory(self._on_device, address)

    def device_address(self, address: int, nbytes: int) -> int:
        return torch.ops.hicache.host_device_address(self._on_device, address, nbytes)

    def wait(self) -> None:
        torch.accelerator.synchronize(self.device)


# By device type; an accelerator that is not named here has an OpRegistrar. The CPU needs none.
REGISTRARS: dict[str, Callable[[torch.device], Registrar]] = {}


def has_registrar(device: torch.device) -> bool:
    return device.type != "cpu" or "cpu" in REGISTRARS


def registrar_for(device: torch.device) -> Registrar:
    """RuntimeError where this torch has no such device."""
    return REGISTRARS.get(device.type, OpRegistrar)(device)


@dataclass(frozen=True)
class Cuts:
    """Where memory may be cut into pieces.

    `page_bytes`: a page of the pool, which is never cut. `plane_bytes`: a plane, which is not cut where
    the device's addresses of the pieces do not follow each other as the host's do; 0 if nothing is said.
    """

    page_bytes: int = 1
    plane_bytes: int = 0
    max_piece_bytes: int = MAX_PIECE_BYTES

    def check(self, nbytes: int) -> None:
        """ValueError when memory of that size can't be cut as asked."""
        if self.page_bytes < 1:
            raise ValueError(f"piece_unit_bytes must be positive, got {self.page_bytes}")
        if self.plane_bytes < 0:
            raise ValueError(f"plane_unit_bytes must not be negative, got {self.plane_bytes}")
        if self.max_piece_bytes < 1:
            raise ValueError(f"max_piece_bytes must be positive, got {self.max_piece_bytes}")
        self.pieces(0, min(nbytes, self.max_piece_bytes + 1), self.page_bytes)

    def pieces(self, address: int, nbytes: int, unit_bytes: int) -> list[tuple[int, int]]:
        """(offset, bytes) of each. ValueError if no cut is allowed.

        Cuts lie at multiples of `unit_bytes`, and at pages of the system, since none of these can be
        registered twice. (Where `address` allows no such cut, the runtime has its say.)
        """
        if nbytes <= self.max_piece_bytes:
            return [(0, nbytes)]
        for page_bytes in (HUGE_PAGE_BYTES, mmap.PAGESIZE):
            whole = math.lcm(unit_bytes, page_bytes)
            first = _first_cut(address, unit_bytes, page_bytes)
            if first + whole <= self.max_piece_bytes:
                break
        else:
            raise ValueError(
                f"units of {readable(unit_bytes)} (and whole pages of the system) do not fit into "
                f"pieces of {readable(self.max_piece_bytes)}"
            )
        largest = self.max_piece_bytes // whole * whole
        cuts = range(first + (self.max_piece_bytes - first) // whole * whole, nbytes, largest)
        edges = (0, *cuts, nbytes)
        return [(begin, end - begin) for begin, end in itertools.pairwise(edges)]


def _first_cut(address: int, unit_bytes: int, page_bytes: int) -> int:
    """The smallest multiple of a unit that lies at a page; 0 where there is none."""
    common = math.gcd(unit_bytes, page_bytes)
    missing = -address % page_bytes
    if missing % common:
        return 0
    per_page = page_bytes // common
    return missing // common * pow(unit_bytes // common, -1, per_page) % per_page * unit_bytes


class _State(enum.Enum):
    OPENING = enum.auto()
    READY = enum.auto()
    CLOSING = enum.auto()


@dataclass(eq=False)
class _Range:
    begin: int
    end: int
    device_type: str
    registrars: list[Registrar]  # the first registered the pieces; all their devices may use them
    owner: object  # of the memory; kept until it is unregistered
    pieces: list[int] = field(default_factory=list)  # addresses, in order
    claims: int = 1
    state: _State = _State.OPENING


class Claim:
    """One need for a range to stay registered. Given up by `close`, once, or when collected."""

    def __init__(self, table: "RegistrationTable", held: _Range | None) -> None:
        self._table = table
        self._held = held
        self._process = os.getpid()

    @property
    def is_ours(self) -> bool:
        """False for memory that was registered by others, and after `close`."""
        return self._held is not None

    def close(self) -> None:
        """The last claim on a range waits for the device and unregisters it.

        In a forked child nothing is undone: the registration is the parent's.
        """
        if self._process == os.getpid():
            self._table.release(self)

    def take(self) -> _Range | None:
        held, self._held = self._held, None
        return held

    def __del__(self) -> None:
        # At interpreter exit anything may be gone; the end of the process unregisters too.
        try:
            self.close()
        except Exception:
            return


class RegistrationTable:
    """The ranges registered by this process. No lock is held while a runtime works or waits."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """For a forked child, which registered none of this and whose lock may be held by nobody."""
        # Re-entrant: the collector may run a Claim's destructor inside any of these blocks.
        self._changed = threading.Condition(threading.RLock())
        self._ranges: list[_Range] = []
        # What could not be unregistered (a stream was capturing, say). A device still knows the
        # memory, so it stays, and the next claim or release tries again.
        self._stranded: list[_Range] = []

    def claim(
        self,
        registrar: Registrar,
        address: int,
        nbytes: int,
        *,
        owner: object,
        cuts: Cuts,
        is_new: bool = False,
    ) -> Claim:
        """Register [address, address + nbytes), or count one more need of it.

        `owner` is kept alive for as long as the range is registered. `is_new`: the memory has just been
        made, so nobody else can have registered it.

        Raises:
            ValueError: it overlaps a range of ours in part, or can't be cut as asked.
            RuntimeError: the runtime refused; nothing of it stays registered.
        """
        self._release_stranded()
        new = _Range(address, address + nbytes, registrar.device.type, [registrar], owner)
        with self._changed:
            met = self._met(new.device_type, new.begin, new.end)
            while any(old.state is not _State.READY for old in met):
                self._changed.wait()
                met = self._met(new.device_type, new.begin, new.end)
            if met:
                return self._claim_again(met, new)
            self._ranges.append(new)
        try:
            if is_new or not _is_reachable(registrar, address, nbytes):
                new.pieces = _register(registrar, address, nbytes, cuts)
        except BaseException:
            self._drop(new)
            raise
        if not new.pieces:
            self._drop(new)
            return Claim(self, None)
        with self._changed:
            new.state = _State.READY
            self._changed.notify_all()
        return Claim(self, new)

    def claim_existing(self, device_type: str, address: int, nbytes: int) -> list[Claim]:
        """One more need of each range of ours that these bytes lie in."""
        with self._changed:
            ready = [
                old
                for old in self._met(device_type, address, address + nbytes)
                if old.state is _State.READY
            ]
            for old in ready:
                old.claims += 1
            return [Claim(self, old) for old in ready]

    def release(self, claim: Claim) -> None:
        with self._changed:
            held = claim.take()
            if held is None:
                return
            held.claims -= 1
            if held.claims:
                return
            held.state = _State.CLOSING
        try:
            for registrar in held.registrars[1:]:
                registrar.wait()
            _unregister(held.registrars[0], held.pieces)
        except BaseException:
            self._stranded.append(held)
            raise
        finally:
            self._drop(held)
        self._release_stranded()

    def _release_stranded(self) -> None:
        with self._changed:
            stranded, self._stranded = self._stranded, []
        for held in stranded:
            try:
                _unregister(held.registrars[0], held.pieces)
            except Exception:
                self._stranded.append(held)

    def _met(self, device_type: str, begin: int, end: int) -> list[_Range]:
        return [
            old
            for old in tuple(self._ranges)
            if old.device_type == device_type and old.begin < end and begin < old.end
        ]

    def _claim_again(self, met: list[_Range], new: _Range) -> Claim:
        old = met[0]
        if new.begin < old.begin or old.end < new.end:
            raise ValueError(
                f"{readable(new.end - new.begin)} at {new.begin:#x} overlap "
                f"{readable(old.end - old.begin)} at {old.begin:#x}, which are registered already"
            )
        if all(new.registrars[0].device != registrar.device for registrar in old.registrars):
            old.registrars += new.registrars
        old.claims += 1
        return Claim(self, old)

    def _drop(self, gone: _Range) -> None:
        with self._changed:
            self._ranges.remove(gone)
            self._changed.notify_all()


def reason(error: Exception) -> str:
    """The text of a runtime's refusal, to stand inside another."""
    return str(error).removeprefix("[transfer_kv] ").rstrip(".")


def _is_reachable(registrar: Registrar, address: int, nbytes: int) -> bool:
    try:
        registrar.device_address(address, nbytes)
    except ValueError:
        return False
    return True


def _register(registrar: Registrar, address: int, nbytes: int, cuts: Cuts) -> list[int]:
    """The addresses of the pieces: all are registered, or none."""
    pieces = cuts.pieces(address, nbytes, cuts.page_bytes)
    registered = _register_pieces(registrar, address, pieces)
    are_neighbours = False
    try:
        are_neighbours = _are_neighbours(registrar, address, pieces)
    finally:
        if not are_neighbours:
            _unregister(registrar, registered)
    if are_neighbours:
        return registered
    # A plane has one address on the device, so it must lie in one piece.
    apart = f"{registrar.device} sees the pieces at addresses that do not follow each other"
    if cuts.plane_bytes == 0:
        raise RuntimeError(f"{apart}, and no plane_unit_bytes says where planes end")
    try:
        pieces = cuts.pieces(address, nbytes, cuts.plane_bytes)
    except ValueError as error:
        raise RuntimeError(f"{apart}, but {error}") from None
    return _register_pieces(registrar, address, pieces)


def _register_pieces(registrar: Registrar, address: int, pieces: list[tuple[int, int]]) -> list[int]:
    registered: list[int] = []
    try:
        for offset, nbytes in pieces:
            registrar.register(address + offset, nbytes)
            registered.append(address + offset)
    except BaseException as error:
        number = len(registered) + 1
        _unregister(registrar, registered)
        if isinstance(error, RuntimeError) and len(pieces) > 1:
            raise RuntimeError(f"piece {number} of {len(pieces)}: {reason(error)}") from None
        raise
    return registered


def _are_neighbours(registrar: Registrar, address: int, pieces: list[tuple[int, int]]) -> bool:
    """Whether the device's addresses are all off the host's by one distance."""
    if len(pieces) == 1:
        return True
    distances = {
        registrar.device_address(address + offset, nbytes) - (address + offset)
        for offset, nbytes in pieces
    }
    return len(distances) == 1


def _unregister(registrar: Registrar, registered: list[int]) -> None:
    """Last to first. All are tried, those that fail stay in the list; the first error is raised."""
    failure: Exception | None = None
    for piece in registered[::-1]:
        try:
            registrar.unregister(piece)
            registered.remove(piece)
        except Exception as error:
            failure = failure or error
    if failure:
        raise failure


TABLE = RegistrationTable()
os.register_at_fork(after_in_child=TABLE.forget)
