"""Pools and the engine on npu tensors: every model and layout, order, readiness, errors, submissions.

On the simulated driver with the emulated kernel; what needs neither runs on an NPU too.
"""

import threading

import ascend_sim
import pytest
import torch
from ascend_sim import Simulator
from engine_fakes import Model, ints, same, wait_until

from torch_hicache import (
    DevicePool,
    HostPool,
    PlaneSpec,
    TransferEngine,
    check_errors,
    empty_host,
    memfabric,
    testing,
)
from torch_hicache.layout import LAYOUTS

pytestmark = pytest.mark.backend("npu")
LAUNCH = "aclrtlaunch_hicache_kv_exchange"
LAYERS, PAGE_SIZE, DEVICE_PAGES, HOST_PAGES = (1, 2, 4), 4, 6, 9
D, H = ints(4, 0, 5), ints(7, 2, 3)  # pages

MODELS = {
    "mha": [PlaneSpec(name, (4, 16), torch.bfloat16) for name in ("key", "value")],
    "mha_widths": [
        PlaneSpec("key", (2, 24), torch.bfloat16),
        PlaneSpec("value", (2, 16), torch.bfloat16),
    ],
    "mla": [PlaneSpec("latent", (1, 36), torch.bfloat16)],
    "k_only": [PlaneSpec("key", (3, 11), torch.float8_e4m3fn)],
    # SGLang's page_first_kv_split is page_first_direct of these planes, each with a buffer of its own.
    "mla_split": [
        PlaneSpec("latent", (1, 32), torch.bfloat16),
        PlaneSpec("rope", (1, 4), torch.bfloat16),
        PlaneSpec("index_key", (1, 17), torch.uint8),
        PlaneSpec("index_scale", (1, 1), torch.float32),
    ],
}
WHERES = {
    "cpu": ("cpu", "cpu"),
    "npu": ("npu", "npu"),
    "host_on_cpu": ("npu", "cpu"),
    "host_on_npu": ("cpu", "npu"),
}


def make_pools(
    model: str = "mha", layout: str = "page_first", kind: str = "auto", device: str = "npu"
) -> tuple[DevicePool, HostPool]:
    specs = MODELS[model]
    device_pool = DevicePool(specs, LAYERS, DEVICE_PAGES * PAGE_SIZE, device, PAGE_SIZE)
    host_pool = HostPool(specs, LAYERS, HOST_PAGES * PAGE_SIZE, device, layout, PAGE_SIZE, kind)
    for seed, pool in enumerate((device_pool, host_pool)):
        testing.fill_pool(pool.buffers, seed=seed)
    torch.npu.synchronize(device)
    return device_pool, host_pool


def finish(model: Model) -> None:
    torch.npu.synchronize()
    model.compare()


@pytest.mark.parametrize("where", WHERES)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model_name", MODELS)
def test_all_of_a_page_moves_and_nothing_else(model_name: str, layout: str, where: str) -> None:
    pools = make_pools(model_name, layout)
    model = Model(*pools, unit="page")
    device_at, host_at = WHERES[where]
    with TransferEngine(*pools, unit="page", group_bytes=1) as engine:
        engine.store(D.to(device_at), H.to(host_at)).wait()
        model.store(D, H)
        finish(model)
        ticket = engine.load(
            ints(3, 8, -1, 0).to(host_at), ints(1, 2, 3, -1).to(device_at), layers=[4, 1]
        )
        ticket.wait()
        model.load(ints(3, 8), ints(1, 2), [4, 1])
        finish(model)
    check_errors("npu")


