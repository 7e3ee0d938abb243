"""What `hicache doctor` examines: whether transfer_kv is right on a device, how fast it is, on what.

Made for a device that we have never had: its owner runs one command and sends the report back. The report
is kept up to date from the first check on, so that it says what was running if the process is killed.
"""

import dataclasses
import platform
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_hicache.calibrate import DIRECTIONS, measure_rows
from torch_hicache.engine import TransferEngine
from torch_hicache.host_memory import empty_host
from torch_hicache.info import collect_info, cpu_name
from torch_hicache.layout import PlaneSpec
from torch_hicache.memory_budget import host_memory_budget, readable
from torch_hicache.ops import METHODS, check_errors
from torch_hicache.pool import DevicePool, HostPool
from torch_hicache.testing import (
    Placement,
    Snapshot,
    check_transfer,
    fill_pool,
    placements,
    random_entries,
    unchanged,
    view_on,
)

ROW_BYTES = (64, 128, 256, 576, 656, 1152, 2048, 4096, 16 << 10, 64 << 10, 256 << 10, 1 << 20)
REPEATS = 5  # of each measurement; the median counts
_PATIENCE_SECONDS = 60.0

Report = dict[str, Any]
Save = Callable[[Report], None]


@dataclass(frozen=True)
class Check:
    """One kind of fault looked for, in one placement of pools and indices and with one method.

    `status` is "passed", "failed", "refused" where the method says of a plain call that it does not serve
    it, or "skipped" for want of memory; `detail` says why. `cases` were compared before, byte by byte.
    """

    name: str
    placement: str
    method: str
    status: str
    cases: int
    detail: str = ""


def examine(device: torch.device, *, nbytes: int, save: Save = lambda report: None) -> Report:
    """All checks and rates of a device, as plain values for JSON.

    Args:
        device: with its index, or "cpu".
        nbytes: moved by one call when rates are measured.
        save: called with the report so far, ahead of each check and at the end.
    """
    report: Report = {
        "finished": False,
        "running": "",
        "device": {"device": str(device)},
        "info": {},
        "checks": [],
        "link_gbps": {},
        "rates": [],
    }

    def run(name: str, where: str, method: str, cases: Callable[[], Iterator[None]]) -> str:
        report["running"] = f"{name}, {where}, {method}"
        save(report)
        check = _run(name, where, method, cases)
        report["checks"].append(dataclasses.asdict(check))
        return check.status

    start = time.monotonic()
    run("describe", str(device), "auto", partial(_describe, device, report))
    _check_all(device, run)
    run("link_rates", str(device), "auto", partial(_link_rates, device, nbytes, report))
    for method in ("kernel",) if device.type == "cpu" else METHODS[1:]:
        run("rates", str(device), method, partial(_row_rates, device, method, nbytes, report))
    report["seconds"] = round(time.monotonic() - start, 1)
    report["finished"], report["running"] = True, ""
    save(report)
    return report


# --- What was examined ------------------------------------------------------------------------------


def _describe(device: torch.device, report: Report) -> Iterator[None]:
    report["info"] = collect_info()
    report["device"] = describe_device(device)
    yield


def describe_device(device: torch.device) -> dict[str, Any]:
    """What its runtime says of it, and the versions that are not torch's."""
    found: dict[str, Any] = {
        "device": str(device),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "drivers": {
            name: _first_line(Path("/sys/module") / name / "version") for name in ("amdgpu", "nvidia")
        },
        "rocm": _first_line(Path("/opt/rocm/.info/version")),
    }
    if device.type == "cpu":
        return found | {"name": cpu_name(), "threads": torch.get_num_threads()}
    module = torch.get_device_module(device)
    if hasattr(module, "get_device_properties"):
        properties = module.get_device_properties(device)
        for name in dir(properties):
            value = getattr(properties, name)
            if not name.startswith("_") and isinstance(value, (str, int, float)):
                found[name] = value
    return found


def _first_line(path: Path) -> str | None:
    try:
        return path.read_text().strip().partition("\n")[0]
    except OSError:
        return None


# --- Checks -------------------------------------------------------------------------------------------


