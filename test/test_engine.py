"""The contract of TransferEngine and its tickets, on every device; what is blocked is so by a gate."""

import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_fakes import (
    DEVICE_SLOTS,
    HOST_SLOTS,
    LAYERS,
    SPECS,
    GatedRuntime,
    Model,
    failing_layers,
    gated_engine,
    ints,
    make_pools,
    wait_until,
)

from torch_hicache import DevicePool, HostPool, PlaneSpec, TransferEngine

D, H = ints(3, 4, 9), ints(30, 2, 31)


@pytest.fixture
def gated() -> Iterator[tuple[TransferEngine, GatedRuntime, Model]]:
    with gated_engine() as parts:
        yield parts


# --- What moves -----------------------------------------------------------------------------------


@pytest.mark.parametrize("layers", [None, "all", [5], [8, 2]])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_store_and_load_move_the_slots_and_nothing_else(
    device: str, layers: list[int] | str | None, dtype: torch.dtype
) -> None:
    pools = make_pools(device=device)
    model = Model(*pools)
    chosen = LAYERS if layers in (None, "all") else layers
    with TransferEngine(*pools) as engine:
        ticket = engine.store(D.to(dtype), H.to(dtype), layers=layers)
        ticket.wait()
        model.store(D, H, chosen)
        model.compare()
        device_slots = ints(0, -1, 20, 7)
        ticket = engine.load(ints(30, 1, -1, 2).to(dtype), device_slots.to(dtype), layers=layers)
        ticket.wait()
        model.load(ints(30, 1, -1, 2), device_slots, chosen)
        model.compare()
        assert ticket.done()
        assert ticket.error is None
        assert ticket.layers == tuple(chosen)
        assert ticket.nbytes == 4 * len(ticket.layers) * sum(spec.row_bytes for spec in SPECS)


@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
@pytest.mark.parametrize(
    ("device_slots", "host_slots", "unit"),
    [
        ((8, 9, 10, 11, 0, 1, 2, 3), (0, 1, 2, 3, 36, 37, 38, 39), "page"),
        ((8, 9, 10, 11), (1, 2, 3, 4), "slot"),
        ((8, 9, 10, 11), (3, 2, 1, 0), "slot"),
        ((8, 9, 10, 11, 4), (0, 1, 2, 3, 4), "slot"),
        ((8, 9, 10, 11), (0, 1, 2, -1), "slot"),
        ((9, 10, 11, 12), (5, 6, 7, 8), "slot"),
    ],
)
def test_slots_that_are_whole_pages_move_by_page(
    device: str, layout: str, device_slots: tuple[int, ...], host_slots: tuple[int, ...], unit: str
) -> None:
    pools = make_pools(layout=layout, page_size=4, device=device)
    model = Model(*pools)
    d, h = ints(*device_slots), ints(*host_slots)
    with TransferEngine(*pools) as engine:
        assert engine._pair.read_indices(d, h)[2] == unit
        for layers in (None, [5, 2], "all"):
            ticket = engine.load(h, d, layers=layers)
            ticket.wait()
            assert ticket.num_entries == len(device_slots)
            named = LAYERS if layers in (None, "all") else layers
            assert ticket.nbytes == len(d) * len(named) * sum(spec.row_bytes for spec in SPECS)
            model.load(h, d, named)
        engine.store(d, (h + 8).where(h >= 0, h) % 40).wait()
        model.store(d, (h + 8).where(h >= 0, h) % 40)
        model.compare()


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct"])
def test_pages(device: str, layout: str) -> None:
    pools = make_pools(layout=layout, page_size=4, device=device)
    model = Model(*pools, unit="page")
    with TransferEngine(*pools, unit="page") as engine:
        for pool in pools:
            assert len(pool.allocate(5, unit="page")) == 5
        ticket = engine.store(ints(1, 4), ints(9, 0), layers="all")
        pools[0].free(ints(1, 4), unit="page")
        ticket.wait()
        model.store(ints(1, 4), ints(9, 0))
        model.compare()
        assert pools[0].available == DEVICE_SLOTS - 3 * 4
        assert TransferEngine(*pools)._pair.unit == ("slot" if pools[1].has_slots else "page")


@pytest.mark.parametrize("stacked", [True, False])
def test_adopted_pools(device: str, stacked: bool) -> None:
    """A list of tensors, one for each layer, moves like a stack."""
    own, host_pool = make_pools(device=device)
    stacks = dict(zip(own.plane_names, own.stacks(), strict=True))
    parts = {name: stack if stacked else list(stack.unbind(0)) for name, stack in stacks.items()}
    pools = DevicePool.adopt(parts, layer_ids=LAYERS), host_pool
    model = Model(*pools)
    with TransferEngine(*pools, group_bytes=300) as engine:
        engine.load(H, D, layers="all").wait()
        engine.store(ints(5), ints(6)).wait()
    model.load(H, D)
    model.store(ints(5), ints(6))
    model.compare()


