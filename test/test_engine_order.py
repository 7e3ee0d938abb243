"""Order between streams, with streams whose work runs when the test says so: the worst order is certain.

`run_ahead` lets one stream go as far as its waits allow. Work that should have waited has then happened,
and the bytes are wrong.
"""

import random

import pytest
from engine_fakes import (
    DEVICE_SLOTS,
    HOST_SLOTS,
    LAYERS,
    FakeRuntime,
    Model,
    fake_engine,
    ints,
    make_pools,
    same,
)
from torch import Tensor

from torch_hicache import DevicePool
from torch_hicache.hazards import Hazards


def write_slots(pool: DevicePool, slots: Tensor, value: int) -> None:
    for plane in pool.planes():
        plane[slots] = value


def write_model(model: Model, slots: Tensor, value: int) -> None:
    for planes in model.rows["device"].values():
        for plane in planes:
            plane[slots] = value


D, H = ints(3, 4, 9), ints(30, 2, 31)


def test_store_waits_for_the_work_that_produces_the_slots() -> None:
    with fake_engine() as (engine, runtime, model):
        pool = model.pools["device"]
        runtime.compute.run(lambda: write_slots(pool, D, 7))
        engine.store(D, H)
        runtime.run_ahead("store")
        runtime.drain()
        write_model(model, D, 7)
        model.store(D, H)
        model.compare()


def test_load_waits_for_the_work_that_still_reads_the_slots() -> None:
    with fake_engine() as (engine, runtime, model):
        pool = model.pools["device"]
        expected = [plane[D].clone() for plane in pool.planes()]
        seen: list[Tensor] = []
        runtime.compute.run(lambda: seen.extend(plane[D].clone() for plane in pool.planes()))
        engine.load(H, D)
        runtime.run_ahead("load")
        runtime.drain()
        assert same(expected, seen)
        model.load(H, D)
        model.compare()


@pytest.mark.parametrize("whole_first", [True, False])
def test_slots_wait_for_the_pages_they_lie_in(whole_first: bool) -> None:
    """Slots that are whole pages move as pages, others by slot: both are seen by each other."""
    pools = make_pools(page_size=4)
    page, slot = (ints(8, 9, 10, 11), ints(4, 5, 6, 7)), (ints(10, -1), ints(6, 3))
    with fake_engine(pools) as (engine, runtime, model):
        for host_slots, device_slots in (page, slot) if whole_first else (slot, page):
            engine.load(host_slots, device_slots)
            model.load(host_slots, device_slots)
            engine.store(device_slots, host_slots.flip(0))
            model.store(device_slots, host_slots.flip(0))
        runtime.drain(first=("store",))
        model.compare()


@pytest.mark.parametrize("layers", [None, LAYERS])
def test_work_behind_wait_stream_does_not_overtake(layers: tuple[int, ...] | None) -> None:
    with fake_engine(group_bytes=1) as (engine, runtime, model):
        pool = model.pools["device"]
        engine.store(D, H, layers=layers).wait_stream()
        runtime.compute.run(lambda: write_slots(pool, D, 7))
        runtime.run_ahead("compute")
        runtime.drain()
        model.store(D, H)
        write_model(model, D, 7)
        model.compare()


@pytest.mark.parametrize("group_bytes", [1, 300, 1 << 30])
def test_work_behind_wait_layer_sees_the_layer_and_waits_for_no_later_one(group_bytes: int) -> None:
    with fake_engine(group_bytes=group_bytes) as (engine, runtime, model):
        pool = model.pools["device"]
        order = (5, 2, 8, 3)
        ticket = engine.load(H, D, layers=order)
        model.load(H, D)
        seen: list[int] = []

        def read(layer: int) -> None:
            ready = same(pool.planes(layer), model.rows["device"][layer])
            assert ready, f"layer {layer} was not ready"
            seen.append(layer)

        for layer in order:
            ticket.wait_layer(layer)
            runtime.compute.run(lambda layer=layer: read(layer))
        runtime.run_ahead("compute")
        while not seen:  # one command of the load at a time: the reader goes on as soon as it may
            assert runtime.streams["load"].step()
            runtime.run_ahead("compute")
        assert ticket.done() == (group_bytes == 1 << 30)
        runtime.drain(first=("compute",))
        assert seen == list(order)
        model.compare()


