"""What "auto" chooses, and why; which method refuses a call. No device is needed for any of it."""

import json

import expecttest
import pytest
import torch
from torch import Tensor

from torch_hicache.plan import MethodTable, Plan, explain

POOLS = {  # [layers, slots, row] of bytes, as views; rows of 1 KiB
    "layer_first": lambda slots: torch.empty(4, slots, 1024, dtype=torch.uint8),
    "page_first": lambda slots: torch.empty(slots, 4, 1024, dtype=torch.uint8).transpose(0, 1),
}


def plan(
    direction: str,
    host_slots: Tensor,
    device_slots: Tensor,
    *,
    layout: str = "layer_first",
    host_indices_on_device: bool = False,
    device_indices_on_device: bool = False,
    method: str = "auto",
    capturing: bool = False,
    pageable: bool = False,
    table: MethodTable | None = None,
) -> Plan:
    """The plan for a host pool of 16,384 slots in `layout` and a layer_first device pool."""
    host, device = POOLS[layout](16384), POOLS["layer_first"](16384)
    sides = [(device, device_slots, True, device_indices_on_device)]
    sides.append((host, host_slots, False, host_indices_on_device))
    dst, src = sides if direction == "load" else sides[::-1]
    text = torch.ops.hicache.explain_as_if(
        [dst[0]],
        [src[0]],
        dst[1],
        src[1],
        slot_dim=1,
        method=method,
        on_device=[dst[2], src[2], dst[3], src[3]],
        capturing=capturing,
        pageable=pageable,
        table=(table or MethodTable()).values(),
    )
    return Plan(**json.loads(text))


RUN = torch.arange(8192)
SCATTERED = torch.arange(8192) * 2
PAGES = (
    torch.randperm(128, generator=torch.Generator().manual_seed(0)).unsqueeze(1) * 64 + torch.arange(64)
).flatten()


@pytest.mark.parametrize("direction", ["load", "store"])
def test_long_runs_on_both_sides_are_the_copy_engines(direction: str) -> None:
    for slots in (RUN, RUN.flip(0)):
        found = plan(direction, slots, slots + 100)
        assert found == Plan("copy_engine", 1, 4, 1, 8192 * 4096, found.reason)
        assert "rows of 8388608 bytes on both sides" in found.reason


@pytest.mark.parametrize("direction", ["load", "store"])
def test_runs_in_the_host_pool_alone_are_staged(direction: str) -> None:
    for on_device in (False, True):
        found = plan(direction, RUN, SCATTERED, device_indices_on_device=on_device)
        assert found == Plan("staged", 1, 4, 1, 8192 * 4096, found.reason)
    found = plan(direction, PAGES, SCATTERED, layout="page_first")  # a page is 256 KiB there
    assert found == Plan("staged", 1, 1, 1, 8192 * 4096, found.reason)
    pages = PAGES + PAGES // 64  # with gaps between them
    found = plan(direction, pages, SCATTERED, layout="page_first")
    assert found == Plan("staged", 128, 128, 1, 8192 * 4096, found.reason)


@pytest.mark.parametrize("direction", ["load", "store"])
def test_a_kernel_serves_the_rest(direction: str) -> None:
    for found, reason in (
        (plan(direction, SCATTERED, RUN), "rows of 1024 bytes in the host pool: too small"),
        (plan(direction, RUN[:64], RUN[:64]), "small: 262144 bytes"),
        (
            plan(direction, RUN, RUN, host_indices_on_device=True, device_indices_on_device=True),
            "is on the device",
        ),
        (plan(direction, RUN, RUN, host_indices_on_device=True), "is on the device"),
        (
            plan(
                direction,
                RUN,
                RUN,
                capturing=True,
                host_indices_on_device=True,
                device_indices_on_device=True,
            ),
            "only a kernel can be captured",
        ),
    ):
        assert found.method == "kernel"
        assert reason in found.reason


def test_pageable_memory_is_left_to_the_copy_engine() -> None:
    assert plan("load", SCATTERED, RUN, pageable=True).method == "copy_engine"
    assert plan("load", RUN[:1], RUN[:1], pageable=True).method == "copy_engine"
    assert plan("store", SCATTERED, RUN, pageable=True, device_indices_on_device=True).method == "staged"
    with pytest.raises(
        ValueError, match=r"src\[0\] is pageable host memory, which a kernel can't reach; allocate it"
    ):
        plan("load", RUN, RUN, pageable=True, host_indices_on_device=True)


def test_the_table_decides() -> None:
    eager = MethodTable(copy_engine_min_row_bytes=(1024, 1 << 40), min_bytes=0)
    assert plan("load", SCATTERED, SCATTERED, table=eager).method == "copy_engine"
    assert plan("load", SCATTERED[:1], SCATTERED[:1], table=eager).method == "copy_engine"
    assert plan("store", SCATTERED, SCATTERED, table=eager).method == "kernel"
    small = MethodTable(staging_bytes=1 << 20)
    assert plan("load", RUN, SCATTERED, table=small).batches == 32


