"""`hicache bench`: runs the benchmark scripts of the source tree and gathers what they measured.

Each script is a process of its own, which prints its figures, and writes {"machine", "link_gbps" (where
there is a device), "results"} with --json. The gathered record has all results, the machine of the first
script, and the link of the first that measured it; a result's share of the link is of its own script's.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

Record = dict[str, Any]
FOLDER = Path(__file__).parent.parent / "benchmark"
_NO_DEVICE = 2  # what a script returns that needs a device, or a package, where there is none
NEED_CUDA = ("compile", "engine", "methods", "row_sizes")
CPU_WITHOUT_CUDA = ("host_memory", "integrations", "transfer_kv")
NEEDS = (
    f"{', '.join(NEED_CUDA)} need a CUDA device; {', '.join(CPU_WITHOUT_CUDA)} measure the CPU without; "
    "mooncake needs Mooncake Store and xxhash."
)


def sections() -> list[str]:
    """The scripts' names without `bench_`; none outside a source tree."""
    return sorted(path.stem.removeprefix("bench_") for path in FOLDER.glob("bench_*.py"))


def chosen(names: str | None) -> list[str]:
    """The sections of a list with commas, or all.

    Raises:
        ValueError: an unknown section, or there is no source tree.
    """
    known = sections()
    if not known:
        raise ValueError(
            "[bench] the benchmarks are in the source tree, not in the wheel: run it from a clone that "
            "was installed with --editable."
        )
    if names is None:
        return known
    wanted = names.split(",")
    for name in wanted:
        if name not in known:
            raise ValueError(f"[bench] --sections must be of {', '.join(known)}, got '{name}'.")
    return wanted


def run(names: list[str], folder: Path) -> tuple[Record, int]:
    """Run the scripts. Their output goes where ours goes, their records pass through `folder`.

    Returns the gathered record, and the exit code: 1 if a script failed, 2 if none had its device.
    """
    records, codes = [], []
    if not torch.cuda.is_available() and (left_out := [name for name in names if name in NEED_CUDA]):
        print(f"[bench] without a CUDA device nothing comes of {', '.join(left_out)}.", file=sys.stderr)
    for name in names:
        print(f"== {name}", flush=True)
        path = folder / f"{name}.json"
        script = FOLDER / f"bench_{name}.py"
        done = subprocess.run([sys.executable, str(script), "--json", str(path)], check=False)
        codes.append(done.returncode)
        if path.is_file():
            records.append(json.loads(path.read_text()))
    code = 0
    if any(c not in (0, _NO_DEVICE) for c in codes):
        code = 1
    elif _NO_DEVICE in codes and 0 not in codes:
        code = _NO_DEVICE
    return gather(records), code


def gather(records: list[Record]) -> Record:
    links = [record["link_gbps"] for record in records if record.get("link_gbps")]
    return {
        "machine": records[0]["machine"] if records else {},
        "link_gbps": links[0] if links else {},
        "results": [row for record in records for row in record["results"]],
    }


def read_record(path: Path) -> Record:
    """Results as `--json` writes them.

    Raises:
        ValueError: the file is something else.
        OSError: it can't be read.
    """
    try:
        record = json.loads(path.read_text())
        if all(isinstance(row["section"], str) for row in record["results"]) and record["machine"]:
            return record
        why = "its results are empty"
    except (ValueError, TypeError, KeyError) as error:
        why = f"{type(error).__name__} {error}"
    raise ValueError(f"[bench] {path} must be results of hicache bench --json ({why}).")
