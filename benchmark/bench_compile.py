"""Figures of compiled and captured graphs with transfers in them, on a GPU.

    python benchmark/bench_compile.py [--json results.json]

forward: a compiled, captured forward pass of 32 layers that waits for each layer of a load beside it
(`wait_layer`), against the pass alone and the load alone. launch: host time of 32 transfers of one token,
eager against the replay of a captured graph. memory: peak over eager of a compiled layer-wise load.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from bench_engine import device_ms
from bench_transfer_kv import machine, median, print_row
from torch import Tensor

from torch_hicache import DevicePool, HostPool, PlaneSpec, TransferEngine, transfer_kv, wait_layer

LAYERS, TOKENS = 32, 16384
SPECS = [PlaneSpec("k", (4, 128), torch.bfloat16), PlaneSpec("v", (4, 128), torch.bfloat16)]
Results = list[dict[str, object]]


def captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    torch.cuda.synchronize()
    return graph


def bench_forward() -> Results:
    host = HostPool(SPECS, LAYERS, 2 * TOKENS, "cuda", "page_first", page_size=64)
    device = DevicePool(SPECS, LAYERS, TOKENS, "cuda", page_size=64)
    pages = torch.randperm(2 * TOKENS // 64)[: TOKENS // 64]
    host_slots = (pages.unsqueeze(1) * 64 + torch.arange(64)).flatten()
    device_slots = torch.arange(TOKENS)
    weight = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda") / 64
    state = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda")
    with TransferEngine(device, host) as engine:

        def forward(state: Tensor, waits: bool) -> Tensor:
            for layer in device.layer_ids:
                if waits:
                    wait_layer(device.planes(layer), engine.handle, layer)
                k, v = device.planes(layer)
                for _ in range(3):
                    state = state @ weight
                state = state + k[:4096, 0, :1] * v[:4096, 0, :1]
            return state

        step = torch.compile(forward, fullgraph=True)
        graph = captured(lambda: step(state, True))
        alone = captured(lambda: step(state, False))

        def load() -> None:
            engine.load(host_slots, device_slots, layers="all").wait_stream()

        def both() -> None:
            engine.load(host_slots, device_slots, layers="all")
            graph.replay()

        compute_ms, load_ms, total_ms = device_ms(alone.replay), device_ms(load), device_ms(both)
    return [
        {
            "section": "compile",
            "case": "32 layers, load beside a captured pass",
            "compute_ms": compute_ms,
            "load_ms": load_ms,
            "total_ms": total_ms,
            "of_longer": total_ms / max(compute_ms, load_ms),
        }
    ]


def host_us(run: Callable[[], object]) -> float:
    times = []
    for _ in range(50):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        run()
        times.append((time.perf_counter() - begin) * 1e6)
    return median(times)


def bench_launch() -> Results:
    host = HostPool(SPECS, LAYERS, 1024, "cuda").device_view()
    device = DevicePool(SPECS, LAYERS, 1024, "cuda")
    at = torch.zeros(1, dtype=torch.int64, device="cuda")
    planes = [(device.planes(layer), host.planes(layer)) for layer in device.layer_ids]

    def run() -> None:
        for dst, src in planes:
            transfer_kv(dst, src, at, at)

    with torch.no_grad():
        graph = captured(run)
        eager, replay = host_us(run), host_us(graph.replay)
    return [
        {"section": "compile", "case": "32 transfers of one token, eager", "us": eager},
        {
            "section": "compile",
            "case": "32 transfers of one token, replayed",
            "us": replay,
            "of_eager": replay / eager,
        },
    ]


def bench_memory() -> Results:
    host = HostPool(SPECS, 8, 1 << 16, "cuda").device_view()
    device = DevicePool(SPECS, 8, 1 << 16, "cuda")
    at = torch.arange(4096, device="cuda")

    def step(state: Tensor) -> Tensor:
        for layer in device.layer_ids:
            transfer_kv(device.planes(layer), host.planes(layer), at, at)
            k, v = device.planes(layer)
            state = state + k[:4096, 0, :1] * v[:4096, 0, :1]
        return state

    def peak(run: Callable[[Tensor], Tensor]) -> int:
        state = torch.zeros(4096, 64, dtype=torch.bfloat16, device="cuda")
        run(state)
        torch.cuda.reset_peak_memory_stats()
        run(state)
        return torch.cuda.max_memory_allocated()

    with torch.no_grad():
        over = peak(torch.compile(step, fullgraph=True)) - peak(step)
    return [
        {
            "section": "compile",
            "case": "8 layers, peak of the compiled step over eager",
            "of_pool": over / device.nbytes,
        }
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", type=Path, help="write machine and results here")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("[bench_compile] these figures need a CUDA device, and there is none.", file=sys.stderr)
        return 2
    results: Results = []
    for bench in (bench_launch, bench_memory, bench_forward):
        rows = bench()
        results += rows
        for row in rows:
            print_row(row)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        record = {"machine": machine(), "results": results}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
