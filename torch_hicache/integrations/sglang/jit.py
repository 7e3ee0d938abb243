"""The functions of SGLang's sglang.kernels.ops.kvcache.hicache, on torch.ops.hicache.transfer_kv.

Names, argument order and meaning are those of SGLang 0.5.23; what kvcacheio says of indices, tables and
errors holds here too. Rows may lie a stride apart on both sides. `unroll` and `page_size` are checked,
and change nothing but that the staged forms take whole pages; `staging` may be None, since transfer_kv
has buffers of its own.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from torch_hicache._backends import backends
from torch_hicache.integrations.sglang import forms
from torch_hicache.integrations.sglang.addresses import (
    Side,
    bad,
    check_tensor,
    read_table,
)
from torch_hicache.integrations.sglang.calls import run, run_known
from torch_hicache.integrations.sglang.pages import (
    check_page_size,
    check_whole_pages,
    tokens_in_range,
)


def _is_positive(*values: int | None) -> bool:
    return all(value is None or value >= 1 for value in values)


def missing_backend() -> str:
    """Why transfer_kv does not serve this machine's accelerator; empty where it does or there is none."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return ""
    key = {"cuda": "CUDA", "hip": "HIP"}.get(accelerator.type, "PrivateUse1")
    if any(backend.loaded and backend.key == key for backend in backends()):
        return ""
    reasons = [
        f"the {backend.name} backend is not loaded: {backend.reason} ({backend.remedy})"
        for backend in backends()
        if not backend.loaded and key in backend.key
    ]
    return "; ".join(reasons) or f"there is no backend for '{accelerator.type}'"


def can_use_hicache_jit_kernel(
    *,
    element_size: int,
    unroll: int | None = None,
    block_quota: int | None = None,
    page_size: int | None = None,
) -> bool:
    """Whether rows of `element_size` bytes can be moved: any can, where the backend is loaded."""
    return _is_positive(element_size, unroll, block_quota, page_size) and not missing_backend()


def can_use_write_back_jit_kernel(
    *, element_size: int, unroll: int | None = None, block_quota: int | None = None
) -> bool:
    return _is_positive(element_size, unroll, block_quota) and not missing_backend()


def can_use_page_unified_load_back_jit_kernel(
    *, group_bytes: int, block_quota: int | None = None
) -> bool:
    return _is_positive(group_bytes, block_quota) and not missing_backend()


def _check_hints(unroll: int | None, page_size: int | None = None) -> None:
    if unroll is not None and unroll < 1:
        raise bad(f"unroll must be 1 or more, got {unroll}.")
    if page_size is not None:
        check_page_size(page_size)


def _row_bytes(element_dim: int | None, cache: Tensor) -> int:
    if element_dim is not None and element_dim < 1:
        raise bad(f"element_dim must be 1 or more, got {element_dim}.")
    return (cache.shape[-1] if element_dim is None else element_dim) * cache.element_size()


def _check_sides(
    dst: Side, dst_names: Sequence[str], src: Side = (), src_names: Sequence[str] = ()
) -> None:
    for tensor, name in zip(src, src_names, strict=True):
        check_tensor(tensor, name)
    for tensor, name in zip(dst, dst_names, strict=True):
        check_tensor(tensor, name, writes=True)


# --- One layer ----------------------------------------------------------------------------------


def transfer_hicache_one_layer(
    k_cache_dst: Tensor,
    v_cache_dst: Tensor,
    indices_dst: Tensor,
    k_cache_src: Tensor,
    v_cache_src: Tensor,
    indices_src: Tensor,
    *,
    element_dim: int | None = None,
    unroll: int | None = None,
    block_quota: int | None = None,
    page_size: int | None = None,
) -> None:
    """K and V rows of `element_dim` elements (without it: of the last dimension)."""
    _check_hints(unroll, page_size)
    form = 31, element_dim
    sides = (k_cache_dst, v_cache_dst), (k_cache_src, v_cache_src)
    if not run_known(form, *sides, indices_dst, indices_src, block_quota):
        _check_sides(sides[0], ("k_cache_dst", "v_cache_dst"), sides[1], ("k_cache_src", "v_cache_src"))
        call = forms.one_layer(*sides, _row_bytes(element_dim, k_cache_dst))
        run(form, call, *sides, indices_dst, indices_src, block_quota)


