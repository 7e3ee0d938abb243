"""A master of the wheel's own and processes around it, on the loopback of a network of their own.

Mooncake's clients listen on every interface: `make test-mooncake` starts pytest in a network namespace.
"""

from collections.abc import Iterator
from pathlib import Path

import own_network
import pytest
from store_processes import Master, Owner


def pytest_configure(config: pytest.Config) -> None:
    own_network.prepare()


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
