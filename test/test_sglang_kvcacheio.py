"""The functions of SGLang's kvcacheio, on every device and in every place for pools and indices.

SGLang is not needed. Each case says what the function means by index assignment on the pools'
real shapes.
"""

import inspect

import pytest
import torch
from sglang_pools import (
    DEVICE,
    DIM,
    DTYPE,
    HEADS,
    HOST,
    ITEM,
    LAYERS,
    PAGE,
    Pools,
    expect,
    loads,
    pages,
    stores,
)

from torch_hicache import check_errors
from torch_hicache.integrations.sglang import kvcacheio
from torch_hicache.testing import Placement, Snapshot, fill_pool, placements, unchanged


def test_signatures() -> None:
    """Names and order as in sglang-kernel 0.4.10."""
    tail = ["block_quota", "num_warps_per_block"]
    pair = ["src_k", "dst_k", "src_v", "dst_v"]
    indices = ["src_indices", "dst_indices"]
    tables = ["src_k_layers", "dst_k_layers", "src_v_layers", "dst_v_layers"]
    to_host = ["src_k_layers", "dst_k", "src_v_layers", "dst_v"]
    expected = {
        "per_layer": [*pair, *indices, "item_size", *tail],
        "per_layer_pf_lf": [*pair, *indices, "layer_id", "item_size", "src_layout_dim", *tail],
        "per_layer_ph_lf": [
            *pair,
            *indices,
            "layer_id",
            "item_size",
            "src_layout_dim",
            "page_size",
            "head_num",
            *tail,
        ],
        "all_layer": [*tables, *indices, "item_size", "num_layers", *tail],
        "all_layer_lf_pf": [*to_host, *indices, "item_size", "dst_layout_dim", "num_layers", *tail],
        "all_layer_lf_ph": [
            *to_host,
            *indices,
            "item_size",
            "dst_layout_dim",
            "num_layers",
            "page_size",
            "head_num",
            *tail,
        ],
        "direct": ["src_layers", "dst_layers", *indices, "page_size"],
        "per_layer_direct_pf_lf": ["src_ptrs", "dst_ptrs", *indices, "layer_id", "page_size"],
        "all_layer_direct_lf_pf": ["src_ptrs", "dst_ptrs", *indices, "page_size"],
        "per_layer_mla": ["src", "dst", *indices, "item_size", *tail],
        "per_layer_mla_pf_lf": ["src", "dst", *indices, "layer_id", "item_size", "src_layout_dim", *tail],
        "all_layer_mla": ["src_layers", "dst_layers", *indices, "item_size", "num_layers", *tail],
        "all_layer_mla_lf_pf": [
            "src_layers",
            "dst",
            *indices,
            "item_size",
            "dst_layout_dim",
            "num_layers",
            *tail,
        ],
    }
    for name, parameters in expected.items():
        function = getattr(kvcacheio, f"transfer_kv_{name}")
        assert list(inspect.signature(function).parameters) == parameters, name


TOKENS = (torch.tensor([5, 27, 0, -1, 13]), torch.tensor([35, 2, 2, 8, 20]))  # device, host


@pytest.mark.parametrize("layer", [0, LAYERS - 1])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_load_one_layer(placement: Placement, layer: int, index_dtype: torch.dtype) -> None:
    dst_indices, src_indices = (
        placement.dst_indices(TOKENS[0], index_dtype),
        placement.src_indices(TOKENS[1], index_dtype),
    )
    for layout in ("layer_first", "page_first"):
        dst, src = loads(placement, layout)
        for components in ((0, 1), (0,)):
            snapshot = Snapshot([*dst.tensors, *src.tensors])
            expect(snapshot, dst, src, TOKENS, [layer], components=components)
            dst_layers = [dst.layers(i)[layer] for i in components]
            sides = [t for i in components for t in (src.component(i), dst_layers[i])]
            suffix = "_mla" if components == (0,) else ""
            if layout == "layer_first":
                sides = [t for i in components for t in (src.layers(i)[layer], dst_layers[i])]
                getattr(kvcacheio, f"transfer_kv_per_layer{suffix}")(
                    *sides, src_indices, dst_indices, ITEM
                )
            else:
                getattr(kvcacheio, f"transfer_kv_per_layer{suffix}_pf_lf")(
                    *sides, src_indices, dst_indices, layer, ITEM, LAYERS * ITEM, block_quota=2
                )
            snapshot.compare(f"{layout} {components}")


