"""A master of the wheel's own and processes around it, on the loopback of a network of their own.

Mooncake's clients listen on every interface: `make test-mooncake` starts pytest in a network namespace.
"""

import fcntl
import os
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from store_processes import Master, Owner

from torch_hicache.integrations.mooncake_client import load_client

_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1


def pytest_configure(config: pytest.Config) -> None:
    if [name for _, name in socket.if_nameindex()] != ["lo"]:
        raise pytest.UsageError(
            "these tests need a network namespace of their own: run them with make test-mooncake, or "
            "pytest behind unshare --map-root-user --net"
        )
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP))
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    try:
        load_client()  # with the settings, before anything imports Mooncake
    except ImportError as error:
        raise pytest.UsageError(str(error)) from None


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Master]:
    """A master that the test may kill, stop and start again."""
    with Master(tmp_path) as running:
        yield running


@pytest.fixture
def owner(master: Master) -> Iterator[Owner]:
    """A process that lends 64 MiB to the store: room for less than 16 pages of 4 MiB."""
    with Owner(master.address, 64 << 20) as running:
        yield running


@pytest.fixture(scope="module")
def shared_master(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Master]:
    """One for tests that leave it as it is; 256 MiB are lent to it."""
    with (
        Master(tmp_path_factory.mktemp("master")) as running,
        Owner(running.address, 256 << 20),
    ):
        yield running