@pytest.mark.parametrize("where", WHERES)
@pytest.mark.parametrize("layout", ["layer_first", "page_first"])
def test_slots_of_any_order(layout: str, where: str) -> None:
    pools = make_pools("mha_widths", layout)
    model = Model(*pools)
    device_at, host_at = WHERES[where]
    d, h = testing.random_entries(11, DEVICE_PAGES * PAGE_SIZE, HOST_PAGES * PAGE_SIZE)
    with TransferEngine(*pools) as engine:
        engine.load(h.int().to(host_at), d.to(device_at)).wait()
        model.load(h, d)
        d, h = d.flip(0), torch.randperm(HOST_PAGES * PAGE_SIZE)[:11]
        engine.store(d.to(device_at), h.int().to(host_at), layers="all").wait()
        model.store(d, h)
    finish(model)


@pytest.mark.parametrize("kind", ["memfabric", "pinned"])
@pytest.mark.parametrize("method", ["kernel", "copy_engine"])
def test_each_kind_of_host_memory_by_each_method(kind: str, method: str) -> None:
    pools = make_pools("mla_split", "page_first_direct", kind)
    model = Model(*pools, unit="page")
    with TransferEngine(*pools, method=method) as engine:
        engine.store(D, H).wait()
        engine.load(H, D.flip(0), layers="all").wait()
    model.store(D, H)
    model.load(H, D.flip(0))
    finish(model)


def test_memfabric_is_what_a_host_pool_gets() -> None:
    used = memfabric.entity().used_bytes
    _, host_pool = make_pools("mla_split", "page_first_direct")
    assert all(memfabric.device_address(buffer.data_ptr()) != 0 for buffer in host_pool.buffers)
    assert memfabric.entity().used_bytes > used
    del host_pool
    assert memfabric.entity().used_bytes == used


def test_adopted_buffers_of_an_engine_of_its_own() -> None:
    """The field's own tensors: a paged one for each plane, an indexer in fewer layers than latents."""
    # On the device [layers, pages, tokens, ...], on the host [pages, layers, tokens, ...].
    latent = torch.zeros(3, 6, 4, 1, 32, dtype=torch.bfloat16, device="npu")
    index = torch.zeros(2, 6, 4, 1, 17, dtype=torch.uint8, device="npu")
    host_latent = empty_host((9, 3, 4, 1, 32), torch.bfloat16, "npu")
    host_index = empty_host((9, 2, 4, 1, 17), torch.uint8, "npu")
    testing.fill_pool([host_latent, host_index])
    at = D.to("npu"), H.to("npu")
    testing.check_transfer(
        [latent, index],
        [host_latent.transpose(0, 1), host_index.transpose(0, 1)],
        *at,
        slot_dim=1,
    )


def test_the_second_device() -> None:
    if torch.npu.device_count() < 2:
        pytest.skip("one NPU only")
    pools = make_pools(kind="pinned", device="npu:1")
    model = Model(*pools, unit="page")
    with TransferEngine(*pools, unit="page") as engine:
        for where in ("cpu", "npu:1"):
            engine.store(D.to(where), H.to(where)).wait()
            engine.load(H.to(where), ints(1, 2, 3).to(where), layers="all").wait()
            model.store(D, H)
            model.load(H, ints(1, 2, 3))
    assert torch.npu.current_device() == 0
    torch.npu.synchronize("npu:1")
    model.compare()


# --- Order: one stream is kept from going on, the others are free -----------------------------------


PAUSE = threading.Event()


def stream_of(engine: TransferEngine, direction: str) -> int:
    """The driver's handle."""
    with engine._streams[direction].stream:
        return torch.npu.current_stream().npu_stream


def let_the_others_run() -> None:
    """Long enough for work that wrongly waits for nobody; work that waits is not hurried by it."""
    PAUSE.wait(0.05)


def fill_slots(pool: DevicePool, value: int) -> None:
    """All rows, in the order of the current stream."""
    for buffer in pool.buffers:
        buffer.view(torch.uint8).fill_(value)


def fill_model(model: Model, value: int) -> None:
    for planes in model.rows["device"].values():
        for plane in planes:
            plane.view(torch.uint8).fill_(value)


