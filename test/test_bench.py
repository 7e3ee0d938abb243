"""`hicache bench`: which scripts run, what is gathered, what is drawn."""

import importlib
import json
from pathlib import Path
from typing import Any

import pytest

from torch_hicache import bench, cli, plot

RESULTS = Path(__file__).parent.parent / "benchmark" / "results" / "h200.json"
SCRIPT = """
import json, sys
machine, link, results, code = {facts!r}
if results is not None:
    record = {{"machine": machine, "results": results}} | ({{"link_gbps": link}} if link else {{}})
    open(sys.argv[sys.argv.index("--json") + 1], "w").write(json.dumps(record))
sys.exit(code)
"""
MACHINE = {"device": "Some GPU", "commit": "abc"}


def rows_of(section: str, **fields: Any) -> list[dict[str, Any]]:
    return [{"section": section, "case": section, "direction": "load", "gbps": 1.0} | fields]


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Makes benchmark scripts in a folder of their own."""
    folder = tmp_path / "benchmark"
    folder.mkdir()
    monkeypatch.setattr(bench, "FOLDER", folder)

    def make(name: str, link: dict[str, float], results: list[Any] | None, code: int = 0) -> None:
        facts = (MACHINE | {"script": name}, link, results, code)
        (folder / f"bench_{name}.py").write_text(SCRIPT.format(facts=facts))

    return make


@pytest.fixture
def in_folder(scripts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Works in a folder of its own, with one script, which fails."""
    scripts("alpha", {}, rows_of("cpu"), 1)
    monkeypatch.chdir(tmp_path)


def test_all_scripts_of_the_source_tree_are_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "FOLDER", RESULTS.parent.parent)  # also when the wheel is what is tested
    assert {"transfer_kv", "methods", "row_sizes", "engine"} <= set(bench.sections())
    for name in bench.sections():
        source = (bench.FOLDER / f"bench_{name}.py").read_text()
        assert '"--json"' in source
        assert "save(options.json" in source or '"results": results' in source


def test_records_are_gathered(scripts: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    scripts("alpha", {}, rows_of("cpu"))
    scripts("beta", {"load": 50.0, "store": 51.0}, rows_of("rows", row_bytes=64))
    scripts("gamma", {"load": 40.0, "store": 41.0}, rows_of("gemm", gemm_slower=0.1))
    path = tmp_path / "new" / "results.json"
    assert cli.main(["bench", "--json", str(path)]) == 0
    record = json.loads(path.read_text())
    assert [row["section"] for row in record["results"]] == ["cpu", "rows", "gemm"]
    assert record["machine"]["script"] == "alpha"
    assert record["link_gbps"] == {"load": 50.0, "store": 51.0}
    assert capfd.readouterr().out == "== alpha\n== beta\n== gamma\n"
    assert cli.main(["bench", "--sections", "gamma,alpha", "--json", str(path)]) == 0
    record = json.loads(path.read_text())
    assert [row["section"] for row in record["results"]] == ["gemm", "cpu"]


def test_what_needs_cuda_is_said(
    scripts: Any, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "--help"]) == 0
    help_text = " ".join(capfd.readouterr().out.split())
    assert "compile, engine, methods, row_sizes need a CUDA device" in help_text
    for name in ("engine", "methods", "transfer_kv"):
        scripts(name, {}, rows_of("cpu"))
    for has_cuda in (False, True):
        monkeypatch.setattr(bench.torch.cuda, "is_available", lambda has_cuda=has_cuda: has_cuda)
        assert cli.main(["bench"]) == 0
        text = "" if has_cuda else "[bench] without a CUDA device nothing comes of engine, methods.\n"
        assert capfd.readouterr().err == text


def test_it_is_the_scripts_that_need_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "FOLDER", RESULTS.parent.parent)
    sources = {name: (bench.FOLDER / f"bench_{name}.py").read_text() for name in bench.sections()}
    refusing = [name for name, text in sources.items() if "need a CUDA device, and there is none" in text]
    others = [n for n, text in sources.items() if "cuda.is_available()" in text and n not in refusing]
    assert (refusing, others) == (list(bench.NEED_CUDA), list(bench.CPU_WITHOUT_CUDA))


