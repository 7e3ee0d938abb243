"""LMCache's KV transfers through torch_hicache: see docs/integrations/lmcache.md.

    LMCACHE_DEVICE_BACKEND=hicache_cuda     (or hicache_cpu)

LMCache finds the two specs by the entry points of this package, and imports them in every process. They
are available only where the variable names them: LMCache refuses to start with two backends for a device.

An op that moves rows between LMCache's objects and paged buffers becomes a list of planes and a call of
transfer_kv. What is no such case (a format that only LMCache's own op serves, other dtypes on the two
sides, an object known by its address on a GPU) goes to LMCache's op as before.
"""

import os
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from torch_hicache.integrations.engine_version import not_installed, require_engine

_INSTALL = "pip install lmcache==0.5.6"
try:
    from lmcache.lmcache_native import EngineKVFormat, TransferDirection
    from lmcache.v1.platform.devices.cpu import CpuDeviceSpec
    from lmcache.v1.platform.devices.cpu.device_ops import CpuDeviceOps
    from lmcache.v1.platform.devices.cuda import CudaDeviceSpec
    from lmcache.v1.platform.devices.cuda.device_ops import CudaDeviceOps
    from lmcache.v1.platform.torch_ops import mp_mem_kernels
except ModuleNotFoundError as error:
    raise not_installed("lmcache", _INSTALL, error) from None

_OPS = (
    "multi_layer_block_kv_transfer",
    "multi_layer_kv_transfer",
    "multi_layer_kv_transfer_unilateral",
    "single_layer_kv_transfer",
    "single_layer_kv_transfer_sgl",
)
_BLOCK_FIRST = EngineKVFormat.NL_X_NB_TWO_BS_NH_HS
_KV_FIRST = EngineKVFormat.NL_X_TWO_NB_BS_NH_HS
_LATENT = (EngineKVFormat.NL_X_NB_BS_HS, EngineKVFormat.NL_X_NBBS_ONE_HS)

# Pairs of a plane of LMCache's object and one of the paged buffer. Blocks: [blocks, tokens, *row] each.
# Tokens: [tokens, *row] and [blocks, tokens, *row].
Planes = list[tuple[Tensor, Tensor]]


class _Geometry(NamedTuple):
    kv_format: Any
    shape_desc: Any
    chunk_tokens: int
    device: torch.device


class NotServed(Exception):
    """A call that is left to LMCache's own op."""


