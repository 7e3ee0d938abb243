"""The functions of SGLang's JIT transfer module, on every device and in every place for pools."""

import inspect
from collections.abc import Callable

import pytest
import torch
from sglang_pools import (
    DEVICE,
    DIM,
    DTYPE,
    HEADS,
    HOST,
    HOST_PAGES,
    ITEM,
    LAYERS,
    PAGE,
    expect,
    loads,
    pages,
    stores,
    table_of,
)

from torch_hicache import check_errors
from torch_hicache.integrations.sglang import jit
from torch_hicache.testing import Placement, Snapshot, fill_pool, unchanged

TOKENS = (torch.tensor([5, 27, 0, -1, 13]), torch.tensor([35, 2, 2, 8, 20]))
GROUPS = 2  # of one head each


def test_signatures() -> None:
    """Names and order as in SGLang 0.5.23; those behind the star only by name."""
    hints = ["unroll", "block_quota", "page_size"]
    expected = {
        "transfer_hicache_one_layer": (
            ["k_cache_dst", "v_cache_dst", "indices_dst", "k_cache_src", "v_cache_src", "indices_src"],
            ["element_dim", *hints],
        ),
        "transfer_hicache_all_layer": (
            ["k_ptr_dst", "v_ptr_dst", "indices_dst", "k_ptr_src", "v_ptr_src", "indices_src"],
            ["kv_cache_src_stride_bytes", "kv_cache_dst_stride_bytes", "element_size", *hints],
        ),
        "transfer_hicache_one_layer_mla": (
            ["cache_dst", "indices_dst", "cache_src", "indices_src"],
            ["element_dim", *hints],
        ),
        "transfer_hicache_all_layer_mla": (
            ["ptr_dst", "indices_dst", "ptr_src", "indices_src"],
            ["cache_src_stride_bytes", "cache_dst_stride_bytes", "element_size", *hints],
        ),
        "transfer_hicache_all_layer_staged_lf_pf": (
            [
                "k_ptr_src",
                "v_ptr_src",
                "src_indices",
                "dst_indices",
                *["staging_k", "staging_v", "dst_k", "dst_v"],
            ],
            ["page_size", "element_size", "unroll", "block_quota"],
        ),
        "transfer_hicache_all_layer_mla_staged_lf_pf": (
            ["ptr_src", "src_indices", "dst_indices", "staging", "dst"],
            ["page_size", "element_size", "unroll", "block_quota"],
        ),
        "transfer_hicache_one_layer_page_unified_lf": (
            ["k_cache_dst", "v_cache_dst", "src", "src_indices", "dst_indices", "layer_id"],
            ["block_quota"],
        ),
        "transfer_hicache_one_layer_mla_page_unified_lf": (
            ["cache_dst", "src", "src_indices", "dst_indices", "layer_id"],
            ["block_quota"],
        ),
        "transfer_hicache_all_layer_staged_lf_page_unified": (
            ["k_ptr_src", "v_ptr_src", "src_pages", "dst_pages", "staging", "dst"],
            [],
        ),
        "transfer_hicache_all_layer_mla_staged_lf_page_unified": (
            ["ptr_src", "src_pages", "dst_pages", "staging", "dst"],
            [],
        ),
        "can_use_hicache_jit_kernel": ([], ["element_size", *hints]),
        "can_use_write_back_jit_kernel": ([], ["element_size", "unroll", "block_quota"]),
        "can_use_page_unified_load_back_jit_kernel": ([], ["group_bytes", "block_quota"]),
    }
    for name, (positional, by_name) in expected.items():
        parameters = inspect.signature(getattr(jit, name)).parameters.values()
        assert [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD] == positional, name
        assert [p.name for p in parameters if p.kind is p.KEYWORD_ONLY] == by_name, name


def test_one_layer(placement: Placement) -> None:
    """Packed layers and, out of page_first, layers whose rows lie a stride apart."""
    indices = placement.dst_indices(TOKENS[0]), placement.src_indices(TOKENS[1])
    for layout in ("layer_first", "page_first"):
        dst, src = loads(placement, layout)
        snapshot = Snapshot([*dst.tensors, *src.tensors])
        expect(snapshot, dst, src, TOKENS, [1])
        src_k, src_v = (t[1] if layout == "layer_first" else t[:, 1] for t in src.tensors)
        dst_k, dst_v = dst.layers(0)[1], dst.layers(1)[1]
        jit.transfer_hicache_one_layer(
            dst_k, dst_v, indices[0], src_k, src_v, indices[1], element_dim=HEADS * DIM, page_size=PAGE
        )
        snapshot.compare(layout)
        dst_k, dst_v = dst.layers(0)[2], dst.layers(1)[2]
        expect(snapshot, dst, src, TOKENS, [2], components=[0])
        src_k = src.tensors[0][2] if layout == "layer_first" else src.tensors[0][:, 2]
        jit.transfer_hicache_one_layer_mla(
            dst_k, indices[0], src_k, indices[1], element_dim=HEADS * DIM, block_quota=1, unroll=2
        )
        snapshot.compare(f"{layout}, one tensor")