@pytest.mark.parametrize(
    ("codes", "code"), [((0, 0), 0), ((0, 2), 0), ((2, 2), 2), ((0, 1), 1), ((2, 1), 1), ((0, -9), 1)]
)
def test_exit_codes(codes: tuple[int, int], code: int, scripts: Any) -> None:
    """A script without its device (2) is no failure while another has run."""
    for name, of_script in zip("ab", codes, strict=True):
        scripts(name, {}, None, of_script if of_script >= 0 else 128 - of_script)
    assert cli.main(["bench"]) == code


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--sections", "alpha,delta"], "--sections must be of alpha, got 'delta'."),
        (["--from", "none.json"], "--from needs --plot, to draw the results."),
        (["--from", "cpu.json", "--plot", "out.png", "--sections", "alpha"], "--sections is of no use"),
        (["--from", "cpu.json", "--plot", "out.png", "--json", "new.json"], "--json is of no use"),
        (["--from", "none.json", "--plot", "out.png"], "none.json: No such file or directory."),
        (["--from", "bad.json", "--plot", "out.png"], "bad.json must be results of hicache bench --json"),
        (["--from", "list.json", "--plot", "out.png"], "list.json must be results of hicache bench"),
        (["--from", "cpu.json", "--plot", "out.png"], "--plot needs figures of a device"),
        (["--plot", "out.txt"], "--plot must name a file such as out.png, got 'out.txt'"),
    ],
)
def test_a_bad_value_is_one_line_and_exit_code_2(
    arguments: list[str],
    text: str,
    in_folder: None,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if "--plot" in arguments:
        pytest.importorskip("matplotlib")
    Path("bad.json").write_text('{"results": 3}')
    Path("list.json").write_text("[]")
    Path("cpu.json").write_text(json.dumps({"machine": MACHINE, "results": rows_of("cpu")}))
    assert cli.main(["bench", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("[bench] ")
    assert text in err
    assert err.count("\n") == 1
    assert not Path("out.png").exists()


def test_outside_a_source_tree_it_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(bench, "FOLDER", tmp_path / "none")
    assert cli.main(["bench"]) == 2
    assert "[bench] the benchmarks are in the source tree, not in the wheel" in capsys.readouterr().err


# --- The picture --------------------------------------------------------------------------------------


def test_curves_are_by_row_size_and_method() -> None:
    results = [
        *rows_of("rows", row_bytes=256, gbps=5.0),
        *rows_of("rows", row_bytes=64, gbps=4.0),
        *rows_of("rows", row_bytes=64, direction="store", gbps=3.0),
        *rows_of("rows", case="torch indexing, 64 B", row_bytes=64, gbps=0.5),
        *rows_of("row_sizes", row_bytes=1024, method="kernel", gbps=6.0),
        *rows_of("row_sizes", row_bytes=1024, method="staged", gbps=7.0),
        *rows_of("big_pool", row_bytes=64, gbps=1.0),
    ]
    assert plot.bandwidth_curves(results, "load") == {
        "kernel": [(64, 4.0), (256, 5.0), (1024, 6.0)],
        "torch indexing": [(64, 0.5)],
        "staged": [(1024, 7.0)],
    }
    assert plot.bandwidth_curves(results, "store") == {"kernel": [(64, 3.0)]}


def test_slowdowns_are_by_case_and_direction() -> None:
    results = [
        *rows_of("gemm", case="kernel", gemm_slower=0.25),
        *rows_of("gemm", case="kernel", direction="store", gemm_slower=0.5),
        *rows_of("rows", row_bytes=64),
        *rows_of("gemm", case="staged", gemm_slower=-0.125),
    ]
    assert plot.slowdowns(results) == {"kernel": {"load": 25.0, "store": 50.0}, "staged": {"load": -12.5}}


def test_measured_results_are_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "out.png"
    assert cli.main(["bench", "--from", str(RESULTS), "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Those that are drawn."""
    figure_module = pytest.importorskip("matplotlib.figure")
    kept: list[Any] = []

    class Kept(figure_module.Figure):  # type: ignore[name-defined]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            kept.append(self)

    monkeypatch.setattr(figure_module, "Figure", Kept)
    return kept


def check_readable(figure: Any) -> list[str]:
    """No legend covers the data, and it lies within the picture; returns the names of the axes."""
    for axes in figure.axes:
        legend = axes.get_legend().get_window_extent()
        assert legend.x0 >= axes.get_window_extent().x1
        assert legend.x1 <= figure.bbox.x1
        assert all("$" not in tick.get_text() for tick in axes.get_xticklabels())  # powers
    return [name for axes in figure.axes for name in (axes.get_xlabel(), axes.get_ylabel())]


def test_the_picture_of_a_replay_names_its_axes(figures: list[Any], tmp_path: Path) -> None:
    small = ["--layers", "2", "--block-tokens", "1", "--device-bytes", "256K", "--host-bytes", "1M"]
    small += ["--device", "cpu", "--requests", "60", "--plot", str(tmp_path / "out.png")]
    assert cli.main(["replay", *small]) == 0
    assert check_readable(figures[0]) == [
        "request (number in the trace)",
        "prompt blocks (%)",
        "request (number in the trace)",
        "moved so far (GiB)",
        "size of a request's transfer (MiB)",
        "rate (GB/s)",
    ]


def test_what_is_drawn(figures: list[Any], tmp_path: Path) -> None:
    """The link as a line, a curve for each method, a bar for each case and direction."""
    results = [
        *rows_of("rows", row_bytes=64, gbps=4.0),
        *rows_of("row_sizes", row_bytes=1024, method="staged", gbps=7.0),
        *rows_of("rows", row_bytes=128, direction="store", gbps=3.0),
        *rows_of("gemm", case="kernel", gemm_slower=0.25),
        *rows_of("gemm", case="kernel", direction="store", gemm_slower=0.5),
        *rows_of("gemm", case="staged", gemm_slower=-0.125),
    ]
    record = {"machine": MACHINE, "link_gbps": {"load": 50.0, "store": 51.0}, "results": results}
    plot.draw_bench(record, tmp_path / "out.svg")
    assert figures[0].get_suptitle() == "Some GPU, commit abc"
    load, store, gemm = figures[0].axes
    drawn = [
        {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in axes.get_lines()}
        for axes in (load, store)
    ]
    assert drawn[0].pop("one big copy")[1] == [50.0, 50.0]
    assert drawn[1].pop("one big copy")[1] == [51.0, 51.0]
    assert drawn == [{"kernel": ([64], [4.0]), "staged": ([1024], [7.0])}, {"kernel": ([128], [3.0])}]
    assert [label.get_text() for label in gemm.get_yticklabels()] == ["kernel", "staged"]
    bars = {bars.get_label(): [bar.get_width() for bar in bars] for bars in gemm.containers}
    assert bars == {"load": [25.0, -12.5], "store": [50.0]}
    curve = ["size of a scattered row (bytes)", "rate (GB/s)"]
    slower = "how much slower an 8192-cubed matrix product is beside the transfer (%)"
    assert check_readable(figures[0]) == [*curve, *curve, slower, "case"]


def test_the_tables_are_what_the_script_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every target has its figure, and nobody has touched a table by hand."""
    root = Path(__file__).parent.parent
    monkeypatch.syspath_prepend(root / "benchmark")
    tables = importlib.import_module("write_tables")
    first = root / "benchmark" / "results" / "h200.json"
    paths = [first, *sorted(first.parent.glob("h200_*.json"))]
    records = [json.loads(path.read_text()) for path in paths]
    for name, lines in (
        ("README.md", tables.target_table(records)),
        ("docs/figures.md", tables.figure_tables(records)),
    ):
        assert "\n".join(lines) in (root / name).read_text(), f"run benchmark/write_tables.py for {name}"
    assert not any("not measured" in line for line in tables.target_table(records))
