"""MooncakeTier: a third tier behind a host pool, in a Mooncake Store.

    host pool   page [ K L0..Ln | V L0..Ln ]  + checksum   --put-->   one object of the store, by key
                (registered once with the client)          <--get--   checked before it is handed out

Pages move straight from and into the host pool. A page and its checksum are one object, so that they
can't be torn apart. The checksum is seeded with the key, and the key tells what the pool's pages are:
bytes of another key, another model or another layout do not pass.

A part of a batch is hashed while another is under way in a thread of ours (deadline.py), which also lets
a call that hangs be given up.
"""

import atexit
import ctypes
import hashlib
import logging
import math
import numbers
import operator
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from torch_hicache.deadline import Breaker, Calls
from torch_hicache.integrations.mooncake_client import (
    INSTALL,
    NO_SPACE,
    RPC_FAILED,
    RPC_TIMED_OUT,
    Connection,
    check_version,
)
from torch_hicache.page_pieces import PagePieces
from torch_hicache.pool import HostPool
from torch_hicache.tier import TierStats

_FORMAT = "1"  # of an object; part of its key
_CHECKSUM_BYTES = 8
# Of one call, with one under way at a time: the client spins on a core while it waits for one. Two calls
# of 8 MiB moved no more, and took more of its CPU (2 cores of an EPYC, November 2026).
_PART_BYTES = 32 << 20
_MAX_PIECES = 1024  # of one call: the client's queue for a peer is full somewhere above 2,048
_NUM_THREADS = 4
_CLOSE_SECONDS = 5.0
# A full store evicts a few pages in the background once a put has failed, within 5 to 11 ms (2 cores,
# November 2026).
_FULL_RETRIES, _FULL_PAUSE_SECONDS = 3, 0.005
_ABSENT_KEY = "hicache/absent"  # asked for to see whether the master answers; leases nothing


@dataclass
class _Part:
    """Some pages of a batch, in one call of the client."""

    keys: list[str]
    pages: list[int]
    first: int  # place in the batch
    has_returned: bool = False
    is_abandoned: bool = False


_Started = tuple[_Part, "Future[list[int]]"]


