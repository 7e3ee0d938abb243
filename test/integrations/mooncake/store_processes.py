"""Processes of a Mooncake Store: its master, and owners of the memory that it keeps pages in."""

import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

# Found without an import, which must come after the adapter has made its settings.
_SPEC = importlib.util.find_spec("mooncake")
_MASTER = Path(_SPEC.origin if _SPEC and _SPEC.origin else "").parent / "mooncake_master"
_START_SECONDS = 30
_OWNER = """
import sys
from mooncake.store import MooncakeDistributedStore

store = MooncakeDistributedStore()
code = store.setup("127.0.0.1", "P2PHANDSHAKE", int(sys.argv[2]), 1 << 24, "tcp", "", sys.argv[1])
print("ready" if code == 0 else code, flush=True)
sys.stdin.read()
store.close()
"""


def free_port() -> int:
    with socket.socket() as unbound:
        unbound.bind(("127.0.0.1", 0))
        return int(unbound.getsockname()[1])


class Process:
    """Ended by its id, whatever state it is in."""

    process: "subprocess.Popen[str]"

    def signal(self, number: signal.Signals) -> None:
        """Returns when it has stopped, if that was asked for."""
        self.process.send_signal(number)
        if number == signal.SIGSTOP:
            os.waitpid(self.process.pid, os.WUNTRACED)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __exit__(self, *error: object) -> None:
        self.kill()
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()


class Master(Process):
    def __init__(self, folder: Path, *options: str) -> None:
        self._log, self._options = folder / "master.log", options
        self._port, self._metrics_port = free_port(), free_port()
        self.address = f"127.0.0.1:{self._port}"
        self.start()

    def start(self) -> None:
        """Also after a kill: at the same address, with no keys."""
        with self._log.open("ab") as log:
            self.process = subprocess.Popen(
                [
                    str(_MASTER),
                    "-rpc_address=127.0.0.1",
                    f"-rpc_port={self._port}",
                    "-metrics_host=127.0.0.1",
                    f"-metrics_port={self._metrics_port}",
                    "-logtostderr",
                    *self._options,
                ],
                stderr=log,
                stdout=log,
                text=True,
            )
        deadline = time.monotonic() + _START_SECONDS
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self._port)) == 0:
                    return
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the master did not start: {self._log.read_text()[-2000:]}")
            time.sleep(0.05)

    def __enter__(self) -> "Master":
        return self


class Owner(Process):
    """Lends memory to the store until it is closed or killed."""

    def __init__(self, master: str, nbytes: int) -> None:
        self.process = start_python(_OWNER, master, str(nbytes))
        expect(self.process, "ready")

    def flip_byte_behind(self, content: bytes) -> int:
        """Change the byte that follows `content`, wherever that is in its memory; returns how many."""
        pid, flipped = self.process.pid, 0
        areas = Path(f"/proc/{pid}/maps").read_text().splitlines()
        with open(f"/proc/{pid}/mem", "r+b", buffering=0) as memory:
            for area in areas:
                bounds, access, *_ = area.split()
                start, end = (int(bound, 16) for bound in bounds.split("-"))
                if not access.startswith("rw") or end - start < 1 << 20:
                    continue
                memory.seek(start)
                data = memory.read(end - start)
                place = data.find(content)
                while place >= 0:
                    at = start + place + len(content)
                    memory.seek(at)
                    byte = memory.read(1)[0]
                    memory.seek(at)
                    memory.write(bytes([byte ^ 1]))
                    flipped += 1
                    place = data.find(content, place + 1)
        return flipped

    def __enter__(self) -> "Owner":
        return self


def start_python(code: str, *arguments: str) -> "subprocess.Popen[str]":
    """A Python of its own. What Mooncake logs is not kept."""
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def expect(process: "subprocess.Popen[str]", line: str) -> None:
    """Read the next line of a process."""
    assert process.stdout is not None
    found = process.stdout.readline().strip()
    if found != line:
        raise RuntimeError(f"expected '{line}' from process {process.pid}, got '{found}'")
