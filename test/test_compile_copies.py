"""Compiled graphs in which the program copies a pool: a copy that differs later is kept."""

from typing import Any

import pytest
import torch
from compiling import LAYERS, ROW, SLOTS, compare, indices, two_pools, two_stacks
from torch import Tensor

from torch_hicache import transfer_kv


def _cat(p: Tensor) -> Tensor:
    return torch.cat([p[:5], p[5:]])


COPIES = {
    "clone": lambda p: p.clone(),
    "clone of a clone": lambda p: p.clone().clone(),
    "to": lambda p: p.to(p.dtype, copy=True),
    "times one": lambda p: p * 1,
    "times ones": lambda p: p * torch.ones_like(p),
    "plus zeros": lambda p: p + torch.zeros_like(p),
    "cat": _cat,
    "slice of a clone": lambda p: p.clone()[:],
    "gather": lambda p: p[torch.arange(p.shape[0], device=p.device)],
}


@pytest.mark.parametrize("copy", COPIES)
def test_copy_as_source_is_kept(copy: str, device: str) -> None:
    def function(p: Tensor, q: Tensor, i: Tensor, j: Tensor) -> Any:
        kept = p[:5] * 2
        transfer_kv([p, q], [COPIES[copy](p), p.clone()], i, j)
        return kept + p[:5]

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True)
    for slots in SLOTS[:2]:
        sizes = compare(function, compiled, two_pools(slots, device), f"{copy}, {slots} slots")
        assert sum(size >= slots * ROW * 4 for size in sizes) <= 2, "more copies than were asked for"


def test_copies_elsewhere_are_kept(device: str) -> None:
    def function(p: Tensor, q: Tensor, i: Tensor, j: Tensor) -> Any:
        old = p.clone()
        fresh = q * 2
        copy = fresh.clone()
        transfer_kv([copy], [fresh], i, j)  # a clone as destination
        transfer_kv([p], [q], i, j)
        transfer_kv([q], [old], i, j)  # old contents of a pool that was written since
        transfer_kv([p], [copy], p[:9, 0].clone().abs().long() % 9 * 0 + i, i)
        return copy, old

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True)
    for slots in SLOTS[:2]:
        compare(function, compiled, two_pools(slots, device), f"{slots} slots")


def test_old_contents_cost_no_more_than_their_copy(device: str) -> None:
    """Inductor drops the clone of one layer, and would then copy the stack to keep its old contents."""

    def function(p: Tensor, q: Tensor, i: Tensor, j: Tensor) -> Any:
        old = p[1].clone()
        transfer_kv([q[0]], [old], j, i)
        transfer_kv([p[1]], [q[1]], i, j)
        return (old - p[1]).sum(1)

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True)
    for slots in SLOTS[:2]:
        sizes = compare(function, compiled, two_stacks(slots, device), f"{slots} slots")
        assert max(sizes) <= slots * ROW * 4


def test_destination_whose_copy_inductor_drops(device: str) -> None:
    """It then takes the layer, which lies elsewhere in its storage than the copy did."""

    def function(p: Tensor, q: Tensor, i: Tensor, j: Tensor) -> None:
        q.copy_(p[1])
        transfer_kv([q], [q + torch.zeros_like(q)], i, j)
        q.add_(1)

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True)
    for slots in SLOTS[:2]:
        p, q, i, j = two_stacks(slots, device)
        compare(function, compiled, (p, q[0].clone(), i, j), f"{slots} slots")


def test_destination_that_copies_a_part_of_what_was_computed(device: str) -> None:
    """Inductor takes the part itself, which no input holds and which begins inside its storage.

    With dynamic sizes the offset of the written layer is then the one in that storage.
    """

    def function(p: Tensor, q: Tensor, i: Tensor, j: Tensor) -> Any:
        layer = q.shape[1] * q.shape[2]
        second = q.reshape(-1)[layer : 2 * layer].sum()
        copy = torch.cat([q, q])[2:4].clone()
        transfer_kv([copy[1]], [p[0]], i, j)
        return copy, second

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True)
    for slots in SLOTS[:2]:
        compare(function, compiled, two_stacks(slots, device), f"{slots} slots")


