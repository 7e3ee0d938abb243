"""The command `hicache`: what it prints where, its exit codes, and `hicache info`."""

import json
import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import torch_hicache
from torch_hicache import Backend, Ticket, cli, cli_device, info
from torch_hicache import replay as replay_module
from torch_hicache.cli_device import find_device
from torch_hicache.models import MODELS

# Pools of 16 and 64 blocks of 4 KiB: a few requests fill both.
SMALL = ["replay", "--device", "cpu", "--model", "k_only", "--layers", "2", "--block-tokens", "1"]
SMALL += ["--device-bytes", "256K", "--host-bytes", "1M", "--requests", "60"]
GOOD = '{"timestamp": 5, "input_length": 600, "output_length": 7, "hash_ids": [1, 2]}\n'


def spoil_transfers(monkeypatch: pytest.MonkeyPatch) -> None:
    transfer = Ticket._transfer

    def spoiled(ticket: Ticket, dst: Any, *args: Any) -> None:
        transfer(ticket, dst, *args)
        dst[0].view(torch.uint8)[..., 0] ^= 1

    monkeypatch.setattr(Ticket, "_transfer", spoiled)


def interrupt_transfers(monkeypatch: pytest.MonkeyPatch, *, call: int) -> None:
    """What Ctrl-C does, in the middle of a transfer."""
    calls = 0
    transfer = Ticket._transfer

    def interrupted(ticket: Ticket, *args: Any) -> None:
        nonlocal calls
        transfer(ticket, *args)
        calls += 1
        if calls == call:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(Ticket, "_transfer", interrupted)


# --- hicache replay ---------------------------------------------------------------------------------


def test_json_is_one_object_and_all_of_stdout(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*SMALL, "--json", "--layout", "page_first", "--seed", "4"]) == 0
    out, err = capsys.readouterr()
    assert out.count("\n") == 1
    assert err == ""
    report = json.loads(out)
    assert report["requests"] == 60
    assert 0 < report["hit_rate_device"] < 1
    assert 0 < report["hit_rate_host"] < 1 - report["hit_rate_device"]
    assert report["bytes_loaded"] == report["rows_verified"] * 2048 > 0
    assert report["bytes_stored"] % 4096 == 0 < report["bytes_stored"]
    assert report["gbps_load"] > 0
    assert report["gbps_store"] > 0
    assert report["compute_seconds"] == 0 < report["exposed_seconds"]
    assert report["hidden"] is None
    assert report["mismatches"] == 0
    assert report["seconds"] > 0
    assert report["interrupted"] is False
    assert report["backend"] == "cpu"
    assert report["torch"] == torch.__version__
    assert (report["model"], report["layout"], report["method"]) == ("k_only", "page_first", "auto")
    assert report["device"] == info.cpu_name()
    assert report["trace"] is None
    options = report["options"]
    assert (options["layers"], options["block_tokens"], options["seed"]) == (2, 1, 4)
    assert options["compute_ms"] == 0
    assert (options["device_bytes"], options["host_bytes"]) == (256 << 10, 1 << 20)


