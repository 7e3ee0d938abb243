"""torch.ops.hicache.transfer_kv: its contract, and beneath it the fake kernel.

The fake raises the texts of csrc/transfer_kv.cpp: change both.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from torch_hicache._backends import empty_on

METHODS = ("auto", "kernel", "copy_engine", "staged")


def transfer_kv(
    dst: Sequence[Tensor],
    src: Sequence[Tensor],
    dst_indices: Tensor,
    src_indices: Tensor,
    *,
    slot_dim: int = 0,
    count: Tensor | None = None,
    method: str = "auto",
    max_blocks: int = 0,
) -> None:
    """Copy slots of one KV pool into slots of another, in every plane, byte for byte.

    For each pair of tensors, with the indices at dimension `slot_dim`::

        dst[i][..., dst_indices, ...] = src[i][..., src_indices, ...]

    Args:
        dst: the tensors to write, all on one device. `[*planes, slots, *row]`, any strides.
        src: as many tensors, all on one device. Each has its partner's dtype, plane dimensions and
            row dimensions; slot counts and strides are free.
        dst_indices, src_indices: 1-D, int32 or int64, of one length, any stride, on the CPU or on
            the accelerator. -1 on either side skips the entry.
        slot_dim: the dimension that the indices address; negative counts from the end.
        count: one int32 or int64 element; only the first `count` entries move. On the accelerator
            when both index tensors are, else on the CPU.
        method: "kernel": compute units read and write both pools; any row size, any indices, captures.
            "copy_engine": both index tensors on the CPU; runs of neighbouring slots go to the DMA engine.
            "staged": the host pool's indices on the CPU; the copy engine moves between the host pool and
            buffers on the device, a kernel between these and the device pool. "auto" chooses, see
            `torch_hicache.explain`. The CPU has a loop, which "auto" and "kernel" mean.
        max_blocks: the most thread blocks that a kernel may occupy; 0 takes the tuned number.

    A host pool that a kernel reads or writes must be memory that the device can reach: see
    `torch_hicache.empty_host`. Pageable memory is left to the copy engine, which may block the host; that
    needs the host pool's indices on the CPU. Duplicate sources are exact. Of duplicate destinations the
    last wins with CPU indices; with device indices it is unspecified which source wins.

    Streams: the work is ordered on the accelerator's current stream, the call does not wait for it, and
    it can be captured in a CUDA graph when both index tensors are on the device. Tensors must stay
    alive as for any torch op; CPU indices and a CPU `count` are read before the call returns.

    Errors: ValueError for shapes, dtypes, devices and overlap, before any byte moves; IndexError for
    an index on the CPU outside [0, slots). A bad index on the accelerator skips its entry and is
    recorded: `check_errors`, or the next call on that device, raises it. RuntimeError for a failure of
    the device runtime. TypeError where an argument is no tensor or list of tensors (torch.ops.hicache's
    own is a RuntimeError that shows the whole value).
    """
    try:
        torch.ops.hicache.transfer_kv(
            dst,
            src,
            dst_indices,
            src_indices,
            slot_dim=slot_dim,
            count=count,
            method=method,
            max_blocks=max_blocks,
        )
    except (RuntimeError, ValueError):  # asked only now: a good call pays nothing for it
        lists, tensors = (
            {"dst": dst, "src": src},
            {"dst_indices": dst_indices, "src_indices": src_indices},
        )
        if wrong := _wrong_type(lists, tensors | ({} if count is None else {"count": count})):
            raise TypeError(f"[transfer_kv] {wrong}.") from None
        raise


def check_errors(device: torch.device | str | int) -> None:
    """Raise, and clear, the first bad index that a transfer on `device` met.

    Waits for the work on the current stream of `device`, so that the transfers before this call have
    reported. While that stream captures, nothing is waited for and nothing is raised.

    Raises:
        IndexError: with the position, value and limit of the index, and the number of the call.
        RuntimeError: this torch has no such device.
    """
    torch.ops.hicache.check_errors(empty_on(device, caller="check_errors"))


def _wrong_type(lists: Mapping[str, object], tensors: Mapping[str, object]) -> str:
    """What of a call is no tensor or list of tensors; empty if all is."""
    items: dict[str, object] = {}
    for name, value in lists.items():
        if isinstance(value, Tensor):
            return f"{name} must be a list of tensors, got a tensor; pass [tensor]"
        if not isinstance(value, list | tuple):
            return f"{name} must be a list of tensors, got {type(value).__name__}"
        items |= {f"{name}[{i}]": item for i, item in enumerate(value)}
    for name, value in (items | dict(tensors)).items():
        if not isinstance(value, Tensor):
            return f"{name} must be a tensor, got {type(value).__name__}"
    return ""


def _refuse(text: str) -> None:
    raise ValueError(f"[transfer_kv] {text}")


def _check(condition: bool | torch.SymBool, text: str) -> None:
    """ValueError unless `condition`; a symbolic one becomes a guard of the graph."""
    torch._check_value(condition, lambda: f"[transfer_kv] {text}")


def _dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _shape_text(sizes: Sequence[int | torch.SymInt]) -> str:
    return f"[{', '.join(str(size) for size in sizes)}]"


def _check_indices(indices: Tensor, name: str) -> None:
    if indices.dtype not in (torch.int32, torch.int64):
        _refuse(f"{name} must be int32 or int64, got {_dtype_name(indices)}.")
    if indices.dim() != 1:
        _refuse(f"{name} must be 1-D, got shape {_shape_text(indices.shape)}.")


def _list_device(tensors: Sequence[Tensor], name: str) -> torch.device:
    for i, tensor in enumerate(tensors):
        if tensor.device != tensors[0].device:
            _refuse(
                f"all tensors of {name} must be on one device, got {tensors[0].device} ({name}[0]) "
                f"and {tensor.device} ({name}[{i}])."
            )
    return tensors[0].device if tensors else torch.device("cpu")


def _is_cpu(device: torch.device) -> bool:
    return device.type == "cpu"


def _call_device(
    dst: Sequence[Tensor], src: Sequence[Tensor], dst_indices: Tensor, src_indices: Tensor
) -> torch.device:
    """The accelerator that takes part in the call, else the CPU."""
    dst_device, src_device = _list_device(dst, "dst"), _list_device(src, "src")
    if not _is_cpu(dst_device) and not _is_cpu(src_device) and dst_device != src_device:
        _refuse(
            f"dst and src may be on at most one accelerator, got {dst_device} (dst) and "
            f"{src_device} (src)."
        )
    device = src_device if _is_cpu(dst_device) else dst_device
    if not dst:  # no pool says where the call belongs: the indices do
        device = src_indices.device if _is_cpu(dst_indices.device) else dst_indices.device
    for indices, name in ((dst_indices, "dst_indices"), (src_indices, "src_indices")):
        if _is_cpu(indices.device) or indices.device == device:
            continue
        if _is_cpu(device):
            _refuse(
                f"{name} must be on the CPU when both pools are, got {indices.device} (the pools "
                "are on cpu)."
            )
        _refuse(f"{name} must be on the CPU or on {device}, got {indices.device}.")
    return device


def _resolve_slot_dim(tensor: Tensor, slot_dim: int, name: str) -> int:
    resolved = slot_dim + tensor.dim() if slot_dim < 0 else slot_dim
    if not 0 <= resolved < tensor.dim():
        _refuse(f"slot_dim {slot_dim} is out of range for {name} of shape {_shape_text(tensor.shape)}.")
    return resolved


def _elements_share_memory(tensor: Tensor) -> bool:
    """As in csrc/transfer_kv.cpp. Symbolic shapes are left to the real kernel: no guards for this."""
    if any(isinstance(value, torch.SymInt) for value in (*tensor.shape, *tensor.stride())):
        return False
    if tensor.numel() == 0:
        return False
    reach = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1 and stride <= reach:
            return True
        reach += (size - 1) * stride if size > 1 else 0
    return False


def _check_plain(tensor: Tensor) -> None:
    if tensor.layout != torch.strided or tensor.is_nested:
        _refuse("sparse and nested tensors are refused; pass their strided values.")
    if tensor.is_quantized:
        _refuse("quantized tensors are refused; pass their integer representation.")


def _check_pair(dst: Tensor, src: Tensor, slot_dim: int, i: int) -> None:
    if dst.dtype != src.dtype:
        _refuse(
            f"dst[{i}] and src[{i}] must have the same dtype, got {_dtype_name(dst)} and "
            f"{_dtype_name(src)}."
        )
    dst_dim = _resolve_slot_dim(dst, slot_dim, f"dst[{i}]")
    src_dim = _resolve_slot_dim(src, slot_dim, f"src[{i}]")
    for what, dst_sizes, src_sizes in (
        ("plane dimensions (before", dst.shape[:dst_dim], src.shape[:src_dim]),
        ("row dimensions (after", dst.shape[dst_dim + 1 :], src.shape[src_dim + 1 :]),
    ):
        text = (
            f"dst[{i}] and src[{i}] must have the same {what} slot_dim={slot_dim}), got "
            f"{_shape_text(dst_sizes)} and {_shape_text(src_sizes)}."
        )
        _check(len(dst_sizes) == len(src_sizes), text)
        for dst_size, src_size in zip(dst_sizes, src_sizes, strict=True):
            _check(dst_size == src_size, text)
    if _elements_share_memory(dst):
        _refuse(f"dst[{i}] has elements that share memory (an expanded view?); a destination must not.")


def _check_count(count: Tensor, dst_indices: Tensor, src_indices: Tensor, device: torch.device) -> None:
    if count.dtype not in (torch.int32, torch.int64):
        _refuse(f"count must be int32 or int64, got {_dtype_name(count)}.")
    _check(count.numel() == 1, f"count must have one element, got shape {_shape_text(count.shape)}.")
    on_device = not _is_cpu(dst_indices.device) and not _is_cpu(src_indices.device)
    if on_device and count.device != device:
        _refuse(f"count must be on {device}, where both index tensors are, got {count.device}.")
    if not on_device and not _is_cpu(count.device):
        _refuse(
            "count must be on the CPU unless both index tensors are on the accelerator, got "
            f"{count.device}."
        )


@torch.library.register_fake("hicache::transfer_kv")
def _transfer_kv_fake(
    dst: Sequence[Tensor],
    src: Sequence[Tensor],
    dst_indices: Tensor,
    src_indices: Tensor,
    *,
    slot_dim: int = 0,
    count: Tensor | None = None,
    method: str = "auto",
    max_blocks: int = 0,
) -> None:
    if torch._guards.TracingContext.try_get() is not None:  # a graph is being compiled
        from torch_hicache import _inductor

        _inductor.install()
    if method not in METHODS:
        _refuse(f"method must be 'auto', 'kernel', 'copy_engine' or 'staged', got '{method}'.")
    _check(max_blocks >= 0, f"max_blocks must be 0 or more, got {max_blocks}.")
    for tensor in (*dst, *src, dst_indices, src_indices):
        _check_plain(tensor)
    if len(dst) != len(src):
        _refuse(f"dst and src must have the same number of tensors, got {len(dst)} and {len(src)}.")
    _check_indices(dst_indices, "dst_indices")
    _check_indices(src_indices, "src_indices")
    _check(
        dst_indices.shape[0] == src_indices.shape[0],
        "dst_indices and src_indices must have the same length, got "
        f"{dst_indices.shape[0]} and {src_indices.shape[0]}.",
    )
    device = _call_device(dst, src, dst_indices, src_indices)
    for i, (d, s) in enumerate(zip(dst, src, strict=True)):
        _check_pair(d, s, slot_dim, i)
    if torch.is_grad_enabled():
        for i, tensor in enumerate(dst):
            if tensor.requires_grad:
                _refuse(
                    f"dst[{i}] requires grad and transfer_kv has no derivative; call it under "
                    "torch.no_grad() or detach the pool."
                )
    if count is not None:
        _check_count(count, dst_indices, src_indices, device)
    if method in ("copy_engine", "staged") and _is_cpu(device):
        _refuse(
            f"method '{method}' needs an accelerator, but both pools are on cpu; use 'auto' or 'kernel'."
        )


@torch.library.register_fake("hicache::check_errors")
def _check_errors_fake(on_device: Tensor) -> None:
    pass