def test_padding_is_not_counted() -> None:
    slots = RUN.clone()
    slots[100:200] = -1
    found = plan("load", slots, RUN, method="copy_engine")
    assert (found.runs, found.bytes) == (2, 8092 * 4096)
    assert plan("load", slots, RUN, method="staged").bytes == 8092 * 4096


def test_strided_rows_and_batches_are_counted() -> None:
    found = plan("store", SCATTERED, SCATTERED, method="copy_engine")
    assert (found.runs, found.rows, found.batches) == (8192, 4 * 8192, 8)


class Texts(expecttest.TestCase):
    def refusal(self, **call: object) -> str:
        try:
            return str(plan("load", RUN, RUN, **call))  # type: ignore[arg-type]
        except ValueError as error:
            return str(error)

    def test_refusals(self) -> None:
        both = {"host_indices_on_device": True, "device_indices_on_device": True}
        lines = [
            self.refusal(method="copy_engine", host_indices_on_device=True),
            self.refusal(method="copy_engine", device_indices_on_device=True),
            self.refusal(method="staged", host_indices_on_device=True),
            self.refusal(method="kernel", pageable=True),
            self.refusal(capturing=True),
            self.refusal(capturing=True, method="staged", **both),
            self.refusal(method="dma"),
        ]
        self.assertExpectedInline(
            "\n".join(lines),
            """\
[transfer_kv] method 'copy_engine' needs both index tensors on the CPU, but src_indices is on cuda:0.
[transfer_kv] method 'copy_engine' needs both index tensors on the CPU, but dst_indices is on cuda:0.
[transfer_kv] method 'staged' needs the indices of the host pool on the CPU, but src_indices is on cuda:0.
[transfer_kv] src[0] is pageable host memory, which a kernel can't reach; allocate it with torch_hicache.empty_host(shape, dtype, 'cuda:0').
[transfer_kv] indices on the CPU can't be captured, their values would be baked into the graph; put them on cuda:0.
[transfer_kv] method 'staged' can't be captured; use 'auto' or 'kernel'.
[transfer_kv] method must be 'auto', 'kernel', 'copy_engine' or 'staged', got 'dma'.""",  # noqa: E501
        )


def test_explain_on_the_cpu() -> None:
    pool = torch.zeros(8, 16, dtype=torch.uint8)
    found = explain([pool], [pool.clone()], torch.tensor([1, 2]), torch.tensor([3, -1]))
    assert found == Plan("kernel", 0, 0, 1, 16, "both pools are on the CPU")
    with pytest.raises(IndexError, match=r"dst_indices\[0\] is 8"):
        explain([pool], [pool.clone()], torch.tensor([8]), torch.tensor([0]))


def test_a_table_must_make_sense() -> None:
    for table, text in (
        (
            MethodTable(staging_bytes=1000),
            "staging needs at least 1 buffer of 65536 bytes, got 3 of 1000",
        ),
        (MethodTable(staging_buffers=0), "got 0 of 100663296"),
        (MethodTable(min_bytes=-1), "value 4 must not be negative, got -1"),
    ):
        with pytest.raises(ValueError, match=text):
            plan("load", RUN, RUN, table=table)


def test_explain_refuses_what_the_call_refuses_and_counts_what_moves() -> None:
    one, two = torch.zeros(4, 2), torch.ones(4, 2)
    assert explain([one], [two], torch.tensor([-1, -1]), torch.tensor([0, 1])).bytes == 0
    assert explain([one], [two], torch.tensor([0, 0]), torch.tensor([0, 1])).bytes == 8
    at = torch.tensor([0])
    with pytest.raises(ValueError, match="conjugate and negated views are refused"):
        explain([one.to(torch.complex64).conj()], [two.to(torch.complex64)], at, at)
    with pytest.raises(ValueError, match="sparse and nested tensors are refused"):
        explain([one.to_sparse()], [two], at, at)


@pytest.mark.parametrize("begins", [(0, 8), (8, 0), (0, 15), (15, 0), (0, 40, 8), (0, 16, 31)])
@pytest.mark.parametrize("direction", ["load", "store"])
def test_stretches_that_meet_are_seen_as_duplicates(direction: str, begins: tuple[int, ...]) -> None:
    """Slots come in ascending stretches of 16; where two of them meet, an entry is overwritten."""
    slots = torch.cat([torch.arange(begin, begin + 16) for begin in begins])
    others = torch.arange(len(slots)) + 1000
    pair = (others, slots) if direction == "load" else (slots, others)
    found = plan(direction, *pair, method="kernel")
    of_a_slot = plan(direction, RUN, RUN, method="kernel").bytes // len(RUN)
    assert found.bytes == len(slots.unique()) * of_a_slot


@pytest.mark.parametrize("direction", ["load", "store"])
def test_stretches_that_do_not_meet_all_move(direction: str) -> None:
    slots = torch.cat([torch.arange(begin, begin + 16) for begin in (32, 0, 100, 16)])
    others = torch.arange(len(slots)) + 1000
    pair = (others, slots) if direction == "load" else (slots, others)
    found = plan(direction, *pair, method="kernel")
    assert found.bytes == len(slots) * plan(direction, RUN, RUN, method="kernel").bytes // len(RUN)
