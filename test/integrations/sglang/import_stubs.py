"""Stand-ins for packages that SGLang imports and these tests never run: triton and torchvision.

SGLang's modules decorate kernels and name types when they are imported, on a CPU machine too. Both
packages are large, and torchvision must match torch. Nothing here replaces what a test looks at.
"""

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

# torch looks for a real triton when these are imported, and must not find ours.
import torch._inductor.compile_fx
import torch.utils.flop_counter  # noqa: F401

STUBBED = ("triton", "torchvision")


class Anything:
    """Every attribute, call and operator gives another; as a decorator it leaves the function alone."""

    def __init__(self, *_args: object, **_kwargs: object) -> None:
        pass

    def __call__(self, *args: object, **kwargs: object) -> object:
        if len(args) == 1 and not kwargs and callable(args[0]) and not isinstance(args[0], Anything):
            return args[0]
        return Anything()

    def __getattr__(self, name: str) -> "Anything":
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()

    def __getitem__(self, _key: object) -> "Anything":
        return Anything()

    def __or__(self, _other: object) -> "Anything":
        return Anything()

    __ror__ = __or__


class StubModule(ModuleType):
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Anything:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


class _Finder(MetaPathFinder, Loader):
    def find_spec(
        self, fullname: str, _path: Sequence[str] | None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] in STUBBED:
            return ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return StubModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def install() -> None:
    """Before the first import of sglang. A package that was imported already stays."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
