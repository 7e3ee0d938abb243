"""Which transfers in flight a new one must wait for, known to the host without asking the device.

Transfers of one direction run in order on one stream. So a new load waits for the latest store in
flight that touches one of its slots, and a new store for such a load: all earlier ones have then
finished too. Between a load and a store any common slot is a hazard, since one of them writes it:

    device slot   a load writes it, a store reads it
    host slot     a load reads it, a store writes it

A slot here is whatever the caller counts in: an engine counts in pages where slots may move as pages.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class SlotHistory:
    """The last transfer of one direction that touched each slot of one pool. Numbers start at 1."""

    def __init__(self, num_slots: int) -> None:
        with torch.inference_mode(False):  # other threads write it, in a mode of their own
            self._last = torch.zeros(num_slots, dtype=torch.int64)
        self._last_of_any = 0
        self._last_of_unknown = 0  # a transfer whose slots the host can't read

    def add(self, slots: Tensor | None, number: int) -> None:
        """`slots` without -1, on the CPU; None where the host can't read them: any slot, then."""
        self._last_of_any = number
        if slots is None:
            self._last_of_unknown = number
        else:
            self._last.index_fill_(0, slots, number)

    def last(self, slots: Tensor | None) -> int:
        """The last transfer that touched one of `slots`; 0 for none."""
        if slots is None:
            return self._last_of_any
        if not len(slots):
            return 0
        return max(int(self._last.index_select(0, slots).max()), self._last_of_unknown)


class Hazards:
    """The histories of some pools, for both directions. Not safe to use from several threads at once."""

    def __init__(self, directions: Sequence[str], pool_slots: Sequence[int]) -> None:
        self._histories = {
            direction: [SlotHistory(num_slots) for num_slots in pool_slots] for direction in directions
        }

    def conflicts(self, direction: str, slots: Sequence[Tensor | None]) -> dict[str, int]:
        """For every other direction its last transfer that shares a slot; `slots` of each pool."""
        found = {}
        for other, histories in self._histories.items():
            if other != direction:
                pairs = zip(histories, slots, strict=True)
                found[other] = max(history.last(of_pool) for history, of_pool in pairs)
        return found

    def add(self, direction: str, slots: Sequence[Tensor | None], number: int) -> None:
        for history, of_pool in zip(self._histories[direction], slots, strict=True):
            history.add(of_pool, number)
