"""The option --device of the commands: which device that is, or why it can't be used."""

import re
import sys

import torch

import torch_hicache


def find_device(name: str, *, command: str) -> torch.device:
    """The device to run on: "auto", "cpu", "cuda" or "cuda:N".

    Raises:
        ValueError: no such device can be used; a missing backend says how to get it.
    """
    match = re.fullmatch(r"auto|cpu|cuda(?::([0-9]{1,4}))?", name)
    if not match:
        raise ValueError(f"[{command}] --device must be auto, cpu, cuda or cuda:N, got '{name}'.")
    if name == "cpu":
        return torch.device("cpu")
    backend = backend_of("cuda")
    if not torch.cuda.is_available() or not backend.loaded:
        if name == "auto":
            if torch.cuda.is_available():
                print(f"[{command}] on the CPU: {_why_missing(backend)}", file=sys.stderr)
            return torch.device("cpu")
        why = "torch finds no usable device (see hicache info)."
        raise ValueError(
            f"[{command}] --device {name}: {why if backend.loaded else _why_missing(backend)}"
        )
    index = int(match[1]) if match[1] else torch.cuda.current_device()
    if index >= torch.cuda.device_count():
        raise ValueError(
            f"[{command}] --device {name}: torch sees {torch.cuda.device_count()} CUDA device(s)."
        )
    return torch.device("cuda", index)


def backend_of(device_type: str) -> torch_hicache.Backend:
    """A ROCm torch calls its devices cuda as well."""
    name = "hip" if device_type == "cuda" and torch.version.hip else device_type
    return next(backend for backend in torch_hicache.backends() if backend.name == name)


def _why_missing(backend: torch_hicache.Backend) -> str:
    return f"the {backend.name} backend is not loaded: {backend.reason}. To get it, {backend.remedy}."