def _check_all(device: torch.device, run: Callable[..., str]) -> None:
    for place in placements(str(device)):
        for method in _methods_for(place):
            if method not in place.methods:  # those serve every call
                status = run("trial", str(place), method, partial(_trial, place, method))
                if status == "refused":
                    continue
            for name, cases in _CASES.items():
                run(name, str(place), method, partial(cases, place, method))
    of_device: dict[str, Callable[[torch.device], Iterator[None]]] = {
        "far_rows": _far_rows,
        "engine": _engine,
    }
    if device.type != "cpu":
        of_device |= {"pageable": _pageable, "order": _order}
    for name, examination in of_device.items():
        run(name, str(device), "auto", partial(examination, device))


def _methods_for(place: Placement) -> list[str]:
    """The methods that the contract lets one ask for in this placement."""
    if place.device == "cpu":
        return ["auto", "kernel"]
    methods = list(place.methods)
    if place.checks_indices:
        methods.append("copy_engine")
    is_load, is_store = place.src_memory != "device", place.dst_memory != "device"
    host_indices = place.dst_indices_device if is_store else place.src_indices_device
    if (is_load or is_store) and host_indices == "cpu":
        methods.append("staged")
    return list(dict.fromkeys(methods))


class _Refused(Exception):
    """A method's own word that it does not serve a plain call."""


def _call_once(dst: Tensor, src: Tensor, dst_indices: Tensor, src_indices: Tensor, method: str) -> None:
    """Only here may a method refuse: by the op's own error, and before a byte moves."""
    snapshot = Snapshot([dst, src])
    try:
        torch.ops.hicache.transfer_kv([dst], [src], dst_indices, src_indices, method=method)
    except ValueError as error:
        snapshot.compare("a call that was refused")
        if not str(error).startswith("[transfer_kv] "):
            raise
        raise _Refused(str(error)) from error


def _trial(place: Placement, method: str) -> Iterator[None]:
    dst, src = place.dst((13, 64)), place.src((13, 64))
    fill_pool([dst])
    fill_pool([src], seed=1)
    _call_once(dst, src, place.dst_indices([1, 3]), place.src_indices([2, 12]), method)
    yield


def _run(name: str, where: str, method: str, cases: Callable[[], Iterator[None]]) -> Check:
    done = 0
    try:
        for _ in cases():
            done += 1
    except _Refused as refusal:
        return Check(name, where, method, "refused", done, str(refusal))
    except (MemoryError, torch.OutOfMemoryError) as error:
        return Check(name, where, method, "skipped", done, str(error))
    except Exception as error:
        return Check(name, where, method, "failed", done, f"{type(error).__name__}: {error}")
    return Check(name, where, method, "passed", done)


def _pools(
    place: Placement, sizes: Sequence[int], dtype: torch.dtype = torch.uint8, **layout: Any
) -> tuple[Tensor, Tensor]:
    """Of [planes, slots, ...row], filled."""
    dst, src = place.dst(sizes, dtype, **layout), place.src(sizes, dtype, **layout)
    fill_pool([dst], 1)
    fill_pool([src], 1, seed=1)
    return dst, src


def _rows(place: Placement, method: str) -> Iterator[None]:
    """Row sizes around every vector, with aligned and odd addresses."""
    dst_indices, src_indices = random_entries(7, 13, 13)
    dst_given, src_given = place.dst_indices(dst_indices), place.src_indices(src_indices)
    sizes = (1, 2, 3, 4, 7, 8, 12, 15, 16, 17, 31, 32, 33, 64, 100, 132, 256, 576, 584, 656, 1152, 4098)
    for row in sizes:
        for offset, padding in ((0, 0), (1, 0), (8, 8)):
            dst, src = _pools(place, (2, 13, row), offset_bytes=offset, padding={1: padding})
            check_transfer([dst], [src], dst_given, src_given, slot_dim=1, method=method)
            yield