# One slot in common, on one side; what would go wrong is in the name.
HAZARDS = {
    "load reads the host slot before the store writes it": ("store", ints(1), "load", ints(2), 0),
    "store writes the host slot before the load has read it": ("load", ints(1), "store", ints(2), 0),
    "load writes the device slot before the store has read it": ("store", ints(1), "load", ints(1), 1),
    "store reads the device slot before the load has written it": ("load", ints(1), "store", ints(1), 1),
}


@pytest.mark.parametrize("name", HAZARDS)
@pytest.mark.parametrize("layers", [None, LAYERS])
def test_hazards_between_transfers_in_flight(name: str, layers: tuple[int, ...] | None) -> None:
    first, first_slot, second, second_slot, shift = HAZARDS[name]
    with fake_engine(group_bytes=1) as (engine, runtime, model):

        def submit(direction: str, device_slot: Tensor, host_slot: Tensor) -> None:
            if direction == "load":
                engine.load(host_slot, device_slot, layers=layers)
                model.load(host_slot, device_slot)
            else:
                engine.store(device_slot, host_slot, layers=layers)
                model.store(device_slot, host_slot)

        submit(first, first_slot, ints(20))
        submit(second, second_slot, ints(20 + shift))
        runtime.run_ahead("compute")  # both may start, but for each other
        runtime.run_ahead(second)
        runtime.drain()
        model.compare()


def test_a_hazard_with_a_transfer_behind_another() -> None:
    """The latest of two in flight counts, not the first."""
    with fake_engine() as (engine, runtime, model):
        engine.store(ints(1), ints(20))
        engine.store(ints(2), ints(20))
        engine.load(ints(20), ints(5))
        model.store(ints(1), ints(20))
        model.store(ints(2), ints(20))
        model.load(ints(20), ints(5))
        runtime.run_ahead("compute")
        for _ in range(7):  # the first store has finished, the second has not
            runtime.streams["store"].step()
        runtime.run_ahead("load")
        runtime.drain()
        model.compare()


def test_transfers_without_a_common_slot_do_not_wait_for_each_other() -> None:
    with fake_engine() as (engine, runtime, _):
        store = engine.store(ints(1, 2), ints(20, 21))
        load = engine.load(ints(22, 23), ints(3, 4))
        runtime.run_ahead("compute")
        runtime.run_ahead("load")
        assert (store.done(), load.done()) == (False, True)


def test_a_finished_transfer_is_not_waited_for() -> None:
    with fake_engine() as (engine, runtime, _):
        engine.store(ints(1), ints(20)).wait()
        engine.load(ints(20), ints(1))
        assert [kind for kind, _ in runtime.streams["load"].commands].count("wait") == 1  # compute


def test_slots_that_the_host_cannot_read_conflict_with_all() -> None:
    hazards = Hazards(("load", "store"), (DEVICE_SLOTS, HOST_SLOTS))
    hazards.add("store", (ints(1), ints(20)), 1)
    hazards.add("store", (ints(2), ints(21)), 2)
    assert hazards.conflicts("load", (ints(1), ints(30))) == {"store": 1}
    assert hazards.conflicts("load", (None, ints(30))) == {"store": 2}
    assert hazards.conflicts("load", (ints(5), ints(30))) == {"store": 0}
    hazards.add("store", (None, ints(22)), 3)
    assert hazards.conflicts("load", (ints(5), ints(30))) == {"store": 3}
    assert hazards.conflicts("load", (ints(), ints())) == {"store": 0}
    assert hazards.conflicts("store", (None, ints(30))) == {"load": 0}


