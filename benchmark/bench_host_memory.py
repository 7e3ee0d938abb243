"""Time to make a host pool of pinned memory, and how much memory it takes, beside torch's own.

    python benchmark/bench_host_memory.py                     pools of 5 and 17 GiB
    python benchmark/bench_host_memory.py --gib 65,130        others; the second needs several pieces
    python benchmark/bench_host_memory.py --json results.json and keep them

Each case is made and released `--repeats` times; medians. "taken" is what the machine's available
memory shrank by, in multiples of what was asked: 1.00 is exact. Without a CUDA device only the part is
timed that needs none: mapping and touching.
"""

import argparse
import functools
import gc
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_transfer_kv import GIB, machine

import torch_hicache
from torch_hicache.host_mapping import HostMapping
from torch_hicache.memory_budget import available_memory

Case = Callable[[int], object]
TORCH = "torch.empty(pin_memory=True)"


def touched(nbytes: int) -> HostMapping:
    mapping = HostMapping(nbytes)
    mapping.touch()
    return mapping


def touched_by_one_thread(nbytes: int) -> HostMapping:
    mapping = HostMapping(nbytes)
    mapping.touch([0])
    return mapping


def pinned(nbytes: int, **options: object) -> torch.Tensor:
    return torch_hicache.empty_host((nbytes,), torch.uint8, "cuda", "pinned", **options)  # type: ignore[arg-type]


def shared(nbytes: int) -> torch.Tensor:
    with torch_hicache.SharedHostMemory.create(nbytes) as memory:
        return pinned(nbytes, shared=memory)


def registered(nbytes: int) -> tuple[object, object]:
    """Memory that the caller had before, made and touched outside of the time."""
    tensor = torch.empty(nbytes, dtype=torch.uint8).fill_(1)
    begin = time.perf_counter()
    handle = torch_hicache.register_host(tensor, "cuda")
    return handle, time.perf_counter() - begin


def cases() -> dict[str, Case]:
    found: dict[str, Case] = {
        "mapped, touched by all threads": touched,
        "mapped, touched by one thread": touched_by_one_thread,
    }
    if not torch.cuda.is_available():
        return found
    return {
        TORCH: lambda n: torch.empty(n, dtype=torch.uint8, pin_memory=True),
        "empty_host": pinned,
        "empty_host, pieces of 1 GiB": functools.partial(pinned, max_piece_bytes=GIB),
        "empty_host, huge pages set aside": functools.partial(pinned, huge_pages="explicit"),
        "empty_host, shared": shared,
        "register_host": registered,
        **found,
    }


def measure(make: Case, nbytes: int) -> tuple[float, float, float]:
    """Seconds to make, seconds to release, and memory taken by the byte asked."""
    gc.collect()
    before = available_memory()
    begin = time.perf_counter()
    made = make(nbytes)
    seconds = time.perf_counter() - begin
    if isinstance(made, tuple):
        made, seconds = made
    taken = before - available_memory()
    begin = time.perf_counter()
    del made
    if torch.cuda.is_available():
        torch._C._host_emptyCache()  # torch keeps pinned memory for later
    return seconds, time.perf_counter() - begin, taken / nbytes


def bench(name: str, make: Case, nbytes: int, repeats: int) -> dict[str, Any]:
    runs = [measure(make, nbytes) for _ in range(repeats)]
    seconds, release_seconds, taken = (statistics.median(column) for column in zip(*runs, strict=True))
    return {
        "section": "host_memory",
        "case": name,
        "gib": nbytes / GIB,
        "seconds": seconds,
        "release_seconds": release_seconds,
        "gib_per_second": nbytes / GIB / seconds,
        "taken": taken,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--gib", default="5,17", help="sizes; a page more, so none is a power of 2")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path, help="write machine and results here")
    options = parser.parse_args()
    if torch.cuda.is_available():
        torch.zeros(1, device="cuda")  # starting the device is no part of any case
    else:
        print("no CUDA device: nothing is page-locked", file=sys.stderr)
    results: list[dict[str, Any]] = []
    for gib in map(float, options.gib.split(",")):
        nbytes = math.ceil(gib * GIB) + 4096
        for name, make in cases().items():
            try:
                row = bench(name, make, nbytes, options.repeats)
            except MemoryError as error:
                print(f"{gib:5.0f} GiB  {name:<34}  {error}", flush=True)
                continue
            base = [r for r in results if r["gib"] == row["gib"] and r["case"] == TORCH]
            if base:
                row["of_torch"] = row["seconds"] / base[0]["seconds"]
            results.append(row)
            print(
                f"{gib:5.0f} GiB  {name:<34}  {row['seconds']:8.3f} s  "
                f"{row['gib_per_second']:7.1f} GiB/s  "
                f"released in {row['release_seconds']:6.3f} s  taken {row['taken']:5.2f}",
                flush=True,
            )
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        record = {"machine": machine(), "results": results}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
