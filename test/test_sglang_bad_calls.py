"""What the functions of SGLang's kvcacheio refuse: tables, pages, sizes and layers that can't be."""

import copy
import io
import mmap
import types
import warnings
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
    table_of,
)
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.two_tensor import TwoTensor

from torch_hicache import check_errors
from torch_hicache.integrations.sglang import addresses, jit, kvcacheio, plugin
from torch_hicache.integrations.sglang.pages import page_indices
from torch_hicache.testing import Placement, Snapshot, fill_pool, unchanged

BROKEN_PAGES = {
    "starts_off_a_page": [1, 2, 3, 4],
    "is_reversed": [7, 6, 5, 4],
    "jumps_at_its_end": [4, 5, 6, 8],
    "is_partly_padding": [4, 5, -1, 7],
    "padding_first": [-1, 5, 6, 7],
    "wraps_below_zero": [-4, -3, -2, -1],
    "below_padding": [-2, -2, -2, -2],
}


@pytest.mark.parametrize("broken", BROKEN_PAGES.values(), ids=BROKEN_PAGES)
def test_indices_that_are_no_page(placement: Placement, broken: list[int]) -> None:
    """On the CPU refused at once. On a device recorded, and the page's bytes stay; other pages move."""
    dst, src = loads(placement, "page_head")
    tokens = pages([1, 3, 0])
    both = {"src": tokens.clone(), "dst": tokens.clone()}
    for side in ("src", "dst"):
        wrong = dict(both)
        wrong[side] = torch.cat([torch.tensor(broken), tokens[PAGE:]])
        args = (
            src.tensors[0],
            dst.layers(0)[0],
            src.tensors[1],
            dst.layers(1)[0],
            placement.src_indices(wrong["src"]),
            placement.dst_indices(wrong["dst"]),
            0,
            ITEM,
            LAYERS * ITEM,
            PAGE,
            HEADS,
        )
        on_cpu = (
            placement.src_indices_device if side == "src" else placement.dst_indices_device
        ) == "cpu"
        snapshot = Snapshot([*dst.tensors, *src.tensors])
        if on_cpu:
            with pytest.raises(ValueError, match=rf"{side}_indices must be whole pages of 4"):
                kvcacheio.transfer_kv_per_layer_ph_lf(*args)
        else:
            kvcacheio.transfer_kv_per_layer_ph_lf(*args)
            expect(snapshot, dst, src, (tokens[PAGE:], tokens[PAGE:]), [0])
            with pytest.raises(IndexError, match=rf"{side}_indices\[0\] is"):
                check_errors(placement.device)
        snapshot.compare(f"{side}: {broken}")


def test_pages_of_padding_are_skipped(placement: Placement) -> None:
    dst, src = loads(placement, "page_first_direct")
    load, store = pages([4, 0]), pages([8, 1])
    load[:PAGE] = -1
    snapshot = Snapshot([*dst.tensors, *src.tensors])
    expect(snapshot, dst, src, (load, store), [0])
    kvcacheio.transfer_kv_per_layer_direct_pf_lf(
        src.tensors,
        [dst.layers(0)[0], dst.layers(1)[0]],
        placement.src_indices(store),
        placement.dst_indices(load),
        0,
        PAGE,
    )
    snapshot.compare("padding")


def test_a_table_bounds_its_planes(placement: Placement) -> None:
    """The next plane ends a plane: the first token behind a layer is refused or recorded."""
    source = placement.src((LAYERS, DEVICE, HEADS, DIM), DTYPE)
    dst = placement.dst((HOST, LAYERS, HEADS, DIM), DTYPE)
    fill_pool([source], 1)
    fill_pool([dst], seed=1)
    table = table_of([source[i] for i in range(LAYERS)], placement.device)
    args = placement.src_indices([DEVICE]), placement.dst_indices([0]), ITEM, LAYERS * ITEM, LAYERS
    with unchanged([source, dst]):
        if placement.src_indices_device == "cpu":
            with pytest.raises(IndexError, match=rf"src_indices\[0\] is {DEVICE}, .* {DEVICE} slots"):
                kvcacheio.transfer_kv_all_layer_mla_lf_pf(table, dst, *args)
        else:
            kvcacheio.transfer_kv_all_layer_mla_lf_pf(table, dst, *args)
            with pytest.raises(IndexError, match=rf"is {DEVICE}, out of range for {DEVICE} slots"):
                check_errors(placement.device)


