"""The engine's bounded queue: cancelling, back-pressure, closing."""

import threading
from collections.abc import Iterator

import pytest
from engine_fakes import (
    DEVICE_SLOTS,
    HOST_SLOTS,
    GatedRuntime,
    Model,
    gated_engine,
    ints,
    make_pools,
    wait_until,
)
from torch import Tensor

from torch_hicache import Ticket, TransferCancelled, TransferEngine

D, H = ints(3, 4, 9), ints(30, 2, 31)


@pytest.fixture
def gated() -> Iterator[tuple[TransferEngine, GatedRuntime, Model]]:
    with gated_engine() as parts:
        yield parts


# --- cancel ---------------------------------------------------------------------------------------


def test_cancel_before_the_work_has_begun(gated: tuple) -> None:
    engine, runtime, model = gated
    slots = model.pools["device"].allocate(3)
    with runtime.blocked():
        ticket = engine.load(H, slots, layers="all")
        model.pools["device"].free(slots)
        assert ticket.cancel() is True
        assert model.pools["device"].available == DEVICE_SLOTS - 3, "held until its turn has come"
        assert not ticket.done()
    with pytest.raises(TransferCancelled, match="this load was cancelled"):
        ticket.wait(30)
    with pytest.raises(TransferCancelled):
        ticket.wait_layer(2)
    assert model.pools["device"].available == DEVICE_SLOTS
    assert ticket.cancelled
    assert engine.stats()["load"]["cancelled"] == 1
    assert engine.stats()["load"]["errors"] == 0
    model.compare()


def test_cancel_in_the_middle(gated: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layer that runs is moved whole, later ones are dropped."""
    engine, _, model = gated
    running, go_on = threading.Event(), threading.Event()
    transfer = Ticket._transfer

    def slow(ticket: Ticket, dst: list[Tensor], *rest: object) -> None:
        if dst[0].data_ptr() == model.pools["device"].planes(3)[0].data_ptr():
            running.set()
            go_on.wait(30)
        transfer(ticket, dst, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(Ticket, "_transfer", slow)
    ticket = engine.load(H, D, layers="all")
    assert running.wait(30)
    assert ticket.cancel() is True
    assert ticket.cancel() is False, "nothing is left to be dropped"
    go_on.set()
    ticket.wait_layer(2)
    ticket.wait_layer(3)
    for layer in (5, 8):
        with pytest.raises(TransferCancelled):
            ticket.wait_layer(layer)
    model.load(H, D, (2, 3))
    model.compare()


def test_cancel_behind_the_end(gated: tuple) -> None:
    engine, _, model = gated
    ticket = engine.load(H, D)
    ticket.wait()
    assert ticket.cancel() is False
    ticket.wait()
    assert ticket.error is None
    model.load(H, D)
    model.compare()


# --- The queue ------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [{"max_in_flight": 2}, {"max_in_flight_bytes": 3 * 4 * 68 * 2}])
def test_a_full_queue_can_raise(limit: dict[str, int]) -> None:
    runtime, pools = GatedRuntime(), make_pools()
    with TransferEngine(*pools, runtime=runtime, on_full="raise", **limit) as engine:
        with runtime.blocked():
            tickets = [engine.load(H, D), engine.store(ints(0, 1, 2), ints(4, 5, 6))]
            slots = pools[0].allocate(1)
            with pytest.raises(
                RuntimeError, match=r"transfers in flight must be at most .* got one more"
            ):
                engine.load(ints(0), slots)
            pools[0].free(slots)
            assert pools[0].available == DEVICE_SLOTS - 6, "the refused call holds nothing"
        for ticket in tickets:
            ticket.wait(30)
        engine.load(H, D).wait(30)


def test_a_transfer_larger_than_the_queue_runs_alone() -> None:
    pools = make_pools()
    with TransferEngine(*pools, max_in_flight_bytes=10) as engine:
        for _ in range(3):
            ticket = engine.store(D, H)
        ticket.wait(30)
        assert engine.stats()["store"]["transfers"] == 3


def test_a_full_queue_blocks_several_threads_and_lets_all_through() -> None:
    runtime, pools = GatedRuntime(), make_pools()
    with TransferEngine(*pools, runtime=runtime, max_in_flight=3) as engine:
        tickets: list[Ticket] = []

        def submit(number: int) -> None:
            for i in range(5):
                slot = ints((number * 5 + i) % DEVICE_SLOTS)
                make = engine.load if i % 2 else engine.store
                tickets.append(make(slot, slot))

        threads = [threading.Thread(target=submit, args=(i,)) for i in range(6)]
        with runtime.blocked():
            for thread in threads:
                thread.start()
            wait_until(lambda: sum(s["queue_depth"] for s in engine.stats().values()) == 6)
            assert sum(stats["in_flight"] for stats in engine.stats().values()) == 3
            assert len(tickets) == 3
        for thread in threads:
            thread.join(30)
        assert len(tickets) == 30
        for ticket in tickets:
            ticket.wait(30)
        assert sum(stats["transfers"] for stats in engine.stats().values()) == 30


# --- close ----------------------------------------------------------------------------------------


def test_close_waits_and_may_be_called_again() -> None:
    runtime, pools = GatedRuntime(), make_pools()
    model = Model(*pools)
    threads = threading.active_count()
    engine = TransferEngine(*pools, runtime=runtime, max_in_flight=1)
    with runtime.blocked():
        ticket = engine.load(H, D)
        refused: list[str] = []

        def submit() -> None:
            try:
                engine.load(H, D)
            except RuntimeError as error:
                refused.append(str(error))

        submitter = threading.Thread(target=submit)
        submitter.start()
        wait_until(lambda: engine.stats()["load"]["queue_depth"] == 1)
        closers = [threading.Thread(target=engine.close) for _ in range(3)]
        for closer in closers:
            closer.start()
        submitter.join(30)
        assert refused == ["[TransferEngine] the engine must be open, it was closed."]
        closers[0].join(0.05)
        assert closers[0].is_alive(), "close must wait for what is in flight"
    for closer in closers:
        closer.join(30)
    assert ticket.done()
    engine.close()
    with pytest.raises(RuntimeError, match="the engine must be open, it was closed"):
        engine.store(D, H)
    ticket.wait()
    model.load(H, D)
    model.compare()
    assert threading.active_count() <= threads
    assert [pool.available for pool in pools] == [DEVICE_SLOTS, HOST_SLOTS]
