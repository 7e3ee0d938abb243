"""The two-tier cache: what hits, what moves, and that a wrong row is found wherever it is wrong."""

import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_trace import real_trace

from torch_hicache import Ticket
from torch_hicache import replay as replay_module
from torch_hicache.layout import LAYOUTS, PlaneSpec
from torch_hicache.models import MODELS, Model
from torch_hicache.pool_pair import PoolPair
from torch_hicache.replay import (
    Fingerprint,
    Pools,
    Replay,
    ReplayOptions,
    ReplayResult,
    RequestRecord,
    Tier,
)
from torch_hicache.replay_clock import Clock, ForwardPass, Moved
from torch_hicache.slot_allocator import SlotAllocator
from torch_hicache.trace import BLOCK_TOKENS, Request, generate_trace, read_trace

# V has an allocation of its own; the two planes of one shape share one.
UNEVEN = Model(
    "uneven",
    "K wider than V",
    3,
    (
        PlaneSpec("key", (2, 24), torch.bfloat16),
        PlaneSpec("value", (2, 16), torch.bfloat16),
        PlaneSpec("second_key", (2, 24), torch.bfloat16),
    ),
)


def options_of(
    device_blocks: int, host_blocks: int, model: Model = UNEVEN, **fields: Any
) -> ReplayOptions:
    """Pools of so many blocks, with a rest of bytes that holds no further one."""
    fields = {"num_layers": 2, "block_tokens": 3} | fields
    options = ReplayOptions(model=model, device_bytes=0, host_bytes=0, **fields)
    block = options.block_bytes
    return replace(
        options,
        device_bytes=device_blocks * block + block - 1,
        host_bytes=host_blocks * block + block - 1,
    )


def asking(*prompts: Sequence[int]) -> list[Request]:
    return [Request(0, len(ids) * BLOCK_TOKENS, 1, tuple(ids)) for ids in prompts]


def run(options: ReplayOptions, requests: Sequence[Request]) -> ReplayResult:
    return Replay(options).run(requests)


def blocks_by_source(result: ReplayResult) -> list[tuple[int, int, int]]:
    return [(record.blocks, record.device_hits, record.host_hits) for record in result.records]


