"""The pictures of a replay and of benchmarks.

matplotlib is optional: `pip install 'torch_hicache[plot]'`.
"""

from __future__ import annotations

import importlib.util
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch_hicache.replay import ReplayResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_WINDOWS = 100  # points of the hit-rate curve
_DEVICE_COLOR, _HOST_COLOR, _REST_COLOR = "#2a7f62", "#e0a030", "#d8d8d8"
_TIER3_COLOR = "#4a90b8"
_REQUEST = "request (number in the trace)"
_WAYS = {"load": "load, host to device", "store": "store, device to host"}


def check_plot(path: Path, *, command: str) -> None:
    """Raise what would keep a command from drawing into `path`, before a long run.

    Raises:
        ValueError: matplotlib is missing, the folder is missing, or the file type is unknown.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            f"[{command}] --plot needs matplotlib, which is not installed: "
            "pip install 'torch_hicache[plot]'."
        )
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in known:
        raise ValueError(
            f"[{command}] --plot must name a file such as out.png, got '{path}' "
            f"(known: {', '.join(sorted(known))})."
        )
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"[{command}] --plot: {path} is no file in an existing folder.")


def draw_replay(result: ReplayResult, path: Path, *, title: str) -> None:
    """Hit rates over the requests, bytes moved so far, and each transfer's rate by its size."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 9), layout="constrained")
    figure.suptitle(title)
    hits, moved, rates = figure.subplots(3, 1)
    _draw_hits(hits, result)
    _draw_moved(moved, result)
    _draw_rates(rates, result)
    figure.savefig(path, dpi=120)