def test_an_event_is_recorded_behind_its_work() -> None:
    """A ticket is done when its bytes are there, and no earlier."""
    with fake_engine(group_bytes=1) as (engine, runtime, model):
        ticket = engine.load(H, D, layers="all")
        model.load(H, D)
        runtime.run_ahead("compute")
        while not ticket.done():
            assert runtime.streams["load"].step()
        model.compare()


def test_slots_freed_in_flight_are_available_only_when_the_device_has_finished() -> None:
    with fake_engine() as (engine, runtime, model):
        pools = model.pools
        device_slots, host_slots = pools["device"].allocate(6), pools["host"].allocate(6)
        first = engine.store(device_slots, host_slots)
        second = engine.load(host_slots[:2], device_slots[:2])
        pools["device"].free(device_slots)
        pools["host"].free(host_slots)
        assert pools["device"].available == DEVICE_SLOTS - 6
        assert pools["host"].available == HOST_SLOTS - 6
        first.wait_stream()
        assert pools["device"].available == DEVICE_SLOTS - 6, "a stream's wait is no end"
        runtime.run_ahead("compute")
        runtime.run_ahead("store")
        assert first.done()
        assert not second.done()
        assert pools["device"].available == DEVICE_SLOTS - 2
        assert pools["host"].available == HOST_SLOTS - 2
        runtime.drain()
        assert pools["device"].available == DEVICE_SLOTS
        assert pools["host"].available == HOST_SLOTS


@pytest.mark.parametrize("seed", range(40))
def test_random_programs_under_random_schedules(seed: int) -> None:
    """Whatever the streams' speed, the pools are as if every call had been done at once."""
    choose = random.Random(seed)
    with fake_engine(group_bytes=choose.choice([1, 600, 1 << 20]), max_in_flight=200) as parts:
        engine, runtime, model = parts
        pool = model.pools["device"]
        tickets = []
        for step in range(40):
            n = choose.randrange(1, 6)
            device_slots = ints(*choose.sample(range(DEVICE_SLOTS), n))
            host_slots = ints(*choose.sample(range(HOST_SLOTS), n))
            if choose.random() < 0.2:
                device_slots[0] = -1
            layers = choose.choice([None, choose.sample(LAYERS, choose.randrange(1, 5))])
            what = choose.random()
            if what < 0.4:
                tickets.append(engine.load(host_slots, device_slots, layers=layers))
                model.load(host_slots, device_slots, layers)
            elif what < 0.8:
                tickets.append(engine.store(device_slots, host_slots, layers=layers))
                model.store(device_slots, host_slots, layers)
            else:  # compute, on slots that transfers in flight use
                for ticket in tickets:
                    ticket.wait_stream()
                device_slots = device_slots[device_slots >= 0]
                runtime.compute.run(lambda s=device_slots, v=step: write_slots(pool, s, v))
                write_model(model, device_slots, step)
            for _ in range(choose.randrange(8)):
                runtime.streams[choose.choice(["compute", "load", "store"])].step()
        runtime.drain(seed=seed)
        model.compare()
        assert all(ticket.done() and ticket.error is None for ticket in tickets)


def test_streams_that_run_later_find_the_indices_of_the_call() -> None:
    """Temporaries may be dropped or overwritten when the call has returned."""
    with fake_engine() as (engine, runtime, model):
        device_slots, host_slots = D.clone(), H.clone()
        engine.load(host_slots[::2], device_slots[::2])
        device_slots.zero_()
        host_slots.zero_()
        runtime.drain()
        model.load(H[::2], D[::2])
        model.compare()


def test_fakes_defer_work() -> None:
    """What the tests above rely on."""
    runtime = FakeRuntime()
    done: list[int] = []
    runtime.compute.run(lambda: done.append(1))
    assert not done
    runtime.drain()
    assert done == [1]
