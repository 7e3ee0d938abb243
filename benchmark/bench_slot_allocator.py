"""Runs of slots over a long history, and what an allocation costs on the host.

    python benchmark/bench_slot_allocator.py TRACE.jsonl    a serving trace; without one: a generated one
    python benchmark/bench_slot_allocator.py TRACE.jsonl --json results.json

A device pool and a host pool of tokens, both LRU, serve the trace without any bytes: what the device
pool evicts for a request is stored in host slots that are allocated together, what is found there is
loaded. "store" and "load" are the mean lengths, in slots, of the runs of host slots in each of ten parts
of the history. The free lists take what was freed last (lifo) or first (fifo), and search nothing.
Times are of one thread, and include the free list's own conversion to a tensor.
Generated tokens are not in traces, so they are not cached.
"""

import argparse
import json
import platform
import subprocess
import sys
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from torch_hicache.slot_allocator import SlotAllocator
from torch_hicache.trace import BLOCK_TOKENS, Request, generate_trace, read_trace

PARTS = 10


class Slots(Protocol):
    """What a tier asks of an allocator."""

    @property
    def available(self) -> int: ...
    def allocate(self, n: int) -> Tensor: ...
    def free(self, indices: Tensor) -> None: ...


class FreeList:
    """Pages in a list: no search, no order."""

    def __init__(self, num_slots: int, page_size: int, *, last_first: bool) -> None:
        self._pages = list(range(num_slots // page_size))
        self._last_first = last_first
        self._page_size = page_size

    @property
    def available(self) -> int:
        return len(self._pages) * self._page_size

    def allocate(self, n: int) -> Tensor:
        part = slice(0, n // self._page_size)
        if self._last_first:
            part = slice(len(self._pages) - part.stop, None)
        pages = torch.tensor(self._pages[part], dtype=torch.int64)
        del self._pages[part]
        return (pages.unsqueeze(1) * self._page_size + torch.arange(self._page_size)).flatten()

    def free(self, indices: Tensor) -> None:
        self._pages.extend((indices[:: self._page_size] // self._page_size).tolist())


def new_slots(name: str, num_slots: int, page_size: int) -> Slots:
    if name == "runs":
        return SlotAllocator(num_slots, page_size)
    return FreeList(num_slots, page_size, last_first=name == "lifo")


class Tier:
    """Blocks and their slots, least recently used first."""

    def __init__(self, slots: Slots) -> None:
        self.blocks: OrderedDict[int, Tensor] = OrderedDict()
        self.slots = slots
        self.seconds = 0.0  # in the allocator
        self.calls = 0

    def add(self, sizes: dict[int, int]) -> Tensor:
        """Slots for blocks of so many, allocated together."""
        started = time.perf_counter()
        taken = self.slots.allocate(sum(sizes.values()))
        self.seconds += time.perf_counter() - started
        self.calls += 1
        self.blocks.update(zip(sizes, taken.split(list(sizes.values())), strict=True))
        return taken

    def evict(self, wanted: int, keep: set[int]) -> dict[int, int]:
        """Free old blocks, never those of `keep`, until `wanted` slots are available or none is left.

        Returns the sizes of the evicted.
        """
        missing = wanted - self.slots.available
        evicted: dict[int, int] = {}
        for block, slots in self.blocks.items():
            if missing <= 0:
                break
            if block not in keep:
                evicted[block] = len(slots)
                missing -= len(slots)
        if evicted:
            freed = torch.cat([self.blocks.pop(block) for block in evicted])
            started = time.perf_counter()
            self.slots.free(freed)
            self.seconds += time.perf_counter() - started
            self.calls += 1
        return evicted


class Runs:
    """The mean length of runs, in each part of the history."""

    def __init__(self) -> None:
        self._slots, self._runs = [0] * PARTS, [0] * PARTS

    def count(self, part: int, indices: Tensor) -> None:
        self._slots[part] += len(indices)
        self._runs[part] += 1 + int((indices.diff() != 1).sum())

    def means(self) -> list[float]:
        return [slots / max(1, runs) for slots, runs in zip(self._slots, self._runs, strict=True)]


def block_sizes(request: Request, page_size: int) -> dict[int, int]:
    """Slots of each block of a prompt, whole pages; only the last may have fewer tokens."""
    sizes = dict.fromkeys(request.hash_ids, BLOCK_TOKENS)
    if rest := request.input_length % BLOCK_TOKENS:
        sizes[request.hash_ids[-1]] = -(-rest // page_size) * page_size
    return sizes


def serve(
    requests: Sequence[Request],
    name: str,
    page_size: int,
    device_slots: int,
    host_slots: int,
    *,
    observe: Callable[[str, int, Tensor], None] = lambda _what, _part, _slots: None,
) -> dict[str, object]:
    """Play the history; `observe` is told the host slots of each "store" and "load"."""
    device = Tier(new_slots(name, device_slots, page_size))
    host = Tier(new_slots(name, host_slots, page_size))
    stores, loads = Runs(), Runs()
    for i, request in enumerate(requests):
        part = i * PARTS // len(requests)
        sizes = block_sizes(request, page_size)
        if sum(sizes.values()) > device_slots:
            continue
        keep = set(sizes)
        missing = {block: size for block, size in sizes.items() if block not in device.blocks}
        evicted = device.evict(sum(missing.values()), keep)
        # The last block of a prefix goes first: in reverse, the blocks of a prefix lie in its order.
        unsaved = {b: evicted[b] for b in reversed(evicted) if b not in host.blocks}
        host.evict(sum(unsaved.values()), keep)
        if unsaved and sum(unsaved.values()) <= host.slots.available:
            stored = host.add(unsaved)
            stores.count(part, stored)
            observe("store", part, stored)
        if found := [block for block in missing if block in host.blocks]:
            loaded = torch.cat([host.blocks[block] for block in found])
            loads.count(part, loaded)
            observe("load", part, loaded)
        if missing:
            device.add(missing)
        for block in reversed(sizes):  # the last block of a prefix is to go first
            for tier in (device, host):
                if block in tier.blocks:
                    tier.blocks.move_to_end(block)
    calls, seconds = device.calls + host.calls, device.seconds + host.seconds
    return {
        "section": "slot_allocator",
        "case": f"{name}, pages of {page_size}",
        "allocator": name,
        "page_size": page_size,
        "store_mean_run": stores.means(),
        "load_mean_run": loads.means(),
        "calls": calls,
        "us": seconds / calls * 1e6,
        "calls_per_s": calls / seconds,
    }


def machine() -> dict[str, str]:
    command = ["git", "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": done.stdout.strip(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("trace", nargs="?", type=Path, help="as for `hicache replay`")
    parser.add_argument("--device-slots", type=int, default=256 << 10)
    parser.add_argument("--host-slots", type=int, default=1 << 20)
    parser.add_argument("--json", type=Path, help="write machine and results here")
    options = parser.parse_args()
    torch.set_num_threads(1)
    requests = read_trace(options.trace) if options.trace else generate_trace(3000)
    results = []
    for page_size in (1, 64):
        for name in ("runs", "lifo", "fifo"):
            row = serve(requests, name, page_size, options.device_slots, options.host_slots)
            results.append(row)
            print(f"{row['case']:<22}  {row['us']:9.1f} us a call  {row['calls_per_s']:9,.0f} calls/s")
            for what in ("store", "load"):
                means = row[f"{what}_mean_run"]
                print(f"  {what:<6}" + "".join(f"{mean:9.1f}" for mean in means), flush=True)  # type: ignore[attr-defined]
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        record = {
            "machine": machine(),
            "trace": options.trace.name if options.trace else "generated",
            "device_slots": options.device_slots,
            "host_slots": options.host_slots,
            "results": results,
        }
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
