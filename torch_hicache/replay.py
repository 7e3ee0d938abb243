"""A prefix cache of two or three tiers, driven by a serving trace; a TransferEngine moves its bytes.

    device pool   layer_first   blocks that requests use            LRU
        | store (evicted)  ^ load (found in the host pool only)
    host pool     any layout    blocks that the device evicted      LRU
        | put (evicted)    ^ get (found nowhere nearer)
    third tier    replay_tier3.py, if there is one

Prefill is played by writing fingerprints: bytes that tell block, plane, layer, token and position,
so that a row which was lost, torn, shifted or swapped can't pass. Every row that comes back from the
host is compared with its fingerprint, on the device.

A request submits its load, plays its forward pass, layer by layer behind the load, and evicts ahead, so
that the next one finds free pages. Evicted pages are freed as soon as their store is submitted: the
engine holds them. The store runs beside what follows: the next request's load, forward pass and check.

A block is 512 prompt tokens of the trace. The pools keep `block_tokens` of them, to scale the work
down, and a block is a page of both pools. Generated tokens are not cached: the trace has no ids for
them.
"""

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from operator import attrgetter

import torch
from torch import Tensor

from torch_hicache.engine import TransferEngine
from torch_hicache.memory_budget import available_memory
from torch_hicache.models import Model
from torch_hicache.ops import check_errors
from torch_hicache.pool import DevicePool, HostPool
from torch_hicache.replay_clock import Clock, ForwardPass, Moved, TimedRuntime
from torch_hicache.replay_tier3 import ReplayTier3, Tier3Record
from torch_hicache.slot_allocator import SlotAllocator
from torch_hicache.ticket import Ticket
from torch_hicache.tier import TierStats, open_tier
from torch_hicache.trace import Request

_POISON = 0xA5  # what pools hold before anything is written
_CHECK_BYTES = 16 << 20  # compared at once: bounds the temporaries of a check
_SPARE_SHARE = 16  # one part in 16 of the device pool is free when a request comes
_FETCH_BLOCKS = 64  # asked of the third tier at once
_HOST, _DEVICE = "host", "device"


@dataclass(frozen=True)
class ReplayOptions:
    """What to run. Bytes are exact budgets: a pool holds as many whole blocks as fit.

    `compute_seconds` is the time of a request's forward pass, all layers together. `tier3` is the URL of
    a third tier, to which this process lends `tier3_bytes` and which must answer within
    `tier3_deadline_seconds`.
    """

    model: Model
    num_layers: int
    block_tokens: int
    device_bytes: int
    host_bytes: int
    layout: str = "layer_first"
    unit: str = "page"
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    method: str = "auto"
    seed: int = 0
    compute_seconds: float = 0.0
    tier3: str | None = None
    tier3_bytes: int = 0
    tier3_deadline_seconds: float = 0.05

    @property
    def block_bytes(self) -> int:
        return self.block_tokens * self.num_layers * self.model.token_layer_bytes


@dataclass
class RequestRecord:
    """One served request: its prompt blocks by where they came from, and what was moved for it.

    `exposed_seconds` is how long the computation waited: each layer for its load, and all of it for pages
    that a store still held. Pages are waited for by the host's clock, also while a GPU is still busy.
    """

    blocks: int = 0
    device_hits: int = 0
    host_hits: int = 0
    tier3_hits: int = 0
    rows_verified: int = 0
    compute_seconds: float = 0.0
    exposed_seconds: float = 0.0
    load: Moved = field(default_factory=Moved)
    store: Moved = field(default_factory=Moved)
    tier3: Tier3Record = field(default_factory=Tier3Record)