def test_store_all_layers_through_tables(placement: Placement) -> None:
    tokens = TOKENS[1].unique(), TOKENS[0][[0, 1, 2, 4]]
    dst_indices, src_indices = placement.dst_indices(tokens[0]), placement.src_indices(tokens[1])
    for layout in ("layer_first", "page_first"):
        dst, src = stores(placement, layout)
        tables = [src.table(i, placement.device) for i in (0, 1)]
        for components in ((0, 1), (0,)):
            snapshot = Snapshot([*dst.tensors, *src.tensors])
            expect(snapshot, dst, src, tokens, range(LAYERS), components=components)
            suffix = "_mla" if components == (0,) else ""
            if layout == "layer_first":
                host = [dst.table(i, placement.device) for i in (0, 1)]
                sides = [t for i in components for t in (tables[i], host[i])]
                getattr(kvcacheio, f"transfer_kv_all_layer{suffix}")(
                    *sides, src_indices, dst_indices, ITEM, LAYERS
                )
            else:
                sides = [t for i in components for t in (tables[i], dst.component(i))]
                getattr(kvcacheio, f"transfer_kv_all_layer{suffix}_lf_pf")(
                    *sides, src_indices, dst_indices, ITEM, LAYERS * ITEM, LAYERS
                )
            snapshot.compare(f"{layout} {components}")


def test_page_head(placement: Placement) -> None:
    load, store = pages([4, 0, 6]), pages([8, 1, 0])
    dst, src = loads(placement, "page_head")
    snapshot = Snapshot([*dst.tensors, *src.tensors])
    expect(snapshot, dst, src, (load, store), [1])
    kvcacheio.transfer_kv_per_layer_ph_lf(
        src.tensors[0],
        dst.layers(0)[1],
        src.tensors[1],
        dst.layers(1)[1],
        placement.src_indices(store),
        placement.dst_indices(load),
        1,
        ITEM,
        LAYERS * ITEM,
        PAGE,
        HEADS,
    )
    snapshot.compare("load")
    dst, src = stores(placement, "page_head")
    snapshot = Snapshot([*dst.tensors, *src.tensors])
    expect(snapshot, dst, src, (store, load), range(LAYERS))
    kvcacheio.transfer_kv_all_layer_lf_ph(
        src.table(0, placement.device),
        dst.tensors[0],
        src.table(1, placement.device),
        dst.tensors[1],
        placement.src_indices(load),
        placement.dst_indices(store),
        ITEM,
        LAYERS * ITEM,
        LAYERS,
        PAGE,
        HEADS,
    )
    snapshot.compare("store")


def test_page_first_direct(placement: Placement) -> None:
    load, store = pages([4, 0, 6]), pages([8, 1, 0])
    for components in ((0, 1), (0,)):
        dst, src = loads(placement, "page_first_direct")
        snapshot = Snapshot([*dst.tensors, *src.tensors])
        expect(snapshot, dst, src, (load, store), [2], components=components)
        kvcacheio.transfer_kv_per_layer_direct_pf_lf(
            [src.tensors[i] for i in components],
            [dst.layers(i)[2] for i in components],
            placement.src_indices(store),
            placement.dst_indices(load),
            2,
            PAGE,
        )
        snapshot.compare("load")
        dst, src = stores(placement, "page_first_direct")
        snapshot = Snapshot([*dst.tensors, *src.tensors])
        expect(snapshot, dst, src, (store, load), range(LAYERS), components=components)
        kvcacheio.transfer_kv_all_layer_direct_lf_pf(
            [layer for i in components for layer in src.layers(i)],
            [dst.tensors[i] for i in components],
            placement.src_indices(load),
            placement.dst_indices(store),
            PAGE,
        )
        snapshot.compare("store")


def test_direct(placement: Placement) -> None:
    tokens = pages([6, 2]), pages([8, 3])
    dst, src = loads(placement, "layer_first")
    snapshot = Snapshot([*dst.tensors, *src.tensors])
    expect(snapshot, dst, src, tokens, range(LAYERS))
    kvcacheio.transfer_kv_direct(
        [*src.layers(0), *src.layers(1)],
        dst.tensors,
        placement.src_indices(tokens[1]),
        placement.dst_indices(tokens[0]),
        PAGE,
    )
    snapshot.compare("load")


