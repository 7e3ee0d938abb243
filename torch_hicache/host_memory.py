"""Host memory that a device can reach: empty_host, register_host, device_view.

How each kind comes by its memory is in host_kinds.py, what a device's runtime knows of it in
registrations.py.
"""

import ctypes
import math
from collections.abc import Sequence
from types import TracebackType

import torch
from torch import Tensor

from torch_hicache.dlpack import tensor_at
from torch_hicache.host_kinds import HUGE_PAGES, HostMemory, HostRequest, choose_kind
from torch_hicache.memory_budget import readable
from torch_hicache.registrations import (
    MAX_PIECE_BYTES,
    TABLE,
    Claim,
    Cuts,
    has_registrar,
    reason,
    registrar_for,
)
from torch_hicache.shared_memory import SharedHostMemory


def empty_host(
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | str,
    kind: str = "auto",
    *,
    piece_unit_bytes: int = 1,
    plane_unit_bytes: int = 0,
    max_piece_bytes: int = MAX_PIECE_BYTES,
    huge_pages: str = "transparent",
    numa_node: int | str | None = "auto",
    shared: SharedHostMemory | None = None,
    local_ranks: int | None = None,
    reserve_bytes: int | None = None,
) -> Tensor:
    """An uninitialised, contiguous CPU tensor that `device` can reach.

    Args:
        shape: sizes in elements.
        dtype: any dtype.
        device: the accelerator whose transfers use the memory, or "cpu".
        kind: "pinned" (page-locked through the device's runtime, exactly as large as asked, rounded up
            to a page of the system), "pageable" (plain memory: for the CPU, no kernel may touch it),
            "memfabric" (for an NPU, see `torch_hicache.memfabric`) or "auto": pageable for the CPU, for
            an NPU memfabric where its package is installed, else pinned. The environment variable
            HICACHE_HOST_KIND overrides what "auto" is for an accelerator.
        piece_unit_bytes: memory larger than `max_piece_bytes` is registered with the runtime in several
            pieces, cut at multiples of this: the bytes of one page of the pool.
        plane_unit_bytes: where a device sees these pieces at addresses that do not follow each other,
            they are cut at multiples of this instead, the bytes of one plane; 0: such memory is
            refused.
        huge_pages: "transparent" (where the system has them) or "explicit": out of those that the
            administrator has set aside, with a warning and transparent ones where these don't suffice
            (`shared` memory has transparent ones only).
        numa_node: "auto" is the device's own node, where it is known; a number asks for that node, with
            a warning if it can't be had; None leaves it to the system.
        shared: memory that other processes map too; its first bytes become the tensor, as they are.
        local_ranks, reserve_bytes: see `torch_hicache.memory_budget.host_memory_budget`, which is
            checked before anything is allocated. Shared memory and explicit huge pages are no part of it.

    The memory is released when the last tensor over it (or device view of it) is gone, after the work of
    the device that uses it. A pickled or copied tensor is plain memory. A forked child has no access to
    pinned memory (to `shared` it has) and undoes nothing of its parent's.

    Raises:
        ValueError: an unknown kind, a bad argument, or "pinned" without an accelerator.
        MemoryError: the budget, the system or the device's runtime has not that much; nothing is kept.
    """
    device = torch.device(device)
    chosen = choose_kind(kind, device)
    if any(size < 0 for size in shape):
        raise ValueError(f"[empty_host] shape must not be negative, got {list(shape)}.")
    nbytes = math.prod(shape) * dtype.itemsize
    cuts = Cuts(piece_unit_bytes, plane_unit_bytes, max_piece_bytes)
    _check_cuts("empty_host", cuts, nbytes)
    if huge_pages not in HUGE_PAGES:
        raise ValueError(
            f"[empty_host] huge_pages must be one of {', '.join(HUGE_PAGES)}, got '{huge_pages}'."
        )
    if isinstance(numa_node, str) and numa_node != "auto":
        raise ValueError(f"[empty_host] numa_node must be 'auto', a number or None, got '{numa_node}'.")
    if shared is not None and shared.nbytes < nbytes:
        raise ValueError(
            f"[empty_host] shared memory must hold {readable(nbytes)}, got {readable(shared.nbytes)}."
        )
    if nbytes == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    request = HostRequest(
        nbytes=nbytes,
        device=device,
        cuts=cuts,
        huge_pages=huge_pages,
        numa_node=numa_node,
        shared=shared,
        local_ranks=local_ranks,
        reserve_bytes=reserve_bytes,
    )
    return _tensor_over(chosen.allocate(request)).view(dtype).view(tuple(shape))


def _tensor_over(memory: HostMemory) -> Tensor:
    """Flat bytes that own `memory`."""
    buffer = (ctypes.c_uint8 * memory.nbytes).from_address(memory.address)
    buffer.memory = memory  # type: ignore[attr-defined]
    return torch.frombuffer(buffer, dtype=torch.uint8)