@dataclass
class ReplayResult:
    """The sums of a replay. Hit rates are shares of all prompt blocks that were requested."""

    records: list[RequestRecord] = field(default_factory=list)
    mismatches: int = 0
    first_mismatch: str = ""
    blocks_uncached: int = 0  # of requests longer than the device pool: served, but not kept
    blocks_repeated: int = 0  # ids that came again within one request, whose prefix can't hold them twice
    blocks_dropped: int = 0  # evicted from the device when the host pool had no room for them
    seconds: float = 0.0
    interrupted: bool = False
    tier3: TierStats | None = None  # of the third tier, if there is one

    def total(self, name: str) -> int:
        return sum(getattr(record, name) for record in self.records)

    def hit_rate(self, tier: str) -> float:
        return self.total(f"{tier}_hits") / max(1, self.total("blocks"))

    def moved(self, direction: str) -> Moved:
        """By "load", "store", "tier3.put" or "tier3.get"."""
        parts = [attrgetter(direction)(record) for record in self.records]
        return Moved(sum(p.num_bytes for p in parts), sum(p.seconds for p in parts))

    @property
    def tier3_misses(self) -> int:
        return sum(record.tier3.misses for record in self.records)

    @property
    def compute_seconds(self) -> float:
        return sum(record.compute_seconds for record in self.records)

    @property
    def exposed_seconds(self) -> float:
        return sum(record.exposed_seconds for record in self.records)

    @property
    def hidden(self) -> float | None:
        """Share of the transfers' seconds that the computation did not wait for; None without either.

        A store may also run beside the check of restored rows and the writing of new ones.
        """
        seconds = self.moved("load").seconds + self.moved("store").seconds
        if not seconds or not self.compute_seconds:
            return None
        return max(0.0, 1 - self.exposed_seconds / seconds)


class Tier:
    """The blocks of one pool and the pages they lie in, least recently used first."""

    def __init__(self, slots: DevicePool | HostPool | SlotAllocator) -> None:
        self.num_pages = slots.num_pages
        self.pages: OrderedDict[int, int] = OrderedDict()  # block id -> page
        self._slots = slots

    def touch(self, block: int) -> None:
        self.pages.move_to_end(block)

    def add(self, blocks: list[int]) -> list[int]:
        """Give each block a free page that can be handed out. There must be as many."""
        pages: list[int] = self._slots.allocate(len(blocks), unit="page").tolist()
        self.pages.update(zip(blocks, pages, strict=True))
        return pages

    def evict(self, wanted: int, *, keep: set[int]) -> list[tuple[int, int]]:
        """Forget old blocks, never those of `keep`, until `wanted` pages hold none or none is left.

        Returns (block, page) of the evicted; the pages are to be freed.
        """
        missing = wanted - self.num_free
        evicted: list[tuple[int, int]] = []
        for block, page in self.pages.items():
            if len(evicted) >= missing:
                break
            if block not in keep:
                evicted.append((block, page))
        for block, _ in evicted:
            del self.pages[block]
        return evicted

    def free(self, evicted: list[tuple[int, int]]) -> None:
        self._slots.free([page for _, page in evicted], unit="page")

    def drop(self, blocks: list[int]) -> None:
        """Forget blocks and free their pages."""
        self.free([(block, self.pages.pop(block)) for block in blocks])

    @property
    def num_free(self) -> int:
        """Pages without a block."""
        return self.num_pages - len(self.pages)

    @property
    def num_available(self) -> int:
        """Pages that can be handed out now: freed, and held by no transfer."""
        return self._slots.available // self._slots.page_size


