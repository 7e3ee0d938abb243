"""Host memory and processes: shared between them, inherited by a fork, in use at the end of one."""

import gc
import multiprocessing
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fake_runtime import FakeRuntime

from torch_hicache import SharedHostMemory, empty_host
from torch_hicache.testing import fill_pool

SHAPE = (64, 100)
NBYTES = 64 * 100 * 4


def run_python(code: str, *arguments: object, fds: tuple[int, ...] = ()) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        pass_fds=fds,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])},
    )


def add_one(shared: SharedHostMemory) -> None:
    """In another process."""
    empty_host(SHAPE, torch.int32, "cpu", shared=shared).add_(1)


_ADD_ONE = """
import sys, torch, torch_hicache
source = sys.argv[1]
shared = torch_hicache.SharedHostMemory.open(int(source) if source.isdigit() else source)
torch_hicache.empty_host((64, 100), torch.int32, "cpu", shared=shared).add_(1)
"""


class TestShared:
    @pytest.mark.parametrize("by", ["fd", "path", "fork", "spawn"])
    def test_another_process_works_on_the_same_bytes(self, by: str) -> None:
        with SharedHostMemory.create(NBYTES) as shared:
            tensor = empty_host(SHAPE, torch.int32, "cpu", shared=shared)
            fill_pool([tensor])
            before = tensor.clone()
            if by in ("fork", "spawn"):
                process = multiprocessing.get_context(by).Process(target=add_one, args=(shared,))
                process.start()
                process.join(120)
                assert process.exitcode == 0
            else:
                source, fds = (shared.fd, (shared.fd,)) if by == "fd" else (shared.path, ())
                done = run_python(_ADD_ONE, source, fds=fds)
                assert (done.returncode, done.stderr) == (0, "")
        assert torch.equal(tensor, before + 1)

    def test_tensors_outlive_the_handle_and_see_each_other(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Pinned in one, plain in the other: the pages are the same, and keep what is in them."""
        runtime = FakeRuntime().install(monkeypatch)
        shared = SharedHostMemory.create(NBYTES)
        one = empty_host(SHAPE, torch.int32, "cpu", "pageable", shared=shared)
        fill_pool([one])
        expected = one.clone()
        two = empty_host(SHAPE, torch.int32, "cpu", "pinned", shared=shared)
        shared.close()
        shared.close()
        assert torch.equal(two, expected)
        del one
        gc.collect()
        two[3] = 7
        assert bool((two[3] == 7).all())
        assert runtime.pieces() == [NBYTES]

    def test_less_than_asked_is_refused(self) -> None:
        with SharedHostMemory.create(100) as shared:
            text = "[empty_host] shared memory must hold 101 bytes, got 100 bytes."
            with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
                empty_host((101,), torch.uint8, "cpu", shared=shared)
            assert empty_host((100,), torch.uint8, "cpu", shared=shared).sum() == 0

    @pytest.mark.parametrize("nbytes", [0, -1])
    def test_no_bytes_are_refused(self, nbytes: int) -> None:
        text = rf"^\[SharedHostMemory\] nbytes must be positive, got {nbytes}\.$"
        with pytest.raises(ValueError, match=text):
            SharedHostMemory.create(nbytes)

    def test_its_size_is_final(self) -> None:
        """Else one process could end the others by SIGBUS."""
        with SharedHostMemory.create(1 << 20) as shared:
            for nbytes in (1, 1 << 21):
                with pytest.raises(PermissionError):
                    os.ftruncate(shared.fd, nbytes)

    def test_a_killed_process_leaves_nothing(self) -> None:
        """Neither in /dev/shm nor in the count of shared memory, whoever is killed."""
        code = """
import os, signal, sys, torch, torch_hicache
shared = torch_hicache.SharedHostMemory.create(64 << 20)
torch_hicache.empty_host((64 << 20,), torch.uint8, "cpu", shared=shared).fill_(1)
print(os.readlink(shared.path), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
        names = set(os.listdir("/dev/shm"))
        done = run_python(code)
        assert done.returncode == -signal.SIGKILL
        assert done.stdout == "/memfd:torch_hicache (deleted)\n"
        assert set(os.listdir("/dev/shm")) <= names


class TestFork:
    def test_a_child_undoes_nothing_and_unmaps_nothing(self) -> None:
        """It drops all it inherited, opens memory of its own, and exits; the parent goes on."""
        code = """
import gc, os, sys, torch, torch_hicache
from fake_runtime import FakeRuntime, FakeRegistrar
from torch_hicache.registrations import REGISTRARS, TABLE
torch.set_num_threads(1)  # OpenMP does not survive a fork
runtime = FakeRuntime()
REGISTRARS["cpu"] = lambda device: FakeRegistrar(runtime, device)
pinned = torch_hicache.empty_host((1 << 20,), torch.uint8, "cpu", "pinned").fill_(3)
plain = torch_hicache.empty_host((1 << 20,), torch.uint8, "cpu", "pageable").fill_(4)
existing = torch.empty(1 << 20)
handle = torch_hicache.register_host(existing, "cpu")
views = [torch_hicache.device_view(t, "cpu") for t in (pinned, existing)]
TABLE._changed.acquire()  # as another thread might at that moment
child = os.fork()
if child == 0:
    address = pinned.data_ptr()
    assert bool((plain == 4).all())
    plain.fill_(9)
    handle.close()
    # What now lies where the pinned memory was must survive the end of the pinned tensor.
    import mmap, ctypes
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t] + 3 * [ctypes.c_int] + [ctypes.c_long]
    fixed_noreplace = 0x100000
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | fixed_noreplace
    assert libc.mmap(address, 4096, 3, flags, -1, 0) == address, "the child inherited pinned memory"
    del pinned, plain, views, handle
    gc.collect()
    ctypes.memset(address, 5, 4096)
    assert [verb for verb, _, _ in runtime.log] == ["register", "register"], runtime.log
    own = torch_hicache.empty_host((4096,), torch.uint8, "cpu", "pinned").fill_(6)
    del own
    assert [verb for verb, _, _ in runtime.log][2:] == ["register", "unregister"], runtime.log
    sys.exit(0)
TABLE._changed.release()
_, status = os.waitpid(child, 0)
assert os.waitstatus_to_exitcode(status) == 0, status
assert bool((pinned == 3).all()) and bool((plain == 4).all())
pinned.fill_(1)
assert [verb for verb, _, _ in runtime.log] == ["register", "register"]
handle.close()
del views
assert [verb for verb, _, _ in runtime.log] == ["register", "register", "unregister"]
"""
        done = run_python(code)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

    @pytest.mark.backend("cuda")
    def test_the_parents_memory_stays_registered(self) -> None:
        code = """
import gc, os, torch, torch_hicache
host = torch_hicache.empty_host((64, 64), torch.uint8, "cuda").fill_(3)
existing = torch.full((64, 64), 4, dtype=torch.uint8)
handle = torch_hicache.register_host(existing, "cuda")
child = os.fork()
if child == 0:
    handle.close()
    del host, handle
    gc.collect()
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
slots = torch.arange(64, device="cuda")
for memory, value in ((host, 3), (existing, 4)):
    assert memory.is_pinned()
    device = torch.zeros(64, 64, dtype=torch.uint8, device="cuda")
    torch.ops.hicache.transfer_kv([device], [memory], slots, slots)
    assert bool((device == value).all())
    memory.fill_(value + 10)  # the device sees what is written after the fork
    torch.ops.hicache.transfer_kv([device], [memory], slots, slots)
    assert bool((device == value + 10).all())
"""
        done = run_python(code)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


class TestExit:
    @pytest.mark.parametrize("end", ["pass", "sys.exit(0)", "raise SystemExit", "os._exit(0)"])
    def test_with_memory_in_use(self, end: str) -> None:
        """In globals, in cycles, in other modules, in a thread: no crash and not a word."""
        code = f"""
import os, sys, threading, torch, torch_hicache
from fake_runtime import FakeRuntime, FakeRegistrar
from torch_hicache.registrations import REGISTRARS
runtime = FakeRuntime(alias="mapped")
REGISTRARS["cpu"] = lambda device: FakeRegistrar(runtime, device)
shared = torch_hicache.SharedHostMemory.create(1 << 20)
pool = torch_hicache.empty_host((1 << 20,), torch.uint8, "cpu", "pinned", shared=shared).fill_(1)
view = torch_hicache.device_view(pool, "cpu")
existing = torch.empty(1 << 16)
runtime.alias = "same"
handle = torch_hicache.register_host(existing, "cpu")
class Keeps: pass
keeps = Keeps()
keeps.itself, keeps.view, keeps.handle = keeps, view[5:], handle
sys.modules["json"].kept = torch_hicache.empty_host((99,), torch.uint8, "cpu", "pinned")
threading.local().kept = torch_hicache.device_view(existing, "cpu")
thread = threading.Thread(target=lambda kept: threading.Event().wait(), args=(view,), daemon=True)
thread.start()
{end}
"""
        done = run_python(code)
        assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
