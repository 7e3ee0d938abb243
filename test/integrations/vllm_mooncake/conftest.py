"""vLLM's configurations, and the processes of a Mooncake Store, from the folders of their own tests."""

import sys
from pathlib import Path

import pytest

_FOLDER = Path(__file__).parents[1]
sys.path += [str(_FOLDER / "vllm"), str(_FOLDER / "mooncake")]

import own_network  # noqa: E402


def pytest_configure(config: pytest.Config) -> None:
    own_network.prepare()
