"""The engine among threads and processes: nothing is held while the host blocks, ends are clean."""

import gc
import os
import pickle
import random
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from engine_fakes import (
    DEVICE_SLOTS,
    HOST_SLOTS,
    LAYERS,
    GatedRuntime,
    Model,
    bytes_of,
    ints,
    make_pools,
    wait_until,
)

from torch_hicache import Ticket, TransferEngine
from torch_hicache.error_scope import ErrorScope

D, H = ints(3, 4, 9), ints(30, 2, 31)


@contextmanager
def ticking() -> Iterator[Callable[[], int]]:
    """A thread that counts, as long as it gets the interpreter."""
    stop = threading.Event()
    ticks = [0]

    def tick() -> None:
        while not stop.wait(0.002):
            ticks[0] += 1

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        yield lambda: ticks[0]
    finally:
        stop.set()
        thread.join()


BLOCKING: dict[str, Callable[[TransferEngine, Ticket], object]] = {
    "wait": lambda engine, ticket: ticket.wait(),
    "wait with a timeout": lambda engine, ticket: ticket.wait(timeout=60),
    "wait_stream": lambda engine, ticket: ticket.wait_stream(),
    "wait_layer": lambda engine, ticket: ticket.wait_layer(5),
    "the op": lambda engine, ticket: torch.ops.hicache.wait_layer([], engine.handle, 5),
    "a full queue": lambda engine, ticket: engine.store(ints(0), ints(0)),
    "close": lambda engine, ticket: engine.close(),
}


@pytest.mark.parametrize("name", BLOCKING)
def test_other_threads_go_on_while_a_call_blocks(name: str) -> None:
    """Python runs, and so do the engine's other methods: no lock is held."""
    runtime = GatedRuntime()
    with TransferEngine(*make_pools(), runtime=runtime, max_in_flight=1) as engine:
        with ticking() as ticks, runtime.blocked():
            ticket = engine.load(H, D)
            blocked = threading.Thread(target=BLOCKING[name], args=(engine, ticket))
            blocked.start()
            before = ticks()
            others = []
            while ticks() < before + 50:
                others.append((engine.stats()["load"]["in_flight"], ticket.done(), ticket.error))
                time.sleep(0.005)
            assert blocked.is_alive()
            assert set(others) == {(1, False, None)}
        blocked.join(60)
        assert not blocked.is_alive()


def test_a_transfer_runs_without_the_interpreter() -> None:
    device_pool, host_pool = make_pools((0,), 20_000, 20_000)
    everything = torch.arange(20_000)
    shuffled = torch.randperm(20_000)
    with TransferEngine(device_pool, host_pool) as engine, ticking() as ticks:
        before, transfers = ticks(), 0
        while ticks() < before + 20:  # the waiter and the copying thread are at it all the time
            engine.store(everything, shuffled).wait()
            transfers += 1
        assert transfers


def test_random_programs_with_real_threads() -> None:
    """Submitted by one thread, run by two: the bytes are those of the calls' order."""
    choose = random.Random(5)
    pools = make_pools()
    model = Model(*pools)
    with TransferEngine(*pools, group_bytes=300, max_in_flight=20) as engine:
        for _ in range(600):
            n = choose.randrange(1, 6)
            device_slots = ints(*choose.sample(range(DEVICE_SLOTS), n))
            host_slots = ints(*choose.sample(range(HOST_SLOTS), n))
            layers = choose.choice([None, choose.sample(LAYERS, choose.randrange(1, 5))])
            if choose.random() < 0.5:
                engine.load(host_slots, device_slots, layers=layers)
                model.load(host_slots, device_slots, layers)
            else:
                engine.store(device_slots, host_slots, layers=layers)
                model.store(device_slots, host_slots, layers)
    model.compare()


