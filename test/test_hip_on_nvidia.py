"""The HIP source on an NVIDIA GPU: no other package is tested by mistake."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import torch_hicache

HERE = Path(__file__).parent
# A package that says of its backends what it is told.
PACKAGE = """
from types import SimpleNamespace as Backend

def backends():
    hip = Backend(name="hip", loaded={hip}, reason="" if {hip} else "no runtime")
    return [hip, Backend(name="cuda", loaded={cuda}, reason="")]
"""


@pytest.fixture
def build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("build", HERE / "hip_on_cuda" / "build.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def make_package(output: Path, *, hip: bool, cuda: bool) -> None:
    (output / "torch_hicache").mkdir()
    (output / "torch_hicache" / "__init__.py").write_text(PACKAGE.format(hip=hip, cuda=cuda))


@pytest.mark.parametrize(("hip", "cuda"), [(False, False), (True, True), (False, True)])
def test_another_package_is_refused(hip: bool, cuda: bool, build: ModuleType, tmp_path: Path) -> None:
    make_package(tmp_path, hip=hip, cuda=cuda)
    with pytest.raises(SystemExit, match=rf"^\[hip_on_cuda\] {tmp_path}/.* is not the HIP source in"):
        build.run_tests(tmp_path, [])


def test_pytest_loads_the_package_that_was_built(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    make_package(tmp_path, hip=True, cuda=False)
    monkeypatch.setenv("PYTEST_ADDOPTS", "--noconftest -p no:cacheprovider -s")
    seen = tmp_path / "test_seen.py"
    seen.write_text("import torch_hicache\ndef test_seen():\n    print('from', torch_hicache.__file__)\n")
    assert build.run_tests(tmp_path, [str(seen)]) == 0
    assert f"from {tmp_path / 'torch_hicache'}" in capfd.readouterr().out


@pytest.mark.skipif(
    next(b for b in torch_hicache.backends() if b.name == "hip").loaded, reason="there is a HIP device"
)
def test_a_key_without_the_backend_is_a_usage_error() -> None:
    """As from the root of the tree with `python -m pytest`, whatever PYTHONPATH says."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--collect-only", "test/test_import.py"],
        cwd=HERE.parent,
        env=os.environ | {"HICACHE_HIP_KEY": "CUDA"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 4, done.stdout
    assert "HICACHE_HIP_KEY is set, but " in done.stderr
    assert "has no HIP backend: " in done.stderr
