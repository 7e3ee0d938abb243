"""`hicache doctor`: what it finds, what it writes down, and what it says where there is no device."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_hicache
from torch_hicache import Backend, cli, cli_doctor, doctor, testing

CPU = torch.device("cpu")
CHECKS = {"describe", *doctor._CASES, "far_rows", "engine", "link_rates", "rates"}
Transfer = Callable[..., None]


def named(report: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return [check for check in report["checks"] if check["name"] == name]


def spoil(monkeypatch: pytest.MonkeyPatch, transfer: Callable[..., None]) -> None:
    """Let `transfer` take the place of the op, which it gets as its first argument."""
    real = torch.ops.hicache.transfer_kv

    class Spoiled:
        def __getattr__(self, name: str) -> Any:
            if name == "transfer_kv":
                return lambda *args, **keywords: transfer(real, *args, **keywords)
            return getattr(torch.ops.hicache, name)

    class Ops:
        hicache = Spoiled()

    class Torch:
        ops = Ops()

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

    monkeypatch.setattr(doctor, "torch", Torch())
    monkeypatch.setattr("torch_hicache.testing.torch", Torch())


def test_the_cpu_is_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "report.json"
    assert cli.main(["doctor", "--device", "cpu", "--mib", "1", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert report["finished"]
    assert report["running"] == ""
    assert {check["name"] for check in report["checks"]} == CHECKS
    assert {check["method"] for check in report["checks"]} == {"auto", "kernel"}
    assert all(check["status"] == "passed" and check["cases"] > 0 for check in report["checks"])
    assert {rate["row_bytes"] for rate in report["rates"]} == set(doctor.ROW_BYTES)
    assert all(rate["gbps"] > 0 for rate in report["rates"])
    assert report["info"]["versions"]["torch"] == torch.__version__
    out = capsys.readouterr().out
    assert f"{len(report['checks'])} checks" in out
    assert "0 failed" in out


def first_row_only(real: Transfer, dst: Any, src: Any, to: Any, at: Any, **keywords: Any) -> None:
    real(dst, src, to[:1], at[:1], **keywords)


def one_byte_more(real: Transfer, dst: Any, src: Any, to: Any, at: Any, **keywords: Any) -> None:
    real(dst, src, to, at, **keywords)
    dst[0].untyped_storage()[0] ^= 1


def follows_bad_indices(real: Transfer, dst: Any, src: Any, to: Any, at: Any, **keywords: Any) -> None:
    slots = dst[0].shape[keywords.get("slot_dim", 0)]
    real(dst, src, torch.where(to < slots, to, -1), torch.where(at < slots, at, -1), **keywords)


def ignores_padding(real: Transfer, dst: Any, src: Any, to: Any, at: Any, **keywords: Any) -> None:
    real(dst, src, torch.where(to == -1, 0, to), torch.where(at == -1, 0, at), **keywords)


def ignores_count(real: Transfer, *args: Any, count: Any = None, **keywords: Any) -> None:
    real(*args, **keywords)


def first_plane_only(real: Transfer, dst: Any, src: Any, to: Any, at: Any, **keywords: Any) -> None:
    real(dst[:1], src[:1], to, at, **keywords)


FAULTS: dict[str, tuple[Callable[..., None], str]] = {
    "first_row_only": (first_row_only, "rows"),
    "one_byte_more": (one_byte_more, "layouts"),
    "follows_bad_indices": (follows_bad_indices, "bad_indices"),
    "ignores_padding": (ignores_padding, "indices"),
    "ignores_count": (ignores_count, "indices"),
    "first_plane_only": (first_plane_only, "planes"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is what a kernel could do wrong; the check named with it sees it."""
    transfer, name = FAULTS[fault]
    spoil(monkeypatch, transfer)
    monkeypatch.setattr(doctor, "measure_rows", lambda *args, **keywords: [])
    monkeypatch.setattr(doctor, "_methods_for", lambda place: ["kernel"])
    report = doctor.examine(CPU, nbytes=1 << 16)
    found = named(report, name)
    assert {check["status"] for check in found} == {"failed"}, found
    assert all(check["detail"] for check in found)
    assert doctor.failures(report)


