"""Bad indices that only the device reads: recorded for their ticket. Device records are played here."""

from collections.abc import Callable, Iterator

import pytest
import torch
from engine_fakes import LAYERS, FakeRuntime, ints, make_pools

from torch_hicache import TransferEngine
from torch_hicache.error_scope import ErrorScope

D, H = ints(3, 4, 9), ints(30, 2, 31)


class Records:
    """The four ops of an accelerator's backend. `bad` are the records that a kernel has written to."""

    def __init__(self) -> None:
        self.live: set[int] = set()
        self.bad: set[int] = set()
        self.used: list[int] = []

    def new(self, _on_device: torch.Tensor) -> int:
        handle = len(self.live) + 1
        self.live.add(handle)
        return handle

    def use(self, _on_device: torch.Tensor, handle: int) -> None:
        assert handle == 0 or handle in self.live
        self.used.append(handle)

    def check(self, _on_device: torch.Tensor, handle: int) -> None:
        assert handle in self.live, "a record must not be read once it is given back"
        if handle in self.bad:
            raise IndexError("dst_indices[1] is 24, the limit is 24")

    def free(self, _on_device: torch.Tensor, handle: int) -> None:
        self.live.remove(handle)


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch) -> Records:
    records = Records()
    ops: dict[str, Callable] = {
        "new_error_record": records.new,
        "use_error_record": records.use,
        "check_error_record": records.check,
        "free_error_record": records.free,
    }
    for name, op in ops.items():
        monkeypatch.setattr(torch.ops.hicache, name, op, raising=False)
    return records


@pytest.fixture
def parts(
    records: Records, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[TransferEngine, FakeRuntime]]:
    """An engine that takes all indices for the device's."""
    on_device = torch.empty(0)
    monkeypatch.setattr("torch_hicache.engine.ErrorScope", lambda _: ErrorScope(on_device))
    runtime = FakeRuntime()
    engine = TransferEngine(*make_pools(), runtime=runtime, group_bytes=1)
    yield engine, runtime
    runtime.drain()
    engine.close()


def test_scope(records: Records) -> None:
    scope = ErrorScope(torch.empty(0))
    with scope:
        assert records.used == [1]
    assert records.used == [1, 0], "the thread's own work reports to the device again"
    assert scope.check() is None
    with pytest.raises(ZeroDivisionError), scope:
        _ = 1 / 0
    assert records.used[-1] == 0
    records.bad.add(1)
    error = scope.check()
    assert isinstance(error, IndexError)
    assert scope.close() is error
    assert not records.live
    assert scope.close() is error, "given back once"


def test_scope_of_indices_that_the_host_has_checked(records: Records) -> None:
    scope = ErrorScope(None)
    with scope:
        pass
    assert scope.check() is scope.close() is None
    assert not records.used
    assert not records.live


def test_a_bad_index_fails_its_ticket_in_every_layer(
    records: Records, parts: tuple[TransferEngine, FakeRuntime]
) -> None:
    engine, runtime = parts
    bad, good = engine.load(H, D, layers="all"), engine.store(ints(1), ints(1))
    runtime.run_ahead("compute")
    for _ in range(3):
        runtime.streams["load"].step()
    bad.wait_layer(LAYERS[0])  # nothing is known yet
    records.bad.add(1)
    with pytest.raises(IndexError, match="the limit is 24"):
        bad.wait_layer(LAYERS[0])
    runtime.drain()
    assert bad.done()
    with pytest.raises(IndexError):
        bad.wait()
    with pytest.raises(IndexError):
        bad.wait_stream()
    good.wait()
    assert good.error is None
    assert not records.live
    stats = engine.stats()
    assert (stats["load"]["errors"], stats["load"]["transfers"]) == (1, 0)
    assert (stats["store"]["errors"], stats["store"]["transfers"]) == (0, 1)


def test_a_bad_index_that_is_seen_at_the_end_only(
    records: Records, parts: tuple[TransferEngine, FakeRuntime]
) -> None:
    engine, runtime = parts
    ticket = engine.load(H, D)
    records.bad.add(1)
    runtime.drain()
    assert isinstance(ticket.error, IndexError)
    for _ in range(2):  # the newest load of the layer is not ready, whoever asks
        with pytest.raises(IndexError):
            torch.ops.hicache.wait_layer([], engine.handle, 8)
    assert engine.stats()["load"]["errors"] == 1
