"""`hicache calibrate`: from rates to a table, what is printed and stored, and who loads it."""

import dataclasses
import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_fakes import make_pools

from torch_hicache import TransferEngine, calibrate, cli, cli_measure, plan, set_method_table
from torch_hicache.calibrate import GIB, KIB, MIB, RowRate, SortRate, choose_table, largest_spans
from torch_hicache.plan import (
    MethodTable,
    load_method_table,
    save_method_table,
    table_path,
    use_stored_method_table,
)

NEVER = 1 << 40


def row_rates(rates: dict[str, dict[int, tuple[float, float]]]) -> list[RowRate]:
    """From method -> row bytes -> (load, store)."""
    return [
        RowRate(method, direction, row_bytes, gbps)
        for method, of_size in rates.items()
        for row_bytes, pair in of_size.items()
        for direction, gbps in zip(("load", "store"), pair, strict=True)
    ]


def flat(gbps: float, sizes: tuple[int, ...]) -> dict[int, tuple[float, float]]:
    return dict.fromkeys(sizes, (gbps, gbps))


SIZES = (64 * KIB, 96 * KIB, 256 * KIB, MIB)
# An H200, as measured out of a host buffer of 4 GiB.
H200 = row_rates(
    {
        "kernel": {
            64 * KIB: (50.0, 50.4),
            96 * KIB: (49.7, 51.0),
            256 * KIB: (50.1, 50.4),
            MIB: (50.4, 51.1),
        },
        "copy_engine": {
            64 * KIB: (44.7, 41.0),
            96 * KIB: (45.2, 43.4),
            256 * KIB: (50.7, 50.0),
            MIB: (54.7, 54.2),
        },
        "staged": {
            64 * KIB: (45.3, 45.1),
            96 * KIB: (48.2, 47.2),
            256 * KIB: (51.1, 51.3),
            MIB: (52.4, 52.7),
        },
    }
)
# At 16 and 32 GiB as measured; smaller spans are made up: no gain at 512 MiB, where rows do not suffer.
H200_SORTS = [
    SortRate(span, row_bytes, direction, gbps, gbps_sorted)
    for span, row_bytes, load, store in (
        (512 * MIB, 256, (50.2, 47.0), (51.1, 47.0)),
        (512 * MIB, 1152, (50.3, 49.0), (50.4, 49.0)),
        (GIB, 256, (33.0, 47.0), (36.0, 46.0)),
        (GIB, 1152, (48.0, 49.0), (44.0, 48.0)),
        (16 * GIB, 256, (8.8, 40.9), (10.1, 30.6)),
        (16 * GIB, 1152, (41.6, 51.0), (29.5, 47.3)),
        (32 * GIB, 256, (7.7, 23.6), (8.6, 20.4)),
        (32 * GIB, 1152, (36.6, 51.1), (29.1, 44.2)),
    )
    for direction, (gbps, gbps_sorted) in (("load", load), ("store", store))
]


# --- From rates to a table --------------------------------------------------------------------------


def test_the_rates_of_an_h200_give_the_built_in_table() -> None:
    assert choose_table(H200, H200_SORTS) == MethodTable()


def test_what_is_not_measured_is_as_before() -> None:
    base = MethodTable(min_bytes=5, sort_min_span_bytes=7, staging_bytes=1 << 20, staging_buffers=2)
    table = choose_table(H200, [], base)
    assert table == dataclasses.replace(
        base, copy_engine_min_row_bytes=(256 * KIB,) * 2, staged_min_row_bytes=(96 * KIB,) * 2
    )


def test_each_direction_has_its_own_size() -> None:
    rates = {
        "kernel": {KIB: (40.0, 40.0), MIB: (40.0, 40.0)},
        "copy_engine": {KIB: (39.0, 10.0), MIB: (50.0, 50.0)},
        "staged": {KIB: (10.0, 37.0), MIB: (50.0, 10.0)},
    }
    table = choose_table(row_rates(rates), [])
    assert table.copy_engine_min_row_bytes == (KIB, MIB)
    assert table.staged_min_row_bytes == (MIB, NEVER)


def test_a_method_must_keep_up_at_all_larger_rows() -> None:
    sizes = (KIB, 2 * KIB, 4 * KIB)
    rates = {
        "kernel": flat(50.0, sizes),
        "copy_engine": {KIB: (50.0, 50.0), 2 * KIB: (45.9, 46.1), 4 * KIB: (60.0, 60.0)},
        "staged": flat(1.0, sizes),
    }
    table = choose_table(row_rates(rates), [])
    assert table.copy_engine_min_row_bytes == (4 * KIB, KIB)
    assert table.staged_min_row_bytes == (NEVER, NEVER)


