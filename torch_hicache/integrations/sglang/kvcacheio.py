"""The transfer functions of sgl_kernel.kvcacheio, on torch.ops.hicache.transfer_kv.

Names, argument order and meaning are those of sglang-kernel 0.4.10. Sizes and layout widths are bytes,
indices are tokens, `src_layout_dim` and `dst_layout_dim` are one token of all layers. In the names `lf`
is layer_first, `pf` page_first, `ph` page_head; `mla` has one tensor in place of K and V.

What is undefined there follows transfer_kv: no indices are a valid no-op, rows have any size, -1 skips
an entry, indices are int32 or int64 and each on the CPU or on the device, a bad one is an IndexError
(at once, or recorded on the device: see `torch_hicache.check_errors`). The page forms take whole,
aligned pages of token indices: see pages.page_indices. `block_quota` is the most blocks that a kernel
takes; without one it is the device's tuned number. `num_warps_per_block` is checked only: the kernel
has a size of its own.

`*_layers` of the all-layer forms are 1-D uint64 tables of addresses: see addresses.read_table. A table
does not say how long its planes are; indices are checked against the most that can be there.

All raise ValueError, before a byte moves, for sizes, layouts, tables or layers that can't be.
"""

from collections.abc import Sequence

from torch import Tensor

from torch_hicache.integrations.sglang import forms
from torch_hicache.integrations.sglang.addresses import (
    Side,
    bad,
    check_tensor,
    read_table,
)
from torch_hicache.integrations.sglang.calls import run, run_known, transfer_kv
from torch_hicache.integrations.sglang.pages import check_page_size, check_whole_pages


def _check_warps(num_warps_per_block: int | None) -> None:
    if num_warps_per_block is not None and num_warps_per_block < 1:
        raise bad(f"num_warps_per_block must be 1 or more, got {num_warps_per_block}.")


def _check_dst(dst: Side) -> None:
    for tensor, name in zip(dst, forms.names_of(dst, "dst"), strict=True):
        check_tensor(tensor, name, writes=True)


def _check_sides(dst: Side, src: Side) -> None:
    for tensor, name in zip(src, forms.names_of(src, "src"), strict=True):
        check_tensor(tensor, name)
    _check_dst(dst)


# --- Kernels of one layer -------------------------------------------------------------------------


def transfer_kv_per_layer(
    src_k: Tensor,
    dst_k: Tensor,
    src_v: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    block_quota: int | None = None,
    num_warps_per_block: int | None = None,
) -> None:
    """K and V rows of one layer."""
    _check_warps(num_warps_per_block)
    form = 1, item_size
    sides = (dst_k, dst_v), (src_k, src_v)
    if not run_known(form, *sides, dst_indices, src_indices, block_quota):
        _check_sides(*sides)
        call = forms.one_layer(*sides, item_size)
        run(form, call, *sides, dst_indices, src_indices, block_quota)


def transfer_kv_per_layer_mla(
    src: Tensor,
    dst: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    block_quota: int | None = None,
    num_warps_per_block: int | None = None,
) -> None:
    """Rows of one tensor."""
    _check_warps(num_warps_per_block)
    form = 2, item_size
    sides = (dst,), (src,)
    if not run_known(form, *sides, dst_indices, src_indices, block_quota):
        _check_sides(*sides)
        call = forms.one_layer(*sides, item_size)
        run(form, call, *sides, dst_indices, src_indices, block_quota)


def transfer_kv_per_layer_pf_lf(
    src_k: Tensor,
    dst_k: Tensor,
    src_v: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    block_quota: int | None = None,
    num_warps_per_block: int | None = None,
) -> None:
    """One layer out of a page_first pool, `[tokens, layers, ...]`."""
    _check_warps(num_warps_per_block)
    sizes = layer_id, item_size, src_layout_dim
    form = 3, *sizes
    sides = (dst_k, dst_v), (src_k, src_v)
    if not run_known(form, *sides, dst_indices, src_indices, block_quota):
        _check_sides(*sides)
        call = forms.one_layer_of_page_first(*sides, *sizes)
        run(form, call, *sides, dst_indices, src_indices, block_quota)


