"""The command `hicache doctor`: examines a device and writes one report to send."""

import argparse
import json
import os
import re
import sys
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import torch_hicache
from torch_hicache import doctor, testing
from torch_hicache.calibrate import DIRECTIONS

_BACKENDS = {"cpu": "cpu", "cuda": "cuda", "hip": "hip", "npu": "ascend"}
_DEFAULT_MIB = 64
_REPORT = "hicache-doctor.json"


def add_doctor(commands: Any) -> None:
    parser = commands.add_parser(
        "doctor",
        help="check every method on a device, measure it, and write a report to send",
        description="Check transfer_kv on a device byte by byte, in every placement of pools and indices "
        "and with every method; measure the rates by row size; and write both, with all versions, into "
        "one JSON file. If the process is killed, the file says during which check.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--device", default="auto", metavar="auto|cpu|cuda|hip|npu[:N]", help="what to examine (auto)")
    add("--json", type=Path, default=Path(_REPORT), metavar="FILE", help=f"the report ({_REPORT})")
    add("--mib", type=_mib, default=_DEFAULT_MIB, metavar="N", help="MiB moved for a rate (64)")
    parser.set_defaults(run=_run_doctor)


def _mib(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,6}", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer of 1 or more, got '{text}'")
    return int(text)


def find_backend_device(name: str) -> torch.device:
    """The device of a vendor, by whatever name this torch knows it: AMD's may be cuda, hip or another.

    Raises:
        ValueError: there is none that can be used, and why.
    """
    match = re.fullmatch(r"(auto|cpu|cuda|hip|npu)(?:(?<!auto)(?<!cpu):([0-9]{1,4}))?", name)
    if not match:
        raise ValueError(f"[doctor] --device must be auto, cpu, cuda, hip or npu, got '{name}'.")
    vendor, index = match[1], int(match[2] or 0)
    known = testing.devices()
    if vendor == "cpu" or (vendor == "auto" and len(known) == 1):
        return torch.device("cpu")
    device_type = known[1] if vendor == "auto" else vendor
    if vendor != "auto":
        backend = next(b for b in torch_hicache.backends() if b.name == _BACKENDS[vendor])
        if vendor == "cuda" and torch.version.hip:
            backend = next(b for b in torch_hicache.backends() if b.name == "hip")
        if not backend.loaded:
            raise ValueError(
                f"[doctor] --device {name}: the {backend.name} backend is not loaded: {backend.reason}. "
                f"To get it, {backend.remedy}."
            )
        types = {"CUDA": "cuda", "HIP": "hip", "PrivateUse1": torch._C._get_privateuse1_backend_name()}
        device_type = types[backend.key]
    if reason := testing.missing_reason(f"{device_type}:{index}"):
        raise ValueError(f"[doctor] --device {name}: {reason}.")
    return torch.device(device_type, index)


class _Unsaved(Exception):
    """The report can't be written."""


def _run_doctor(arguments: argparse.Namespace) -> int:
    nbytes = arguments.mib << 20
    try:
        device = find_backend_device(arguments.device)
        doctor.check_memory(device, nbytes)
    except (ValueError, MemoryError) as error:
        print(error, file=sys.stderr)
        return 2
    try:
        report = doctor.examine(device, nbytes=nbytes, save=partial(_save, arguments.json))
    except _Unsaved as error:
        print(error, file=sys.stderr)
        return 2
    print_report(report, arguments.json)
    return 1 if doctor.failures(report) else 0


def _save(path: Path, report: doctor.Report) -> None:
    """In place of the one before, at once: a process that is killed leaves a whole report."""
    text = json.dumps(report, indent=1) + "\n"
    try:
        if path.exists() and not path.is_file():  # such as /dev/null, which must stay what it is
            path.write_text(text)
            return
        target = Path(os.path.realpath(path))
        new = target.with_name(target.name + ".new")
        new.write_text(text)
        os.replace(new, target)
    except OSError as error:
        raise _Unsaved(f"[doctor] {path}: {error.strerror}.") from error


def print_report(report: doctor.Report, path: Path) -> None:
    console = Console(highlight=False, soft_wrap=True, markup=False)
    device = report["device"]
    console.print(f"hicache doctor: {device['device']}, {device.get('name', 'no name')}\n", style="bold")
    checks = report["checks"]
    cases = sum(check["cases"] for check in checks)
    failed = doctor.failures(report)
    console.print(f"{len(checks)} checks with {cases:,} cases, {len(failed)} failed")
    for check in failed:
        console.print(f"  {check['name']}, {check['placement']}, {check['method']}: {check['detail']}")
    for check in checks:
        if check["status"] == "skipped":
            name = f"{check['name']}, {check['placement']}, {check['method']}"
            console.print(f"  {name}: skipped, {check['detail']}")
    refusals = {(c["method"], c["detail"]) for c in checks if c["status"] == "refused"}
    for method, detail in sorted(refusals):
        console.print(f"  {method} refused: {detail}")
    if link_gbps := report["link_gbps"]:
        link = " / ".join(f"{link_gbps[way]:.1f}" for way in DIRECTIONS)
        console.print(f"\nGB/s load / store; one copy of the whole by torch: {link}")
    if rows := doctor.rate_table(report):
        table = Table(box=None, padding=(0, 2))
        table.add_column("scattered rows of", justify="right")
        for method in rows[0][1]:
            table.add_column(method, justify="right")
        for size, rates in rows:
            pairs = (" / ".join(f"{gbps:.1f}" for gbps in pair) for pair in rates.values())
            table.add_row(f"{size} B", *pairs)
        console.print(table)
    console.print(f"\nthe report is in {path}")
