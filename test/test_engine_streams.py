"""What the engine asks of an accelerator: stand-ins for torch's objects write down each call."""

import contextlib
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from engine_fakes import DEVICE_SLOTS, LAYERS, Model, failing_layers, ints, make_pools

from torch_hicache import DevicePool, HostPool, TransferEngine, streams
from torch_hicache.streams import DeviceEvent, DeviceRuntime, HostRuntime
from torch_hicache.ticket import Ticket

D, H = ints(3, 4, 9), ints(30, 2, 31)
DEVICE = torch.device("cuda:0")


class Machine:
    """Events are done when `running` is cleared."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.names: list[str] = []
        self.idle = threading.Event()
        self.idle.set()
        self.failure: str = ""
        self.capturing = False
        self.threads: list[tuple[int, str]] = []  # the device each has chosen
        self.guarded = threading.local()  # the current device is the engine's
        self._of_thread = threading.local()

    @property
    def current(self) -> str:
        """The current stream of the calling thread."""
        return getattr(self._of_thread, "current", "compute")

    @current.setter
    def current(self, name: str) -> None:
        self._of_thread.current = name

    def log_of(self, name: str) -> list[str]:
        return [line for line in self.log if line.startswith(name)]


class StandInStream:
    def __init__(self, machine: Machine, name: str) -> None:
        self.machine, self.name = machine, name

    def wait_event(self, event: Any) -> None:
        assert event.recorded, "a wait for an event without a record is no wait"
        self.machine.log.append(f"{self.name} waits for {event.name}")

    def is_capturing(self) -> bool:
        return self.machine.capturing

    def __enter__(self) -> None:
        self.machine.current = self.name

    def __exit__(self, *_: object) -> None:
        self.machine.current = "compute"


class StandInEvent:
    def __init__(self, machine: Machine) -> None:
        self.machine, self.recorded = machine, ""

    @property
    def name(self) -> str:
        return f"event {self.recorded}"

    def record(self, stream: StandInStream) -> None:
        assert not self.recorded
        self.recorded = stream.name
        self.machine.log.append(f"{stream.name} records")

    def query(self) -> bool:
        assert self.machine.guarded.active, "threads begin with device 0 as the current one"
        if self.machine.failure:
            raise RuntimeError(self.machine.failure)
        return self.machine.idle.is_set()


@pytest.fixture(params=["caller", "thread"])
def machine(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Machine]:
    """Transfers are submitted by their caller, as small ones are, or by the thread of a stream."""
    machine = Machine()
    monkeypatch.setattr(streams, "BACKGROUND_BYTES", 1 if request.param == "thread" else 1 << 60)
    names = iter(["load", "store"])

    def make_stream(device: torch.device, priority: int = 0) -> StandInStream:
        assert (device, priority) == (DEVICE, -1)
        return StandInStream(machine, next(names))

    @contextmanager
    def device_index(index: int) -> Iterator[None]:
        assert index == DEVICE.index
        machine.guarded.active = True
        try:
            yield
        finally:
            machine.guarded.active = False

    monkeypatch.setattr(torch.accelerator, "device_index", device_index)
    monkeypatch.setattr(
        torch.accelerator,
        "set_device_index",
        lambda index: machine.threads.append((index, threading.current_thread().name)),
    )
    monkeypatch.setattr(torch, "Stream", make_stream)
    monkeypatch.setattr(torch, "Event", lambda device: StandInEvent(machine))
    monkeypatch.setattr(
        torch.accelerator, "current_stream", lambda device: StandInStream(machine, machine.current)
    )
    transfer = Ticket._transfer

    def logged(ticket: Ticket, *args: Any) -> None:
        machine.log.append(f"{machine.current} transfers {list(ticket._groups[0].layers)}")
        transfer(ticket, *args)

    monkeypatch.setattr(Ticket, "_transfer", logged)
    yield machine
    machine.idle.set()


@contextmanager
def device_engine(
    machine: Machine, pools: tuple[DevicePool, HostPool], **options: int
) -> Iterator[TransferEngine]:
    """Closing waits for what is in flight, also when the test has failed."""
    engine = TransferEngine(*pools, runtime=DeviceRuntime(DEVICE), **options)  # type: ignore[arg-type]
    try:
        yield engine
    finally:
        machine.idle.set()
        engine.close()


def test_order_of_calls(machine: Machine) -> None:
    pools = make_pools((0, 1))
    model = Model(*pools)
    with device_engine(machine, pools) as engine:
        machine.idle.clear()
        store = engine.store(D, H)
        load = engine.load(H, ints(0, 1, 2), layers="all")
        load.wait_layer(1)
        store.wait_stream()
        assert machine.log_of("store") == [
            "store waits for event compute",
            "store transfers [0, 1]",
            "store records",
        ]
        assert machine.log_of("load") == [
            "load waits for event compute",
            "load waits for event store",
            "load transfers [0, 1]",
            "load records",
        ]
        assert machine.log_of("compute") == [
            "compute records",
            "compute records",
            "compute waits for event load",
            "compute waits for event store",
        ]
        at = machine.log.index
        assert at("store records") < at("load waits for event store")
        assert not store.done()
        with pytest.raises(TimeoutError):
            load.wait(timeout=0.01)
        machine.idle.set()
        load.wait()
        assert store.done()
        names = ("load", "load-done", "store", "store-done")
        assert sorted(machine.threads) == [(0, f"hicache-{name}") for name in names]
    model.store(D, H)
    model.load(H, ints(0, 1, 2))
    model.compare()


def test_a_submission_that_is_refused_in_the_middle(machine: Machine) -> None:
    """What runs keeps its slots until the device has finished, and the call returns a ticket."""
    pools = make_pools()
    with device_engine(machine, pools, group_bytes=1) as engine:
        slots = pools[0].allocate(3)
        machine.idle.clear()
        with failing_layers(5) as tried:
            ticket = engine.load(H, slots, layers="all")
            engine._streams["load"].flush()
        pools[0].free(slots)
        assert tried == [2, 3, 5]
        assert str(ticket.error) == "the link is down"
        assert not ticket.done()
        assert pools[0].available == DEVICE_SLOTS - 3
        ticket.wait_layer(3)
        with pytest.raises(RuntimeError, match="the link is down"):
            ticket.wait_layer(5)
        machine.idle.set()
        with pytest.raises(RuntimeError, match="the link is down"):
            ticket.wait()
        assert pools[0].available == DEVICE_SLOTS
        assert engine.stats()["load"]["errors"] == 1


def test_a_device_that_fails_fails_its_tickets(machine: Machine) -> None:
    pools = make_pools()
    with device_engine(machine, pools) as engine:
        machine.idle.clear()
        tickets = [engine.load(H, D, layers="all"), engine.store(D, H)]
        machine.failure = "device-side assert"
        for ticket in tickets:
            with pytest.raises(RuntimeError, match="device-side assert"):
                ticket.wait()
            assert ticket.done()
            with pytest.raises(RuntimeError, match="device-side assert"):
                ticket.wait_layer(LAYERS[0])
        assert [s["in_flight"] for s in engine.stats().values()] == [0, 0]


@pytest.mark.parametrize("machine", ["caller"], indirect=True)
def test_an_interrupt_of_the_submitting_thread_reaches_it(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    pools = make_pools()
    with device_engine(machine, pools) as engine:
        monkeypatch.setattr(Ticket, "_transfer", interrupt)
        with pytest.raises(KeyboardInterrupt):
            engine.load(H, D)
        engine.close()
        assert engine.stats()["load"]["in_flight"] == 0


@pytest.mark.parametrize("fails", ["wait_event", "record"])
def test_a_stream_that_fails_leaves_nothing_behind(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    pools = make_pools()
    slots = pools[0].allocate(3)
    with device_engine(machine, pools) as engine:

        def fail(*_: object) -> None:
            raise RuntimeError("the device is lost")

        monkeypatch.setattr(StandInStream if fails == "wait_event" else StandInEvent, fails, fail)
        with pytest.raises(RuntimeError, match="the device is lost"):  # noqa: PT012
            ticket = engine.load(H, slots)
            ticket.wait()
        pools[0].free(slots)
        assert pools[0].available == DEVICE_SLOTS
        assert engine.stats()["load"]["errors"] == 1


@contextmanager
def blocked_submissions(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    gate, transfer = threading.Event(), Ticket._transfer

    def wait(ticket: Ticket, *args: Any) -> None:
        assert gate.wait(60)
        transfer(ticket, *args)

    monkeypatch.setattr(Ticket, "_transfer", wait)
    try:
        yield gate
    finally:
        gate.set()


@pytest.mark.parametrize("machine", ["thread"], indirect=True)
def test_a_call_returns_before_a_big_transfer_is_submitted(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    pools = make_pools()
    model = Model(*pools)
    with device_engine(machine, pools) as engine, blocked_submissions(monkeypatch) as gate:
        ticket = engine.load(H, D)
        assert not ticket.done()
        with pytest.raises(TimeoutError):
            ticket.wait(timeout=0.01)
        waiter = threading.Thread(target=ticket.wait_stream)
        waiter.start()
        waiter.join(0.05)
        assert "compute waits for event load" not in machine.log, "a wait for nothing"
        gate.set()
        waiter.join(10)
        assert machine.log[-2:] == ["load records", "compute waits for event load"]
        ticket.wait()
    model.load(H, D)
    model.compare()


@pytest.mark.parametrize("machine", ["thread"], indirect=True)
def test_what_follows_a_big_transfer_keeps_its_place(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Small ones too: a load of the same stream, and a store that waits for it."""
    pools = make_pools()
    model = Model(*pools)
    with device_engine(machine, pools) as engine, blocked_submissions(monkeypatch) as gate:
        tickets = [engine.load(H, D)]
        monkeypatch.setattr(streams, "BACKGROUND_BYTES", 1 << 60)
        tickets += [engine.load(ints(1, 3, 5), D), engine.store(D, H)]
        gate.set()
        for ticket in tickets:
            ticket.wait()
        assert [line for line in machine.log_of("load") if "transfers" in line] == [
            "load transfers [2, 3, 5, 8]"
        ] * 2
        at = machine.log.index
        assert at("store waits for event load") < at("store transfers [2, 3, 5, 8]")
        engine.load(H, D)
        assert machine.log[-1] == "load records", "all is done: the caller submits again"
    model.load(H, D)
    model.load(ints(1, 3, 5), D)
    model.store(D, H)
    model.load(H, D)
    model.compare()