def examine_staged(
    transfer: Transfer, monkeypatch: pytest.MonkeyPatch
) -> tuple[dict[str, Any], dict[str, str]]:
    """The report, and the status of each check of "staged", for which `transfer` stands in on the CPU."""

    def stand_in(real: Transfer, *args: Any, method: str = "auto", **keywords: Any) -> None:
        if method == "staged":
            transfer(real, *args, **keywords)
        else:
            real(*args, method=method, **keywords)

    spoil(monkeypatch, stand_in)
    monkeypatch.setattr(doctor, "measure_rows", lambda *args, **keywords: [])
    monkeypatch.setattr(doctor, "_methods_for", lambda place: ["staged"])
    report = doctor.examine(CPU, nbytes=1 << 16)
    checks = [check for check in report["checks"] if check["method"] == "staged"]
    return report, {check["name"]: check["status"] for check in checks}


def refuses(real: Transfer, *args: Any, **keywords: Any) -> None:
    raise ValueError("[transfer_kv] method 'staged' is not built yet.")


def test_a_method_may_refuse_its_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    report, statuses = examine_staged(refuses, monkeypatch)
    assert statuses == {"trial": "refused"}
    assert named(report, "trial")[0]["detail"] == "[transfer_kv] method 'staged' is not built yet."
    assert not doctor.failures(report)


def refuses_after_the_trial(real: Transfer, *args: Any, **keywords: Any) -> None:
    if keywords.get("slot_dim"):
        refuses(real)
    real(*args, **keywords)


def refuses_half_way(real: Transfer, *args: Any, **keywords: Any) -> None:
    real(*args, **keywords)
    refuses(real)


def raises_an_error_of_python(real: Transfer, *args: Any, **keywords: Any) -> None:
    raise ValueError("zip() argument 2 is shorter than argument 1")


def raises_value_errors_for_indices(real: Transfer, *args: Any, **keywords: Any) -> None:
    try:
        real(*args, **keywords)
    except IndexError as error:
        raise ValueError(str(error)) from error