def _draw_hits(axes: Axes, result: ReplayResult) -> None:
    records = result.records
    step = max(1, -(-len(records) // _WINDOWS))
    places: list[float] = []
    names = {"device": "found on the device", "host": "loaded from the host"}
    colors = [_DEVICE_COLOR, _HOST_COLOR]
    if result.tier3:
        names["tier3"] = "got from tier 3"
        colors.append(_TIER3_COLOR)
    hits: dict[str, list[float]] = {tier: [] for tier in names}
    for start in range(0, len(records), step):
        window = ReplayResult(records=records[start : start + step])
        places.append(start + len(window.records) / 2)
        for tier, shares in hits.items():
            shares.append(100 * window.hit_rate(tier))
    rest = [100 - sum(shares) for shares in zip(*hits.values(), strict=True)]
    labels = [*names.values(), "prefilled"]
    axes.stackplot(places, *hits.values(), rest, labels=labels, colors=[*colors, _REST_COLOR])
    axes.set(xlabel=_REQUEST, ylabel="prompt blocks (%)", ylim=(0, 100))
    axes.margins(x=0)
    _legend_beside(axes)


def _draw_moved(axes: Axes, result: ReplayResult) -> None:
    for direction, color in _directions():
        sizes = (getattr(record, direction).num_bytes for record in result.records)
        totals = [total / 2**30 for total in itertools.accumulate(sizes)]
        axes.plot(totals, color=color, label=_WAYS[direction])
    axes.set(xlabel=_REQUEST, ylabel="moved so far (GiB)")
    axes.margins(x=0)
    _legend_beside(axes)


def _draw_rates(axes: Axes, result: ReplayResult) -> None:
    for direction, color in _directions():
        parts = [getattr(record, direction) for record in result.records]
        parts = [part for part in parts if part.num_bytes]
        axes.scatter(
            [part.num_bytes / 2**20 for part in parts],
            [part.gbps for part in parts],
            s=6,
            color=color,
            label=f"{direction}, {result.moved(direction).gbps:.1f} GB/s over all",
        )
    axes.set(xlabel="size of a request's transfer (MiB)", ylabel="rate (GB/s)")
    if any(result.moved(direction).num_bytes for direction, _ in _directions()):
        axes.set_xscale("log")  # which an empty picture can't have
        axes.xaxis.set_major_formatter(_plain)
    axes.set_ylim(bottom=0)
    _legend_beside(axes)


def _legend_beside(axes: Axes) -> None:
    """To the right of the picture, where it covers nothing."""
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)


def _plain(value: float, _place: float) -> str:
    """A tick's number without powers."""
    return f"{value:g}"


def _directions() -> tuple[tuple[str, Any], ...]:
    return (("load", _HOST_COLOR), ("store", _DEVICE_COLOR))


# --- Benchmarks -----------------------------------------------------------------------------------

_METHOD_COLORS = {
    "kernel": "#2a7f62",
    "copy_engine": "#e0a030",
    "staged": "#7a5fb0",
    "torch indexing": "#909090",
}


def bandwidth_curves(results: list[dict[str, Any]], direction: str) -> dict[str, list[tuple[int, float]]]:
    """method -> (row bytes, GB/s), ascending: rows scattered over a small host pool."""
    curves: dict[str, dict[int, float]] = {}
    for row in results:
        if row["section"] in ("rows", "row_sizes") and row["direction"] == direction:
            method = "torch indexing" if row["case"].startswith("torch") else row.get("method", "kernel")
            curves.setdefault(method, {})[row["row_bytes"]] = row["gbps"]
    return {method: sorted(curve.items()) for method, curve in curves.items()}


def slowdowns(results: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """case -> direction -> by how many percent a matrix product beside that transfer is slower."""
    cases: dict[str, dict[str, float]] = {}
    for row in results:
        if row["section"] == "gemm":
            cases.setdefault(row["case"], {})[row["direction"]] = 100 * row["gemm_slower"]
    return cases


def draw_bench(record: dict[str, Any], path: Path) -> None:
    """Bandwidth by row size and method beside the link, and what transfers do to a matrix product.

    Raises:
        ValueError: the results have neither.
    """
    from matplotlib.figure import Figure

    results = record["results"]
    curves = {direction: bandwidth_curves(results, direction) for direction in ("load", "store")}
    cases = slowdowns(results)
    if not cases and not any(curves.values()):
        raise ValueError(
            "[bench] --plot needs figures of a device (sections transfer_kv, row_sizes or methods), "
            "the results have none."
        )
    machine = record["machine"]
    figure = Figure(figsize=(13, 5 + 0.35 * len(cases)), layout="constrained")
    figure.suptitle(f"{machine.get('device', 'no device')}, commit {machine.get('commit', 'unknown')}")
    grid = figure.add_gridspec(2, 2, height_ratios=[4.5, 0.5 + 0.35 * len(cases)])
    for column, (direction, of_direction) in enumerate(curves.items()):
        axes = figure.add_subplot(grid[0, column])
        _draw_bandwidth(axes, direction, of_direction, record.get("link_gbps", {}).get(direction))
    _draw_slowdowns(figure.add_subplot(grid[1, :]), cases)
    figure.savefig(path, dpi=120)


def _draw_bandwidth(
    axes: Axes, direction: str, curves: dict[str, list[tuple[int, float]]], link: float | None
) -> None:
    for method, points in curves.items():
        sizes, rates = zip(*points, strict=True)
        axes.plot(sizes, rates, marker=".", color=_METHOD_COLORS.get(method), label=method)
    if link:
        axes.axhline(link, color="black", linestyle="--", linewidth=1, label="one big copy")
    axes.set(title=_WAYS[direction], xlabel="size of a scattered row (bytes)", ylabel="rate (GB/s)")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(_plain)
    axes.set_ylim(bottom=0)
    if curves or link:
        _legend_beside(axes)


def _draw_slowdowns(axes: Axes, cases: dict[str, dict[str, float]]) -> None:
    for offset, (direction, color) in zip((-0.2, 0.2), _directions(), strict=True):
        places = [i + offset for i, case in enumerate(cases) if direction in cases[case]]
        values = [case[direction] for case in cases.values() if direction in case]
        axes.barh(places, values, height=0.4, color=color, label=direction)
    axes.set_yticks(range(len(cases)), list(cases), fontsize=8)
    axes.invert_yaxis()
    axes.axvline(0, color="black", linewidth=1)
    axes.set(
        xlabel="how much slower an 8192-cubed matrix product is beside the transfer (%)", ylabel="case"
    )
    if cases:
        _legend_beside(axes)
