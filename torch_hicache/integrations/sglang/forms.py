"""The planes of each form that kvcacheio and jit know: a layout as addresses, sizes and strides in bytes.

Destinations and sources come as tuples of one tensor or table for K and one for V, or of one in all.
"""

import math
from collections.abc import Sequence

from torch import Tensor

from torch_hicache.integrations.sglang.addresses import (
    Call,
    Plane,
    Side,
    bad,
    call_of,
    read_table,
    table_rows,
    token_rows,
)
from torch_hicache.integrations.sglang.pages import check_page_size


def names_of(side: Side, name: str, suffix: str = "") -> list[str]:
    """As the arguments are called: dst_k and dst_v, or dst."""
    return [f"{name}{part}{suffix}" for part in (("_k", "_v") if len(side) == 2 else ("",))]


def check_sizes(item_size: int, layout_dim: int, num_layers: int) -> None:
    if item_size < 1:
        raise bad(f"item_size must be 1 or more, got {item_size}.")
    if num_layers < 0 or item_size * num_layers > layout_dim:
        raise bad(f"{layout_dim} bytes a token can't hold {num_layers} layers of {item_size} bytes.")


def _check_layer(layer_id: int) -> None:
    if layer_id < 0:
        raise bad(f"layer_id must be 0 or more, got {layer_id}.")


def _check_heads(item_size: int, layout_dim: int, head_num: int) -> None:
    if head_num < 1 or item_size % head_num or layout_dim % head_num:
        raise bad(
            f"head_num must divide item_size ({item_size}) and the layout ({layout_dim}), got {head_num}."
        )


# --- Planes -------------------------------------------------------------------------------------


def rows_of(side: Side, name: str, row_bytes: int) -> list[Plane]:
    return [
        token_rows(tensor, row_bytes, each)
        for tensor, each in zip(side, names_of(side, name), strict=True)
    ]


def rows_at(
    side: Side, name: str, num_layers: int, row_bytes: int, slot_stride: int
) -> list[list[Plane]]:
    """Planes at the addresses of tables, of which each holds one address a layer."""
    names = names_of(side, name, "_layers")
    tables = [read_table(table, each) for table, each in zip(side, names, strict=True)]
    for table, each in zip(tables, names, strict=True):
        if len(table.addresses) != num_layers:
            raise bad(
                f"{each} must hold num_layers ({num_layers}) addresses, got {len(table.addresses)}."
            )
    if slot_stride < row_bytes:
        raise bad(f"rows of {row_bytes} bytes can't be {slot_stride} bytes apart.")
    return table_rows(tables, names, row_bytes, slot_stride, writes=name == "dst")


def _layers_of(tokens: Plane, layers: Sequence[int], item_size: int) -> list[Plane]:
    """Out of `[tokens, layers, ...]`."""
    return [
        tokens._replace(address=tokens.address + layer * item_size, sizes=(item_size,))
        for layer in layers
    ]


def _heads_of(
    pages: Plane, layers: Sequence[int], item_size: int, page_size: int, heads: int
) -> list[Plane]:
    """Out of `[pages, heads, page_size, layers, ...]`, with rows as those of in_pages."""
    head_bytes, token_stride = item_size // heads, pages.sizes[0] // page_size // heads
    return [
        pages._replace(
            address=pages.address + layer * head_bytes,
            sizes=(page_size, heads, head_bytes),
            strides=(token_stride, page_size * token_stride, 1),
        )
        for layer in layers
    ]


def in_pages(rows: Plane, page_size: int, heads: int = 1) -> Plane:
    """Token rows as rows of whole pages, `[page_size, heads, bytes of a head]`."""
    head_bytes = rows.sizes[0] // heads
    return rows._replace(
        slots=rows.slots // page_size,
        slot_stride=rows.slot_stride * page_size,
        sizes=(page_size, heads, head_bytes),
        strides=(rows.slot_stride, head_bytes, 1),
    )


# --- Calls --------------------------------------------------------------------------------------


def one_layer(dst: Side, src: Side, item_size: int) -> Call:
    check_sizes(item_size, item_size, 1)
    dst_rows, src_rows = rows_of(dst, "dst", item_size), rows_of(src, "src", item_size)
    return call_of([([d], [s]) for d, s in zip(dst_rows, src_rows, strict=True)])


def one_layer_of_page_first(dst: Side, src: Side, layer_id: int, item_size: int, layout_dim: int) -> Call:
    _check_layer(layer_id)
    check_sizes(item_size, layout_dim, layer_id + 1)
    dst_rows, src_rows = rows_of(dst, "dst", item_size), rows_of(src, "src", layout_dim)
    return call_of(
        [([d], _layers_of(s, [layer_id], item_size)) for d, s in zip(dst_rows, src_rows, strict=True)]
    )


