"""The host code of the HIP backend, against a simulated runtime and GPU (test/hip_sim)."""

import subprocess
import textwrap

import hip_simulator
import pytest

pytestmark = pytest.mark.backend("hip")

# Of 20 placements those that together have every kind of memory and every place for indices.
PLACEMENTS = (
    "hipsim-load-cpu_indices or hipsim-store-device_indices or hipsim-on_device-dst_indices_on_device "
    "or hipsim-load_view-src_indices_on_device or hipsim-store_view-cpu_indices"
)

# A pool on the host, one on the device, and a load of three slots.
TRANSFER = """
host = torch_hicache.empty_host((64, 4, 16), torch.uint8, device)
host.copy_(torch.arange(64 * 4 * 16).view(64, 4, 16) % 251)
pool = torch.zeros(4, 32, 16, dtype=torch.uint8, device=device)
dst_indices, src_indices = torch.tensor([1, 2, 3]), torch.tensor([7, 9, 63])

def load():
    torch.ops.hicache.transfer_kv(
        [pool], [host.transpose(0, 1)], dst_indices, src_indices, slot_dim=1)

def is_loaded():
    return torch.equal(pool.cpu()[:, dst_indices], host.transpose(0, 1)[:, src_indices])

def raised(kind, call):
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError("nothing was raised")
"""


def run(program: str, executor: str = "host", **settings: str) -> subprocess.CompletedProcess[str]:
    env = hip_simulator.environment(executor, **settings)
    return hip_simulator.run_python(TRANSFER + textwrap.dedent(program), env)


def passes(program: str, executor: str = "host", **settings: str) -> None:
    done = run(program, executor, **settings)
    assert done.returncode == 0, done.stderr[-3000:]


SGLANG_FILES = ["test_sglang_known_calls.py", "test_sglang_pages.py", "test_sglang_bad_calls.py"]


@pytest.mark.slow
@pytest.mark.parametrize("file", ["test_transfer_kv.py", "test_indices.py"])
def test_the_suite_of_the_op(file: str) -> None:
    done = hip_simulator.run_suite([file], hip_simulator.environment(), PLACEMENTS)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout


def test_known_calls_and_pages_of_the_sglang_functions() -> None:
    done = hip_simulator.run_suite(SGLANG_FILES, hip_simulator.environment(), "hipsim and not bad_tables")
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert " passed" in done.stdout


def test_a_load_and_a_store() -> None:
    passes("""
        load()
        assert is_loaded()
        torch.ops.hicache.transfer_kv(
            [host.transpose(0, 1)], [pool], torch.tensor([20]), torch.tensor([2]), slot_dim=1)
        torch.accelerator.synchronize()
        assert torch.equal(host[20], host[9])
    """)


def test_work_waits_in_the_current_stream() -> None:
    passes("""
        side = torch.Stream(device)
        torch.accelerator.synchronize()
        with side:
            load()
        assert sim.hip_sim_launches() == 1
        waiting = sim.hip_sim_waiting()
        assert waiting >= 1
        torch.accelerator.current_stream().synchronize()
        assert sim.hip_sim_waiting() == waiting  # the default stream has nothing to do with it
        side.synchronize()
        assert sim.hip_sim_waiting() == 0
        assert is_loaded()
    """)


def test_a_missing_wait_shows() -> None:
    """Of the simulator: who reads without waiting does not find the bytes."""
    done = run("""
        side = torch.Stream(device)
        with side:
            torch.ops.hicache.transfer_kv(
                [host.transpose(0, 1)], [pool], dst_indices, torch.tensor([7, 9, 31]), slot_dim=1)
        assert (host[dst_indices] == 0).all(), "not waited for"
    """)
    assert done.returncode == 1
    assert "not waited for" in done.stderr


def test_a_host_address_in_a_kernel_shows() -> None:
    """Without hipHostGetDevicePointer's answer a kernel fails: by the pages, by the interpreter."""
    assert run("load(); torch.accelerator.synchronize()", HIP_SIM_NO_ALIAS="1").returncode == -11
    done = run("load(); torch.accelerator.synchronize()", "gfx942", HIP_SIM_NO_ALIAS="1")
    assert done.returncode != 0
    assert "are not the GPU's" in done.stderr


def test_the_host_can_not_read_the_device() -> None:
    """Of the simulator: device memory, and the device's address of host memory."""
    read = "import ctypes; ctypes.string_at({}, 1)"
    assert run(read.format("pool.data_ptr()")).returncode == -11
    view = "torch_hicache.device_view(host, device)"
    assert run(read.format(f"{view}.data_ptr()")).returncode == -11
    assert run(read.format("host.data_ptr()")).returncode == 0


def test_pinned_memory_of_others_and_addresses_inside_it() -> None:
    passes("""
        theirs = torch.empty(64, 4, 16, dtype=torch.uint8, pin_memory=True)
        theirs.copy_(host)
        part = theirs[5:, 1:].transpose(0, 1)
        inside = torch.tensor([0, 1, 58])
        torch.ops.hicache.transfer_kv([pool[1:]], [part], dst_indices, inside, slot_dim=1)
        assert torch.equal(pool.cpu()[1:, dst_indices], theirs[[5, 6, 63], 1:].transpose(0, 1))
    """)