def transfer_hicache_one_layer_mla(
    cache_dst: Tensor,
    indices_dst: Tensor,
    cache_src: Tensor,
    indices_src: Tensor,
    *,
    element_dim: int | None = None,
    unroll: int | None = None,
    block_quota: int | None = None,
    page_size: int | None = None,
) -> None:
    """Rows of one tensor."""
    _check_hints(unroll, page_size)
    form = 32, element_dim
    sides = (cache_dst,), (cache_src,)
    if not run_known(form, *sides, indices_dst, indices_src, block_quota):
        _check_sides(sides[0], ("cache_dst",), sides[1], ("cache_src",))
        call = forms.one_layer(*sides, _row_bytes(element_dim, cache_dst))
        run(form, call, *sides, indices_dst, indices_src, block_quota)


# --- All layers, tables on both sides -------------------------------------------------------------


def _element_size(element_size: int | None, src_stride_bytes: int, dst_stride_bytes: int) -> int:
    if element_size is not None:
        return element_size
    if src_stride_bytes != dst_stride_bytes:
        raise bad(
            "without element_size both sides are packed, with one stride; got "
            f"{src_stride_bytes} (source) and {dst_stride_bytes} (destination)."
        )
    return dst_stride_bytes


def transfer_hicache_all_layer(
    k_ptr_dst: Tensor,
    v_ptr_dst: Tensor,
    indices_dst: Tensor,
    k_ptr_src: Tensor,
    v_ptr_src: Tensor,
    indices_src: Tensor,
    *,
    kv_cache_src_stride_bytes: int,
    kv_cache_dst_stride_bytes: int,
    element_size: int | None = None,
    unroll: int | None = None,
    block_quota: int | None = None,
    page_size: int | None = None,
) -> None:
    """K and V rows of `element_size` bytes, so many bytes apart on each side."""
    _check_hints(unroll, page_size)
    strides = kv_cache_dst_stride_bytes, kv_cache_src_stride_bytes
    sizes = _element_size(element_size, *strides), *strides
    dst = read_table(k_ptr_dst, "dst_k_layers"), read_table(v_ptr_dst, "dst_v_layers")
    src = read_table(k_ptr_src, "src_k_layers"), read_table(v_ptr_src, "src_v_layers")
    form = 21, *sizes, *dst, *src
    sides = (k_ptr_dst, v_ptr_dst), (k_ptr_src, v_ptr_src)
    if not run_known(form, *sides, indices_dst, indices_src, block_quota):
        call = forms.all_layers(*sides, len(k_ptr_dst), *sizes)
        run(form, call, *sides, indices_dst, indices_src, block_quota)


def transfer_hicache_all_layer_mla(
    ptr_dst: Tensor,
    indices_dst: Tensor,
    ptr_src: Tensor,
    indices_src: Tensor,
    *,
    cache_src_stride_bytes: int,
    cache_dst_stride_bytes: int,
    element_size: int | None = None,
    unroll: int | None = None,
    block_quota: int | None = None,
    page_size: int | None = None,
) -> None:
    """Rows of all layers of one tensor each."""
    _check_hints(unroll, page_size)
    strides = cache_dst_stride_bytes, cache_src_stride_bytes
    sizes = _element_size(element_size, *strides), *strides
    form = 22, *sizes, read_table(ptr_dst, "dst_layers"), read_table(ptr_src, "src_layers")
    sides = (ptr_dst,), (ptr_src,)
    if not run_known(form, *sides, indices_dst, indices_src, block_quota):
        call = forms.all_layers(*sides, len(ptr_dst), *sizes)
        run(form, call, *sides, indices_dst, indices_src, block_quota)