def test_hit_rates_are_shares_of_the_blocks_requested(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(GOOD * 4)
    assert cli.main(["replay", str(path), "--device", "cpu", "--json", "--requests", "3"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["requests"], report["blocks"]) == (3, 6)
    assert report["hit_rate_device"] == 4 / 6
    assert report["hit_rate_host"] == report["gbps_load"] == report["gbps_store"] == 0
    assert report["hidden"] is None
    assert report["trace"] == str(path)


def test_ids_that_come_again_in_a_request_are_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(GOOD + GOOD.replace("[1, 2]", "[3, 3]") * 2)
    assert cli.main(["replay", str(path), "--device", "cpu", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["blocks"], report["blocks_repeated"]) == (4, 2)
    assert cli.main(["replay", str(path), "--device", "cpu"]) == 0
    line = r"^  repeated +2 +ids again within a request, taken once *$"
    assert re.search(line, capsys.readouterr().out, re.MULTILINE)


def test_a_forward_pass_is_played(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*SMALL, "--json", "--compute-ms", "0.5"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["options"]["compute_ms"] == 0.5
    assert report["compute_seconds"] >= 60 * 0.0005
    assert report["rows_verified"] > report["mismatches"] == 0
    assert 0 <= report["hidden"] < 1
    assert cli.main([*SMALL, "--compute-ms", "0.5"]) == 0
    line = r"^  computation +\d\.\d\d s +\d+\.\d{3} s waited, a sleep hid \d+% of transfers *$"
    assert re.search(line, capsys.readouterr().out, re.MULTILINE)


def test_the_seed_makes_the_trace(capsys: pytest.CaptureFixture[str]) -> None:
    blocks = []
    for seed in ("1", "2", "1"):
        assert cli.main([*SMALL, "--json", "--seed", seed]) == 0
        blocks.append(json.loads(capsys.readouterr().out)["blocks"])
    assert blocks[0] == blocks[2] != blocks[1]


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(SMALL) == 0
    out, err = capsys.readouterr()
    assert err == ""
    for line in (
        r"hicache replay of the built-in generator, seed 0",
        r"k_only, 2 layers, 4 KiB a block; device pool 256 KiB, host pool 1 MiB layer_first; .*",
        r"  requests +60 +in \d+\.\d s *",
        r"  prompt blocks +1,\d{3} .*",
        r"    device hits +\d+\.\d% .*",
        r"    host hits +\d+\.\d% .*",
        r"  load +\d.* MiB +at \d+\.\d\d GB/s, host to device *",
        r"  store +\d.* MiB +at \d+\.\d\d GB/s, device to host *",
        r"  computation +0\.00 s +\d+\.\d{3} s waited *",
        r"  rows verified +[\d,]{3,} +each against its fingerprint *",
        r"  mismatches +0 *",
    ):
        assert re.search(rf"^{line}$", out, re.MULTILINE), line


def test_nothing_restored_is_not_sold_as_verified(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["replay", "--device", "cpu", "--requests", "3"]) == 0
    assert re.search(r"rows verified +0 +nothing came back from the host", capsys.readouterr().out)


@pytest.mark.parametrize("extra", [[], ["--json"]])
def test_a_mismatch_is_exit_code_1(
    extra: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil_transfers(monkeypatch)
    assert cli.main([*SMALL, *extra]) == 1
    out, err = capsys.readouterr()
    assert re.fullmatch(
        r"\[replay\] \d+ restored rows are wrong, the first: block \d+, key, layer \d, token 0\.\n", err
    )
    if extra:
        assert json.loads(out)["mismatches"] > 0
    else:
        assert re.search(r"^  mismatches +[1-9]", out, re.MULTILINE)


@pytest.mark.parametrize("extra", [[], ["--json"]])
def test_ctrl_c_prints_what_there_is(
    extra: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupt_transfers(monkeypatch, call=30)
    assert cli.main([*SMALL, *extra]) == 130
    out, err = capsys.readouterr()
    assert err == ""
    if extra:
        report = json.loads(out)
        assert report["interrupted"] is True
        assert 0 < report["requests"] < 60
        assert report["bytes_stored"] > 0
    else:
        assert re.search(r"^  requests +\d+ +in \d+\.\d s, interrupted", out, re.MULTILINE)


def test_a_mismatch_weighs_more_than_ctrl_c(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil_transfers(monkeypatch)
    serve, served = replay_module.Replay._serve, 0

    def interrupted(*args: Any) -> None:
        nonlocal served
        served += 1
        if served == 50:
            raise KeyboardInterrupt
        serve(*args)

    monkeypatch.setattr(replay_module.Replay, "_serve", interrupted)
    assert cli.main([*SMALL, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["interrupted"] is True


def test_ctrl_c_before_the_first_request(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    interrupt_transfers(monkeypatch, call=1)
    assert cli.main([*SMALL, "--json"]) == 130
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "[replay] interrupted before there was a result.\n"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ["--device-bytes", "12X"],
            "argument --device-bytes: must be a size such as 512M or 2G, got '12X'",
        ),
        (["--host-bytes", "0"], "argument --host-bytes: must be a size such as 512M or 2G, got '0'"),
        (["--host-bytes=-1G"], "argument --host-bytes: must be a size such as 512M or 2G, got '-1G'"),
        (["--host-bytes", "nan"], "argument --host-bytes: must be a size such as 512M or 2G, got 'nan'"),
        (["--device-bytes", "1K"], "--device-bytes must hold a block of 65,536 bytes .*, got 1,024"),
        (
            ["--host-bytes", "999T"],
            r"the pools in host memory \(--device-bytes and --host-bytes\) need .* bytes, .* are free",
        ),
        (["--layers", "0"], "argument --layers: must be an integer of 1 or more, got '0'"),
        (["--layers", "33"], "--layers must be at most 32 for gqa_8b, got 33"),
        (
            ["--block-tokens", "1.5"],
            "argument --block-tokens: must be an integer of 1 or more, got '1.5'",
        ),
        (["--block-tokens", "513"], "argument --block-tokens: must be at most 512, got 513"),
        (["--requests", "-4"], "argument --requests: must be an integer of 1 or more, got '-4'"),
        (["--requests", "99999999"], "argument --requests: must be at most 1,000,000, got '99999999'"),
        (["--requests", "two"], "argument --requests: must be an integer of 1 or more, got 'two'"),
        (["--seed", "-1"], "argument --seed: must be an integer of 0 or more in 18 digits, got '-1'"),
        (
            ["--compute-ms", "-1"],
            "argument --compute-ms: must be milliseconds from 0 to 999,999, got '-1'",
        ),
        (["--tier3-deadline-ms", "0"], "argument --tier3-deadline-ms: must be above 0, got '0'"),
        (["--model", "gpt"], "argument --model: invalid choice: 'gpt' .*gqa_8b.*"),
        (["--layout", "rows"], "argument --layout: invalid choice: 'rows' .*layer_first.*"),
        (["--method", "staged"], "--method staged needs an accelerator, .*; use 'auto' or 'kernel'"),
        (["--method", "magic"], "argument --method: invalid choice: 'magic' .*kernel.*"),
        (["--device", "tpu"], "--device must be auto, cpu, cuda, cuda:N, npu or npu:N, got 'tpu'"),
        (
            ["--device", "hip:1"],
            "--device must be .* or npu:N, got 'hip:1'. An AMD GPU is cuda: ROCm's torch calls it so",
        ),
        (["--device", "cuda:x"], "--device must be auto, cpu, cuda, cuda:N, npu or npu:N, got 'cuda:x'"),
        (
            ["--unit", "slot", "--layout", "page_head"],
            "--layout page_head is addressable by page only: .*",
        ),
        (["--plot", "missing/out.png"], "--plot: missing/out.png is no file in an existing folder"),
        (["--plot", "out.txt"], "--plot must name a file such as out.png, got 'out.txt' .*"),
        (["--lay=4"], "unrecognized arguments: --lay=4"),
        (["a.jsonl", "b.jsonl"], "unrecognized arguments: b.jsonl"),
        (["missing.jsonl"], "missing.jsonl: No such file or directory"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_bad_value_is_one_line_and_exit_code_2(
    arguments: list[str],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if "--plot" in arguments:
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    device = [] if "--device" in arguments else ["--device", "cpu"]
    assert cli.main(["replay", *device, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(
        rf"\[(replay|hicache)\] {text}\.( See '.*--help'\.| Use --unit page\.)?\n", err
    ), err


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512M", 512 << 20),
        ("2G", 2 << 30),
        ("1.5k", 1536),
        ("4096", 4096),
        ("1GiB", 1 << 30),
        ("2tb", 2 << 40),
    ],
)
def test_sizes(text: str, size: int) -> None:
    assert cli._size(text) == size


def test_a_bad_line_stops_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "Replay", None)
    path = tmp_path / "trace.jsonl"
    path.write_text(GOOD * 2 + "{}\n")
    assert cli.main(["replay", str(path), "--device", "cpu"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"[replay] {path}:3: timestamp is missing.\n"


def test_a_failure_of_the_device_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def out_of_memory(options: object) -> None:
        raise RuntimeError("CUDA out of memory.\nThe second line is of no use.")

    monkeypatch.setattr(cli, "Replay", out_of_memory)
    assert cli.main(SMALL) == 2
    assert capsys.readouterr().err == "[replay] CUDA out of memory.\n"


def without_cuda(monkeypatch: pytest.MonkeyPatch, *, has_device: bool) -> None:
    missing = Backend("cuda", "CUDA", True, False, "this torch is a CPU build", "install a CUDA build")
    monkeypatch.setattr(cli_device, "backend_of", lambda device_type: missing)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_device)


def test_cuda_without_its_backend_says_why(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without_cuda(monkeypatch, has_device=False)
    assert cli.main(["replay", "--device", "cuda"]) == 2
    assert capsys.readouterr().err == (
        "[replay] --device cuda: the cuda backend is not loaded: this torch is a CPU build. "
        "To get it, install a CUDA build.\n"
    )


@pytest.mark.parametrize("has_device", [False, True])
def test_auto_takes_the_cpu_where_cuda_is_of_no_use(
    has_device: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    without_cuda(monkeypatch, has_device=has_device)
    assert find_device("auto", command="replay") == torch.device("cpu")
    # A device that stays idle is worth a word.
    assert ("on the CPU: the cuda backend is not loaded" in capsys.readouterr().err) == has_device


def test_a_device_beyond_the_last_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = Backend("cuda", "CUDA", True, True)
    monkeypatch.setattr(cli_device, "backend_of", lambda device_type: loaded)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert find_device("cuda:1", command="replay") == torch.device("cuda", 1)
    with pytest.raises(ValueError, match=r"--device cuda:2: torch sees 2 cuda device\(s\)\.$"):
        find_device("cuda:2", command="replay")


def test_a_plot_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "out.png"
    assert cli.main([*SMALL, "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_plot_of_a_run_that_moved_nothing(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "out.png"
    assert cli.main([*SMALL, "--requests", "1", "--plot", str(path)]) == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_a_plot_without_matplotlib_is_refused_before_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "Replay", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main([*SMALL, "--plot", str(tmp_path / "out.png")]) == 2
    err = capsys.readouterr().err
    assert err == (
        "[replay] --plot needs matplotlib, which is not installed: pip install 'torch_hicache[plot]'.\n"
    )


def test_no_command_prints_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([]) == 2
    assert "{replay,info,doctor,calibrate,bench}" in capsys.readouterr().err
    assert cli.main(["replay", "--help"]) == 0
    out = capsys.readouterr().out
    assert all(name in out for name in MODELS)
    assert cli.main(["--version"]) == 0


def test_the_module_runs_as_a_command_with_a_bar_on_a_terminal() -> None:
    """stderr is a terminal and gets the bar; stdout is a pipe and gets the JSON alone."""
    reader, writer = pty.openpty()
    command = [sys.executable, "-m", "torch_hicache", *SMALL, "--json"]
    environment = os.environ | {"TERM": "xterm"}
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=writer, env=environment, timeout=120, check=False
    )
    os.close(writer)
    shown = b""
    try:
        while part := os.read(reader, 65536):
            shown += part
    except OSError:  # Linux: the other side is closed
        pass
    os.close(reader)
    assert done.returncode == 0
    assert json.loads(done.stdout)["requests"] == 60
    assert b"60/60" in shown


def test_output_to_a_reader_that_left_is_no_crash() -> None:
    """As in `hicache info | true`."""
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "torch_hicache", "info", "--json"]
    done = subprocess.run(
        command, stdout=writer, stderr=subprocess.PIPE, timeout=120, text=True, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


# --- hicache info -----------------------------------------------------------------------------------


def test_info_starts_no_device() -> None:
    script = (
        "import torch; from torch_hicache.cli import main; code = main(['info', '--json']); "
        "raise SystemExit(code or torch.cuda.is_initialized())"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["versions"]["torch"] == torch.__version__
    assert [backend["name"] for backend in report["backends"]] == ["cpu", "cuda", "hip", "ascend"]


def test_info_says_why_a_backend_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = Backend("cuda", "CUDA", False, False, "nvcc was not found", "install the CUDA toolkit")
    loaded = Backend("cpu", "CPU", True, True, details={"compiler": "c++"})
    monkeypatch.setattr(torch_hicache, "backends", lambda: [loaded, missing])
    monkeypatch.setenv("PATH", "/nowhere")
    assert cli.main(["info"]) == 0
    out = capsys.readouterr().out
    assert "backend cpu (key CPU): loaded\n  compiler: c++\n" in out
    assert "backend cuda (key CUDA): not loaded: nvcc was not found\n" in out
    assert "  to get it: install the CUDA toolkit\n" in out
    assert "CUDA_HOME=/path/to/cuda-12" in out
    assert "no NVIDIA GPU and no NPU was found; AMD's are not listed" in out


@pytest.mark.parametrize(("driver", "is_old"), [("570.86", True), ("580.65", False), (None, False)])
def test_info_compares_the_driver_with_what_the_build_needs(driver: str | None, is_old: bool) -> None:
    built = Backend("cuda", "CUDA", True, True, details={"cuda_toolkit": "13.0", "min_driver": "580"})
    text = info.cuda_build_advice([built], driver)
    assert text.startswith("Built with CUDA 13.0: needs driver 580 or newer")
    assert ("this machine's is 570.86, too old" in text) == is_old
    assert "nvcc 12.x" in text


@pytest.mark.parametrize(
    ("answer", "link"),
    [
        ("5, 16, 5, 16", "PCIe gen 5 x16"),
        ("5, 16, 1, 16", "PCIe gen 5 x16 (now gen 1 x16)"),
        ("[N/A], [N/A], [N/A], [N/A]", None),
    ],
)
def test_info_reads_the_drivers_tool(
    answer: str, link: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho 'NVIDIA H200, 143771 MiB, 9.0, 00000000:1B:00.0, {answer}'\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert info.cuda_devices() == [
        {
            "type": "cuda",
            "index": 0,
            "name": "NVIDIA H200",
            "memory": "143771 MiB",
            "compute_capability": "9.0",
            "bus_id": "00000000:1B:00.0",
            "link": link,
        }
    ]


def test_info_survives_a_tool_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'a, b, c, d, e, f, g, h'; exit 9\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert info.cuda_devices() == []