class MooncakeTier:
    """Pages of `pool` in the Mooncake Store of a master; a `torch_hicache.tier.ThirdTier`.

    Args:
        pool: its memory is registered with the client until `close`, and kept alive.
        master: "host:port".
        namespace: what else makes pages different: model, revision, rank, whatever two writers of equal
            geometry must not share. Processes with equal namespaces and pools share their pages.
        segment_bytes: memory that this process lends to the store (0: none, some other process must).
        protocol, local_hostname: see `Connection`. "rdma" has never been run.
        deadline_seconds: within which it is known whether the master answers, and
        slowest_bytes_per_second: what is added to it for the bytes of a call. Then the call is given up,
            and everything is a miss until a probe in the background has succeeded.
        retry_seconds: from a failure to the first such probe.
        max_leased_pages: of keys that `contains` has found and nobody has got. The store can't evict a
            key for `lease_seconds` (the master's -default_kv_lease_ttl) after a check, so this must be a
            small part of what the store holds. Beyond it, `contains` answers False without asking.

    Raises:
        ValueError: a bad argument.
        ImportError: Mooncake or xxhash is missing; the text says how to install it.
        RuntimeError: an unknown version of it, or no master answers.
    """

    def __init__(
        self,
        pool: HostPool,
        *,
        master: str,
        namespace: str,
        segment_bytes: int = 0,
        protocol: str = "tcp",
        local_hostname: str | None = None,
        deadline_seconds: float = 0.05,
        slowest_bytes_per_second: float = 50e6,
        retry_seconds: float = 1.0,
        max_leased_pages: int = 128,
        lease_seconds: float = 10.0,
    ) -> None:
        for name, value in (
            ("deadline_seconds", deadline_seconds),
            ("slowest_bytes_per_second", slowest_bytes_per_second),
            ("retry_seconds", retry_seconds),
            ("lease_seconds", lease_seconds),
        ):
            if not isinstance(value, numbers.Real) or not 0 < value < math.inf:
                raise ValueError(f"[MooncakeTier] {name} must be above 0 and finite, got {value!r}.")
        if max_leased_pages < 0:
            raise ValueError(
                f"[MooncakeTier] max_leased_pages must be 0 or more, got {max_leased_pages}."
            )
        if not namespace:
            raise ValueError("[MooncakeTier] namespace must say whose pages these are, got ''.")
        connection = Connection(master, segment_bytes, protocol, local_hostname)
        check_version()
        self._hash = _hash_class()
        self._pool = pool
        self._prefix = f"hicache/{_FORMAT}/{_geometry(pool, namespace)}/"
        self._pages = PagePieces(pool)
        # One for each page, and the page's as long as the page is in use: no other lifetime to manage.
        self._checksums = torch.zeros(pool.num_pages, dtype=torch.int64)
        self._checksum_words = _words_of(self._checksums)
        self._pages_of_part = max(
            1,
            min(_PART_BYTES // self._pages.page_bytes, _MAX_PIECES // (len(self._pages.sizes) + 1)),
        )
        self._sizes = [*self._pages.sizes, _CHECKSUM_BYTES]
        self._deadline_seconds = deadline_seconds
        self._slowest_bytes_per_second = slowest_bytes_per_second
        self._max_leased, self._lease_seconds = max_leased_pages, lease_seconds
        self._leased: OrderedDict[str, float] = OrderedDict()  # key -> when its lease is over
        self._stuck: set[int] = set()  # pages of calls that were given up and have not returned
        self._stats = TierStats()
        self._lock = threading.Lock()
        self._is_closed = False
        self._store = connection.open()
        for address, nbytes in (
            *self._pages.regions,
            (self._checksums.data_ptr(), self._checksums.nbytes),
        ):
            if code := self._store.register_buffer(address, nbytes):
                self._store.close()
                raise RuntimeError(
                    f"[MooncakeTier] the client did not take {nbytes:,} bytes of the pool (code {code})."
                )
        self._calls = Calls("mooncake", _NUM_THREADS)
        self._breaker = Breaker(lambda: self._calls.start(self._answers), retry_seconds)
        # At exit the client's threads must be gone before the memory is.
        self._at_exit = partial(_close_if_alive, weakref.ref(self))
        atexit.register(self._at_exit)

    # --- The interface of a tier: see ThirdTier -----------------------------------------------------

    def put(self, keys: Sequence[str], pages: Sequence[int]) -> list[bool]:
        """See `ThirdTier.put`. Waits for the store, a full one included, within the deadline."""
        parts, placed = self._parts("put", keys, pages), [False] * len(keys)
        started = time.perf_counter()
        if parts and self._is_there():

            def hashed_parts() -> Iterator[_Part]:
                for part in parts:
                    for key, page in zip(part.keys, part.pages, strict=True):
                        self._checksum_words[page] = self._checksum(key, page)
                    yield part

            for part, results in self._results(hashed_parts(), self._put_part):
                for i, code in enumerate(results):
                    placed[part.first + i] = code == 0
        self._count_batch("put", placed, time.perf_counter() - started)
        return placed

    def get(self, keys: Sequence[str], pages: Sequence[int]) -> list[bool]:
        """See `ThirdTier.get`."""
        parts, found = self._parts("get", keys, pages), [False] * len(keys)
        started = time.perf_counter()
        with self._lock:
            for part in parts:
                for key in part.keys:
                    self._leased.pop(key, None)
        if parts and self._is_there():
            for part, results in self._results(iter(parts), self._get_part):
                for i, arrived in enumerate(self._verified(part, results)):
                    found[part.first + i] = arrived
        self._count_batch("got", found, time.perf_counter() - started)
        return found

    def contains(self, keys: Sequence[str]) -> list[bool]:
        """See `ThirdTier.contains`. A key found is leased: the store can't evict it for a while. Where
        the page is wanted anyway `get` alone is cheaper."""
        names = self._names("contains", keys)
        found = [False] * len(names)
        start = 0
        while start < len(names) and (room := self._lease_room()) and self._is_there():
            asked = names[start : start + room]
            results = self._wait(self._calls.start(partial(_codes, self._store.batch_is_exist, asked)), 0)
            if results is None:
                break
            with self._lock:
                for i, (name, code) in enumerate(zip(asked, results, strict=True)):
                    found[start + i] = code == 1
                    if code == 1:
                        self._leased[name] = time.monotonic() + self._lease_seconds
                        self._leased.move_to_end(name)
            start += len(asked)
        with self._lock:
            self._stats.checks_withheld += len(names) - start
        return found

    def stats(self) -> TierStats:
        with self._lock:
            return replace(self._stats, outages=self._breaker.num_trips)

    def close(self) -> None:
        """See `ThirdTier.close`. What this process lent to the store is gone with it."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        atexit.unregister(self._at_exit)
        # A call that hangs still uses the client, which is then left as it is. One whose master is away
        # takes seconds to close.
        if self._calls.close(_CLOSE_SECONDS):
            closing = threading.Thread(target=self._close_store, name="mooncake-close", daemon=True)
            closing.start()
            closing.join(_CLOSE_SECONDS)

    def __enter__(self) -> "MooncakeTier":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # --- Calls of the client ------------------------------------------------------------------------

    def _is_there(self) -> bool:
        """Whether the master answers, known within the deadline; at once while it is known to be away."""
        if not self._breaker.allows():
            return False
        answers: bool | None = self._wait(self._calls.start(self._answers), 0)
        if answers is False:
            self._breaker.trip()
        return bool(answers)

    def _answers(self) -> bool:
        return _codes(self._store.batch_is_exist, [_ABSENT_KEY])[0] >= 0

    def _start(self, part: _Part, run: Callable[[_Part], list[int]]) -> _Started:
        """The pool hands none of the pages out before the call has returned."""
        self._pool.hold(part.pages, unit="page")

        def call() -> list[int]:
            try:
                return run(part)
            finally:
                with self._lock:
                    part.has_returned = True
                    if part.is_abandoned:
                        self._stuck.difference_update(part.pages)
                self._pool.release(part.pages, unit="page")

        return part, self._calls.start(call)

    def _results(
        self, parts: Iterator[_Part], run: Callable[[_Part], list[int]]
    ) -> "Iterator[tuple[_Part, list[int]]]":
        """The code of each page of each part, until the store is away or a call has to be given up.

        One call is under way at a time. Meanwhile the next part is taken from `parts`, which may hash it,
        and the caller has the one before, to verify it.
        """
        under_way: _Started | None = self._start(next(parts), run)
        try:
            while under_way is not None:
                part, future = under_way
                following = next(parts, None)
                results = self._wait(future, len(part.pages) * self._pages.page_bytes)
                if results is None or not {RPC_FAILED, RPC_TIMED_OUT}.isdisjoint(results):
                    self._breaker.trip()
                    return
                under_way = None if following is None else self._start(following, run)
                yield part, results
        finally:  # also when the caller is interrupted
            if under_way is not None:
                self._give_up(*under_way)

    def _give_up(self, part: _Part, future: "Future[list[int]]") -> None:
        if future.cancel() or future.cancelled():
            self._pool.release(part.pages, unit="page")
            return
        with self._lock:
            if not part.has_returned:
                part.is_abandoned = True
                self._stuck.update(part.pages)

    def _wait(self, future: "Future[Any]", nbytes: int) -> Any:
        """The result of a call that moves so many bytes, or None."""
        seconds = self._deadline_seconds + nbytes / self._slowest_bytes_per_second
        try:
            return future.result(min(seconds, threading.TIMEOUT_MAX))
        except FutureTimeoutError:
            future.cancel()
            with self._lock:
                self._stats.calls_abandoned += 1
        except Exception as error:  # the client's: what its C++ throws has many types in Python
            logging.getLogger("torch_hicache").warning("a call of Mooncake's client failed: %r", error)
        self._breaker.trip()
        return None

    def _put_part(self, part: _Part) -> list[int]:
        """Pages that find no room are tried again, as long as it makes room for some of them."""
        results = [NO_SPACE] * len(part.keys)
        left = list(range(len(part.keys)))
        num_vain = 0
        while left and num_vain <= _FULL_RETRIES and not part.is_abandoned:
            if len(left) < len(part.keys) or num_vain:
                time.sleep(_FULL_PAUSE_SECONDS)
            keys = [part.keys[i] for i in left]
            addresses = [self._addresses(part.pages[i]) for i in left]
            sizes = [self._sizes] * len(left)
            codes = _codes(self._store.batch_put_from_multi_buffers, keys, addresses, sizes)
            for i, code in zip(left, codes, strict=True):
                results[i] = code
            still = [i for i in left if results[i] == NO_SPACE]
            num_vain = num_vain + 1 if len(still) == len(left) else 0
            left = still
        return results

    def _get_part(self, part: _Part) -> list[int]:
        addresses = [self._addresses(page) for page in part.pages]
        sizes = [self._sizes] * len(part.pages)
        return _codes(self._store.batch_get_into_multi_buffers, part.keys, addresses, sizes)

    def _verified(self, part: _Part, results: list[int]) -> list[bool]:
        wanted_bytes = self._pages.page_bytes + _CHECKSUM_BYTES
        arrived = []
        for key, page, code in zip(part.keys, part.pages, results, strict=True):
            is_right = code == wanted_bytes and self._checksum_words[page] == self._checksum(key, page)
            if code >= 0 and not is_right:
                with self._lock:
                    self._stats.pages_corrupt += 1
                # A key that exists can't be put again: it would be a miss for ever.
                self._calls.start(partial(self._store.remove, key, True))
            arrived.append(is_right)
        return arrived

    def _close_store(self) -> None:
        for address, _ in (*self._pages.regions, (self._checksums.data_ptr(), 0)):
            self._store.unregister_buffer(address)
        self._store.close()

    # --- Pages and keys -------------------------------------------------------------------------------

    def _addresses(self, page: int) -> list[int]:
        checksum = self._checksums.data_ptr() + page * _CHECKSUM_BYTES
        return [*self._pages.addresses(page), checksum]

    def _checksum(self, key: str, page: int) -> int:
        checksum = self._hash(seed=self._hash(key.encode()).intdigest())
        for view in self._pages.views(page):
            checksum.update(view)
        digest: int = checksum.intdigest()
        return digest

    def _names(self, name: str, keys: Sequence[str]) -> list[str]:
        """The store's keys."""
        if self._is_closed:
            raise RuntimeError(f"[MooncakeTier] {name} needs an open tier, this one is closed.")
        if isinstance(keys, str):
            raise ValueError(f"[MooncakeTier] keys must be a list of strings, got the string {keys!r}.")
        for i, key in enumerate(keys):
            if not isinstance(key, str) or not key:
                raise ValueError(
                    f"[MooncakeTier] keys must be strings of one or more characters, got {key!r} at "
                    f"position {i}."
                )
        return [self._prefix + key for key in keys]

    def _parts(self, name: str, keys: Sequence[str], pages: Sequence[int]) -> list[_Part]:
        """What is to be moved, in calls. Pages that a call is still using are left out."""
        names = self._names(name, keys)
        if len(names) != len(pages):
            raise ValueError(
                f"[MooncakeTier] keys and pages must have the same length, got {len(names)} and "
                f"{len(pages)}."
            )
        numbers = [operator.index(page) for page in pages]
        for i, page in enumerate(numbers):
            if not 0 <= page < self._pool.num_pages:
                raise IndexError(
                    f"[MooncakeTier] pages must be from 0 to {self._pool.num_pages - 1:,}, got {page:,} "
                    f"at position {i:,}."
                )
        if len(set(numbers)) < len(numbers):
            raise ValueError("[MooncakeTier] pages must come once each in a batch.")
        with self._lock:
            stuck = set(self._stuck)
        parts: list[_Part] = []
        for i, (key, page) in enumerate(zip(names, numbers, strict=True)):
            if page in stuck:
                continue
            last = parts[-1] if parts else None
            if last is None or len(last.keys) == self._pages_of_part or last.first + len(last.keys) != i:
                last = _Part([], [], i)
                parts.append(last)
            last.keys.append(key)
            last.pages.append(page)
        return parts

    def _lease_room(self) -> int:
        """How many more keys may be leased by checks."""
        now = time.monotonic()
        with self._lock:
            while self._leased and next(iter(self._leased.values())) <= now:
                self._leased.popitem(last=False)
            return max(0, self._max_leased - len(self._leased))

    def _count_batch(self, verb: str, done: list[bool], seconds: float) -> None:
        num_done = sum(done)
        rest = "dropped" if verb == "put" else "missed"
        with self._lock:
            for name, value in (
                (f"pages_{verb}", num_done),
                (f"bytes_{verb}", num_done * self._pages.page_bytes),
                (f"seconds_{verb}", seconds),
                (f"pages_{rest}", len(done) - num_done),
            ):
                setattr(self._stats, name, getattr(self._stats, name) + value)


def _codes(call: Callable[..., Any], keys: list[str], *args: object) -> list[int]:
    """A code for each key, whatever the client gives."""
    codes = [int(code) for code in call(keys, *args)]
    if len(codes) != len(keys):
        raise RuntimeError(f"[MooncakeTier] the client gave {len(codes)} codes for {len(keys)} keys.")
    return codes


def _close_if_alive(reference: "weakref.ref[MooncakeTier]") -> None:
    if (tier := reference()) is not None:
        tier.close()


def _hash_class() -> Any:
    try:
        from xxhash import xxh3_64
    except ImportError:
        raise ImportError(f"[MooncakeTier] needs xxhash, which is not installed ({INSTALL}).") from None
    return xxh3_64


def _geometry(pool: HostPool, namespace: str) -> str:
    """Tells pages apart that must not be mistaken for each other."""
    planes = [(spec.name, spec.row_shape, str(spec.dtype)) for spec in pool.specs]
    described = repr((namespace, planes, pool.layer_ids, pool.page_size, pool.layout))
    return hashlib.sha256(described.encode()).hexdigest()[:32]


def _words_of(tensor: Tensor) -> "ctypes.Array[ctypes.c_uint64]":
    return (ctypes.c_uint64 * tensor.numel()).from_address(tensor.data_ptr())
