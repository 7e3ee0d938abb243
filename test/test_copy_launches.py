"""csrc/copy_launches.h: how a call is cut into launches."""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

COMPILER = os.environ.get("CXX", "c++").split()[0]
pytestmark = pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"there is no {COMPILER}")


def test_packed_rows_are_no_more_units_than_a_launch_can_count(tmp_path: Path) -> None:
    """Rows of 577 bytes move 16 bytes a time where they are 592 apart, and single bytes where packed."""
    source = Path(__file__).with_name("copy_launches.cpp")
    output = tmp_path / "library.so"
    torch_folder = Path(torch.__file__).parent
    command = [COMPILER, "-std=c++20", "-fPIC", "-shared", "-isystem", torch_folder / "include", source]
    command += [f"-L{torch_folder / 'lib'}", "-ltorch", "-ltorch_cpu", "-o", output]
    subprocess.run(command, check=True)
    most_packed_units = ctypes.CDLL(str(output)).most_packed_units
    most_packed_units.restype = ctypes.c_int64
    for max_bytes in (1 << 16, 1 << 30, 1 << 40):
        units = most_packed_units(*map(ctypes.c_int64, (577, 592, 1 << 24, max_bytes)))
        assert max_bytes // 2 < units <= max_bytes or (1 << 29) < units <= 1 << 30, (max_bytes, units)