def bad_tables(device: str) -> dict[str, tuple[object, str]]:
    address = torch.zeros(8).data_ptr()
    return {
        "sparse": (
            torch.ones(LAYERS, dtype=torch.int64, device=device).to_sparse(),
            "must be a 1-D uint64",
        ),
        "zero": (
            torch.zeros(LAYERS, dtype=torch.uint64, device=device),
            r"\[0\] must be an address, got 0",
        ),
        "negative": (
            torch.full((LAYERS,), -5, dtype=torch.int64, device=device),
            "must be an address, got -5",
        ),
        "too_large": (
            torch.full((LAYERS,), 1 << 60, dtype=torch.int64, device=device),
            "must be an address",
        ),
        "short": (torch.full((1,), address, dtype=torch.int64, device=device), "must hold num_layers"),
        "two_dimensions": (torch.zeros(1, 3, dtype=torch.uint64, device=device), "must be a 1-D uint64"),
        "floats": (torch.zeros(3, device=device), "must be a 1-D uint64"),
        "a_list": ([1, 2, 3], "must be a 1-D uint64"),
    }


@pytest.mark.parametrize("name", list(bad_tables("cpu")))
def test_bad_tables(device: str, name: str) -> None:
    table, text = bad_tables(device)[name]
    dst = torch.zeros(HOST, LAYERS, HEADS, DIM, dtype=DTYPE)
    index = torch.tensor([0])
    with unchanged([dst]), pytest.raises(ValueError, match=text):
        kvcacheio.transfer_kv_all_layer_mla_lf_pf(table, dst, index, index, ITEM, LAYERS * ITEM, LAYERS)


@pytest.mark.parametrize("address", [8, 4096, (1 << 47) - 4096])
def test_addresses_outside_of_the_process(address: int) -> None:
    table = torch.tensor([address], dtype=torch.uint64)
    dst = torch.zeros(HOST, HEADS, DIM, dtype=DTYPE)
    index = torch.tensor([0])
    with unchanged([dst]), pytest.raises(ValueError, match="must be an address of this process"):
        kvcacheio.transfer_kv_all_layer_mla_lf_pf(table, dst, index, index, ITEM, ITEM, 1)


SEGMENTS = [  # as torch.cuda.memory_snapshot has them: live and free blocks on two devices
    {
        "device": owner,
        "address": base,
        "total_size": 4096,
        "blocks": [
            {"address": base, "size": 1024, "requested_size": 1000, "state": "active_allocated"},
            {"address": base + 1024, "size": 3072, "requested_size": 0, "state": "inactive"},
        ],
    }
    for owner, base in ((1, 1 << 41), (0, 1 << 40))
]


@pytest.mark.parametrize("owner", [0, 1])
def test_addresses_of_another_gpu(monkeypatch: pytest.MonkeyPatch, owner: int) -> None:
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: SEGMENTS)
    device, base, other = torch.device("cuda", owner), 1 << 40 + owner, 1 << 41 - owner

    def rows(address: int) -> list[addresses.Plane]:
        table = addresses.AddressTable([address], device, version=0)
        return addresses.table_rows([table], ["src_layers"], 8, 8, writes=False)[0]

    for address in (other, other + 992, other + 2048, other + 4088):
        text = rf"src_layers\[0\] must be an address on {device}, got {address} of cuda:{1 - owner}"
        with pytest.raises(ValueError, match=text):
            rows(address)
    assert rows(base)[0].slots == 125  # to the end of what was asked for
    assert rows(base + 992)[0].slots == 1
    with pytest.raises(ValueError, match=r"src_layers\[0\] has 4 bytes behind it"):
        rows(base + 996)
    for address in (base - 8, base + 2048, other - 8, other + 4096):  # not torch's, or free
        assert rows(address)[0].slots > 1 << 50


def test_memory_that_can_not_be_written() -> None:
    with mmap.mmap(-1, 2 * mmap.PAGESIZE, prot=mmap.PROT_READ) as memory, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's, of memory that can't be written
        only_read = torch.frombuffer(memory, dtype=torch.uint8)[: mmap.PAGESIZE].view(-1, 8)
        rows = torch.ones(mmap.PAGESIZE, dtype=torch.uint8)
        tables = table_of([only_read], "cpu"), table_of([rows], "cpu")
        index = torch.tensor([0])
        with pytest.raises(ValueError, match=r"dst_layers\[0\] must be an address of this process"):
            kvcacheio.transfer_kv_all_layer_mla(tables[1], tables[0], index, index, 8, 1)
        dst = torch.ones(4, 8, dtype=torch.uint8)
        kvcacheio.transfer_kv_all_layer_mla_lf_pf(tables[0], dst, index, index, 8, 8, 1)
        assert dst.sum(1).tolist() == [0, 8, 8, 8]
        del only_read