class HiCacheOps:
    """In front of a DeviceOps of LMCache."""

    def ensure_native(self) -> None:
        super().ensure_native()  # type: ignore[misc]
        # LMCache binds its compiled ops to the instance, where they hide the methods of the class.
        for name in _OPS:
            if name in self.__dict__:
                self._native_ops()[name] = self.__dict__.pop(name)

    def _native_ops(self) -> dict[str, Callable]:
        return self.__dict__.setdefault("_hicache_native_ops", {})

    def _stock(self, name: str) -> Callable:
        return self._native_ops().get(name) or getattr(super(), name)

    def multi_layer_block_kv_transfer(  # noqa: PLR0917  LMCache's signature
        self,
        paged_buffer_ptrs_tensor: "Tensor | list",
        lmcache_objects_ptrs: "list[int] | list[Tensor]",  # LMCache reads here that tensors are taken
        block_ids: "Tensor | list[int]",
        device: Any,
        direction: Any,
        shape_desc: Any,
        lmcache_chunk_size: int,
        engine_kv_format: Any,
        skip_prefix_n_blocks: int,
    ) -> None:
        """Blocks of the paged buffers, in order, to and from objects of `lmcache_chunk_size` tokens."""
        try:
            _check_block_arguments(lmcache_chunk_size, shape_desc, skip_prefix_n_blocks)
            geometry = _Geometry(engine_kv_format, shape_desc, lmcache_chunk_size, torch.device(device))
            objects = self._object_planes(paged_buffer_ptrs_tensor, lmcache_objects_ptrs, geometry)
        except NotServed:
            self._stock("multi_layer_block_kv_transfer")(
                paged_buffer_ptrs_tensor,
                lmcache_objects_ptrs,
                block_ids,
                device,
                direction,
                shape_desc,
                lmcache_chunk_size,
                engine_kv_format,
                skip_prefix_n_blocks,
            )
            return
        ids = _as_indices(block_ids)
        if ids.device.type == "cpu" and bool((ids < 0).any()):
            raise IndexError(f"[lmcache] block_ids must not be negative, got {int(ids.min())}.")
        per_object = lmcache_chunk_size // int(shape_desc.bs)
        for number, planes in enumerate(objects):
            first = number * per_object
            start, end = max(first, skip_prefix_n_blocks), min(first + per_object, len(ids))
            if start < end:
                _move(planes, torch.arange(start - first, end - first), ids[start:end], direction)

    def _object_planes(self, paged: Any, objects: Any, geometry: "_Geometry") -> list[Planes]:
        """For each object its planes, and those of the paged buffers, by block."""
        kv_format, shape_desc, chunk_tokens, device = geometry
        block_tokens = int(shape_desc.bs)
        if not isinstance(objects, list):
            raise NotServed
        if objects and isinstance(objects[0], int) and device.type != "cpu":
            raise NotServed  # an address does not say whether the host or the GPU has it
        if _is_table(paged):
            if not _is_tight(shape_desc):
                raise NotServed
            paged = torch.tensor(self._addresses(paged), dtype=torch.int64)
        spec = mp_mem_kernels._format_spec(kv_format)
        dtype = mp_mem_kernels._infer_kv_dtype(paged, objects, shape_desc)
        layers = mp_mem_kernels._normalize_paged_layers(
            paged, spec, shape_desc=shape_desc, device=device, dtype=dtype
        )
        tensors = mp_mem_kernels._normalize_lmcache_objects(
            objects,
            shape_desc=shape_desc,
            lmcache_chunk_size=chunk_tokens,
            format_spec=spec,
            dtype=dtype,
        )
        if spec.is_kv_second_tuple and spec.is_mla:
            return [_latent_planes_of_bytes(layers, tensor, block_tokens) for tensor in tensors]
        paged_planes = _paged_block_planes(layers, spec, block_tokens)
        return [_with_object(paged_planes, tensor, block_tokens) for tensor in tensors]

    def multi_layer_kv_transfer(  # noqa: PLR0917  LMCache's signature
        self,
        key_value: Tensor,
        key_value_ptrs: Any,
        slot_mapping: Tensor,
        paged_memory_device: Any,
        page_buffer_size: int,
        direction: Any,
        engine_kv_format: Any,
        block_size: int = 0,
        head_size: int = 0,
        skip_prefix_n_tokens: int = 0,
        block_stride_elems: int = 0,
    ) -> None:
        """Tokens of all layers; `key_value` is `[2 or 1, layers, tokens, hidden]`."""
        hidden = key_value.shape[3]
        shapes = {
            _BLOCK_FIRST: (page_buffer_size // max(block_size, 1), 2, block_size, hidden),
            _KV_FIRST: (2, page_buffer_size, hidden),
            **dict.fromkeys(_LATENT, (page_buffer_size, hidden)),
        }
        shape = shapes.get(engine_kv_format)
        is_tight = block_stride_elems in (0, block_size * hidden)
        if shape is None or not is_tight or (engine_kv_format == _BLOCK_FIRST and block_size <= 0):
            self._stock("multi_layer_kv_transfer")(
                key_value,
                key_value_ptrs,
                slot_mapping,
                paged_memory_device,
                page_buffer_size,
                direction,
                engine_kv_format,
                block_size,
                head_size,
                skip_prefix_n_tokens,
                block_stride_elems,
            )
            return
        layers = self._paged_tensors(key_value_ptrs, shape, key_value.dtype, paged_memory_device)
        planes = []
        for kv, of_kind in enumerate(key_value):
            for layer, tokens in enumerate(of_kind):
                paged = layers[layer]
                if engine_kv_format == _BLOCK_FIRST:
                    paged = paged[:, kv]
                else:
                    paged = (paged[kv] if engine_kv_format == _KV_FIRST else paged).unsqueeze(1)
                planes.append((tokens, paged))
        _move_tokens(planes, slot_mapping, direction, skip_prefix_n_tokens)

    def multi_layer_kv_transfer_unilateral(  # noqa: PLR0917  LMCache's signature
        self,
        key_value: Tensor,
        key_value_ptrs: Any,
        slot_mapping: Tensor,
        paged_memory_device: Any,
        page_buffer_size: int,
        direction: Any,
        engine_kv_format: Any,
    ) -> None:
        """Tokens of all layers, whose keys and values have buffers of their own."""
        same = (key_value, key_value_ptrs, slot_mapping, paged_memory_device, page_buffer_size, direction)
        if mp_mem_kernels._format_spec(engine_kv_format).is_mla:
            self.multi_layer_kv_transfer(*same, engine_kv_format)
            return
        shape = (page_buffer_size, key_value.shape[3])
        buffers = self._paged_tensors(key_value_ptrs, shape, key_value.dtype, paged_memory_device)
        tokens = key_value.flatten(0, 1)
        planes = [(kv, paged.unsqueeze(1)) for kv, paged in zip(tokens, buffers, strict=True)]
        _move_tokens(planes, slot_mapping, direction)

    def single_layer_kv_transfer(  # noqa: PLR0917  LMCache's signature
        self,
        lmc_key_value_cache: Tensor,
        vllm_key_value_cache: Tensor,
        slot_mapping: Tensor,
        direction: Any,
        engine_kv_format: Any,
        token_major: bool = False,
    ) -> None:
        """Tokens of one layer of vLLM."""
        paged, tokens = vllm_key_value_cache, lmc_key_value_cache
        if engine_kv_format not in (_BLOCK_FIRST, _KV_FIRST, *_LATENT[:1]) or paged.dtype != tokens.dtype:
            self._stock("single_layer_kv_transfer")(
                tokens, paged, slot_mapping, direction, engine_kv_format, token_major
            )
            return
        if engine_kv_format in _LATENT:
            planes = [(tokens, paged)]
        else:
            kinds = paged.unbind(0 if engine_kv_format == _KV_FIRST else 1)
            planes = list(zip(tokens.unbind(1 if token_major else 0), kinds, strict=True))
        _move_tokens(planes, slot_mapping, direction)

    def single_layer_kv_transfer_sgl(  # noqa: PLR0917  LMCache's signature
        self,
        lmc_key_value_cache: Tensor,
        sgl_key_cache: Tensor,
        sgl_value_cache: Tensor,
        slot_mapping: Tensor,
        direction: Any,
        token_major: bool = False,
    ) -> None:
        """Tokens of one layer of SGLang; caches are `[blocks, tokens, heads, head size]`."""
        caches = (sgl_key_cache, sgl_value_cache)
        if any(cache.dtype != lmc_key_value_cache.dtype for cache in caches):
            self._stock("single_layer_kv_transfer_sgl")(
                lmc_key_value_cache, *caches, slot_mapping, direction, token_major
            )
            return
        tokens = lmc_key_value_cache.unbind(1 if token_major else 0)
        _move_tokens(list(zip(tokens, caches, strict=True)), slot_mapping, direction)

    def _paged_tensors(
        self, given: Any, shape: tuple[int, ...], dtype: torch.dtype, device: Any
    ) -> Sequence[Tensor]:
        if isinstance(given, list):
            return given
        return [
            self.tensor_from_ptr(address, shape, dtype, torch.device(device))  # type: ignore[attr-defined]
            for address in self._addresses(given)
        ]

    def _addresses(self, table: Tensor) -> list[int]:
        """The contents of a table, which is read again when it was written: from a GPU, reading waits."""
        if table.is_inference():  # such tensors don't count their writes
            return table.tolist()
        known = self.__dict__.setdefault("_hicache_tables", {})
        of_table, version, addresses = known.get(id(table), (lambda: None, -1, []))
        if of_table() is not table or version != table._version:
            addresses = table.tolist()
            of_table = weakref.ref(table, partial(_forget, known, id(table)))
            known[id(table)] = of_table, table._version, addresses
        return addresses


class HiCacheCpuOps(HiCacheOps, CpuDeviceOps):
    pass


class HiCacheCudaOps(HiCacheOps, CudaDeviceOps):
    pass


class HiCacheCpuSpec(CpuDeviceSpec):
    @property
    def backend_name(self) -> str:
        return "hicache_cpu"

    @property
    def ops_cls(self) -> type[HiCacheCpuOps]:
        return HiCacheCpuOps

    def is_available(self) -> bool:
        return _is_chosen(self.backend_name)


class HiCacheCudaSpec(CudaDeviceSpec):
    @property
    def backend_name(self) -> str:
        return "hicache_cuda"

    @property
    def ops_cls(self) -> type[HiCacheCudaOps]:
        return HiCacheCudaOps

    def is_available(self) -> bool:
        return _is_chosen(self.backend_name) and super().is_available()


def _is_chosen(backend_name: str) -> bool:
    """
    Raises:
        RuntimeError: it is chosen, for a version of LMCache that this adapter does not know.
    """
    if os.environ.get("LMCACHE_DEVICE_BACKEND", "").strip().lower() != backend_name:
        return False
    require_engine("lmcache", (0, 5), (0, 5), _INSTALL)
    return True


# --- Blocks --------------------------------------------------------------------------------------


def _paged_block_planes(layers: Any, spec: Any, block_tokens: int) -> list[Tensor]:
    """`[blocks, tokens, heads, head size]` of each plane: keys of all layers, values of all layers."""
    if spec.is_cross_layer:
        planes = [layers[:, layer, kv] for kv in range(2) for layer in range(layers.shape[1])]
    elif spec.is_kv_list:
        planes = [*layers[0], *layers[1]]
    elif spec.is_kv_second_tuple:
        planes = [pair[kv] for kv in range(2) for pair in layers]
    elif spec.is_mla:
        planes = list(layers)
    elif spec.is_fused_packed or spec.is_single_kv:
        planes = [layer if layer.dim() == 4 else _view(layer, (*layer.shape[:3], -1)) for layer in layers]
    else:
        axis = 0 if spec.is_two_major else 1
        planes = [layer.select(axis, kv) for kv in range(2) for layer in layers]
        if spec.is_hnd:  # some have an axis of one between heads and tokens
            planes = [plane.squeeze(2) if plane.dim() == 5 else plane for plane in planes]
    if spec.is_pbs_fused:
        planes = [plane[: len(plane) // block_tokens * block_tokens] for plane in planes]
        return [plane.unflatten(0, (-1, block_tokens)) for plane in planes]
    return [plane.transpose(1, 2) for plane in planes] if spec.is_hnd else planes


def _with_object(paged: list[Tensor], of_object: Tensor, block_tokens: int) -> Planes:
    if any(plane.dtype != of_object.dtype for plane in paged):
        raise NotServed  # LMCache's op converts
    rows = _view(of_object, (len(paged), -1, of_object.shape[-1]))
    whole = rows.shape[1] // block_tokens * block_tokens
    return [
        (tokens[:whole].unflatten(0, (-1, block_tokens)).unflatten(-1, plane.shape[2:]), plane)
        for tokens, plane in zip(rows, paged, strict=True)
    ]


def _latent_planes_of_bytes(layers: Any, of_object: Tensor, block_tokens: int) -> Planes:
    """Planes of any dtype, one behind the other in a token of the object."""
    planes = []
    for tokens, of_layer in zip(of_object, layers, strict=True):
        blocks = tokens.view(torch.uint8).unflatten(0, (-1, block_tokens))
        first = 0
        for plane in of_layer:
            paged = _view(plane, (*plane.shape[:2], -1)).view(torch.uint8)
            planes.append((blocks[..., first : first + paged.shape[2]], paged))
            first += paged.shape[2]
    return planes


def _check_block_arguments(chunk_tokens: int, shape_desc: Any, skipped: int) -> None:
    """What is wrong here is said by LMCache's own op."""
    block_tokens = int(shape_desc.bs)
    if chunk_tokens <= 0 or block_tokens <= 0 or chunk_tokens % block_tokens or skipped < 0:
        raise NotServed


def _is_table(paged: Any) -> bool:
    return isinstance(paged, Tensor) and paged.dim() == 1 and paged.dtype in (torch.int64, torch.uint64)


def _is_tight(shape_desc: Any) -> bool:
    stride = int(getattr(shape_desc, "block_stride_elems", 0) or 0)
    return stride in (0, int(shape_desc.bs) * int(shape_desc.nh) * int(shape_desc.hs))


def _forget(known: dict, key: int, _gone: Any) -> None:
    known.pop(key, None)


def _view(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    try:
        return tensor.view(shape)
    except RuntimeError:  # memory that no strides describe so
        raise NotServed from None


# --- Tokens --------------------------------------------------------------------------------------


def _move_tokens(planes: Planes, slot_mapping: Tensor, direction: Any, skipped: int = 0) -> None:
    """`planes` are pairs of `[tokens, hidden]` and `[blocks, tokens of a block, *row]`.

    A slot is block * tokens of a block + token. Where blocks lie further apart than their tokens need
    (keys and values of a block side by side), rows are counted over the gaps; planes that lie in each
    other's gaps then go in calls of their own, since a destination must not be named twice.
    """
    slots = _as_indices(slot_mapping)[skipped:]
    flat: Planes = []
    steps = set()
    for tokens, paged in planes:
        rows, of_plane = _rows_over_gaps(paged)
        steps.add(of_plane)
        flat.append((tokens[skipped:].unflatten(-1, rows.shape[1:]), rows))
    if len(steps) != 1:
        raise ValueError(
            f"[lmcache] planes must lie alike, got blocks of {sorted(steps)} tokens and rows."
        )
    block_tokens, step = steps.pop()
    paged_rows = slots if step == block_tokens else slots // block_tokens * step + slots % block_tokens
    paged_rows = paged_rows.where(slots >= 0, -1)
    for batch in [flat] if step == block_tokens else _each_storage_once(flat):
        _move(batch, torch.arange(len(slots)), paged_rows, direction)


def _rows_over_gaps(paged: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """`[rows, *row]` of `[blocks, tokens of a block, *row]`; the tokens, and rows from block to block."""
    blocks, block_tokens = paged.shape[:2]
    if block_tokens == 1:
        return paged[:, 0], (1, 1)
    step, rest = divmod(paged.stride(0), max(paged.stride(1), 1))
    if rest:
        raise ValueError(
            "[lmcache] blocks must be whole rows apart, got strides of "
            f"{paged.stride(0)} and {paged.stride(1)} elements."
        )
    size = (max(blocks - 1, 0) * step + block_tokens, *paged.shape[2:])
    return paged.as_strided(size, paged.stride()[1:]), (block_tokens, step)


def _each_storage_once(planes: Planes) -> list[Planes]:
    batches: list[Planes] = []
    seen: Counter[int] = Counter()
    for tokens, paged in planes:
        storage = paged.untyped_storage().data_ptr()
        if seen[storage] == len(batches):
            batches.append([])
        batches[seen[storage]].append((tokens, paged))
        seen[storage] += 1
    return batches


def _move(planes: Planes, of_object: Tensor, of_pages: Tensor, direction: Any) -> None:
    objects, pages = [pair[0] for pair in planes], [pair[1] for pair in planes]
    if direction == TransferDirection.D2H:
        torch.ops.hicache.transfer_kv(objects, pages, of_object, of_pages)
    elif direction == TransferDirection.H2D:
        torch.ops.hicache.transfer_kv(pages, objects, of_pages, of_object)
    else:
        raise ValueError(f"[lmcache] direction must be H2D or D2H, got {direction!r}.")


def _as_indices(values: Any) -> Tensor:
    indices = torch.as_tensor(values)
    return indices if indices.dtype in (torch.int32, torch.int64) else indices.to(torch.int64)
