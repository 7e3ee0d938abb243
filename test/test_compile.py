"""Compiled graphs: the results and pools of eager, and no allocation of a pool's size.

Every pattern runs with three pool sizes through one compiled function. Reads between transfers are
slices and reductions, so that whatever is as large as one plane is a copy of it.
"""

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from compiling import (
    LAYERS,
    ROW,
    SLOTS,
    allocations,
    assert_same,
    compare,
    copy_of,
    indices,
    pool,
    two_pools,
    two_stacks,
)
from torch import Tensor

from torch_hicache import transfer_kv

PATTERNS: dict[str, tuple[Callable, Callable[[int, str], tuple[Any, ...]]]] = {}


def pattern(make: Callable[[int, str], tuple[Any, ...]]) -> Callable:
    def register(function: Callable) -> Callable:
        PATTERNS[function.__name__] = (function, make)
        return function

    return register


def _pool_and_list(slots: int, device: str) -> tuple[Any, ...]:
    p, _, i, j = two_pools(slots, device)
    return p, [pool(slots, ROW, device=device) for _ in range(LAYERS)], i, j


def _two_lists(slots: int, device: str) -> tuple[Any, ...]:
    _, sources, i, j = _pool_and_list(slots, device)
    return [pool(slots, ROW, device=device) for _ in range(LAYERS)], sources, i, j


@pattern(two_pools)
def one_transfer(p: Tensor, q: Tensor, i: Tensor, j: Tensor) -> Tensor:
    transfer_kv([p], [q], i, j)
    return p.sum(0)


@pattern(two_pools)
def nothing_is_returned(p: Tensor, q: Tensor, i: Tensor, j: Tensor) -> None:
    transfer_kv([p], [q], i, j)


@pattern(_pool_and_list)
def reads_between_transfers(p: Tensor, qs: list[Tensor], i: Tensor, j: Tensor) -> Tensor:
    total = p.new_zeros(p.shape[0])
    for q in qs:
        total = total + p.sum(1)
        transfer_kv([p], [q], i, j)
        total = total + p.amax(1)
    return total


@pattern(two_pools)
def lazy_read_kept_over_a_transfer(p: Tensor, q: Tensor, i: Tensor, j: Tensor) -> Tensor:
    kept = p[:7] * 2
    transfer_kv([p], [q], i, j)
    return kept.sum(1)


@pattern(two_pools)
def lazy_read_used_before_and_after(p: Tensor, q: Tensor, i: Tensor, j: Tensor) -> Any:
    kept = p[:7] * 2
    before = kept.sum()
    transfer_kv([p], [q], i, j)
    return before, kept + 1, kept.sum(1), p[:7] * 3


@pattern(_pool_and_list)
def lazy_reads_kept_over_several(p: Tensor, qs: list[Tensor], i: Tensor, j: Tensor) -> Any:
    kept = []
    for q in qs:
        kept.append(p[3:9].relu() + 1)
        transfer_kv([p], [q], i, j)
    return [a - b for a, b in pairwise(kept)], p[3:9] * 2


@pattern(two_pools)
def lazy_read_of_the_source(p: Tensor, q: Tensor, i: Tensor, j: Tensor) -> Any:
    kept = q[:5] - 1
    transfer_kv([p], [q], i, j)
    transfer_kv([q], [p], i, j)
    return kept * q[:5]


@pattern(_pool_and_list)
def one_buffer_loaded_again_and_again(p: Tensor, qs: list[Tensor], i: Tensor, j: Tensor) -> Any:
    parts = []
    for q in qs:
        transfer_kv([p], [q], i, j)
        parts.append(p[i] * 2)
    return sum(parts)


@pattern(two_stacks)
def layers_of_a_stack(p: Tensor, q: Tensor, i: Tensor, j: Tensor) -> Tensor:
    state = p[0, :4] * 1.0
    for layer in range(LAYERS):
        transfer_kv([p[layer]], [q[layer]], i, j)
        state = state.amax(0) + p[layer, :4] * 2
    return state


@pattern(two_stacks)
def layers_ahead_of_their_use(p: Tensor, q: Tensor, i: Tensor, j: Tensor) -> Tensor:
    transfer_kv([p[0]], [q[0]], i, j)
    state = p[0, :4] * 0
    for layer in range(LAYERS):
        if layer + 1 < LAYERS:
            transfer_kv([p[layer + 1]], [q[layer + 1]], i, j)
        state = state + p[layer, :4] * 2
    return state