def test_a_table_is_read_again_once_it_is_written(device: str) -> None:
    sources = [torch.full((4, 8), value, dtype=torch.uint8, device=device) for value in (1, 2)]
    dst = torch.zeros(4, 8, dtype=torch.uint8, device=device)
    table = torch.tensor([sources[0].data_ptr()], dtype=torch.int64, device=device)
    index = torch.tensor([0])
    kvcacheio.transfer_kv_all_layer_mla_lf_pf(table, dst, index, index, 8, 8, 1)
    assert dst[0].tolist() == [1] * 8
    table.fill_(sources[1].data_ptr())
    kvcacheio.transfer_kv_all_layer_mla_lf_pf(table, dst, index, index, 8, 8, 1)
    assert dst[0].tolist() == [2] * 8


def _replace(table: Tensor, address: int) -> None:
    table.data = torch.full_like(table, address)


def _write_by_data(table: Tensor, address: int) -> None:
    table.data.copy_(torch.full_like(table, address))


def _write_by_numpy(table: Tensor, address: int) -> None:
    table.numpy()[:] = address


@pytest.mark.parametrize("write", [_replace, _write_by_data, _write_by_numpy])
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint64])
def test_writes_that_torch_does_not_count(
    write: Callable[[Tensor, int], None], dtype: torch.dtype
) -> None:
    sources = [torch.full((4, 8), value, dtype=torch.uint8) for value in (1, 2)]
    dst, index = torch.zeros(4, 8, dtype=torch.uint8), torch.tensor([0])
    table = torch.tensor([sources[0].data_ptr()], dtype=dtype)
    version = table._version

    def store() -> None:
        kvcacheio.transfer_kv_all_layer_mla_lf_pf(table, dst, index, index, 8, 8, 1)

    store()
    write(table, sources[1].data_ptr())
    assert table._version == version
    store()
    assert dst[0].tolist() == [2] * 8
    write(table, 4096)
    for _ in range(2):
        with unchanged([dst]), pytest.raises(ValueError, match="must be an address of this process"):
            store()
    write(table, sources[0].data_ptr())
    store()
    assert dst[0].tolist() == [1] * 8


def test_a_table_of_other_memory_is_read_again(device: str) -> None:
    sources = [torch.full((4, 8), value, dtype=torch.uint8, device=device) for value in (1, 2)]
    dst, index = torch.zeros(4, 8, dtype=torch.uint8, device=device), torch.tensor([0])
    table = torch.tensor([sources[0].data_ptr()], dtype=torch.int64, device=device)
    kvcacheio.transfer_kv_all_layer_mla_lf_pf(table, dst, index, index, 8, 8, 1)
    _replace(table, sources[1].data_ptr())
    kvcacheio.transfer_kv_all_layer_mla_lf_pf(table, dst, index, index, 8, 8, 1)
    assert dst[0].tolist() == [2] * 8


def test_the_version_of_a_device_table_has_its_memory() -> None:
    table = torch.tensor([64])
    first = addresses.version_of(table)
    assert addresses.version_of(table) == first
    table.fill_(128)
    second = addresses.version_of(table)
    _replace(table, 64)
    assert len({first, second, addresses.version_of(table)}) == 3


def test_a_used_table_is_copied_saved_and_freed() -> None:
    source = torch.ones(4, 8, dtype=torch.uint8)
    dst, index = torch.zeros(4, 8, dtype=torch.uint8), torch.tensor([0])
    kept = len(addresses._tables)
    table = table_of([source], "cpu")
    kvcacheio.transfer_kv_all_layer_mla_lf_pf(table, dst, index, index, 8, 8, 1)
    assert len(addresses._tables) == kept + 1
    file = io.BytesIO()
    torch.save(table, file)
    file.seek(0)
    for copied in (torch.load(file), copy.deepcopy(table)):
        assert torch.equal(copied, table)
        assert vars(copied) == vars(table) == {}
    del table
    assert len(addresses._tables) == kept


