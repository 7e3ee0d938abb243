"""The commands on an NPU: hicache info, replay and doctor, and that they find a kernel that is wrong."""

import json
import os
import subprocess
import sys
from pathlib import Path

import ascend_sim
import pytest
import torch
from ascend_sim import build

from torch_hicache import cli, doctor, testing
from torch_hicache.cli_device import find_device
from torch_hicache.cli_doctor import find_backend_device

pytestmark = pytest.mark.backend("npu")
# Pools of which most requests need what the device has evicted.
REPLAY = ["replay", "--device", "npu", "--requests", "120", "--layers", "2", "--json"]
REPLAY += ["--device-bytes", "1M", "--host-bytes", "8M"]
PLACES = ("load-src_indices_on_device", "store-device_indices", "store_page_locked-cpu_indices")


@pytest.mark.parametrize("find", [lambda name: find_device(name, command="replay"), find_backend_device])
def test_the_device_of_the_commands(find) -> None:
    assert find("npu") == find("auto") == torch.device("npu", 0)
    last = torch.npu.device_count() - 1
    assert find(f"npu:{last}") == torch.device("npu", last)
    with pytest.raises(ValueError, match=rf"--device npu:{last + 1}: "):
        find(f"npu:{last + 1}")


def test_info_knows_the_npu(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["info", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["versions"]["torch_npu"]
    assert [backend["loaded"] for backend in found["backends"] if backend["name"] == "ascend"] == [True]
    names = [device["name"] for device in found["devices"] if device["type"] == "npu"]
    assert names == [torch.npu.get_device_name(i) for i in range(torch.npu.device_count())]


@pytest.mark.parametrize(
    ("model", "layout", "unit"),
    [
        ("gqa_8b", "page_first_direct", "page"),
        ("mla_fp8", "page_first", "slot"),
        ("k_only", "layer_first", "page"),
    ],
)
def test_replay_restores_every_row(
    model: str, layout: str, unit: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [*REPLAY, "--model", model, "--layout", layout, "--unit", unit]
    assert cli.main(arguments) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["device"], result["backend"]) == (torch.npu.get_device_name(0), "ascend")
    assert result["rows_verified"] > 200
    assert result["mismatches"] == 0
    assert result["gbps_load"] > 0  # the device's own events tell the time


def test_a_forward_pass_is_not_played(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*REPLAY, "--compute-ms", "2"]) == 2
    assert "a forward pass can't be played on npu:0" in capsys.readouterr().err


def test_doctor_passes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In three of the placements; all of them take a minute."""
    keep = [place for place in testing.placements("npu:0") if str(place).removeprefix("npu:0-") in PLACES]
    assert len(keep) == len(PLACES)
    monkeypatch.setattr(doctor, "placements", lambda device: keep)
    monkeypatch.setattr(doctor, "ROW_BYTES", (64, 4096))
    path = tmp_path / "report.json"
    assert cli.main(["doctor", "--device", "npu", "--mib", "1", "--json", str(path)]) == 0
    report = json.loads(path.read_text())
    assert report["finished"]
    assert {check["status"] for check in report["checks"]} == {"passed", "refused"}
    refused = {check["method"] for check in report["checks"] if check["status"] == "refused"}
    assert refused == {"staged"}
    assert {rate["method"] for rate in report["rates"]} == {"kernel", "copy_engine"}
    assert all(rate["gbps"] > 0 for rate in report["rates"])


def test_a_kernel_that_is_wrong_is_found(tmp_path: Path) -> None:
    """It merges runs without a look at the source's slots."""
    if not ascend_sim.FOLDER:
        pytest.skip(ascend_sim.REASON)
    source = build.KERNEL.read_text()
    assert source.count(" && next_src == src_slot + rows") == 1
    (tmp_path / "kernel.cpp").write_text(source.replace(" && next_src == src_slot + rows", ""))
    mutant = build.build_kernel(
        Path(ascend_sim.FOLDER), tmp_path / "kernel.cpp", str(tmp_path / "mutant.so")
    )
    report = tmp_path / "report.json"
    code = f"""
from torch_hicache import cli, doctor, testing
doctor.placements = lambda device: testing.placements(device)[:1]
doctor.measure_rows = lambda *args, **keywords: []
codes = [cli.main({REPLAY!r}), cli.main(["doctor", "--device", "npu", "--json", {str(report)!r}])]
print(codes)
"""
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"HICACHE_ASCEND_KERNEL": str(mutant)},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "[1, 1]", done.stderr
    assert doctor.failures(json.loads(report.read_text()))