@pattern(two_stacks)
def layer_to_layer(p: Tensor, q: Tensor, i: Tensor, j: Tensor) -> Tensor:
    kept = p[1, :4] * 2
    transfer_kv([p[0], p[2]], [p[1], q[0]], i, j)
    return kept + p[0, :4]


@pattern(two_stacks)
def stack_in_one_call(p: Tensor, q: Tensor, i: Tensor, j: Tensor) -> Tensor:
    kept = p[1, :3] * 2
    transfer_kv([p], [q], i, j, slot_dim=1)
    return kept + p[1, :3]


@pattern(_two_lists)
def list_of_layers(ps: list[Tensor], qs: list[Tensor], i: Tensor, j: Tensor) -> Tensor:
    state = ps[0][:4] * 1.0
    for p, q in zip(ps, qs, strict=True):
        kept = p[:4] + 1
        transfer_kv([p], [q], i, j)
        state = state + p[:4] * 2 + kept
    return state


@pattern(_two_lists)
def list_of_layers_in_one_call(ps: list[Tensor], qs: list[Tensor], i: Tensor, j: Tensor) -> Any:
    kept = [p[:2] * 2 for p in ps]
    transfer_kv(ps, qs, i, j)
    return [k - p[:2] for k, p in zip(kept, ps, strict=True)], ps[0].sum(0)


def _halves(slots: int, device: str) -> tuple[Any, ...]:
    return pool(2, LAYERS, slots, ROW, device=device), *two_stacks(slots, device)


@pattern(_halves)
def keys_and_values_of_one_base(kv: Tensor, ks: Tensor, vs: Tensor, i: Tensor, j: Tensor) -> Any:
    state = []
    for layer in range(LAYERS):
        kept = kv[1, layer, :3] * 2
        transfer_kv([kv[0, layer], kv[1, layer]], [ks[layer], vs[layer]], i, j)
        state.append((kv[0, layer, :3] + kept) * kv[1, layer, :3])
    return state


@pattern(two_pools)
def layers_as_slices_of_one_base(p: Tensor, q: Tensor, i: Tensor, j: Tensor) -> Tensor:
    half = p.shape[0] // 2
    lower, upper = p[:half], p[half:]
    i = i % half
    kept = upper[:3] * 2
    transfer_kv([upper], [q], i[:1], j[:1])
    transfer_kv([lower], [upper], i[:1], i[:1])
    return kept + lower[:3]