def test_pages_are_kept_as_long_as_their_indices() -> None:
    host = types.SimpleNamespace(page_size=PAGE, layout="page_head")
    planes = plugin.PoolPlanes(host, [], {})
    kept = len(plugin._pages)
    for numbers in ([2, 0], []):
        tokens = pages(numbers) if numbers else torch.empty(0, dtype=torch.int64)
        assert planes.indices(tokens, "indices").tolist() == numbers
        assert planes.indices(tokens, "indices") is planes.indices(tokens, "indices")
        assert len(plugin._pages) == kept + 1
        assert vars(copy.deepcopy(tokens)) == {}
        del tokens
        assert len(plugin._pages) == kept


def test_pages_of_an_inference_tensor_are_those_of_now() -> None:
    planes = plugin.PoolPlanes(types.SimpleNamespace(page_size=PAGE, layout="page_head"), [], {})
    with torch.inference_mode():
        tokens = pages([2, 0])
        assert planes.indices(tokens, "indices").tolist() == [2, 0]
        tokens += PAGE
        assert planes.indices(tokens, "indices").tolist() == [3, 1]


def test_pages_while_another_device_is_the_default() -> None:
    tokens = pages([3, 1])
    with torch.device("meta"):
        assert page_indices(tokens, PAGE, "indices").tolist() == [3, 1]


def _resized_to_nothing(tensor: Tensor) -> Tensor:
    tensor.untyped_storage().resize_(0)
    return tensor


NO_MEMORY: dict[str, Callable[[Tensor], Tensor]] = {
    "fake": lambda tensor: FakeTensorMode().from_tensor(tensor),
    "wrapper": lambda tensor: TwoTensor(tensor, tensor),
    "zeros_that_are_none": lambda tensor: torch._efficientzerotensor(tensor.shape, dtype=tensor.dtype),
    "resized_to_nothing": _resized_to_nothing,
}


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("side", ["dst", "src"])
@pytest.mark.parametrize("made", NO_MEMORY.values(), ids=NO_MEMORY)
def test_tensors_without_memory(made: Callable[[Tensor], Tensor], side: str) -> None:
    index = torch.tensor([0])
    good, bad = torch.zeros(4, 8, dtype=torch.uint8), made(torch.zeros(4, 8, dtype=torch.uint8))
    dst, src = (bad, good) if side == "dst" else (good, bad)
    with unchanged([good]), pytest.raises(ValueError, match=f"{side} must have memory of its own"):
        kvcacheio.transfer_kv_per_layer_mla(src, dst, index, index, 8)


def test_quantized_tensors() -> None:
    index = torch.tensor([0])
    bad = torch.quantize_per_tensor(torch.zeros(4, 8), 1.0, 0, torch.quint8)
    good = torch.zeros(4, 8, dtype=torch.uint8)
    with unchanged([good]), pytest.raises(ValueError, match="got a quantized tensor"):
        kvcacheio.transfer_kv_per_layer_mla(bad, good, index, index, 8)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_pages_of_indices_on_the_cpu_are_of_their_values(dtype: torch.dtype) -> None:
    """Whoever has written them; torch does not count this."""
    indices = torch.arange(8, dtype=dtype)
    with torch.inference_mode():
        assert page_indices(indices, 4, "src_indices").tolist() == [0, 1]
    assert page_indices(indices, 4, "src_indices").tolist() == [0, 1]
    assert page_indices(indices, 2, "src_indices").tolist() == [0, 1, 2, 3]
    indices.numpy()[:4] += 8
    assert page_indices(indices, 4, "src_indices").tolist() == [2, 1]
    assert page_indices(indices[:4], 4, "src_indices").tolist() == [2]
    indices.numpy()[1] = 0
    with pytest.raises(ValueError, match="must be whole pages of 4 tokens"):
        page_indices(indices, 4, "src_indices")
    with pytest.raises(ValueError, match="must be whole pages of 4 tokens"):
        page_indices(indices, 4, "src_indices")


