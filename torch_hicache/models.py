"""KV cache shapes of real models, for replays and benchmarks."""

from dataclasses import dataclass

import torch

from torch_hicache.layout import PlaneSpec


@dataclass(frozen=True)
class Model:
    """What a token keeps in each of `num_layers` layers. MLA rows have one head, as in SGLang."""

    name: str
    description: str
    num_layers: int
    planes: tuple[PlaneSpec, ...]

    @property
    def token_layer_bytes(self) -> int:
        """Bytes of one token in one layer, all planes."""
        return sum(plane.row_bytes for plane in self.planes)


def _key_value(heads: int, dim: int) -> tuple[PlaneSpec, ...]:
    row_shape = (heads, dim)
    return tuple(PlaneSpec(name, row_shape, torch.bfloat16) for name in ("key", "value"))


def _latent(dtype: torch.dtype) -> tuple[PlaneSpec, ...]:
    # 512 of the compressed KV and 64 of the rotary key, in one row.
    return (PlaneSpec("latent", (1, 576), dtype),)


MODELS = {
    model.name: model
    for model in (
        Model("gqa_8b", "Llama 3.1 8B, K and V in bf16, 2048-byte rows", 32, _key_value(8, 128)),
        Model("gqa_70b", "Llama 3.1 70B, K and V in bf16, 2048-byte rows", 80, _key_value(8, 128)),
        Model("mla_bf16", "DeepSeek V3, latent in bf16, 1152-byte rows", 61, _latent(torch.bfloat16)),
        Model("mla_fp8", "DeepSeek V3, latent in fp8, 576-byte rows", 61, _latent(torch.float8_e4m3fn)),
        Model(
            "k_only",
            "K alone, as of Llama 3.1 8B, 2048-byte rows",
            32,
            (PlaneSpec("key", (8, 128), torch.bfloat16),),
        ),
    )
}
