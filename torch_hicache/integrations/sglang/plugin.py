"""The entry point of SGLang's plug-in group `sglang.srt.plugins`: its host pools call transfer_kv.

Off unless TORCH_HICACHE_SGLANG=1. Wrapped are the two transfer methods of the host pools for MHA (K and V
of one width or of two) and MLA. Layouts, io backends and subclasses that are not served stay SGLang's.
"""

import logging
import os
import pkgutil
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import Tensor

from torch_hicache.integrations.sglang.addresses import keep_with, version_of
from torch_hicache.integrations.sglang.calls import transfer_kv
from torch_hicache.integrations.sglang.jit import missing_backend
from torch_hicache.integrations.sglang.pages import page_indices

SWITCH = "TORCH_HICACHE_SGLANG"
SUPPORTED = ("0.5.23",)

_PACKAGE = "sglang.srt.mem_cache.pool_host"
POOLS = (
    f"{_PACKAGE}.mha.MHATokenToKVPoolHost",
    f"{_PACKAGE}.mha.AsymmetricMHATokenToKVPoolHost",
    f"{_PACKAGE}.mla.MLATokenToKVPoolHost",
)
# The layouts that each io backend of SGLang moves. The others are SGLang's to refuse.
SERVED = {
    "kernel": ("layer_first", "page_first", "page_head"),
    "direct": ("layer_first", "page_first_direct"),
}
_IN_PAGES = ("page_head", "page_first_direct")

Components = list[tuple[Tensor, tuple[Tensor, ...]]]  # host buffer and device layers of K, and of V
Places = dict[int, tuple[int, int]]  # SGLang's number of a layer -> its place on the host, on the device

_pages: dict[int, tuple[object, Tensor]] = {}  # by id of an index tensor: for what, and its pages

_logger = logging.getLogger(__name__)


# --- The planes of a pool -------------------------------------------------------------------------


def _host_layers(buffer: Tensor, layout: str) -> tuple[Tensor, ...]:
    """`[tokens, *row]` or `[pages, *page]` of each layer."""
    return buffer.unbind({"layer_first": 0, "page_head": 3}.get(layout, 1))


