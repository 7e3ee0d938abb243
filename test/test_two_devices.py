"""A second GPU: the tensors say which device works, not the current one, and errors stay apart."""

import pytest
import torch
from bad_calls import BAD_PAIRS, arguments, fake_text_of, text_of
from engine_fakes import Model, ints, make_pools

import torch_hicache
from torch_hicache import TransferEngine
from torch_hicache.testing import check_transfer, fill_pool, strided_tensor, unchanged

pytestmark = pytest.mark.backend("cuda:1")
transfer_kv = torch.ops.hicache.transfer_kv


def pools(device: str) -> tuple[torch.Tensor, torch.Tensor]:
    host = strided_tensor((3, 40, 72), torch.uint8, "pinned", device)
    pool = strided_tensor((3, 50, 72), torch.uint8, "device", device)
    fill_pool([host], 1)
    fill_pool([pool], 1, seed=1)
    return host, pool


@pytest.mark.parametrize("where", ["cpu", "cuda:1"])
@pytest.mark.parametrize("current", [0, 1])
def test_the_device_of_the_tensors_works(current: int, where: str) -> None:
    with torch.cuda.device(current):
        host, pool = pools("cuda:1")
        dst, src = torch.arange(30, device=where) + 7, torch.arange(30, device=where).flip(0)
        check_transfer([pool], [host], dst, src, slot_dim=1)
        check_transfer([host], [pool], src, dst, slot_dim=1)
        assert torch.cuda.current_device() == current


def test_the_current_stream_of_that_device_orders_the_work() -> None:
    host, pool = pools("cuda:1")
    at = torch.arange(40, device="cuda:1")
    stream = torch.cuda.Stream("cuda:1")
    torch.cuda.synchronize("cuda:1")
    with torch.cuda.device(1), torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)
        pool.fill_(7)
    with torch.cuda.stream(stream):
        torch.cuda.set_device(0)  # the stream of cuda:1 stays current there
        transfer_kv([host], [pool], at, at, slot_dim=1)
    stream.synchronize()
    assert bool((host == 7).all())


def test_memory_of_one_device_serves_the_other() -> None:
    """Page-locked memory is portable."""
    host, _ = pools("cuda:0")
    _, pool = pools("cuda:1")
    check_transfer([pool], [host], torch.arange(5, device="cuda:1"), torch.arange(5), slot_dim=1)


def test_errors_stay_with_their_device() -> None:
    host, pool = pools("cuda:1")
    bad = torch.tensor([1, 50], device="cuda:1")
    transfer_kv([pool], [host], bad, torch.tensor([1, 2], device="cuda:1"), slot_dim=1)
    torch.cuda.synchronize("cuda:1")
    torch_hicache.check_errors("cuda:0")
    other_host, other_pool = pools("cuda:0")
    at = torch.tensor([3], device="cuda:0")
    check_transfer([other_pool], [other_host], at, at, slot_dim=1)
    with pytest.raises(IndexError, match=r"on cuda:1: dst_indices\[1\] is 50"):
        torch_hicache.check_errors("cuda:1")


@pytest.mark.parametrize("name", BAD_PAIRS)
def test_two_accelerators_in_one_call_are_refused(name: str) -> None:
    call = arguments("cuda:0", BAD_PAIRS[name]("cuda:0"))
    with unchanged(call["dst"]):
        text = text_of(call)
    assert text.startswith("ValueError: [transfer_kv] "), text
    assert fake_text_of(BAD_PAIRS[name], "cuda:0") == text


def test_an_engine_of_another_device_than_the_current() -> None:
    engine_pools = make_pools(device="cuda:1")
    model = Model(*engine_pools)
    slots, host_slots = ints(3, 4, 9), ints(30, 2, 31)
    assert torch.cuda.current_device() == 0
    with TransferEngine(*engine_pools) as engine:
        for at in (lambda t: t, lambda t: t.to("cuda:1")):
            engine.store(at(slots), at(host_slots)).wait()
            engine.load(at(host_slots), at(ints(1, 2, 5)), layers="all").wait()
    assert torch.cuda.current_device() == 0
    model.store(slots, host_slots)
    model.load(host_slots, ints(1, 2, 5))
    torch.cuda.synchronize(1)
    model.compare()
