"""Which engine is installed, and whether an adapter knows it."""

import importlib
import importlib.metadata
import re
from types import ModuleType


def require_engine(
    package: str, first: tuple[int, int], last: tuple[int, int], install: str
) -> ModuleType:
    """Import an engine of a version that its adapter was run against.

    Args:
        package: its module.
        first, last: the first and the last (major, minor) supported.
        install: the line that installs it.

    Raises:
        ModuleNotFoundError: it is not installed; the text has the line.
        RuntimeError: another version is.
    """
    try:
        module = importlib.import_module(package)
    except ModuleNotFoundError as error:
        raise not_installed(package, install, error) from None
    version = getattr(module, "__version__", None)
    if version is None:  # a package that is being imported, and has asked for its plug-ins
        version = importlib.metadata.version(package)
    numbers = re.match(r"(\d+)\.(\d+)", version)
    found = (int(numbers[1]), int(numbers[2])) if numbers else None
    if found is None or not first <= found <= last:
        raise RuntimeError(
            f"[{package}] version must be {first[0]}.{first[1]} to {last[0]}.{last[1]}, got {version}: "
            f"{install}"
        )
    return module


def not_installed(package: str, install: str, error: ModuleNotFoundError) -> ModuleNotFoundError:
    """What to raise for `error`: the line that installs the engine, or what the engine itself lacks."""
    if error.name != package:
        return error
    return ModuleNotFoundError(f"[{package}] the package must be installed: {install}", name=package)