def one_layer_of_page_head(
    dst: Side, src: Side, layer_id: int, item_size: int, layout_dim: int, page_size: int, heads: int
) -> Call:
    check_page_size(page_size)
    _check_layer(layer_id)
    check_sizes(item_size, layout_dim, layer_id + 1)
    _check_heads(item_size, layout_dim, heads)
    dst_rows = rows_of(dst, "dst", item_size)
    src_pages = rows_of(src, "src", layout_dim * page_size)
    return call_of(
        [
            ([in_pages(d, page_size, heads)], _heads_of(s, [layer_id], item_size, page_size, heads))
            for d, s in zip(dst_rows, src_pages, strict=True)
        ]
    )


def all_layers(
    dst: Side, src: Side, num_layers: int, item_size: int, dst_stride: int, src_stride: int
) -> Call:
    """Tables on both sides, with rows so many bytes apart."""
    check_sizes(item_size, item_size * max(num_layers, 0), num_layers)
    dst_rows = rows_at(dst, "dst", num_layers, item_size, dst_stride)
    src_rows = rows_at(src, "src", num_layers, item_size, src_stride)
    return call_of(list(zip(dst_rows, src_rows, strict=True)))


def all_layers_to_page_first(
    dst: Side, src: Side, num_layers: int, item_size: int, layout_dim: int
) -> Call:
    check_sizes(item_size, layout_dim, num_layers)
    dst_rows = rows_of(dst, "dst", layout_dim)
    src_rows = rows_at(src, "src", num_layers, item_size, item_size)
    return call_of(
        [
            (_layers_of(d, range(num_layers), item_size), s)
            for d, s in zip(dst_rows, src_rows, strict=True)
        ]
    )


def all_layers_to_page_head(
    dst: Side, src: Side, num_layers: int, item_size: int, layout_dim: int, page_size: int, heads: int
) -> Call:
    check_page_size(page_size)
    check_sizes(item_size, layout_dim, num_layers)
    _check_heads(item_size, layout_dim, heads)
    dst_pages = rows_of(dst, "dst", layout_dim * page_size)
    src_rows = rows_at(src, "src", num_layers, item_size, item_size)
    return call_of(
        [
            (
                _heads_of(d, range(num_layers), item_size, page_size, heads),
                [in_pages(plane, page_size, heads) for plane in s],
            )
            for d, s in zip(dst_pages, src_rows, strict=True)
        ]
    )


# --- page_first_direct: lists of tensors ----------------------------------------------------------


def one_layer_of_direct(dst: Side, src: Side, layer_id: int, page_size: int) -> Call:
    check_page_size(page_size)
    if len(src) != len(dst):
        raise bad(f"src_ptrs and dst_ptrs must have one length, got {len(src)} and {len(dst)}.")
    components = []
    for i, (layer, pool) in enumerate(zip(dst, src, strict=True)):
        pages = _direct_pages(pool, page_size, f"src_ptrs[{i}]")
        if not 0 <= layer_id < pool.shape[1]:
            raise bad(f"layer_id must be in [0, {pool.shape[1]}), got {layer_id}.")
        page_bytes = pages.sizes[0] // pool.shape[1]
        components.append(
            (
                [_pages_of_tokens(layer, page_bytes, page_size, f"dst_ptrs[{i}]")],
                _layers_of(pages, [layer_id], page_bytes),
            )
        )
    return call_of(components)


def all_layers_to_direct(dst: Side, src: Side, page_size: int) -> Call:
    check_page_size(page_size)
    if len(dst) not in (1, 2) or len(src) % len(dst):
        raise bad(
            f"src_ptrs must hold the layers of each of 1 or 2 dst_ptrs, got {len(src)} for {len(dst)}."
        )
    layers = len(src) // len(dst)
    components = []
    for i, pool in enumerate(dst):
        pages = _direct_pages(pool, page_size, f"dst_ptrs[{i}]")
        if pool.shape[1] != layers:
            raise bad(f"dst_ptrs[{i}] must have {layers} layers, got shape {list(pool.shape)}.")
        page_bytes = pages.sizes[0] // max(layers, 1)
        components.append(
            (
                _layers_of(pages, range(layers), page_bytes),
                [
                    _pages_of_tokens(src[k], page_bytes, page_size, f"src_ptrs[{k}]")
                    for k in range(i * layers, (i + 1) * layers)
                ],
            )
        )
    return call_of(components)


