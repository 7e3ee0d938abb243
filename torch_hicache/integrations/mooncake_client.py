"""A connected client of Mooncake Store: its package, versions and settings, and what it may be asked for.

The package's own calls crash the process before setup() has succeeded, so a client is handed out
only after that.
"""

import os
import re
import socket
import sys
import warnings
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = (
    "mooncake-transfer-engine-non-cuda",
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-cuda13",
)
INSTALL = "pip install mooncake-transfer-engine-non-cuda xxhash"
# Which of them were run: docs/integrations/mooncake.md.
FIRST_VERSION, BEFORE_VERSION = (0, 3, 13), (0, 3, 14)
# The client reads them once, when it is imported. Unset, a call waits 30 s for a master or a peer that
# hangs.
SETTINGS = {
    "MC_RPC_TIMEOUT_MS": "500",
    "MC_RPC_CONNECT_TIMEOUT_MS": "200",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_TCP_STATUS_TIMEOUT_SEC": "2",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "2",
}
PROTOCOLS = ("tcp", "rdma")

_CONNECT_SECONDS = 2.0

# The store's own codes.
NO_SPACE, NOT_FOUND, RPC_FAILED, RPC_TIMED_OUT = -200, -704, -900, -901

_MODULE = "mooncake.store"
_LOCAL_BUFFER_BYTES = 16 << 20  # the client's own, for calls that this package does not make


@dataclass(frozen=True)
class Connection:
    """Where the master is, and what this process brings along.

    Args:
        master: "host:port".
        segment_bytes: memory that this process lends to the store; what is kept there goes with it.
        protocol: "tcp", or "rdma".
        local_hostname: by which other clients reach this process; without it the address that the
            master is reached from.
    """

    master: str
    segment_bytes: int = 0
    protocol: str = "tcp"
    local_hostname: str | None = None

    def __post_init__(self) -> None:
        host, _, port = self.master.rpartition(":") if isinstance(self.master, str) else ("", "", "")
        if (
            not re.fullmatch(r"\S+", host)
            or not re.fullmatch(r"[0-9]{1,5}", port)
            or not 0 < int(port) < 65536
        ):
            raise ValueError(f"[MooncakeTier] master must be host:port, got '{self.master}'.")
        if self.segment_bytes < 0:
            raise ValueError(f"[MooncakeTier] segment_bytes must be 0 or more, got {self.segment_bytes}.")
        if self.protocol not in PROTOCOLS:
            raise ValueError(
                f"[MooncakeTier] protocol must be one of {', '.join(PROTOCOLS)}, got '{self.protocol}'."
            )
        if self.protocol == "rdma" and not any(Path("/sys/class/infiniband").glob("*")):
            # The client would take it, and use TCP.
            raise ValueError(
                "[MooncakeTier] protocol 'rdma' needs an RDMA device, this machine has none."
            )

    def open(self) -> Any:
        """A store that is set up.

        Raises:
            ImportError: the package is missing, or a library that it needs.
            RuntimeError: an unknown version, or no master answers in time.
        """
        store = load_client()()
        # setup() holds Python's lock, and for seconds when nobody listens: better to know before.
        hostname = self._address_towards_master()
        # With no metadata server, clients find each other through the master.
        code = store.setup(
            self.local_hostname or hostname,
            "P2PHANDSHAKE",
            self.segment_bytes,
            _LOCAL_BUFFER_BYTES,
            self.protocol,
            "",
            self.master,
        )
        if code != 0:
            raise RuntimeError(f"[MooncakeTier] {self._no_master} (setup gave {code}).")
        return store

    @property
    def _no_master(self) -> str:
        return f"no Mooncake master answers at {self.master}"

    def _address_towards_master(self) -> str:
        """This machine's address on the way to the master, which must accept a connection."""
        host, _, port = self.master.rpartition(":")
        try:
            with socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS) as connection:
                name: str = connection.getsockname()[0]
                return name
        except OSError as error:
            raise RuntimeError(
                f"[MooncakeTier] {self._no_master} ({error}). To start one: mooncake_master "
                f"-rpc_port={port}."
            ) from None


def load_client() -> Any:
    """The client's class, imported with SETTINGS in the environment unless they are set there already.

    Raises:
        ImportError, RuntimeError: as `Connection.open` does.
    """
    check_version()
    missing = [name for name in SETTINGS if name not in os.environ]
    if _MODULE in sys.modules and missing:
        wanted = " ".join(f"{name}={SETTINGS[name]}" for name in missing)
        warnings.warn(
            f"[MooncakeTier] {_MODULE} was imported before its settings were made: calls that were given "
            f"up may stay under way for long. Set {wanted} in the environment.",
            RuntimeWarning,
            stacklevel=3,
        )
    else:
        os.environ.update({name: SETTINGS[name] for name in missing})
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        if "libibverbs" not in str(error):
            raise
        raise ImportError(
            f"[MooncakeTier] Mooncake needs a library of the system: {error} (Debian: apt-get install "
            "libibverbs1)."
        ) from None
    return MooncakeDistributedStore


def require_version(
    who: str, package: str, found: str, first: tuple[int, int, int], before: tuple[int, int, int]
) -> None:
    """
    Raises:
        RuntimeError: `found` is older than `first`, or not older than `before`.
    """
    match = re.match(r"(\d+)\.(\d+)\.(\d+)", found)
    if not match or not first <= tuple(map(int, match.groups())) < before:
        oldest, limit = (".".join(map(str, numbers)) for numbers in (first, before))
        raise RuntimeError(
            f"[{who}] {package} must be {oldest} or newer, and older than {limit}, got {found}."
        )


def check_version() -> str:
    """The installed package's version.

    Raises:
        ImportError: there is none.
        RuntimeError: it is not one that this adapter knows.
    """
    for package in PACKAGES:
        try:
            found = version(package)
        except PackageNotFoundError:
            continue
        require_version("MooncakeTier", package, found, FIRST_VERSION, BEFORE_VERSION)
        return found
    raise ImportError(f"[MooncakeTier] needs Mooncake Store, which is not installed ({INSTALL}).")
