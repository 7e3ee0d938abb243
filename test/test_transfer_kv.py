"""What transfer_kv copies: every row size, layout, dtype and list of planes, on every device."""

import re
import threading

import pytest
import torch

from torch_hicache.testing import (
    Placement,
    check_transfer,
    fill_pool,
    random_entries,
    strided_tensor,
    unchanged,
)

transfer_kv = torch.ops.hicache.transfer_kv

ROW_BYTES = {
    "up_to_a_vector": range(1, 18),
    "two_vectors": (23, 24, 25, 31, 32, 33, 47, 48, 49),
    "a_warp": (63, 64, 65, 127, 128, 129, 132, 255, 256, 257, 511, 512, 513),
    "real": (576, 584, 656, 1023, 1024, 1025, 1152, 1536, 2047, 2048, 2049),
    "a_page": (4095, 4096, 4097, 4098),
}
# Bytes by which the base of dst and src is off its alignment, and by which each slot is padded.
ALIGNMENTS = (
    (0, 0, 0, 0),
    (1, 0, 0, 0),
    (0, 3, 0, 0),
    (2, 2, 2, 4),
    (4, 8, 12, 0),
    (8, 16, 8, 24),
    (5, 7, 0, 1),
)


@pytest.mark.parametrize("rows", ROW_BYTES.values(), ids=ROW_BYTES)
def test_row_bytes_and_alignment(placement: Placement, rows: range | tuple[int, ...]) -> None:
    dst_indices, src_indices = random_entries(7, 13, 11)
    for row in rows:
        for dst_offset, src_offset, dst_padding, src_padding in ALIGNMENTS:
            dst = placement.dst((2, 13, row), padding={1: dst_padding}, offset_bytes=dst_offset)
            src = placement.src((2, 11, row), padding={1: src_padding}, offset_bytes=src_offset)
            fill_pool([dst], 1)
            fill_pool([src], 1, seed=1)
            check_transfer(
                [dst],
                [src],
                placement.dst_indices(dst_indices),
                placement.src_indices(src_indices),
                slot_dim=1,
            )


# A layout is an order of [layers, slots, heads, head_dim] from slowest to fastest, and gaps.
LAYOUTS = {
    "layer_first": {},
    "page_first": {"order": (1, 0, 2, 3)},
    "page_head": {"order": (1, 2, 0, 3)},
    "heads_before_slots": {"order": (0, 2, 1, 3)},
    "permuted_row": {"order": (0, 1, 3, 2)},
    "slots_fastest": {"order": (0, 2, 3, 1)},
    "padded_row": {"padding": {1: 3}},
    "padded_heads": {"padding": {2: 5, 0: 64}},
    "strided_elements": {"padding": {3: 1}},
}


@pytest.mark.parametrize("sizes", [(4, 4, 4, 4), (3, 13, 5, 7)], ids=["equal", "primes"])
@pytest.mark.parametrize("dst_layout", LAYOUTS)
def test_layouts(placement: Placement, dst_layout: str, sizes: tuple[int, int, int, int]) -> None:
    layers, slots, *row = sizes
    dst_indices, src_indices = random_entries(3, slots, slots)
    for number, layout in enumerate(LAYOUTS.values()):
        dtype = (torch.uint8, torch.bfloat16, torch.float32)[number % 3]
        dst = placement.dst((layers, slots, *row), dtype, **LAYOUTS[dst_layout])
        src = placement.src((layers, slots, *row), dtype, **layout)
        for slot_dim in (1, -3):
            fill_pool([dst], slot_dim)
            fill_pool([src], slot_dim, seed=1)
            check_transfer(
                [dst],
                [src],
                placement.dst_indices(dst_indices),
                placement.src_indices(src_indices),
                slot_dim=slot_dim,
            )


def test_more_strided_dimensions_than_one_launch_takes(placement: Placement) -> None:
    sizes = (2, 3, 5, 2, 3, 2, 2, 3)  # slot_dim 2
    padding = dict.fromkeys(range(8), 1)
    dst = placement.dst(sizes, torch.int16, padding=padding)
    src = placement.src(sizes, torch.int16, padding=padding, order=(0, 1, 2, 7, 6, 5, 4, 3))
    fill_pool([dst], 2)
    fill_pool([src], 2, seed=1)
    dst_indices, src_indices = placement.dst_indices([4, 0, 1]), placement.src_indices([2, 2, 3])
    check_transfer([dst], [src], dst_indices, src_indices, slot_dim=2)


