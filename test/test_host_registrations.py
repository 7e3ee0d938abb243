"""csrc/host_registrations.h: ranges over several registrations, and where these meet."""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

COMPILER = os.environ.get("CXX", "c++").split()[0]
pytestmark = pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"there is no {COMPILER}")
ALIAS = 1_000_000  # what device addresses are off the host's


class Registrations:
    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._self = ctypes.c_void_p(library.create())

    def close(self) -> None:
        self._library.destroy(self._self)

    def add(self, host: int, nbytes: int, device: int | None = None) -> None:
        device = host + ALIAS if device is None else device
        self._library.add(self._self, *map(ctypes.c_int64, (host, nbytes, device)))

    def remove(self, host: int) -> bool:
        return self._library.remove_at(self._self, ctypes.c_int64(host))

    def device_address(self, begin: int, end: int) -> int:
        return self._library.device_address(self._self, ctypes.c_int64(begin), ctypes.c_int64(end))

    def seams(self, begin: int, end: int) -> list[int]:
        found = (ctypes.c_int64 * 16)()
        return found[: self._library.seams(self._self, *map(ctypes.c_int64, (begin, end)), found)]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    source = Path(__file__).with_name("host_registrations.cpp")
    output = tmp_path_factory.mktemp("host_registrations") / "library.so"
    subprocess.run(
        [COMPILER, "-std=c++17", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-o", output, source],
        check=True,
    )
    library = ctypes.CDLL(str(output))
    library.create.restype = ctypes.c_void_p
    library.remove_at.restype = ctypes.c_bool
    library.device_address.restype = library.seams.restype = ctypes.c_int64
    return library


@pytest.fixture
def registrations(library: ctypes.CDLL) -> Iterator[Registrations]:
    """Three neighbours from 100 to 400, a gap of one byte, a fourth from 401 to 500."""
    held = Registrations(library)
    for host, nbytes in ((200, 100), (100, 100), (401, 99), (300, 100)):
        held.add(host, nbytes)
    yield held
    held.close()


@pytest.mark.parametrize(
    ("begin", "end"),
    [(100, 200), (150, 151), (199, 201), (100, 400), (150, 350), (399, 400), (401, 500), (100, 100)],
)
def test_a_range_over_neighbours_has_one_device_address(
    registrations: Registrations, begin: int, end: int
) -> None:
    assert registrations.device_address(begin, end) == begin + ALIAS


@pytest.mark.parametrize(
    ("begin", "end"),
    [(99, 100), (99, 200), (0, 1000), (100, 401), (399, 402), (400, 401), (450, 501), (500, 501)],
)
def test_a_range_that_is_not_all_ours_has_none(
    registrations: Registrations, begin: int, end: int
) -> None:
    assert registrations.device_address(begin, end) == 0


def test_neighbours_of_the_host_alone_are_no_neighbours(registrations: Registrations) -> None:
    registrations.add(500, 100, device=5_000_000)
    assert registrations.device_address(401, 501) == 0
    assert registrations.device_address(500, 600) == 5_000_000
    assert registrations.device_address(599, 600) == 5_000_099


def test_neighbours_of_the_device_alone_are_no_neighbours(registrations: Registrations) -> None:
    registrations.add(501, 100, device=500 + ALIAS)
    assert registrations.device_address(401, 520) == 0


def test_what_is_removed_is_gone(registrations: Registrations) -> None:
    assert registrations.remove(200)
    assert not registrations.remove(200)
    assert not registrations.remove(150)
    assert registrations.device_address(150, 350) == 0
    assert registrations.device_address(100, 200) == 100 + ALIAS


@pytest.mark.parametrize(
    ("begin", "end", "expected"),
    [
        (100, 200, []),
        (100, 201, [200]),
        (200, 300, []),
        (150, 350, [200, 300]),
        (0, 1000, [100, 200, 300, 400, 401, 500]),
        (399, 402, [400, 401]),
        (199, 200, []),
        (200, 200, []),
        (600, 700, []),
    ],
)
def test_seams_lie_strictly_inside(
    registrations: Registrations, begin: int, end: int, expected: list[int]
) -> None:
    assert registrations.seams(begin, end) == expected


def test_seams_are_told_of_neighbours_that_differ_on_the_device(registrations: Registrations) -> None:
    registrations.add(500, 100, device=5_000_000)
    assert registrations.seams(450, 600) == [500]