def test_no_entries(device: str) -> None:
    pools = make_pools(device=device)
    model = Model(*pools)
    with TransferEngine(*pools) as engine:
        for ticket in (engine.load(ints(), ints()), engine.store(ints(), ints(), layers="all")):
            ticket.wait_stream()
            ticket.wait_layer(5)
            ticket.wait()
            assert ticket.nbytes == 0
    model.compare()


def test_indices_may_be_overwritten_after_the_call(gated: tuple) -> None:
    engine, runtime, model = gated
    device_slots, host_slots = D.clone(), H.clone()
    with runtime.blocked():
        ticket = engine.load(host_slots, device_slots)
        host_slots.zero_()
        device_slots.zero_()
    ticket.wait()
    model.load(H, D)
    model.compare()


# --- What is refused at the call ------------------------------------------------------------------

BAD_CALLS: dict[str, tuple[Callable[[TransferEngine], object], type[Exception], str]] = {
    "device slot": (
        lambda e: e.load(ints(0, 1), ints(3, DEVICE_SLOTS)),
        IndexError,
        "[TransferEngine] device_indices must be slots from 0 to 23 or -1, got 24 at position 1.",
    ),
    "host slot": (
        lambda e: e.store(ints(0, 1, 2), ints(3, -2, 7)),
        IndexError,
        "[TransferEngine] host_indices must be slots from 0 to 39 or -1, got -2 at position 1.",
    ),
    "length": (
        lambda e: e.store(ints(0, 1, 2), ints(3)),
        ValueError,
        "[TransferEngine] device_indices and host_indices must have the same length, got 3 and 1.",
    ),
    "dtype": (
        lambda e: e.store(torch.tensor([1.0]), ints(3)),
        ValueError,
        "[TransferEngine] device_indices must be 1-D, int32 or int64, got [1] of float32.",
    ),
    "dimensions": (
        lambda e: e.load(torch.tensor(1), ints(3)),
        ValueError,
        "[TransferEngine] host_indices must be 1-D, int32 or int64, got [] of int64.",
    ),
    "device": (
        lambda e: e.load(ints(1).to("meta"), ints(3)),
        ValueError,
        "[TransferEngine] host_indices must be on cpu, got meta.",
    ),
    "unknown layer": (
        lambda e: e.load(ints(1), ints(3), layers=[2, 4]),
        ValueError,
        "[TransferEngine] layers must be among [2, 3, 5, 8], got 4.",
    ),
    "layer twice": (
        lambda e: e.load(ints(1), ints(3), layers=[2, 2]),
        ValueError,
        "[TransferEngine] layers must be one or more, once each, got [2, 2].",
    ),
    "no layers": (
        lambda e: e.load(ints(1), ints(3), layers=[]),
        ValueError,
        "[TransferEngine] layers must be one or more, once each, got [].",
    ),
    "other word": (
        lambda e: e.load(ints(1), ints(3), layers="each"),
        ValueError,
        "[TransferEngine] layers must be layer ids or 'all', got 'each'.",
    ),
}


@pytest.mark.parametrize("name", BAD_CALLS)
def test_bad_calls_raise_before_anything_is_submitted(gated: tuple, name: str) -> None:
    engine, _, model = gated
    call, kind, text = BAD_CALLS[name]
    with pytest.raises(kind, match=f"^{re.escape(text)}$"):
        call(engine)
    stats = engine.stats()
    assert all(not any(of_direction.values()) for of_direction in stats.values())
    assert [pool.available for pool in model.pools.values()] == [DEVICE_SLOTS, HOST_SLOTS]
    model.compare()


