"""Figures of the engine beside one big copy of the same run.

    python benchmark/bench_engine.py [TRACE.jsonl] [--json results.json]

Sections: history (a host pool of 1 Mi slots, about 32 GiB, page size 1, after the trace's long history of
allocations: the last loads and stores of that history, through the engine), forward (a load of 32 layers
beside a forward pass of 32 layers), submit (host time of one call with 1,000 pages).
"""

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from bench_slot_allocator import PARTS, serve
from bench_transfer_kv import GIB, link_rates, median, print_row, save
from torch import Tensor

from torch_hicache import DevicePool, HostPool, PlaneSpec, TransferEngine, explain
from torch_hicache.trace import Request, generate_trace, read_trace

HOST_SLOTS, DEVICE_SLOTS = 1 << 20, 1 << 16
Results = list[dict[str, object]]


def latest_transfers(requests: Sequence[Request], wanted: int) -> dict[str, list[Tensor]]:
    """Host slots of the last loads and stores of the history, up to `wanted` slots each way."""
    seen: dict[str, list[Tensor]] = {"load": [], "store": []}

    def observe(what: str, part: int, slots: Tensor) -> None:
        if part == PARTS - 1 and len(slots) <= DEVICE_SLOTS:
            seen[what].append(slots)

    serve(requests, "runs", 1, 256 << 10, HOST_SLOTS, observe=observe)
    for what, transfers in seen.items():
        total = 0
        for first in range(len(transfers) - 1, -1, -1):
            total += len(transfers[first])
            if total > wanted:
                break
        seen[what] = transfers[first:]
    return seen


def bench_history(link: dict[str, float], requests: Sequence[Request]) -> Results:
    results: Results = []
    for row_bytes, layers in ((256, 128), (576, 57), (1152, 28)):
        planes = [PlaneSpec("latent", (row_bytes,), torch.uint8)]
        host = HostPool(planes, layers, HOST_SLOTS, "cuda")
        device = DevicePool(planes, layers, DEVICE_SLOTS, "cuda")
        seen = latest_transfers(requests, 8 * GIB // host.bytes_per_slot)
        with TransferEngine(device, host, max_in_flight=4096) as engine:
            for direction, transfers in seen.items():
                at = [torch.arange(len(slots)) for slots in transfers]
                dst, src = device.stacks(), host.stacks()
                if direction == "load":
                    plan = explain(dst, src, at[0], transfers[0], slot_dim=1)
                else:
                    plan = explain(src, dst, transfers[0], at[0], slot_dim=1)

                def run(direction: str = direction, transfers=transfers, at=at, engine=engine) -> None:
                    for host_slots, device_slots in zip(transfers, at, strict=True):
                        if direction == "load":
                            ticket = engine.load(host_slots, device_slots)
                        else:
                            ticket = engine.store(device_slots, host_slots)
                    ticket.wait()

                run()
                times = []
                for _ in range(3):
                    begin = time.perf_counter()
                    run()
                    times.append(time.perf_counter() - begin)
                nbytes = sum(map(len, transfers)) * host.bytes_per_slot
                rate = nbytes / median(times) / 1e9
                runs = sum(1 + int((slots.diff() != 1).sum()) for slots in transfers)
                size = f"{row_bytes} B x {layers} layers, {host.nbytes / GIB:.0f} GiB"
                results.append(
                    {
                        "section": "history",
                        "case": size,
                        "direction": direction,
                        "first_method": plan.method,
                        "mean_run": sum(map(len, transfers)) / runs,
                        "gbps": rate,
                        "of_link": rate / link[direction],
                    }
                )
        del host, device, engine
    return results


def device_ms(run: Callable[[], object]) -> float:
    """Median of 7, from the host's call to the end of the work on the device."""
    times = []
    for _ in range(8):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) * 1e3)
    return median(times[1:])