def _direct_pages(pool: Tensor, page_size: int, name: str) -> Plane:
    """A contiguous `[pages, layers, page_size, ...]` as rows of whole pages."""
    if pool.dim() < 3 or pool.shape[2] != page_size or not pool.is_contiguous():
        raise bad(
            f"{name} must be contiguous, [pages, layers, {page_size}, ...], got {list(pool.shape)} with "
            f"strides {list(pool.stride())}."
        )
    page_bytes = math.prod(pool.shape[1:]) * pool.element_size()
    return Plane(pool.data_ptr(), pool.device, pool.shape[0], page_bytes, (page_bytes,), (1,))


def _pages_of_tokens(layer: Tensor, page_bytes: int, page_size: int, name: str) -> Plane:
    """A contiguous `[tokens, ...]` as rows of whole pages."""
    row_bytes = math.prod(layer.shape[1:]) * layer.element_size()
    if layer.dim() == 0 or row_bytes * page_size != page_bytes or not layer.is_contiguous():
        raise bad(
            f"{name} must be contiguous, with rows of {page_bytes // page_size} bytes, got {layer.dtype} "
            f"{list(layer.shape)} with strides {list(layer.stride())}."
        )
    return Plane(
        layer.data_ptr(), layer.device, layer.shape[0] // page_size, page_bytes, (page_bytes,), (1,)
    )


# --- page_unified: [pages, groups, layers, 2, page_size, heads of a group, dim] -------------------


def one_layer_of_page_unified(dst: Side, src: Tensor, layer_id: int) -> Call:
    """Rows of one group's token, of which a page has `groups * layers * 2 * page_size`."""
    if not src.is_contiguous():
        raise bad(f"src must be contiguous, got strides {list(src.stride())}.")
    pages, groups, layers, components, page_size, *row = src.shape
    if not 0 <= layer_id < layers:
        raise bad(f"layer_id must be in [0, {layers}), got {layer_id}.")
    group_bytes = math.prod(row) * src.element_size()
    dst_rows = rows_of(dst, "dst", groups * group_bytes)
    page_rows = groups * layers * components * page_size
    call = []
    for i, rows in enumerate(dst_rows):
        firsts = [((group * layers + layer_id) * components + i) * page_size for group in range(groups)]
        call.append(
            (
                [
                    rows._replace(address=rows.address + group * group_bytes, sizes=(group_bytes,))
                    for group in range(groups)
                ],
                [
                    Plane(
                        src.data_ptr() + first * group_bytes,
                        src.device,
                        # To the last row of this group. A page that is not there is beyond it.
                        max(pages - 1, 0) * page_rows + page_size if pages else 0,
                        group_bytes,
                        (group_bytes,),
                        (1,),
                    )
                    for first in firsts
                ],
            )
        )
    return call_of(call)


def all_layers_to_page_unified(dst: Tensor, src: Side) -> Call:
    """Pages of `[page_size, groups, bytes of a group's token]` for each layer of K and of V."""
    if not dst.is_contiguous() or 0 in dst.shape[1:]:
        raise bad(
            f"dst must be contiguous, with no dimension of 0 but its pages, got {list(dst.shape)} with "
            f"strides {list(dst.stride())}."
        )
    pages, groups, layers, components, page_size, *row = dst.shape
    group_bytes = math.prod(row) * dst.element_size()
    run_bytes = page_size * group_bytes  # of one group, layer and component
    page_bytes = groups * layers * components * run_bytes
    src_rows = rows_at(src, "src", layers, groups * group_bytes, groups * group_bytes)
    call = []
    for i, rows in enumerate(src_rows):
        dst_planes = [
            Plane(
                dst.data_ptr() + (layer * components + i) * run_bytes,
                dst.device,
                pages,
                page_bytes,
                (page_size, groups, group_bytes),
                (group_bytes, layers * components * run_bytes, 1),
            )
            for layer in range(layers)
        ]
        call.append((dst_planes, [in_pages(plane, page_size, groups) for plane in rows]))
    return call_of(call)


def both(first: Call, second: Call) -> Call:
    """Two calls of equal indices as one, K and V of different width say."""
    if first.slot_dim == second.slot_dim:
        return Call([*first.dst, *second.dst], [*first.src, *second.src], first.slot_dim)
    return Call(
        [*_listed(first.dst, first.slot_dim), *_listed(second.dst, second.slot_dim)],
        [*_listed(first.src, first.slot_dim), *_listed(second.src, second.slot_dim)],
        slot_dim=0,
    )


def _listed(planes: list[Tensor], slot_dim: int) -> list[Tensor]:
    return [layer for stack in planes for layer in stack.unbind(0)] if slot_dim else planes