class Pools:
    """The two pools' memory, transfers between them and the fingerprints in them, all by page."""

    def __init__(self, options: ReplayOptions) -> None:
        self._options = options
        num_pages = {}
        for tier, budget in ((_DEVICE, options.device_bytes), (_HOST, options.host_bytes)):
            num_pages[tier] = budget // options.block_bytes
            if not num_pages[tier]:
                raise ValueError(
                    f"[replay] --{tier}-bytes must hold a block of {options.block_bytes:,} bytes "
                    f"({options.num_layers} layers, {options.block_tokens} tokens of "
                    f"{options.model.token_layer_bytes:,} bytes), got {budget:,}."
                )
        self._check_memory(num_pages)
        planes, tokens = options.model.planes, options.block_tokens
        self._fingerprints = [Fingerprint(plane, options) for plane in range(len(planes))]
        self.device_pool = DevicePool(
            planes, options.num_layers, num_pages[_DEVICE] * tokens, options.device, tokens
        )
        self.host_pool = HostPool(
            planes, options.num_layers, num_pages[_HOST] * tokens, options.device, options.layout, tokens
        )
        # Touches every page of memory, so that no transfer is timed with page faults in it.
        for buffer in (*self.device_pool.buffers, *self.host_pool.buffers):
            buffer.view(torch.uint8).fill_(_POISON)
        # Each plane of the device pool as int64 [layers, pages, tokens, words].
        self._words = [stack.flatten(3).view(torch.int64) for stack in self.device_pool.stacks("page")]
        self._clock = Clock(options.device)
        self._runtime = TimedRuntime(options.device, self._clock)
        self._engine = TransferEngine(
            self.device_pool,
            self.host_pool,
            unit=options.unit,
            method=options.method,
            runtime=self._runtime,
        )
        self._in_flight: deque[Ticket] = deque()  # or done, oldest first
        self._last_store: dict[int, Ticket] = {}  # of host pages, for a third tier
        self._forward_pass = ForwardPass(
            options.device, self.device_pool.layer_ids, options.compute_seconds, self._clock
        )
        # The first call of a process pays for loading kernels.
        for move in (self.store, self.load):
            move([0], [0], RequestRecord())
            self._in_flight[-1].wait()
        self.settle()

    def _check_memory(self, num_pages: dict[str, int]) -> None:
        """Refuse before anything is allocated what would only be killed later."""
        tiers = (_DEVICE, _HOST) if self._options.device.type == "cpu" else (_HOST,)
        wanted = sum(num_pages[tier] for tier in tiers) * self._options.block_bytes
        free = available_memory()
        if wanted > free:
            names = " and ".join(f"--{tier}-bytes" for tier in tiers)
            raise MemoryError(
                f"[replay] the pools in host memory ({names}) need {wanted:,} bytes, {free:,} are free."
            )

    def store(self, device_pages: list[int], host_pages: list[int], record: "RequestRecord") -> None:
        """Store pages, all in one transfer. They may be freed at once: it holds them until it is done."""
        self._count(record.store, device_pages)
        indices = self._indices(device_pages), self._indices(host_pages)
        ticket = self._engine.store(*indices)
        self._in_flight.append(ticket)
        if self._options.tier3 is not None:
            self._last_store.update(dict.fromkeys(host_pages, ticket))

    def wait_for_stores(self, evicted: list[tuple[int, int]]) -> None:
        """Wait until all stores into the pages of (block, host page) are done."""
        for _, page in evicted:
            if (ticket := self._last_store.pop(page, None)) is not None:
                ticket.wait()

    def load(self, device_pages: list[int], host_pages: list[int], record: "RequestRecord") -> Ticket:
        """Load pages, all in one call, layer by layer if a forward pass is played."""
        self._count(record.load, device_pages)
        indices = self._indices(host_pages), self._indices(device_pages)
        ticket = self._engine.load(*indices, layers=self._forward_pass.layers_of_loads)
        self._in_flight.append(ticket)
        return ticket

    def _count(self, moved: Moved, pages: list[int]) -> None:
        """Add the bytes now, and let the engine's streams add the time."""
        moved.num_bytes += len(pages) * self._options.block_bytes
        self._runtime.moved = moved

    def compute(self, load: Ticket | None, record: "RequestRecord") -> None:
        """Play the forward pass of a request, which waits for its load."""
        self._forward_pass.run(load, record)

    def wait_for_room(self, tier: "Tier", num_pages: int, record: "RequestRecord") -> None:
        """Wait until so many pages of those that are free can be handed out: transfers in flight may
        still hold them."""
        started = time.perf_counter()
        while self._in_flight and tier.num_available < num_pages:
            self._in_flight.popleft().wait()
        record.exposed_seconds += time.perf_counter() - started
        while self._in_flight and self._in_flight[0].done():
            self._in_flight.popleft().wait()

    def _indices(self, pages: list[int]) -> Tensor:
        indices = torch.tensor(pages, dtype=torch.int64)
        if self._options.unit == "page":
            return indices
        page_size = self._options.block_tokens
        return (indices.unsqueeze(1) * page_size + torch.arange(page_size)).flatten()

    def prefill(self, blocks: list[int], pages: list[int]) -> None:
        """Write the fingerprints of blocks into device pages."""
        for words, fingerprint in zip(self._words, self._fingerprints, strict=True):
            for start, stop, part in _page_runs(pages, len(pages)):
                if words.device == fingerprint.device:
                    fingerprint.words(blocks[part], out=words[:, start:stop])
                else:
                    words[:, start:stop].copy_(fingerprint.words(blocks[part]))

    def verify(self, blocks: list[int], pages: list[int], result: ReplayResult) -> int:
        """Compare device pages with the fingerprints of their blocks; returns how many rows.

        Waits for the device.
        """
        num_rows = 0
        longest = max(1, _CHECK_BYTES // self._options.block_bytes)
        planes = self._options.model.planes
        for plane, words, fingerprint in zip(planes, self._words, self._fingerprints, strict=True):
            for start, stop, part in _page_runs(pages, longest):
                found = words[:, start:stop].to(fingerprint.device)
                wanted = fingerprint.words(blocks[part])
                num_rows += found[..., 0].numel()
                if not torch.equal(found, wanted):
                    bad_rows = (found != wanted).any(-1).nonzero()
                    result.mismatches += len(bad_rows)
                    if not result.first_mismatch:
                        layer, page, token = bad_rows[0].tolist()
                        result.first_mismatch = (
                            f"block {blocks[part][page]}, {plane.name}, layer {layer}, token {token}"
                        )
        self._clock.collect(wait=False)
        return num_rows

    def settle(self) -> None:
        """Wait for all transfers, read the clock and raise what failed."""
        while self._in_flight:
            self._in_flight.popleft().wait()
        self._clock.collect(wait=True)
        check_errors(self._options.device)


class Fingerprint:
    """The bytes that a row must hold: a hash of what it is, mixed with a word for each position.

    Each byte has its lowest bit set, by the position's word alone: no byte is ever zero.
    """

    _LOW_BITS = 0x0101010101010101

    def __init__(self, plane: int, options: ReplayOptions) -> None:
        planes = options.model.planes
        row_bytes = planes[plane].row_bytes
        if row_bytes % 8:
            raise ValueError(f"[replay] rows must be multiples of 8 bytes, got {row_bytes}.")
        shape = (len(planes), options.num_layers, 1, options.block_tokens)
        generator = torch.Generator().manual_seed(options.seed)
        bounds = torch.iinfo(torch.int64)
        place = torch.randint(bounds.min, bounds.max, shape, generator=generator)
        position = torch.randint(bounds.min, bounds.max, (row_bytes // 8,), generator=generator)
        # Nobody knows that an NPU has all of this arithmetic: its rows are made and compared on the host.
        self.device = torch.device("cpu") if options.device.type == "npu" else options.device
        self._place = place[plane].to(self.device)
        self._position = (position | self._LOW_BITS).to(self.device)

    def words(self, blocks: list[int], *, out: Tensor | None = None) -> Tensor:
        """int64 [layers, blocks, tokens, words of a row]."""
        ids = torch.tensor(blocks, dtype=torch.int64).view(-1, 1).to(self.device)
        rows = _mix(_mix(ids) ^ self._place) & ~self._LOW_BITS
        return torch.bitwise_xor(rows.unsqueeze(-1), self._position, out=out)


class Replay:
    """Serves requests one after the other; `run` may be interrupted with Ctrl-C."""

    def __init__(self, options: ReplayOptions) -> None:
        self._pools = Pools(options)
        self._device = Tier(self._pools.device_pool)
        self._host = Tier(self._pools.host_pool)
        self._num_spare = self._device.num_pages // _SPARE_SHARE
        self._tier3: ReplayTier3 | None = None
        if options.tier3 is not None:
            tier = open_tier(
                options.tier3,
                self._pools.host_pool,
                namespace=f"hicache replay {options.model.name}, seed {options.seed}",
                segment_bytes=options.tier3_bytes,
                deadline_seconds=options.tier3_deadline_seconds,
            )
            self._tier3 = ReplayTier3(tier, self._host, options.block_bytes)

    def close(self) -> None:
        """Leave the third tier, if there is one."""
        if self._tier3 is not None:
            self._tier3.close()

    def run(
        self,
        requests: Iterable[Request],
        *,
        on_served: Callable[[ReplayResult], None] | None = None,
    ) -> ReplayResult:
        result = ReplayResult()
        started = time.perf_counter()
        try:
            for request in requests:
                self._serve(request, result)
                if on_served:
                    on_served(result)
        except KeyboardInterrupt:
            result.interrupted = True
        self._pools.settle()
        result.seconds = time.perf_counter() - started
        result.tier3 = None if self._tier3 is None else self._tier3.stats()
        return result

    def _serve(self, request: Request, result: ReplayResult) -> None:
        """Blocks of this request are in `keep`: no tier evicts them before it is done.

        A request longer than the device pool keeps only as many first blocks as fit there.
        """
        requested = list(dict.fromkeys(request.hash_ids))
        blocks = requested[: self._device.num_pages]
        keep = set(blocks)
        record = RequestRecord(blocks=len(requested))
        record.tier3_hits = self._fetch(blocks, keep, record)
        cached = self._num_cached(blocks)
        # Behind the first missing block nothing is a hit: a prefix ends there.
        loaded = [block for block in blocks[:cached] if block not in self._device.pages]
        new = [block for block in blocks[cached:] if block not in self._device.pages]
        record.device_hits = cached - len(loaded)
        record.host_hits = len(loaded) - record.tier3_hits
        self._evict(len(loaded) + len(new), keep, record, result)
        self._pools.wait_for_room(self._device, len(loaded) + len(new), record)
        load = None
        if loaded:
            host_pages = [self._host.pages[block] for block in loaded]
            device_pages = self._device.add(loaded)
            load = self._pools.load(device_pages, host_pages, record)
        self._device.add(new)
        self._pools.compute(load, record)
        if loaded:
            record.rows_verified = self._pools.verify(loaded, device_pages, result)
        if prefilled := blocks[cached:]:
            self._pools.prefill(prefilled, [self._device.pages[block] for block in prefilled])
        # The last block of a prefix is of no use without the first: it is to go first.
        for block in reversed(blocks):
            for tier in (self._device, self._host):
                if block in tier.pages:
                    tier.touch(block)
        self._evict(self._num_spare, keep, record, result)
        result.blocks_uncached += len(requested) - len(blocks)
        result.blocks_repeated += len(request.hash_ids) - len(requested)
        result.records.append(record)

    def _evict(self, wanted: int, keep: set[int], record: RequestRecord, result: ReplayResult) -> None:
        """Make room in the device pool; what the host does not hold yet is stored there first."""
        evicted = self._device.evict(wanted, keep=keep)
        for block, _ in evicted:
            if block in self._host.pages:
                self._host.touch(block)
        unsaved = [(block, page) for block, page in evicted if block not in self._host.pages]
        if unsaved:
            self._make_host_room(len(unsaved), keep, record)
        # Too small a host pool takes the most recently used of them.
        kept = unsaved[max(0, len(unsaved) - self._host.num_available) :]
        result.blocks_dropped += len(unsaved) - len(kept)
        if kept:
            host_pages = self._host.add([block for block, _ in kept])
            self._pools.store([page for _, page in kept], host_pages, record)
        self._device.free(evicted)

    def _make_host_room(self, wanted: int, keep: set[int], record: RequestRecord) -> None:
        """Make so many pages of the host pool available, or as many as can be; what leaves it goes to the
        third tier. A call of that tier that hangs may keep pages for longer."""
        evicted = self._host.evict(wanted, keep=keep)
        if self._tier3 is not None:
            self._pools.wait_for_stores(evicted)
            self._tier3.put(evicted, record.tier3)
        self._host.free(evicted)
        self._pools.wait_for_room(self._host, min(wanted, self._host.num_free), record)

    def _num_cached(self, blocks: list[int]) -> int:
        """How many of the first blocks are in one of the pools."""
        return next((i for i, block in enumerate(blocks) if not self._holds(block)), len(blocks))

    def _holds(self, block: int) -> bool:
        return block in self._device.pages or block in self._host.pages

    def _fetch(self, blocks: list[int], keep: set[int], record: RequestRecord) -> int:
        """Bring what continues the prefix from the third tier to the host pool, and count it."""
        if self._tier3 is None:
            return 0
        make_room = partial(self._make_host_room, keep=keep, record=record)
        num_fetched = 0
        while (cached := self._num_cached(blocks)) < len(blocks):
            candidates = blocks[cached : cached + _FETCH_BLOCKS]
            missing = list(takewhile(lambda block: not self._holds(block), candidates))
            num_found = self._tier3.fetch(missing, make_room, record.tier3)
            num_fetched += num_found
            if num_found < len(missing):
                break
        return num_fetched


def _page_runs(pages: list[int], longest: int) -> Iterator[tuple[int, int, slice]]:
    """(first page, page behind the last, their place in `pages`) of neighbours that ascend."""
    start = 0
    for i in range(1, len(pages) + 1):
        if i == len(pages) or pages[i] != pages[i - 1] + 1 or i - start == longest:
            yield pages[start], pages[i - 1] + 1, slice(start, i)
            start = i


def _mix(values: Tensor) -> Tensor:
    """splitmix64's finaliser: no two values of int64 give the same."""
    values = (values ^ _shift(values, 30)) * -0x40A7B892E31B1A47
    values = (values ^ _shift(values, 27)) * -0x6B2FB644ECCEEE15
    return values ^ _shift(values, 31)


def _shift(values: Tensor, bits: int) -> Tensor:
    """To the right, with zeros coming in: torch's own shift of int64 repeats the sign."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)
