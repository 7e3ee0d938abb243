"""The option --device of the commands: which device that is, or why it can't be used."""

import re
import sys

import torch

from torch_hicache._backends import backend_of, why_missing

AMD_IS_CUDA = "An AMD GPU is cuda: ROCm's torch calls it so."


def find_device(name: str, *, command: str) -> torch.device:
    """The device to run on: "auto", "cpu", or "cuda" or "npu", perhaps with a number as in "cuda:1".

    Raises:
        ValueError: no such device can be used; a missing backend says how to get it.
    """
    match = re.fullmatch(r"auto|cpu|(cuda|npu)(?::([0-9]{1,4}))?", name)
    if not match:
        hint = f" {AMD_IS_CUDA}" if name.startswith(("hip", "rocm", "amd")) else ""
        raise ValueError(
            f"[{command}] --device must be auto, cpu, cuda, cuda:N, npu or npu:N, got '{name}'.{hint}"
        )
    if name == "cpu":
        return torch.device("cpu")
    has_npu = torch._C._get_privateuse1_backend_name() == "npu"
    device_type = match[1] or ("npu" if has_npu else "cuda")
    backend = backend_of(device_type)
    module = getattr(torch, device_type, None)  # torch.npu comes with torch_npu
    is_available = module is not None and module.is_available()
    if module is None or not is_available or not backend.loaded:
        if name == "auto":
            if is_available:
                print(f"[{command}] on the CPU: {why_missing(backend)}", file=sys.stderr)
            return torch.device("cpu")
        why = "torch finds no usable device (see hicache info)."
        raise ValueError(
            f"[{command}] --device {name}: {why if backend.loaded else why_missing(backend)}"
        )
    index = int(match[2]) if match[2] else module.current_device()
    if index >= module.device_count():
        raise ValueError(
            f"[{command}] --device {name}: torch sees {module.device_count()} {device_type} device(s)."
        )
    return torch.device(device_type, index)
