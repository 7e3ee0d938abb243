"""What tests of compiled graphs share: a cache of their own, recorded allocations, exact data."""

import atexit
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

# Before inductor is imported: a run sees no graphs of another, a small machine no compile workers.
if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="hicache-compile-")
    atexit.register(shutil.rmtree, os.environ["TORCHINDUCTOR_CACHE_DIR"], ignore_errors=True)
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

_allocated: list[int] | None = None


def _record(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def recording(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
        tensor = allocate(size, stride, dtype)
        if _allocated is not None:
            _allocated.append(tensor.untyped_storage().nbytes())
        return tensor

    return recording


# Generated code takes its allocators from here when it is loaded, and holds them from then on.
for _name in ("_empty_strided_cpu", "_empty_strided_cuda"):
    setattr(torch._C._dynamo.guards, _name, _record(getattr(torch._C._dynamo.guards, _name)))


@contextmanager
def allocations() -> Iterator[list[int]]:
    """The bytes of every buffer that generated code allocates meanwhile."""
    global _allocated  # noqa: PLW0603
    _allocated = []
    try:
        yield _allocated
    finally:
        _allocated = None


ROW = 8  # elements
LAYERS = 3
SLOTS = (64, 96, 80)  # of pools that go through one compiled function


def pool(*shape: int, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    """Random contents whose sums and products are exact, and never zero."""
    values = torch.randint(1, 30, shape) * (torch.randint(0, 2, shape) * 2 - 1)
    return values.to(device, dtype)


def indices(length: int, slots: int, device: str = "cpu") -> Tensor:
    return torch.randperm(slots)[:length].to(device)


def copy_of(values: Any) -> Any:
    """Copies of all tensors, with their strides; views of one base stay views of one base."""
    bases: dict[int, Tensor] = {}

    def copy(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        storage = value.untyped_storage()
        if storage.data_ptr() not in bases:
            whole = torch.empty(0, dtype=value.dtype, device=value.device).set_(storage)
            bases[storage.data_ptr()] = whole.clone()
        base = bases[storage.data_ptr()]
        return base.as_strided(value.shape, value.stride(), value.storage_offset())

    return tree_map(copy, values)


def assert_same(expected: Any, actual: Any, what: str = "") -> None:
    for position, (e, a) in enumerate(zip(tree_leaves(expected), tree_leaves(actual), strict=True)):
        same = torch.equal(e, a) if isinstance(e, Tensor) else e == a
        assert same, f"{what}: value {position} differs from eager:\n{e}\n{a}"


def compare(function: Callable, compiled: Callable, args: Sequence[Any], what: str = "") -> list[int]:
    """Run both on copies of `args` and compare all; the allocations of the second."""
    eager_args, compiled_args = copy_of(args), copy_of(args)
    expected = function(*eager_args)
    with allocations() as sizes:
        actual = compiled(*compiled_args)
    assert_same((expected, eager_args), (actual, compiled_args), what)
    return sizes


def two_pools(slots: int, device: str) -> tuple[Any, ...]:
    """A pool to write, one to read, and where from and to."""
    return (
        pool(slots, ROW, device=device),
        pool(slots, ROW, device=device),
        indices(9, slots, device),
        indices(9, slots, device),
    )


def two_stacks(slots: int, device: str) -> tuple[Any, ...]:
    """The same with stacks of LAYERS planes."""
    _, _, i, j = two_pools(slots, device)
    shape = (LAYERS, slots, ROW)
    return pool(*shape, device=device), pool(*shape, device=device), i, j
