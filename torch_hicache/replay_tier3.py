"""The third tier of a replay: where blocks go that leave the host pool, and come back from.

    device pool  <->  host pool  --put (evicted)-->  third tier
                                 <--get (found nowhere nearer)--

Blocks that come back land in the host pool, and are loaded and verified on the device like any other.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch_hicache.replay_clock import Moved
from torch_hicache.tier import ThirdTier, TierStats

if TYPE_CHECKING:
    from torch_hicache.replay import Tier


@dataclass
class Tier3Record:
    """What a request had of the third tier. Seconds are of the calls, which the request waits for.

    `misses` are blocks that were asked for and not had.
    """

    misses: int = 0
    put: Moved = field(default_factory=Moved)
    get: Moved = field(default_factory=Moved)


class ReplayTier3:
    """Moves blocks between the host pool and a third tier.

    Args:
        tier: behind the host pool whose blocks are those of `host`.
        block_bytes: of one block.
    """

    def __init__(self, tier: ThirdTier, host: "Tier", block_bytes: int) -> None:
        self._tier, self._host, self._block_bytes = tier, host, block_bytes

    def put(self, evicted: list[tuple[int, int]], record: Tier3Record) -> None:
        """Keep blocks, given with their pages, which nothing writes to any more."""
        if evicted:
            started = time.perf_counter()
            placed = self._tier.put([str(block) for block, _ in evicted], [page for _, page in evicted])
            record.put.seconds += time.perf_counter() - started
            record.put.num_bytes += sum(placed) * self._block_bytes

    def fetch(self, blocks: list[int], make_room: Callable[[int], None], record: Tier3Record) -> int:
        """Bring blocks to the host pool as far as they are found; returns how many of the first.

        `make_room` makes so many pages of the host pool available, or as many as it can.
        """
        started = time.perf_counter()
        keys = [str(block) for block in blocks]
        num_there = _num_leading(self._tier.contains(keys))
        record.get.seconds += time.perf_counter() - started
        if num_there:
            make_room(num_there)
        asked = blocks[: min(num_there, self._host.num_available)]
        found: list[bool] = []
        if asked:
            pages = self._host.add(asked)
            started = time.perf_counter()
            found = self._tier.get(keys[: len(asked)], pages)
            record.get.seconds += time.perf_counter() - started
            record.get.num_bytes += sum(found) * self._block_bytes
            self._host.drop([block for block, arrived in zip(asked, found, strict=True) if not arrived])
        record.misses += len(blocks) - sum(found)
        return _num_leading(found)

    def stats(self) -> TierStats:
        return self._tier.stats()

    def close(self) -> None:
        self._tier.close()


def _num_leading(found: list[bool]) -> int:
    return found.index(False) if False in found else len(found)