@pytest.fixture(params=WHERES)
def where(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Of the device pool's indices and of the host pool's."""
    return WHERES[request.param]


def test_compute_waits_for_each_layer(sim: Simulator, where: tuple[str, str]) -> None:
    pools = make_pools("mla_split", "page_first_direct")
    model = Model(*pools, unit="page")
    d, h = D.to(where[0]), H.to(where[1])
    with TransferEngine(*pools, group_bytes=1) as engine:
        seen = {}
        with sim.blocked(stream_of(engine, "load")):
            sim.forget()
            ticket = engine.load(h, d, layers=[4, 1, 2])
            for layer in (4, 1, 2):
                ticket.wait_layer(layer)
                seen[layer] = [plane.clone() for plane in pools[0].planes(layer, "page")]
            let_the_others_run()
            assert sim.host_syncs == 0
            assert not ticket.done()
        ticket.wait()
        model.load(H, D)
        finish(model)
    for layer, planes in seen.items():
        assert same(planes, model.rows["device"][layer]), f"layer {layer} was not ready"


def test_slots_are_stored_before_they_are_used_again(sim: Simulator, where: tuple[str, str]) -> None:
    """Store, free, and write: the store's bytes are those of before, and freed slots come back late."""
    pools = make_pools()
    model = Model(*pools, unit="page")
    slots = pools[0].allocate(DEVICE_PAGES * PAGE_SIZE)
    pages = torch.arange(DEVICE_PAGES)
    d, h = pages.to(where[0]), pages.to(where[1])
    with TransferEngine(*pools, unit="page") as engine:
        with sim.blocked(stream_of(engine, "store")):
            sim.forget()
            ticket = engine.store(d, h)
            if where[0] == "cpu":  # what the host can't read it can't hold
                pools[0].free(slots)
                assert pools[0].available == 0
            ticket.wait_stream()
            fill_slots(pools[0], 7)
            let_the_others_run()
            assert sim.host_syncs == 0
            assert not ticket.done()
        ticket.wait()
        model.store(pages, pages)
        fill_model(model, 7)
        finish(model)
        assert where[0] != "cpu" or pools[0].available == DEVICE_PAGES * PAGE_SIZE


def test_a_store_waits_for_the_work_that_produces_the_slots(
    sim: Simulator, where: tuple[str, str]
) -> None:
    pools = make_pools()
    model = Model(*pools, unit="page")
    with TransferEngine(*pools, unit="page") as engine, torch.npu.stream(torch.npu.Stream()):
        d, h = D.to(where[0]), H.to(where[1])
        with sim.blocked(torch.npu.current_stream().npu_stream):
            fill_slots(pools[0], 7)
            ticket = engine.store(d, h)
            let_the_others_run()
            assert not ticket.done()
        ticket.wait()
    fill_model(model, 7)
    model.store(D, H)
    finish(model)


def test_a_load_waits_for_the_work_that_still_reads_the_slots(
    sim: Simulator, where: tuple[str, str]
) -> None:
    pools = make_pools()
    model = Model(*pools, unit="page")
    before = [plane.to("cpu", copy=True) for plane in pools[0].planes()]
    with TransferEngine(*pools, unit="page") as engine, torch.npu.stream(torch.npu.Stream()):
        d, h = D.to(where[0]), H.to(where[1])
        with sim.blocked(torch.npu.current_stream().npu_stream):
            seen = [plane.clone() for plane in pools[0].planes()]
            ticket = engine.load(h, d)
            let_the_others_run()
            assert not ticket.done()
        ticket.wait()
        model.load(H, D)
        finish(model)
    assert same(seen, before)


@pytest.mark.parametrize("first", ["load", "store"])
@pytest.mark.parametrize("side", ["host", "device"])
def test_transfers_in_flight_that_share_a_slot(
    sim: Simulator, where: tuple[str, str], first: str, side: str
) -> None:
    pools = make_pools("mla")
    model = Model(*pools, unit="page")
    second = "store" if first == "load" else "load"
    with TransferEngine(*pools, unit="page") as engine:
        with sim.blocked(stream_of(engine, first)):
            for number, direction in enumerate((first, second)):
                d = ints(1 if side == "device" else 1 + number)
                h = ints(2 if side == "host" else 2 + number)
                if direction == "load":
                    engine.load(h.to(where[1]), d.to(where[0]))
                    model.load(h, d)
                else:
                    engine.store(d.to(where[0]), h.to(where[1]))
                    model.store(d, h)
            let_the_others_run()
        finish(model)


def test_indices_may_be_dropped_or_overwritten(sim: Simulator, where: tuple[str, str]) -> None:
    pools = make_pools()
    model = Model(*pools, unit="page")
    with TransferEngine(*pools, unit="page") as engine:
        d, h = D.clone().to(where[0]), H.clone().to(where[1])
        with sim.blocked(stream_of(engine, "load")):
            ticket = engine.load(h, d, layers="all")
            h.fill_(0)
            d.fill_(0)
            del h, d
            garbage = [torch.empty(3, dtype=torch.int64, device="npu").fill_(1 << 40) for _ in range(50)]
            let_the_others_run()
        ticket.wait()
        del garbage
    model.load(H, D)
    finish(model)


# --- Errors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["load", "store"])
def test_a_bad_index_on_the_device_is_the_error_of_its_ticket_alone(direction: str) -> None:
    """More tickets than records: a record that has held an error serves the next ticket as new."""
    pools = make_pools()
    model = Model(*pools, unit="page")
    bad_pages = ints(4, DEVICE_PAGES, 5)
    with TransferEngine(*pools, unit="page", group_bytes=1) as engine:
        for number in range(40):
            call = getattr(engine, direction)
            is_bad = number % 3 < 2
            d, h = (bad_pages if is_bad else D).to("npu"), H.to("npu")
            ticket = call(h, d, layers="all") if direction == "load" else call(d, h, layers="all")
            also_good = engine.store(ints(1).to("npu"), ints(8).to("npu"))
            if is_bad:
                with pytest.raises(
                    IndexError, match=rf"call \d+ on npu:0: .*\[1\] is {DEVICE_PAGES}, out"
                ):
                    ticket.wait()
                with pytest.raises(IndexError):
                    ticket.wait_layer(1)
                d, h = D[[0, 2]], H[[0, 2]]
            else:
                ticket.wait()
                d, h = D, H
            also_good.wait()
            (model.load if direction == "load" else model.store)(
                *((h, d) if direction == "load" else (d, h))
            )
            model.store(ints(1), ints(8))
        stats = engine.stats()
        assert stats[direction]["errors"] == 27
        assert sum(of_direction["errors"] for of_direction in stats.values()) == 27
    check_errors("npu")
    finish(model)


def test_a_record_in_use_is_not_the_devices(sim: Simulator) -> None:
    """An engine is not told of the errors of others, nor others of an engine's."""
    device_pool, host_pool = make_pools()
    bad = ints(99).to("npu")
    transfer = torch.ops.hicache.transfer_kv
    with TransferEngine(device_pool, host_pool) as engine:
        transfer(device_pool.planes(1), host_pool.planes(1), bad, bad)
        torch.npu.synchronize()
        engine.load(ints(1).to("npu"), ints(1).to("npu")).wait()
        with pytest.raises(IndexError, match="is 99"):
            engine.load(ints(2).to("npu"), bad).wait()
    with pytest.raises(
        IndexError, match=r"an earlier call failed: call \d+ on npu:0: dst_indices\[0\] is 99"
    ):
        transfer(device_pool.planes(1), host_pool.planes(1), ints(1), ints(1))


def test_a_refused_launch_is_the_tickets_error_from_its_layer_on(sim: Simulator) -> None:
    pools = make_pools()
    model = Model(*pools, unit="page")
    with TransferEngine(*pools, unit="page", group_bytes=1) as engine:
        sim.fail(LAUNCH, ascend_sim.AI_CORE_EXCEPTION, passing=1)
        ticket = engine.load(H, D, layers=[2, 4, 1])
        ticket.wait_layer(2)
        for layer in (4, 1):
            with pytest.raises(RuntimeError, match=r"launching the copy kernel failed with 507015"):
                ticket.wait_layer(layer)
        with pytest.raises(RuntimeError, match="507015"):
            ticket.wait()
        model.load(H, D, [2])
        finish(model)
        engine.load(H, D, layers=[2, 4, 1]).wait()
        model.load(H, D)
        finish(model)


def test_a_failed_device_ends_its_tickets_with_an_error(sim: Simulator) -> None:
    """No waiter hangs, and the slots come back."""
    pools = make_pools()
    slots = pools[0].allocate(PAGE_SIZE)
    with TransferEngine(*pools) as engine:
        with sim.blocked(stream_of(engine, "store")):
            ticket = engine.store(slots, slots)
            pools[0].free(slots)
            sim.fail("aclrtQueryEventStatus", ascend_sim.AI_CORE_EXCEPTION)
            wait_until(ticket.done)
            with pytest.raises(RuntimeError, match="507015"):
                ticket.wait()
        assert pools[0].available == DEVICE_PAGES * PAGE_SIZE
        assert engine.stats()["store"]["errors"] == 1


# --- Submissions and waiting ------------------------------------------------------------------------


@pytest.mark.parametrize("model_name", ["mha", "mla_split"])
@pytest.mark.parametrize("pages", [1, 6])
def test_one_launch_whatever_the_number_of_pages_and_planes(
    sim: Simulator, model_name: str, pages: int
) -> None:
    pools = make_pools(model_name, "page_first_direct")
    d, h = torch.arange(pages), torch.randperm(HOST_PAGES)[:pages]
    with TransferEngine(*pools) as engine:
        for call in (lambda: engine.load(h, d), lambda: engine.store(d, h)):
            sim.forget()
            call().wait()
            assert sim.calls(LAUNCH) == 1
            assert sim.calls("aclrtMemcpyAsync") == 1  # the upload of what the launch is told
        sim.forget()
        engine.load(h, d, layers="all").wait()
        assert sim.calls(LAUNCH) == 1  # small layers move together


@pytest.mark.parametrize("kind", ["memfabric", "pinned"])
def test_nothing_waits_for_the_device(sim: Simulator, kind: str, where: tuple[str, str]) -> None:
    """Sixty transfers of both directions are submitted while no stream runs."""
    pools = make_pools("mha_widths", "page_first_direct", kind)
    with TransferEngine(*pools, group_bytes=1) as engine:
        for _ in range(2):  # streams, events and records are made when they are first needed
            for ticket in (engine.load(H.to(where[1]), D.to(where[0])), engine.store(D, H)):
                ticket.wait()
        model = Model(*pools, unit="page")
        back = ints(8, 0, 1, 5)
        back_there = back.to(where[1])
        indices = []
        for number in range(30):
            d, h = testing.random_entries(4, DEVICE_PAGES, HOST_PAGES, seed=number)
            indices.append((d, h, d.to(where[0]), h.to(where[1])))
        torch.npu.synchronize()
        sim.forget()
        tickets = []
        with sim.held():
            for d, h, d_there, h_there in indices:
                tickets.append(engine.load(h_there, d_there, layers="all"))
                for layer in LAYERS:
                    tickets[-1].wait_layer(layer)
                tickets.append(engine.store(d_there, back_there))
                tickets[-1].wait_stream()
                model.load(h, d)
                model.store(d, back)
            assert sim.host_syncs == 0
            assert not any(ticket.done() for ticket in tickets)
        for ticket in tickets:
            ticket.wait()
    finish(model)
