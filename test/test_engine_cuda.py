"""The engine on a GPU: races made certain by a delay on one stream, holds, captures, recorded errors."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from engine_fakes import DEVICE_SLOTS, LAYERS, Model, ints, make_pools, same
from torch import Tensor

from torch_hicache import (
    DevicePool,
    HostPool,
    PlaneSpec,
    TransferEngine,
    check_errors,
    streams,
    wait_layer,
)
from torch_hicache.engine import _engines

pytestmark = pytest.mark.backend("cuda")
DELAY_CYCLES = 200_000_000  # about 0.1 s, far longer than any call here takes on the host

D, H = ints(3, 4, 9), ints(30, 2, 31)
Parts = tuple[TransferEngine, Model]


@pytest.fixture(autouse=True, params=["caller", "thread"])
def _submitter(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """Who submits: the caller, as for small transfers, or a thread."""
    monkeypatch.setattr(streams, "BACKGROUND_BYTES", 1 if request.param == "thread" else 1 << 60)
    return request.param


@pytest.fixture
def parts() -> Iterator[Parts]:
    pools = make_pools(device="cuda")
    with TransferEngine(*pools, group_bytes=1) as engine:
        for where in ("cpu", "cuda"):  # kernels are loaded when they first run, which takes its time
            engine.load(H.to(where), D.to(where), layers="all").wait()
            engine.store(D.to(where), H.to(where)).wait()
        write_slots(pools[0], D.cuda(), 1)
        torch.cuda._sleep(1)
        torch.cuda.synchronize()
        yield engine, Model(*pools)


@pytest.fixture(params=["cpu", "cuda"])
def where(request: pytest.FixtureRequest) -> str:
    """Where the indices are."""
    return request.param


def delay(engine: TransferEngine, *directions: str, times: int = 1) -> None:
    """Nothing on these streams goes on for a while."""
    for direction in directions:
        with engine._streams[direction].stream:
            torch.cuda._sleep(times * DELAY_CYCLES)


def finish(model: Model) -> None:
    for engine in list(_engines.values()):
        for stream in engine._streams.values():
            stream.flush()  # what is not submitted yet, a device knows nothing of
    torch.cuda.synchronize()
    model.compare()


def write_slots(pool: DevicePool, slots: Tensor, value: int) -> None:
    for plane in pool.planes():  # an assignment would copy the value to the device, and wait for that
        plane.index_fill_(0, slots, value)


def write_model(model: Model, slots: Tensor, value: int) -> None:
    for planes in model.rows["device"].values():
        for plane in planes:
            plane[slots] = value


# --- Order ----------------------------------------------------------------------------------------


def test_store_waits_for_the_work_that_produces_the_slots(parts: Parts, where: str) -> None:
    engine, model = parts
    d, h, at = D.to(where), H.to(where), D.cuda()
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(DELAY_CYCLES)
        write_slots(model.pools["device"], at, 7)
        ticket = engine.store(d, h)
    assert not ticket.done()
    ticket.wait()
    write_model(model, D, 7)
    model.store(D, H)
    finish(model)


def test_load_waits_for_the_work_that_still_reads_the_slots(parts: Parts, where: str) -> None:
    engine, model = parts
    d, h = D.to(where), H.to(where)
    planes = model.pools["device"].planes()
    expected = [plane.clone() for plane in planes]
    torch.cuda.synchronize()
    torch.cuda._sleep(DELAY_CYCLES)
    seen = [plane.clone() for plane in planes]
    ticket = engine.load(h, d)
    assert not ticket.done()
    ticket.wait()
    assert same(expected, seen)
    model.load(H, D)
    finish(model)


def test_work_behind_wait_stream_does_not_overtake_a_store(parts: Parts, where: str) -> None:
    engine, model = parts
    d, h, at = D.to(where), H.to(where), D.cuda()
    delay(engine, "store")
    ticket = engine.store(d, h)
    ticket.wait_stream()
    write_slots(model.pools["device"], at, 7)
    assert not ticket.done(), "wait_stream must not block the host"
    model.store(D, H)
    write_model(model, D, 7)
    finish(model)


def test_work_behind_wait_layer_sees_the_layer(parts: Parts, where: str) -> None:
    engine, model = parts
    d, h = D.to(where), H.to(where)
    delay(engine, "load")
    ticket = engine.load(h, d, layers=[5, 2, 8, 3])
    seen = {}
    for layer in (5, 2, 8, 3):
        ticket.wait_layer(layer)
        seen[layer] = [plane.clone() for plane in model.pools["device"].planes(layer)]
    assert not ticket.done(), "wait_layer must not block the host"
    model.load(H, D)
    finish(model)
    for layer, planes in seen.items():
        assert same(planes, model.rows["device"][layer]), f"layer {layer} was not ready"


@pytest.mark.parametrize("first", ["load", "store"])
@pytest.mark.parametrize("side", ["host", "device"])
@pytest.mark.parametrize("layers", [None, LAYERS])
def test_hazards_between_transfers_in_flight(
    parts: Parts, where: str, first: str, side: str, layers: tuple[int, ...] | None
) -> None:
    engine, model = parts
    slots = {"device": ints(1), "host": ints(20)}
    delay(engine, first)
    for direction in (first, "store" if first == "load" else "load"):
        d, h = slots["device"], slots["host"]
        if direction == "load":
            engine.load(h.to(where), d.to(where), layers=layers)
            model.load(h, d)
        else:
            engine.store(d.to(where), h.to(where), layers=layers)
            model.store(d, h)
        slots["host" if side == "device" else "device"] = ints(2)  # the other side changes
    finish(model)


def test_temporaries_may_be_dropped_or_overwritten(parts: Parts) -> None:
    engine, model = parts
    d, h = D.cuda(), H.cuda()
    delay(engine, "load")
    ticket = engine.load(h, d)
    h.zero_()
    d.zero_()
    del h, d
    garbage = [torch.full((3,), 1 << 40, device="cuda") for _ in range(100)]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        garbage += [torch.full((3,), 1 << 40, device="cuda") for _ in range(100)]
    assert not ticket.done()
    model.load(H, D)
    finish(model)


def test_slots_freed_in_flight_come_back_by_themselves(parts: Parts) -> None:
    engine, model = parts
    pool = model.pools["device"]
    slots = pool.allocate(DEVICE_SLOTS)
    delay(engine, "store")
    ticket = engine.store(slots, torch.arange(DEVICE_SLOTS))
    pool.free(slots)
    assert pool.available == 0
    for _ in range(3000):
        if pool.available:
            break
        time.sleep(0.01)
    assert pool.available == DEVICE_SLOTS
    assert ticket.done()


def test_wait_has_a_timeout_and_lets_other_threads_run(parts: Parts) -> None:
    engine, _ = parts
    delay(engine, "load")
    ticket = engine.load(H, D)
    with pytest.raises(TimeoutError):
        ticket.wait(timeout=0.001)
    waiter = threading.Thread(target=ticket.wait)
    waiter.start()
    turns = 0
    while waiter.is_alive():
        time.sleep(0.001)
        turns += 1
    assert turns > 10
    assert ticket.done()


# --- Errors ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["load", "store"])
def test_a_bad_index_on_the_device_is_the_error_of_its_ticket_alone(parts: Parts, direction: str) -> None:
    engine, model = parts
    good = engine.load(ints(1).cuda(), ints(1).cuda())
    d, h = ints(3, DEVICE_SLOTS, 9).cuda(), H.cuda()
    bad = engine.load(h, d) if direction == "load" else engine.store(d, h)
    also_good = engine.store(ints(2).cuda(), ints(39).cuda())
    with pytest.raises(IndexError, match=str(DEVICE_SLOTS)):
        bad.wait()
    assert isinstance(bad.error, IndexError)
    with pytest.raises(IndexError):
        bad.wait_stream()
    good.wait()
    also_good.wait()
    check_errors("cuda")
    stats = engine.stats()
    assert sum(of_direction["errors"] for of_direction in stats.values()) == 1
    model.load(ints(1), ints(1))
    (model.load if direction == "load" else model.store)(
        *((H[[0, 2]], D[[0, 2]]) if direction == "load" else (D[[0, 2]], H[[0, 2]]))
    )
    model.store(ints(2), ints(39))
    finish(model)


# --- Captures -------------------------------------------------------------------------------------


@contextmanager
def captured() -> Iterator[torch.cuda.CUDAGraph]:
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="global"):
        yield graph


def test_polling_breaks_no_capture(parts: Parts) -> None:
    """The engine's threads, and the caller itself, ask for events while a capture in global mode runs."""
    engine, model = parts
    torch.cuda.synchronize()
    x = torch.zeros(4, device="cuda").add_(0)
    for is_warm in (False, True, True):  # the first capture of a process takes longer than the delay
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        # A warm capture mostly begins within the delay; a busy host may take longer.
        delay(engine, "load", "store", times=10 if is_warm else 1)
        tickets = [engine.load(H, D), engine.store(ints(1), ints(1))]
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="global")
            x.add_(1)
            polls = []
            for _ in range(20):
                time.sleep(0.001)
                polls.append(tickets[0].done())
            graph.capture_end()
        assert not is_warm or not polls[0]
        for ticket in tickets:
            ticket.wait()
        graph.replay()
    torch.cuda.synchronize()
    assert x.tolist() == [3] * 4
    model.load(H, D)
    model.store(ints(1), ints(1))
    finish(model)


