"""The command `hicache`: arguments, what is printed, exit codes. Others do the work.

Exit codes: 0, 1 when a restored row was wrong, a check or a benchmark failed, 2 for a bad argument or
trace or without the device that a command needs, 130 after Ctrl-C.
"""

import argparse
import dataclasses
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NoReturn

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

import torch_hicache
from torch_hicache._backends import backend_of
from torch_hicache.cli_device import AMD_IS_CUDA, find_device
from torch_hicache.cli_doctor import add_doctor
from torch_hicache.cli_measure import add_bench, add_calibrate
from torch_hicache.info import collect_info, cpu_name
from torch_hicache.layout import LAYOUTS, UNITS
from torch_hicache.models import MODELS
from torch_hicache.ops import METHODS
from torch_hicache.plot import check_plot, draw_replay
from torch_hicache.replay import Replay, ReplayOptions, ReplayResult
from torch_hicache.tier import TierStats, check_tier_url
from torch_hicache.trace import BLOCK_TOKENS, Request, generate_trace, read_trace

_GENERATED_REQUESTS = 3000
_DEADLINE_MS = 50.0  # of the third tier
_BAR_WIDTH = 32
_TIMES = """\
times, of the table and of --json:
  gbps_load, gbps_store   bytes over the time that a direction's stream worked on them
  compute_seconds         of the forward passes that --compute-ms plays
  exposed_seconds         that the computation waited: a layer for its load, a request for pages that a
                          store still held
  gbps_put_tier3, gbps_get_tier3   bytes over the time of the calls, which requests wait for
  hidden                  1 - exposed_seconds / (time of loads and stores); null without --compute-ms
                          or if nothing moved. On the CPU the forward pass is a sleep, beside which a
                          thread copies: a real one would want the same cores and memory"""
