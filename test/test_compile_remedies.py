"""Every remedy of torch_hicache/_inductor.py is needed: with it removed, the test of its pattern fails.

A test here that fails says that this torch needs the remedy no more.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import test_compile
import test_compile_copies
import test_compile_hooks
import torch
import torch._inductor.config

from torch_hicache import _inductor

pattern = partial(test_compile.test_pattern, device="cpu")
copies = test_compile_copies


@pytest.fixture(autouse=True)
def _no_cache() -> Iterator[None]:
    """What is compiled here is wrong, and no graph of another test serves."""
    no_graphs = torch._inductor.config.patch(fx_graph_cache=False)
    with no_graphs, torch._functorch.config.patch(enable_autograd_cache=False):
        yield


def _nothing(*_: Any) -> None:
    pass


def without(name: str, instead: Callable[..., Any] = _nothing) -> Callable[[pytest.MonkeyPatch], None]:
    def remove(monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_inductor, name, instead)

    return remove


def without_regions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_inductor._SEPARATE_REGIONS, "_function", _nothing)


def with_dead_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.fx.Graph, "eliminate_dead_code", lambda *_, **__: False)


def without_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    input_of = _inductor._input_of
    monkeypatch.setattr(_inductor, "_input_of", lambda base, **_: input_of(base))


def without_offset(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.lowering import lowerings

    _inductor.install()
    offset = torch.ops.aten.sym_storage_offset.default
    if lowerings[offset].__name__ != _inductor._value_of_node.__name__:
        pytest.skip("this torch has a lowering of its own")
    monkeypatch.delitem(lowerings, offset)


# What is removed, and what then fails.
REMEDIES: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Callable[[], None]]] = {
    "regions, or the pool is copied": (without_regions, partial(pattern, "layers_of_a_stack")),
    "regions, or keys change under attention": (
        without_regions,
        partial(test_compile.test_attention_pattern_over_a_transfer, "cpu"),
    ),
    "pending reads are realised": (
        without("_realize_reads"),
        partial(pattern, "lazy_read_kept_over_a_transfer"),
    ),
    "storage offsets": (without_offset, partial(pattern, "layers_of_a_stack")),
    "a clone as source": (
        without("_keep_reads"),
        partial(copies.test_copy_as_source_is_kept, "clone", "cpu"),
    ),
    "a copied destination at another offset": (
        without("_geometry", lambda _: (0, 0)),
        partial(copies.test_destination_that_copies_a_part_of_what_was_computed, "cpu"),
    ),
    "offsets in such a copy": (
        without("_offsets_in_clone", lambda *_: {}),
        partial(copies.test_stack_inside_its_storage_that_aten_writes, "cpu"),
    ),
    "a copied destination that is written": (
        without("_flows_back", lambda *_: True),
        partial(copies.test_copy_of_a_pool_into_another, "overwritten", "cpu"),
    ),
    "both of copied destinations": (
        without("_keep_bases"),
        partial(copies.test_destination_whose_copy_inductor_drops, "cpu"),
    ),
    "old contents": (
        without("_keep_old_contents"),
        partial(copies.test_old_contents_cost_no_more_than_their_copy, "cpu"),
    ),
    "old contents behind a write of ATen's": (
        without_writes,
        partial(copies.test_a_copy_behind_a_write_is_kept, "cpu"),
    ),
    "dead writes": (
        with_dead_code,
        partial(copies.test_a_write_that_nobody_reads_takes_no_order_with_it, "cpu"),
    ),
    "old contents of a written copy are torch's": (
        without("_flows_back", lambda *_: True),
        partial(copies.test_written_copy_of_a_pool_that_was_written, "nothing", "cpu"),
    ),
}


def test_without_the_digest_a_warm_cache_gives_old_graphs(tmp_path: Path) -> None:
    """Of a lowering that has been changed between two processes."""
    packages = test_compile_hooks.older_and_newer_package(tmp_path)
    digest = "hashlib.sha256(Path(__file__).read_bytes()).hexdigest()"
    for package in packages:
        file = package / "torch_hicache" / "_inductor.py"
        assert file.read_text().count(digest) == 1
        file.write_text(file.read_text().replace(digest, '"always the same"'))
    answers = test_compile_hooks.answers_with_one_cache(packages, tmp_path / "cache")
    assert answers == ["wrong", "wrong"]


# Without these a transfer writes past the end of a buffer: a process of its own is to bear it.
OUT_OF_BOUNDS = ("offsets in such a copy", "a copied destination at another offset")

CHILD = """
import os, sys
sys.path.insert(0, sys.argv[1])
import pytest, test_compile_remedies
test_compile_remedies.fails_without(os.environ["REMEDY"], pytest.MonkeyPatch())
os._exit(0)
"""


def fails_without(remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    remove, test = REMEDIES[remedy]
    remove(monkeypatch)
    torch.manual_seed(0)
    # Wrong, or too large; or the op itself refuses what inductor made of the program.
    with pytest.raises((AssertionError, ValueError)):
        test()


@pytest.mark.parametrize("remedy", REMEDIES)
def test_without_the_remedy_its_test_fails(remedy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if remedy not in OUT_OF_BOUNDS:
        fails_without(remedy, monkeypatch)
        return
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(Path(__file__).parent)],
        env=os.environ | {"REMEDY": remedy, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode <= 0, done.stderr  # negative: a signal
