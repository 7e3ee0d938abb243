"""Figures of the methods copy_engine, staged and auto beside one big copy of the same run.

    python benchmark/bench_methods.py [--json results.json]

Sections: pages (whole pages, runs and scattered small pages), both (load and store at once), gemm (a
matrix product beside them), submit (host time of one call with many pages).
"""

import argparse
import functools
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from bench_transfer_kv import (
    GIB,
    device_seconds,
    gemm_beside,
    host_seconds,
    link_rates,
    print_row,
    save,
)
from torch import Tensor

import torch_hicache
from torch_hicache import explain

MIB = 1 << 20
transfer_kv = torch.ops.hicache.transfer_kv
Call = tuple[list[Tensor], list[Tensor], Tensor, Tensor]


class Case:
    """A host pool, a layer_first device pool, and the indices of about `nbytes` in pages of both."""

    def __init__(
        self, name: str, layout: str, row_bytes: int, layers: int, *, page: int, nbytes: int = GIB
    ):
        self.name = name
        pages = nbytes // (row_bytes * layers * page)
        self.bytes = pages * row_bytes * layers * page
        slots = 2 * pages * page
        if layout == "page_first":
            base = torch_hicache.empty_host((slots, layers, row_bytes), torch.uint8, "cuda")
            self.host = base.transpose(0, 1)
        else:
            base = torch_hicache.empty_host((layers, slots, row_bytes), torch.uint8, "cuda")
            self.host = base
        base.fill_(1)
        self.device = torch.empty((layers, pages * page, row_bytes), dtype=torch.uint8, device="cuda")
        generator = torch.Generator().manual_seed(0)
        self.host_slots = self._slots(torch.randperm(2 * pages, generator=generator)[:pages], page)
        self.device_slots = self._slots(torch.randperm(pages, generator=generator), page)

    @staticmethod
    def _slots(pages: Tensor, page: int) -> Tensor:
        return (pages.unsqueeze(1) * page + torch.arange(page)).flatten()

    def call(self, direction: str) -> Call:
        if direction == "load":
            return [self.device], [self.host], self.device_slots, self.host_slots
        return [self.host], [self.device], self.host_slots, self.device_slots

    def run(self, direction: str, method: str = "auto") -> Callable[[], None]:
        return functools.partial(transfer_kv, *self.call(direction), slot_dim=1, method=method)


def runs_case() -> Case:
    """Both pools in slot order, page size 1: one run, the same on both sides."""
    case = Case("layer_first, one run of slots, 2048 B x 32", "layer_first", 2048, 32, page=1)
    case.host_slots = torch.arange(len(case.host_slots)) + 5
    case.device_slots = torch.arange(len(case.device_slots))
    return case


CASES: list[Callable[[], Case]] = [
    lambda: Case("page_first, pages of 64 x 2048 B x 32", "page_first", 2048, 32, page=64),
    lambda: Case("page_first, pages of 64 x 1152 B x 61", "page_first", 1152, 61, page=64),
    lambda: Case("page_first, pages of 16 x 2048 B x 32", "page_first", 2048, 32, page=16),
    lambda: Case("page_first, pages of 1 x 2048 B x 32", "page_first", 2048, 32, page=1),
    lambda: Case("layer_first, pages of 64 x 2048 B x 32", "layer_first", 2048, 32, page=64),
    runs_case,
]


def bench_pages(link: dict[str, float]) -> list[dict[str, object]]:
    results = []
    for make in CASES:
        case = make()
        for direction in ("load", "store"):
            plan = explain(*case.call(direction), slot_dim=1)
            for method in ("auto", "kernel", "staged"):
                if method == plan.method:
                    continue
                seconds = device_seconds(case.run(direction, method), 5)
                rate = case.bytes / seconds / 1e9
                results.append(
                    {
                        "section": "pages",
                        "case": f"{case.name}, {f'auto: {plan.method}' if method == 'auto' else method}",
                        "direction": direction,
                        "us": seconds * 1e6,
                        "gbps": rate,
                        "of_link": rate / link[direction],
                    }
                )
    return results