def _strided(slots: int, device: str) -> tuple[Any, ...]:
    padded = pool(slots, ROW + 3, device=device)
    permuted = pool(2, slots, ROW // 2, device=device)
    p, q, i, j = two_pools(slots, device)
    return padded, permuted, [p, q], i, j


@pattern(_strided)
def permuted_and_padded_views(
    padded: Tensor, permuted: Tensor, pq: list[Tensor], i: Tensor, j: Tensor
) -> Any:
    p, q = pq
    row = padded[:, 1 : 1 + ROW]
    heads = permuted.transpose(0, 1)
    kept = row[:3] * 2, heads[:3] * 2
    transfer_kv([row], [p], i, j)
    transfer_kv([heads], [q.view(-1, 2, ROW // 2)], i, j)
    return kept[0] - row[:3], (kept[1] - heads[:3]).sum(0), heads.sum(0)


@pattern(_pool_and_list)
def load_then_store(p: Tensor, qs: list[Tensor], i: Tensor, j: Tensor) -> Tensor:
    old = p[:4] + 1, qs[1][:4] + 1
    transfer_kv([p], [qs[0]], i, j)
    kept = p[:4] * 2
    transfer_kv([qs[1]], [p], j, i)
    return kept + qs[1][:4] - old[0] * old[1]


@pattern(_pool_and_list)
def store_then_overwrite(p: Tensor, qs: list[Tensor], i: Tensor, j: Tensor) -> Tensor:
    transfer_kv([qs[0]], [p], j, i)
    kept = qs[0][:4] * 2 + p[:4]
    transfer_kv([p], [qs[1]], i, j)
    p[i[:2]] = 5
    transfer_kv([qs[0]], [p], i, i)
    return kept + p[:4]


@pattern(_two_lists)
def written_by_aten_between(ps: list[Tensor], qs: list[Tensor], i: Tensor, j: Tensor) -> Tensor:
    state = ps[0][:4] * 2
    for p, q in zip(ps, qs, strict=True):
        transfer_kv([p], [q], i, j)
        kept = p[:4] * 3
        p.index_put_((i[:2],), torch.full_like(p[:2], 7))
        transfer_kv([q], [p], i, i)
        state = state + kept + p[:4] + q[:4]
    return state


@pattern(two_stacks)
def matrix_product_over_a_transfer(p: Tensor, q: Tensor, i: Tensor, j: Tensor) -> Tensor:
    # A pattern of inductor's joins product and sum (addmm), here from both sides of a transfer.
    product = p[0, :4] @ p[0, :ROW].T
    transfer_kv([p[0]], [q[0]], i, j)
    return product + p[1, :4, :1]


@pattern(two_stacks)
def attention_over_a_transfer(p: Tensor, q: Tensor, i: Tensor, j: Tensor) -> Tensor:
    keys, values = p[0, :4].view(1, 4, ROW), p[1, :4].view(1, 4, ROW)
    scores = (q[0, :2].view(1, 2, ROW) @ keys.transpose(1, 2)).sign()
    transfer_kv([p[0]], [q[0]], i, j)
    out = scores @ values
    transfer_kv([p[1]], [q[1]], i, j)
    return out


def _attention(slots: int, device: str) -> tuple[Any, ...]:
    kv, host = (pool(2, slots, 4, 16, device=device) for _ in range(2))
    query = pool(1, 4, 3, 16, device=device)
    return kv, host, query, indices(9, slots, device), indices(9, slots, device)


def test_attention_pattern_over_a_transfer(device: str) -> None:
    """Inductor replaces attention by a fused op behind its last part, where the keys have changed."""

    def function(kv: Tensor, host: Tensor, query: Tensor, i: Tensor, j: Tensor) -> Tensor:
        keys, values = (plane.unsqueeze(0).transpose(1, 2) for plane in kv)
        weights = (query @ keys.transpose(-2, -1)).div(4.0).softmax(-1)
        transfer_kv([kv[0]], [host[0]], i, j)
        return weights @ values

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True)
    with torch.no_grad():
        for slots in SLOTS[:2]:
            args = _attention(slots, device)
            eager_args, compiled_args = copy_of(args), copy_of(args)
            expected = function(*eager_args)
            with allocations() as sizes:
                actual = compiled(*compiled_args)
            # The fused op adds in another order; keys from behind the transfer are off by far more.
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
            assert_same(eager_args, compiled_args, f"{slots} slots")
            assert max(sizes) < slots * 4 * 16 * 4


def _with_count(slots: int, device: str) -> tuple[Any, ...]:
    p, q, i, j = two_pools(slots, device)
    return p, q, i.int(), j, torch.tensor([4], device=device)


@pattern(_with_count)
def count_and_narrow_indices(p: Tensor, q: Tensor, i: Tensor, j: Tensor, count: Tensor) -> Tensor:
    kept = p[:6] * 2
    transfer_kv([p], [q], torch.where(i % 2 == 0, i, -1), j, count=count)
    return kept + p[:6]


@pattern(two_pools)
def half_precision_and_bytes(p: Tensor, q: Tensor, i: Tensor, j: Tensor) -> Any:
    fresh = torch.zeros(4, ROW, dtype=torch.bfloat16, device=p.device)
    transfer_kv([fresh], [q[:9].bfloat16()], torch.arange(4, device=i.device), i[:4] % 9)
    kept = fresh + 1
    transfer_kv([fresh.view(torch.uint8)], [q[:9].bfloat16().view(torch.uint8)], i[:1] % 4, j[:1] % 9)
    return kept, fresh * 2


@pytest.mark.parametrize("name", PATTERNS)
def test_pattern(name: str, device: str) -> None:
    function, make = PATTERNS[name]
    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True)
    for slots in SLOTS:
        sizes = compare(function, compiled, make(slots, device), f"{name}, {slots} slots")
        assert max(sizes, default=0) < slots * ROW * 4, f"{slots} slots: a copy of a plane: {sizes}"


# --- Where a pool comes from, and in which mode ---------------------------------------------------


class _Cache(torch.nn.Module):
    def __init__(self, slots: int, device: str) -> None:
        super().__init__()
        self.register_buffer("pool", pool(LAYERS, slots, ROW, device=device))

    def forward(self, q: Tensor, i: Tensor, j: Tensor) -> Tensor:
        state = self.pool[0, :4] * 2
        for layer in range(LAYERS):
            transfer_kv([self.pool[layer]], [q[layer]], i, j)
            state = state + self.pool[layer, :4] * 3
        return state


@pytest.mark.parametrize("place", ["buffer", "closure"])
def test_pool_that_is_no_argument(place: str, device: str) -> None:
    torch._dynamo.reset()
    module = _Cache(64, device)
    held = module.pool

    def function(q: Tensor, i: Tensor, j: Tensor) -> Tensor:
        kept = held[0, :4] * 2
        transfer_kv([held[1]], [q[1]], i, j)
        return kept + held[1, :4]

    target = module if place == "buffer" else function
    compiled = torch.compile(target, fullgraph=True)
    for length in (9, 5):
        args = (
            pool(LAYERS, 64, ROW, device=device),
            *(indices(length, 64, device) for _ in range(2)),
        )
        before = held.clone()
        expected, after = target(*args), held.clone()
        held.copy_(before)
        sizes = compare(lambda *_, value=expected: value, compiled, args)
        assert torch.equal(held, after)
        assert max(sizes) < 64 * ROW * 4


MODES = {
    "grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}


@pytest.mark.parametrize("mode", MODES)
def test_modes(mode: str, device: str) -> None:
    torch._dynamo.reset()
    with MODES[mode]():
        compiled = torch.compile(layers_of_a_stack, fullgraph=True)
        sizes = compare(layers_of_a_stack, compiled, two_stacks(64, device))
        assert max(sizes) < 64 * ROW * 4


def test_autograd_elsewhere(device: str) -> None:
    """Pools have no gradient; weights that their rows are multiplied with have."""

    def function(p: Tensor, q: Tensor, i: Tensor, j: Tensor, weight: Tensor) -> Tensor:
        state = weight[0] * 1
        for layer in range(LAYERS):
            kept = p[layer, :4] * 2
            transfer_kv([p[layer]], [q[layer]], i, j)
            state = state + (p[layer, :4] + kept) @ weight
        return state.sum()

    def with_gradient(run: Callable) -> Callable:
        def step(p: Tensor, q: Tensor, i: Tensor, j: Tensor, weight: Tensor) -> Any:
            weight = weight.detach().clone().requires_grad_()
            loss = run(p, q, i, j, weight)
            loss.backward()
            return loss.detach(), weight.grad

        return step

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True)
    for slots in SLOTS:
        args = *two_stacks(slots, device), pool(ROW, ROW, device=device)
        sizes = compare(with_gradient(function), with_gradient(compiled), args)
        assert max(sizes) < slots * ROW * 4


# --- Memory ---------------------------------------------------------------------------------------


def _peak_bytes(run: Callable[[], object], device: str) -> int:
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as profile:
        run()
    live = peak = 0
    events = profile.profiler.kineto_results.events()
    for event in sorted(events, key=lambda e: e.start_ns()):
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak


def test_peak_memory(device: str) -> None:
    """At most 1 % of the pool over eager, for a layer-wise load with lazy reads in between."""

    def function(p: Tensor, q: Tensor, i: Tensor, j: Tensor) -> Tensor:
        state = p[0, :4] * 1.0
        for layer in range(8):
            kept = p[layer, :4] * 2
            transfer_kv([p[layer]], [q[layer]], i, j)
            state = state + p[layer, :4] + kept
        return state

    torch._dynamo.reset()
    slots = 20_000
    p, q = pool(8, slots, ROW, device=device), pool(8, slots, ROW, device=device)
    i, j = indices(100, slots, device), indices(100, slots, device)
    compiled = torch.compile(function, fullgraph=True)
    compiled(p, q, i, j)
    pool_bytes = p.numel() * p.element_size()
    # The measure sees a copy of the pool.
    assert _peak_bytes(p.clone, device) >= pool_bytes
    over = _peak_bytes(lambda: compiled(p, q, i, j), device) - _peak_bytes(
        lambda: function(p, q, i, j), device
    )
    print(f"peak memory over eager: {over} bytes, {over / pool_bytes:.4%} of the pool")
    assert over < math.ceil(pool_bytes / 100)
