"""Source and destination in one storage: what is allowed, and what is refused before a byte moves."""

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from torch_hicache.testing import check_transfer, fill_pool, strided_tensor, unchanged

transfer_kv = torch.ops.hicache.transfer_kv


def pool(device: str, *sizes: int, **layout: object) -> Tensor:
    memory = "cpu" if device == "cpu" else "device"
    tensor = strided_tensor(sizes, torch.uint8, memory, device, **layout)
    fill_pool([tensor])
    return tensor


def allowed(
    dst: Sequence[Tensor],
    src: Sequence[Tensor],
    dst_list: list[int],
    src_list: list[int],
    slot_dim: int = 0,
) -> None:
    check_transfer(dst, src, torch.tensor(dst_list), torch.tensor(src_list), slot_dim=slot_dim)


def refused(
    dst: Sequence[Tensor],
    src: Sequence[Tensor],
    dst_list: list[int],
    src_list: list[int],
    slot_dim: int = 0,
) -> None:
    text = "destination and source overlap"
    with unchanged([*dst, *src]), pytest.raises(ValueError, match=text):
        transfer_kv(dst, src, torch.tensor(dst_list), torch.tensor(src_list), slot_dim=slot_dim)


LAYOUTS = {"layer_first": {}, "page_first": {"order": (1, 0, 2)}, "padded": {"padding": {1: 5}}}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(
    ("dst_list", "src_list"),
    [
        ([0, 1, 2], [5, 6, 7]),
        ([11], [0]),
        ([5, 7, 9], [4, 6, 8]),
        ([0, 0, 1], [5, 6, 5]),
        ([-1, 3], [3, 4]),
        ([3, 4], [-1, 5]),
        ([6, 7], [6, 7]),
        ([4, 6, 7, 2], [5, 6, 7, 3]),
    ],
)
def test_slots_that_do_not_meet(
    device: str, layout: dict, dst_list: list[int], src_list: list[int]
) -> None:
    """Padding reads and writes nothing; a slot copied onto itself is no other entry's."""
    tensor = pool(device, 3, 12, 20, **layout)
    allowed([tensor], [tensor], dst_list, src_list, slot_dim=1)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize(
    ("dst_list", "src_list"),
    [
        ([1, 2, 3], [0, 1, 2]),
        ([0, 1, 2], [1, 2, 3]),
        ([0, 1], [1, 0]),
        ([4, 9, 0], [7, 3, 9]),
        (list(range(11, 0, -1)), list(range(10, -1, -1))),
        ([6, 7, 1], [6, 7, 6]),
        # An entry whose destination is written again still reads and writes.
        ([3, 3], [5, 3]),
        ([3, 3], [3, 5]),
        ([3, 3, 4], [2, 5, 3]),
        ([3, 3, 2], [2, 5, 7]),
    ],
)
def test_slots_that_meet(device: str, layout: dict, dst_list: list[int], src_list: list[int]) -> None:
    tensor = pool(device, 3, 12, 20, **layout)
    refused([tensor], [tensor], dst_list, src_list, slot_dim=1)


def test_planes_of_one_storage(device: str) -> None:
    planes = pool(device, 4, 9, 24).unbind(0)
    allowed([planes[0], planes[3]], [planes[1], planes[2]], [0, 1, 2], [0, 1, 2])
    allowed([planes[0], planes[1]], [planes[1], planes[2]], [0, 1], [2, 3])
    refused([planes[0], planes[1]], [planes[1], planes[2]], [0, 1], [1, 3])
    refused([planes[0], planes[1]], [planes[1], planes[0]], [4], [4])
    refused([planes[1], planes[0]], [planes[1], planes[0]], [4, 5], [4, 4])


def test_a_stack_against_one_of_its_planes(device: str) -> None:
    stack = pool(device, 3, 9, 24)
    everywhere = stack[1:2].expand(3, 9, 24)
    allowed([stack], [everywhere], [0, 8], [1, 1], slot_dim=1)
    refused([stack], [everywhere], [0, 8], [8, 1], slot_dim=1)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_interleaved_views_meet_in_extent_only(device: str, dim: int) -> None:
    """Key onto value of one base: each lies inside the other's reach, no byte is common."""
    sizes = [9, 9, 32]
    sizes[dim] = 2
    base = pool(device, *sizes) if dim < 2 else pool(device, 9, 2, 32)
    key, value = (base[0], base[1]) if dim == 0 else base.unbind(1)
    if dim == 2:
        key, value = base[:, :, :16], base[:, :, 16:]
    allowed([key], [value], [0, 1, 2], [2, 1, 0])
    refused([key], [key], [0, 1, 2], [3, 4, 0])


