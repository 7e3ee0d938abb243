"""The commands that measure: `hicache calibrate` and `hicache bench`."""

import argparse
import dataclasses
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import torch_hicache
from torch_hicache import bench
from torch_hicache.calibrate import (
    DIRECTIONS,
    MEASURED_METHODS,
    RowRate,
    SortRate,
    choose_table,
    measure_rows,
    measure_sorting,
)
from torch_hicache.cli_device import AMD_IS_CUDA, find_device
from torch_hicache.plan import save_method_table
from torch_hicache.plot import check_plot, draw_bench

# --- hicache calibrate ------------------------------------------------------------------------------


def add_calibrate(commands: Any) -> None:
    calibrate = commands.add_parser(
        "calibrate",
        help="measure which method is the fastest on this machine's GPU, and keep that",
        description="Measure the methods of transfer_kv on this machine, in seconds: by row size and "
        "direction, and whether small rows scattered over a big host pool are to be sorted. The table is "
        "stored in ~/.cache/torch_hicache, or the folder that $HICACHE_CALIBRATION names; a "
        "TransferEngine loads it when it is made.",
        allow_abbrev=False,
    )
    calibrate.add_argument(
        "--device", default="cuda", metavar="cuda[:N]", help=f"what to measure (cuda). {AMD_IS_CUDA}"
    )
    calibrate.add_argument("--dry-run", action="store_true", help="store nothing")
    calibrate.add_argument("--json", action="store_true", help="one JSON object on stdout")
    calibrate.set_defaults(run=_run_calibrate)


def _run_calibrate(arguments: argparse.Namespace) -> int:
    try:
        if not re.fullmatch(r"cuda(:[0-9]{1,4})?", arguments.device):
            raise ValueError(
                f"[calibrate] --device must be cuda or cuda:N, got '{arguments.device}'. {AMD_IS_CUDA} "
                "The CPU and an NPU have no table of methods: there is nothing to calibrate."
            )
        device = find_device(arguments.device, command="calibrate")
        rows, sorts = measure_rows(device), measure_sorting(device)
        table = choose_table(rows, sorts)
        path = None if arguments.dry_run else save_method_table(device, table)
    except (ValueError, MemoryError, RuntimeError, OSError) as error:
        text = str(error).partition("\n")[0]
        print(text if text.startswith("[") else f"[calibrate] {text}", file=sys.stderr)
        return 2
    found = {
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "torch_hicache": torch_hicache.__version__,
        "rows": [dataclasses.asdict(rate) for rate in rows],
        "sorts": [dataclasses.asdict(rate) for rate in sorts],
        "table": dataclasses.asdict(table),
        "path": None if path is None else str(path),
    }
    if arguments.json:
        print(json.dumps(found))
    else:
        print_calibration(found, rows, sorts)
    return 0


def print_calibration(found: dict[str, Any], rows: list[RowRate], sorts: list[SortRate]) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print(f"hicache calibrate: {found['device']}, GB/s load / store\n", style="bold")
    by_size = Table(box=None, padding=(0, 2))
    by_size.add_column("scattered rows of", justify="right")
    for method in MEASURED_METHODS:
        by_size.add_column(method, justify="right")
    gbps = {(r.method, r.direction, r.row_bytes): r.gbps for r in rows}
    for size in sorted({rate.row_bytes for rate in rows}):
        pairs = [[f"{gbps[m, d, size]:.1f}" for d in DIRECTIONS] for m in MEASURED_METHODS]
        by_size.add_row(_size(size), *(" / ".join(pair) for pair in pairs))
    console.print(by_size)
    if sorts:
        by_span = Table(box=None, padding=(0, 2))
        for name in ("rows of", "all over", "as they come", "sorted"):
            by_span.add_column(name, justify="right")
        of = {(r.row_bytes, r.span_bytes, r.direction): r for r in sorts}
        for row_bytes, span in sorted({(r.row_bytes, r.span_bytes) for r in sorts}):
            both = [of[row_bytes, span, direction] for direction in DIRECTIONS]
            plain = " / ".join(f"{rate.gbps:.1f}" for rate in both)
            in_order = " / ".join(f"{rate.gbps_sorted:.1f}" for rate in both)
            by_span.add_row(_size(row_bytes), _size(span), plain, in_order)
        console.print()
        console.print(by_span)
    else:
        console.print("\ntoo little host memory is free to measure the sorting: it stays as it is")
    console.print()
    for name, value in found["table"].items():
        console.print(f"{name:26} {value}")
    console.print(f"\nstored in {found['path']}" if found["path"] else "\nnot stored", markup=False)


def _size(nbytes: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if nbytes >= unit and nbytes % unit == 0:
            return f"{nbytes // unit} {name}"
    return f"{nbytes} B"


# --- hicache bench ----------------------------------------------------------------------------------


def add_bench(commands: Any) -> None:
    parser = commands.add_parser(
        "bench",
        help="run the figure set of a source tree, and draw it",
        description="Run the scripts benchmark/bench_*.py of the source tree, one after the other, and "
        f"gather their results. They are not in the wheel. {bench.NEEDS}",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--sections", metavar="A,B", help=f"scripts without 'bench_' ({','.join(bench.sections())})"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results")
    parser.add_argument("--plot", type=Path, metavar="out.png", help="draw them (matplotlib)")
    parser.add_argument(
        "--from", type=Path, metavar="FILE", dest="results", help="draw these results, measure nothing"
    )
    parser.set_defaults(run=_run_bench)


def _run_bench(arguments: argparse.Namespace) -> int:
    try:
        if arguments.results and not arguments.plot:
            raise ValueError("[bench] --from needs --plot, to draw the results.")
        for name in ("sections", "json"):
            if arguments.results and getattr(arguments, name):
                raise ValueError(f"[bench] --{name} is of no use beside --from, which measures nothing.")
        if arguments.plot:
            check_plot(arguments.plot, command="bench")
        code = 0
        if arguments.results:
            record = bench.read_record(arguments.results)
        else:
            names = bench.chosen(arguments.sections)
            with tempfile.TemporaryDirectory() as folder:
                record, code = bench.run(names, Path(folder))
            if arguments.json:
                arguments.json.parent.mkdir(parents=True, exist_ok=True)
                arguments.json.write_text(json.dumps(record, indent=1) + "\n")
        if arguments.plot:
            draw_bench(record, arguments.plot)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    except OSError as error:
        print(f"[bench] {error.filename}: {error.strerror}.", file=sys.stderr)
        return 2
    return code