def test_a_captured_wait_follows_the_loads_that_come_later(parts: Parts) -> None:
    engine, model = parts
    pool = model.pools["device"]
    out = {layer: [torch.zeros_like(plane) for plane in pool.planes(layer)] for layer in LAYERS}
    with captured() as graph:
        for layer in LAYERS:
            wait_layer(pool.planes(layer), engine.handle, layer)
            for to, plane in zip(out[layer], pool.planes(layer), strict=True):
                to.copy_(plane)
    for host_slots, layers in ((H, "all"), (ints(1, 2, 3), None), (ints(4, 5, 6), [5])):
        model.load(
            host_slots, D, [5] if layers == [5] else LAYERS
        )  # takes longer than the delay, at times
        delay(engine, "load")
        ticket = engine.load(host_slots, D, layers=layers)
        graph.replay()
        assert not ticket.done()
        finish(model)
        for layer in LAYERS:
            assert same(out[layer], model.rows["device"][layer]), f"layer {layer} was read too early"


def test_what_cannot_be_captured_says_so(parts: Parts) -> None:
    engine, _ = parts
    ticket = engine.load(H, D)
    ticket.wait()
    refused = []
    x = torch.zeros(4, device="cuda")
    with captured():
        x.add_(1)
        for call in (lambda: engine.load(H, D), lambda: engine.store(D, H), ticket.wait_stream):
            try:
                call()
            except RuntimeError as error:
                refused.append("can't be captured" in str(error))
    assert refused == [True] * 3


