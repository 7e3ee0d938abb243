"""Engines that are missing or of another version, where no engine is installed."""

import importlib
import importlib.util
import re
import subprocess
import sys

import pytest
import torch

from torch_hicache.integrations import vllm
from torch_hicache.integrations.engine_version import require_engine


def test_a_version_in_the_range_is_imported() -> None:
    assert require_engine("torch", (2, 0), (2, 99), "pip install torch") is torch


@pytest.mark.parametrize(("first", "last"), [((1, 0), (2, 1)), ((3, 0), (9, 9))])
def test_another_version_is_refused_with_the_range(first: tuple[int, int], last: tuple[int, int]) -> None:
    text = (
        f"[torch] version must be {first[0]}.{first[1]} to {last[0]}.{last[1]}, got {torch.__version__}: "
    )
    with pytest.raises(RuntimeError, match=re.escape(text + "pip install torch")):
        require_engine("torch", first, last, "pip install torch")


@pytest.mark.skipif(
    any(importlib.util.find_spec(name) for name in ("vllm", "lmcache")), reason="an engine is installed"
)
def test_a_missing_engine_is_named_with_its_install_line() -> None:
    for name in ("HiCacheOffloadingSpec", "HiCacheOffloadingConnector"):
        with pytest.raises(ModuleNotFoundError, match=r"must be installed: pip install vllm==0\.33\.0"):
            getattr(vllm, name)
    with pytest.raises(ModuleNotFoundError, match=r"must be installed: pip install lmcache==0\.5\.6"):
        importlib.import_module("torch_hicache.integrations.lmcache")


def test_what_an_engine_itself_lacks_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = type(sys)("lmcache")
    engine.__path__ = []  # a package without modules
    monkeypatch.setitem(sys.modules, "lmcache", engine)
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'lmcache\.lmcache_native'"):
        importlib.import_module("torch_hicache.integrations.lmcache")


def test_the_adapters_import_no_engine_before_it_is_asked_for() -> None:
    code = (
        "import sys, torch_hicache.integrations.vllm, torch_hicache.integrations.vllm.chunk_transfers\n"
        "assert not {'vllm', 'lmcache'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
