"""What is said where transformers is missing or of another version; who imports it."""

import re
import subprocess
import sys
from importlib.metadata import requires
from pathlib import Path

import pytest
import transformers

from torch_hicache.integrations import transformers as adapter


def run(code: str) -> str:
    """What a fresh interpreter prints, outside of the folders of this test."""
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(sys.prefix))
    return done.stdout + done.stderr


# Where Python looks for packages, but for this one.
MISSING = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name == "transformers":
            raise ModuleNotFoundError("No module named 'transformers'")

sys.meta_path.insert(0, Missing())
import torch_hicache.integrations.transformers
"""

OTHER = """
import transformers
transformers.__version__ = "{version}"
import torch_hicache.integrations.transformers
"""


def test_this_version_is_supported() -> None:
    major, minor = map(int, transformers.__version__.split(".")[:2])
    assert adapter.SUPPORTED[0] <= (major, minor) < adapter.SUPPORTED[1]


def test_missing() -> None:
    assert re.search(
        r"ImportError: \[HiCacheCache\] needs transformers >=5.19,<5.25: No module named 'transformers'. "
        r'Install it with: pip install "transformers>=5.19,<5.25"',
        run(MISSING),
    )


@pytest.mark.parametrize("version", ["4.57.6", "5.18.0", "5.25.0", "6.0.0.dev0"])
def test_other_versions_are_refused(version: str) -> None:
    assert re.search(
        rf"ImportError: \[HiCacheCache\] transformers must be >=5.19,<5.25, got {re.escape(version)}. "
        r'Install one with: pip install "transformers>=5.19,<5.25"',
        run(OTHER.format(version=version)),
    )


@pytest.mark.parametrize("version", ["5.19.0.dev0", "5.24.9"])
def test_all_of_a_minor_version_is_taken(version: str) -> None:
    assert run(OTHER.format(version=version) + "print('imported')").endswith("imported\n")


def test_the_extra_names_the_same_range() -> None:
    extra = [line for line in requires("torch_hicache") or [] if 'extra == "transformers"' in line]
    assert len(extra) == 1
    assert set(extra[0].partition(";")[0].strip().removeprefix("transformers").split(",")) == {
        ">=5.19",
        "<5.25",
    }


def test_only_the_adapter_imports_transformers() -> None:
    code = "import sys, torch_hicache, torch_hicache.integrations.layer_window; "
    assert run(code + "print('transformers' in sys.modules)") == "False\n"