def transfer_kv_per_layer_mla_pf_lf(
    src: Tensor,
    dst: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    block_quota: int | None = None,
    num_warps_per_block: int | None = None,
) -> None:
    """One layer out of a page_first pool of one tensor."""
    _check_warps(num_warps_per_block)
    sizes = layer_id, item_size, src_layout_dim
    form = 4, *sizes
    sides = (dst,), (src,)
    if not run_known(form, *sides, dst_indices, src_indices, block_quota):
        _check_sides(*sides)
        call = forms.one_layer_of_page_first(*sides, *sizes)
        run(form, call, *sides, dst_indices, src_indices, block_quota)


def transfer_kv_per_layer_ph_lf(
    src_k: Tensor,
    dst_k: Tensor,
    src_v: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    item_size: int,
    src_layout_dim: int,
    page_size: int,
    head_num: int,
    block_quota: int | None = None,
    num_warps_per_block: int | None = None,
) -> None:
    """One layer out of a page_head pool, `[pages, heads, page_size, layers, ...]`."""
    _check_warps(num_warps_per_block)
    sizes = layer_id, item_size, src_layout_dim, page_size, head_num
    form = 5, *sizes
    sides = (dst_k, dst_v), (src_k, src_v)
    if not run_known(form, *sides, dst_indices, src_indices, block_quota):
        _check_sides(*sides)
        call = forms.one_layer_of_page_head(*sides, *sizes)
        run(form, call, *sides, dst_indices, src_indices, block_quota, page_size=page_size)


# --- Kernels of all layers ------------------------------------------------------------------------


def transfer_kv_all_layer(
    src_k_layers: Tensor,
    dst_k_layers: Tensor,
    src_v_layers: Tensor,
    dst_v_layers: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    num_layers: int,
    block_quota: int | None = None,
    num_warps_per_block: int | None = None,
) -> None:
    """K and V rows of all layers, tables on both sides."""
    _check_warps(num_warps_per_block)
    src = read_table(src_k_layers, "src_k_layers"), read_table(src_v_layers, "src_v_layers")
    dst = read_table(dst_k_layers, "dst_k_layers"), read_table(dst_v_layers, "dst_v_layers")
    form = 6, item_size, num_layers, *src, *dst
    sides = (dst_k_layers, dst_v_layers), (src_k_layers, src_v_layers)
    if not run_known(form, *sides, dst_indices, src_indices, block_quota):
        call = forms.all_layers(*sides, num_layers, item_size, item_size, item_size)
        run(form, call, *sides, dst_indices, src_indices, block_quota)


def transfer_kv_all_layer_mla(
    src_layers: Tensor,
    dst_layers: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    num_layers: int,
    block_quota: int | None = None,
    num_warps_per_block: int | None = None,
) -> None:
    """Rows of all layers of one tensor each, tables on both sides."""
    _check_warps(num_warps_per_block)
    tables = read_table(src_layers, "src_layers"), read_table(dst_layers, "dst_layers")
    form = 7, item_size, num_layers, *tables
    sides = (dst_layers,), (src_layers,)
    if not run_known(form, *sides, dst_indices, src_indices, block_quota):
        call = forms.all_layers(*sides, num_layers, item_size, item_size, item_size)
        run(form, call, *sides, dst_indices, src_indices, block_quota)


def transfer_kv_all_layer_lf_pf(
    src_k_layers: Tensor,
    dst_k: Tensor,
    src_v_layers: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    block_quota: int | None = None,
    num_warps_per_block: int | None = None,
) -> None:
    """All layers into a page_first pool."""
    _check_warps(num_warps_per_block)
    tables = read_table(src_k_layers, "src_k_layers"), read_table(src_v_layers, "src_v_layers")
    sizes = num_layers, item_size, dst_layout_dim
    form = 8, *sizes, *tables
    sides = (dst_k, dst_v), (src_k_layers, src_v_layers)
    if not run_known(form, *sides, dst_indices, src_indices, block_quota):
        _check_dst(sides[0])
        call = forms.all_layers_to_page_first(*sides, *sizes)
        run(form, call, *sides, dst_indices, src_indices, block_quota)