def both_seconds(load: Callable[[], object], store: Callable[[], object]) -> float:
    """One load and one store on two streams, from the start of both to the end of both."""
    streams = [torch.cuda.Stream() for _ in range(2)]

    def run() -> None:
        for stream, transfer in zip(streams, (load, store), strict=True):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                transfer()
        for stream in streams:
            torch.cuda.current_stream().wait_stream(stream)

    return device_seconds(run, 5)


def bench_both(_link: dict[str, float]) -> list[dict[str, object]]:
    hosts = [torch_hicache.empty_host((GIB,), torch.uint8, "cuda").fill_(1) for _ in range(2)]
    devices = [torch.empty(GIB, dtype=torch.uint8, device="cuda") for _ in range(2)]
    copies = (
        lambda: devices[0].copy_(hosts[0], non_blocking=True),
        lambda: hosts[1].copy_(devices[1], non_blocking=True),
    )
    base = 2 * GIB / both_seconds(*copies) / 1e9
    results: list[dict[str, object]] = [{"section": "both", "case": "two big copies", "gbps": base}]
    for make in (CASES[0], CASES[4], runs_case):
        load, store = make(), make()
        seconds = both_seconds(load.run("load"), store.run("store"))
        rate = (load.bytes + store.bytes) / seconds / 1e9
        results.append({"section": "both", "case": load.name, "gbps": rate, "of_copies": rate / base})
    return results


def bench_gemm(link: dict[str, float]) -> list[dict[str, object]]:
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    out = torch.empty_like(a)
    results = []
    for make in (CASES[0], CASES[1], runs_case):
        case = make()
        for direction in ("load", "store"):
            run = case.run(direction)
            seconds = device_seconds(run, 3, 1)
            alone, slower, per_second = gemm_beside(lambda: torch.mm(a, b, out=out), run, seconds)
            rate = per_second * case.bytes / 1e9
            results.append(
                {
                    "section": "gemm",
                    "case": f"{case.name}, auto: {explain(*case.call(direction), slot_dim=1).method}",
                    "direction": direction,
                    "gemm_ms_alone": alone,
                    "gemm_slower": slower,
                    "gbps": rate,
                    "of_link": rate / link[direction],
                }
            )
    return results


def bench_submit(_link: dict[str, float]) -> list[dict[str, object]]:
    results = []
    for name, layout, row, layers, page in (
        ("1,000 pages of 1 MiB, page_first", "page_first", 1024, 16, 64),
        ("1,000 pages of 64 KiB, page_first", "page_first", 2048, 32, 1),
        ("1,000 pages of 64 x 1 KiB x 16, layer_first", "layer_first", 1024, 16, 64),
    ):
        case = Case(name, layout, row, layers, page=page, nbytes=1000 * row * layers * page)
        for direction in ("load", "store"):
            for method in ("auto", "copy_engine", "staged"):
                run = case.run(direction, method)

                def settled(run: Callable[[], None] = run) -> None:
                    run()

                times = []
                for _ in range(7):
                    torch.cuda.synchronize()
                    times.append(host_seconds(settled, 1))
                results.append(
                    {
                        "section": "submit",
                        "case": f"{name}, {method}",
                        "direction": direction,
                        "us": sorted(times)[3] * 1e6,
                    }
                )
    return results


SECTIONS = {"pages": bench_pages, "both": bench_both, "gemm": bench_gemm, "submit": bench_submit}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--json", type=Path, help="write machine and results here")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("[bench_methods] these methods need a CUDA device, and there is none.", file=sys.stderr)
        return 2
    link = link_rates()
    print(f"CE: load {link['load']:.1f} GB/s, store {link['store']:.1f} GB/s", flush=True)
    results: list[dict[str, object]] = []
    for name in options.sections.split(","):
        print(f"[{name}]", flush=True)
        rows = SECTIONS[name](link)
        results += rows
        for row in rows:
            print_row(row)
    save(options.json, results, link)
    return 0


if __name__ == "__main__":
    sys.exit(main())