def moved_blocks(result: ReplayResult, options: ReplayOptions) -> list[tuple[int, int]]:
    """(loaded, stored) of each request."""
    return [
        (r.load.num_bytes // options.block_bytes, r.store.num_bytes // options.block_bytes)
        for r in result.records
    ]


@pytest.fixture
def after_transfer(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Installs a function that sees, and may spoil, each transfer of a replay."""

    def install(hook: Callable[[list[torch.Tensor], torch.Tensor, int], None]) -> None:
        calls = 0

        transfer = Ticket._transfer

        def spoiled(ticket: Ticket, dst: Any, src: Any, dst_indices: Any, *rest: Any) -> None:
            nonlocal calls
            transfer(ticket, dst, src, dst_indices, *rest)
            hook(dst, dst_indices, calls)
            calls += 1

        monkeypatch.setattr(Ticket, "_transfer", spoiled)

    return install


# --- What hits and what moves ----------------------------------------------------------------------


def test_a_prefix_is_found_where_it_is() -> None:
    options = options_of(4, 8)
    result = run(
        options,
        asking(
            [1, 2, 3],  # all new
            [1, 2, 4],  # two on the device, one new: the pool is full
            [5, 6],  # room is made by the leaves: 3 is the oldest, then 4
            [1, 2, 3],  # 3 comes back from the host; 6 makes room
            [1, 2, 9, 3],  # behind the missing 9 nothing is a hit, not even 3
        ),
    )
    assert blocks_by_source(result) == [(3, 0, 0), (3, 2, 0), (2, 0, 0), (3, 2, 1), (4, 2, 0)]
    assert moved_blocks(result, options) == [(0, 0), (0, 0), (0, 2), (1, 1), (0, 1)]
    assert result.hit_rate("device") == 6 / 15
    assert result.hit_rate("host") == 1 / 15
    assert result.mismatches == 0


def test_what_the_host_holds_is_not_stored_again() -> None:
    options = options_of(2, 8)
    result = run(options, asking([1, 2], [3, 4], [1, 2], [3, 4], [1, 2]))
    assert moved_blocks(result, options) == [(0, 0), (0, 2), (2, 2), (2, 0), (2, 0)]


def test_the_host_evicts_what_was_used_longest_ago() -> None:
    options = options_of(1, 2)
    result = run(options, asking([1], [2], [3], [1], [4], [1], [2]))
    # Stored so far: 1, 2, 3 (2 goes: 1 was just loaded), then 4 (3 goes). 2 is nowhere at the end.
    assert [record.host_hits for record in result.records] == [0, 0, 0, 1, 0, 1, 0]
    assert result.blocks_dropped == 0


def test_leaving_the_device_counts_as_a_use_of_the_hosts_copy() -> None:
    options = options_of(2, 3)
    # 1 is loaded by [1] and leaves again, without a store, for 6: it is younger then than 3 and 4.
    result = run(options, asking([1, 2], [3, 4], [1], [5], [6], [7], [8], [1]))
    assert moved_blocks(result, options)[4] == (0, 0)
    assert [record.host_hits for record in result.records] == [0, 0, 1, 0, 0, 0, 0, 1]


def test_a_request_longer_than_the_device_pool_keeps_its_first_blocks() -> None:
    options = options_of(3, 4)
    result = run(options, asking([1, 2, 3, 4, 5], [1, 2, 3, 4, 5], [7, 8, 9, 10], [1, 2, 3]))
    assert result.blocks_uncached == 2 + 2 + 1
    assert blocks_by_source(result) == [(5, 0, 0), (5, 3, 0), (4, 0, 0), (3, 0, 3)]
    assert result.mismatches == 0


def test_a_sixteenth_of_the_device_pool_is_evicted_ahead() -> None:
    options = options_of(32, 64)
    result = run(options, asking(range(30), range(31), range(31, 33), [0, 1]))
    # Two are to be free. 31 blocks of one request leave one; two more evict one for room, two for later.
    assert moved_blocks(result, options) == [(0, 0), (0, 0), (0, 3), (0, 0)]
    assert blocks_by_source(result) == [(30, 0, 0), (31, 30, 0), (2, 0, 0), (2, 2, 0)]


def test_what_a_small_host_can_not_take_is_dropped() -> None:
    options = options_of(4, 1)
    result = run(options, asking([1, 2, 3, 4], [5, 6, 7, 8], [1, 2]))
    assert result.blocks_dropped == 3 + 2  # the host's only page is in use when 7 and 8 go
    # The first block of the prefix was the last used, so it is the one that was kept.
    assert blocks_by_source(result)[2] == (2, 0, 1)


def test_a_repeated_or_empty_prompt_does_no_harm() -> None:
    options = options_of(4, 4)
    result = run(options, asking([1, 1, 2], [], [1, 2, 1]))
    assert blocks_by_source(result) == [(2, 0, 0), (0, 0, 0), (2, 2, 0)]


def test_all_blocks_of_a_request_move_in_one_call(after_transfer: Callable[..., None]) -> None:
    entries: list[int] = []
    after_transfer(lambda dst, dst_indices, call: entries.append(len(dst_indices)))
    run(options_of(6, 20), asking(range(6), range(10, 16), range(6)))
    assert entries == [1, 1, 6, 6, 6]  # the warm-up's two, a store, a store, a load


def test_a_tier_never_evicts_what_it_must_keep() -> None:
    rng = random.Random(5)
    tier = Tier(SlotAllocator(12))
    order: list[int] = []  # a model of the tier, oldest first
    for step in range(2000):
        keep = set(rng.sample(range(40), 9))
        wanted = rng.randint(0, 3)
        removed = tier.evict(wanted, keep=keep)
        tier.free(removed)
        evicted = [block for block, _ in removed]
        missing = max(0, wanted - (12 - len(order)))
        assert evicted == [block for block in order if block not in keep][:missing], step
        order = [block for block in order if block not in evicted]
        new = [b for b in rng.sample(sorted(keep), min(wanted, tier.num_free)) if b not in tier.pages]
        tier.add(new)
        order += new
        for block in sorted(keep & tier.pages.keys()):
            tier.touch(block)
            order.remove(block)
            order.append(block)
        assert list(tier.pages) == order
        assert len({*tier.pages.values()}) == len(order)
        assert tier.num_free == tier.num_available == 12 - len(order)


def test_free_pages_go_out_in_runs() -> None:
    tier = Tier(SlotAllocator(24, page_size=3))
    assert tier.add([*range(8)]) == [*range(8)]
    for block in (6, 1, 0, 7):  # the others are evicted: pages 2, 3, 4, 5
        tier.touch(block)
    for block in (5, 2, 4, 3):
        tier.pages.move_to_end(block, last=False)
    tier.free(tier.evict(4, keep=set()))
    assert tier.add([*range(10, 14)]) == [2, 3, 4, 5]


# --- Every restored row is right --------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", [*MODELS.values(), UNEVEN], ids=lambda model: model.name)
def test_rows_survive_the_host(model: Model, layout: str, device: str) -> None:
    options = options_of(40, 90, model, layout=layout, device=torch.device(device))
    result = run(options, generate_trace(150, seed=2))
    loads = result.moved("load")
    assert loads.num_bytes > 50 * options.block_bytes
    rows_in_block = 2 * 3 * len(model.planes)
    assert result.total("rows_verified") == loads.num_bytes // options.block_bytes * rows_in_block
    assert (result.mismatches, result.first_mismatch) == (0, "")
    assert loads.gbps > 0
    assert result.moved("store").gbps > 0


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_rows_survive_the_host_by_slot(layout: str, device: str) -> None:
    options = options_of(40, 90, layout=layout, unit="slot", device=torch.device(device))
    result = run(options, generate_trace(150, seed=2))
    assert result.total("rows_verified") > 0
    assert result.mismatches == 0


def test_the_real_trace_replays(device: str) -> None:
    options = options_of(2000, 8000, MODELS["mla_fp8"], device=torch.device(device))
    result = run(options, read_trace(real_trace()))
    assert len(result.records) == 3000
    assert result.total("rows_verified") > 50_000
    assert result.mismatches == 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_third_of_the_real_trace_by_every_method(layout: str, device: str) -> None:
    methods = {"cpu": ("auto",), "npu": ("auto", "kernel", "copy_engine")}
    for method in methods.get(device, ("kernel", "copy_engine", "staged")):
        options = options_of(
            700, 3000, layout=layout, method=method, device=torch.device(device), block_tokens=2
        )
        result = run(options, read_trace(real_trace())[:1000])
        assert result.total("rows_verified") > 5_000, method
        assert result.mismatches == 0, method


# --- A wrong row is found ---------------------------------------------------------------------------

# The host's rows of a stored page, [pages, page_size, heads, dim] of layer 1 of the first plane, as
# bytes, and what happens to them: how many rows are wrong then.
SPOILERS: dict[str, tuple[Callable[[torch.Tensor], object], int]] = {
    "one bit": (lambda rows: rows[0, 0, 0, 0].bitwise_xor_(0x10), 1),
    "the last byte": (lambda rows: rows[0, -1, -1, -1].bitwise_xor_(0x80), 1),
    "a row of zeros": (lambda rows: rows[0, 1].zero_(), 1),
    "a page of zeros": (lambda rows: rows[0].zero_(), 3),
    "two rows swapped": (lambda rows: rows[0, :2].copy_(rows[0, :2].flip(0).clone()), 2),
    "a row shifted": (lambda rows: rows[0, 2].copy_(rows[0, 2].roll(8, -1)), 1),
    "a row of another block": (lambda rows: rows[0, 1].copy_(rows[1, 1]), 1),
    "half of another row": (lambda rows: rows[0, 1, 0].copy_(rows[0, 2, 0]), 1),
}


@pytest.mark.parametrize("name", SPOILERS)
def test_a_spoiled_host_row_is_a_mismatch(
    name: str, device: str, after_transfer: Callable[..., None]
) -> None:
    spoil, num_wrong = SPOILERS[name]

    def hook(dst: list[torch.Tensor], dst_indices: torch.Tensor, call: int) -> None:
        if call == 2:  # the first store, behind the warm-up's two transfers
            if device == "cuda":
                torch.cuda.synchronize()
            rows = dst[0][1].view(torch.uint8)[dst_indices]
            spoil(rows)
            dst[0][1].view(torch.uint8)[dst_indices] = rows

    after_transfer(hook)
    options = options_of(2, 8, device=torch.device(device))
    result = run(options, asking([11, 12], [13, 14], [11, 12]))
    assert result.mismatches == num_wrong
    assert result.first_mismatch.startswith("block 1")
    assert ", key, layer 1, token " in result.first_mismatch
    assert result.total("rows_verified") == 2 * 2 * 3 * 3


def test_a_load_that_moves_nothing_is_all_mismatches(monkeypatch: pytest.MonkeyPatch) -> None:
    transfer = Ticket._transfer

    def store_only(ticket: Ticket, *args: Any) -> None:
        if ticket.direction == "store":
            transfer(ticket, *args)

    monkeypatch.setattr(Ticket, "_transfer", store_only)
    result = run(options_of(2, 8), asking([11, 12], [13, 14], [11, 12]))
    assert result.mismatches == result.total("rows_verified") == 36


def test_the_place_of_the_first_mismatch_is_told(after_transfer: Callable[..., None]) -> None:
    def hook(dst: list[torch.Tensor], dst_indices: torch.Tensor, call: int) -> None:
        if call == 2:
            value = dst[1].view(torch.uint8)  # V: [layers, pages, tokens, heads, bytes]
            value[1, dst_indices[1], 2, 1, 5] ^= 1

    after_transfer(hook)
    # The evicted are stored oldest first: the last block of the prefix, then the first.
    result = run(options_of(2, 8), asking([11, 12], [13, 14], [11, 12]))
    assert result.first_mismatch == "block 11, value, layer 1, token 2"
    assert result.mismatches == 1


def delay_transfers(
    monkeypatch: pytest.MonkeyPatch, direction: str, until: threading.Event | None
) -> None:
    """Transfers of a direction start late: on a GPU by half a second, on the CPU when `until` is set."""
    transfer = Ticket._transfer

    def late(ticket: Ticket, dst: list[torch.Tensor], src: list[torch.Tensor], *rest: Any) -> None:
        if ticket.direction == direction:
            if dst[0].is_cuda or src[0].is_cuda:
                torch.cuda._sleep(1_000_000_000)
            elif until is None:
                time.sleep(0.02)
            else:
                assert until.wait(30)
        transfer(ticket, dst, src, *rest)

    monkeypatch.setattr(Ticket, "_transfer", late)


def set_after(monkeypatch: pytest.MonkeyPatch, name: str, event: threading.Event) -> None:
    """Set the event whenever a method of Pools has run."""
    method = getattr(Pools, name)

    def run_and_set(pools: Pools, *args: Any) -> Any:
        result = method(pools, *args)
        event.set()
        return result

    monkeypatch.setattr(Pools, name, run_and_set)


@pytest.mark.parametrize("compute_seconds", [0.0, 0.004])
@pytest.mark.parametrize("waits", [True, False])
def test_a_load_that_is_not_waited_for_is_all_mismatches(
    waits: bool, compute_seconds: float, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = options_of(2, 8, device=torch.device(device), compute_seconds=compute_seconds)
    replay = Replay(options)
    verified = threading.Event()
    delay_transfers(monkeypatch, "load", until=None if waits else verified)
    if not waits:
        set_after(monkeypatch, "verify", verified)
        for name in ("wait_stream", "wait_layer"):
            monkeypatch.setattr(Ticket, name, lambda *args: None)
    result = replay.run(asking([11, 12], [13, 14], [11, 12]))
    assert result.total("rows_verified") == 36
    assert result.mismatches == (0 if waits else 36)


@pytest.mark.parametrize("holds", [True, False])
def test_pages_are_freed_before_their_store_has_read_them(
    holds: bool, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's hold keeps them from being handed out; without it the store reads what came next."""
    if not holds:
        for name in ("hold", "release"):
            monkeypatch.setattr(PoolPair, name, lambda *args: None)
    replay = Replay(options_of(2, 8, device=torch.device(device)))
    written = threading.Event()
    delay_transfers(monkeypatch, "store", until=None if holds else written)
    requests = asking([11, 12], [13, 14], [11, 12])
    result = replay.run(requests[:1])
    set_after(monkeypatch, "prefill", written)
    result.records += replay.run(requests[1:2]).records
    last = replay.run(requests[2:])
    assert last.total("rows_verified") == 36
    assert last.mismatches == (0 if holds else 36)


# --- A forward pass beside the loads ------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["layer_first", "page_first_direct"])
def test_rows_survive_a_load_by_layers(layout: str, device: str) -> None:
    options = options_of(
        40, 90, layout=layout, num_layers=3, device=torch.device(device), compute_seconds=1e-4
    )
    result = run(options, generate_trace(150, seed=2))
    assert result.total("rows_verified") > 0
    assert result.mismatches == 0
    assert result.compute_seconds > 0
    assert all(record.compute_seconds > 0 for record in result.records)
    assert result.hidden is not None


def test_each_layer_waits_for_its_load_before_it_computes(device: str) -> None:
    class Load:
        """Waiting for it takes its time on the current stream."""

        def wait_layer(self, layer: int) -> None:
            waited.append(layer)
            if device == "cpu":
                time.sleep(0.001)
            else:
                torch.cuda._sleep(2_000_000)

    waited: list[int] = []
    clock = Clock(torch.device(device))
    forward_pass = ForwardPass(torch.device(device), [4, 7, 9], 0.03, clock)
    assert forward_pass.layers_of_loads == "all"
    behind, alone = RequestRecord(), RequestRecord()
    forward_pass.run(Load(), behind)  # type: ignore[arg-type]
    forward_pass.run(None, alone)
    clock.collect(wait=True)
    assert waited == [4, 7, 9]
    assert behind.exposed_seconds >= 3 * 0.0005
    assert alone.exposed_seconds == 0
    for record in (behind, alone):
        assert record.compute_seconds > 0.02


def test_the_hidden_share_is_of_both_directions() -> None:
    record = RequestRecord(load=Moved(10, 3.0), store=Moved(10, 1.0), exposed_seconds=0.5)
    assert ReplayResult(records=[record]).hidden is None  # nothing was computed
    record.compute_seconds = 0.1
    assert ReplayResult(records=[record, RequestRecord(exposed_seconds=0.5)]).hidden == 0.75
    record.exposed_seconds = 9.0
    assert ReplayResult(records=[record]).hidden == 0.0
    assert ReplayResult(records=[RequestRecord(compute_seconds=1.0)]).hidden is None


# --- Fingerprints ---------------------------------------------------------------------------------------


def test_fingerprints_differ_wherever_they_should() -> None:
    options = options_of(4, 4, MODELS["gqa_8b"], num_layers=3, block_tokens=5)
    ids = [0, 1, 2**62, 2**63 - 1]
    fingerprints = [Fingerprint(plane, options) for plane in range(2)]
    words = torch.stack([fingerprint.words(ids) for fingerprint in fingerprints])
    assert words.shape == (2, 3, 4, 5, 256)  # planes, layers, blocks, tokens, words of a row
    assert words.unique().numel() == words.numel()
    assert bool((words.view(torch.uint8) != 0).all())
    assert torch.equal(words[1, :, 2:], fingerprints[1].words([2**62, 2**63 - 1]))
    other_seed = Fingerprint(0, replace(options, seed=1)).words([0])
    assert not bool((other_seed == words[0, :, :1]).any())


def test_the_mix_is_splitmix64() -> None:
    def reference(value: int) -> int:
        mask = 2**64 - 1
        value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & mask
        value = (value ^ (value >> 27)) * 0x94D049BB133111EB & mask
        return value ^ (value >> 31)

    values = [0, 1, -1, 2**63 - 1, -(2**63), 0x123456789ABCDEF]
    mixed = replay_module._mix(torch.tensor(values)).tolist()
    assert [value % 2**64 for value in mixed] == [reference(value % 2**64) for value in values]


# --- Interrupts and refusals ------------------------------------------------------------------------


def test_an_interrupted_run_keeps_what_it_has() -> None:
    def interrupted() -> Iterator[Request]:
        yield from asking([1, 2], [3], [1])
        raise KeyboardInterrupt

    result = Replay(options_of(2, 4)).run(interrupted())
    assert result.interrupted
    assert blocks_by_source(result) == [(2, 0, 0), (1, 0, 0), (1, 1, 0)]
    assert result.seconds > 0


def test_progress_is_told_after_each_request() -> None:
    served: list[int] = []
    requests = asking([1], [2], [3])
    Replay(options_of(2, 4)).run(requests, on_served=lambda r: served.append(len(r.records)))
    assert served == [1, 2, 3]


def test_a_pool_below_one_block_is_refused() -> None:
    options = options_of(2, 2)
    for tier in ("device", "host"):
        small = replace(options, **{f"{tier}_bytes": options.block_bytes - 1})
        with pytest.raises(
            ValueError, match=rf"^\[replay\] --{tier}-bytes must hold a block of 1,536 bytes"
        ):
            Replay(small)


def test_pools_larger_than_the_memory_are_refused_before_anything_is_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    options = options_of(2, 3)
    wanted = 5 * options.block_bytes
    monkeypatch.setattr(replay_module, "available_memory", lambda: wanted)
    Replay(options)
    monkeypatch.setattr(replay_module, "available_memory", lambda: wanted - 1)
    monkeypatch.setattr(replay_module, "DevicePool", None)
    monkeypatch.setattr(replay_module, "HostPool", None)
    with pytest.raises(MemoryError, match=r"need 7,680 bytes, 7,679 are free\.$"):
        Replay(options)


def test_rows_of_odd_bytes_are_refused() -> None:
    odd = Model("odd", "", 1, (PlaneSpec("key", (1, 7), torch.bfloat16),))
    with pytest.raises(ValueError, match=r"rows must be multiples of 8 bytes, got 14\."):
        Replay(options_of(2, 2, odd))


def test_a_layout_without_slots_refuses_slots() -> None:
    with pytest.raises(ValueError, match="page_head is addressable by page only"):
        Replay(options_of(2, 2, layout="page_head", unit="slot"))


def test_a_method_that_the_device_lacks_is_refused_at_once() -> None:
    with pytest.raises(ValueError, match="method 'copy_engine' needs an accelerator"):
        Replay(options_of(2, 2, method="copy_engine"))
