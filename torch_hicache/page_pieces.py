"""Where the bytes of a page lie in a host pool, for those who move pages by address."""

import ctypes
import math
from dataclasses import dataclass

from torch import Tensor

from torch_hicache.pool import HostPool


@dataclass(frozen=True)
class _Piece:
    """A contiguous part of every page: page i has it at `address + i * stride_bytes`."""

    address: int
    stride_bytes: int
    size_bytes: int
    buffer: int  # which of the pool's buffers it lies in


class PagePieces:
    """The contiguous pieces of each page, in an order that depends on the pool's layout and planes only.

    A page of a page_first pool is one piece for each plane, one of a layer_first pool is one for each
    plane and layer. Keeps the pool's memory alive.
    """

    def __init__(self, pool: HostPool) -> None:
        self._buffers = pool.buffers
        self.regions = [(buffer.data_ptr(), buffer.nbytes) for buffer in self._buffers]
        self._memory = [
            memoryview((ctypes.c_uint8 * nbytes).from_address(address))
            for address, nbytes in self.regions
        ]
        self._pieces = [piece for stack in pool.stacks("page") for piece in self._pieces_of(stack)]
        self.sizes = [piece.size_bytes for piece in self._pieces]
        self.page_bytes = sum(self.sizes)

    def addresses(self, page: int) -> list[int]:
        """Of the pieces of a page, in the order of `sizes`."""
        return [piece.address + page * piece.stride_bytes for piece in self._pieces]

    def views(self, page: int) -> list[memoryview]:
        """The pieces of a page as memory, in the order of `sizes`."""
        views = []
        for piece in self._pieces:
            start = piece.address + page * piece.stride_bytes - self.regions[piece.buffer][0]
            views.append(self._memory[piece.buffer][start : start + piece.size_bytes])
        return views

    def _pieces_of(self, stack: Tensor) -> list[_Piece]:
        """`stack`: one plane, [layers, pages, page_size, *row]."""
        item = stack.element_size()
        page = stack[:, 0]
        # From the innermost dimension outwards, as long as it continues what is inside it.
        dims = sorted(
            (stride * item, size)
            for stride, size in zip(page.stride(), page.shape, strict=True)
            if size > 1
        )
        size_bytes = item
        while dims and dims[0][0] == size_bytes:
            size_bytes *= dims.pop(0)[1]
        offsets = [0]
        for stride_bytes, size in reversed(dims):
            offsets = [offset + i * stride_bytes for offset in offsets for i in range(size)]
        wanted_bytes = math.prod(page.shape) * item
        if size_bytes * len(offsets) != wanted_bytes:
            raise ValueError(
                f"[PagePieces] the pieces of a page must hold its {wanted_bytes:,} bytes, got "
                f"{size_bytes * len(offsets):,}."
            )
        buffer = next(
            i
            for i, (address, nbytes) in enumerate(self.regions)
            if address <= page.data_ptr() < address + nbytes
        )
        stride_bytes = stack.stride(1) * item
        return [_Piece(page.data_ptr() + o, stride_bytes, size_bytes, buffer) for o in offsets]
