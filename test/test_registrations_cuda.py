"""Registrations with the CUDA runtime itself: pieces, existing memory, others' memory, captures."""

import gc

import pytest
import torch

from torch_hicache import device_view, empty_host, register_host
from torch_hicache.registrations import TABLE

pytestmark = pytest.mark.backend("cuda")
MIB = 1 << 20


def test_memory_in_pieces_is_one_for_kernels() -> None:
    host = empty_host(
        (64, 2 * MIB), torch.uint8, "cuda", piece_unit_bytes=2 * MIB, max_piece_bytes=10 * MIB
    )
    assert host.is_pinned()
    host.copy_(torch.arange(64, dtype=torch.uint8).view(64, 1).expand_as(host))
    device = torch.zeros(64, 2 * MIB, dtype=torch.uint8, device="cuda")
    order = torch.randperm(64)
    torch.ops.hicache.transfer_kv([device], [host], order.cuda(), order.cuda())
    assert torch.equal(device.cpu(), host)
    view = device_view(host, "cuda")
    torch.ops.hicache.transfer_kv([device], [view], order.flip(0).cuda(), order.cuda())
    assert torch.equal(device.cpu(), host[order][torch.argsort(order.flip(0))])


def test_existing_memory() -> None:
    memory = torch.arange(1 << 18).view(1 << 10, 256)
    device = torch.zeros(1 << 10, 256, dtype=torch.int64, device="cuda")
    slots = torch.arange(1 << 10)
    with pytest.raises(ValueError, match="pageable host memory"):
        torch.ops.hicache.transfer_kv([device], [memory], slots.cuda(), slots.cuda())
    with register_host(memory, "cuda") as handle:
        assert handle.is_ours
        assert memory.is_pinned()
        torch.ops.hicache.transfer_kv([device], [memory], slots.cuda(), slots.cuda())
    assert torch.equal(device.cpu(), memory)  # closing has waited for the transfer
    assert not memory.is_pinned()


def test_memory_of_torch_is_left_as_it_is() -> None:
    memory = torch.empty(1 << 20, dtype=torch.uint8).pin_memory()
    with register_host(memory, "cuda") as handle:
        assert not handle.is_ours
    assert memory.is_pinned()


def test_memory_dropped_while_a_stream_captures() -> None:
    """It can't be unregistered then, and must not be given to others while the device knows it."""
    hosts = [empty_host((4 * MIB,), torch.uint8, "cuda").fill_(i) for i in range(3)]
    counter, graph = torch.zeros(4, device="cuda"), torch.cuda.CUDAGraph()
    counter.add_(1)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        counter.add_(1)
        hosts.clear()
        gc.collect()
        counter.add_(1)
    assert len(TABLE._stranded) == 3
    graph.replay()
    assert counter.tolist() == [3.0] * 4
    device = torch.zeros(4 * MIB, dtype=torch.uint8, device="cuda")
    for i in range(8):
        host = empty_host((4 * MIB,), torch.uint8, "cuda").fill_(40 + i)
        at = torch.arange(4, device="cuda")
        torch.ops.hicache.transfer_kv([device.view(4, MIB)], [host.view(4, MIB)], at, at)
        assert bool((device == 40 + i).all())
    assert not TABLE._stranded


def test_a_refusal_leaves_no_pending_error() -> None:
    """Of memory that others registered in part."""
    memory = torch.empty(8 * MIB, dtype=torch.uint8)
    middle = memory[-memory.data_ptr() % MIB + MIB :][:MIB]
    cudart = torch.cuda.cudart()
    assert int(cudart.cudaHostRegister(middle.data_ptr(), MIB, 0)) == 0
    try:
        with pytest.raises(RuntimeError, match="cudaErrorHostMemoryAlreadyRegistered"):
            register_host(memory, "cuda")
        assert float(torch.ones(4, device="cuda").sum()) == 4.0  # would surface here
        with register_host(middle, "cuda") as handle:
            assert not handle.is_ours
        assert device_view(middle, "cuda").shape == middle.shape  # still registered
    finally:
        cudart.cudaHostUnregister(middle.data_ptr())
