"""Small tensors of the CPU on their way to a device, without waiting for it."""

import torch
from torch import Tensor


def to_device_no_sync(tensor: Tensor, device: torch.device | str) -> Tensor:
    """A copy of a CPU tensor on `device`, such as indices for several calls.

    The bytes are read before the call returns, so `tensor` may change or go right away. The copy is
    ordered on the current stream of `device`; it comes out of page-locked memory of torch, which torch
    reuses only when an event says that the copy has run. Nothing waits for the device. Shape and dtype
    carry over, the result is contiguous.

    Raises:
        ValueError: `tensor` is not on the CPU.
    """
    if tensor.device.type != "cpu":
        raise ValueError(f"[to_device_no_sync] tensor must be on the CPU, got {tensor.device}.")
    device = torch.device(device)
    if device.type == "cpu":
        return tensor.clone(memory_format=torch.contiguous_format)
    staged = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return staged.copy_(tensor).to(device, non_blocking=True)
