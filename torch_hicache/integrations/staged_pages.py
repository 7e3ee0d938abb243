"""StagedPages: pages of an engine in a third tier, by way of pages of our own.

    engine's page --fill--> our page --put--> tier
    engine's page <--take-- our page <--get-- tier      take: only of a page that was found, and is right

An engine uses a page again as soon as a get of it has failed, when a call that was given up may still
write to it. Our pages are handed out again only when that call has returned.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_hicache.integrations.mooncake import MooncakeTier
from torch_hicache.layout import PlaneSpec
from torch_hicache.pool import HostPool

DEFAULT_PAGES = 128


class StagedPages:
    """`num_pages` pages of `page_bytes`, and a MooncakeTier of its `options` behind them.

    A put and a get may be under way at a time: each takes half of the pages at most, and as many rounds
    as it needs. Where calls that hang have them all, the rest of its keys are misses.

    Raises:
        ValueError, ImportError, RuntimeError: as MooncakeTier does.
    """

    def __init__(self, page_bytes: int, num_pages: int, **options: Any) -> None:
        # A slot of the pool is a page of the engine's, whatever is in it.
        self._pool = HostPool([PlaneSpec("page", (page_bytes,), torch.uint8)], 1, num_pages)
        self._pages = self._pool.planes(0)[0]  # [pages, bytes]
        self._tier = MooncakeTier(self._pool, **options)

    def put(self, keys: Sequence[str], fill: Callable[[int, Tensor], Any]) -> list[bool]:
        """`fill` writes the page of a key, by the key's place."""

        def move(keys: Sequence[str], pages: list[int], first: int) -> list[bool]:
            for i, page in enumerate(pages):
                fill(first + i, self._pages[page])
            return self._tier.put(keys, pages)

        return self._in_rounds(keys, move)

    def get(self, keys: Sequence[str], take: Callable[[int, Tensor], Any]) -> list[bool]:
        """`take` reads the page of a key that was found, by the key's place."""

        def move(keys: Sequence[str], pages: list[int], first: int) -> list[bool]:
            found = self._tier.get(keys, pages)
            for i, page in enumerate(pages):
                if found[i]:
                    take(first + i, self._pages[page])
            return found

        return self._in_rounds(keys, move)

    def contains(self, keys: Sequence[str]) -> list[bool]:
        return self._tier.contains(keys)

    def close(self) -> None:
        self._tier.close()

    def _in_rounds(
        self, keys: Sequence[str], move: Callable[[Sequence[str], list[int], int], list[bool]]
    ) -> list[bool]:
        done: list[bool] = []
        most = max(1, self._pool.num_pages // 2)
        while len(done) < len(keys):
            part = keys[len(done) : len(done) + most]
            try:
                pages = self._pool.allocate(max(1, min(len(part), self._pool.available)))
            except MemoryError:
                break
            try:
                done += move(part[: len(pages)], pages.tolist(), len(done))
            finally:
                self._pool.free(pages)
        return done + [False] * (len(keys) - len(done))
