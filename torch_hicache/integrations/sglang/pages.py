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
    if indices.dim() != 1 or indices.dtype not in (torch.int32, torch.int64):
        raise bad(f"{name} must be 1-D, int32 or int64, got {indices.dtype} {list(indices.shape)}.")
    check_whole_pages(indices, page_size, name)
    tokens = indices.long().reshape(-1, page_size)
    first = tokens[:, :1]
    pages = first.div(page_size, rounding_mode="floor")
    offsets = torch.arange(page_size, device=indices.device)
    # The larger of both is page * page_size + offset where the page is not negative, and -1 for page -1.
    expected = torch.maximum(pages, torch.add(offsets, pages, alpha=page_size))
    wrong = tokens != expected
    if indices.device.type != "cpu":
        return pages[:, 0].masked_fill(wrong.any(1), BAD_PAGE)
    if wrong.any():
        at = int(wrong.flatten().nonzero()[0])
        raise bad(
            f"{name} must be whole pages of {page_size} tokens, aligned and in order (or all -1), got "
            f"{int(indices[at])} at position {at}."
        )
    return pages[:, 0]


def check_page_size(page_size: int) -> None:
    if page_size < 1:
        raise bad(f"page_size must be 1 or more, got {page_size}.")


def check_whole_pages(indices: Tensor, page_size: int, name: str) -> None:
    if indices.numel() % page_size:
        raise bad(f"{name} must be whole pages of {page_size} tokens, got {indices.numel()} indices.")
