"""SGLang with its stubs, and the processes of a Mooncake Store, from the folders of their own tests."""

import sys
from pathlib import Path

import pytest

_FOLDER = Path(__file__).parents[1]
sys.path += [str(_FOLDER / "sglang"), str(_FOLDER / "mooncake")]

import import_stubs  # noqa: E402
import own_network  # noqa: E402


def pytest_configure(config: pytest.Config) -> None:
    own_network.prepare()
    import_stubs.install()