def test_a_size_of_never_is_one_that_the_op_takes() -> None:
    """The product with a large number of rows must not wrap round to a size that all have."""
    never = (calibrate._NEVER,) * 2
    table = MethodTable(copy_engine_min_row_bytes=never, staged_min_row_bytes=never)
    entries = torch.arange(1 << 20)
    pool = torch.empty(1 << 20, 8, dtype=torch.uint8)
    text = torch.ops.hicache.explain_as_if(
        [pool],
        [pool.clone()],
        entries,
        entries * 2 % (1 << 20) + entries // (1 << 19),
        slot_dim=0,
        method="auto",
        on_device=[True, False, False, False],
        capturing=False,
        pageable=False,
        table=table.values(),
    )
    assert json.loads(text)["method"] == "kernel"


@pytest.mark.parametrize(
    ("gains", "span"),
    [
        ({1: 1.0, 2: 1.0, 4: 1.0}, 0),  # rows do not suffer
        ({1: 1.5, 2: 2.0, 4: 3.0}, 1),
        ({1: 1.05, 2: 1.2, 4: 3.0}, 2),  # a little is not worth the compute units
        ({1: 1.5, 2: 1.0, 4: 3.0}, 4),
        ({1: 1.5, 2: 1.5, 4: 0.9}, 0),
    ],
)
def test_sorting_starts_where_it_pays(gains: dict[int, float], span: int) -> None:
    sorts = [
        SortRate(gib * GIB, row_bytes, "load", 20.0, 20.0 * gain)
        for gib, gain in gains.items()
        for row_bytes in (256, 1152)
    ]
    assert choose_table(H200, sorts).sort_min_span_bytes == span * GIB


def test_a_gain_here_and_a_loss_there_are_weighed() -> None:
    sorts = [SortRate(GIB, 256, "load", 10.0, 20.0), SortRate(GIB, 256, "store", 20.0, 10.0)]
    assert choose_table(H200, sorts).sort_min_span_bytes == 0
    sorts[1] = SortRate(GIB, 256, "store", 20.0, 13.0)
    assert choose_table(H200, sorts).sort_min_span_bytes == GIB


def test_a_quarter_of_the_free_memory_is_taken() -> None:
    assert largest_spans(1 << 30) == []
    assert largest_spans(2 << 30) == [512 * MIB]
    assert largest_spans(20 << 30) == [512 * MIB, GIB, 2 * GIB, 4 * GIB]
    assert largest_spans(1 << 50)[-1] == 16 * GIB


# --- The command ------------------------------------------------------------------------------------


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine whose measurements are H200's; returns the folder that tables are stored in."""
    monkeypatch.setenv("HICACHE_CALIBRATION", str(tmp_path))
    monkeypatch.setattr(cli_measure, "find_device", lambda name, command: torch.device("cuda", 0))
    monkeypatch.setattr(cli_measure, "measure_rows", lambda device: H200)
    monkeypatch.setattr(cli_measure, "measure_sorting", lambda device: H200_SORTS)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: "Some GPU/2")
    return tmp_path


