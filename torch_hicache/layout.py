"""Pool layouts as shapes and strides.

A layout is the order of a pool's axes in memory. Every plane of it is a view, so that `transfer_kv`
serves all layouts alike. Nothing here allocates or copies.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

# Axes from the outermost to the innermost, in SGLang's shapes. A page followed directly by its
# tokens is one axis of slots: only such a layout has one stride from slot to slot. "row" is the row
# shape, or what is left of it when "head" has taken its first dimension.
#
#     layer_first        [layers, slots, *row]
#     page_first         [slots, layers, *row]
#     page_first_direct  [pages, layers, page_size, *row]
#     page_head          [pages, heads, page_size, layers, dim]
_AXES = {
    "layer_first": ("layer", "page", "token", "row"),
    "page_first": ("page", "token", "layer", "row"),
    "page_first_direct": ("page", "layer", "token", "row"),
    "page_head": ("page", "head", "token", "layer", "row"),
}
LAYOUTS = tuple(_AXES)
UNITS = ("slot", "page")


@dataclass(frozen=True)
class PlaneSpec:
    """One kind of row that a token has in every layer: its K, its V, its latent row, its scales."""

    name: str
    row_shape: tuple[int, ...]
    dtype: torch.dtype

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, torch.dtype):
            raise TypeError(f"[layout] dtype must be a torch.dtype, got {self.dtype!r}.")
        try:
            shape = tuple(self.row_shape)  # a list or a torch.Size will do
        except TypeError:
            raise TypeError(
                f"[layout] row_shape must be a tuple of sizes, got {self.row_shape!r}."
            ) from None
        object.__setattr__(self, "row_shape", shape)

    @property
    def row_bytes(self) -> int:
        return math.prod(self.row_shape) * self.dtype.itemsize


@dataclass(frozen=True)
class PoolShape:
    """Where the rows of one plane lie, for all layers and slots.

    Args:
        layout: one of `LAYOUTS`.
        num_layers, num_slots: how many the pool holds; whole pages only.
        page_size: slots (tokens) in a page.
        row_shape: of one row, for example (heads, dim); `page_head` needs these two dimensions.
    """

    layout: str
    num_layers: int
    num_slots: int
    page_size: int
    row_shape: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.layout not in _AXES:
            raise ValueError(f"[layout] layout must be one of {', '.join(LAYOUTS)}, got '{self.layout}'.")
        for name in ("num_layers", "num_slots", "page_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"[layout] {name} must be 1 or more, got {getattr(self, name)}.")
        if self.num_slots % self.page_size:
            raise ValueError(
                f"[layout] num_slots must be whole pages of {self.page_size}, got {self.num_slots}."
            )
        if not self.row_shape or min(self.row_shape) < 1:
            raise ValueError(
                f"[layout] row_shape must have sizes of 1 or more, got {list(self.row_shape)}."
            )
        if "head" in _AXES[self.layout] and len(self.row_shape) != 2:
            raise ValueError(
                f"[layout] {self.layout} needs rows of [heads, dim], got {list(self.row_shape)}."
            )

    @property
    def num_pages(self) -> int:
        return self.num_slots // self.page_size

    @property
    def has_slots(self) -> bool:
        """Whether the pool is addressable by slot, not by page only."""
        return "slot" in self._axes

    @property
    def base_shape(self) -> tuple[int, ...]:
        """The shape of the contiguous tensor that holds the plane."""
        sizes = {
            "layer": (self.num_layers,),
            "slot": (self.num_slots,),
            "page": (self.num_pages,),
            "token": (self.page_size,),
            "head": self.row_shape[:1],
            "row": self.row_shape[1:] if "head" in self._axes else self.row_shape,
        }
        return tuple(size for axis in self._axes for size in sizes[axis])

    def stack(self, base: Tensor, *, unit: str = "slot") -> Tensor:
        """All layers as one view of `base`, for one tensor of a `transfer_kv` call.

        Args:
            base: `[*lead, *base_shape]`, any strides. Leading dimensions stay in front: SGLang
                keeps K and V of one width as `[2, *base_shape]`.
            unit: what an index addresses. "slot" gives `[*lead, layers, slots, *row]`, "page" gives
                `[*lead, layers, pages, page_size, *row]`; slot_dim is `len(lead) + 1` for both.

        Raises:
            ValueError: an unknown unit, a base of another shape, or a layout without slots.
        """
        if unit not in UNITS:
            raise ValueError(f"[layout] unit must be 'slot' or 'page', got '{unit}'.")
        if unit == "slot" and not self.has_slots:
            raise ValueError(
                f"[layout] {self.layout} is addressable by page only: a slot has no single stride "
                "there. Use unit 'page'."
            )
        lead = base.dim() - len(self.base_shape)
        if lead < 0 or tuple(base.shape[lead:]) != self.base_shape:
            raise ValueError(
                f"[layout] a {self.layout} base must end in shape {list(self.base_shape)}, got "
                f"{list(base.shape)}."
            )
        axes = self._axes
        if unit == "page" and self.has_slots:
            slot = axes.index("slot")
            base = base.unflatten(lead + slot, (self.num_pages, self.page_size))
            axes = (*axes[:slot], "page", "token", *axes[slot + 1 :])
        order = ("layer", "slot", "page", "token", "head")
        front = [lead + axes.index(axis) for axis in order if axis in axes]
        rest = range(lead + len(front), base.dim())
        return base.permute(*range(lead), *front, *rest)

    def planes(self, base: Tensor, *, unit: str = "slot") -> list[Tensor]:
        """The view of each layer: `[*lead, slots, *row]` or `[*lead, pages, page_size, *row]`."""
        lead = base.dim() - len(self.base_shape)
        return list(self.stack(base, unit=unit).unbind(lead))

    @property
    def _axes(self) -> tuple[str, ...]:
        axes = _AXES[self.layout]
        page = axes.index("page")
        if axes[page + 1] == "token":
            return (*axes[:page], "slot", *axes[page + 2 :])
        return axes
