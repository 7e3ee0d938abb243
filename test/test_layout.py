"""Layouts: SGLang's shapes and addresses, and bytes moved between all pairs of them."""

import math

import pytest
import torch

from torch_hicache import transfer_kv
from torch_hicache.layout import LAYOUTS, PlaneSpec, PoolShape

# All sizes differ, and are primes: a swapped axis can't hide.
LAYERS, PAGES, PAGE_SIZE, HEADS, DIM = 3, 5, 7, 2, 11
SLOTS = PAGES * PAGE_SIZE
ITEM = HEADS * DIM  # elements of a row; layout_dim is that of all layers

SHAPES = {
    "layer_first": (LAYERS, SLOTS, HEADS, DIM),
    "page_first": (SLOTS, LAYERS, HEADS, DIM),
    "page_first_direct": (PAGES, LAYERS, PAGE_SIZE, HEADS, DIM),
    "page_head": (PAGES, HEADS, PAGE_SIZE, LAYERS, DIM),
}
BY_SLOT = ("layer_first", "page_first")


def shape_of(layout: str) -> PoolShape:
    return PoolShape(layout, LAYERS, SLOTS, PAGE_SIZE, (HEADS, DIM))


def numbered(layout: str, *lead: int) -> torch.Tensor:
    """A base whose elements are their own offsets."""
    sizes = (*lead, *SHAPES[layout])
    return torch.arange(math.prod(sizes)).view(sizes)


def address(layout: str, layer: int, slot: int, head: int, dim: int) -> int:
    """Where SGLang's kernels find an element, in elements."""
    layout_dim = LAYERS * ITEM
    page_start, token = slot // PAGE_SIZE * PAGE_SIZE, slot % PAGE_SIZE
    if layout == "layer_first":
        return layer * SLOTS * ITEM + slot * ITEM + head * DIM + dim
    if layout == "page_first":
        return slot * layout_dim + layer * ITEM + head * DIM + dim
    if layout == "page_first_direct":
        start = page_start * layout_dim + layer * PAGE_SIZE * ITEM
        return start + token * ITEM + head * DIM + dim
    per_head = layout_dim // HEADS
    start = page_start * layout_dim + head * per_head * PAGE_SIZE
    return start + token * per_head + layer * DIM + dim


@pytest.mark.parametrize("layout", LAYOUTS)
def test_base_shapes_are_sglangs(layout: str) -> None:
    assert shape_of(layout).base_shape == SHAPES[layout]