def test_calibrate_stores_and_prints(measured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["calibrate"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "64 KiB 50.0 / 50.4 44.7 / 41.0 45.3 / 45.1" in lines
    assert "256 B 16 GiB 8.8 / 10.1 40.9 / 30.6" in lines
    assert "sort_min_span_bytes 1073741824" in lines
    path = measured / "Some_GPU_2.json"
    assert f"stored in {path}" in lines
    assert json.loads(path.read_text())["staged_min_row_bytes"] == [96 * KIB, 96 * KIB]


def test_calibrate_as_json(measured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["calibrate", "--json", "--device", "cuda:0"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["device"], found["path"]) == ("Some GPU/2", str(measured / "Some_GPU_2.json"))
    assert [RowRate(**rate) for rate in found["rows"]] == H200
    assert [SortRate(**rate) for rate in found["sorts"]] == H200_SORTS
    assert found["table"]["copy_engine_min_row_bytes"] == [256 * KIB, 256 * KIB]


def test_a_dry_run_stores_nothing(measured: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["calibrate", "--dry-run"]) == 0
    assert capsys.readouterr().out.endswith("\nnot stored\n")
    assert cli.main(["calibrate", "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["path"] is None
    assert list(measured.iterdir()) == []


def test_without_sorts_it_says_so(
    measured: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli_measure, "measure_sorting", lambda device: [])
    assert cli.main(["calibrate", "--dry-run"]) == 0
    assert "too little host memory is free to measure the sorting" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("device", "text"),
    [
        ("cpu", "--device must be cuda or cuda:N, got 'cpu'. .* there is nothing to calibrate"),
        ("auto", "--device must be cuda or cuda:N, got 'auto'"),
        ("npu:1", "--device must be .* The CPU and an NPU have no table of methods"),
        ("hip", "--device must be .*, got 'hip'. An AMD GPU is cuda: ROCm's torch calls it so."),
        ("cuda:x", "--device must be cuda or cuda:N, got 'cuda:x'"),
    ],
)
def test_what_is_no_accelerator_is_exit_code_2(
    device: str, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["calibrate", "--device", device]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert re.match(rf"\[calibrate\] {text}", err)


def test_a_machine_without_an_accelerator_is_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["calibrate", "--json"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("[calibrate] --device cuda: ")
    assert err.count("\n") == 1


# --- Who loads the table ----------------------------------------------------------------------------


@pytest.fixture
def stored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, MethodTable]]:
    """An empty folder for tables, and what is set in this process from now on."""
    found: list[tuple[str, MethodTable]] = []
    monkeypatch.setenv("HICACHE_CALIBRATION", str(tmp_path))
    monkeypatch.setattr(plan, "_devices_with_a_table", set())
    monkeypatch.setattr(plan, "set_method_table", lambda device, table: found.append((device, table)))
    return found


DEVICE = torch.device("cpu")  # tables are kept for any device


def test_a_stored_table_is_set_once(stored: list[tuple[str, MethodTable]]) -> None:
    table = MethodTable(copy_engine_min_row_bytes=(1, 2), min_bytes=3)
    save_method_table(DEVICE, table)
    use_stored_method_table(DEVICE)
    use_stored_method_table(DEVICE)
    assert stored == [(DEVICE, table)]


def test_nothing_stored_is_nothing_set(stored: list[tuple[str, MethodTable]]) -> None:
    use_stored_method_table(DEVICE)
    assert load_method_table(DEVICE) is None
    assert stored == []


def test_a_table_that_was_set_is_not_replaced(
    monkeypatch: pytest.MonkeyPatch, stored: list[tuple[str, MethodTable]]
) -> None:
    save_method_table(DEVICE, MethodTable(min_bytes=3))
    monkeypatch.setattr(torch.ops.hicache, "set_method_table", lambda on_device, values: None)
    set_method_table(DEVICE, MethodTable())
    use_stored_method_table(DEVICE)
    assert stored == []


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"copy_engine_min_row_bytes": 3}'])
def test_a_file_that_is_no_table_is_a_warning(text: str, stored: list[tuple[str, MethodTable]]) -> None:
    table_path(DEVICE).write_text(text)
    with pytest.warns(UserWarning, match="is no table of methods: .* table in force is kept"):
        use_stored_method_table(DEVICE)
    assert stored == []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        use_stored_method_table(DEVICE)


def test_an_engine_on_the_cpu_looks_for_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "table_path", None)
    with TransferEngine(*make_pools()):
        pass


# --- On a GPU ---------------------------------------------------------------------------------------


@pytest.fixture
def table_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Tables in a folder of their own, and the built-in one in force afterwards."""
    monkeypatch.setenv("HICACHE_CALIBRATION", str(tmp_path))
    monkeypatch.setattr(plan, "_devices_with_a_table", set())
    yield tmp_path
    set_method_table("cuda", MethodTable())


@pytest.mark.backend("cuda")
def test_an_engine_loads_the_table(table_folder: Path) -> None:
    pools = make_pools(device="cuda")
    slots = torch.arange(4)
    call = pools[0].stacks(), pools[1].stacks(), slots, slots
    set_method_table("cuda", MethodTable())
    assert plan.explain(*call, slot_dim=1).method == "kernel"
    plan._devices_with_a_table.clear()
    eager = MethodTable(copy_engine_min_row_bytes=(1, 1), min_bytes=0)
    save_method_table(pools[0].device, eager)
    with TransferEngine(*pools):
        assert plan.explain(*call, slot_dim=1).method == "copy_engine"


@pytest.mark.backend("cuda")
def test_rates_are_measured() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    rows = calibrate.measure_rows(device, row_sizes=(16 * KIB, MIB), nbytes=8 * MIB)
    assert len(rows) == 2 * 2 * 3
    sorts = calibrate.measure_sorting(device, spans=[64 * MIB], nbytes=4 * MIB)
    assert len(sorts) == 2 * 2
    assert all(rate.gbps > 0 for rate in [*rows, *sorts])
    assert all(rate.gbps_sorted > 0 for rate in sorts)


@pytest.mark.backend("cuda")
def test_each_row_is_measured_as_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """No two rows are neighbours: a copy engine gets as many as there are entries."""
    device = torch.device("cuda", torch.cuda.current_device())
    plans = []

    def explained(_device: torch.device, run: Callable[..., None], repeats: int = 3) -> float:
        plans.append(plan.explain(*run.args, **run.keywords))  # type: ignore[attr-defined]
        return 1.0

    monkeypatch.setattr(calibrate, "_seconds", explained)
    rates = calibrate.measure_rows(device, row_sizes=(16 * KIB,), nbytes=8 * MIB)
    for rate, found in zip(rates, plans, strict=True):
        assert found.method == rate.method
        assert found.bytes == 8 * MIB
        assert found.rows == (0 if rate.method == "kernel" else 512)


@pytest.mark.backend("cuda")
def test_calibrate_runs_on_a_gpu(
    table_folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibrate, "largest_spans", lambda: [512 * MIB])
    assert cli.main(["calibrate", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert Path(found["path"]).parent == table_folder
    table = load_method_table("cuda")
    assert table is not None
    assert json.loads(json.dumps(dataclasses.asdict(table))) == found["table"]