def test_reduce_overhead_with_waits() -> None:
    planes = [PlaneSpec("kv", (8,), torch.float32)]
    pools = DevicePool(planes, 3, 64, "cuda"), HostPool(planes, 3, 64, device="cuda")
    stack, rows = pools[0].stacks()[0], pools[1].stacks()[0]
    everything = torch.arange(64)
    with TransferEngine(*pools, group_bytes=1) as engine:
        handle = engine.handle

        @torch.compile(fullgraph=True, mode="reduce-overhead")
        def step(x: Tensor) -> list[Tensor]:
            sums = []
            for layer in range(3):
                wait_layer([stack[layer]], handle, layer)
                sums.append(stack[layer].sum() + x)
            return sums

        for seed in range(6):
            rows.copy_(torch.randint(1, 90, rows.shape))
            delay(engine, "load")
            ticket = engine.load(everything, everything, layers="all")
            sums = [float(s) for s in step(torch.full((), float(seed), device="cuda"))]
            ticket.wait()
            assert sums == [float(plane.sum()) + seed for plane in rows]


# --- Ends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dropped", [False, True])
def test_the_interpreter_ends_cleanly_with_work_pending(dropped: bool) -> None:
    code = f"""
import sys
sys.path.insert(0, {os.path.dirname(__file__)!r})
import torch
from torch_hicache import TransferEngine, streams
from engine_fakes import ints, make_pools
streams.BACKGROUND_BYTES = {streams.BACKGROUND_BYTES}
pools = make_pools(device="cuda")
engine = TransferEngine(*pools)
torch.cuda._sleep({DELAY_CYCLES})
for _ in range(5):
    engine.load(ints(1), ints(1), layers="all")
    engine.store(ints(1).cuda(), ints(1).cuda())
if {dropped}:
    del engine, pools
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