@pytest.mark.parametrize("machine", ["thread"], indirect=True)
def test_a_closed_stream_has_nothing_left_to_submit(machine: Machine) -> None:
    """Its thread has gone: to wait for it would hang."""
    with device_engine(machine, make_pools()) as engine:
        engine.load(H, D)
    flusher = threading.Thread(target=engine._streams["load"].flush, daemon=True)
    flusher.start()
    flusher.join(10)
    assert not flusher.is_alive()


def test_nothing_follows_a_wait_that_failed(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its wait a transfer would run too early. The next one is a new one, also the other way."""
    pools = make_pools()
    model = Model(*pools)
    with device_engine(machine, pools) as engine:
        machine.idle.clear()
        with monkeypatch.context() as patch, contextlib.suppress(RuntimeError):
            patch.setattr(
                StandInStream, "wait_event", Mock(side_effect=RuntimeError("the device is lost"))
            )
            ticket = engine.load(H, D, layers="all")
            engine._streams["load"].flush()
        with pytest.raises(RuntimeError, match="the device is lost"):
            ticket.wait_stream()
        machine.idle.set()
        with pytest.raises(RuntimeError, match="the device is lost"):
            ticket.wait()
        for layer in LAYERS:
            with pytest.raises(RuntimeError, match="the device is lost"):
                ticket.wait_layer(layer)
        model.compare()
        engine.store(D, H).wait()
        engine.load(H, D).wait()
    model.store(D, H)
    model.load(H, D)
    model.compare()


@pytest.mark.parametrize("machine", ["thread"], indirect=True)
def test_a_transfer_that_was_not_submitted_is_over_when_what_ran_is(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layers that were submitted still run: their slots come back when the device has finished."""
    pools = make_pools()
    with device_engine(machine, pools, group_bytes=1) as engine:
        slots = pools[0].allocate(3)
        machine.idle.clear()
        run = streams.DeviceStream._run
        calls = []

        def run_once(stream: streams.DeviceStream, work: Any) -> None:
            calls.append(work)
            if len(calls) == 2:
                raise RuntimeError("no memory for it")
            run(stream, work)

        monkeypatch.setattr(streams.DeviceStream, "_run", run_once)
        ticket = engine.load(H, slots, layers="all")
        pools[0].free(slots)
        with pytest.raises(TimeoutError):
            ticket.wait(timeout=0.2)
        assert not ticket.done(), "the device still runs the first layer"
        assert pools[0].available == DEVICE_SLOTS - 3
        machine.idle.set()
        with pytest.raises(RuntimeError, match="no memory for it"):
            ticket.wait()
        assert ticket.done()
        assert pools[0].available == DEVICE_SLOTS
        assert len(calls) == 2, "the layers behind it were not tried"


@pytest.mark.parametrize("machine", ["thread"], indirect=True)
def test_records_behind_the_newest_event_are_work_too(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A record for captured graphs follows the last event: a flush and a small load wait for it."""
    gate = threading.Event()

    class External:
        name, recorded = "the layer's event", ""

        def __init__(self, *, external: bool) -> None:
            self.records = 0

        def record(self) -> None:
            if self.records:
                assert gate.wait(60)
            self.recorded, self.records = machine.current, self.records + 1
            machine.log.append("load records the layer")

    monkeypatch.setattr(torch.cuda, "Event", External)
    monkeypatch.setattr(torch.cuda, "current_stream", torch.accelerator.current_stream)
    with device_engine(machine, make_pools((0, 1))) as engine:
        machine.capturing = True
        torch.ops.hicache.wait_layer([], engine.handle, 1)
        machine.capturing = False
        big = threading.Thread(target=engine.load, args=(H, D))
        big.start()
        big.join(0.2)
        assert big.is_alive(), "it returned before the record of the layer"
        monkeypatch.setattr(streams, "BACKGROUND_BYTES", 1 << 60)
        small = threading.Thread(target=engine.load, args=(H, D))
        small.start()
        small.join(0.2)
        assert small.is_alive()
        gate.set()
        for thread in (big, small):
            thread.join(10)
        assert machine.log_of("load").count("load records the layer") == 3


@pytest.mark.parametrize("machine", ["thread"], indirect=True)
def test_a_layer_whose_event_was_not_recorded_is_not_waited_for(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    class External:
        recorded = ""

        def __init__(self, *, external: bool) -> None:
            pass

        def record(self) -> None:
            raise RuntimeError("no event can be recorded")

    monkeypatch.setattr(torch.cuda, "Event", External)
    monkeypatch.setattr(torch.cuda, "current_stream", torch.accelerator.current_stream)
    with device_engine(machine, make_pools()) as engine:
        engine.load(H, D).wait()
        machine.capturing = True
        for is_busy in (False, True):
            if is_busy:  # then the thread records it
                engine._streams["load"]._hand_over(partial(time.sleep, 0.2))
            with pytest.raises(RuntimeError, match="no event can be recorded"):
                torch.ops.hicache.wait_layer([], engine.handle, LAYERS[0])
        machine.capturing = False


def test_a_device_without_priorities(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, int]] = []

    def make_stream(device: torch.device, **options: int) -> StandInStream:
        made.append(options)
        if options:
            raise RuntimeError("no priorities")
        return StandInStream(Machine(), "plain")

    monkeypatch.setattr(torch, "Stream", make_stream)
    monkeypatch.setattr(torch.accelerator, "set_device_index", lambda index: None)
    DeviceRuntime(DEVICE).new_stream("load").close()
    assert made == [{"priority": -1}, {}]


def test_external_events_are_recorded_with_the_load_stream_as_the_current_one(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch asks the current stream whether it is captured, and would record what can't be recorded."""

    class External:
        name, recorded = "the layer's event", ""

        def __init__(self, *, external: bool) -> None:
            assert external

        def record(self) -> None:
            self.recorded = machine.current
            machine.log.append(f"{machine.current} records the layer")

    monkeypatch.setattr(torch.cuda, "Event", External)
    monkeypatch.setattr(torch.cuda, "current_stream", torch.accelerator.current_stream)
    with device_engine(machine, make_pools((0, 1))) as engine:
        machine.capturing = True
        torch.ops.hicache.wait_layer([], engine.handle, 1)
        machine.capturing = False
        assert machine.log == ["load records the layer", "compute waits for the layer's event"]
        machine.log.clear()
        engine.store(D, H)
        engine.load(H, D, layers=[0])
        assert "load records the layer" not in machine.log, "not a load of this layer"
        engine.load(H, D)
        assert machine.log[-2:] == ["load records", "load records the layer"]


@pytest.mark.parametrize("error", [TypeError, RuntimeError])
def test_a_torch_without_external_events(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def refuse(*, external: bool) -> None:
        raise error("no external events")

    monkeypatch.setattr(torch.cuda, "Event", refuse)
    with device_engine(machine, make_pools()) as engine:
        machine.capturing = True
        with pytest.raises(RuntimeError, match="this torch has no external events there"):
            torch.ops.hicache.wait_layer([], engine.handle, 2)
        machine.capturing = False


@pytest.mark.parametrize("machine", ["caller"], indirect=True)
def test_event_query_leaves_the_capture_mode_as_it_was(machine: Machine) -> None:
    """A driver's switch, played by a function: relaxed during the query, then as before."""
    mode, seen = [0], []
    event = DeviceEvent(DEVICE)

    def exchange(pointer: Any) -> int:
        wanted = pointer._obj.value
        pointer._obj.value, mode[0] = mode[0], wanted
        return 0

    event.record(StandInStream(machine, "load"))  # type: ignore[arg-type]
    event._exchange = exchange
    event.event.query = lambda: seen.append(mode[0]) or True  # type: ignore[method-assign]
    assert event.query()
    assert (seen, mode) == ([2], [0])


def test_the_cpu_needs_no_order_with_its_caller() -> None:
    runtime = HostRuntime()
    assert runtime.record_current().query()
    assert not runtime.is_capturing()
    assert runtime.new_layer_event() is None