class HostRegistration:
    """Existing memory made reachable for a device, by `register_host`. Also a context manager.

    The memory stays registered, and alive, until `close`, or until the handle is collected; device views
    of it, and other registrations of the same bytes, prolong that. Keep the handle with the pool.
    """

    def __init__(self, claim: Claim | None, device: torch.device, nbytes: int) -> None:
        self._claim = claim
        self.device = device
        self.nbytes = nbytes

    @property
    def is_ours(self) -> bool:
        """False for memory that others registered, and after `close`."""
        return self._claim is not None and self._claim.is_ours

    def close(self) -> None:
        """Waits for the device, if nobody else needs the registration. Later calls do nothing."""
        if self._claim is not None:
            self._claim.close()

    def __enter__(self) -> "HostRegistration":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def register_host(
    tensor: Tensor,
    device: torch.device | str,
    *,
    piece_unit_bytes: int = 1,
    plane_unit_bytes: int = 0,
    max_piece_bytes: int = MAX_PIECE_BYTES,
) -> HostRegistration:
    """Make existing host memory, from the tensor's first element to its last, reachable for `device`.

    The same bytes, or a part of them, may be registered again: they stay registered until the last handle
    is closed. Memory that others have registered (torch's pinned tensors) is taken as it is and never
    unregistered here. Nothing is done for tensors without elements, and for the CPU.

    Args:
        tensor: on the CPU, any strides.
        piece_unit_bytes, plane_unit_bytes, max_piece_bytes: as in `empty_host`.

    Raises:
        ValueError: `tensor` is not plain memory of the CPU, or overlaps another registration in part.
        RuntimeError: the device's runtime refused; nothing stays registered.
    """
    device = torch.device(device)
    _require_cpu_memory("register_host", tensor)
    nbytes = _extent_bytes(tensor)
    cuts = Cuts(piece_unit_bytes, plane_unit_bytes, max_piece_bytes)
    _check_cuts("register_host", cuts, nbytes)
    if nbytes == 0 or not has_registrar(device):
        return HostRegistration(None, device, nbytes)
    registrar = registrar_for(device)
    try:
        claim = TABLE.claim(registrar, tensor.data_ptr(), nbytes, owner=tensor, cuts=cuts)
    except ValueError as error:
        raise ValueError(f"[register_host] {error}.") from None
    except RuntimeError as error:
        text = f"page-locking {readable(nbytes)} failed: {reason(error)}"
        raise RuntimeError(f"[register_host] {text}.") from None
    return HostRegistration(claim, registrar.device, nbytes)


def device_view(tensor: Tensor, device: torch.device | str) -> Tensor:
    """The same bytes as a tensor whose device is `device`, for compiled and captured graphs.

    `tensor` is a host tensor from `empty_host`, or other memory registered with the device's runtime;
    shape, strides and dtype carry over. The view keeps the memory alive and registered, and its address
    never changes. Kernels that read or write it go over the link: it is meant for `transfer_kv`, not for
    arithmetic. For the CPU it is the tensor itself.

    Raises:
        ValueError: `tensor` is not plain memory of the CPU, or the device can't reach it.
    """
    device = torch.device(device)
    _require_cpu_memory("device_view", tensor)
    if not has_registrar(device):
        return tensor
    registrar = registrar_for(device)
    nbytes = _extent_bytes(tensor)
    if nbytes == 0:
        return torch.empty_strided(
            tensor.shape, tensor.stride(), dtype=tensor.dtype, device=registrar.device
        )
    claims = TABLE.claim_existing(registrar.device.type, tensor.data_ptr(), nbytes)
    address = registrar.device_address(tensor.data_ptr(), nbytes)
    flat = tensor_at(address, nbytes, registrar.device, owner=(tensor, claims))
    view = flat.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())
    # What torch._dynamo.mark_static_address does, without a second's import: CUDA graphs of a compiled
    # program use the memory where it is, and make no copy of a pool.
    view._dynamo_static_input_type = "unguarded"
    return view


def _check_cuts(name: str, cuts: Cuts, nbytes: int) -> None:
    try:
        cuts.check(nbytes)
    except ValueError as error:
        raise ValueError(f"[{name}] {error}.") from None


def _require_cpu_memory(name: str, tensor: Tensor) -> None:
    if tensor.device.type != "cpu":
        raise ValueError(f"[{name}] tensor must be on the CPU, got {tensor.device}.")
    if tensor.layout != torch.strided or tensor.is_quantized:
        raise ValueError(f"[{name}] tensor must be plain memory, got {tensor.layout}.")


def _extent_bytes(tensor: Tensor) -> int:
    """From the first element to the end of the last."""
    if tensor.numel() == 0:
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()
