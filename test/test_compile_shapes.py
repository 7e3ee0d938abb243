"""Compiled graphs of many sizes: few compiles, unbacked lengths, torch.export, AOTInductor."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compiling import assert_same, compare, copy_of, indices, pool
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import Dim

from torch_hicache import transfer_kv

ROW = 8
LAYERS = 3
LENGTHS = (0, 1, 2, 7, 64, 1000)


def load_layers(p: Tensor, q: Tensor, i: Tensor, j: Tensor) -> Tensor:
    kept = p[0, :4] * 2
    state = kept + 1
    for layer in range(LAYERS):
        transfer_kv([p[layer]], [q[layer]], i, j)
        state = state + p[layer, :4] * 2
    return state + kept


def _arguments(slots: int, length: int, device: str = "cpu") -> tuple[Any, ...]:
    p, q = (pool(LAYERS, slots, ROW, device=device) for _ in range(2))
    return p, q, indices(length, slots, device), indices(length, slots, device)


def _counted(
    function: Callable, dynamic: bool | None = None
) -> tuple[Callable, CompileCounterWithBackend]:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("inductor")
    return torch.compile(function, backend=counter, fullgraph=True, dynamic=dynamic), counter


def test_lengths(device: str) -> None:
    compiled, counter = _counted(load_layers)
    for length in LENGTHS:
        compare(load_layers, compiled, _arguments(1200, length, device), f"length {length}")
    assert counter.frame_count <= 3


def test_lengths_and_pool_sizes(device: str) -> None:
    compiled, counter = _counted(load_layers)
    for length in LENGTHS:
        for slots in (1200, 1500, 1040):
            args = _arguments(slots, length, device)
            sizes = compare(load_layers, compiled, args, f"{slots} slots, length {length}")
            assert max(sizes) < slots * ROW * 4
    assert counter.frame_count <= 4


def test_lengths_and_pool_sizes_in_the_other_order(device: str) -> None:
    """Torch specialises lengths 0 and 1. Met before the second pool size, they compile twice."""
    for dynamic, most in ((None, 6), (True, 3)):
        compiled, counter = _counted(load_layers, dynamic)
        for slots in (1200, 1500, 1040):
            for length in LENGTHS:
                args = _arguments(slots, length, device)
                compare(load_layers, compiled, args, f"{slots} slots, length {length}")
        assert counter.frame_count <= most


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_unbacked_lengths(device: str) -> None:
    def function(p: Tensor, q: Tensor, wanted: Tensor) -> Tensor:
        slots = wanted.nonzero().squeeze(1)
        kept = p[0, :4] * 2
        transfer_kv([p[0]], [q[0]], slots, slots)
        transfer_kv([p[1]], [q[1]], slots, wanted.logical_not().nonzero().squeeze(1)[: slots.shape[0]])
        return kept + p[0, :4]

    compiled, counter = _counted(function)
    for wanted in (0, 1, 5, 20):
        p, q, _, _ = _arguments(64, 1, device)
        mask = torch.zeros(64, dtype=torch.bool, device=device)
        mask[indices(wanted, 64, device)] = True
        compare(function, compiled, (p, q, mask), f"{wanted} slots")
    assert counter.frame_count == 1


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_unequal_unbacked_lengths_are_refused() -> None:
    def function(p: Tensor, q: Tensor, dst_mask: Tensor, src_mask: Tensor) -> Tensor:
        transfer_kv([p], [q], dst_mask.nonzero().squeeze(1), src_mask.nonzero().squeeze(1))
        return p[:4] * 2

    compiled, _ = _counted(function)
    every_third = torch.arange(18) % 3 == 0
    half_of_the_others = ~every_third & (torch.arange(18) < 9)
    compare(function, compiled, (pool(18, ROW), pool(18, ROW), every_third, half_of_the_others))
    with pytest.raises((RuntimeError, ValueError)):
        compiled(pool(18, ROW), pool(18, ROW), every_third, ~every_third)


def test_wrong_shapes_raise_the_text_of_eager() -> None:
    def function(p: Tensor, q: Tensor, i: Tensor) -> None:
        transfer_kv([p], [q], i, i)

    torch._dynamo.reset()
    with pytest.raises(Exception, match=r"\[transfer_kv\] dst\[0\] and src\[0\] must have the same row"):
        torch.compile(function, fullgraph=True)(pool(8, 4), pool(8, 5), indices(2, 8))


class LoadLayers(torch.nn.Module):
    def forward(self, p: Tensor, q: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return load_layers(p, q, i, j)


def _exported() -> torch.export.ExportedProgram:
    slots, length = Dim("slots", min=8), Dim("length", min=2)
    shapes = {"p": {1: slots}, "q": {1: slots}, "i": {0: length}, "j": {0: length}}
    return torch.export.export(LoadLayers(), _arguments(64, 9), dynamic_shapes=shapes)


def _compare_loaded(loaded: Callable) -> None:
    for slots, length in ((64, 9), (96, 5), (40, 20)):
        args = _arguments(slots, length)
        eager_args, loaded_args = copy_of(args), copy_of(args)
        expected, actual = load_layers(*eager_args), loaded(*loaded_args)
        assert_same((expected, eager_args), (actual, loaded_args), f"{slots} slots")


def test_export() -> None:
    program = _exported()
    targets = [node.target for node in program.graph.nodes]
    assert targets.count(torch.ops.hicache.transfer_kv.default) == LAYERS
    _compare_loaded(program.module())
    _compare_loaded(program.run_decompositions().module())


def test_aot_inductor(tmp_path: Path) -> None:
    """With reads that are pending at a transfer, and views of a pool whose size is symbolic."""
    with torch.no_grad():
        path = torch._inductor.aoti_compile_and_package(
            _exported(), package_path=str(tmp_path / "model.pt2")
        )
        _compare_loaded(torch._inductor.aoti_load_package(path))


def test_aot_inductor_keeps_a_clone_as_source(tmp_path: Path) -> None:
    class CloneAsSource(torch.nn.Module):
        def forward(self, p: Tensor, i: Tensor, j: Tensor) -> Tensor:
            transfer_kv([p], [p.clone()], i, j)
            return p[:4] * 2

    args = pool(32, ROW), indices(9, 32), indices(9, 32)
    with torch.no_grad():
        program = torch.export.export(CloneAsSource(), copy_of(args))
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "m.pt2"))
        compare(CloneAsSource(), torch._inductor.aoti_load_package(path), args)


def test_cpp_wrapper(device: str) -> None:
    torch._dynamo.reset()
    with torch._inductor.config.patch(cpp_wrapper=True):
        compiled = torch.compile(load_layers, fullgraph=True, dynamic=True)
        for slots in (64, 96):
            compare(load_layers, compiled, _arguments(slots, 9, device))