def test_an_mla_row_has_one_head() -> None:
    latent = PoolShape("page_first_direct", 61, 128, 64, (1, 576))
    assert latent.base_shape == (2, 61, 64, 1, 576)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_lie_where_sglang_finds_them(layout: str) -> None:
    planes = shape_of(layout).planes(numbered(layout), unit="page")
    assert len(planes) == LAYERS
    for layer, plane in enumerate(planes):
        assert plane.shape == (PAGES, PAGE_SIZE, HEADS, DIM)
        for slot in range(SLOTS):
            for head in range(HEADS):
                element = plane[slot // PAGE_SIZE, slot % PAGE_SIZE, head, DIM - 1]
                assert element == address(layout, layer, slot, head, DIM - 1)


@pytest.mark.parametrize("layout", BY_SLOT)
def test_slots_lie_where_sglang_finds_them(layout: str) -> None:
    planes = shape_of(layout).planes(numbered(layout))
    for layer, plane in enumerate(planes):
        assert plane.shape == (SLOTS, HEADS, DIM)
        for slot in range(SLOTS):
            assert plane[slot, 1, 4] == address(layout, layer, slot, 1, 4)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_views_are_views(layout: str) -> None:
    base = numbered(layout)
    for plane in shape_of(layout).planes(base, unit="page"):
        plane.fill_(-1)
    assert bool((base == -1).all())


@pytest.mark.parametrize("layout", LAYOUTS)
def test_leading_dimensions_stay_in_front(layout: str) -> None:
    base = numbered(layout, 2)
    shape = shape_of(layout)
    stack = shape.stack(base, unit="page")
    assert stack.shape == (2, LAYERS, PAGES, PAGE_SIZE, HEADS, DIM)
    for part in range(2):
        assert torch.equal(stack[part], shape.stack(base[part], unit="page"))
    assert torch.equal(shape.planes(base, unit="page")[1], stack[:, 1])


def test_a_strided_base_keeps_its_strides() -> None:
    padded = torch.zeros(SLOTS, LAYERS, HEADS, DIM + 5)[..., :DIM]
    plane = shape_of("page_first").planes(padded, unit="page")[2]
    assert plane.stride() == (PAGE_SIZE * padded.stride(0), padded.stride(0), DIM + 5, 1)
    assert plane.data_ptr() == padded[0, 2].data_ptr()


@pytest.mark.parametrize("host", LAYOUTS)
@pytest.mark.parametrize("device", LAYOUTS)
def test_every_layout_takes_the_pages_of_every_other(device: str, host: str) -> None:
    src = numbered(device).to(torch.int32)
    dst = torch.full(SHAPES[host], -7, dtype=torch.int32)
    src_view = shape_of(device).stack(src, unit="page")
    dst_view = shape_of(host).stack(dst, unit="page")
    src_pages, dst_pages = torch.tensor([4, 0, 1]), torch.tensor([1, 3, 4])
    expected = torch.full_like(dst, -7)
    shape_of(host).stack(expected, unit="page")[:, dst_pages] = src_view[:, src_pages]
    transfer_kv([dst_view], [src_view], dst_pages, src_pages, slot_dim=1)
    assert torch.equal(dst, expected)


@pytest.mark.parametrize("layout", ["page_first_direct", "page_head"])
def test_some_layouts_have_no_slots(layout: str) -> None:
    assert not shape_of(layout).has_slots
    with pytest.raises(ValueError, match=rf"^\[layout\] {layout} is addressable by page only: .*'page'"):
        shape_of(layout).planes(numbered(layout))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"layout": "page_unified"}, "layout must be one of layer_first, .*, got 'page_unified'"),
        ({"num_layers": 0}, "num_layers must be 1 or more, got 0"),
        ({"num_slots": -7}, "num_slots must be 1 or more, got -7"),
        ({"page_size": 0}, "page_size must be 1 or more, got 0"),
        ({"num_slots": 36}, "num_slots must be whole pages of 7, got 36"),
        ({"row_shape": ()}, r"row_shape must have sizes of 1 or more, got \[\]"),
        ({"row_shape": (2, 0)}, r"row_shape must have sizes of 1 or more, got \[2, 0\]"),
        (
            {"layout": "page_head", "row_shape": (576,)},
            r"page_head needs rows of \[heads, dim\], got \[576\]",
        ),
    ],
)
def test_impossible_shapes_are_refused(change: dict[str, object], text: str) -> None:
    sizes = {
        "layout": "layer_first",
        "num_layers": LAYERS,
        "num_slots": SLOTS,
        "page_size": PAGE_SIZE,
        "row_shape": (HEADS, DIM),
    }
    with pytest.raises(ValueError, match=rf"^\[layout\] {text}\.$"):
        PoolShape(**(sizes | change))


def test_bad_arguments_are_refused() -> None:
    shape = shape_of("layer_first")
    with pytest.raises(ValueError, match="unit must be 'slot' or 'page', got 'token'"):
        shape.planes(numbered("layer_first"), unit="token")
    with pytest.raises(
        ValueError, match=r"base must end in shape \[3, 35, 2, 11\], got \[35, 3, 2, 11\]"
    ):
        shape.planes(numbered("page_first"))
    with pytest.raises(ValueError, match=r"base must end in shape \[3, 35, 2, 11\], got \[2, 11\]"):
        shape.planes(torch.zeros(2, 11))


def test_row_bytes_count_every_dimension() -> None:
    assert PlaneSpec("key", (8, 128), torch.bfloat16).row_bytes == 2048
    assert PlaneSpec("latent", (1, 576), torch.float8_e4m3fn).row_bytes == 576


def test_a_plane_of_no_shape_or_dtype_is_refused() -> None:
    with pytest.raises(TypeError, match=r"row_shape must be a tuple of sizes, got 8"):
        PlaneSpec("key", 8, torch.bfloat16)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"dtype must be a torch.dtype, got 'bf16'"):
        PlaneSpec("key", (8,), "bf16")  # type: ignore[arg-type]
