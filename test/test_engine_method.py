"""TransferEngine(method=...): what its transfers ask transfer_kv for."""

from typing import Any

import pytest
import torch
from engine_fakes import Model, ints, make_pools

from torch_hicache import TransferEngine
from torch_hicache.ops import METHODS


def test_every_transfer_asks_for_the_method(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    op = torch.ops.hicache.transfer_kv

    def spy(*args: Any, method: str = "auto", **kwargs: Any) -> None:
        asked.append(method)
        op(*args, method=method, **kwargs)

    monkeypatch.setattr(torch.ops.hicache, "transfer_kv", spy)
    for method in ("auto", "kernel"):
        with TransferEngine(*make_pools(), method=method, group_bytes=1) as engine:
            asked.clear()
            engine.store(ints(3, 4), ints(30, 2)).wait()
            engine.load(ints(30), ints(7), layers="all").wait()
        assert asked == [method] * 5  # a store, and four layers


@pytest.mark.parametrize("method", METHODS)
def test_each_method_moves_the_slots_or_is_refused_at_once(method: str, device: str) -> None:
    pools = make_pools(device=device)
    refusal = ""
    if device == "cpu" and method in ("copy_engine", "staged"):
        refusal = f"method '{method}' needs an accelerator"
    elif device == "npu" and method == "staged":
        refusal = "method 'staged' is not built"
    if refusal:
        with pytest.raises(ValueError, match=refusal):
            TransferEngine(*pools, method=method)
        return
    model = Model(*pools)
    with TransferEngine(*pools, method=method) as engine:
        engine.store(ints(3, 4, 9), ints(30, 2, 31)).wait()
        model.store(ints(3, 4, 9), ints(30, 2, 31))
        engine.load(ints(2, 7), ints(11, 12), layers="all").wait()
        model.load(ints(2, 7), ints(11, 12))
    model.compare()


def test_a_method_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match=r"method must be 'auto', .* got 'magic'"):
        TransferEngine(*make_pools(), method="magic")
