"""Token indices as page indices, on each device as Python has them on the CPU."""

import pytest
import torch

from torch_hicache.integrations.sglang.pages import BAD_PAGE, page_indices

# Sizes whose reciprocal is exact, too small, or next to nothing.
PAGE_SIZES = (1, 2, 3, 7, 64, 1000, (1 << 20) + 7)
FAR = (0, 1, (1 << 31) - 1, 1 << 31, (1 << 32) + 1, (1 << 62) - 1)  # pages, as far as their tokens fit


def page_starts(page_size: int) -> list[int]:
    return [page * page_size for page in FAR if page * page_size < 1 << 62]


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_whole_pages_near_and_far(device: str, page_size: int) -> None:
    starts = torch.tensor(page_starts(page_size))
    tokens = (starts.unsqueeze(1) + torch.arange(page_size)).flatten()
    pages = page_indices(tokens.to(device), page_size, "indices")
    assert pages.tolist() == [start // page_size for start in starts.tolist()]
    assert pages.dtype == torch.int64


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("step", [1, 3])
def test_one_wrong_token_spoils_its_page_alone(device: str, dtype: torch.dtype, step: int) -> None:
    page_size = 5
    good = torch.cat([torch.arange(10, 20), torch.full((5,), -1), torch.arange(30, 35)]).to(dtype)
    for at in range(len(good)):
        for wrong in (-2, -1, int(good[at]) + 1, int(good[at]) + page_size, torch.iinfo(dtype).max):
            tokens = torch.zeros(len(good), step, dtype=dtype)
            tokens[:, 0] = good
            tokens[at, 0] = wrong
            expected = [2, 3, -1, 6]
            if wrong != good[at]:
                expected[at // page_size] = BAD_PAGE
            # On the CPU page_indices would refuse it: test_sglang_bad_calls.py.
            pages = torch.ops.hicache.page_indices(tokens.to(device)[:, 0], page_size)
            assert pages.tolist() == expected


def test_pages_below_zero_are_none(device: str) -> None:
    tokens = torch.arange(-8, 8, device=device)
    assert torch.ops.hicache.page_indices(tokens, 4).tolist() == [BAD_PAGE, BAD_PAGE, 0, 1]


def test_page_sizes_beyond_the_tokens(device: str) -> None:
    none = torch.empty(0, dtype=torch.int32, device=device)
    assert page_indices(none, 1 << 40, "indices").tolist() == []
    with pytest.raises(ValueError, match="whole pages of 3 tokens, got 4 indices"):
        page_indices(torch.arange(4, device=device), 3, "indices")
