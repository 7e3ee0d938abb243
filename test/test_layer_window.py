"""LayerWindow against a plain list of K and V: random programs, slow transfers, refusals."""

import random
import time
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_hicache.engine import TransferEngine
from torch_hicache.integrations import layer_window
from torch_hicache.integrations.layer_window import LayerWindow
from torch_hicache.ticket import Ticket

HEADS, K_WIDTH, V_WIDTH = 3, 8, 5
MAX_TOKENS = 240


class Model:
    """What DynamicCache does: every layer's K and V are concatenated."""

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers: dict[int, list[Tensor]] = {layer: [] for layer in layers}

    def update(self, layer: int, *rows: Tensor) -> list[Tensor]:
        old = self.layers[layer] or [plane[:, :, :0] for plane in rows]
        self.layers[layer] = [torch.cat(pair, 2) for pair in zip(old, rows, strict=True)]
        return self.layers[layer]

    def select(self, rows: Tensor) -> None:
        self.layers = {layer: [p[rows] for p in planes] for layer, planes in self.layers.items()}

    def crop(self, tokens: int) -> None:
        for layer, planes in self.layers.items():
            self.layers[layer] = [p[:, :, : max(0, p.shape[2] - tokens)] for p in planes]


def new_rows(batch: int, tokens: int, device: str = "cpu") -> tuple[Tensor, Tensor]:
    return (
        torch.randn(batch, HEADS, tokens, K_WIDTH, device=device),
        torch.randn(batch, tokens, HEADS, V_WIDTH, device=device).to(torch.bfloat16).transpose(1, 2),
    )


class Pair:
    """A window and its model, step by step."""

    def __init__(self, num_layers: int, device: str = "cpu", max_tokens: int = MAX_TOKENS) -> None:
        self.ids = tuple(range(3, 3 + 2 * num_layers, 2))
        self.window = LayerWindow("Test", self.ids, max_tokens)
        self.model = Model(self.ids)
        self.device = device

    def step(self, batch: int, tokens: int) -> None:
        """One forward pass: every layer's result is read before the next one is updated."""
        for layer in self.ids:
            rows = new_rows(batch, tokens, self.device)
            got = self.window.update(layer, *rows)
            wanted = self.model.update(layer, *rows)
            assert self.window.length(layer) == wanted[0].shape[2]
            for plane, expected in zip(got, wanted, strict=True):
                assert torch.equal(plane.view(torch.uint8), expected.view(torch.uint8)), layer

    def select(self, rows: Tensor) -> None:
        self.window.select(rows)
        self.model.select(rows.to(self.device))

    def crop(self, tokens: int) -> None:
        self.window.crop(tokens)
        self.model.crop(tokens)

    def clear(self) -> None:
        self.window.clear()
        self.model = Model(self.ids)