def test_one_address_with_several_shapes() -> None:
    """What is kept for an address serves tensors of one size and stride only."""
    base, src, index = torch.zeros(96, dtype=torch.uint8), torch.ones(12, 8), torch.tensor([4])
    src = src.to(torch.uint8)
    kvcacheio.transfer_kv_per_layer_mla(src, base[:48].view(6, 8), index, index, 8)
    with pytest.raises(IndexError, match="is 4, out of range for 4 slots"):
        kvcacheio.transfer_kv_per_layer_mla(src, base[:32].view(4, 8), index, index, 8)
    for slot_stride in (8, 16, 12):
        base.zero_()
        kvcacheio.transfer_kv_per_layer_mla(
            src, base.as_strided((5, 8), (slot_stride, 1)), index, index, 8
        )
        expected = torch.zeros(96, dtype=torch.uint8)
        expected[4 * slot_stride : 4 * slot_stride + 8] = 1
        assert torch.equal(base, expected)


REFUSED = {
    "negated": (torch._neg_view, "must hold its values"),
    "conjugate": (lambda tensor: tensor.view(torch.complex64).conj(), "must hold its values"),
    "sparse": (Tensor.to_sparse, "must be a strided tensor, got torch.sparse_coo"),
    "nested": (
        lambda tensor: torch.nested.nested_tensor(list(tensor.unbind(0))),
        "must be a strided tensor",
    ),
    "scalar": (lambda tensor: tensor[0, 0], "must have a dimension of tokens or pages, got a scalar"),
}


def calls_of(dst: Tensor, src: Tensor) -> list[Callable[[], None]]:
    """Rows of 32 bytes; each form of a call that takes tensors on both sides."""
    one, load = torch.tensor([0]), jit.transfer_hicache_one_layer_mla
    return [
        lambda: kvcacheio.transfer_kv_per_layer_mla(src, dst, one, one, 32),
        lambda: kvcacheio.transfer_kv_per_layer_direct_pf_lf([src], [dst], one, one, 0, 1),
        lambda: kvcacheio.transfer_kv_all_layer_direct_lf_pf([src], [dst], one, one, 1),
        lambda: load(dst, one, src, one),
        lambda: load(dst, one, src, one, element_dim=8),
    ]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("side", ["dst", "src"])
@pytest.mark.parametrize("name", list(REFUSED))
def test_tensors_that_transfer_kv_refuses(name: str, side: str) -> None:
    """Before anything is known of an address, and once a call with a good tensor there was served."""
    change, text = REFUSED[name]
    dst, src = torch.zeros(4, 8), torch.ones(4, 8)
    for _ in range(2):
        changed = (change(dst), src) if side == "dst" else (dst, change(src))
        for call in calls_of(*changed):
            with unchanged([dst, src]), pytest.raises(ValueError, match=text):
                call()
        kvcacheio.transfer_kv_per_layer_mla(src, dst, torch.tensor([1]), torch.tensor([1]), 32)


def test_destinations_that_require_grad() -> None:
    dst, src = torch.zeros(4, 8), torch.ones(4, 8, requires_grad=True)
    for call in calls_of(dst, src)[::3]:  # a source that does is read
        call()
    dst.requires_grad_()
    for call in calls_of(dst, src):
        with unchanged([dst]), pytest.raises(ValueError, match="must not require grad"):
            call()
    with torch.no_grad():
        dst.zero_()
        calls_of(dst, src)[0]()
    assert dst.sum(1).tolist() == [8, 0, 0, 0]


def test_page_unified_of_tensors_that_transfer_kv_refuses() -> None:
    layer, pool = torch.zeros(4, 8), torch.zeros(2, 1, 2, 8)
    one, table = torch.tensor([0]), table_of([layer], "cpu")
    load = jit.transfer_hicache_one_layer_mla_page_unified_lf
    store = jit.transfer_hicache_all_layer_mla_staged_lf_page_unified
    for bad in (pool.to_sparse(), torch._neg_view(pool)):
        with pytest.raises(ValueError, match="src must"):
            load(layer, bad, one, one, 0)
        with pytest.raises(ValueError, match="dst must"):
            store(table, one, one, None, bad)
    with unchanged([layer]), pytest.raises(ValueError, match="cache_dst must hold its values"):
        load(torch._neg_view(layer), pool, one, one, 0)
    with unchanged([pool]), pytest.raises(ValueError, match="dst must not require grad"):
        store(table, one, one, None, pool.requires_grad_())


def test_no_indices_of_pages_too_large_for_memory() -> None:
    for size in (10**13, 1 << 70):
        for dtype in (torch.int32, torch.int64):
            none = page_indices(torch.empty(0, dtype=dtype), size, "src_indices")
            assert (none.dtype, none.shape) == (torch.int64, (0,))