def test_all_layers(placement: Placement) -> None:
    tokens = TOKENS[1].unique(), TOKENS[0][[0, 1, 2, 4]]
    indices = placement.dst_indices(tokens[0]), placement.src_indices(tokens[1])
    for layout, stride in (("layer_first", ITEM), ("page_first", LAYERS * ITEM)):
        dst, src = stores(placement, layout)
        src_tables = [src.table(i, placement.device) for i in (0, 1)]
        dst_tables = [
            table_of(
                [t[i] if layout == "layer_first" else t[:, i] for i in range(LAYERS)], placement.device
            )
            for t in dst.tensors
        ]
        for components in ((0,), (0, 1)):
            snapshot = Snapshot([*dst.tensors, *src.tensors])
            expect(snapshot, dst, src, tokens, range(LAYERS), components=components)
            if components == (0,):
                jit.transfer_hicache_all_layer_mla(
                    dst_tables[0],
                    indices[0],
                    src_tables[0],
                    indices[1],
                    cache_src_stride_bytes=ITEM,
                    cache_dst_stride_bytes=stride,
                    element_size=ITEM,
                )
            else:
                jit.transfer_hicache_all_layer(
                    *dst_tables,
                    indices[0],
                    *src_tables,
                    indices[1],
                    kv_cache_src_stride_bytes=ITEM,
                    kv_cache_dst_stride_bytes=stride,
                    element_size=ITEM,
                )
            snapshot.compare(f"{layout} {components}")


def test_staged_write_back(placement: Placement) -> None:
    load, store = pages([4, 0, 6]), pages([8, 1, 0])
    dst, src = stores(placement, "page_first")
    indices = placement.src_indices(load), placement.dst_indices(store)
    tables = [src.table(i, placement.device) for i in (0, 1)]
    snapshot = Snapshot([*dst.tensors, *src.tensors])
    expect(snapshot, dst, src, (store, load), range(LAYERS), components=[0])
    jit.transfer_hicache_all_layer_mla_staged_lf_pf(
        tables[0], *indices, None, dst.tensors[0], page_size=PAGE
    )
    snapshot.compare("one tensor")
    expect(snapshot, dst, src, (store, load), range(LAYERS))
    jit.transfer_hicache_all_layer_staged_lf_pf(
        *tables, *indices, None, None, *dst.tensors, page_size=PAGE, element_size=ITEM
    )
    snapshot.compare("K and V")


def test_staged_write_back_of_two_widths(placement: Placement) -> None:
    tables, dst, layers = [], [], []
    for i, width in enumerate((6, 10)):
        planes = [placement.src((DEVICE, width), torch.uint8) for _ in range(LAYERS)]
        if i == 0:  # K at one distance, V wherever it lies
            planes = list(placement.src((LAYERS, DEVICE, width), torch.uint8).unbind(0))
        pool = placement.dst((HOST, LAYERS, width), torch.uint8)
        for k, plane in enumerate(planes):
            fill_pool([plane], seed=10 * i + k + 1)
        fill_pool([pool], seed=50 + i)
        tables.append(table_of(planes, placement.device))
        dst.append(pool)
        layers.append(planes)
    load, store = pages([4, 0]), pages([8, 1])
    snapshot = Snapshot([*dst, *(plane for planes in layers for plane in planes)])
    for pool, planes in zip(dst, layers, strict=True):
        for k, plane in enumerate(planes):
            snapshot.twin(pool)[store, k] = snapshot.twin(plane)[load]
    indices = placement.src_indices(load), placement.dst_indices(store)
    jit.transfer_hicache_all_layer_staged_lf_pf(*tables, *indices, None, None, *dst, page_size=PAGE)
    snapshot.compare("two widths")


