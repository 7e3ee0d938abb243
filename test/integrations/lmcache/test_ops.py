"""The ops against LMCache's own torch ops on the CPU, on copies of the same buffers, all bytes."""

import copy
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lmcache.lmcache_native import EngineKVFormat, PageBufferShapeDesc, TransferDirection
from lmcache.v1.platform import torch_ops
from torch import Tensor

from torch_hicache import testing
from torch_hicache.integrations import lmcache as adapter
from torch_hicache.integrations.lmcache import HiCacheCpuOps, HiCacheCpuSpec

LAYERS, BLOCKS, BLOCK, HEADS, HEAD = 3, 11, 4, 2, 6
HIDDEN = HEADS * HEAD
CHUNK_BLOCKS = 3
H2D, D2H = TransferDirection.H2D, TransferDirection.D2H
Format = EngineKVFormat


@pytest.fixture
def ops(monkeypatch: pytest.MonkeyPatch) -> HiCacheCpuOps:
    return HiCacheCpuSpec().get_ops()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The planes of each transfer_kv that the adapter has called; LMCache's own op calls none."""
    calls: list[int] = []
    move = adapter._move

    def counted(planes: Any, *rest: Any) -> None:
        calls.append(len(planes))
        move(planes, *rest)

    monkeypatch.setattr(adapter, "_move", counted)
    return calls


