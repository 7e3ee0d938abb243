"""Figures of transfer_kv beside baselines of the same run.

    python benchmark/bench_transfer_kv.py                       all sections that this machine can run
    python benchmark/bench_transfer_kv.py --sections rows,host  some of them
    python benchmark/bench_transfer_kv.py --json results.json   and keep them

Sections: rows (random slots of a small host pool), big_pool (of 16 and 32 GiB), gemm (what a transfer
does to a matrix product beside it), host (time of a call on the host, and latency), cpu. GB/s are 1e9
bytes a second; "CE" is one big cudaMemcpyAsync of pinned memory in the same direction.
"""

import argparse
import ctypes
import functools
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch

import torch_hicache

GIB = 1 << 30
MIB = 1 << 20
transfer_kv = torch.ops.hicache.transfer_kv


def median(values: list[float]) -> float:
    return statistics.median(values)


def device_seconds(run: Callable[[], object], repeats: int = 7, warmup: int = 2) -> float:
    """Median time on the current stream, by events."""
    for _ in range(warmup):
        run()
    times = []
    for _ in range(repeats):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return median(times)


def host_seconds(run: Callable[[], object], repeats: int = 5, calls: int = 1) -> float:
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        for _ in range(calls):
            run()
        times.append((time.perf_counter() - begin) / calls)
    return median(times)


