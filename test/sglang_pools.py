"""Pools of SGLang's shapes, with transfers between them by index assignment."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from torch_hicache import device_view
from torch_hicache.testing import Placement, Snapshot, fill_pool

LAYERS, HEADS, DIM, PAGE = 3, 2, 5, 4  # rows of 20 bytes: no multiple of 8
HOST_PAGES, DEVICE_PAGES = 9, 7
HOST, DEVICE = HOST_PAGES * PAGE, DEVICE_PAGES * PAGE
ITEM = HEADS * DIM * 2
DTYPE = torch.bfloat16


class Pools:
    """One side of K and V: layer tensors of a device pool, or a host pool of some layout."""

    def __init__(self, make: Callable[..., Tensor], tokens: int, layout: str, seed: int) -> None:
        pages = tokens // PAGE
        shape = {
            "layers": (tokens, HEADS, DIM),
            "layer_first": (LAYERS, tokens, HEADS, DIM),
            "page_first": (tokens, LAYERS, HEADS, DIM),
            "page_first_direct": (pages, LAYERS, PAGE, HEADS, DIM),
            "page_head": (pages, HEADS, PAGE, LAYERS, DIM),
        }[layout]
        copies = 2 * LAYERS if layout == "layers" else 2
        self.tensors = [make(shape, DTYPE) for _ in range(copies)]
        for i, tensor in enumerate(self.tensors):
            fill_pool([tensor], seed=seed + i)
        self.layout = layout

    def component(self, i: int) -> Sequence[Tensor] | Tensor:
        return self.tensors[i * LAYERS : (i + 1) * LAYERS] if self.layout == "layers" else self.tensors[i]

    def layers(self, i: int) -> list[Tensor]:
        """K (0) or V (1), one tensor a layer."""
        if self.layout == "layers":
            return self.tensors[i * LAYERS : (i + 1) * LAYERS]
        return [self.tensors[i][layer] for layer in range(LAYERS)]  # layer_first

    def table(self, i: int, device: str) -> Tensor:
        return table_of(self.layers(i), device)


def table_of(tensors: Sequence[Tensor], device: str) -> Tensor:
    """The addresses at which `device` finds them."""
    on_cpu = tensors[0].device.type == "cpu" and device != "cpu"
    addresses = [(device_view(tensor, device) if on_cpu else tensor).data_ptr() for tensor in tensors]
    return torch.tensor(addresses, dtype=torch.uint64, device=device)


def expect(
    snapshot: Snapshot,
    dst: Pools,
    src: Pools,
    tokens: tuple[Tensor, Tensor],
    layers: Sequence[int],
    *,
    components: Sequence[int] = (0, 1),
) -> None:
    """Index assignment, token by token, in the snapshot."""
    for i in components:
        for layer in layers:
            for d, s in zip(tokens[0].tolist(), tokens[1].tolist(), strict=True):
                if d >= 0 and s >= 0:
                    _row(snapshot, dst, i, layer, d).copy_(_row(snapshot, src, i, layer, s))


def _row(snapshot: Snapshot, pools: Pools, i: int, layer: int, token: int) -> Tensor:
    page, offset = divmod(token, PAGE)
    if pools.layout == "layers":
        return snapshot.twin(pools.tensors[i * LAYERS + layer])[token]
    view = snapshot.twin(pools.tensors[i])
    return {
        "layer_first": lambda: view[layer, token],
        "page_first": lambda: view[token, layer],
        "page_first_direct": lambda: view[page, layer, offset],
        "page_head": lambda: view[page, :, offset, layer],
    }[pools.layout]()


def pages(numbers: Sequence[int]) -> Tensor:
    return torch.cat([torch.arange(n * PAGE, (n + 1) * PAGE) for n in numbers])


def loads(placement: Placement, layout: str) -> tuple[Pools, Pools]:
    """Destination layers, and a source in some layout."""
    return Pools(placement.dst, DEVICE, "layers", 1), Pools(placement.src, HOST, layout, 11)


def stores(placement: Placement, layout: str) -> tuple[Pools, Pools]:
    return Pools(placement.dst, HOST, layout, 11), Pools(placement.src, DEVICE, "layers", 1)