def test_pageable_memory_is_refused() -> None:
    passes("""
        pageable = host.clone()
        text = raised(ValueError, lambda: torch.ops.hicache.transfer_kv(
            [pool], [pageable.transpose(0, 1)], dst_indices, src_indices, slot_dim=1, method="kernel"))
        assert "src[0] is pageable host memory" in text, text
        assert sim.hip_sim_launches() == 0
        assert sim.hip_sim_pending_error() == 0
    """)


def test_a_failed_launch_has_a_name_and_leaves_nothing_behind() -> None:
    passes("""
        load()
        sim.hip_sim_fail(b"hipLaunchKernel", 719, 0)
        text = raised(RuntimeError, load)
        assert "launching the copy kernel failed: hipErrorLaunchFailure" in text, text
        assert sim.hip_sim_pending_error() == 0
        load()
        assert is_loaded()
    """)


@pytest.mark.parametrize("function", ["hipHostMalloc", "hipHostGetDevicePointer", "hipGetSymbolAddress"])
def test_a_first_call_that_fails_can_be_repeated(function: str) -> None:
    passes(f"""
        import ctypes
        sim.hip_sim_fail(b"{function}", 2, 0)
        assert "hipErrorOutOfMemory" in raised(RuntimeError, load)
        assert sim.hip_sim_pending_error() == 0
        load()
        assert is_loaded()
    """)


@pytest.mark.parametrize("function", ["hipHostRegister", "hipHostGetDevicePointer"])
def test_a_failed_registration_is_a_memory_error(function: str) -> None:
    passes(f"""
        sim.hip_sim_fail(b"{function}", 2, 0)
        allocate = lambda: torch_hicache.empty_host((64,), torch.uint8, device)
        assert "hipErrorOutOfMemory" in raised(MemoryError, allocate)
        assert sim.hip_sim_pending_error() == 0
        allocate()
    """)


def test_host_memory_is_released_after_the_transfer() -> None:
    passes("""
        load()
        expected = host[src_indices].clone()
        del host
        assert torch.equal(pool.cpu()[:, dst_indices], expected.transpose(0, 1))
    """)


def test_no_code_for_this_gpu() -> None:
    passes(
        """
        text = raised(RuntimeError, load)
        assert "hipErrorNoBinaryForGpu: no kernel image is available" in text, text
        assert sim.hip_sim_pending_error() == 0
        """,
        HIP_SIM_ARCH="gfx906",
    )


def test_no_gpu() -> None:
    env = hip_simulator.environment(HIP_SIM_DEVICES="0")
    done = hip_simulator.run_python(
        "assert torch_hicache.backends()[2].loaded\n"
        "from torch_hicache import testing\n"
        "assert testing.devices() == ['cpu']\n"
        "at = torch.tensor([0])\n"
        "torch.ops.hicache.transfer_kv([torch.zeros(1, 2)], [torch.ones(1, 2)], at, at)\n",
        env,
    )
    assert done.returncode == 0, done.stderr


def test_capture() -> None:
    passes("""
        at, source = dst_indices.to(device), src_indices.to(device)
        torch.ops.hicache.transfer_kv([pool], [host.transpose(0, 1)], at, source, slot_dim=1)
        sim.hip_sim_set_capturing(1)
        text = raised(ValueError, load)
        assert "indices on the CPU can't be captured" in text, text
        torch.ops.hicache.transfer_kv([pool], [host.transpose(0, 1)], at, source, slot_dim=1)
        sim.hip_sim_set_capturing(0)
        assert sim.hip_sim_launches() == 2
        assert is_loaded()
    """)


def test_a_count_below_all_others_moves_nothing() -> None:
    """Also of a call's later launches, whose first entry is taken off it."""
    passes(
        """
        pool = torch.zeros(1, 129 << 20, dtype=torch.uint8, device=device)
        source = torch.ones(1, 129 << 20, dtype=torch.uint8).to(device)
        at, count = torch.zeros(3, dtype=torch.int64).to(device), torch.tensor(-(1 << 63)).to(device)
        torch.ops.hicache.transfer_kv([pool], [source], at, at, count=count)
        try:
            torch_hicache.check_errors(device)
        except IndexError as error:
            assert f"count is {-(1 << 63)}, outside 0 to 3, and was clamped" in str(error), error
        else:
            raise AssertionError("nothing was raised")
        assert not pool.cpu().any()
        """
    )


def test_an_unknown_key() -> None:
    """Nothing is registered then, and `backends()` says why."""
    env = hip_simulator.environment(HICACHE_HIP_KEY="Meta")
    program = "backend = torch_hicache.backends()[2]\nassert not backend.loaded\nprint(backend.reason)\n"
    done = hip_simulator.run_python(program, env)
    assert done.stdout.strip() == "HICACHE_HIP_KEY is 'Meta'", done.stderr


@pytest.mark.slow
def test_kernels_under_sanitizers() -> None:
    """Host-built bodies with AddressSanitizer and UBSan."""
    env = hip_simulator.environment(sanitize=True)
    only = "hipsim-load-cpu_indices or hipsim-store-device_indices"
    done = hip_simulator.run_suite(["test_transfer_kv.py"], env, only)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