def interleaved(
    runs: dict[str, Callable[[], object]],
    rounds: int = 9,
    settle: Callable[[], object] = lambda: None,
) -> dict[str, float]:
    """Median host seconds of each, taken in turn so that all see the same noise."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            settle()
            begin = time.perf_counter()
            run()
            times[name].append(time.perf_counter() - begin)
    return {name: median(values) for name, values in times.items()}


class Pools:
    """A host pool and a device pool of `planes` stacked planes, and random slots of both."""

    def __init__(self, row_bytes: int, planes: int, host_slots: int, entries: int, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)
        self.bytes = planes * entries * row_bytes
        self.host = torch_hicache.empty_host((planes, host_slots, row_bytes), torch.uint8, "cuda")
        self.device = torch.empty((planes, entries, row_bytes), dtype=torch.uint8, device="cuda")
        self.host_slots = torch.randperm(host_slots, generator=generator)[:entries].cuda()
        self.device_slots = torch.randperm(entries, generator=generator).cuda()

    def load(self, **options: object) -> None:
        transfer_kv([self.device], [self.host], self.device_slots, self.host_slots, slot_dim=1, **options)

    def store(self, **options: object) -> None:
        transfer_kv([self.host], [self.device], self.host_slots, self.device_slots, slot_dim=1, **options)


def build(*command: str) -> ctypes.CDLL:
    """A shared library of a source file in this folder; the last argument names it."""
    source, library = Path(__file__).parent / command[-1], Path(tempfile.mkdtemp()) / "library.so"
    subprocess.run([*command[:-1], "-O3", "-shared", "-o", library, source], check=True)
    return ctypes.CDLL(str(library))


def link_rates() -> dict[str, float]:
    host = torch_hicache.empty_host((GIB,), torch.uint8, "cuda").fill_(1)
    device = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    load = device_seconds(lambda: device.copy_(host, non_blocking=True))
    store = device_seconds(lambda: host.copy_(device, non_blocking=True))
    return {"load": GIB / load / 1e9, "store": GIB / store / 1e9}


def torch_index_load(pools: Pools, host_index: torch.Tensor) -> None:
    """What a user would write without this library, to completion."""
    rows = pools.host[:, host_index].pin_memory()
    pools.device[:, pools.device_slots] = rows.to("cuda", non_blocking=True)
    torch.cuda.synchronize()


def bench_rows(link: dict[str, float]) -> list[dict[str, object]]:
    results = []
    entries, pool_bytes = 16384, GIB // 2
    for row_bytes in (64, 128, 256, 576, 656, 1152, 2048, 4096):
        planes = max(1, min(32, 256 * MIB // (entries * row_bytes)))
        pools = Pools(row_bytes, planes, max(entries, pool_bytes // planes // row_bytes), entries)
        pools.host.fill_(1)
        for direction in ("load", "store"):
            seconds = device_seconds(getattr(pools, direction))
            rate = pools.bytes / seconds / 1e9
            results.append(
                {
                    "section": "rows",
                    "case": f"{row_bytes} B x {planes} planes",
                    "row_bytes": row_bytes,
                    "direction": direction,
                    "us": seconds * 1e6,
                    "gbps": rate,
                    "of_link": rate / link[direction],
                }
            )
        if row_bytes in (256, 2048):
            index_load = functools.partial(torch_index_load, pools, pools.host_slots.cpu())
            seconds = host_seconds(index_load, 3)
            rate = pools.bytes / seconds / 1e9
            results.append(
                {
                    "section": "rows",
                    "case": f"torch indexing, {row_bytes} B",
                    "row_bytes": row_bytes,
                    "direction": "load",
                    "us": seconds * 1e6,
                    "gbps": rate,
                    "of_link": rate / link["load"],
                }
            )
        del pools
    return results


def bench_big_pool(link: dict[str, float]) -> list[dict[str, object]]:
    results = []
    for span_gib in (16, 32):
        flat = torch_hicache.empty_host((span_gib * GIB,), torch.uint8, "cuda")
        flat.fill_(1)
        for row_bytes in (256, 576, 1152, 2048):
            slots, entries = span_gib * GIB // row_bytes, 256 * MIB // row_bytes
            pools = Pools.__new__(Pools)
            pools.bytes = entries * row_bytes
            pools.host = flat[: slots * row_bytes].view(1, slots, row_bytes)
            pools.device = torch.empty((1, entries, row_bytes), dtype=torch.uint8, device="cuda")
            pools.host_slots = torch.randint(slots, (2 * entries,)).unique()
            order = torch.randperm(len(pools.host_slots))[:entries]
            pools.host_slots = pools.host_slots[order].cuda()
            pools.device_slots = torch.arange(entries, device="cuda")
            for direction in ("load", "store"):
                seconds = device_seconds(getattr(pools, direction))
                rate = pools.bytes / seconds / 1e9
                results.append(
                    {
                        "section": "big_pool",
                        "case": f"{span_gib} GiB, {row_bytes} B",
                        "row_bytes": row_bytes,
                        "span_gib": span_gib,
                        "direction": direction,
                        "us": seconds * 1e6,
                        "gbps": rate,
                        "of_link": rate / link[direction],
                    }
                )
        del flat, pools
    return results


def gemm_beside(
    product: Callable[[], object], transfer: Callable[[], object], seconds: float
) -> tuple[float, float, float]:
    """Milliseconds of a product alone and beside transfers, and transfers a second.

    One unbroken sequence of products, so that clocks and power do not change between the two cases; in
    every other window of it, transfers (of about `seconds` each) run on another stream, of high priority:
    a product takes every SM it finds, and each launch of a transfer has to get some of them back.
    """
    window, windows = 60, 9
    side = torch.cuda.Stream(priority=-1)
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(windows + 1)]
    busy = []
    for _ in range(60):
        product()
    for w in range(windows):
        marks[w].record()
        if w % 2 == 1:  # starts with the window, and ends inside it
            count = max(1, int(0.9 * window * 1.5e-3 / seconds))
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            side.wait_event(marks[w])
            with torch.cuda.stream(side):
                begin.record()
                for _ in range(count):
                    transfer()
                end.record()
            busy.append((begin, end, count))
        for _ in range(window):
            product()
    marks[windows].record()
    torch.cuda.synchronize()
    times = [marks[w].elapsed_time(marks[w + 1]) / window for w in range(windows)]
    alone = median(times[2::2])
    # A window's products outlast its transfers: only the share of time that both ran counts.
    slower, rates = [], []
    for w, (begin, end, count) in zip(range(1, windows, 2), busy, strict=True):
        both = min(1.0, begin.elapsed_time(end) / (times[w] * window))
        slower.append((times[w] / alone - 1) / both)
        rates.append(count / begin.elapsed_time(end) * 1e3)
    return alone, median(slower), median(rates)


def bench_gemm(link: dict[str, float]) -> list[dict[str, object]]:
    """A bf16 product of 8192 cubed on one stream, transfers on another."""
    a = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    b = torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda")
    out = torch.empty_like(a)
    host = torch_hicache.empty_host((GIB,), torch.uint8, "cuda").fill_(1)
    device = torch.empty(GIB, dtype=torch.uint8, device="cuda")
    cases: list[tuple[str, str, Callable[[], object], int]] = [
        ("copy engine", "load", lambda: device.copy_(host, non_blocking=True), GIB),
        ("copy engine", "store", lambda: host.copy_(device, non_blocking=True), GIB),
    ]
    for row_bytes in (256, 576, 1152, 2048):
        entries = 16384
        planes = GIB // (entries * row_bytes)
        pools = Pools(row_bytes, planes, entries * 2, entries)
        pools.host.fill_(1)
        cases.append((f"kernel {row_bytes} B", "load", pools.load, pools.bytes))
        cases.append((f"kernel {row_bytes} B", "store", pools.store, pools.bytes))
    if shutil.which("nvcc"):
        library = build(
            "nvcc", "-arch=native", "-cudart", "shared", "-Xcompiler", "-fPIC", "idle_blocks.cu"
        )

        def idle(blocks: int) -> None:
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            library.launch_idle(stream, blocks, ctypes.c_longlong(20_000_000))

        for blocks in (1, 4, 8):
            cases.append((f"{blocks} idle blocks", "load", functools.partial(idle, blocks), 0))
    results = []
    for name, direction, run, nbytes in cases:
        seconds = device_seconds(run, 3, 1)
        alone, slower, per_second = gemm_beside(lambda: torch.mm(a, b, out=out), run, seconds)
        rate = per_second * nbytes / 1e9
        results.append(
            {
                "section": "gemm",
                "case": name,
                "direction": direction,
                "gemm_ms_alone": alone,
                "gemm_slower": slower,
                "gbps": rate,
                "of_link": rate / link[direction],
            }
        )
    return results


def bench_host_time() -> list[dict[str, object]]:
    """Host time of a call that moves next to nothing, and the latency of one token.

    All cases in turn, many rounds: the host's clock drifts by half within a minute.
    """
    row_bytes, slots = 2048, 1024
    index = {"device": torch.arange(4, device="cuda"), "cpu": torch.arange(4)}
    value = torch.zeros(8, device="cuda")
    calls: dict[str, Callable[[], object]] = {"torch add_ (for comparison)": lambda: value.add_(1)}

    def pool(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        host = torch_hicache.empty_host(shape, torch.uint8, "cuda")
        return host, torch.empty(shape, dtype=torch.uint8, device="cuda")

    for planes in (1, 16, 64):
        host, device = pool(planes, slots, row_bytes)
        for where, at in index.items():
            run = functools.partial(transfer_kv, [device], [host], at, at, slot_dim=1)
            calls[f"stack of {planes}, {where} indices"] = run
    for planes in (16, 64):
        pools = [pool(slots, row_bytes) for _ in range(planes)]
        for where, at in index.items():
            run = functools.partial(transfer_kv, [d for _, d in pools], [h for h, _ in pools], at, at)
            calls[f"list of {planes}, {where} indices"] = run

    completions: dict[str, Callable[[], object]] = {"torch add_ to completion": lambda: value.add_(1)}
    host, device = pool(16, slots, row_bytes)
    for where, at in index.items():
        one = at[:1]
        for name, dst, src in (("load", device, host), ("store", host, device)):
            run = functools.partial(transfer_kv, [dst], [src], one, one, slot_dim=1)
            completions[f"1 token x 16 planes {name} to completion, {where} indices"] = run

    def many(run: Callable[[], object]) -> None:
        for _ in range(50):
            run()

    def complete(run: Callable[[], object]) -> None:
        run()
        torch.cuda.current_stream().synchronize()

    with torch.no_grad():
        seconds = interleaved(
            {case: functools.partial(many, run) for case, run in calls.items()},
            60,
            torch.cuda.synchronize,
        )
        latency = interleaved(
            {case: functools.partial(complete, run) for case, run in completions.items()}, 400
        )
    return [
        *({"section": "host", "case": case, "us": value / 50 * 1e6} for case, value in seconds.items()),
        *({"section": "host", "case": case, "us": value * 1e6} for case, value in latency.items()),
    ]


def bench_cpu() -> list[dict[str, object]]:
    """Against one memcpy of the same bytes by torch's threads, a loop by hand, and torch indexing."""
    results = []
    total = GIB
    src = torch.empty(total, dtype=torch.uint8).fill_(1)
    dst = torch.empty(total, dtype=torch.uint8).fill_(2)
    baseline = build("c++", "-std=c++17", "-fPIC", "-pthread", "row_copy_baseline.cpp")
    generator = torch.Generator().manual_seed(0)
    for row_bytes, run_slots in ((1024, 64), (256, 1), (576, 1), (1152, 1), (4096, 1)):
        slots = total // row_bytes // run_slots * run_slots
        shape = (slots, row_bytes)
        pools = dst[: slots * row_bytes].view(shape), src[: slots * row_bytes].view(shape)
        starts = torch.randperm(slots // run_slots, generator=generator) * run_slots
        index = (starts[:, None] + torch.arange(run_slots)).flatten()
        index = index[: slots // 2 // run_slots * run_slots].contiguous()
        dst_index = torch.arange(len(index))
        nbytes = len(index) * row_bytes

        def by_hand(ahead: int, d=dst_index, s=index, row=row_bytes) -> None:
            pointers = (ctypes.c_void_p(t.data_ptr()) for t in (dst, src, d, s))
            count, threads = ctypes.c_int64(len(s)), torch.get_num_threads()
            arguments = count, ctypes.c_int64(row), ctypes.c_int64(ahead), threads
            baseline.copy_rows_by_hand(*pointers, *arguments)

        runs: dict[str, Callable[[], object]] = {
            "transfer_kv": functools.partial(transfer_kv, [pools[0]], [pools[1]], dst_index, index),
            "memcpy": functools.partial(dst[:nbytes].copy_, src[:nbytes]),
            "indexing": lambda p=pools, d=dst_index, s=index: p[0].index_copy_(0, d, p[1][s]),
        }
        for ahead in (0, 4, 8, 16):
            runs[f"by hand {ahead}"] = functools.partial(by_hand, ahead)
        seconds = interleaved(runs)
        hand = min(value for name, value in seconds.items() if name.startswith("by hand"))
        results.append(
            {
                "section": "cpu",
                "case": f"{row_bytes} B, runs of {run_slots}",
                "gbps": nbytes / seconds["transfer_kv"] / 1e9,
                "of_memcpy": seconds["memcpy"] / seconds["transfer_kv"],
                "of_best_loop": hand / seconds["transfer_kv"],
                "x_torch_indexing": seconds["indexing"] / seconds["transfer_kv"],
            }
        )
    return results


def machine() -> dict[str, str]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    facts = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "torch_hicache": torch_hicache.__version__,
        "commit": commit,
        "threads": str(torch.get_num_threads()),
    }
    if torch.cuda.is_available():
        facts["device"] = torch.cuda.get_device_name()
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        drivers = subprocess.run(query, capture_output=True, text=True, check=False).stdout
        facts["driver"] = drivers.partition("\n")[0]
        count = torch.cuda.device_count()
        facts["host"] = f"with {count} GPU{'s' * (count > 1)} and {os.cpu_count()} cores"
    return facts


def print_row(row: dict[str, object]) -> None:
    cells = [f"{row['case']:<52}", f"{row.get('direction', ''):<6}"]
    for key, form in (
        ("us", "{:9.1f} us"),
        ("gbps", "{:7.1f} GB/s"),
        ("of_link", "{:6.2f} of CE"),
        ("gemm_slower", "{:+7.1%} GEMM"),
        ("gemm_ms_alone", "{:7.3f} ms alone"),
        ("of_copies", "{:6.2f} of two big copies"),
        ("mean_run", "{:8.1f} slots a run"),
        ("compute_ms", "{:7.2f} ms compute"),
        ("load_ms", "{:7.2f} ms load"),
        ("total_ms", "{:7.2f} ms both"),
        ("of_longer", "{:6.3f} of the longer"),
        ("of_pool", "{:+8.3%} of the pool"),
        ("of_memcpy", "{:6.2f} of memcpy"),
        ("of_best_loop", "{:6.2f} of the best loop"),
        ("x_torch_indexing", "{:6.1f} x indexing"),
    ):
        if key in row:
            cells.append(form.format(row[key]))
    print("  ".join(cells), flush=True)


def save(path: Path | None, results: list[dict[str, object]], link: dict[str, float]) -> None:
    """Write machine and results, where a file was asked for."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"machine": machine(), "link_gbps": link, "results": results}
    path.write_text(json.dumps(record, indent=1) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sections", default="rows,big_pool,gemm,host,cpu")
    parser.add_argument("--json", type=Path, help="write machine and results here")
    options = parser.parse_args()
    wanted = options.sections.split(",")
    results: list[dict[str, object]] = []
    link: dict[str, float] = {}
    if torch.cuda.is_available():
        link = link_rates()
        print(f"CE: load {link['load']:.1f} GB/s, store {link['store']:.1f} GB/s", flush=True)
        sections: list[tuple[str, Callable[[], list[dict[str, object]]]]] = [
            ("rows", lambda: bench_rows(link)),
            ("big_pool", lambda: bench_big_pool(link)),
            ("gemm", lambda: bench_gemm(link)),
            ("host", bench_host_time),
            ("cpu", bench_cpu),
        ]
    else:
        print("no CUDA device: only the CPU section runs", file=sys.stderr)
        sections = [("cpu", bench_cpu)]
    for name, section in sections:
        if name in wanted:
            print(f"[{name}]", flush=True)
            rows = section()
            results += rows
            for row in rows:
                print_row(row)
    save(options.json, results, link)
    return 0


if __name__ == "__main__":
    sys.exit(main())