# --- All layers, staged into page_first -----------------------------------------------------------


def _layers_and_row(pool: Tensor, name: str) -> tuple[int, int]:
    """Of `[tokens, layers, ...]`: layers, and bytes of a row."""
    if pool.dim() < 3:
        raise bad(f"{name} must be [tokens, layers, ...], got {list(pool.shape)}.")
    return pool.shape[1], math.prod(pool.shape[2:]) * pool.element_size()


def transfer_hicache_all_layer_staged_lf_pf(
    k_ptr_src: Tensor,
    v_ptr_src: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    staging_k: Tensor | None,
    staging_v: Tensor | None,
    dst_k: Tensor,
    dst_v: Tensor,
    *,
    page_size: int,
    element_size: int | None = None,
    unroll: int | None = None,
    block_quota: int | None = None,
) -> None:
    """All layers into page_first pools `[tokens, layers, ...]`, K and V of any width each."""
    del staging_k, staging_v
    _check_hints(unroll, page_size)
    check_whole_pages(src_indices, page_size, "src_indices")
    tables = read_table(k_ptr_src, "src_k_layers"), read_table(v_ptr_src, "src_v_layers")
    form = 23, element_size, *tables
    sides = (dst_k, dst_v), (k_ptr_src, v_ptr_src)
    if not run_known(form, *sides, dst_indices, src_indices, block_quota):
        _check_sides(sides[0], ("dst_k", "dst_v"))
        layers, row_bytes = _layers_and_row(dst_k, "dst_k")
        v_layers, v_row_bytes = _layers_and_row(dst_v, "dst_v")
        if layers != v_layers:
            raise bad(f"dst_k and dst_v must have the same layers, got {layers} and {v_layers}.")
        _check_element(element_size, row_bytes)
        halves = [
            forms.all_layers_to_page_first((dst,), (table,), layers, row, row * layers)
            for dst, table, row in ((dst_k, k_ptr_src, row_bytes), (dst_v, v_ptr_src, v_row_bytes))
        ]
        run(form, forms.both(*halves), *sides, dst_indices, src_indices, block_quota)


def transfer_hicache_all_layer_mla_staged_lf_pf(
    ptr_src: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    staging: Tensor | None,
    dst: Tensor,
    *,
    page_size: int,
    element_size: int | None = None,
    unroll: int | None = None,
    block_quota: int | None = None,
) -> None:
    """All layers into a page_first pool of one tensor."""
    del staging
    _check_hints(unroll, page_size)
    check_whole_pages(src_indices, page_size, "src_indices")
    form = 24, element_size, read_table(ptr_src, "src_layers")
    sides = (dst,), (ptr_src,)
    if not run_known(form, *sides, dst_indices, src_indices, block_quota):
        _check_sides(sides[0], ("dst",))
        layers, row_bytes = _layers_and_row(dst, "dst")
        _check_element(element_size, row_bytes)
        call = forms.all_layers_to_page_first(*sides, layers, row_bytes, row_bytes * layers)
        run(form, call, *sides, dst_indices, src_indices, block_quota)


def _check_element(element_size: int | None, row_bytes: int) -> None:
    if element_size not in (None, row_bytes):
        raise bad(f"element_size must be the destination's row, {row_bytes} bytes, got {element_size}.")


# --- page_unified: [pages, groups, layers, 2, page_size, heads of a group, dim] -------------------


def transfer_hicache_one_layer_page_unified_lf(
    k_cache_dst: Tensor,
    v_cache_dst: Tensor,
    src: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    *,
    block_quota: int | None = None,
) -> None:
    """One layer out of page_unified pages, K and V. Indices are tokens of any order on both sides."""
    if src.dim() != 7 or src.shape[3] != 2:
        raise bad(
            "src must be [pages, groups, layers, 2, page_size, heads of a group, dim], got "
            f"{list(src.shape)}."
        )
    _load_page_unified(
        (k_cache_dst, v_cache_dst),
        ("k_cache_dst", "v_cache_dst"),
        src,
        src_indices,
        dst_indices,
        layer_id,
        block_quota,
    )


