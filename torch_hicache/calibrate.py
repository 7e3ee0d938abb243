"""What `hicache calibrate` measures on the present machine, and the MethodTable that follows from it.

Deciding (`choose_table`) is a matter of numbers, which no device is needed for; measuring takes seconds.
"""

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from torch_hicache.host_memory import empty_host
from torch_hicache.memory_budget import available_memory
from torch_hicache.plan import MethodTable, set_method_table

DIRECTIONS = ("load", "store")
MEASURED_METHODS = ("kernel", "copy_engine", "staged")
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30

# A method that leaves the compute units alone is preferred from this share of the kernel's rate on. A
# load of 32 layers beside a forward pass took 1.09 of the longer one by such methods, and 1.25 by the
# kernel, which queues for its SMs (two H200s of different hosts, mean rows of 128 KiB).
_ENOUGH = 0.92
# Sorting must gain this much: it takes compute units, and rows that come in runs have less to gain.
_PAYS = 1.1
_NEVER = 1 << 40  # bytes that no row has; its product with a number of rows still fits 64 bits

_ROW_BYTES = tuple(size * KIB for size in (16, 32, 64, 96, 128, 256, 512, 1024))
_ROWS_BYTES = 128 * MIB  # moved by one call
_ROWS_SPAN_BYTES = 4 * GIB  # of the host buffer: rows of a small one are found faster than a real pool's
_SPANS = tuple(512 * MIB << i for i in range(6))
_CALLS = 3  # timed together
_SORTED_ROW_BYTES = (256, 1152)
_SORTED_BYTES = 64 * MIB  # moved by one call


@dataclass(frozen=True)
class RowRate:
    """Rate of a method for rows scattered over both pools, each `row_bytes` of contiguous memory."""

    method: str
    direction: str
    row_bytes: int
    gbps: float


@dataclass(frozen=True)
class SortRate:
    """Rates of the kernel for small rows scattered over `span_bytes` of host memory, as they come and
    in the order of their addresses (the sorting included)."""

    span_bytes: int
    row_bytes: int
    direction: str
    gbps: float
    gbps_sorted: float


# --- Deciding ---------------------------------------------------------------------------------------


def choose_table(
    rows: Sequence[RowRate], sorts: Sequence[SortRate], base: MethodTable | None = None
) -> MethodTable:
    """The table that the rates speak for. What was not measured is as in `base`, the built-in one."""
    base = base or MethodTable()

    def both(method: str) -> tuple[int, int]:
        return _first_row_bytes(rows, method, "load"), _first_row_bytes(rows, method, "store")

    return dataclasses.replace(
        base,
        copy_engine_min_row_bytes=both("copy_engine"),
        staged_min_row_bytes=both("staged"),
        sort_min_span_bytes=_first_span_bytes(sorts) if sorts else base.sort_min_span_bytes,
    )


def _first_row_bytes(rows: Sequence[RowRate], method: str, direction: str) -> int:
    """From this row size on the method has enough of the kernel's rate, at all larger ones too."""
    rates = {(r.method, r.row_bytes): r.gbps for r in rows if r.direction == direction}
    first = _NEVER
    for row_bytes in sorted({size for _, size in rates}, reverse=True):
        if rates[method, row_bytes] < _ENOUGH * rates["kernel", row_bytes]:
            break
        first = row_bytes
    return first


def _first_span_bytes(sorts: Sequence[SortRate]) -> int:
    """From this span on sorting pays on the average of the cases, at all larger ones too; 0 for none."""
    first = 0
    for span in sorted({rate.span_bytes for rate in sorts}, reverse=True):
        gains = [math.log(r.gbps_sorted / r.gbps) for r in sorts if r.span_bytes == span]
        if statistics.fmean(gains) < math.log(_PAYS):
            break
        first = span
    return first


# --- Measuring --------------------------------------------------------------------------------------