def test_stack_inside_its_storage_that_aten_writes(device: str) -> None:
    """What inductor makes of the stack begins where its memory does, unlike the stack."""

    def function(p: Tensor, q: Tensor, i: Tensor, j: Tensor) -> None:
        q[2].copy_(q[1])
        transfer_kv([q[2][1:], q[0]], [p[0][1:], p[1]], i, j)

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True)
    for slots in SLOTS[:2]:
        both = [torch.cat([stack, stack])[LAYERS:] for stack in two_stacks(slots, device)[:2]]
        at = (indices(9, slots - 1, device) for _ in range(2))
        compare(function, compiled, (*both, *at), f"{slots} slots")


@pytest.mark.parametrize("then", ["nothing", "transfer", "aten"])
def test_written_copy_of_a_pool_that_was_written(then: str, device: str) -> None:
    """Inductor drops the copy; what is written into it must not reach the pool, nor the other way."""

    def function(p: Tensor, q: Tensor, i: Tensor, j: Tensor) -> Tensor:
        transfer_kv([p.T], [q.T], i % ROW, j % ROW)
        copy = p.T.clone()
        transfer_kv([copy], [q.T], j[:3] % ROW, i[:3] % ROW)
        if then == "transfer":
            transfer_kv([p.T], [q.T], j[3:6] % ROW, i[3:6] % ROW)
        elif then == "aten":
            p[i[:2]] = 5
        return copy

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True)
    for slots in SLOTS[:2]:
        p, q, _, _ = two_pools(slots, device)
        i, j = indices(ROW, ROW, device), indices(ROW, ROW, device)
        compare(function, compiled, (p, q, i, j), f"{slots} slots")


@pytest.mark.parametrize("then", ["both", "overwritten", "computed", "returned"])
def test_copy_of_a_pool_into_another(then: str, device: str) -> None:
    """Inductor drops the copy into `q`. What is written there must not end in `p`, nor be lost."""

    def function(p: Tensor, q: Tensor, i: Tensor, j: Tensor) -> Any:
        source = p.abs() + 31
        if then == "returned":
            copy = p.clone()
            transfer_kv([copy], [source], i, j)
            p.copy_(copy * 2)
            return copy
        q.copy_(p)
        if then == "both":
            transfer_kv([q, p], [source, source + 1], i, j)
            return p[:3] * 2
        transfer_kv([q], [source], i, j)
        p.copy_(source if then == "overwritten" else q * 2)
        return p[:3] * 2

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True)
    for slots in SLOTS[:2]:
        compare(function, compiled, two_pools(slots, device), f"{slots} slots")


def test_indices_that_were_cloned_from_the_written_pool(device: str) -> None:
    def function(p: Tensor, q: Tensor) -> Tensor:
        transfer_kv([p], [q], p[:5].clone(), p[5:10].clone())
        return p * 2

    torch._dynamo.reset()
    p = torch.randperm(16).to(device)
    compare(function, torch.compile(function, fullgraph=True), (p, torch.randperm(16).to(device)))


def test_a_write_that_nobody_reads_takes_no_order_with_it(device: str) -> None:
    """Inductor drops the first of two writes; the second then overtakes a clone of what it overwrites."""

    def function(p: Tensor, q: Tensor, i: Tensor, j: Tensor, *more: Tensor) -> None:
        other, new = more
        transfer_kv([p], [new], i, j)
        transfer_kv([other], [other.clone()], j, i)
        transfer_kv([q], [p], i, j)
        p[i[:2]] = 7
        p.copy_(new)

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True)
    with torch.no_grad():
        for slots in SLOTS[:2]:
            args = *two_pools(slots, device), *two_pools(slots, device)[:2]
            compare(function, compiled, args, f"{slots} slots")


def test_a_copy_behind_a_write_is_kept(device: str) -> None:
    """Inductor writes in place, and takes the pool for the copy, although a transfer changes it later."""

    def function(p: Tensor, q: Tensor, i: Tensor, j: Tensor) -> Any:
        p[i[:2]] = 7
        kept = p[:5].clone()
        transfer_kv([p], [q], i, j)
        return kept

    torch._dynamo.reset()
    compiled = torch.compile(function, fullgraph=True)
    for slots in SLOTS[:2]:
        sizes = compare(function, compiled, two_pools(slots, device), f"{slots} slots")
        assert max(sizes) < slots * ROW * 4
