"""Token indices as page indices. A page layout has no address of a token that is one stride away."""

import torch
from torch import Tensor

from torch_hicache.integrations.sglang.addresses import bad

# A page index on a device whose tokens are no whole, aligned page. It is out of range for any pool, so
# transfer_kv records it and no byte of the page moves.
BAD_PAGE = 1 << 62


def page_indices(indices: Tensor, page_size: int, name: str) -> Tensor:
    """One page index for `page_size` token indices, -1 for a page of -1.

    Indices on an accelerator are checked there, without a sync: a bad page gets the index BAD_PAGE.

    Raises:
        ValueError: bad `page_size`, not a number of pages, or on the CPU tokens that are no whole page.
    """
    check_page_size(page_size)
    check_indices(indices, name)
    check_whole_pages(indices, page_size, name)
    if not indices.numel():  # any page size divides it, and there may be no memory for offsets of one
        return torch.empty_like(indices, dtype=torch.int64)
    if not indices.is_cpu:
        return torch.ops.hicache.page_indices(indices, page_size)
    pages, is_bad = _pages_of(indices, page_size)
    if is_bad.any():
        at = int(is_bad.flatten().nonzero()[0])
        raise bad(
            f"{name} must be whole pages of {page_size} tokens, aligned and in order (or all -1), got "
            f"{int(indices[at])} at position {at}."
        )
    return pages


@torch.library.impl("hicache::page_indices", "default")
def _page_indices(indices: Tensor, page_size: int) -> Tensor:
    """On accelerators without a kernel for it."""
    pages, is_bad = _pages_of(indices, page_size)
    return pages.masked_fill(is_bad.any(1), BAD_PAGE)


def _pages_of(indices: Tensor, page_size: int) -> tuple[Tensor, Tensor]:
    """The pages that the first tokens name, and which tokens of each are not theirs."""
    if indices.dtype != torch.int64:
        indices = indices.long()
    pages = indices[::page_size].div(page_size, rounding_mode="floor")
    offsets = torch.arange(page_size, device=indices.device)
    tokens, column = indices.reshape(-1, page_size), pages.unsqueeze(1)
    # The larger of both is page * page_size + offset where the page is not negative, and -1 for page -1.
    return pages, tokens != torch.maximum(column, torch.add(offsets, column, alpha=page_size))


def check_indices(indices: Tensor, name: str) -> None:
    if indices.dim() != 1 or indices.dtype not in (torch.int32, torch.int64):
        raise bad(f"{name} must be 1-D, int32 or int64, got {indices.dtype} {list(indices.shape)}.")


def tokens_in_range(indices: Tensor, num_tokens: int, name: str) -> Tensor:
    """As int64. On a device what is out of range is cut to -2 or `num_tokens`, for transfer_kv to record.

    Raises:
        ValueError: not 1-D, or neither int32 nor int64.
        IndexError: on the CPU, an index that is neither -1 nor that of a token.
    """
    check_indices(indices, name)
    indices = indices.long()
    if not indices.is_cpu:
        return indices.clamp(-2, num_tokens)
    cut = indices.clamp(-1, num_tokens - 1)
    if not torch.equal(cut, indices):
        at = int((cut != indices).nonzero()[0])
        raise IndexError(
            f"[sglang] {name}[{at}] is {int(indices[at])}, out of range for {num_tokens} tokens "
            "(-1 skips an entry)."
        )
    return indices


def check_page_size(page_size: int) -> None:
    if page_size < 1:
        raise bad(f"page_size must be 1 or more, got {page_size}.")


def check_whole_pages(indices: Tensor, page_size: int, name: str) -> None:
    if indices.numel() % page_size:
        raise bad(f"{name} must be whole pages of {page_size} tokens, got {indices.numel()} indices.")