def _device_layer(layer: Tensor, layout: str, page_size: int) -> Tensor:
    if layout not in _IN_PAGES:
        return layer
    pages = layer[: layer.shape[0] // page_size * page_size].unflatten(0, (-1, page_size))
    return pages.transpose(1, 2) if layout == "page_head" else pages


class PoolPlanes:
    """Views of one host pool and of the device buffers that belong to it, as transfer_kv takes them.

    Kept on the host pool for as long as it has the same kv_buffer; after SGLang's destroy() it has none.
    """

    def __init__(self, host: Any, components: Components, layers: Places) -> None:
        self.page_size = host.page_size
        self.in_pages = host.layout in _IN_PAGES
        host_planes = [_host_layers(buffer, host.layout) for buffer, _ in components]
        device_planes = [
            [_device_layer(layer, host.layout, host.page_size) for layer in device_layers]
            for _, device_layers in components
        ]
        pairs = list(layers.values())
        self.all_host = [planes[at] for planes in host_planes for at, _ in pairs]
        self.all_device = [planes[at] for planes in device_planes for _, at in pairs]
        # Device and host planes of a layer, by SGLang's number of it.
        self.layers = {
            layer: ([planes[device] for planes in device_planes], [planes[at] for planes in host_planes])
            for layer, (at, device) in layers.items()
        }

    def indices(self, indices: Tensor, name: str) -> Tensor:
        """Of pages where the layout has no tokens: once for all layers of a submission.

        SGLang makes index tensors anew for each submission. The pages are kept with them, for one stream,
        but not with an inference tensor, which does not count who writes to it.
        """
        if not self.in_pages:
            return indices
        if indices.is_inference():
            return page_indices(indices, self.page_size, name)
        stream = None if indices.is_cpu else torch.accelerator.current_stream(indices.device)
        key = self.page_size, stream, version_of(indices)
        known = _pages.get(id(indices))
        if known is None or known[0] != key:
            known = key, page_indices(indices, self.page_size, name)
            keep_with(indices, _pages, known)
        return known[1]


def _components(host: Any) -> tuple[Components, Places] | None:
    """None for a pool that is not served."""
    if hasattr(host, "device_k_buffers"):
        layers = {layer: (layer, layer) for layer in range(host.layer_num)}
        return [(host.k_buffer, host.device_k_buffers), (host.v_buffer, host.device_v_buffers)], layers
    if host._is_dummy or host.dcp_size != 1 or host._layer_shard_enabled or not host.device_kv_buffers:
        return None
    places = host._buffer_index_by_layer
    layers = {layer: (at, places[layer]) for layer, at in host._host_layer_by_controller.items()}
    return [(host.kv_buffer, host.device_kv_buffers)], layers


def planes_of(host: Any, io_backend: str) -> PoolPlanes | None:
    """None where SGLang's own method has to do it."""
    if host.layout not in SERVED.get(io_backend, ()) or host.kv_buffer is None:
        return None
    known = host.__dict__.get("_hicache_planes", None)
    if known is not None and known[0] is host.kv_buffer:
        return known[1]
    planes = None
    if f"{type(host).__module__}.{type(host).__qualname__}" in POOLS:  # no subclass with rules of its own
        described = _components(host)
        if described is not None and _has_token_rows(described[0], host.layout):
            planes = PoolPlanes(host, *described)
    host._hicache_planes = (host.kv_buffer, planes)
    return planes


def _has_token_rows(components: Components, layout: str) -> bool:
    """Whether device layers are `[tokens, heads, width]`, as the host's; SGLang knows others."""
    for buffer, layers in components:
        row = (buffer.shape[1], buffer.shape[4]) if layout == "page_head" else tuple(buffer.shape[-2:])
        if any(layer.dim() != 3 or tuple(layer.shape[1:]) != row for layer in layers):
            return False
    return True


# --- The hooks ------------------------------------------------------------------------------------


def load_to_device_per_layer(
    original: Callable[..., None],
    host: Any,
    device_pool: Any,
    host_indices: Tensor,
    device_indices: Tensor,
    layer_id: int,
    io_backend: str,
    *,
    is_draft: bool = False,
) -> None:
    """One layer from the host pool, on the current stream."""
    planes = planes_of(host, io_backend)
    if planes is None:
        original(host, device_pool, host_indices, device_indices, layer_id, io_backend, is_draft=is_draft)
        return
    if not is_draft and not _is_target(host, layer_id):
        return
    layer = planes.layers.get(layer_id)
    if layer is None:
        raise IndexError(f"[sglang] the host pool has no layer {layer_id}.")
    transfer_kv(
        *layer,
        planes.indices(device_indices, "device_indices"),
        planes.indices(host_indices, "host_indices"),
    )


def _is_target(host: Any, layer_id: int) -> bool:
    """Whether a layer is of the model itself; SGLang asks for others, too, and means nothing by it."""
    layers = getattr(host, "_target_layer_indices", None)
    return layer_id in (range(host.target_layer_num) if layers is None else layers)


def backup_from_device_all_layer(
    original: Callable[..., None],
    host: Any,
    device_pool: Any,
    host_indices: Tensor,
    device_indices: Tensor,
    io_backend: str,
) -> None:
    """All layers into the host pool, on the current stream."""
    planes = planes_of(host, io_backend)
    if planes is None:
        original(host, device_pool, host_indices, device_indices, io_backend)
        return
    transfer_kv(
        planes.all_host,
        planes.all_device,
        planes.indices(host_indices, "host_indices"),
        planes.indices(device_indices, "device_indices"),
    )


HOOKS: dict[str, Callable[..., None]] = {
    "load_to_device_per_layer": load_to_device_per_layer,
    "backup_from_device_all_layer": backup_from_device_all_layer,
}


# --- The entry point ------------------------------------------------------------------------------


def activate() -> None:
    """Registers the hooks, if TORCH_HICACHE_SGLANG=1. SGLang calls it in each of its processes.

    Raises:
        ImportError: sglang is not installed.
        RuntimeError: a version of SGLang that is not known, or no backend for this machine's accelerator.
    """
    if os.environ.get(SWITCH) != "1":
        return
    _check_version()
    if reason := missing_backend():
        raise RuntimeError(f"[sglang] {reason}.")
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for pool in POOLS:
        for method, hook in HOOKS.items():
            HookRegistry.register(f"{pool}.{method}", hook, HookType.AROUND)
    _report_after_hooks(HookRegistry)


def _check_version() -> str:
    try:
        installed = version("sglang")
    except PackageNotFoundError:
        raise ImportError(
            f"[sglang] sglang is not installed. pip install sglang=={SUPPORTED[-1]}"
        ) from None
    if installed.partition("+")[0] not in SUPPORTED:  # whatever build of it
        raise RuntimeError(
            f"[sglang] SGLang {installed} is not known; this torch_hicache serves {', '.join(SUPPORTED)}."
        )
    return installed


def _report_after_hooks(registry: Any) -> None:
    """Verify once SGLang has applied the hooks of all plug-ins, which it does behind the last of them."""
    applies = registry.__dict__["apply_hooks"]

    def apply_hooks(cls: Any) -> None:
        registry.apply_hooks = applies
        cls.apply_hooks()
        report()

    registry.apply_hooks = classmethod(apply_hooks)


def report() -> bool:
    """Whether all hooks took, in one line of the log."""
    missing = missing_hooks()
    if missing:
        _logger.error(
            "torch_hicache: hooks did not take, SGLang's own code serves: %s", ", ".join(missing)
        )
        return False
    _logger.info(
        "torch_hicache serves the transfers of SGLang %s's %s (io backends %s).",
        version("sglang"),
        ", ".join(pool.rpartition(".")[2] for pool in POOLS),
        " and ".join(SERVED),
    )
    return True


def missing_hooks() -> list[str]:
    """The methods in whose chain of wrappers our function is not found."""
    missing = []
    for pool in POOLS:
        for method, hook in HOOKS.items():
            try:
                function: Any = getattr(pkgutil.resolve_name(pool), method)
            except (ImportError, AttributeError) as error:
                missing.append(f"{pool}.{method} ({error})")
                continue
            while function is not None and not _encloses(function, hook):
                function = getattr(function, "__wrapped__", None)
            if function is None:
                missing.append(f"{pool}.{method}")
    return missing


def _encloses(function: Any, hook: Callable[..., None]) -> bool:
    return any(cell.cell_contents is hook for cell in getattr(function, "__closure__", None) or ())