def test_key_and_value_are_halves_of_one_base(placement: Placement) -> None:
    """Views that reach twice as far as their number of elements says."""
    for joint, dim in (((2, 9, 4, 8), 0), ((9, 2, 4, 8), 1), ((9, 4, 2, 8), 2), ((9, 4, 16), 2)):
        dst_base, src_base = placement.dst(joint, torch.float16), placement.src(joint, torch.float16)
        fill_pool([dst_base])
        fill_pool([src_base], seed=1)
        dst_indices, src_indices = random_entries(5, 9, 9, seed=dim)
        check_transfer(
            [half.squeeze(dim) for half in dst_base.chunk(2, dim)],
            [half.squeeze(dim) for half in src_base.chunk(2, dim)],
            placement.dst_indices(dst_indices),
            placement.src_indices(src_indices),
        )


def test_one_list_holds_different_rows_and_dtypes(placement: Placement) -> None:
    """K of 192, V of 128, a latent row, scales and an indexer's keys move together."""
    rows = [
        ((4, 192), torch.bfloat16),
        ((4, 128), torch.bfloat16),
        ((576,), torch.float8_e4m3fn),
        ((1,), torch.float32),
        ((132,), torch.uint8),
        ((3,), torch.bool),
        ((2, 2), torch.complex64),
        ((), torch.int64),
    ]
    for number, (row, dtype) in enumerate(rows):
        dst = [placement.dst((2, 17, *row), dtype, padding={0: number}) for row, dtype in rows]
        src = [placement.src((2, 19, *row), dtype) for row, dtype in rows]
        fill_pool(dst, 1)
        fill_pool(src, 1, seed=1)
        dst_indices, src_indices = random_entries(11, 17, 19, seed=number)
        check_transfer(
            dst,
            src,
            placement.dst_indices(dst_indices),
            placement.src_indices(src_indices),
            slot_dim=1,
        )
        # From the end, each tensor has a slot_dim of its own.
        dst_of_row = [placement.dst((3, 17, *row), dtype), placement.dst((17, *row), dtype)]
        src_of_row = [placement.src((3, 19, *row), dtype), placement.src((19, *row), dtype)]
        slot_dim = -1 - len(row)
        fill_pool(dst_of_row, slot_dim)
        fill_pool(src_of_row, slot_dim, seed=1)
        check_transfer(
            dst_of_row,
            src_of_row,
            placement.dst_indices(dst_indices),
            placement.src_indices(src_indices),
            slot_dim=slot_dim,
        )