def measure_rows(
    device: torch.device,
    methods: Sequence[str] = MEASURED_METHODS,
    row_sizes: Sequence[int] = _ROW_BYTES,
    nbytes: int = _ROWS_BYTES,
    *,
    span_bytes: int | None = None,
    seconds_of: Callable[[torch.device, Callable[[], object]], float] | None = None,
) -> list[RowRate]:
    """Random rows of a host buffer of `span_bytes` (4 GiB, or what fits) to and from random rows of a
    device buffer: no two are neighbours, so that each is a row for the copy engine too. `seconds_of`
    times a call; without it events do."""
    if span_bytes is None:
        span_bytes = min(_ROWS_SPAN_BYTES, available_memory() // 4)
    span_bytes = max(span_bytes, 2 * nbytes)
    host = empty_host((span_bytes,), torch.uint8, device)
    on_device = torch.empty(nbytes, dtype=torch.uint8, device=device)
    rates = []
    for row_bytes in row_sizes:
        entries = nbytes // row_bytes
        host_rows = host[: span_bytes // row_bytes * row_bytes].view(-1, row_bytes)
        device_rows = on_device[: entries * row_bytes].view(-1, row_bytes)
        host_slots = torch.randperm(len(host_rows) // 2)[:entries] * 2
        device_slots = torch.randperm(entries)
        for direction in DIRECTIONS:
            call = _call(direction, device_rows, host_rows, device_slots, host_slots)
            for method in methods:
                seconds = (seconds_of or _seconds)(device, partial(call, method=method))
                rates.append(RowRate(method, direction, row_bytes, entries * row_bytes / seconds / 1e9))
    return rates


def measure_sorting(
    device: torch.device, spans: Sequence[int] | None = None, nbytes: int = _SORTED_BYTES
) -> list[SortRate]:
    """Random rows of host buffers of several sizes, by default as large as `largest_spans` finds fit.

    The table in force is the built-in one afterwards.
    """
    spans = largest_spans() if spans is None else spans
    if not spans:
        return []
    host = empty_host((max(spans),), torch.uint8, device)
    rates = []
    try:
        for span in spans:
            for row_bytes in _SORTED_ROW_BYTES:
                host_rows = host[: span // row_bytes * row_bytes].view(-1, row_bytes)
                entries = nbytes // row_bytes
                device_rows = torch.empty((entries, row_bytes), dtype=torch.uint8, device=device)
                host_slots = torch.randint(len(host_rows), (2 * entries,), device=device).unique()
                host_slots = host_slots[torch.randperm(len(host_slots), device=device)[:entries]]
                device_slots = torch.arange(len(host_slots), device=device)
                moved = len(host_slots) * row_bytes
                for direction in DIRECTIONS:
                    call = _call(direction, device_rows, host_rows, device_slots, host_slots)
                    found = []
                    for sort_min_span_bytes in (0, 1):  # never, always
                        set_method_table(device, MethodTable(sort_min_span_bytes=sort_min_span_bytes))
                        seconds = _seconds(device, partial(call, method="kernel"))
                        found.append(moved / seconds / 1e9)
                    rates.append(SortRate(span, row_bytes, direction, *found))
    finally:
        set_method_table(device, MethodTable())
    return rates


def largest_spans(free_bytes: int | None = None) -> list[int]:
    """Sizes from 512 MiB to 16 GiB, of host buffers that take no more than a quarter of what is free."""
    free_bytes = available_memory() if free_bytes is None else free_bytes
    return [span for span in _SPANS if span <= free_bytes // 4]


def _call(
    direction: str, device_rows: Tensor, host_rows: Tensor, device_slots: Tensor, host_slots: Tensor
) -> Callable[..., None]:
    if direction == "load":
        arguments = [device_rows], [host_rows], device_slots, host_slots
    else:
        arguments = [host_rows], [device_rows], host_slots, device_slots
    return partial(torch.ops.hicache.transfer_kv, *arguments)


def _seconds(device: torch.device, run: Callable[[], object], repeats: int = 3) -> float:
    """Median of a call on a stream of its own, by events. A few in a row, so that the host's time
    to submit counts where it is the longer one."""
    stream = torch.cuda.Stream(device)
    times = []
    with torch.cuda.stream(stream):
        for _ in range(1 + repeats):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record(stream)
            for _ in range(_CALLS):
                run()
            end.record(stream)
            end.synchronize()
            times.append(start.elapsed_time(end) / 1e3 / _CALLS)
    return statistics.median(times[1:])