BAD_ENGINES: dict[str, tuple[Callable[[], object], str]] = {
    "layers": (
        lambda: TransferEngine(make_pools((0, 1))[0], make_pools((0, 2))[1]),
        "both pools must have the same layers in the same order, got [0, 1] (device) and [0, 2] (host).",
    ),
    "planes": (
        lambda: TransferEngine(
            make_pools((0,))[0], HostPool([PlaneSpec("k", (3, 8), torch.int8)], 1, 8, device="cpu")
        ),
        "both pools must have the same planes in the same order, got 'k' [3, 8] bfloat16, 'v' [5] "
        "float32 (device) and 'k' [3, 8] int8 (host).",
    ),
    "dtype": (
        lambda: TransferEngine(
            DevicePool([PlaneSpec("k", (3, 8), torch.bfloat16)], 1, 8, "cpu"),
            HostPool([PlaneSpec("k", (3, 8), torch.int8)], 1, 8, device="cpu"),
        ),
        "both pools must have the same planes in the same order, got 'k' [3, 8] bfloat16 (device) and "
        "'k' [3, 8] int8 (host).",
    ),
    "page size": (
        lambda: TransferEngine(make_pools(page_size=4)[0], make_pools(page_size=8)[1], unit="page"),
        "pools that move by page must have one page size, got 4 (device) and 8 (host).",
    ),
    "unit": (
        lambda: TransferEngine(*make_pools(layout="page_first_direct", page_size=4), unit="slot"),
        "page_first_direct is addressable by page only",
    ),
    "on_full": (
        lambda: TransferEngine(*make_pools(), on_full="drop"),
        "on_full must be 'block' or 'raise', got 'drop'.",
    ),
    "max_in_flight": (
        lambda: TransferEngine(*make_pools(), max_in_flight=0),
        "max_in_flight must be 1 or more, got 0.",
    ),
    "max_in_flight_bytes": (
        lambda: TransferEngine(*make_pools(), max_in_flight_bytes=0),
        "max_in_flight_bytes must be 1 or more, got 0.",
    ),
}


@pytest.mark.parametrize("name", BAD_ENGINES)
def test_engines_that_cannot_be(name: str) -> None:
    make, text = BAD_ENGINES[name]
    threads = threading.active_count()
    with pytest.raises(ValueError, match=re.escape(text)):
        make()
    assert threading.active_count() <= threads


# --- Tickets --------------------------------------------------------------------------------------


def test_a_call_returns_at_once_and_wait_has_a_timeout(gated: tuple) -> None:
    engine, runtime, model = gated
    with runtime.blocked():
        ticket = engine.load(H, D)
        assert not ticket.done()
        assert ticket.error is None
        with pytest.raises(TimeoutError, match=r"\[Ticket\] load must end within 0.01 s, it still runs."):
            ticket.wait(timeout=0.01)
        model.compare()
    ticket.wait(timeout=30)
    assert ticket.done()
    model.load(H, D)
    model.compare()


def test_a_ticket_has_its_layers_and_no_other(gated: tuple) -> None:
    engine, _, _ = gated
    ticket = engine.load(H, D, layers=[5, 2])
    for layer in (3, 8, 0):
        with pytest.raises(
            ValueError, match=rf"layer must be one of the ticket's, \[5, 2\], got {layer}"
        ):
            ticket.wait_layer(layer)
    whole = engine.load(H, D)
    for layer in LAYERS:
        whole.wait_layer(layer)
    with pytest.raises(ValueError, match="layer must be one of the ticket's"):
        whole.wait_layer(4)


def test_completion_is_seen_without_another_call(gated: tuple) -> None:
    """The slots that were freed in flight come back though nobody asks the ticket."""
    engine, runtime, model = gated
    device_slots = model.pools["device"].allocate(DEVICE_SLOTS)
    with runtime.blocked():
        engine.store(device_slots, torch.arange(DEVICE_SLOTS))
        model.pools["device"].free(device_slots)
        assert model.pools["device"].available == 0
        with pytest.raises(MemoryError):
            model.pools["device"].allocate(1)
    wait_until(lambda: model.pools["device"].available == DEVICE_SLOTS)
    assert engine.stats()["store"]["in_flight"] == 0


def test_wait_by_several_threads(gated: tuple) -> None:
    engine, runtime, _ = gated
    with runtime.blocked():
        ticket = engine.load(H, D, layers="all")
        told: list[str] = []

        def wait() -> None:
            ticket.wait()
            told.append("done" if ticket.done() else "not done")

        threads = [threading.Thread(target=wait) for _ in range(8)]
        for thread in threads:
            thread.start()
    for thread in threads:
        thread.join(30)
    assert told == ["done"] * 8


@pytest.mark.parametrize("failing", LAYERS)
def test_a_layer_that_fails_is_never_ready_nor_those_behind_it(gated: tuple, failing: int) -> None:
    engine, _, model = gated
    with failing_layers(failing) as tried:
        ticket = engine.load(H, D, layers="all")
        with pytest.raises(RuntimeError, match="the link is down"):
            ticket.wait(30)
    first_bad = LAYERS.index(failing)
    assert tried == list(LAYERS[: first_bad + 1]), "layers behind the one that failed are not tried"
    assert ticket.done()
    assert str(ticket.error) == "the link is down"
    for layer in LAYERS[:first_bad]:
        ticket.wait_layer(layer)
    for layer in LAYERS[first_bad:]:
        with pytest.raises(RuntimeError, match="the link is down"):
            ticket.wait_layer(layer)
    with pytest.raises(RuntimeError, match="the link is down"):
        ticket.wait_stream()
    with pytest.raises(RuntimeError, match="the link is down"):
        ticket.wait()
    if first_bad:
        model.load(H, D, LAYERS[:first_bad])
    model.compare()
    stats = engine.stats()["load"]
    assert (stats["transfers"], stats["bytes"], stats["errors"], stats["in_flight"]) == (0, 0, 1, 0)
    engine.load(H, D, layers="all").wait()  # the engine goes on
    model.load(H, D)
    model.compare()