@pytest.fixture(params=["", "slow loads", "slow stores", "all slow"])
def delays(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU, transfers that end late: a wait that is missing then shows."""
    move = Ticket._transfer

    def late(ticket: Ticket, *args: object) -> None:
        if request.param in (f"slow {ticket.direction}s", "all slow"):
            time.sleep(0.002)
        move(ticket, *args)

    monkeypatch.setattr(Ticket, "_transfer", late)


@pytest.mark.usefixtures("delays")
@pytest.mark.parametrize("num_layers", [1, 2, 3, 4, 5, 8])
def test_steps(num_layers: int, device: str) -> None:
    pair = Pair(num_layers, device)
    for tokens in (7, 1, 1, 3, 1, 30, 1, 1):
        pair.step(2, tokens)


@pytest.mark.usefixtures("delays")
@pytest.mark.parametrize("seed", range(12))
def test_random_programs(seed: int, device: str) -> None:
    choose = random.Random(seed)
    torch.manual_seed(seed)
    pair = Pair(choose.choice([1, 2, 4, 5, 6]), device)
    batch = 0
    for _ in range(40):
        what = choose.choices(["step", "select", "crop", "clear", "evict"], [10, 4, 2, 1, 1])[0]
        room = MAX_TOKENS // max(1, batch) - pair.window.length(3)
        if what == "step" and room >= 8:
            batch = batch or choose.randint(1, 4)
            pair.step(batch, choose.choice([1, 1, 1, 2, 7]))
        elif what == "select" and batch:
            most = min(6, MAX_TOKENS // max(1, pair.window.length(3)))
            rows = torch.tensor([choose.randrange(batch) for _ in range(choose.randint(1, most))])
            pair.select(rows.to(choose.choice(["cpu", device])))
            batch = len(rows)
        elif what == "crop":
            pair.crop(choose.choice([0, 1, 1, 5, 1000]))
        elif what == "clear":
            pair.clear()
            batch = 0
        elif what == "evict":
            pair.window.evict()
            assert pair.window.device_bytes == 0


def test_no_slot_is_lost() -> None:
    """After thousands of beams' worth of slots have come and gone, the pool is as empty as before."""
    pair = Pair(4)
    for _ in range(3):
        pair.step(4, 5)
        for step in range(20):
            pair.select(torch.tensor([step % 4, 0, 3, 3]))
            pair.step(4, 1)
        pair.crop(11)
        pair.step(4, 1)
        pair.clear()
    assert pair.window._slots.available == MAX_TOKENS


def test_every_token_up_to_the_last_fits(device: str) -> None:
    """Slots of beams that were dropped, and those reserved for runs, stand in nobody's way."""
    pair = Pair(4, device)
    pair.step(4, 20)
    for _ in range(40):
        pair.select(torch.tensor([1, 1, 2, 3]))
        pair.step(4, 1)
    with pytest.raises(MemoryError, match=r"4 of 61 tokens need 244, got 240"):
        pair.window.update(3, *new_rows(4, 1, device))
    with pytest.raises(MemoryError, match=r"5 of 60 tokens need 300, got 240"):
        pair.window.select(torch.tensor([0, 1, 2, 3, 3]))
    pair.crop(1)
    pair.step(4, 1)


def test_each_layer_is_loaded_once_a_step_and_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(6)
    pair.step(1, 100)
    for ticket in pair.window._loads.values():
        ticket.wait()
    loads: list[list[int]] = []
    move = Ticket._transfer

    def recorded(ticket: Ticket, *args: Any) -> None:
        if ticket.direction == "load":
            layers = args[3].unique() // MAX_TOKENS  # of the host slots
            loads.append([pair.ids[i] for i in layers.unique()])
        move(ticket, *args)

    monkeypatch.setattr(Ticket, "_transfer", recorded)
    pair.step(1, 1)
    pair.window.evict()  # waits for the load of the first layer for the next step
    # The first was on its way before: it is loaded for the next step, in which nobody waits for it.
    assert loads == [[5], [7], [9], [11], [13], [3]]


@pytest.mark.parametrize(("num_layers", "parts"), [(1, 1), (2, 2), (8, 2), (9, 3)])
def test_the_device_holds_two_layers(num_layers: int, parts: int) -> None:
    pair = Pair(num_layers, max_tokens=10_000)
    pair.step(2, 50)
    row_bytes = HEADS * (4 * K_WIDTH + 2 * V_WIDTH)
    assert pair.window.device_bytes == parts * 200 * row_bytes  # room for twice as many tokens
    assert pair.window.host_bytes == num_layers * 10_000 * row_bytes
    pair.step(2, 51)
    assert pair.window.device_bytes == parts * 404 * row_bytes


def test_a_sequence_lies_in_runs() -> None:
    """Also where several sequences grow token by token: neighbouring rows are one copy."""
    pair = Pair(2, max_tokens=1000)
    pair.step(3, 10)
    for _ in range(30):
        pair.step(3, 1)
    for row in pair.window._table:
        assert (row.diff() != 1).sum() <= 1


def test_a_failed_store_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(4)
    pair.step(1, 5)
    move = Ticket._transfer

    def failing(ticket: Ticket, *args: Any) -> None:
        if ticket.direction == "store" and args[2][0] // MAX_TOKENS == 2:  # host slots of layer 7
            raise RuntimeError("no such luck")
        move(ticket, *args)

    monkeypatch.setattr(Ticket, "_transfer", failing)
    pair.step(1, 1)
    with pytest.raises(RuntimeError, match="no such luck"):
        pair.window.evict()
    monkeypatch.setattr(Ticket, "_transfer", move)
    with pytest.raises(RuntimeError, match="no such luck"):
        pair.step(1, 1)


@pytest.mark.parametrize("direction", ["store", "load"])
def test_clear_drops_what_has_failed(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(4)
    pair.step(1, 5)
    move = Ticket._transfer

    def failing(ticket: Ticket, *args: Any) -> None:
        if ticket.direction == direction:
            raise RuntimeError("no such luck")
        move(ticket, *args)

    monkeypatch.setattr(Ticket, "_transfer", failing)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="no such luck"):
            pair.step(1, 1)
    monkeypatch.setattr(Ticket, "_transfer", move)
    with pytest.raises(RuntimeError, match="no such luck"):
        pair.step(1, 1)
    pair.clear()
    for tokens in (3, 1, 40):  # the last needs a larger window
        pair.step(2, tokens)
    pair.window.evict()
    pair.step(2, 1)


def test_clear_waits_for_what_is_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(4)
    pair.step(1, 5)
    move = Ticket._transfer
    running: list[str] = []

    def late(ticket: Ticket, *args: Any) -> None:
        running.append(ticket.direction)
        time.sleep(0.01)
        move(ticket, *args)
        running.remove(ticket.direction)

    monkeypatch.setattr(Ticket, "_transfer", late)
    pair.step(1, 1)
    tickets = [*pair.window._loads.values(), *pair.window._stores.values()]
    pair.clear()
    assert running == []
    assert all(ticket.done() for ticket in tickets)


def interrupt_load_ahead(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> list[Ticket]:
    """Ctrl-C comes when the load of the third layer into the first one's part has been submitted."""
    pair.step(2, 5)
    pair.window.update(pair.ids[0], *new_rows(2, 0))
    load = TransferEngine.load
    tickets: list[Ticket] = []

    def interrupted(engine: TransferEngine, *args: Any) -> None:
        tickets.append(load(engine, *args))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(TransferEngine, "load", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pair.window.update(pair.ids[1], *new_rows(2, 0))
    return tickets


def test_an_interrupted_load_leaves_no_wrong_layer_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(4)
    for ticket in interrupt_load_ahead(pair, monkeypatch):
        ticket.wait()
    pair.step(2, 0)
    pair.step(2, 1)


def test_an_interrupted_load_does_not_overwrite_what_comes_next(monkeypatch: pytest.MonkeyPatch) -> None:
    move = Ticket._transfer

    def late(ticket: Ticket, *args: Any) -> None:
        if ticket.direction == "load":
            time.sleep(0.2)
        move(ticket, *args)

    monkeypatch.setattr(Ticket, "_transfer", late)
    pair = Pair(4)
    tickets = interrupt_load_ahead(pair, monkeypatch)
    pair.clear()
    rows = new_rows(2, 5)
    got = pair.window.update(pair.ids[0], *rows)
    for ticket in tickets:
        ticket.wait()
    for plane, expected in zip(got, rows, strict=True):
        assert torch.equal(plane, expected)


def test_other_rows_may_come_when_there_was_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(2)

    def no_memory(*args: object, **options: object) -> None:
        raise MemoryError("no such luck")

    rows = new_rows(2, 3)
    with monkeypatch.context() as patch:
        patch.setattr(layer_window, "HostPool", no_memory)
        with pytest.raises(MemoryError, match="no such luck"):
            pair.window.update(3, *(plane.float() for plane in rows))
    halves = [plane.to(torch.bfloat16) for plane in rows]
    for plane, expected in zip(pair.window.update(3, *halves), halves, strict=True):
        assert torch.equal(plane, expected)


def test_selecting_from_none_and_selecting_none() -> None:
    pair = Pair(4)
    pair.window.select(torch.tensor([0, 0]))
    pair.step(2, 5)
    pair.select(torch.tensor([1, 0, 1]))
    pair.window.select(torch.tensor([], dtype=torch.int64))
    assert pair.window.num_sequences == pair.window.length(3) == 0
    pair.model = Model(pair.ids)
    pair.window.select(torch.tensor([1]))
    pair.step(3, 2)
    pair.step(3, 1)


def test_inference_mode_and_back() -> None:
    with torch.inference_mode():
        pair = Pair(4)
        pair.step(2, 5)
    with torch.no_grad():
        pair.step(2, 1)
    with torch.inference_mode():
        pair.step(2, 1)


def test_memory_goes_with_it() -> None:
    pair = Pair(4)
    pair.step(2, 5)
    pool = weakref.ref(pair.window._host_pool)
    for ticket in pair.window._stores.values():
        ticket.wait()
    del pair
    deadline = time.monotonic() + 10
    while pool() is not None and time.monotonic() < deadline:  # the last load ends in its thread
        time.sleep(0.01)
    assert pool() is None


def test_refusals() -> None:
    for max_tokens in (0, True, 2.0):
        with pytest.raises(
            ValueError, match=rf"\[Test\] max_tokens must be an integer of 1 or more, got {max_tokens}"
        ):
            LayerWindow("Test", [0, 1], max_tokens)  # type: ignore[arg-type]
    for layers in ([], [1, 1]):
        with pytest.raises(
            ValueError, match=r"\[Test\] layers must be one or more, and each must come once"
        ):
            LayerWindow("Test", layers, 10)
    with pytest.raises(ValueError, match=r"\[Test\] K and V must be of one sequence or more, got none"):
        Pair(2).window.update(3, *new_rows(0, 3))
    pair = Pair(2)
    keys, values = new_rows(2, 3)
    with pytest.raises(ValueError, match=r"\[Test\] K and V can't carry a gradient"):
        pair.window.update(3, keys.requires_grad_(), values)
    pair.step(2, 3)
    update = pair.window.update
    with pytest.raises(ValueError, match=r"the cache holds 2 sequences, got 3"):
        update(3, *new_rows(3, 1))
    with pytest.raises(
        ValueError, match=r"must be \[sequences, heads, tokens, width\].*got \[2, 3, 3, 8\]"
    ):
        update(3, keys.detach(), values[:, :, :1])
    with pytest.raises(
        ValueError, match=r"K \[3, 8\] float32 and V \[3, 5\] bfloat16, got K \[3, 8\] float"
    ):
        update(3, keys.detach(), values.float())
    with pytest.raises(ValueError, match=r"must be on cpu, got meta"):
        update(3, keys.detach().to("meta"), values.to("meta"))
    pair.step(2, 1)  # nothing has changed