def bench_forward(_link: dict[str, float], _requests: Sequence[Request]) -> Results:
    results: Results = []
    layers, tokens = 32, 16384
    planes = [PlaneSpec("k", (4, 128), torch.bfloat16), PlaneSpec("v", (4, 128), torch.bfloat16)]
    for layout in ("layer_first", "page_first"):
        host = HostPool(planes, layers, 2 * tokens, "cuda", layout, page_size=64)
        device = DevicePool(planes, layers, tokens, "cuda", page_size=64)
        pages = torch.randperm(2 * tokens // 64)[: tokens // 64]
        host_slots = (pages.unsqueeze(1) * 64 + torch.arange(64)).flatten()
        device_slots = torch.arange(tokens)
        for size, repeats in ((4096, 3), (1024, 60)):
            a, b = (torch.randn(size, size, dtype=torch.bfloat16, device="cuda") for _ in range(2))
            out = torch.empty_like(a)
            with TransferEngine(device, host) as engine:

                def forward(wait: Callable[[int], object], a=a, b=b, out=out, repeats=repeats) -> None:
                    for layer in range(layers):
                        wait(layer)
                        for _ in range(repeats):
                            torch.mm(a, b, out=out)

                def both(engine=engine, forward=forward, at=(host_slots, device_slots)) -> None:
                    forward(engine.load(*at, layers="all").wait_layer)

                def load(engine=engine, at=(host_slots, device_slots)) -> None:
                    engine.load(*at, layers="all").wait_stream()

                compute_ms = device_ms(lambda forward=forward: forward(lambda _layer: None))
                load_ms, total_ms = device_ms(load), device_ms(both)
            results.append(
                {
                    "section": "forward",
                    "case": f"{layout}, products of {size} cubed",
                    "compute_ms": compute_ms,
                    "load_ms": load_ms,
                    "total_ms": total_ms,
                    "of_longer": total_ms / max(compute_ms, load_ms),
                }
            )
    return results


def bench_submit(_link: dict[str, float], _requests: Sequence[Request]) -> Results:
    results: Results = []
    planes = [PlaneSpec("k", (8, 64), torch.bfloat16), PlaneSpec("v", (8, 64), torch.bfloat16)]
    for layout, unit in (("page_first", "page"), ("page_first", "slot"), ("layer_first", "page")):
        host = HostPool(planes, 8, 2000 * 64, "cuda", layout, page_size=64)
        device = DevicePool(planes, 8, 1000 * 64, "cuda", page_size=64)
        pages = torch.randperm(2000)[:1000]
        at = pages, torch.randperm(1000)
        if unit == "slot":
            at = tuple((part.unsqueeze(1) * 64 + torch.arange(64)).flatten() for part in at)  # type: ignore[assignment]
        with TransferEngine(device, host, unit=unit) as engine:
            for layers in (None, "all"):
                times = []
                for _ in range(9):
                    torch.cuda.synchronize()
                    begin = time.perf_counter()
                    ticket = engine.load(*at, layers=layers)
                    times.append((time.perf_counter() - begin) * 1e6)
                    ticket.wait()
                what = "layer by layer" if layers else "all layers at once"
                results.append(
                    {
                        "section": "submit",
                        "case": f"1,000 pages of 64 tokens, 8 layers, {layout}, by {unit}, {what}",
                        "us": median(times[1:]),
                    }
                )
    return results


SECTIONS = {"history": bench_history, "forward": bench_forward, "submit": bench_submit}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("trace", nargs="?", type=Path, help="as for `hicache replay`")
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--json", type=Path, help="write machine and results here")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("[bench_engine] these figures need a CUDA device, and there is none.", file=sys.stderr)
        return 2
    requests = read_trace(options.trace) if options.trace else generate_trace(3000)
    link = link_rates()
    print(f"CE: load {link['load']:.1f} GB/s, store {link['store']:.1f} GB/s", flush=True)
    results: Results = []
    for name in options.sections.split(","):
        print(f"[{name}]", flush=True)
        rows = SECTIONS[name](link, requests)
        results += rows
        for row in rows:
            print_row(row)
    save(options.json, results, link)
    return 0


if __name__ == "__main__":
    sys.exit(main())