@pytest.mark.parametrize(
    ("transfer", "failed"),
    [
        (refuses_after_the_trial, {"rows", "layouts", "indices", "many_entries", "bad_indices"}),
        (refuses_half_way, {"trial", *doctor._CASES} - {"bad_indices"}),
        (raises_an_error_of_python, {"trial", *doctor._CASES}),
        (raises_value_errors_for_indices, {"bad_indices"}),
    ],
)
def test_no_other_error_is_a_refusal(
    transfer: Transfer, failed: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, statuses = examine_staged(transfer, monkeypatch)
    assert {name for name, status in statuses.items() if status == "failed"} == failed
    assert {name for name, status in statuses.items() if status == "passed"} == set(statuses) - failed


@pytest.mark.parametrize(
    ("device", "may_refuse"), [("npu:0", {"staged"}), ("cuda:0", {"copy_engine", "staged"})]
)
def test_only_methods_that_need_not_serve_a_placement_have_a_trial(
    device: str, may_refuse: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is run: all trials are said to be refused, and their methods have no other check."""
    checks: list[tuple[str, str]] = []

    def run(name: str, where: str, method: str, cases: object) -> str:
        checks.append((name, method))
        return "refused"

    monkeypatch.setattr(doctor, "placements", lambda name: testing.placements(device))
    doctor._check_all(CPU, run)
    assert {method for name, method in checks if name == "trial"} == may_refuse
    others = {"auto", "kernel", "copy_engine", "staged"} - may_refuse
    assert {method for name, method in checks if name != "trial"} == others


@pytest.mark.parametrize("error", [ValueError("[a] b"), RuntimeError("driver"), MemoryError("none")])
def test_only_the_error_that_was_wanted_counts(error: Exception) -> None:
    def call() -> None:
        raise error

    assert doctor._raises(type(error), call) == str(error)
    with pytest.raises(AssertionError, match=rf"^IndexError should .* got {type(error).__name__}: "):
        doctor._raises(IndexError, call)


def test_the_report_says_what_was_running(tmp_path: Path) -> None:
    """A process that is killed, as a GPU's runtime does it after a bad access, leaves a report behind."""
    path = tmp_path / "report.json"
    program = (
        "import os, sys\n"
        "from torch_hicache import cli, doctor\n"
        "doctor._CASES['planes'] = lambda place, method: os.kill(os.getpid(), 9)\n"
        f"cli.main(['doctor', '--device', 'cpu', '--json', {str(path)!r}])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], env=os.environ, timeout=120, check=False)
    assert done.returncode == -9
    report = json.loads(path.read_text())
    assert not report["finished"]
    assert report["running"] == "planes, cpu, auto"
    assert [check["name"] for check in report["checks"]] == [
        "describe",
        "rows",
        "layouts",
        "indices",
    ]


def test_a_kill_amid_a_save_leaves_the_report_before_it(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    program = (
        "import os\n"
        "from pathlib import Path\n"
        "from torch_hicache import cli, doctor\n"
        "write = Path.write_text\n"
        "def write_half(path, text):\n"
        "    if '\"planes, cpu, auto\"' in text:\n"
        "        write(path, text[: len(text) // 2])\n"
        "        os.kill(os.getpid(), 9)\n"
        "    write(path, text)\n"
        "Path.write_text = write_half\n"
        f"cli.main(['doctor', '--device', 'cpu', '--mib', '1', '--json', {str(path)!r}])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], env=os.environ, timeout=120, check=False)
    assert done.returncode == -9
    report = json.loads(path.read_text())
    assert not report["finished"]
    assert report["running"] == "indices, cpu, auto"


def test_what_is_no_plain_file_is_not_replaced(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    link = tmp_path / "link.json"
    link.symlink_to(tmp_path / "report.json")
    for path in (Path(f"/proc/self/fd/{writer}"), link, link):
        cli_doctor._save(path, {"finished": True})
    os.close(writer)
    with os.fdopen(reader) as pipe:
        assert json.load(pipe) == {"finished": True}
    assert link.is_symlink()
    assert json.loads((tmp_path / "report.json").read_text()) == {"finished": True}
    assert {path.name for path in tmp_path.iterdir()} == {"link.json", "report.json"}


DRIVER = RuntimeError("the driver is gone")
FULL = MemoryError("[host_memory] asked for more")
# Function that breaks, its check, the error, and what becomes of it.
BREAKDOWNS = {
    "info": ("collect_info", "describe", DRIVER, "failed", "RuntimeError: the driver is gone"),
    "link": ("link_rates", "link_rates", DRIVER, "failed", "RuntimeError: the driver is gone"),
    "rates": ("measure_rows", "rates", DRIVER, "failed", "RuntimeError: the driver is gone"),
    "os": ("measure_rows", "rates", OSError("no link"), "failed", "OSError: no link"),
    "value": ("link_rates", "link_rates", ValueError("[a] b"), "failed", "ValueError: [a] b"),
    "memory": ("measure_rows", "rates", FULL, "skipped", "[host_memory] asked for more"),
}


@pytest.mark.parametrize("breakdown", BREAKDOWNS)
def test_an_error_outside_the_checks_leaves_a_report(
    breakdown: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In the file and on the terminal, with everything else in it."""
    function, name, error, status, detail = BREAKDOWNS[breakdown]

    def fails(*args: object, **keywords: object) -> None:
        raise error

    expected = CHECKS - set(doctor._CASES) | {"planes"}
    monkeypatch.setattr(doctor, "_CASES", {"planes": doctor._planes})
    monkeypatch.setattr(doctor, "ROW_BYTES", (4096,))
    monkeypatch.setattr(doctor, function, fails)
    path = tmp_path / "report.json"
    assert cli.main(["doctor", "--device", "cpu", "--mib", "1", "--json", str(path)]) == (
        status == "failed"
    )
    report = json.loads(path.read_text())
    assert (report["finished"], report["running"]) == (True, "")
    (check,) = [check for check in report["checks"] if check["status"] != "passed"]
    assert (check["name"], check["status"], check["detail"]) == (name, status, detail)
    assert {check["name"] for check in report["checks"]} == expected
    assert bool(report["link_gbps"]) == (name != "link_rates")
    assert bool(report["rates"]) == (name != "rates")
    out = capsys.readouterr().out
    assert f"  {name}, cpu, {check['method']}: " in out
    assert detail in out
    assert f"the report is in {path}" in out


def test_rates_of_a_method_that_breaks_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose copy_engine breaks in the rates, and whose staged refuses; played by the CPU."""

    def transfer(real: Transfer, *args: Any, method: str = "auto", **keywords: Any) -> None:
        if method == "copy_engine":
            raise RuntimeError("the driver is gone")
        if method == "staged":
            refuses(real)
        real(*args, method=method, **keywords)

    spoil(monkeypatch, transfer)
    report: dict[str, Any] = {"rates": []}
    monkeypatch.setattr(doctor, "ROW_BYTES", (2048, 4096))
    checks = [
        doctor._run("rates", "cpu", method, partial(doctor._row_rates, CPU, method, 1 << 16, report))
        for method in doctor.METHODS[1:]
    ]
    assert {check.method: check.status for check in checks} == {
        "kernel": "passed",
        "copy_engine": "failed",
        "staged": "refused",
    }
    assert [size for size, _ in doctor.rate_table(report)] == [2048, 4096]
    assert {rate["method"] for rate in report["rates"]} == {"kernel"}


def test_an_error_of_a_save_ends_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Before the first check, and with the name of the file that was asked for."""

    def fails(new: Path, path: Path) -> None:
        raise OSError(28, "No space left on device", str(new))

    monkeypatch.setattr(os, "replace", fails)
    path = tmp_path / "report.json"
    assert cli.main(["doctor", "--device", "cpu", "--mib", "1", "--json", str(path)]) == 2
    assert capsys.readouterr().err == f"[doctor] {path}: No space left on device.\n"


def test_mib_must_fit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "report.json"
    arguments = ["doctor", "--device", "cpu", "--mib", "999999", "--json", str(path)]
    assert cli.main(arguments) == 2
    text = "[doctor] --mib 999999 needs 3,145,724,854,272 bytes (2.86 TiB) of host memory, free for "
    assert capsys.readouterr().err.startswith(text)
    assert not path.exists()
    monkeypatch.setattr(doctor, "_free_on", lambda device: (1 << 20) - 1)
    with pytest.raises(MemoryError, match=r"--mib 1 needs .* on cuda:0, which has .* free\.$"):
        doctor.check_memory(torch.device("cuda", 0), 1 << 20)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--device", "tpu"], "--device must be auto, cpu, cuda, hip or npu, got 'tpu'"),
        (["--device", "cpu:1"], "--device must be auto, cpu, cuda, hip or npu, got 'cpu:1'"),
        (["--mib", "0"], "argument --mib: must be an integer of 1 or more, got '0'"),
        (["--device", "cpu", "--json", "no/where.json"], "no/where.json: No such file or directory"),
    ],
)
def test_bad_arguments(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", *arguments]) == 2
    assert f"[doctor] {text}." in capsys.readouterr().err


@pytest.mark.parametrize("vendor", ["cuda", "hip", "npu"])
def test_a_missing_backend_says_why(vendor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = Backend(cli_doctor._BACKENDS[vendor], "CUDA", True, False, "it rains", "wait")
    monkeypatch.setattr(torch_hicache, "backends", lambda: [missing])
    with pytest.raises(ValueError, match=r"backend is not loaded: it rains\. To get it, wait\.$"):
        cli_doctor.find_backend_device(vendor)


def test_amd_gpus_are_found_under_the_name_that_torch_gives_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[str] = []

    def missing_reason(name: str) -> str:
        asked.append(name)
        return ""

    monkeypatch.setattr(cli_doctor.testing, "missing_reason", missing_reason)
    monkeypatch.setattr(cli_doctor.testing, "devices", lambda: ["cpu"])
    for key, expected in (("CUDA", "cuda:2"), ("HIP", "hip:2"), ("PrivateUse1", "rocm:2")):
        monkeypatch.setattr(torch_hicache, "backends", lambda key=key: [Backend("hip", key, True, True)])
        monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: "rocm")
        # torch knows no device of the name "rocm" here, so the device itself is not made.
        monkeypatch.setattr(torch, "device", lambda name, index: f"{name}:{index}")
        assert cli_doctor.find_backend_device("hip:2") == expected
    assert asked == ["cuda:2", "hip:2", "rocm:2"]
