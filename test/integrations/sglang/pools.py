"""SGLang's own device and host pools on the CPU, filled with fingerprints, and what moving tokens means.

The reference knows a pool's layout only through SGLang: a token's bytes on the host are found in the page
that the pool's get_data_page returns, whose shape SGLang documents with set_from_flat_data_page.
"""

from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from sglang.srt.mem_cache.pool_host.mha import AsymmetricMHATokenToKVPoolHost, MHATokenToKVPoolHost
from sglang.srt.mem_cache.pool_host.mla import MLATokenToKVPoolHost
from torch import Tensor

from torch_hicache.testing import fill_pool

LAYERS, HEADS, DIM, PAGE = 3, 2, 10, 4
DEVICE_TOKENS = 8 * PAGE  # and one page of padding in front
KINDS = ("mha", "asymmetric", "mla")


class Pools:
    """A device pool and its host pool."""

    def __init__(self, kind: str, layout: str) -> None:
        self.kind, self.layout = kind, layout
        common = {"size": DEVICE_TOKENS, "page_size": PAGE, "dtype": torch.bfloat16, "layer_num": LAYERS}
        common |= {"device": "cpu", "enable_memory_saver": False}
        capacity = {"device_capacity_tokens": DEVICE_TOKENS, "start_layer": 0, "end_layer": LAYERS}
        self.device: Any
        self.host: Any
        if kind == "mla":
            self.device = MLATokenToKVPool(kv_lora_rank=16, qk_rope_head_dim=6, **common)
            info = self.device._mla_buffer_info()
            self.host = MLATokenToKVPoolHost(
                info, 2.0, 0, PAGE, layout, pin_memory=False, target_layer_num=LAYERS, **capacity
            )
            self.device_tensors = list(self.device.kv_buffer)
        else:
            widths = {"v_head_dim": 6} if kind == "asymmetric" else {}
            self.device = MHATokenToKVPool(head_num=HEADS, head_dim=DIM, **common, **widths)
            pool = AsymmetricMHATokenToKVPoolHost if kind == "asymmetric" else MHATokenToKVPoolHost
            info = self.device._mha_buffer_info()
            self.host = pool(info, 2.0, 0, PAGE, layout, pin_memory=False, **capacity)
            self.device_tensors = [*self.device.k_buffer, *self.device.v_buffer]
        self.host_tensors = [self.host.kv_buffer] if kind != "asymmetric" else list(self.host.kv_buffer)
        for i, tensor in enumerate([*self.device_tensors, *self.host_tensors]):
            fill_pool([tensor], seed=i + 1)

    @property
    def tensors(self) -> list[Tensor]:
        return [*self.device_tensors, *self.host_tensors]

    def copies(self) -> list[Tensor]:
        return [tensor.clone() for tensor in self.tensors]

    def device_rows(self, tensors: list[Tensor], layer: int) -> list[Tensor]:
        """`[tokens, heads, width]` of K and V (or of the latent rows), in `tensors` or copies of them."""
        if self.kind == "mla":
            return [tensors[layer]]
        return [tensors[layer], tensors[LAYERS + layer]]

    def host_row(self, tensors: list[Tensor], layer: int, token: int) -> list[Tensor]:
        """The same of one token on the host."""
        host = tensors[len(self.device_tensors) :]
        components = list(host[0]) if self.kind == "mha" else host
        page, offset = divmod(token, PAGE)
        return [
            {
                "layer_first": lambda c=c: c[layer, token],
                "page_first": lambda c=c: c[token, layer],
                "page_first_direct": lambda c=c: c[page, layer, offset],
                "page_head": lambda c=c: c[page, :, offset, layer],
            }[self.layout]()
            for c in components
        ]

    def expect_load(self, device_tokens: Tensor, host_tokens: Tensor, layer: int) -> list[Tensor]:
        """All tensors as they must be after a load of one layer."""
        copies = self.copies()
        for d, h in zip(device_tokens.tolist(), host_tokens.tolist(), strict=True):
            rows = self.host_row(copies, layer, h)
            for component, row in zip(self.device_rows(copies, layer), rows, strict=True):
                component[d] = row
        return copies

    def expect_store(self, device_tokens: Tensor, host_tokens: Tensor) -> list[Tensor]:
        copies = self.copies()
        for layer in range(LAYERS):
            for d, h in zip(device_tokens.tolist(), host_tokens.tolist(), strict=True):
                rows = self.host_row(copies, layer, h)
                for component, row in zip(self.device_rows(copies, layer), rows, strict=True):
                    row.copy_(component[d])
        return copies

    def check(self, expected: list[Tensor]) -> None:
        for i, (now, then) in enumerate(zip(self.tensors, expected, strict=True)):
            assert torch.equal(now.view(torch.uint8), then.view(torch.uint8)), f"tensor {i} differs"


def page_tokens(*pages: int) -> Tensor:
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])