def transfer_kv_all_layer_mla_lf_pf(
    src_layers: Tensor,
    dst: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    block_quota: int | None = None,
    num_warps_per_block: int | None = None,
) -> None:
    """All layers into a page_first pool of one tensor."""
    _check_warps(num_warps_per_block)
    sizes = num_layers, item_size, dst_layout_dim
    form = 9, *sizes, read_table(src_layers, "src_layers")
    sides = (dst,), (src_layers,)
    if not run_known(form, *sides, dst_indices, src_indices, block_quota):
        _check_dst(sides[0])
        call = forms.all_layers_to_page_first(*sides, *sizes)
        run(form, call, *sides, dst_indices, src_indices, block_quota)


def transfer_kv_all_layer_lf_ph(
    src_k_layers: Tensor,
    dst_k: Tensor,
    src_v_layers: Tensor,
    dst_v: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    item_size: int,
    dst_layout_dim: int,
    num_layers: int,
    page_size: int,
    head_num: int,
    block_quota: int | None = None,
    num_warps_per_block: int | None = None,
) -> None:
    """All layers into a page_head pool."""
    _check_warps(num_warps_per_block)
    tables = read_table(src_k_layers, "src_k_layers"), read_table(src_v_layers, "src_v_layers")
    sizes = num_layers, item_size, dst_layout_dim, page_size, head_num
    form = 10, *sizes, *tables
    sides = (dst_k, dst_v), (src_k_layers, src_v_layers)
    if not run_known(form, *sides, dst_indices, src_indices, block_quota):
        _check_dst(sides[0])
        call = forms.all_layers_to_page_head(*sides, *sizes)
        run(form, call, *sides, dst_indices, src_indices, block_quota, page_size=page_size)


# --- The copy engine: lists of tensors ------------------------------------------------------------


def transfer_kv_direct(
    src_layers: Sequence[Tensor],
    dst_layers: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    page_size: int,
) -> None:
    """Token rows between tensors `[tokens, ...]` of equal row shapes and dtypes."""
    check_page_size(page_size)
    check_whole_pages(src_indices, page_size, "src_indices")
    transfer_kv(list(dst_layers), list(src_layers), dst_indices, src_indices)


def transfer_kv_per_layer_direct_pf_lf(
    src_ptrs: Sequence[Tensor],
    dst_ptrs: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    page_size: int,
) -> None:
    """One layer out of page_first_direct pools, `[pages, layers, page_size, ...]`: K and V, or one."""
    form = 11, layer_id, page_size
    if not run_known(form, dst_ptrs, src_ptrs, dst_indices, src_indices):
        _check_lists(dst_ptrs, src_ptrs)
        call = forms.one_layer_of_direct(dst_ptrs, src_ptrs, layer_id, page_size)
        run(form, call, dst_ptrs, src_ptrs, dst_indices, src_indices, page_size=page_size)


def transfer_kv_all_layer_direct_lf_pf(
    src_ptrs: Sequence[Tensor],
    dst_ptrs: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    page_size: int,
) -> None:
    """All layers into page_first_direct pools: `src_ptrs` has those of the first, then of the second."""
    form = 12, page_size
    if not run_known(form, dst_ptrs, src_ptrs, dst_indices, src_indices):
        _check_lists(dst_ptrs, src_ptrs)
        call = forms.all_layers_to_direct(dst_ptrs, src_ptrs, page_size)
        run(form, call, dst_ptrs, src_ptrs, dst_indices, src_indices, page_size=page_size)


def _check_lists(dst_ptrs: Side, src_ptrs: Side) -> None:
    for i, tensor in enumerate(dst_ptrs):
        check_tensor(tensor, f"dst_ptrs[{i}]", writes=True)
    for i, tensor in enumerate(src_ptrs):
        check_tensor(tensor, f"src_ptrs[{i}]")
