"""Which method serves a call, and why: explain, and the table that "auto" decides by.

The choice itself is made in csrc/plan.cpp, by the same code for a call and for its explanation.
"""

import dataclasses
import json
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

# The schemas that the ops below need come with it.
from torch_hicache import ops  # noqa: F401
from torch_hicache._backends import empty_on


@dataclass(frozen=True)
class Plan:
    """How a transfer_kv call is served.

    Attributes:
        method: "kernel", "copy_engine" or "staged".
        runs: stretches of neighbouring slots: on both sides for copy_engine, in the host pool for staged.
        rows: contiguous pieces of memory that the copy engine is asked for; 0 for a kernel.
        batches: submissions: kernel launches, batches of copies, or fillings of a staging buffer.
        bytes: what is moved.
        reason: why this method, in words.
    """

    method: str
    runs: int
    rows: int
    batches: int
    bytes: int
    reason: str


@dataclass(frozen=True)
class MethodTable:
    """What "auto" decides by, for one device. The defaults were measured on an H200 (PCIe Gen5 x16).

    Attributes:
        copy_engine_min_row_bytes: (load, store): mean contiguous bytes on both sides from which the copy
            engine is preferred to a kernel.
        staged_min_row_bytes: (load, store): mean contiguous bytes in the host pool, likewise.
        min_bytes: of a call; smaller ones are left to the kernel.
        sort_min_span_bytes: size of a host pool from which the kernel takes small rows in the order of
            their addresses; 0 where that never pays.
        staging_bytes, staging_buffers: the ring of device buffers that a staged call allocates.
    """

    copy_engine_min_row_bytes: tuple[int, int] = (256 << 10, 256 << 10)
    staged_min_row_bytes: tuple[int, int] = (96 << 10, 96 << 10)
    min_bytes: int = 4 << 20
    sort_min_span_bytes: int = 1 << 30
    staging_bytes: int = 96 << 20
    staging_buffers: int = 3

    def values(self) -> list[int]:
        """In the order of MethodTable in csrc/plan.h."""
        return [
            *self.copy_engine_min_row_bytes,
            *self.staged_min_row_bytes,
            self.min_bytes,
            self.sort_min_span_bytes,
            self.staging_bytes,
            self.staging_buffers,
        ]


def explain(
    dst: Sequence[Tensor],
    src: Sequence[Tensor],
    dst_indices: Tensor,
    src_indices: Tensor,
    *,
    slot_dim: int = 0,
    count: Tensor | None = None,
    method: str = "auto",
    max_blocks: int = 0,
) -> Plan:
    """How `transfer_kv` would serve the same call now: nothing is moved, no device is waited for.

    Raises:
        What `transfer_kv` raises for the call, but for indices that only a device can read.
    """
    text = torch.ops.hicache.explain(
        dst,
        src,
        dst_indices,
        src_indices,
        slot_dim=slot_dim,
        count=count,
        method=method,
        max_blocks=max_blocks,
    )
    return Plan(**json.loads(text))


# Set in this process, or looked for: a stored table is read once, and replaces nothing.
_devices_with_a_table: set[torch.device] = set()


def set_method_table(device: torch.device | str, table: MethodTable) -> None:
    """Let "auto" on `device` decide by `table`, in this process and from the next call on. The CPU has
    one method, and nothing to decide.

    Raises:
        ValueError: a negative value, less than one staging buffer of 64 KiB, or an NPU: it has no table.
        RuntimeError: this torch has no such device.
    """
    on_device = empty_on(device, caller="set_method_table")
    torch.ops.hicache.set_method_table(on_device, table.values())
    _devices_with_a_table.add(on_device.device)


# --- Tables of calibrated machines ----------------------------------------------------------------


def table_path(device: torch.device | str) -> Path:
    """Where `hicache calibrate` keeps the table of this kind of device on this machine.

    $HICACHE_CALIBRATION names the folder, else $XDG_CACHE_HOME/torch_hicache or ~/.cache/torch_hicache.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(os.environ.get("HICACHE_CALIBRATION") or cache / "torch_hicache")
    name = torch.cuda.get_device_name(device) if torch.device(device).type == "cuda" else str(device)
    return folder / f"{name.replace(' ', '_').replace('/', '_')}.json"


def save_method_table(device: torch.device | str, table: MethodTable) -> Path:
    """Write the table to `table_path`, whole or not at all."""
    path = table_path(device)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}")
    temporary.write_text(json.dumps(dataclasses.asdict(table), indent=2) + "\n")
    temporary.replace(path)
    return path


def load_method_table(device: torch.device | str) -> MethodTable | None:
    """The stored table of `device`, set for this process; None where none was stored.

    Raises:
        ValueError: the file is not such a table.
    """
    path = table_path(device)
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text())
        for name in ("copy_engine_min_row_bytes", "staged_min_row_bytes"):
            values[name] = tuple(values[name])
        table = MethodTable(**values)
    except (TypeError, KeyError, ValueError) as error:
        raise ValueError(f"[calibrate] {path} is no table of methods: {error}.") from None
    set_method_table(device, table)
    return table


def use_stored_method_table(device: torch.device) -> None:
    """Load the stored table of `device`, once in a process and unless one has been set. A file that can't
    be read is a warning: what was there stays."""
    if device in _devices_with_a_table:
        return
    _devices_with_a_table.add(device)
    try:
        load_method_table(device)
    except (ValueError, OSError) as error:
        warnings.warn(f"{error} The table in force is kept.", stacklevel=2)