def filled(*shapes: tuple[int, ...], dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    tensors = [torch.empty(shape, dtype=dtype) for shape in shapes]
    testing.fill_pool(tensors, seed=len(shapes) + shapes[0][0])
    return tensors


def flat(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    return [tensor for part in tree for tensor in flat(part)]


def assert_same(first: Any, second: Any) -> None:
    for a, b in zip(flat(first), flat(second), strict=True):
        assert torch.equal(testing.storage_bytes(a), testing.storage_bytes(b))


def compare(ours: Callable, stock: Callable, *buffers: Any) -> None:
    """Both, each on its own copy; the stock op must change something, else nothing is compared."""
    mine, theirs = copy.deepcopy(buffers), copy.deepcopy(buffers)
    ours(*mine)
    stock(*theirs)
    assert_same(mine, theirs)
    changed = zip(flat(buffers), flat(theirs), strict=True)
    assert not all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in changed)


# --- Blocks of all layers -------------------------------------------------------------------------

nb, bs, nh, hs = BLOCKS, BLOCK, HEADS, HEAD
LAYER_SHAPES = {  # of one layer, for formats with a tensor for each
    Format.NL_X_TWO_NB_BS_NH_HS: (2, nb, bs, nh, hs),
    Format.NL_X_NB_TWO_BS_NH_HS: (nb, 2, bs, nh, hs),
    Format.NL_X_NB_BS_HS: (nb, bs, hs),
    Format.NL_X_NBBS_ONE_HS: (nb * bs, 1, hs),
    Format.NL_X_TWO_NB_NH_BS_HS: (2, nb, nh, bs, hs),
    Format.NL_X_NB_TWO_NH_BS_HS: (nb, 2, nh, bs, hs),
    Format.NL_X_NB_NH_BS_TWO_HS: (nb, nh, bs, hs),
    Format.NL_X_NB_BS_NH_TWO_HS: (nb, bs, nh, hs),
    Format.NL_X_NB_NH_BS_CS: (nb, nh, bs, hs),
    Format.NL_X_NB_BS_NH_CS: (nb, bs, nh, hs),
    Format.NL_X_NB_BSV_BSS: (nb, bs, hs),
    Format.NL_X_NB_BS_NH_HS: (nb, bs, nh, hs),
}
LATENT = (Format.NL_X_NB_BS_HS, Format.NL_X_NBBS_ONE_HS, Format.NL_X_NB_BSV_BSS)
OTHER_FORMATS = (
    Format.NB_NL_TWO_BS_NH_HS,
    Format.NB_NL_TWO_NH_BS_HS,
    Format.TWO_X_NL_X_NBBS_NH_HS,
    Format.TWO_X_NL_X_NB_BS_NH_HS,
    Format.NL_X_TWO_X_NB_BS_NH_HS,
)
BLOCK_FORMATS = (*LAYER_SHAPES, *OTHER_FORMATS)


def make_paged(kv_format: Any) -> Any:
    if kv_format in LAYER_SHAPES:
        return filled(*[LAYER_SHAPES[kv_format]] * LAYERS)
    if kv_format == Format.NB_NL_TWO_BS_NH_HS:
        return filled((nb, LAYERS, 2, bs, nh, hs))[0]
    if kv_format == Format.NB_NL_TWO_NH_BS_HS:
        return filled((nb, LAYERS, 2, nh, bs, hs))[0]
    shape = (nb * bs, nh, hs) if kv_format == Format.TWO_X_NL_X_NBBS_NH_HS else (nb, bs, nh, hs)
    tensors = filled(*[shape] * (2 * LAYERS))
    if kv_format == Format.NL_X_TWO_X_NB_BS_NH_HS:
        return [tuple(tensors[2 * i : 2 * i + 2]) for i in range(LAYERS)]
    return [tensors[:LAYERS], tensors[LAYERS:]]


def make_objects(kv_format: Any, count: int = 3) -> list[Tensor]:
    tokens = CHUNK_BLOCKS * BLOCK
    if kv_format in LATENT:
        shape: tuple[int, ...] = (LAYERS, tokens, HEAD)
    elif torch_ops.mp_mem_kernels._format_spec(kv_format).kv_size(None) == 1:  # type: ignore[attr-defined]
        shape = (LAYERS, tokens, HIDDEN)
    else:
        shape = (2, LAYERS, tokens, HIDDEN)
    return filled(*[shape] * count)


def shape_of(dtype: torch.dtype = torch.bfloat16, **changes: int) -> PageBufferShapeDesc:
    desc = PageBufferShapeDesc()
    values = {
        "kv_size": 2,
        "nl": LAYERS,
        "nb": BLOCKS,
        "bs": BLOCK,
        "nh": HEADS,
        "hs": HEAD,
        "element_size": dtype.itemsize,
        "block_stride_elems": 0,
        **changes,
    }
    for name, value in values.items():
        setattr(desc, name, value)
    desc.dtype = dtype
    return desc


def tables(paged: Any) -> Tensor:
    """The addresses, in LMCache's order."""
    return torch.tensor([tensor.data_ptr() for tensor in flat(paged)], dtype=torch.int64)


BLOCK_IDS = [7, 2, 9, 0, 10, 4, 5, 1]


@pytest.mark.parametrize("direction", [D2H, H2D])
@pytest.mark.parametrize("skipped", [0, 1, 4])
@pytest.mark.parametrize("kv_format", BLOCK_FORMATS, ids=lambda kv_format: kv_format.name)
def test_blocks(
    ops: HiCacheCpuOps, served: list[int], kv_format: Any, skipped: int, direction: Any
) -> None:
    paged, objects = make_paged(kv_format), make_objects(kv_format)
    rest = (torch.device("cpu"), direction, shape_of(), CHUNK_BLOCKS * BLOCK, kv_format, skipped)

    def call(op: Callable, ids: Any) -> Callable:
        return lambda paged, objects: op(paged, objects, ids, *rest)

    stock = torch_ops.multi_layer_block_kv_transfer
    for ids in (BLOCK_IDS, torch.tensor(BLOCK_IDS), torch.tensor(BLOCK_IDS, dtype=torch.int32)):
        compare(call(ops.multi_layer_block_kv_transfer, ids), call(stock, ids), paged, objects)
    assert len(served) == 3 * (2 if skipped == 4 else 3)
    planes = LAYERS if objects[0].dim() == 3 else 2 * LAYERS
    assert set(served) == {planes}


@pytest.mark.parametrize("direction", [D2H, H2D])
@pytest.mark.parametrize(
    "kv_format",
    [f for f in BLOCK_FORMATS if f != Format.NL_X_TWO_X_NB_BS_NH_HS],
    ids=lambda kv_format: kv_format.name,
)
def test_blocks_by_address(ops: HiCacheCpuOps, served: list[int], kv_format: Any, direction: Any) -> None:
    rest = (torch.device("cpu"), direction, shape_of(), CHUNK_BLOCKS * BLOCK, kv_format, 0)

    def by_address(op: Callable) -> Callable:
        return lambda paged, objects: op(
            tables(paged), [tensor.data_ptr() for tensor in objects], BLOCK_IDS, *rest
        )

    compare(
        by_address(ops.multi_layer_block_kv_transfer),
        by_address(torch_ops.multi_layer_block_kv_transfer),
        make_paged(kv_format),
        make_objects(kv_format),
    )
    assert len(served) == 3


@pytest.mark.parametrize("direction", [D2H, H2D])
def test_heads_with_an_axis_of_one_by_address(
    ops: HiCacheCpuOps, served: list[int], direction: Any
) -> None:
    kv_format = Format.NL_X_TWO_NB_NH_ONE_BS_HS
    rest = (torch.device("cpu"), direction, shape_of(), CHUNK_BLOCKS * BLOCK, kv_format, 0)
    paged = filled(*[(2, nb, nh, 1, bs, hs)] * LAYERS)
    objects = filled(*[(2, LAYERS, CHUNK_BLOCKS * BLOCK, HIDDEN)] * 3)

    def stock(paged: Any, objects: Any) -> None:
        torch_ops.multi_layer_block_kv_transfer(tables(paged), objects, BLOCK_IDS, *rest)

    compare(
        lambda paged, objects: ops.multi_layer_block_kv_transfer(
            tables(paged), objects, BLOCK_IDS, *rest
        ),
        stock,
        paged,
        objects,
    )
    compare(
        lambda paged, objects: ops.multi_layer_block_kv_transfer(paged, objects, BLOCK_IDS, *rest),
        stock,
        paged,
        objects,
    )
    assert len(served) == 6


@pytest.mark.parametrize("direction", [D2H, H2D])
def test_latent_planes_of_several_widths_and_dtypes(
    ops: HiCacheCpuOps, served: list[int], direction: Any
) -> None:
    kv_format = Format.NL_X_NP_X_NB_BS_ONE_HS
    layers = [
        (
            filled((nb, bs, 1, 10), dtype=torch.bfloat16)[0],
            filled((nb, bs, 1, 7), dtype=torch.uint8)[0],
            filled((nb, bs, 1, 3), dtype=torch.float32)[0],
        )
        for _ in range(LAYERS)
    ]
    objects = filled(*[(LAYERS, CHUNK_BLOCKS * BLOCK, 20 + 7 + 12)] * 3, dtype=torch.uint8)
    rest = (torch.device("cpu"), direction, shape_of(torch.uint8), CHUNK_BLOCKS * BLOCK, kv_format, 1)
    compare(
        lambda paged, objects: ops.multi_layer_block_kv_transfer(paged, objects, BLOCK_IDS, *rest),
        lambda paged, objects: torch_ops.multi_layer_block_kv_transfer(paged, objects, BLOCK_IDS, *rest),
        layers,
        objects,
    )
    assert served == [3 * LAYERS] * 3


def test_fused_layers_may_have_their_size_2_axis(ops: HiCacheCpuOps, served: list[int]) -> None:
    paged = filled(*[(nb, nh, bs, 2, 3)] * LAYERS)
    objects = filled(*[(LAYERS, CHUNK_BLOCKS * BLOCK, HIDDEN)] * 3)
    rest = (torch.device("cpu"), H2D, shape_of(), CHUNK_BLOCKS * BLOCK, Format.NL_X_NB_NH_BS_TWO_HS, 0)
    compare(
        lambda paged, objects: ops.multi_layer_block_kv_transfer(paged, objects, BLOCK_IDS, *rest),
        lambda paged, objects: torch_ops.multi_layer_block_kv_transfer(paged, objects, BLOCK_IDS, *rest),
        paged,
        objects,
    )
    assert len(served) == 3


def test_other_dtypes_on_the_two_sides_are_left_to_lmcache(ops: HiCacheCpuOps, served: list[int]) -> None:
    paged = filled(*[(2, nb, bs, nh, hs)] * LAYERS, dtype=torch.float32)
    objects = [torch.randn(2, LAYERS, CHUNK_BLOCKS * BLOCK, HIDDEN).bfloat16() for _ in range(3)]
    rest = (torch.device("cpu"), D2H, shape_of(), CHUNK_BLOCKS * BLOCK, Format.NL_X_TWO_NB_BS_NH_HS, 0)
    compare(
        lambda paged, objects: ops.multi_layer_block_kv_transfer(paged, objects, BLOCK_IDS, *rest),
        lambda paged, objects: torch_ops.multi_layer_block_kv_transfer(paged, objects, BLOCK_IDS, *rest),
        paged,
        objects,
    )
    assert served == []


@pytest.mark.parametrize(
    ("changes", "chunk_tokens", "skipped", "kind", "text"),
    [
        ({}, 10, 0, ValueError, "multiple of shape_desc.bs"),
        ({}, 0, 0, ValueError, "must be positive"),
        ({}, 12, -1, ValueError, "skip_prefix_n_blocks"),
        ({"block_stride_elems": 99}, 12, 0, NotImplementedError, "Non-tight"),
    ],
)
def test_what_lmcache_refuses_it_refuses_itself(  # noqa: PLR0917
    ops: HiCacheCpuOps, changes: dict, chunk_tokens: int, skipped: int, kind: type, text: str
) -> None:
    paged, objects = make_paged(Format.NL_X_NB_BS_HS), make_objects(Format.NL_X_NB_BS_HS)
    arguments = (
        torch.device("cpu"),
        D2H,
        shape_of(**changes),
        chunk_tokens,
        Format.NL_X_NB_BS_HS,
        skipped,
    )
    with testing.unchanged([*paged, *objects]), pytest.raises(kind, match=text):
        ops.multi_layer_block_kv_transfer(tables(paged), objects, BLOCK_IDS, *arguments)


def test_blocks_with_gaps_go_to_the_compiled_op_where_there_is_one() -> None:
    """As LMCache's CUDA backend binds it; its torch op refuses them."""
    calls: list[Any] = []
    ops = HiCacheCpuOps()
    ops.multi_layer_block_kv_transfer = lambda *arguments: calls.append(arguments)  # type: ignore[method-assign]
    ops.ensure_native()
    paged, objects = make_paged(Format.NL_X_NB_BS_HS), make_objects(Format.NL_X_NB_BS_HS)
    rest = (torch.device("cpu"), D2H, shape_of(block_stride_elems=99), 12, Format.NL_X_NB_BS_HS, 0)
    arguments = (tables(paged), objects, BLOCK_IDS, *rest)
    with testing.unchanged([*paged, *objects]):
        ops.multi_layer_block_kv_transfer(*arguments)
    assert calls == [arguments]


@pytest.mark.parametrize("bad", [-1, BLOCKS])
def test_a_bad_block_id_moves_nothing(ops: HiCacheCpuOps, bad: int) -> None:
    paged, objects = make_paged(Format.NL_X_NB_BS_HS), make_objects(Format.NL_X_NB_BS_HS, 1)
    arguments = (torch.device("cpu"), D2H, shape_of(), 12, Format.NL_X_NB_BS_HS, 0)
    with testing.unchanged([*paged, *objects]), pytest.raises(IndexError):
        ops.multi_layer_block_kv_transfer(paged, objects, [3, bad], *arguments)


# --- Tokens ----------------------------------------------------------------------------------------

SLOTS = torch.tensor([13, -1, 2, 40, 7, 8, -1, 31, 0, 43])
TOKENS = len(SLOTS)
TOKEN_SHAPES = {
    Format.NL_X_TWO_NB_BS_NH_HS: (2, nb * bs, HIDDEN),
    Format.NL_X_NB_TWO_BS_NH_HS: (nb, 2, bs, HIDDEN),
    Format.NL_X_NB_BS_HS: (nb * bs, HIDDEN),
    Format.NL_X_NBBS_ONE_HS: (nb * bs, HIDDEN),
}


@pytest.mark.parametrize("direction", [D2H, H2D])
@pytest.mark.parametrize("by_address", [False, True])
@pytest.mark.parametrize("skipped", [0, 3])
@pytest.mark.parametrize("kv_format", TOKEN_SHAPES, ids=lambda kv_format: kv_format.name)
def test_tokens_of_all_layers(  # noqa: PLR0917
    ops: HiCacheCpuOps, served: list[int], kv_format: Any, skipped: int, by_address: bool, direction: Any
) -> None:
    kinds = 1 if kv_format in LATENT else 2
    paged = filled(*[TOKEN_SHAPES[kv_format]] * LAYERS)
    key_value = filled((kinds, LAYERS, TOKENS, HIDDEN))[0]

    def call(op: Callable) -> Callable:
        return lambda paged, key_value: op(
            key_value,
            tables(paged) if by_address else paged,
            SLOTS,
            torch.device("cpu"),
            nb * bs,
            direction,
            kv_format,
            block_size=bs,
            head_size=hs,
            skip_prefix_n_tokens=skipped,
        )

    compare(call(ops.multi_layer_kv_transfer), call(torch_ops.multi_layer_kv_transfer), paged, key_value)
    assert served == ([LAYERS] * 2 if kv_format == Format.NL_X_NB_TWO_BS_NH_HS else [kinds * LAYERS])


def test_formats_of_the_token_op_that_are_lmcaches_alone(ops: HiCacheCpuOps) -> None:
    paged = filled(*[(2, nb, nh, bs, hs)] * LAYERS)
    with pytest.raises(NotImplementedError, match="HND"):
        ops.multi_layer_kv_transfer(
            filled((2, LAYERS, TOKENS, HIDDEN))[0],
            paged,
            SLOTS,
            torch.device("cpu"),
            nb * bs,
            D2H,
            Format.NL_X_TWO_NB_NH_BS_HS,
        )


@pytest.mark.parametrize("direction", [D2H, H2D])
@pytest.mark.parametrize("by_address", [False, True])
@pytest.mark.parametrize(
    "kv_format",
    [Format.TWO_X_NL_X_NBBS_NH_HS, Format.TWO_X_NL_X_NB_BS_NH_HS, Format.NL_X_NBBS_ONE_HS],
    ids=lambda kv_format: kv_format.name,
)
def test_tokens_of_separate_key_and_value_buffers(
    ops: HiCacheCpuOps, served: list[int], kv_format: Any, by_address: bool, direction: Any
) -> None:
    kinds = 1 if kv_format in LATENT else 2
    paged = filled(*[(nb * bs, HIDDEN)] * (kinds * LAYERS))
    key_value = filled((kinds, LAYERS, TOKENS, HIDDEN))[0]

    def call(op: Callable) -> Callable:
        return lambda paged, key_value: op(
            key_value,
            tables(paged) if by_address else paged,
            SLOTS,
            torch.device("cpu"),
            nb * bs,
            direction,
            kv_format,
        )

    stock = torch_ops.multi_layer_kv_transfer_unilateral
    compare(call(ops.multi_layer_kv_transfer_unilateral), call(stock), paged, key_value)
    assert served == [kinds * LAYERS]


SINGLE = {
    Format.NL_X_TWO_NB_BS_NH_HS: (2, nb, bs, nh, hs),
    Format.NL_X_NB_TWO_BS_NH_HS: (nb, 2, bs, nh, hs),
    Format.NL_X_NB_BS_HS: (nb, bs, HIDDEN),
}


@pytest.mark.parametrize("direction", [D2H, H2D])
@pytest.mark.parametrize("token_major", [False, True])
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kv_format", SINGLE, ids=lambda kv_format: kv_format.name)
def test_tokens_of_one_layer(  # noqa: PLR0917
    ops: HiCacheCpuOps, served: list[int], kv_format: Any, padded: bool, token_major: bool, direction: Any
) -> None:
    paged = filled(SINGLE[kv_format])[0]
    if padded:  # blocks two tokens further apart
        shape = (*paged.shape[:-3], paged.shape[-3] + 2, *paged.shape[-2:])
        if kv_format == Format.NL_X_NB_BS_HS:
            paged = filled((nb, bs + 2, HIDDEN))[0][:, :bs]
        else:
            paged = filled(shape)[0][..., :bs, :, :]
    if kv_format == Format.NL_X_NB_BS_HS:
        tokens = filled((TOKENS, HIDDEN))[0]
    else:
        tokens = filled((TOKENS, 2, HIDDEN) if token_major else (2, TOKENS, HIDDEN))[0]

    def call(op: Callable) -> Callable:
        return lambda paged, tokens: op(tokens, paged, SLOTS, direction, kv_format, token_major)

    compare(call(ops.single_layer_kv_transfer), call(torch_ops.single_layer_kv_transfer), paged, tokens)
    assert sum(served) == (1 if kv_format == Format.NL_X_NB_BS_HS else 2)


@pytest.mark.parametrize(("direction", "token_major"), list(itertools.product([D2H, H2D], [False, True])))
def test_tokens_of_one_layer_of_sglang(
    ops: HiCacheCpuOps, served: list[int], direction: Any, token_major: bool
) -> None:
    caches = filled((nb, bs, nh, hs), (nb, bs, nh, hs))
    tokens = filled((TOKENS, 2, HIDDEN) if token_major else (2, TOKENS, HIDDEN))[0]

    def call(op: Callable) -> Callable:
        return lambda caches, tokens: op(tokens, *caches, SLOTS, direction, token_major)

    stock = torch_ops.single_layer_kv_transfer_sgl
    compare(call(ops.single_layer_kv_transfer_sgl), call(stock), caches, tokens)
    assert served == [2]


def test_a_bad_slot_moves_nothing(ops: HiCacheCpuOps) -> None:
    paged, tokens = filled((nb, 2, bs, nh, hs))[0], filled((2, 3, HIDDEN))[0]
    for bad in (nb * bs, nb * bs + 5, 10**9):
        with testing.unchanged([paged, tokens]), pytest.raises(IndexError):
            ops.single_layer_kv_transfer(
                tokens, paged, torch.tensor([3, bad, 4]), H2D, Format.NL_X_NB_TWO_BS_NH_HS
            )


def test_a_table_that_was_written_is_read_again(ops: HiCacheCpuOps) -> None:
    first, second = filled((nb * bs, HIDDEN))[0], filled((nb * bs, HIDDEN), (1, 1))[0]
    table = tables([first])
    key_value = filled((1, 1, TOKENS, HIDDEN))[0]
    arguments = (SLOTS, torch.device("cpu"), nb * bs, H2D, Format.NL_X_NB_BS_HS)
    ops.multi_layer_kv_transfer(key_value, table, *arguments)
    table.copy_(tables([second]))
    with testing.unchanged([first]):
        ops.multi_layer_kv_transfer(key_value, table, *arguments)
    assert torch.equal(second[13].view(torch.uint8), key_value[0, 0, 0].view(torch.uint8))
    del table
    assert not ops.__dict__["_hicache_tables"]
