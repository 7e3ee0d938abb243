"""HICACHE_REQUIRE: no test of a required backend can pass by skipping."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent

TESTS = """
import pytest

@pytest.mark.backend("cpu")
def test_that_skips():
    pytest.skip("for no good reason")

@pytest.mark.backend("cpu")
@pytest.mark.skip(reason="by a mark")
def test_with_a_mark():
    pass

@pytest.mark.backend("cpu")
@pytest.mark.xfail(reason="known to crash", run=False)
def test_that_is_expected_to_fail():
    pass

def test_on_a_device(device):
    if device == "cpu":
        pytest.skip("by its parameter")

def test_bound_to_nothing():
    pytest.skip("an optional package is missing")
"""
WHOLE_FILE = "import pytest\npytest.skip('all of it', allow_module_level=True)\n"


def outcomes(folder: Path, require: str) -> tuple[int, str]:
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "conftest",
            "-q",
            "-rA",
            "-p",
            "no:cacheprovider",
            "-k",
            "not cuda and not npu",
            ".",
        ],
        cwd=folder,
        env=os.environ
        | {"HICACHE_REQUIRE": require, "PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    (tmp_path / "test_skips.py").write_text(TESTS)
    return tmp_path


def test_without_it_skips_are_skips(folder: Path) -> None:
    (folder / "test_cpu.py").write_text(WHOLE_FILE)
    code, output = outcomes(folder, "")
    assert code == 0, output
    assert "5 skipped" in output
    assert "1 xfailed" in output


def test_every_skip_of_a_required_backend_fails(folder: Path) -> None:
    code, output = outcomes(folder, "cpu")
    assert code == 1, output
    assert "2 failed, 1 skipped, 2 deselected, 2 errors" in output  # errors: what skips in its setup
    for reason in ("for no good reason", "by a mark", "known to crash", "by its parameter"):
        assert f"HICACHE_REQUIRE=cpu: a skip is a failure ({reason})" in output.replace(
            "Skipped: ", ""
        ).replace("[NOTRUN] ", "")


def test_a_whole_file_that_skips_fails(folder: Path) -> None:
    (folder / "test_cpu.py").write_text(WHOLE_FILE)
    code, output = outcomes(folder, "cpu")
    assert code == 2, output
    assert "a skip is a failure" in output
    assert "all of it" in output


def test_an_unknown_backend_is_a_usage_error(folder: Path) -> None:
    code, output = outcomes(folder, "gpu")
    assert code == 4, output
    assert "HICACHE_REQUIRE names 'gpu'; there are cpu, cuda, npu, cuda:1" in output