_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    parser = _parser()
    try:
        arguments = parser.parse_args(argv)
        if arguments.command is None:
            parser.print_help(sys.stderr)
            return 2
        run: Callable[[argparse.Namespace], int] = arguments.run
        code = run(arguments)
        sys.stdout.flush()
        return code
    except SystemExit as exit_request:  # argparse's way to end
        return int(exit_request.code or 0)
    except KeyboardInterrupt:
        print(f"[{arguments.command}] interrupted before there was a result.", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


# --- Arguments ------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        tag = self.prog.split()[-1]
        self.exit(2, f"[{tag}] {message.rstrip('.')}. See '{self.prog} --help'.\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="hicache", description=torch_hicache.__doc__, allow_abbrev=False)
    version = f"hicache {torch_hicache.__version__}"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", metavar="{replay,info,doctor,calibrate,bench}")
    _add_replay(commands)
    info = commands.add_parser("info", help="versions, backends, devices, links")
    info.add_argument("--json", action="store_true", help="one JSON object on stdout")
    info.set_defaults(run=_run_info)
    add_doctor(commands)
    add_calibrate(commands)
    add_bench(commands)
    return parser


def _add_replay(commands: Any) -> None:
    models = "\n".join(
        f"  {model.name:10} {model.num_layers} layers; {model.description}" for model in MODELS.values()
    )
    replay = commands.add_parser(
        "replay",
        help="drive a prefix cache with a serving trace and verify every restored row",
        description="Drive a prefix cache (device pool, host pool and a third tier if one is named; LRU) "
        "with a serving trace. Bytes move through a TransferEngine, and every restored row is verified.",
        epilog=f"{_TIMES}\n\nmodels:\n{models}",
        allow_abbrev=False,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = replay.add_argument
    add("trace", nargs="?", metavar="TRACE.jsonl", help="default: a built-in generator")
    add("--model", choices=MODELS, default="gqa_8b", help="shapes (default gqa_8b)")
    add("--layers", type=_layers, default=4, metavar="N", help="layers kept (4), or 'all'")
    add(
        "--block-tokens",
        type=_block_tokens,
        default=4,
        metavar="N",
        help=f"tokens kept of each {BLOCK_TOKENS}-token block of the trace (4)",
    )
    add("--device-bytes", type=_size, default="128M", metavar="SIZE", help="device pool (128M)")
    add("--host-bytes", type=_size, default="1G", metavar="SIZE", help="host pool (1G)")
    add(
        "--tier3",
        type=_tier_url,
        metavar="mooncake://HOST:PORT",
        help="what leaves the host pool goes there",
    )
    add("--tier3-bytes", type=_size, metavar="SIZE", help="lent to the third tier (none)")
    add(
        "--tier3-deadline-ms",
        type=_deadline,
        metavar="X",
        help=f"within which the third tier must answer ({_DEADLINE_MS:g}); longer on a busy machine",
    )
    add("--layout", choices=LAYOUTS, default="layer_first", help="of the host pool (layer_first)")
    add("--unit", choices=UNITS, default="page", help="what an index addresses (page)")
    devices = "auto|cpu|cuda[:N]|npu[:N]"
    add("--device", default="auto", metavar=devices, help=f"where to run (auto). {AMD_IS_CUDA}")
    add("--method", choices=METHODS, default="auto", help="of transfer_kv (auto)")
    add(
        "--compute-ms",
        type=_milliseconds,
        default=0.0,
        metavar="X",
        help="play a forward pass of X ms for each request, behind its load layer by layer (0): a kernel "
        "that spins on a GPU, a sleep on the CPU",
    )
    add(
        "--requests",
        type=_request_count,
        metavar="N",
        help=f"the first N of the trace (all), or how many to generate ({_GENERATED_REQUESTS})",
    )
    add("--seed", type=_seed, default=0, metavar="N", help="of generator and fingerprints (0)")
    add("--json", action="store_true", help="one JSON object on stdout, and nothing else there")
    add("--plot", type=Path, metavar="out.png", help="draw hit rates and transfers (matplotlib)")
    replay.set_defaults(run=_run_replay)


def _tier_url(text: str) -> str:
    try:
        check_tier_url(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be mooncake://HOST:PORT, got '{text}'") from None
    return text


def _positive(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of 1 or more, got '{text}'")
    return int(text)


def _request_count(text: str) -> int:
    """A generated trace is made whole, about 1 KB a request."""
    number = _positive(text)
    if number > 1_000_000:
        raise argparse.ArgumentTypeError(f"must be at most 1,000,000, got '{text}'")
    return number


def _seed(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise argparse.ArgumentTypeError(f"must be an integer of 0 or more in 18 digits, got '{text}'")
    return int(text)


def _milliseconds(text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,6})?", text):
        raise argparse.ArgumentTypeError(f"must be milliseconds from 0 to 999,999, got '{text}'")
    return float(text)


def _deadline(text: str) -> float:
    milliseconds = _milliseconds(text)
    if not milliseconds:
        raise argparse.ArgumentTypeError(f"must be above 0, got '{text}'")
    return milliseconds


def _layers(text: str) -> int | None:
    """None stands for all layers of the model."""
    return None if text == "all" else _positive(text)


def _block_tokens(text: str) -> int:
    tokens = _positive(text)
    if tokens > BLOCK_TOKENS:
        raise argparse.ArgumentTypeError(f"must be at most {BLOCK_TOKENS}, got {tokens}")
    return tokens


def _size(text: str) -> int:
    match = re.fullmatch(r"([0-9]{1,15}(?:\.[0-9]{1,6})?)([KMGT]?)(?:I?B)?", text.strip().upper())
    size = int(float(match[1]) * _UNITS[match[2]]) if match else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"must be a size such as 512M or 2G, got '{text}'")
    return size


# --- hicache replay -------------------------------------------------------------------------------


def _run_replay(arguments: argparse.Namespace) -> int:
    try:
        options = _replay_options(arguments)
        if arguments.plot:
            check_plot(arguments.plot, command="replay")
        requests = _requests(arguments)
        replay = Replay(options)
    except (ValueError, MemoryError, RuntimeError, ImportError) as error:
        # Of RuntimeErrors: a device without that much memory, a method that it does not have. Of
        # ImportErrors: a third tier whose package is not installed.
        text = _as_typed(str(error).partition("\n")[0])
        print(text if text.startswith("[") else f"[replay] {text}", file=sys.stderr)
        return 2
    with closing(replay), _progress(requests) as on_served:
        result = replay.run(requests, on_served=on_served)
    run = _what_was_run(arguments, options)
    if arguments.json:
        if not result.total("rows_verified"):
            print(f"[replay] no row was verified: {_NOTHING_CAME_BACK}.", file=sys.stderr)
        print(json.dumps(_summary(result) | run))
    else:
        _print_result(result, run)
    if arguments.plot and result.records:
        draw_replay(result, arguments.plot, title=f"{run['model']} on {run['device']}")
    if result.mismatches:
        print(
            f"[replay] {result.mismatches} restored rows are wrong, the first: {result.first_mismatch}.",
            file=sys.stderr,
        )
        return 1
    return 130 if result.interrupted else 0


def _as_typed(text: str) -> str:
    """An error of the op or of a pool, with the options of this command for their arguments."""
    text = re.sub(r"^\[transfer_kv\] method '(\w+)'", r"[replay] --method \1", text)
    return re.sub(
        r"^\[layout\] (\w+)(.*) Use unit 'page'", r"[replay] --layout \1\2 Use --unit page", text
    )


def _requests(arguments: argparse.Namespace) -> list[Request]:
    if arguments.trace is not None:
        return read_trace(arguments.trace, limit=arguments.requests)
    return generate_trace(arguments.requests or _GENERATED_REQUESTS, seed=arguments.seed)


def _replay_options(arguments: argparse.Namespace) -> ReplayOptions:
    model = MODELS[arguments.model]
    num_layers = arguments.layers or model.num_layers
    for name in ("tier3_bytes", "tier3_deadline_ms"):
        if arguments.tier3 is None and getattr(arguments, name) is not None:
            raise ValueError(f"[replay] --{name.replace('_', '-')} needs the --tier3 that it is of.")
    if num_layers > model.num_layers:
        raise ValueError(
            f"[replay] --layers must be at most {model.num_layers} for {model.name}, got {num_layers}."
        )
    return ReplayOptions(
        model=model,
        num_layers=num_layers,
        block_tokens=arguments.block_tokens,
        device_bytes=arguments.device_bytes,
        host_bytes=arguments.host_bytes,
        layout=arguments.layout,
        unit=arguments.unit,
        device=find_device(arguments.device, command="replay"),
        method=arguments.method,
        seed=arguments.seed,
        compute_seconds=arguments.compute_ms / 1e3,
        tier3=arguments.tier3,
        tier3_bytes=arguments.tier3_bytes or 0,
        tier3_deadline_seconds=(arguments.tier3_deadline_ms or _DEADLINE_MS) / 1e3,
    )


@contextmanager
def _progress(requests: list[Request]) -> Iterator[Callable[[ReplayResult], None] | None]:
    """A bar on stderr, where that is a terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    columns = (
        TextColumn("replay"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("replay", total=len(requests), note="")

        def on_served(result: ReplayResult) -> None:
            note = f"[red]{result.mismatches} wrong rows" if result.mismatches else ""
            progress.update(task, completed=len(result.records), note=note)

        yield on_served


def _summary(result: ReplayResult) -> dict[str, Any]:
    load, store = result.moved("load"), result.moved("store")
    put, get = result.moved("tier3.put"), result.moved("tier3.get")
    return {
        "requests": len(result.records),
        "blocks": result.total("blocks"),
        "hit_rate_device": result.hit_rate("device"),
        "hit_rate_host": result.hit_rate("host"),
        "hit_rate_tier3": result.hit_rate("tier3"),
        "bytes_loaded": load.num_bytes,
        "bytes_stored": store.num_bytes,
        "gbps_load": load.gbps,
        "gbps_store": store.gbps,
        "bytes_put_tier3": put.num_bytes,
        "bytes_got_tier3": get.num_bytes,
        "gbps_put_tier3": put.gbps,
        "gbps_get_tier3": get.gbps,
        "misses_tier3": result.tier3_misses,
        "tier3": result.tier3 and dataclasses.asdict(result.tier3),
        "compute_seconds": result.compute_seconds,
        "exposed_seconds": result.exposed_seconds,
        "hidden": result.hidden,
        "rows_verified": result.total("rows_verified"),
        "mismatches": result.mismatches,
        "first_mismatch": result.first_mismatch,
        "blocks_repeated": result.blocks_repeated,
        "blocks_uncached": result.blocks_uncached,
        "blocks_dropped": result.blocks_dropped,
        "seconds": result.seconds,
        "interrupted": result.interrupted,
    }


def _what_was_run(arguments: argparse.Namespace, options: ReplayOptions) -> dict[str, Any]:
    device = options.device
    is_cpu = device.type == "cpu"
    return {
        "device": cpu_name() if is_cpu else torch.get_device_module(device).get_device_name(device),
        "backend": backend_of(options.device.type).name,
        "torch": torch.__version__,
        "torch_hicache": torch_hicache.__version__,
        "trace": arguments.trace,
        "model": options.model.name,
        "layout": options.layout,
        "method": options.method,
        "options": {
            "device": str(options.device),
            "layers": options.num_layers,
            "block_tokens": options.block_tokens,
            "block_bytes": options.block_bytes,
            "device_bytes": options.device_bytes,
            "host_bytes": options.host_bytes,
            "tier3": options.tier3,
            "tier3_bytes": options.tier3_bytes,
            "tier3_deadline_ms": options.tier3_deadline_seconds * 1e3,
            "unit": options.unit,
            "requests": arguments.requests,
            "seed": options.seed,
            "compute_ms": arguments.compute_ms,
            "threads": torch.get_num_threads(),
        },
    }


def _print_result(result: ReplayResult, run: dict[str, Any]) -> None:
    console = Console(highlight=False)
    options = run["options"]
    trace = run["trace"] or f"the built-in generator, seed {options['seed']}"
    # Also a file name that is no text can be shown.
    trace = os.fsencode(trace).decode(errors="replace")
    table = Table(show_header=False, box=None, padding=(0, 2), title_justify="left")
    table.add_column(style="bold")
    table.add_column(justify="right")
    table.add_column(overflow="fold")
    seconds = f"in {result.seconds:.1f} s" + (", interrupted" if result.interrupted else "")
    table.add_row("requests", f"{len(result.records):,}", seconds)
    tokens = f"of {BLOCK_TOKENS} tokens, {options['block_tokens']} of them kept"
    table.add_row("prompt blocks", f"{result.total('blocks'):,}", tokens)
    tiers = {"device": "green", "host": "yellow"} | ({"tier3": "cyan"} if result.tier3 else {})
    hits = {tier: result.hit_rate(tier) for tier in tiers}
    rest = 1 - sum(hits.values()) if result.records else 0.0
    for name, share, color in (
        *((f"  {tier} hits", hits[tier], color) for tier, color in tiers.items()),
        ("  prefilled", rest, "bright_black"),
    ):
        table.add_row(name, f"{share:.1%}", _bar(console, share, color))
    for name in ("load", "store"):
        moved = result.moved(name)
        way = "host to device" if name == "load" else "device to host"
        rate = f"at {moved.gbps:.2f} GB/s, {way}" if moved.num_bytes else f"{way}"
        table.add_row(name, _readable(moved.num_bytes), rate)
    if result.tier3:
        for name, way in (("put", "host to tier 3"), ("get", "tier 3 to host")):
            moved = result.moved(f"tier3.{name}")
            rate = f"at {moved.gbps:.2f} GB/s, {way}" if moved.num_bytes else way
            table.add_row(f"tier3 {name}", _readable(moved.num_bytes), rate)
        table.add_row("tier3 misses", f"{result.tier3_misses:,}", _tier3_note(result.tier3))
    table.add_row("computation", f"{result.compute_seconds:.2f} s", _hidden_note(result, run))
    table.add_row("rows verified", f"{result.total('rows_verified'):,}", _rows_note(result))
    color = "red" if result.mismatches else "green"
    table.add_row("mismatches", f"[{color}]{result.mismatches:,}[/]")
    if result.blocks_repeated:
        note = "ids again within a request, taken once"
        table.add_row("repeated", f"{result.blocks_repeated:,}", note)
    if result.blocks_uncached:
        table.add_row("not cached", f"{result.blocks_uncached:,}", "blocks beyond the device pool")
    if result.blocks_dropped:
        table.add_row("dropped", f"{result.blocks_dropped:,}", "blocks that the host had no room for")
    console.print(f"hicache replay of {trace}", style="bold", markup=False, soft_wrap=True)
    console.print(
        f"{run['model']}, {options['layers']} layers, {_readable(options['block_bytes'])} a block; "
        f"device pool {_readable(options['device_bytes'])}, "
        f"host pool {_readable(options['host_bytes'])} {run['layout']}; "
        f"method {run['method']}; {options['device']}: {run['device']}, torch {run['torch']}\n",
        markup=False,
        soft_wrap=True,
    )
    console.print(table)


def _tier3_note(stats: TierStats) -> str:
    parts = {
        "dropped": stats.pages_dropped,
        "corrupt": stats.pages_corrupt,
        "outages": stats.outages,
        "calls given up": stats.calls_abandoned,
    }
    return ", ".join(f"{count:,} {name}" for name, count in parts.items())


def _hidden_note(result: ReplayResult, run: dict[str, Any]) -> str:
    waited = f"{result.exposed_seconds:.3f} s waited"
    if result.hidden is None:
        return waited
    what = "a sleep" if run["options"]["device"] == "cpu" else "it"
    return f"{waited}, {what} hid {result.hidden:.0%} of transfers"


_NOTHING_CAME_BACK = "nothing came back from the host: try more requests or a smaller device pool"


def _rows_note(result: ReplayResult) -> str:
    return "each against its fingerprint" if result.total("rows_verified") else _NOTHING_CAME_BACK


def _bar(console: Console, share: float, color: str) -> str:
    block = "█" if console.encoding.lower().startswith("utf") else "#"
    return f"[{color}]{block * round(share * _BAR_WIDTH)}[/]"


def _readable(num_bytes: float) -> str:
    unit = "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if num_bytes < 1024:
            break
        num_bytes, unit = num_bytes / 1024, larger
    return f"{num_bytes:.0f} {unit}" if num_bytes == int(num_bytes) else f"{num_bytes:.2f} {unit}"


# --- hicache info ---------------------------------------------------------------------------------


def _run_info(arguments: argparse.Namespace) -> int:
    info = collect_info()
    if arguments.json:
        print(json.dumps(info))
        return 0
    console = Console(highlight=False, markup=False, soft_wrap=True)
    names = {"cuda_of_torch": "CUDA of torch", "hip_of_torch": "HIP of torch"}
    for name, value in info["versions"].items():
        label = names.get(name, name.replace("_", " "))
        console.print(f"{label:15} {value or 'none'}")
    for backend in info["backends"]:
        state = "loaded" if backend["loaded"] else f"not loaded: {backend['reason']}"
        console.print(f"\nbackend {backend['name']} (key {backend['key']}): {state}")
        if not backend["loaded"]:
            console.print(f"  to get it: {backend['remedy']}")
        for name, value in backend["details"].items():
            console.print(f"  {name.replace('_', ' ')}: {value}")
        if backend["name"] == "cuda":
            console.print(f"  {info['cuda_build']}")
    console.print("\ndevices")
    for device in info["devices"]:
        label = device["type"] if device["type"] == "cpu" else f"{device['type']}:{device['index']}"
        parts = [device["name"], device["memory"], device["link"] or "link not reported"]
        console.print(f"  {label}: {', '.join(parts[: 2 if device['type'] == 'cpu' else 3])}")
    if len(info["devices"]) == 1:
        console.print(
            "  no NVIDIA GPU and no NPU was found; AMD's are not listed: hicache doctor --device hip"
        )
    return 0