def test_a_layer_that_fails_while_others_wait_for_it(gated: tuple) -> None:
    engine, runtime, _ = gated
    told: dict[int, str] = {}
    with failing_layers(5), runtime.blocked() as gate:
        ticket = engine.load(H, D, layers="all")

        def wait(layer: int) -> None:
            try:
                ticket.wait_layer(layer)
                told[layer] = "ready"
            except RuntimeError as error:
                told[layer] = str(error)

        threads = [threading.Thread(target=wait, args=(layer,)) for layer in LAYERS]
        for thread in threads:
            thread.start()
        assert not told
        gate.set()
        for thread in threads:
            thread.join(30)
    assert told == {2: "ready", 3: "ready", 5: "the link is down", 8: "the link is down"}


def test_a_failed_transfer_gives_its_slots_back(gated: tuple) -> None:
    engine, runtime, model = gated
    slots = model.pools["host"].allocate(HOST_SLOTS)
    with failing_layers(3), runtime.blocked():
        ticket = engine.store(D, slots[:3])
        model.pools["host"].free(slots)
        assert model.pools["host"].available == HOST_SLOTS - 3
        assert not ticket.done()
    with pytest.raises(RuntimeError):
        ticket.wait(30)
    assert model.pools["host"].available == HOST_SLOTS


# --- Counters, documentation -----------------------------------------------------------------------


def test_stats_count_what_has_moved(gated: tuple) -> None:
    engine, runtime, _ = gated
    engine.store(D, H).wait()
    with runtime.blocked():
        ticket = engine.load(H, D, layers=[2, 5])
        stats = engine.stats()["load"]
        assert (stats["in_flight"], stats["in_flight_bytes"]) == (1, 3 * 2 * 68)
        assert (stats["transfers"], stats["bytes"], stats["gb_per_s"]) == (0, 0, 0.0)
    ticket.wait()
    stats = engine.stats()
    assert stats["load"]["in_flight"] == stats["load"]["in_flight_bytes"] == 0
    assert (stats["load"]["transfers"], stats["load"]["bytes"]) == (1, 3 * 2 * 68)
    assert (stats["store"]["transfers"], stats["store"]["bytes"]) == (1, 3 * 4 * 68)
    for of_direction in stats.values():
        rate = of_direction["bytes"] / of_direction["busy_seconds"] / 1e9
        assert of_direction["gb_per_s"] == pytest.approx(rate)


def test_the_examples_of_the_documentation() -> None:
    text = (Path(__file__).parent.parent / "docs" / "design.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", text[text.index("## Engine") :], re.DOTALL)
    assert len(blocks) == 2
    names: dict[str, Any] = {}
    exec(blocks[0], names)
    for plane in names["device_pool"].planes():
        plane[names["device_slots"]] = 1
    names["stored"].wait()
    for plane in names["host_pool"].planes():
        plane[names["host_slots"]] = 2
    exec(blocks[1], names)
    assert int(names["total"]) == 4 * 64 * 8 * 128 * 4
    assert names["engine"].stats()["load"]["transfers"] == 1


def test_pools_must_have_the_same_planes_in_the_same_order() -> None:
    one, two = PlaneSpec("k", (2, 4), torch.half), PlaneSpec("v", (2, 4), torch.half)
    device, host = DevicePool([one, two], 2, 8, "cpu"), HostPool([two, one], 2, 8)
    with pytest.raises(ValueError, match=r"same planes in the same order, got 'k' \[2, 4\] float16, 'v'"):
        TransferEngine(device, host)
    with pytest.raises(
        ValueError, match="must be a DevicePool and host_pool a HostPool, got HostPool and"
    ):
        TransferEngine(host, device)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="got NoneType and HostPool"):
        TransferEngine(None, host)  # type: ignore[arg-type]


def test_indices_and_layers_of_another_kind() -> None:
    with TransferEngine(*make_pools()) as engine:
        for host, text in (([0], "got list"), (ints(0, 1).to_sparse(), "of layout torch.sparse_coo")):
            with pytest.raises(ValueError, match=text):
                engine.load(host, ints(0))  # type: ignore[arg-type]
        for layers in (2, [2.0], ["2"], {"a"}):
            with pytest.raises(ValueError, match="layers must be layer ids or 'all'"):
                engine.load(ints(0), ints(0), layers=layers)  # type: ignore[arg-type]
        engine.load(ints(0), ints(0), layers=torch.tensor([5, 2])).wait()  # type: ignore[arg-type]
