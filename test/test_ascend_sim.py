"""The simulated driver: what it protects, orders, counts and breaks. Without torch."""

import ctypes
import signal
import subprocess
import sys
from collections.abc import Iterator

import ascend_sim
import pytest
from ascend_sim import Simulator

pytestmark = pytest.mark.skipif(not ascend_sim.FOLDER, reason=ascend_sim.REASON)
DATA = bytes(range(1, 201))


@pytest.fixture
def sim() -> Iterator[Simulator]:
    simulator = Simulator()
    simulator.forget()
    yield simulator
    simulator.forget()


def exit_of(code: str) -> int:
    preamble = f"import sys; sys.path[:] = {sys.path!r}\nimport ctypes, ascend_sim\n"
    preamble += "sim = ascend_sim.Simulator()\n"
    return subprocess.run([sys.executable, "-c", preamble + code], timeout=60, check=False).returncode


@pytest.mark.parametrize(
    "touch",
    [
        "ctypes.string_at(sim.malloc(100), 1)",
        "ctypes.memset(sim.malloc(100), 0, 1)",
        "ctypes.memset(sim.malloc_host(4096) + 4096, 0, 1)",
        "ctypes.memset(sim.malloc_host(4096) - 1, 0, 1)",
    ],
)
def test_the_host_can_not_touch_device_memory_or_guards(touch: str) -> None:
    assert exit_of(touch) == -signal.SIGSEGV
    assert exit_of("ctypes.memset(sim.malloc_host(4096), 0, 4096)") == 0


def test_copies_go_both_ways(sim: Simulator) -> None:
    device, host = sim.malloc(len(DATA)), sim.malloc_host(len(DATA))
    ctypes.memmove(host, DATA, len(DATA))
    assert sim.copy_async(device, host, len(DATA), ascend_sim.HOST_TO_DEVICE) == 0
    back = sim.malloc_host(len(DATA))
    assert sim.copy_async(back, device, len(DATA), ascend_sim.DEVICE_TO_HOST) == 0
    assert sim.synchronize() == 0
    assert ctypes.string_at(back, len(DATA)) == DATA


def test_a_copy_past_the_end_or_after_a_free_is_an_error_of_the_stream(sim: Simulator) -> None:
    device, host = sim.malloc(4096), sim.malloc_host(4096)
    stream = sim.create_stream()
    assert sim.copy_async(device + 1, host, 4096, ascend_sim.HOST_TO_DEVICE, stream) == 0
    assert sim.synchronize(stream) == ascend_sim.COPY_EXCEPTION
    assert sim.synchronize(stream) == 0
    with sim.held():
        sim.copy_async(device, host, 4096, ascend_sim.HOST_TO_DEVICE, stream)
        sim.free(device)
    assert sim.synchronize(stream) == ascend_sim.COPY_EXCEPTION


def test_device_memory_exists_where_it_was_used(sim: Simulator) -> None:
    device, nbytes = sim.malloc(10 << 30), 10 << 30
    assert list(sim.used(device, nbytes)) == []
    for at in (5, 9 << 30):
        sim.write(device + at, DATA)
    used = list(sim.used(device, nbytes))
    assert [begin for begin, _ in used] == [0, 9 << 30]
    assert all(len(DATA) <= end - begin < 1 << 22 for begin, end in used)
    assert list(sim.used(device + (8 << 30), 1 << 30)) == []
    assert list(sim.used(device + (9 << 30) + 10, 50)) == [(0, 50)]
    assert sim.free(device) == 0


def test_held_streams_do_nothing(sim: Simulator) -> None:
    device, host = sim.malloc(len(DATA)), sim.malloc_host(len(DATA))
    event = sim.create_event()
    with sim.held():
        sim.copy_async(device, host, len(DATA), ascend_sim.HOST_TO_DEVICE)
        sim.record(event, 0)
        assert not sim.is_done(event)
        ctypes.memmove(host, DATA, len(DATA))  # a copy reads when it runs
    assert sim.synchronize() == 0
    assert sim.is_done(event)
    assert sim.read(device, len(DATA)) == DATA


def test_events_order_streams_though_destroyed_and_recorded_again(sim: Simulator) -> None:
    """The second copy waits for the first, whatever becomes of the event meanwhile."""
    device, host = sim.malloc(len(DATA)), sim.malloc_host(len(DATA))
    first, second = sim.create_stream(), sim.create_stream()
    ctypes.memmove(host, DATA, len(DATA))
    out = sim.malloc_host(len(DATA))
    for _ in range(20):
        ctypes.memset(out, 0, len(DATA))
        sim.write(device, bytes(len(DATA)))
        event = sim.create_event()
        with sim.held():
            sim.copy_async(device, host, len(DATA), ascend_sim.HOST_TO_DEVICE, first)
            sim.record(event, first)
            sim.wait(second, event)
            sim.copy_async(out, device, len(DATA), ascend_sim.DEVICE_TO_HOST, second)
            sim.record(event, second)
            sim.lib.aclrtDestroyEvent(ctypes.c_void_p(event))
        assert sim.synchronize(second) == 0
        assert ctypes.string_at(out, len(DATA)) == DATA


def test_pageable_memory_makes_an_asynchronous_copy_wait(sim: Simulator) -> None:
    device, pageable = sim.malloc(len(DATA)), ctypes.create_string_buffer(DATA, len(DATA))
    sim.forget()
    sim.copy_async(device, ctypes.addressof(pageable), len(DATA), ascend_sim.HOST_TO_DEVICE)
    assert sim.host_syncs == 1
    assert sim.read(device, len(DATA)) == DATA


def test_faults_come_once_and_calls_are_counted(sim: Simulator) -> None:
    sim.fail("aclrtMalloc", ascend_sim.NOT_SUPPORTED, passing=1)
    address = ctypes.c_void_p()
    results = [sim.lib.aclrtMalloc(ctypes.byref(address), ctypes.c_size_t(8), 0) for _ in range(3)]
    assert results == [0, ascend_sim.NOT_SUPPORTED, 0]
    assert sim.calls("aclrtMalloc") == 3
    assert sim.calls("aclrtMemset") == 0


def test_registered_memory_has_another_address_on_the_device(sim: Simulator) -> None:
    host = sim.malloc_host(8192)
    address = sim.register(host, 8192)
    assert address != host
    sim.write(address + 5, DATA)
    assert ctypes.string_at(host + 5, len(DATA)) == DATA
    assert sim.lib.aclrtHostUnregister(ctypes.c_void_p(host)) == 0
    out = ctypes.create_string_buffer(1)
    assert sim.lib.sim_read(ctypes.c_void_p(address), ctypes.c_size_t(1), out) != 0