def _layouts(place: Placement, method: str) -> Iterator[None]:
    """[layers, slots, heads, head_dim] in every order that serving systems use, and with gaps."""
    layouts: tuple[dict[str, Any], ...] = (
        {},
        {"order": (1, 0, 2, 3)},
        {"order": (1, 2, 0, 3)},
        {"order": (0, 2, 1, 3)},
        {"padding": {1: 3}},
        {"padding": {2: 5, 0: 64}},
    )
    sizes = (3, 11, 5, 24)
    dst_indices, src_indices = random_entries(6, 11, 11, seed=2)
    for dst_layout in layouts:
        for src_layout in layouts:
            dst = place.dst(sizes, torch.bfloat16, **dst_layout)
            src = place.src(sizes, torch.bfloat16, **src_layout)
            fill_pool([dst], 1)
            fill_pool([src], 1, seed=1)
            given = place.dst_indices(dst_indices), place.src_indices(src_indices)
            check_transfer([dst], [src], *given, slot_dim=1, method=method)
            yield


def _indices(place: Placement, method: str) -> Iterator[None]:
    """Both dtypes, strided views, runs, one source for many, padding, a count, none at all."""
    dst, src = _pools(place, (2, 300, 24))
    for dtype in (torch.int32, torch.int64):
        for number in (0, 1, 5, 64, 65, 200):
            dst_indices, src_indices = random_entries(number, 300, 300, seed=number)
            dst_indices[::5], src_indices[1::7] = -1, -1
            given = place.dst_indices(dst_indices, dtype), place.src_indices(src_indices, dtype)
            check_transfer([dst], [src], *given, slot_dim=1, method=method)
            yield
            for count in {0, number // 2, number}:
                fill_pool([dst], 1)
                end = place.count(count, dtype)
                check_transfer([dst], [src], *given, slot_dim=1, method=method, count=end)
                yield
    doubled = torch.stack([torch.arange(100, 140), torch.full((40,), 999)], 1).flatten()
    strided = view_on(place.dst_indices_device, doubled[::2])
    source = place.src_indices([17]).expand(40)
    check_transfer([dst], [src], strided, source, slot_dim=1, method=method)
    yield


def _planes(place: Placement, method: str) -> Iterator[None]:
    """One call with rows of several sizes and dtypes, and one with more planes than a launch takes."""
    rows = [((4, 192), torch.bfloat16), ((576,), torch.uint8), ((1,), torch.float32), ((3,), torch.bool)]
    dst = [place.dst((17, *row), dtype) for row, dtype in rows]
    src = [place.src((19, *row), dtype) for row, dtype in rows]
    many = list(_pools(place, (200, 9, 40)))
    for dst_planes, src_planes in ((dst, src), (many[0].unbind(0), many[1].unbind(0))):
        fill_pool(dst_planes)
        fill_pool(src_planes, seed=1)
        dst_indices, src_indices = random_entries(8, 9, 9)
        given = place.dst_indices(dst_indices), place.src_indices(src_indices)
        check_transfer(dst_planes, src_planes, *given, method=method)
        yield


def _many_entries(place: Placement, method: str) -> Iterator[None]:
    """More than one tile of a kernel, and more copies than a batch holds; scattered and in runs."""
    dst, src = _pools(place, (2, 6000, 64))
    dst_indices, src_indices = random_entries(5000, 6000, 6000)
    ascending = torch.arange(5000)
    for pair in ((dst_indices, src_indices), (ascending + 7, ascending)):
        given = place.dst_indices(pair[0]), place.src_indices(pair[1])
        check_transfer([dst], [src], *given, slot_dim=1, method=method)
        yield


def _bad_indices(place: Placement, method: str) -> Iterator[None]:
    """Refused before a byte moves, or skipped and recorded: never followed."""
    dst, src = _pools(place, (2, 23, 40))
    for side, where in (("dst", place.dst_indices_device), ("src", place.src_indices_device)):
        for value in (-2, 23, 1 << 20, 1 << 40, -(1 << 63)):
            good, bad = torch.tensor([1, 2, 3, 4, 5]), torch.tensor([4, 7, value, 9, 11])
            pair = (bad, good) if side == "dst" else (good, bad)
            given = place.dst_indices(pair[0]), place.src_indices(pair[1])
            call = partial(torch.ops.hicache.transfer_kv, slot_dim=1, method=method)
            snapshot = Snapshot([dst, src])
            if where == "cpu":
                _raises(IndexError, partial(call, [dst], [src], *given))
            else:
                padded = [torch.where(bad == value, -1, indices) for indices in pair]
                snapshot.transfer([dst], [src], *padded, slot_dim=1)
                call([dst], [src], *given)
                _raises(IndexError, partial(check_errors, place.device))
            snapshot.compare(f"{side} index {value}")
            yield


_CASES: dict[str, Callable[[Placement, str], Iterator[None]]] = {
    "rows": _rows,
    "layouts": _layouts,
    "indices": _indices,
    "planes": _planes,
    "many_entries": _many_entries,
    "bad_indices": _bad_indices,
}


def _raises(kind: type[Exception], call: Callable[[], object]) -> str:
    try:
        call()
    except kind as error:
        return str(error)
    except Exception as error:
        got = f"{type(error).__name__}: {error}"
        raise AssertionError(f"{kind.__name__} should have been raised, got {got}") from error
    raise AssertionError(f"no {kind.__name__} was raised")


def _far_rows(device: torch.device) -> Iterator[None]:
    """The last row of a pool of more than 4 GiB; little of it is ever touched."""
    row_bytes = 1 << 20
    slots = (1 << 32) // row_bytes + 3
    pool = torch.empty((slots, row_bytes), dtype=torch.uint8, device=device)
    rows = empty_host((2, row_bytes), torch.uint8, device)
    fill_pool([rows])
    expected = rows.clone()
    first, last, at = torch.tensor([0]), torch.tensor([1]), torch.tensor([slots - 1])
    torch.ops.hicache.transfer_kv([pool], [rows], at, first)
    torch.ops.hicache.transfer_kv([rows], [pool], last, at)
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    expected[1] = expected[0]
    assert torch.equal(rows, expected), f"row {slots - 1} of a pool of {slots} MiB is another one"
    yield


def _engine(device: torch.device) -> Iterator[None]:
    """A store, and a load layer by layer to other slots, on the engine's streams."""
    specs = [PlaneSpec("key", (2, 64), torch.bfloat16), PlaneSpec("value", (2, 48), torch.bfloat16)]
    device_pool = DevicePool(specs, 4, 64, device)
    host_pool = HostPool(specs, 4, 80, device=device)
    fill_pool([plane for layer in range(4) for plane in device_pool.planes(layer)])

    def bytes_of(layer: int) -> list[Tensor]:
        return [
            plane.to("cpu", copy=True).view(torch.uint8).flatten(1) for plane in device_pool.planes(layer)
        ]

    before = [bytes_of(layer) for layer in range(4)]
    engine = TransferEngine(device_pool, host_pool)  # not closed if it hangs: that would wait for it
    engine.store(torch.arange(20), torch.arange(30, 50)).wait(_PATIENCE_SECONDS)
    ticket = engine.load(torch.arange(30, 50), torch.arange(44, 64), layers="all")
    for layer in range(4):
        ticket.wait_layer(layer)
        for plane, expected in zip(bytes_of(layer), before[layer], strict=True):
            assert torch.equal(plane[44:64], expected[:20]), f"layer {layer}"
            assert torch.equal(plane[:44], expected[:44]), f"layer {layer}"
        yield
    ticket.wait(_PATIENCE_SECONDS)
    engine.close()


def _pageable(device: torch.device) -> Iterator[None]:
    """Plain host memory: no kernel may touch it, "auto" serves it some other way or refuses."""
    place = Placement("pageable", str(device), "device", "cpu")
    dst, src = _pools(place, (2, 13, 64))
    given = torch.tensor([1, 3]), torch.tensor([2, 12])
    call = partial(torch.ops.hicache.transfer_kv, [dst], [src], *given, slot_dim=1)
    with unchanged([dst, src]):
        _raises(ValueError, partial(call, method="kernel"))
    yield
    try:
        check_transfer([dst], [src], *given, slot_dim=1)
    except ValueError as error:
        if "pageable" not in str(error):
            raise
    yield


def _order(device: torch.device) -> Iterator[None]:
    """On a stream of their own: a store finds what was computed before it, and what is computed behind a
    load finds the load's rows. The host waits once, at the end."""
    shape, steps = (16, 1 << 16), range(16)
    host = empty_host(shape, torch.uint8, device)
    pool, seen = (torch.zeros(shape, dtype=torch.uint8, device=device) for _ in range(2))
    host.zero_()
    torch.accelerator.synchronize(device)
    side = torch.Stream(device)
    with side:
        for step in steps:
            at = torch.tensor([step])
            pool[step].fill_(step + 1)
            torch.ops.hicache.transfer_kv([host], [pool], at, at)
            pool[step].fill_(255)
            torch.ops.hicache.transfer_kv([pool], [host], at, at)
            seen[step].copy_(pool[step])
    side.synchronize()
    for name, rows in (("store", host), ("load", seen.cpu())):
        for step in steps:
            assert bool((rows[step] == step + 1).all()), f"the {name} of step {step}"
            yield


# --- Rates --------------------------------------------------------------------------------------------


def check_memory(device: torch.device, nbytes: int) -> None:
    """MemoryError when rates can't be measured with calls of `nbytes`, for want of memory."""
    on_host = 3 * nbytes if device.type == "cpu" else 2 * nbytes
    budget = host_memory_budget()
    if on_host > budget.free_bytes:
        raise MemoryError(
            f"[doctor] --mib {nbytes >> 20} needs {readable(on_host)} of host memory, {budget}."
        )
    free = None if device.type == "cpu" else _free_on(device)
    if free is not None and nbytes > free:
        raise MemoryError(
            f"[doctor] --mib {nbytes >> 20} needs {readable(nbytes)} on {device}, which has "
            f"{readable(free)} free."
        )


def _free_on(device: torch.device) -> int | None:
    """As far as the device's module says: what can't be asked is found when it is measured."""
    try:
        return int(torch.get_device_module(device).mem_get_info(device)[0])
    except (AttributeError, RuntimeError):
        return None


def _link_rates(device: torch.device, nbytes: int, report: Report) -> Iterator[None]:
    report["link_gbps"] = link_rates(device, nbytes)
    yield


def _row_rates(device: torch.device, method: str, nbytes: int, report: Report) -> Iterator[None]:
    """All of one method or none, so that the table has no holes."""
    rows = torch.zeros((4, 64), dtype=torch.uint8, device=device)
    host = empty_host((4, 64), torch.uint8, device)
    fill_pool([host])
    _call_once(rows, host, torch.tensor([1, 3]), torch.tensor([2, 0]), method)
    sizes = [size for size in ROW_BYTES if size <= nbytes]
    span_bytes = 2 * nbytes  # what check_memory has counted
    for rate in measure_rows(
        device, [method], sizes, nbytes, span_bytes=span_bytes, seconds_of=wall_seconds
    ):
        report["rates"].append(dataclasses.asdict(rate))
        yield


def link_rates(device: torch.device, nbytes: int) -> dict[str, float]:
    """GB/s of torch's own copy of one block of pinned memory: what the methods are to be held against."""
    host = empty_host((nbytes,), torch.uint8, device)
    on_device = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    host.zero_()
    pairs = {"load": (on_device, host), "store": (host, on_device)}
    return {
        direction: nbytes / wall_seconds(device, partial(dst.copy_, src, non_blocking=True)) / 1e9
        for direction, (dst, src) in pairs.items()
    }


def wall_seconds(device: torch.device, run: Callable[[], object]) -> float:
    """Median time of a call, from its start until the device is done. On any device: no events."""

    def wait() -> None:
        if device.type != "cpu":
            torch.accelerator.synchronize(device)

    times = []
    for _ in range(1 + REPEATS):
        wait()
        start = time.perf_counter()
        run()
        wait()
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:])


def failures(report: Report) -> list[dict[str, Any]]:
    return [check for check in report["checks"] if check["status"] == "failed"]


def rate_table(report: Report) -> list[tuple[int, dict[str, list[float]]]]:
    """For each row size the rates of each method, load and store."""
    sizes = sorted({rate["row_bytes"] for rate in report["rates"]})
    methods = dict.fromkeys(rate["method"] for rate in report["rates"])
    found = {(r["row_bytes"], r["method"], r["direction"]): r["gbps"] for r in report["rates"]}
    return [
        (size, {method: [found[size, method, way] for way in DIRECTIONS] for method in methods})
        for size in sizes
    ]