def test_several_threads_submit_and_wait() -> None:
    """Each keeps to its own slots, stores them, spoils them and loads them again."""
    pools = make_pools(device_slots=64, host_slots=64)
    model = Model(*pools)
    wrong: list[str] = []
    with TransferEngine(*pools, max_in_flight=5, group_bytes=300) as engine:

        def work(number: int) -> None:
            choose = random.Random(number)
            own = pools[0].allocate(8)
            contents = [plane[own].clone() for plane in pools[0].planes()]
            for _ in range(40):
                host_slots = pools[1].allocate(8)
                engine.store(own, host_slots).wait_stream()
                for plane in pools[0].planes():
                    plane[own] = 0
                ticket = engine.load(host_slots, own, layers=choose.choice([None, "all"]))
                pools[1].free(host_slots)
                ticket.wait(60)
                for plane, rows in zip(pools[0].planes(), contents, strict=True):
                    if not torch.equal(bytes_of(plane[own]), bytes_of(rows)):
                        wrong.append(f"thread {number} lost its rows")

        threads = [threading.Thread(target=work, args=(number,)) for number in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
    assert not wrong
    assert pools[1].available == 64
    del model


def test_dropping_an_engine_ends_its_threads_and_frees_its_pools() -> None:
    threads = threading.active_count()
    pools = make_pools()
    engine = TransferEngine(*pools)
    ticket = engine.load(H, D, layers="all")
    ticket.wait()
    gone = [weakref.ref(engine), *(weakref.ref(pool) for pool in pools)]
    gc.collect()
    gc.disable()  # no cycles: memory of this size must not wait for the collector
    try:
        del engine, pools
        for _ in range(500):
            if not any(ref() for ref in gone) and threading.active_count() <= threads:
                break
            time.sleep(0.01)
        assert [ref() for ref in gone] == [None, None, None]
        assert threading.active_count() <= threads
    finally:
        gc.enable()
    assert ticket.done()  # a ticket that is kept keeps nothing of them
    ticket.wait()


def test_a_finished_ticket_is_kept_by_nobody() -> None:
    with TransferEngine(*make_pools()) as engine:
        tickets = [engine.load(H, D, layers="all"), engine.store(D, H)]
        for ticket in tickets:
            ticket.wait()
        gone = [weakref.ref(ticket) for ticket in tickets]
        del ticket, tickets
        for _ in range(500):
            if not any(ref() for ref in gone):
                break
            time.sleep(0.01)
        assert [ref() for ref in gone] == [None, None]


def test_dropping_everything_with_work_pending() -> None:
    """What is in flight keeps the engine and the pools until it has finished."""
    runtime = GatedRuntime()
    pools = make_pools()
    model = Model(*pools)
    del model.pools
    planes = [pool.planes() for pool in pools]
    engine = TransferEngine(*pools, runtime=runtime)
    gone = weakref.ref(engine)
    with runtime.blocked():
        engine.load(H, D)
        engine.store(ints(1), ints(30))
        del engine, pools
        gc.collect()
        assert gone() is not None
    for _ in range(500):
        if gone() is None:
            break
        time.sleep(0.01)
    assert gone() is None
    model.load(H, D)
    model.store(ints(1), ints(30))
    rows = [[plane for layer in LAYERS for plane in model.rows[name][layer]] for name in model.rows]
    for of_pool, expected in zip(planes, rows, strict=True):
        for plane, row in zip(of_pool, expected, strict=True):
            assert torch.equal(bytes_of(plane), bytes_of(row))


def test_a_child_of_fork_is_refused_and_can_make_its_own() -> None:
    """In a process of its own: pytest's has threads that a fork would miss."""
    _run("""
engine = TransferEngine(*make_pools())
ticket = engine.load(ints(1), ints(1))
ticket.wait()
child = os.fork()
if child == 0:
    refused = 0
    for call in (lambda: engine.load(ints(1), ints(1)), lambda: engine.store(ints(1), ints(1)),
                 engine.stats, ticket.wait, ticket.done, ticket.wait_stream, ticket.cancel,
                 lambda: torch.ops.hicache.wait_layer([], engine.handle, 2)):
        try:
            call()
        except RuntimeError as error:
            refused += "make a new one after the fork" in str(error)
    engine.close()
    with TransferEngine(*make_pools()) as own:
        own.load(ints(1), ints(1)).wait()
    sys.exit(0 if refused == 8 else 1)
assert os.waitpid(child, 0)[1] == 0
engine.load(ints(1), ints(1)).wait()
""")


@pytest.mark.slow
def test_the_interpreter_ends_cleanly_with_work_pending() -> None:
    """Thirty times, in children of one process that has imported torch."""
    _run("""
torch.set_num_threads(1)
def end(number):
    pools = make_pools((0, 1), 2000, 2000)
    engine = TransferEngine(*pools, max_in_flight=30)
    slots = torch.randperm(2000)
    for i in range(12):
        engine.load(slots, slots, layers="all")
        engine.store(slots, slots)
    if number % 3 == 1:
        del engine, pools      # dropped, but in flight
    elif number % 3 == 2:
        globals()["kept"] = engine
    sys.exit(0)
gc.collect()
gc.freeze()  # what the children needn't look at when they end
for first in range(0, 30, 3):
    children = []
    for number in range(first, first + 3):
        child = os.fork()
        if child == 0:
            end(number)
        children.append(child)
    status = [os.waitpid(child, 0)[1] for child in children]
    assert status == [0, 0, 0], (first, status)
""")


def _run(code: str) -> None:
    head = (
        "import gc, os, sys\n"
        f"sys.path.insert(0, {os.path.dirname(__file__)!r})\n"
        "import torch\n"
        "from torch_hicache import TransferEngine\n"
        "from engine_fakes import ints, make_pools\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", head + code], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_an_engine_cannot_be_pickled() -> None:
    with TransferEngine(*make_pools()) as engine:
        for what in (engine, engine.load(H, D)):
            with pytest.raises(TypeError):
                pickle.dumps(what)


def test_calls_under_grad_and_inference_mode() -> None:
    with torch.inference_mode():
        pools = make_pools()
    model = Model(*pools)
    with TransferEngine(*pools) as engine, torch.inference_mode():
        engine.load(H, D, layers="all").wait()
    model.load(H, D)
    model.compare()


def test_slots_come_back_whoever_made_the_pools() -> None:
    """The engine's threads write what pools made in inference mode know of their slots."""
    with torch.inference_mode():
        pools = make_pools()
        engine = TransferEngine(*pools)
    with engine:
        for _ in range(3):
            slots = [pool.allocate(4) for pool in pools]
            ticket = engine.store(*slots)
            wait_until(ticket._finished.is_set)  # by the engine's thread
            for pool, of_pool in zip(pools, slots, strict=True):
                pool.free(of_pool)
            assert ticket.error is None
        assert [pool.available for pool in pools] == [DEVICE_SLOTS, HOST_SLOTS]


def test_an_interrupt_while_another_thread_submits_leaks_nothing() -> None:
    pools = make_pools()
    with TransferEngine(*pools) as engine:
        locked, release = threading.Event(), threading.Event()

        def submit() -> None:
            with engine._submitting:
                locked.set()
                release.wait(10)

        other = threading.Thread(target=submit)
        other.start()
        locked.wait(10)
        previous = signal.signal(signal.SIGALRM, signal.default_int_handler)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.2)
            with pytest.raises(KeyboardInterrupt):
                engine.load(H, D)
        finally:
            signal.signal(signal.SIGALRM, previous)
            release.set()
            other.join(10)
        assert [of_direction["in_flight"] for of_direction in engine.stats().values()] == [0, 0]
        slots = pools[0].allocate(DEVICE_SLOTS)
        pools[0].free(slots)
        assert pools[0].available == DEVICE_SLOTS


def test_an_interrupt_of_who_ends_a_ticket_ends_it_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(_scope: ErrorScope) -> None:
        raise KeyboardInterrupt

    runtime = GatedRuntime()
    with TransferEngine(*make_pools(), runtime=runtime) as engine:
        with runtime.blocked("load"):
            ticket = engine.load(H, D)
            with monkeypatch.context() as patch:
                patch.setattr(ErrorScope, "close", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    ticket._finish(None)
        assert ticket.done()
        assert engine.stats()["load"]["in_flight"] == 0