def test_strided_rows_keep_their_distance(placement: Placement) -> None:
    dst = placement.dst((DEVICE, HEADS, DIM), DTYPE, padding={0: 6})
    src = placement.src((HOST, HEADS, DIM), DTYPE, padding={0: 3})
    fill_pool([dst])
    fill_pool([src], seed=1)
    snapshot = Snapshot([dst, src])
    snapshot.transfer([dst], [src], *TOKENS)
    indices = placement.src_indices(TOKENS[1]), placement.dst_indices(TOKENS[0])
    kvcacheio.transfer_kv_per_layer_mla(src, dst, *indices, ITEM)
    snapshot.compare("padded rows")


def test_tables_and_indices_of_inference_mode(placement: Placement) -> None:
    """They have no version, and are no less good."""
    dst, src = stores(placement, "page_head")
    with torch.inference_mode():
        load, store = pages([4, 0]), pages([8, 1])
        snapshot = Snapshot([*dst.tensors, *src.tensors])
        expect(snapshot, dst, src, (store, load), range(LAYERS))
        tables = src.table(0, placement.device), src.table(1, placement.device)
        for _ in range(2):
            kvcacheio.transfer_kv_all_layer_lf_ph(
                tables[0],
                dst.tensors[0],
                tables[1],
                dst.tensors[1],
                placement.src_indices(load),
                placement.dst_indices(store),
                ITEM,
                LAYERS * ITEM,
                LAYERS,
                PAGE,
                HEADS,
            )
        snapshot.compare("inference mode")


def test_no_indices_are_a_no_op(placement: Placement) -> None:
    dst, src = Pools(placement.dst, DEVICE, "layers", 1), Pools(placement.src, HOST, "page_first", 9)
    none = placement.src_indices([]), placement.dst_indices([])
    with unchanged([*dst.tensors, *src.tensors]):
        kvcacheio.transfer_kv_per_layer_mla_pf_lf(
            src.tensors[0], dst.tensors[0], *none, 0, ITEM, LAYERS * ITEM
        )
        kvcacheio.transfer_kv_direct([], [], *none, PAGE)


@pytest.mark.backend("cuda")
def test_no_call_waits_for_the_device() -> None:
    """Once tables are read; bad pages are found on the device too."""
    placement = next(p for p in placements("cuda") if str(p) == "cuda-load-device_indices")
    dst, src = loads(placement, "page_head")
    target = Pools(placement.src, HOST, "page_first", 30)
    source = Pools(placement.dst, DEVICE, "layers", 40)
    tables = source.table(0, "cuda"), source.table(1, "cuda")
    good, bad = pages([2, 0]).cuda(), pages([1, 3]).flip(0).cuda()
    sides = src.tensors[0], dst.layers(0)[1], src.tensors[1], dst.layers(1)[1]

    def load(tokens: torch.Tensor) -> None:
        kvcacheio.transfer_kv_per_layer_ph_lf(*sides, good, tokens, 1, ITEM, LAYERS * ITEM, PAGE, HEADS)

    def store() -> None:
        kvcacheio.transfer_kv_all_layer_lf_pf(
            tables[0],
            target.tensors[0],
            tables[1],
            target.tensors[1],
            good,
            good,
            ITEM,
            LAYERS * ITEM,
            LAYERS,
        )

    load(good)
    store()
    torch.cuda.set_sync_debug_mode("error")
    try:
        load(good)
        store()
        load(bad)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with pytest.raises(IndexError, match=r"dst_indices\[[01]\] is 4611686018427387904"):
        check_errors("cuda")


@pytest.mark.backend("cuda")
def test_capture_needs_a_table_that_was_read() -> None:
    sources = torch.arange(32, dtype=torch.uint8, device="cuda").view(1, 4, 8)
    dst = torch.zeros(4, 8, dtype=torch.uint8, device="cuda")
    index = torch.tensor([1, 3], device="cuda")
    table = torch.tensor([sources.data_ptr()], dtype=torch.uint64, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(ValueError, match="must have been used once before"):
        kvcacheio.transfer_kv_all_layer_mla_lf_pf(table, dst, index, index, 8, 8, 1)
    kvcacheio.transfer_kv_all_layer_mla_lf_pf(table, dst, index, index, 8, 8, 1)
    dst.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kvcacheio.transfer_kv_all_layer_mla_lf_pf(table, dst, index, index, 8, 8, 1)
    index.copy_(torch.tensor([0, 2]))
    graph.replay()
    expected = torch.zeros_like(dst)
    expected[index] = sources[0][index]
    assert torch.equal(dst, expected)
