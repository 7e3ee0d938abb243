"""Which dispatch key AMD GPUs get, and when the HIP library stays out of a process."""

import re
from pathlib import Path

import pytest
import torch

from torch_hicache import _backends
from torch_hicache._backends import Backend

BUILD: dict[str, dict[str, object]] = {"built": {"hip": {"hip": "7.1"}}, "missing": {}}


@pytest.fixture(autouse=True)
def _a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Something that is built, but that no process can load."""
    (tmp_path / "_hip.so").write_bytes(b"")
    monkeypatch.setattr(_backends, "_FOLDER", tmp_path)
    monkeypatch.delenv("HICACHE_HIP_KEY", raising=False)
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(_backends, "_private_device", lambda: "privateuseone")
    monkeypatch.setitem(_backends._backends, "cuda", Backend("cuda", "CUDA", False, False))


def test_a_torch_for_rocm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.1")
    assert _backends._hip_key() == "CUDA"


@pytest.mark.parametrize(
    ("name", "key"), [("hipsim", "PrivateUse1"), ("rocm", "PrivateUse1"), ("npu", "")]
)
def test_an_out_of_tree_device(name: str, key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_backends, "_private_device", lambda: name)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    assert _backends._hip_key() == key


def test_the_in_tree_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("hip"))
    assert _backends._hip_key() == "HIP"


def test_no_hip_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: None)
    backend = _backends._load_hip(BUILD)
    assert not backend.loaded
    assert "has no HIP device" in backend.reason


def test_never_beside_the_cuda_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HICACHE_HIP_KEY", "CUDA")
    monkeypatch.setitem(_backends._backends, "cuda", Backend("cuda", "CUDA", True, True))
    assert _backends._load_hip(BUILD).reason == "the cuda backend is loaded"


def test_never_on_the_key_of_an_npu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HICACHE_HIP_KEY", "PrivateUse1")
    monkeypatch.setattr(_backends, "_private_device", lambda: "npu")
    assert _backends._load_hip(BUILD).reason == "PrivateUse1 belongs to the NPU"


def test_an_unknown_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HICACHE_HIP_KEY", "Meta")
    assert _backends._load_hip(BUILD).reason == "HICACHE_HIP_KEY is 'Meta'"


def test_a_library_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HICACHE_HIP_KEY", "CUDA")
    backend = _backends._load_hip(BUILD)
    assert backend.built
    assert not backend.loaded
    assert backend.reason
    assert backend.remedy.startswith("install ROCm 7.1")


def test_what_a_build_left_out_is_not_installed_first() -> None:
    left_out = "left out by HICACHE_BACKENDS"
    (_backends._FOLDER / "_hip.so").unlink()
    for load in (_backends._load_cuda, _backends._load_hip):
        for reason, remedy in (
            (left_out, "build torch_hicache again without HICACHE_BACKENDS"),
            ("no compiler", "install .* and build torch_hicache again"),
        ):
            backend = load({"built": {}, "missing": {"cuda": reason, "hip": reason}})
            assert backend.reason == reason
            assert re.fullmatch(remedy, backend.remedy)
