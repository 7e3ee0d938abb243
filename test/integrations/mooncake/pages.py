"""Host pools whose pages tell which key they belong to, byte by byte."""

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from torch_hicache import HostPool, PlaneSpec
from torch_hicache.integrations.mooncake import MooncakeTier

# V has an allocation of its own, and half the width.
PLANES = (
    PlaneSpec("key", (4, 64), torch.bfloat16),
    PlaneSpec("value", (4, 32), torch.bfloat16),
    PlaneSpec("scale", (4, 1), torch.uint8),
)
# 8,192 tokens of 512 bytes.
LARGE_PLANES = (PlaneSpec("key", (256,), torch.bfloat16),)


def small_pool(num_pages: int = 24, layout: str = "page_first", **fields: Any) -> HostPool:
    """Pages of 16 tokens and 3 layers."""
    planes = fields.pop("planes", PLANES)
    pool = HostPool(planes, fields.pop("layers", 3), num_pages * 16, "cpu", layout, 16)
    return poisoned(pool)


def large_pool(num_pages: int, layout: str = "page_first") -> HostPool:
    """Pages of 4 MiB."""
    return poisoned(HostPool(LARGE_PLANES, 1, num_pages * 8192, "cpu", layout, 8192))


def poisoned(pool: HostPool) -> HostPool:
    for buffer in pool.buffers:
        buffer.view(torch.uint8).fill_(0xA5)
    return pool


def open_tier(pool: HostPool, master: str, **options: Any) -> MooncakeTier:
    """With deadlines for a machine that does other things too."""
    fields = {"namespace": "test", "deadline_seconds": 5.0} | options
    return MooncakeTier(pool, master=master, **fields)


def fill(pool: HostPool, keys: Sequence[str], pages: Sequence[int]) -> None:
    for key, page in zip(keys, pages, strict=True):
        seed = int.from_bytes(hashlib.sha256(key.encode()).digest()[:7], "little")
        generator = torch.Generator().manual_seed(seed)
        for rows in _rows_of(pool, page):
            rows.random_(generator=generator)


def contents(pool: HostPool) -> list[Tensor]:
    """A copy of the whole pool."""
    return [stack.view(torch.uint8).clone() for stack in pool.stacks("page")]


def wanted(
    pool: HostPool, before: list[Tensor], keys: Sequence[str], pages: Sequence[int]
) -> list[Tensor]:
    """What the whole pool holds when these pages belong to these keys and all else is as before."""
    model = HostPool(pool.specs, pool.layer_ids, pool.num_slots, "cpu", pool.layout, pool.page_size)
    for stack, old in zip(model.stacks("page"), before, strict=True):
        stack.view(torch.uint8).copy_(old)
    fill(model, keys, pages)
    return contents(model)


def same(found: list[Tensor], expected: list[Tensor]) -> bool:
    return all(torch.equal(f, e) for f, e in zip(found, expected, strict=True))


def first_bytes(pool: HostPool, page: int, count: int = 64) -> bytes:
    """Of the page's first plane and layer."""
    return bytes(_rows_of(pool, page)[0].flatten()[:count].tolist())


def _rows_of(pool: HostPool, page: int) -> list[Tensor]:
    """The page in each plane: [layers, tokens, bytes of a row ...]."""
    return [stack[:, page].view(torch.uint8) for stack in pool.stacks("page")]