def test_rows_that_meet_in_half_their_bytes(device: str) -> None:
    flat = pool(device, 40 * 16)
    dst = flat[: 30 * 16].view(30, 16)
    src = flat[8 : 8 + 30 * 16].view(30, 16)  # slot i ends inside dst's slot i + 1
    allowed([dst], [src], [5], [7])
    allowed([dst], [src], [5, 8], [3, 6])
    refused([dst], [src], [5], [5])
    refused([dst], [src], [5], [4])
    refused([dst], [src], [20, 21, 5], [10, 11, 19])


def test_one_byte_in_common(device: str) -> None:
    flat = pool(device, 64)
    allowed([flat[:16].view(1, 16)], [flat[16:32].view(1, 16)], [0], [0])
    refused([flat[:16].view(1, 16)], [flat[15:31].view(1, 16)], [0], [0])
    refused([flat[15:31].view(1, 16)], [flat[:16].view(1, 16)], [0], [0])


def test_pages_and_slots_of_one_storage(device: str) -> None:
    """Rows of 64 bytes, written where rows of 16 are read in the same call."""
    flat = pool(device, 1024)
    pages, slots = flat.view(16, 64), flat.view(64, 16)
    other_pages, other_slots = pool(device, 16, 64), pool(device, 64, 16)
    allowed([pages, other_slots], [other_pages, slots], [2], [3])
    refused([pages, other_slots], [other_pages, slots], [2], [9])


def test_rows_that_interleave(device: str) -> None:
    """Every second element is one pool's, the others are the other's."""
    flat = pool(device, 30, 32)
    allowed([flat[:, ::2]], [flat[:, 1::2]], [3, 4, 5], [3, 4, 4])
    refused([flat[:, ::2]], [flat[:, 2:].as_strided((29, 16), (32, 2), 66)], [3, 4, 5], [3, 4, 4])


def test_text_names_the_slots() -> None:
    tensor = pool("cpu", 12, 20)
    text = r"dst slots 4 to 6 against src slots 2 to 4\)\. Copy through a buffer"
    with pytest.raises(ValueError, match=text):
        transfer_kv([tensor], [tensor], torch.tensor([4, 5, 6]), torch.tensor([2, 3, 4]))


def test_destinations_without_one_distance_that_share_bytes(device: str) -> None:
    flat, far = pool(device, 64), pool(device, 4, 4)
    src = [pool(device, 4, 4) for _ in range(3)]
    both = torch.arange(2), torch.arange(2)
    views = [flat[:16].view(4, 4), flat[33:49].view(4, 4), flat[2:18].view(4, 4)]
    for dst in (views, views[::-1], [views[0], far, views[2]]):
        with unchanged([flat, far]), pytest.raises(ValueError, match="share memory"):
            transfer_kv(dst, src, *both)
    interleaved = pool(device, 4, 8, 4)  # layers 0, 2 and 5 of a page_first pool
    check_transfer([interleaved[:, layer] for layer in (0, 2, 5)], src, *both)


@pytest.mark.parametrize("seed", range(40))
def test_destinations_that_share_bytes(device: str, seed: int) -> None:
    """Two views of one buffer: refused where a byte is common, else right."""
    draw = random.Random(seed)
    verdicts = set()
    for _ in range(25):
        sizes = [draw.randint(1, 4), draw.randint(1, 5), draw.randint(1, 6)]
        strides, step = [0, 0, 0], draw.choice([1, 1, 2])
        for dim in draw.choice([(2, 1, 0), (2, 0, 1), (1, 2, 0)]):
            strides[dim] = step * draw.choice([1, 1, 2, 3])
            step = strides[dim] * sizes[dim]
        extent = 1 + sum((size - 1) * stride for size, stride in zip(sizes, strides, strict=True))
        distance = draw.randint(0, extent + 2)
        flat = pool(device, extent + distance)
        dst = [flat.as_strided(sizes, strides, offset) for offset in (0, distance)]
        draw.shuffle(dst)
        numbers = torch.arange(len(flat))
        bytes_of = [
            set(numbers.as_strided(sizes, strides, offset).flatten().tolist()) for offset in (0, distance)
        ]
        src = [pool(device, *sizes) for _ in dst]
        indices = torch.arange(sizes[1])
        if bytes_of[0] & bytes_of[1]:
            with unchanged(dst), pytest.raises(ValueError, match="share memory"):
                transfer_kv(dst, src, indices, indices, slot_dim=1)
        else:
            check_transfer(dst, src, indices, indices, slot_dim=1)
        verdicts.add(bool(bytes_of[0] & bytes_of[1]))
    assert verdicts == {True, False}
