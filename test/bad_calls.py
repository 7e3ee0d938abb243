"""Calls that are wrong in one thing.

Each is written once, as a function of the device: it serves the real op, the fake kernel on the same
device, and the fake kernel for a GPU that is not there.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

transfer_kv = torch.ops.hicache.transfer_kv
Changes = dict[str, Any]


def pool(device: str, *sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(sizes, dtype=dtype, device=device)


def sparse(device: str, *sizes: int) -> Tensor:
    return torch.empty(sizes, layout=torch.sparse_coo, device=device)


def indices(device: str, n: int = 3, dtype: torch.dtype = torch.int64) -> Tensor:
    if device.startswith("npu"):  # the simulated one has no arange
        return torch.arange(n, dtype=dtype).to(device)
    return torch.arange(n, dtype=dtype, device=device)


def arguments(device: str, changes: Changes) -> Changes:
    """A good call on `device`, but for `changes`."""
    good = {
        "dst": [pool(device, 9, 4), pool(device, 9, 2)],
        "src": [pool(device, 8, 4), pool(device, 8, 2)],
        "dst_indices": indices(device),
        "src_indices": indices(device),
    }
    return good | changes


def run(call: Changes) -> None:
    positional = [call.pop(name) for name in ("dst", "src", "dst_indices", "src_indices")]
    transfer_kv(*positional, **call)


def text_of(call: Changes) -> str:
    """What the call raises: its type and text."""
    try:
        run(dict(call))
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return "nothing was raised"


def fake_text_of(make: Callable[[str], Changes], device: str) -> str:
    with FakeTensorMode():
        return text_of(arguments(device, make(device)))


# What tensors, not their data, tell: both kernels see it.
BAD_CALLS: dict[str, Callable[[str], Changes]] = {
    "method": lambda d: {"method": "dma"},
    "max_blocks": lambda d: {"max_blocks": -1},
    "list lengths": lambda d: {"src": [pool(d, 8, 4)]},
    "dst_indices dtype": lambda d: {"dst_indices": indices(d, dtype=torch.int16)},
    "src_indices dtype": lambda d: {"src_indices": indices(d, dtype=torch.float32)},
    "dst_indices bool": lambda d: {"dst_indices": torch.ones(3, dtype=torch.bool, device=d)},
    "dst_indices 2-D": lambda d: {"dst_indices": indices(d).view(1, 3)},
    "src_indices 0-D": lambda d: {"src_indices": torch.tensor(1, device=d)},
    "index lengths": lambda d: {"src_indices": indices(d, 4)},
    "index lengths, dst longer": lambda d: {"dst_indices": indices(d, 4, torch.int32)},
    "slot_dim": lambda d: {"slot_dim": 2},
    "slot_dim from the end": lambda d: {"slot_dim": -3},
    "slot_dim of a scalar": lambda d: {"dst": [pool(d)], "src": [pool(d)]},
    "slot_dim of src": lambda d: {"src": [pool(d, 8, 4), pool(d, 8)], "slot_dim": 1},
    "dtype": lambda d: {"src": [pool(d, 8, 4), pool(d, 8, 2, dtype=torch.float16)]},
    "dtype of the same size": lambda d: {
        "dst": [pool(d, 9, 4).to(torch.float8_e4m3fn)],
        "src": [pool(d, 8, 4).to(torch.float8_e5m2)],
    },
    "new dtypes": lambda d: {
        "dst": [pool(d, 9, 4, dtype=torch.uint8).view(torch.float8_e8m0fnu)],
        "src": [pool(d, 8, 4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)],
    },
    "row": lambda d: {"src": [pool(d, 8, 5), pool(d, 8, 2)]},
    "row of one": lambda d: {"src": [pool(d, 8, 4), pool(d, 8, 1)]},
    "row of another rank": lambda d: {"src": [pool(d, 8, 4), pool(d, 8, 2, 1)]},
    "planes": lambda d: {"dst": [pool(d, 2, 9, 4)], "src": [pool(d, 3, 8, 4)], "slot_dim": 1},
    "planes, from the end": lambda d: {"dst": [pool(d, 9, 4)], "src": [pool(d, 1, 8, 4)], "slot_dim": -2},
    "expanded dst": lambda d: {"dst": [pool(d, 1, 4).expand(9, 4), pool(d, 9, 2)]},
    "dst with rows that overlap": lambda d: {
        "dst": [pool(d, 9, 4), pool(d, 18).as_strided((9, 2), (1, 1))],
    },
    "requires grad": lambda d: {"dst": [pool(d, 9, 4), pool(d, 9, 2).requires_grad_()]},
    "result that requires grad": lambda d: {
        "dst": [pool(d, 9, 4).requires_grad_().clone(), pool(d, 9, 2)],
    },
    "float8 that requires grad": lambda d: {
        "dst": [pool(d, 9, 4).to(torch.float8_e5m2).requires_grad_()],
        "src": [pool(d, 8, 4).to(torch.float8_e5m2)],
    },
    "count dtype": lambda d: {"count": torch.tensor(1.0, device=d)},
    "count of two": lambda d: {"count": torch.tensor([1, 2], device=d)},
    "count of none": lambda d: {"count": torch.tensor([], dtype=torch.int64, device=d)},
    "sparse dst": lambda d: {"dst": [sparse(d, 9, 4)], "src": [pool(d, 8, 4)]},
    "sparse src": lambda d: {"src": [pool(d, 8, 4), sparse(d, 8, 2)]},
    "sparse indices": lambda d: {"src_indices": sparse(d, 3)},
    "conjugated": lambda d: {
        "dst": [pool(d, 9, 4, dtype=torch.complex64)],
        "src": [pool(d, 8, 4, dtype=torch.complex64).conj()],
    },
    "negated": lambda d: {"src": [pool(d, 8, 4), pool(d, 8, 2, dtype=torch.complex64).conj().imag]},
    "negated indices": lambda d: {"dst_indices": torch._neg_view(indices(d))},
}


# A GPU beside the CPU, and two: seen by the fake kernel on any machine.
BAD_PLACES: dict[str, Callable[[str], Changes]] = {
    "dst on two devices": lambda d: {"dst": [pool(d, 9, 4), pool("cpu", 9, 2)]},
    "src on two devices": lambda d: {"src": [pool("cpu", 8, 4), pool(d, 8, 2)]},
    "index with pools on the CPU": lambda d: {
        "dst": [pool("cpu", 9, 4)],
        "src": [pool("cpu", 8, 4)],
        "src_indices": indices("cpu"),
    },
    "count on the CPU": lambda d: {"count": torch.tensor(1)},
    "count beside CPU indices": lambda d: {
        "dst_indices": indices("cpu"),
        "count": torch.tensor(1, device=d),
    },
}
BAD_PAIRS: dict[str, Callable[[str], Changes]] = {
    "pools on two GPUs": lambda d: {"src": [pool("cuda:1", 8, 4), pool("cuda:1", 8, 2)]},
    "dst on two GPUs": lambda d: {"dst": [pool(d, 9, 4), pool("cuda:1", 9, 2)]},
    "index on another GPU": lambda d: {"dst_indices": indices("cuda:1")},
    "no planes, indices on two GPUs": lambda d: {
        "dst": [],
        "src": [],
        "dst_indices": indices("cuda:1"),
    },
    "count on another GPU": lambda d: {"count": torch.tensor(1, device="cuda:1")},
}


# What only data tells.
_TWICE = torch.ones(9, 4)
BAD_DATA: dict[str, Changes] = {
    "dst index": {"dst_indices": torch.tensor([1, 2, 9])},
    "src index": {"src_indices": torch.tensor([-2, 0, 8], dtype=torch.int32)},
    "index without planes": {"dst": [], "src": [], "src_indices": torch.tensor([0, 1, -3])},
    "index of rows of no bytes": {
        "dst": [torch.ones(9, 0)],
        "src": [torch.ones(8, 0)],
        "dst_indices": torch.tensor([0, 9, 10]),
    },
    "index of a pool without slots": {"src": [torch.ones(0, 4), torch.ones(0, 2)]},
    "index beside padding": {"dst_indices": torch.full((3,), -1), "src_indices": torch.tensor([0, 0, 8])},
    "negative count": {"count": torch.tensor(-1)},
    "count too large": {"count": torch.tensor([4], dtype=torch.int32)},
    "one destination twice": {"dst": [_TWICE, _TWICE], "src": [torch.ones(8, 4), torch.ones(8, 4)]},
    "shifted destinations": {
        "dst": [_TWICE[:8], _TWICE[1:]],
        "src": [torch.ones(8, 4), torch.ones(8, 4)],
    },
    "copy_engine": {"method": "copy_engine"},
    "staged": {"method": "staged", "dst": [], "src": []},
}
