"""A network namespace with nothing but a loopback, for clients that listen on every interface."""

import fcntl
import os
import socket
import struct

import pytest

from torch_hicache.integrations.mooncake_client import load_client

_SIOCSIFFLAGS, _IFF_UP = 0x8914, 1


def prepare() -> None:
    """Bring the loopback up, and import Mooncake with the adapter's settings before others do."""
    if [name for _, name in socket.if_nameindex()] != ["lo"]:
        raise pytest.UsageError(
            "these tests need a network namespace of their own: run them with make test-mooncake, or "
            "pytest behind unshare --map-root-user --net"
        )
    with socket.socket() as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sH14x", b"lo", _IFF_UP))
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    try:
        load_client()
    except ImportError as error:
        raise pytest.UsageError(str(error)) from None
