"""The picture of a replay. matplotlib is optional: `pip install 'torch_hicache[plot]'`."""

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


def check_plot(path: Path) -> None:
    """Raise what would keep `draw_replay` from writing `path`, before a long run.

    Raises:
        ValueError: matplotlib is missing, the folder is missing, or the file type is unknown.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            "[replay] --plot needs matplotlib, which is not installed: pip install 'torch_hicache[plot]'."
        )
    from matplotlib.backend_bases import FigureCanvasBase

    known = FigureCanvasBase.get_supported_filetypes()
    if path.suffix.removeprefix(".").lower() not in known:
        raise ValueError(
            f"[replay] --plot must name a file such as out.png, got '{path}' "
            f"(known: {', '.join(sorted(known))})."
        )
    if path.is_dir() or not path.parent.is_dir():
        raise ValueError(f"[replay] --plot: {path} is no file in an existing folder.")


def draw_replay(result: ReplayResult, path: Path, *, title: str) -> None:
    """Hit rates over the requests, bytes moved so far, and each transfer's rate by its size."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 9), layout="constrained")
    figure.suptitle(title)
    hits, moved, rates = figure.subplots(3, 1)
    _draw_hits(hits, result)
    _draw_moved(moved, result)
    _draw_rates(rates, result)
    figure.savefig(path, dpi=120)


def _draw_hits(axes: Axes, result: ReplayResult) -> None:
    records = result.records
    step = max(1, -(-len(records) // _WINDOWS))
    places, device, host = [], [], []
    for start in range(0, len(records), step):
        window = ReplayResult(records=records[start : start + step])
        places.append(start + len(window.records) / 2)
        device.append(100 * window.hit_rate("device"))
        host.append(100 * window.hit_rate("host"))
    rest = [100 - d - h for d, h in zip(device, host, strict=True)]
    labels = ["found on the device", "loaded from the host", "prefilled"]
    colors = [_DEVICE_COLOR, _HOST_COLOR, _REST_COLOR]
    axes.stackplot(places, device, host, rest, labels=labels, colors=colors)
    axes.set(xlabel="request", ylabel="% of prompt blocks", ylim=(0, 100))
    axes.legend(loc="upper right")


def _draw_moved(axes: Axes, result: ReplayResult) -> None:
    for direction, color in _directions():
        sizes = (getattr(record, direction).num_bytes for record in result.records)
        axes.plot([total / 2**30 for total in itertools.accumulate(sizes)], color=color)
    axes.set(xlabel="request", ylabel="GiB moved so far")
    axes.legend(["load", "store"], loc="upper left")


def _draw_rates(axes: Axes, result: ReplayResult) -> None:
    for direction, color in _directions():
        parts = [getattr(record, direction) for record in result.records]
        parts = [part for part in parts if part.num_bytes]
        axes.scatter(
            [part.num_bytes / 2**20 for part in parts],
            [part.gbps for part in parts],
            s=6,
            color=color,
            label=f"{direction}: {result.moved(direction).gbps:.1f} GB/s over all",
        )
    axes.set(xlabel="MiB in one transfer", ylabel="GB/s", xscale="log")
    axes.set_ylim(bottom=0)
    axes.legend(loc="lower right")


def _directions() -> tuple[tuple[str, Any], ...]:
    return (("load", _HOST_COLOR), ("store", _DEVICE_COLOR))