def transfer_hicache_one_layer_mla_page_unified_lf(
    cache_dst: Tensor,
    src: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    *,
    block_quota: int | None = None,
) -> None:
    """One layer out of `[pages, layers, page_size, width]`. Indices are tokens of any order."""
    if src.dim() != 4:
        raise bad(f"src must be [pages, layers, page_size, width], got {list(src.shape)}.")
    check_tensor(src, "src")  # before there is a view of it
    unified = src[:, None, :, None, :, None]
    _load_page_unified(
        (cache_dst,), ("cache_dst",), unified, src_indices, dst_indices, layer_id, block_quota
    )


def _load_page_unified(
    dst: Side,
    names: Sequence[str],
    src: Tensor,
    src_indices: Tensor,
    dst_indices: Tensor,
    layer_id: int,
    block_quota: int | None,
) -> None:
    if 0 in src.shape[1:]:
        raise bad(f"src must have no dimension of 0 but its pages, got {list(src.shape)}.")
    _check_sides(dst, names, (src,), ("src",))
    # Rows of one page's tokens are neighbours, those of the next page lie behind all other rows of this
    # page. Padding stays -1; what is out of range on a device stays so.
    page_size = src.shape[4]
    rows_skipped = (math.prod(src.shape[1:4]) - 1) * page_size
    src_indices = tokens_in_range(src_indices, src.shape[0] * page_size, "src_indices")
    src_rows = torch.add(
        src_indices, src_indices.div(page_size, rounding_mode="trunc"), alpha=rows_skipped
    )
    form = 25, layer_id
    if not run_known(form, dst, (src,), dst_indices, src_rows, block_quota):
        call = forms.one_layer_of_page_unified(dst, src, layer_id)
        run(form, call, dst, (src,), dst_indices, src_rows, block_quota)


def transfer_hicache_all_layer_staged_lf_page_unified(
    k_ptr_src: Tensor,
    v_ptr_src: Tensor,
    src_pages: Tensor,
    dst_pages: Tensor,
    staging: Tensor | None,
    dst: Tensor,
) -> None:
    """All layers of K and V into page_unified pages. Indices are pages on both sides."""
    del staging
    if dst.dim() != 7 or dst.shape[3] != 2:
        raise bad(
            "dst must be [pages, groups, layers, 2, page_size, heads of a group, dim], got "
            f"{list(dst.shape)}."
        )
    _store_page_unified(dst, (k_ptr_src, v_ptr_src), dst_pages, src_pages)


def transfer_hicache_all_layer_mla_staged_lf_page_unified(
    ptr_src: Tensor, src_pages: Tensor, dst_pages: Tensor, staging: Tensor | None, dst: Tensor
) -> None:
    """All layers of one tensor into `[pages, layers, page_size, width]`. Indices are pages."""
    del staging
    if dst.dim() != 4:
        raise bad(f"dst must be [pages, layers, page_size, width], got {list(dst.shape)}.")
    check_tensor(dst, "dst", writes=True)  # before there is a view of it
    _store_page_unified(dst[:, None, :, None, :, None], (ptr_src,), dst_pages, src_pages)


def _store_page_unified(dst: Tensor, src: Side, dst_pages: Tensor, src_pages: Tensor) -> None:
    names = forms.names_of(src, "src", "_layers")
    tables = [read_table(table, name) for table, name in zip(src, names, strict=True)]
    form = 26, *tables
    if not run_known(form, (dst,), src, dst_pages, src_pages):
        _check_sides((dst,), ("dst",))
        run(form, forms.all_layers_to_page_unified(dst, src), (dst,), src, dst_pages, src_pages)