def test_page_unified(placement: Placement) -> None:
    """[pages, groups, layers, 2, page_size, heads of a group, dim]; tokens one way, pages the other."""
    shape = (HOST_PAGES, GROUPS, LAYERS, 2, PAGE, HEADS // GROUPS, DIM)
    dst, _src = loads(placement, "page_first")
    unified = placement.src(shape, DTYPE)
    fill_pool([unified], seed=3)
    snapshot = Snapshot([*dst.tensors, unified])
    for d, s in zip(*(tokens.tolist() for tokens in TOKENS), strict=True):
        for i in (0, 1):
            if d >= 0:
                heads = snapshot.twin(unified)[s // PAGE, :, 1, i, s % PAGE]
                snapshot.twin(dst.layers(i)[1])[d] = heads.flatten(0, 1)
    indices = placement.src_indices(TOKENS[1]), placement.dst_indices(TOKENS[0])
    layer = dst.layers(0)[1], dst.layers(1)[1]
    jit.transfer_hicache_one_layer_page_unified_lf(*layer, unified, *indices, 1)
    snapshot.compare("load")

    source = stores(placement, "page_first")[1]
    target = placement.dst(shape, DTYPE)
    fill_pool([target], seed=4)
    snapshot = Snapshot([*source.tensors, target])
    for d, s in ((8, 2), (0, 6)):
        for k in range(LAYERS):
            for i in (0, 1):
                rows = snapshot.twin(source.layers(i)[k])[s * PAGE : (s + 1) * PAGE]
                rows = rows.unflatten(1, (GROUPS, -1)).transpose(0, 1)
                snapshot.twin(target)[d, :, k, i] = rows
    tables = [source.table(i, placement.device) for i in (0, 1)]
    page_ids = placement.src_indices([2, 6]), placement.dst_indices([8, 0])
    jit.transfer_hicache_all_layer_staged_lf_page_unified(*tables, *page_ids, None, target)
    snapshot.compare("store")


def test_page_unified_of_one_tensor(placement: Placement) -> None:
    width = 12
    unified = placement.src((HOST_PAGES, LAYERS, PAGE, width), torch.uint8)
    layer = placement.dst((DEVICE, 1, width), torch.uint8)
    fill_pool([unified], seed=3)
    fill_pool([layer])
    snapshot = Snapshot([unified, layer])
    for d, s in zip(*(tokens.tolist() for tokens in TOKENS), strict=True):
        if d >= 0:
            snapshot.twin(layer)[d, 0] = snapshot.twin(unified)[s // PAGE, 2, s % PAGE]
    indices = placement.src_indices(TOKENS[1]), placement.dst_indices(TOKENS[0])
    jit.transfer_hicache_one_layer_mla_page_unified_lf(layer, unified, *indices, 2)
    snapshot.compare("load")

    layers = [placement.src((DEVICE, width), torch.uint8) for _ in range(LAYERS)]
    for k, each in enumerate(layers):
        fill_pool([each], seed=5 + k)
    target = placement.dst((HOST_PAGES, LAYERS, PAGE, width), torch.uint8)
    fill_pool([target], seed=9)
    snapshot = Snapshot([*layers, target])
    for k, each in enumerate(layers):
        snapshot.twin(target)[7, k] = snapshot.twin(each)[3 * PAGE : 4 * PAGE]
    page_ids = placement.src_indices([3]), placement.dst_indices([7])
    table = table_of(layers, placement.device)
    jit.transfer_hicache_all_layer_mla_staged_lf_page_unified(table, *page_ids, None, target)
    snapshot.compare("store")


WRAPS = 6148914691236517208  # row 8 of this pool, were the product cut to 64 bits


@pytest.mark.parametrize("token", [HOST, -2, 1 << 62, -(1 << 62), WRAPS])
def test_page_unified_tokens_out_of_range(placement: Placement, token: int) -> None:
    unified = placement.src((HOST_PAGES, LAYERS, PAGE, 12), torch.uint8)
    layer = placement.dst((DEVICE, 12), torch.uint8)
    fill_pool([unified])
    fill_pool([layer], seed=1)
    src_indices, dst_indices = placement.src_indices([token]), placement.dst_indices([0])

    def load() -> None:
        jit.transfer_hicache_one_layer_mla_page_unified_lf(layer, unified, src_indices, dst_indices, 0)
        if placement.device != "cpu":
            check_errors(placement.device)

    on_cpu = placement.src_indices_device == "cpu"
    text = rf"{token}, out of range for {HOST} tokens" if on_cpu else ""
    with unchanged([unified, layer]), pytest.raises(IndexError, match=rf"src_indices\[0\] is {text}"):
        load()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int16, torch.uint8])
def test_page_unified_indices_of_other_dtypes(device: str, dtype: torch.dtype) -> None:
    unified = torch.ones(HOST_PAGES, LAYERS, PAGE, 12, dtype=torch.uint8)
    layer = torch.zeros(DEVICE, 12, dtype=torch.uint8)
    bad, good = torch.ones(1, dtype=dtype, device=device), torch.tensor([1], device=device)
    load = jit.transfer_hicache_one_layer_mla_page_unified_lf
    with unchanged([layer]), pytest.raises(ValueError, match="src_indices must be 1-D, int32 or int64"):
        load(layer, unified, bad, good, 0)
    with unchanged([layer]), pytest.raises(ValueError, match="dst_indices must be int32 or int64"):
        load(layer, unified, good, bad, 0)


def test_page_unified_indices_of_two_dimensions() -> None:
    unified = torch.ones(HOST_PAGES, LAYERS, PAGE, 12, dtype=torch.uint8)
    layer = torch.zeros(DEVICE, 12, dtype=torch.uint8)
    one = torch.tensor([1])
    with unchanged([layer]), pytest.raises(ValueError, match="src_indices must be 1-D, int32 or int64"):
        jit.transfer_hicache_one_layer_mla_page_unified_lf(layer, unified, one[None], one, 0)


def test_can_use() -> None:
    for size in (1, 20, 576, 656, 65536):
        assert jit.can_use_hicache_jit_kernel(element_size=size, page_size=1)
        assert jit.can_use_write_back_jit_kernel(element_size=size)
        assert jit.can_use_page_unified_load_back_jit_kernel(group_bytes=size)
    assert not jit.can_use_hicache_jit_kernel(element_size=0)
    assert not jit.can_use_hicache_jit_kernel(element_size=128, block_quota=0)
    assert not jit.can_use_hicache_jit_kernel(element_size=128, page_size=0)
    assert not jit.can_use_write_back_jit_kernel(element_size=128, block_quota=-1)
    assert not jit.can_use_page_unified_load_back_jit_kernel(group_bytes=-16)


def bad_calls() -> dict[str, tuple[Callable[[], None], str]]:
    layer = torch.zeros(DEVICE, HEADS, DIM, dtype=DTYPE)
    one, page = torch.tensor([0]), torch.arange(PAGE)
    table = table_of([layer], "cpu")
    pool = torch.zeros(HOST, 1, HEADS, DIM, dtype=DTYPE)
    unified = torch.zeros(HOST_PAGES, GROUPS, LAYERS, 2, PAGE, HEADS // GROUPS, DIM, dtype=DTYPE)

    def one_layer(**hints: int) -> None:
        jit.transfer_hicache_one_layer_mla(layer, one, layer.clone(), one, **hints)

    def all_layer(src_stride: int = ITEM, dst_stride: int = ITEM, size: int | None = None) -> None:
        strides = {"cache_src_stride_bytes": src_stride, "cache_dst_stride_bytes": dst_stride}
        jit.transfer_hicache_all_layer_mla(table, one, table, one, element_size=size, **strides)

    def staged(page_size: int = PAGE, size: int | None = None, index: torch.Tensor = page) -> None:
        jit.transfer_hicache_all_layer_mla_staged_lf_pf(
            table, index, index, None, pool, page_size=page_size, element_size=size
        )

    def load(layer_id: int = 0, src: torch.Tensor = unified) -> None:
        jit.transfer_hicache_one_layer_page_unified_lf(layer, layer.clone(), src, one, one, layer_id)

    return {
        "quota": (lambda: one_layer(block_quota=0), "block_quota must be 1 or more, got 0"),
        "unroll": (lambda: one_layer(unroll=0), "unroll must be 1 or more, got 0"),
        "page": (lambda: one_layer(page_size=0), "page_size must be 1 or more, got 0"),
        "element_dim": (lambda: one_layer(element_dim=0), "element_dim must be 1 or more, got 0"),
        "element_dim_divides": (lambda: one_layer(element_dim=9), "dst must hold contiguous rows of 18"),
        "strides_differ": (lambda: all_layer(40), "without element_size both sides are packed"),
        "rows_meet": (lambda: all_layer(10, 10, ITEM), "rows of 20 bytes can't be 10 bytes apart"),
        "zero_size": (lambda: all_layer(size=0), "item_size must be 1 or more, got 0"),
        "staged_page": (lambda: staged(0), "page_size must be 1 or more, got 0"),
        "staged_size": (lambda: staged(size=16), "element_size must be the destination's row, 20 bytes"),
        "staged_part": (lambda: staged(index=page[:3]), "must be whole pages of 4 tokens, got 3 indices"),
        "layer": (lambda: load(LAYERS), r"layer_id must be in \[0, 3\), got 3"),
        "negative_layer": (lambda: load(-1), r"layer_id must be in \[0, 3\), got -1"),
        "dimensions": (lambda: load(src=unified[0]), "src must be .pages, groups, layers, 2, page_size"),
        "no_key_value": (lambda: load(src=unified.transpose(2, 3)), "src must be .pages, groups"),
        "empty_page": (lambda: load(src=unified[:, :, :0]), "src must have no dimension of 0"),
        "not_contiguous": (lambda: load(src=unified[:, :, :, :, ::2]), "src must be contiguous"),
    }


@pytest.mark.parametrize("name", list(bad_calls()))
def test_bad_calls(name: str) -> None:
    call, text = bad_calls()[name]
    with pytest.raises(ValueError, match=text):
        call()