def bad_calls() -> dict[str, tuple[Callable[[], None], str]]:
    host, layer = (
        torch.zeros(HOST, LAYERS, HEADS, DIM, dtype=DTYPE),
        torch.zeros(DEVICE, HEADS, DIM, dtype=DTYPE),
    )
    head = torch.zeros(HOST_PAGES, HEADS, PAGE, LAYERS, DIM, dtype=DTYPE)
    direct = torch.zeros(HOST_PAGES, LAYERS, PAGE, HEADS, DIM, dtype=DTYPE)
    one, page = torch.tensor([0]), torch.arange(PAGE)

    def page_first(layer_id: int = 0, item: int = ITEM, width: int = LAYERS * ITEM, **rest: int) -> None:
        kvcacheio.transfer_kv_per_layer_mla_pf_lf(host, layer, one, one, layer_id, item, width, **rest)

    def page_head(page_size: int = PAGE, heads: int = HEADS, index: Tensor = page) -> None:
        kvcacheio.transfer_kv_per_layer_ph_lf(
            head, layer, head, layer.clone(), index, index, 0, ITEM, LAYERS * ITEM, page_size, heads
        )

    def pfd(layer_id: int = 0, page_size: int = PAGE, pool: Tensor = direct, dst: Tensor = layer) -> None:
        kvcacheio.transfer_kv_per_layer_direct_pf_lf([pool], [dst], page, page, layer_id, page_size)

    return {
        "quota_zero": (lambda: page_first(block_quota=0), "block_quota must be 1 or more, got 0"),
        "quota_negative": (lambda: page_first(block_quota=-2), "block_quota must be 1 or more"),
        "quota_of_65_bits": (lambda: page_first(block_quota=1 << 70), "less than 2..63, got 118"),
        "warps_zero": (
            lambda: page_first(num_warps_per_block=0),
            "num_warps_per_block must be 1 or more",
        ),
        "layer_negative": (lambda: page_first(-1), "layer_id must be 0 or more, got -1"),
        "layer_too_large": (
            lambda: page_first(LAYERS),
            "60 bytes a token can't hold 4 layers of 20 bytes",
        ),
        "item_zero": (lambda: page_first(item=0), "item_size must be 1 or more, got 0"),
        "layout_zero": (lambda: page_first(width=0), "0 bytes a token can't hold 1 layers"),
        "layout_that_does_not_divide": (
            lambda: page_first(width=64),
            "must hold contiguous rows of 64 bytes",
        ),
        "page_zero": (lambda: page_head(0), "page_size must be 1 or more, got 0"),
        "page_negative": (lambda: page_head(-4), "page_size must be 1 or more, got -4"),
        "heads_that_do_not_divide": (lambda: page_head(heads=3), "head_num must divide item_size"),
        "heads_zero": (lambda: page_head(heads=0), "head_num must divide item_size"),
        "half_a_page": (
            lambda: page_head(index=page[:2]),
            "must be whole pages of 4 tokens, got 2 indices",
        ),
        "float_indices": (
            lambda: page_head(index=page.float()),
            "must be 1-D, int32 or int64, got torch.float",
        ),
        "direct_layer": (lambda: pfd(LAYERS), r"layer_id must be in \[0, 3\), got 3"),
        "direct_negative_layer": (lambda: pfd(-1), r"layer_id must be in \[0, 3\), got -1"),
        "direct_page_size": (lambda: pfd(page_size=2), r"must be contiguous, \[pages, layers, 2, ...\]"),
        "direct_row": (lambda: pfd(dst=layer[:, :1]), "must be contiguous, with rows of 20 bytes"),
        "direct_page_zero": (
            lambda: kvcacheio.transfer_kv_direct([layer], [layer], one, one, 0),
            "page_size must be 1 or more",
        ),
        "lengths": (
            lambda: kvcacheio.transfer_kv_per_layer_mla(host, layer, page, one, ITEM),
            "must have the same length, got 1 and 4",
        ),
        "permuted_row": (
            lambda: kvcacheio.transfer_kv_per_layer_mla(layer.transpose(1, 2), layer, one, one, ITEM),
            "src must hold contiguous rows of 20 bytes",
        ),
    }


@pytest.mark.parametrize("name", list(bad_calls()))
def test_bad_calls(name: str) -> None:
    call, text = bad_calls()[name]
    with pytest.raises(ValueError, match=text):
        call()
