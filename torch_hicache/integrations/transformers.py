"""A KV cache for HuggingFace transformers whose layers live in a host pool, on any device.

    from torch_hicache.integrations.transformers import HiCacheCache

    cache = HiCacheCache(model.config, max_tokens=32_768)
    tokens = model.generate(**inputs, past_key_values=cache)

Here are the names and shapes of transformers; layer_window.py moves the layers.
"""

from typing import Any

import torch
from torch import Tensor

from torch_hicache.integrations.layer_window import LayerWindow

# The minor versions whose cache classes this was written for; docs/integrations/transformers.md.
SUPPORTED = ((5, 19), (5, 25))
_RANGE = ">=5.19,<5.25"

try:
    import transformers
    from transformers.cache_utils import (
        Cache,
        CacheLayerMixin,
        DynamicCache,
        DynamicLayer,
        DynamicSlidingWindowLayer,
    )
except ImportError as error:
    raise ImportError(
        f"[HiCacheCache] needs transformers {_RANGE}: {error}. Install it with: "
        f'pip install "transformers{_RANGE}"'
    ) from error


def _check_version(version: str) -> None:
    found = tuple(int(part) for part in version.split(".")[:2])
    if not SUPPORTED[0] <= found < SUPPORTED[1]:
        raise ImportError(
            f"[HiCacheCache] transformers must be {_RANGE}, got {version}. Install one with: "
            f'pip install "transformers{_RANGE}"'
        )


_check_version(transformers.__version__)


class HiCacheLayer(CacheLayerMixin):
    """One layer of a HiCacheCache. What concerns the sequences is the cache's, for all layers at once."""

    is_croppable = True
    is_sliding = False

    def __init__(self, window: LayerWindow, layer: int) -> None:
        super().__init__()
        self._window, self._layer = window, layer

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self._window.prepare(key_states, value_states)
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_args: object, **_kwargs: object
    ) -> tuple[Tensor, Tensor]:
        keys, values = self._window.update(self._layer, key_states, value_states)
        self.is_initialized = True
        return keys, values

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_seq_length(self) -> int:
        return self._window.length(self._layer)

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self._refuse("reset")

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self._refuse("reorder_cache")

    def crop(self, tokens_to_remove: int) -> None:
        self._refuse("crop")

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._refuse("batch_repeat_interleave")

    def batch_select_indices(self, indices: Tensor) -> None:
        self._refuse("batch_select_indices")

    def offload(self) -> None:
        self._refuse("offload")

    def prefetch(self) -> None:
        self._refuse("prefetch")

    def _refuse(self, method: str) -> None:
        raise RuntimeError(f"[HiCacheCache] {method} must be called on the cache, got a call on a layer.")


class HiCacheCache(Cache):
    """A KV cache in host memory, for `past_key_values=` of `generate` and of the model's `forward`.

    The device holds a window of two layers (three of a model with an odd number): the one whose attention
    runs and the next, which is loaded meanwhile. Tokens are those of transformers' DynamicCache. Layers
    with sliding window attention are transformers' own and stay on the device, as they are small.

    Args:
        config: the model's.
        max_tokens: room in the host pool: tokens of all sequences of the batch together (beams are
            sequences). Its memory is allocated and, for an accelerator, pinned at the first update.
        device: where the model is; that of the first update without one.

    For inference, for a model on one device, for one thread at a time.

    Raises:
        ValueError: a model that has layers of another kind, or none with full attention, or an encoder.
        Later, from the model's forward: ValueError, MemoryError as `LayerWindow.update` has them.
    """

    def __init__(self, config: Any, *, max_tokens: int, device: torch.device | str | None = None) -> None:
        if getattr(config, "is_encoder_decoder", False):
            raise ValueError("[HiCacheCache] serves decoders, got a model with an encoder.")
        layers = DynamicCache(config=config).layers
        kinds = {type(layer) for layer in layers}
        if DynamicLayer not in kinds or kinds - {DynamicLayer, DynamicSlidingWindowLayer}:
            raise ValueError(
                "[HiCacheCache] a model's layers must have full attention, some may have a sliding "
                f"window, got {', '.join(sorted(kind.__name__ for kind in kinds))}."
            )
        num_layers = config.get_text_config(decoder=True).num_hidden_layers
        if len(layers) != num_layers:  # older versions leave layers out that read those of others
            raise ValueError(
                "[HiCacheCache] a model's layers must each have their own K and V, got "
                f"{len(layers)} of {num_layers}."
            )
        offloaded = [i for i, layer in enumerate(layers) if type(layer) is DynamicLayer]
        self._window = LayerWindow("HiCacheCache", offloaded, max_tokens, device)
        self._on_device = [layer for layer in layers if type(layer) is not DynamicLayer]
        for i in offloaded:
            layers[i] = HiCacheLayer(self._window, i)
        super().__init__(layers=layers)

    @property
    def host_bytes(self) -> int:
        """Bytes of the host pool."""
        return self._window.host_bytes

    @property
    def device_bytes(self) -> int:
        """Bytes of the window on the device."""
        return self._window.device_bytes

    def evict(self) -> None:
        """Give the window's device memory back; the next forward pass restores what it reads.

        For a conversation that waits for its user. Blocks the host until the transfers in flight have
        ended; raises the error of one that failed.
        """
        self._window.evict()

    def reset(self) -> None:
        """Drop all tokens; the pools stay."""
        self._window.clear()
        for layer in self._on_device:
            layer.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Let sequence i be what sequence `beam_idx[i]` was. No KV moves."""
        self._window.select(beam_idx)
        for layer in self._on_device:
            layer.reorder_cache(beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        """Drop the last `-tokens_to_remove` tokens; 0 or negative, as in transformers."""
        if tokens_to_remove > 0:
            raise ValueError(
                f"[HiCacheCache] tokens_to_remove must be 0 or negative, got {tokens_to_remove}."
            )
        for layer in self._on_device:
            layer.crop(tokens_to_remove)
        self._window.crop(-tokens_to_remove)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat every sequence, the copies next to each other. No KV moves.

        Raises:
            MemoryError: more than `max_tokens`.
        """
        batch = torch.arange(self._window.num_sequences)
        self._window.select(batch.repeat_interleave(repeats))
        for layer in self._on_device:
            layer.batch_repeat_interleave(repeats)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keep these sequences, in this order. No KV moves."""
        self._window.select(torch.arange(self._window.num_sequences)[indices.cpu()])
        for layer in self._on_device:
            layer.batch_select_indices(indices)