# Every dtype of this torch but the quantised ones and those below a byte.
DTYPES = [
    dtype
    for dtype in sorted(
        {value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str
    )
    if not re.match(r"torch\.(q|u?int[1-7]$|bits\dx)", str(dtype))
]


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_dtypes_move_as_bytes(placement: Placement, dtype: torch.dtype) -> None:
    """Fingerprints hit every byte value: payloads of NaN, booleans that are neither 0 nor 1."""
    dst, src = placement.dst((9, 3, 5), dtype), placement.src((8, 3, 5), dtype)
    fill_pool([dst])
    fill_pool([src], seed=1)
    dst_indices, src_indices = placement.dst_indices([8, 0, 3]), placement.src_indices([7, 7, 2])
    check_transfer([dst], [src], dst_indices, src_indices)


def test_payload_of_signalling_nans(placement: Placement) -> None:
    dst, src = placement.dst((4, 2), torch.float32), placement.src((4, 2), torch.float32)
    payload = torch.tensor([0x7FA12345, -0x5EDCBB], dtype=torch.int32)  # both signalling
    src.view(torch.int32).copy_(payload.expand(4, 2))
    dst.view(torch.int32).zero_()
    transfer_kv([dst], [src], placement.dst_indices([1, 3]), placement.src_indices([0, 2]))
    expected = torch.zeros(4, 2, dtype=torch.int32)
    expected[[1, 3]] = payload
    if placement.device != "cpu":
        torch.accelerator.synchronize(placement.device)
    assert torch.equal(dst.view(torch.int32).cpu(), expected)


@pytest.mark.parametrize("num_planes", [0, 1, 2, 64, 300])
@pytest.mark.parametrize("of", ["own_memory", "one_pool", "one_pool_reversed"])
def test_lists_of_planes(placement: Placement, num_planes: int, of: str) -> None:
    """Alone, as views with one distance between them (a loop for a backend), and backwards."""
    if of == "own_memory":
        dst = [placement.dst((7, 24)) for _ in range(num_planes)]
        src = [placement.src((5, 24)) for _ in range(num_planes)]
    else:
        dst = list(placement.dst((num_planes, 7, 24)).unbind(0))
        src = list(placement.src((5, num_planes, 24)).unbind(1))
        if of == "one_pool_reversed":
            dst.reverse()
    fill_pool(dst)
    fill_pool(src, seed=1)
    dst_indices, src_indices = placement.dst_indices([6, 1, 0]), placement.src_indices([4, 0, 0])
    check_transfer(dst, src, dst_indices, src_indices)


def test_layer_ids_with_gaps(placement: Placement) -> None:
    """No distance is common to the chosen layers, on both sides or on one."""
    dst_pool, src_pool = placement.dst((7, 9, 40)), placement.src((7, 8, 40))
    fill_pool([dst_pool], 1)
    fill_pool([src_pool], 1, seed=1)
    dst_indices, src_indices = placement.dst_indices([8, 3]), placement.src_indices([0, 7])
    for dst_layers, src_layers in (
        ((1, 2, 4), (0, 2, 6)),
        ((0, 1, 2), (0, 2, 6)),
        ((0, 2, 6), (3, 4, 5)),
    ):
        dst, src = [dst_pool[i] for i in dst_layers], [src_pool[i] for i in src_layers]
        check_transfer(dst, src, dst_indices, src_indices)


def test_planes_that_differ_in_their_padding_only(placement: Placement) -> None:
    dst = [placement.dst((9, 40), padding={0: padding}) for padding in (0, 8, 0, 24)]
    src = [placement.src((8, 40), padding={0: padding}) for padding in (0, 0, 16, 8)]
    fill_pool(dst)
    fill_pool(src, seed=1)
    check_transfer(dst, src, placement.dst_indices([8, 3, 4]), placement.src_indices([0, 7, 1]))


def test_a_page_is_a_row(placement: Placement) -> None:
    """The same pools by page id and by the slots of those pages."""
    page_size, row = 4, 36
    dst_pool, src_pool = placement.dst((2, 6 * page_size, row)), placement.src((2, 5 * page_size, row))
    dst_pages, src_pages = torch.tensor([5, 0, 2]), torch.tensor([1, 4, 4])
    fill_pool([dst_pool], 1)
    fill_pool([src_pool], 1, seed=1)
    dst = dst_pool.unflatten(1, (-1, page_size))
    src = src_pool.unflatten(1, (-1, page_size))
    dst_indices, src_indices = placement.dst_indices(dst_pages), placement.src_indices(src_pages)
    check_transfer([dst], [src], dst_indices, src_indices, slot_dim=1)
    by_page = dst_pool.cpu().clone()
    fill_pool([dst_pool], 1)
    tokens = torch.arange(page_size)
    dst_slots = (dst_pages.view(-1, 1) * page_size + tokens).flatten()
    src_slots = (src_pages.view(-1, 1) * page_size + tokens).flatten()
    dst_indices, src_indices = placement.dst_indices(dst_slots), placement.src_indices(src_slots)
    check_transfer([dst_pool], [src_pool], dst_indices, src_indices, slot_dim=1)
    assert torch.equal(dst_pool.cpu(), by_page)


def test_a_source_may_be_expanded(placement: Placement) -> None:
    dst, src = placement.dst((3, 9, 8, 16)), placement.src((1, 1, 16))
    fill_pool([dst], 1)
    fill_pool([src], 0, seed=1)
    everywhere = src.expand(3, 9, 16).unsqueeze(2).expand(3, 9, 8, 16)
    dst_indices, src_indices = placement.dst_indices([8, 2, 5]), placement.src_indices([0, 8, 3])
    check_transfer([dst], [everywhere], dst_indices, src_indices, slot_dim=1)


@pytest.mark.parametrize(
    ("dst_sizes", "src_sizes", "num_entries", "count"),
    [
        ((2, 5, 8), (2, 6, 8), 0, None),
        ((2, 5, 8), (2, 6, 8), 3, 0),
        ((2, 5, 0), (2, 6, 0), 3, None),
        ((2, 5, 0), (2, 6, 0), 3, 2),
        ((0, 5, 8), (0, 6, 8), 3, None),
        ((2, 0, 8), (2, 0, 8), 0, None),
        ((2, 0, 8), (2, 6, 8), 0, None),
    ],
)
def test_empty_work_moves_nothing(
    placement: Placement, dst_sizes: tuple, src_sizes: tuple, num_entries: int, count: int | None
) -> None:
    dst, src = placement.dst(dst_sizes), placement.src(src_sizes)
    fill_pool([dst], 1)
    fill_pool([src], 1, seed=1)
    with unchanged([dst, src]):
        transfer_kv(
            [dst],
            [src],
            placement.dst_indices(range(num_entries)),
            placement.src_indices(range(num_entries)),
            slot_dim=1,
            count=None if count is None else placement.count(count),
        )


def test_empty_work_in_a_list_leaves_the_rest(placement: Placement) -> None:
    dst = [placement.dst((5, 0)), placement.dst((5, 8)), placement.dst((5, 0, 4))]
    src = [placement.src((6, 0)), placement.src((6, 8)), placement.src((6, 0, 4))]
    fill_pool(dst)
    fill_pool(src, seed=1)
    check_transfer(dst, src, placement.dst_indices([4, 1]), placement.src_indices([5, 5]))


@pytest.mark.parametrize("max_blocks", [0, 1, 3, 1 << 40])
@pytest.mark.parametrize("number", [0, 1, 2])
def test_methods_and_max_blocks(placement: Placement, number: int, max_blocks: int) -> None:
    method = placement.methods[number % len(placement.methods)]
    dst, src = placement.dst((3, 999, 72)), placement.src((3, 1001, 72))
    fill_pool([dst], 1)
    fill_pool([src], 1, seed=1)
    dst_indices, src_indices = random_entries(700, 999, 1001)
    check_transfer(
        [dst],
        [src],
        placement.dst_indices(dst_indices),
        placement.src_indices(src_indices),
        slot_dim=1,
        method=method,
        max_blocks=max_blocks,
    )


def test_work_for_several_threads(placement: Placement) -> None:
    """Large enough to be cut within strips, runs and rows; runs of all lengths, up and down."""
    dst, src = placement.dst((2, 3001, 611)), placement.src((2, 3001, 611))
    fill_pool([dst], 1)
    fill_pool([src], 1, seed=1)
    scattered = torch.randperm(3000)[:700]
    runs = [torch.arange(900), torch.arange(2999, 2000, -1), scattered, torch.arange(900, 902)]
    src_indices = torch.cat(runs)
    for dst_indices in (torch.arange(len(src_indices)) + 5, 2999 - torch.arange(len(src_indices))):
        check_transfer(
            [dst],
            [src],
            placement.dst_indices(dst_indices),
            placement.src_indices(src_indices),
            slot_dim=1,
        )


def test_calls_from_several_threads(placement: Placement) -> None:
    """The interpreter lock is free inside; each thread has slots of its own."""
    dst, src = placement.dst((400, 1024)), placement.src((400, 1024))
    fill_pool([dst])
    fill_pool([src], seed=1)
    order = torch.randperm(400)

    def work(part: torch.Tensor) -> None:
        for slots in part.split(10):
            transfer_kv([dst], [src], placement.dst_indices(slots), placement.src_indices(slots))

    threads = [threading.Thread(target=work, args=(part,)) for part in order.chunk(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if placement.device != "cpu":
        torch.accelerator.synchronize(placement.device)
    assert torch.equal(dst.cpu(), src.cpu())


@pytest.mark.parametrize("grad", [False, True], ids=["no_grad", "grad"])
def test_sources_that_require_grad_and_inference_tensors(placement: Placement, grad: bool) -> None:
    dst, src = placement.dst((5, 4), torch.float32), placement.src((5, 4), torch.float32)
    fill_pool([dst])
    fill_pool([src], seed=1)
    with torch.set_grad_enabled(grad):
        leaf = src.detach().requires_grad_()
        check_transfer([dst], [leaf], placement.dst_indices([4]), placement.src_indices([0]))
    with torch.inference_mode():
        pool = strided_tensor((5, 4), torch.float32, placement.dst_memory, placement.device)
        fill_pool([pool])
    with torch.set_grad_enabled(grad):
        transfer_kv([pool], [src], placement.dst_indices([2]), placement.src_indices([3]))
    with torch.no_grad():
        parameter = torch.nn.Parameter(dst)
        check_transfer([parameter], [src], placement.dst_indices([1]), placement.src_indices([2]))
