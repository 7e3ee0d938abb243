"""How the hooks get into inductor: lazily, beside a user's own, into the cache key, with a warning."""

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config
from compiling import compare, indices, pool
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.fx import Graph

from torch_hicache import _inductor, transfer_kv

HOOKS = ("joint_custom_pre_pass", "joint_custom_post_pass", "post_grad_custom_post_pass")


@pytest.fixture(autouse=True)
def _own_hooks() -> Any:
    """Every test begins without passes and leaves none of its own."""
    torch._dynamo.reset()
    no_cache = torch._functorch.config.patch(enable_autograd_cache=False)
    with torch._inductor.config.patch(dict.fromkeys(HOOKS)), no_cache:
        yield


def lazy_read(p: Tensor, q: Tensor, i: Tensor, j: Tensor) -> Tensor:
    kept = p[0, :3] * 2
    for layer in range(2):
        transfer_kv([p[layer]], [q[layer]], i, j)
        kept = kept + p[layer, :3] * 2
    return kept


def _arguments(slots: int = 40) -> tuple[Any, ...]:
    return pool(2, slots, 8), pool(2, slots, 8), indices(5, slots), indices(5, slots)


class UserPass(CustomGraphPass):
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, graph: Graph) -> None:
        self.calls += 1

    def uuid(self) -> str:
        return "a user's pass"


def _assert_lean(function: Any = None) -> None:
    compiled = function or torch.compile(lazy_read, fullgraph=True)
    sizes = compare(lazy_read, compiled, _arguments())
    assert max(sizes) < 40 * 8 * 4


@pytest.mark.parametrize("hook", HOOKS)
def test_user_pass_that_was_there_first(hook: str) -> None:
    user_pass = UserPass()
    with torch._inductor.config.patch({hook: user_pass, "fx_graph_cache": False}):
        _assert_lean()
        assert user_pass.calls == 1


@pytest.mark.parametrize("hook", HOOKS)
def test_user_pass_that_replaces_ours(hook: str) -> None:
    _assert_lean()
    torch._dynamo.reset()
    user_pass = UserPass()
    setattr(torch._inductor.config, hook, user_pass)
    with torch._inductor.config.patch(fx_graph_cache=False):
        _assert_lean()
    assert user_pass.calls == 1


def test_user_pass_as_an_option() -> None:
    user_pass = UserPass()
    options = {"joint_custom_post_pass": user_pass, "fx_graph_cache": False}
    _assert_lean(torch.compile(lazy_read, fullgraph=True, options=options))
    assert user_pass.calls == 1


@pytest.mark.skipif(
    not hasattr(torch._inductor.custom_graph_pass, "get_custom_graph_passes"),
    reason="before torch 2.13 a hook takes one pass",
)
def test_user_passes_in_a_list() -> None:
    user_passes = [UserPass(), UserPass()]
    with torch._inductor.config.patch(joint_custom_post_pass=user_passes, fx_graph_cache=False):
        _assert_lean()
    assert [user_pass.calls for user_pass in user_passes] == [1, 1]


def test_user_pass_that_numbers_the_regions_anew() -> None:
    """As the pattern matcher does where it replaced the first node of a graph."""
    from torch._inductor.pattern_matcher import compute_mutation_region_ids

    class Renumber(UserPass):
        def __call__(self, graph: Graph) -> None:
            compute_mutation_region_ids(graph)

    with torch._inductor.config.patch(joint_custom_post_pass=Renumber(), fx_graph_cache=False):
        _assert_lean()


def test_installing_twice_adds_nothing() -> None:
    _inductor.install()
    first = [getattr(torch._inductor.config, hook) for hook in HOOKS]
    _inductor.install()
    assert [getattr(torch._inductor.config, hook) for hook in HOOKS] == first


def test_a_chain_without_identity_turns_the_cache_off() -> None:
    plain = _inductor._Chain([_inductor._SEPARATE_REGIONS, lambda graph: None])
    assert plain.uuid() is None
    assert _inductor._Chain([_inductor._SEPARATE_REGIONS, UserPass()]).uuid() is not None


def test_other_graphs_are_left_alone() -> None:
    """Ours do nothing in a graph without transfers."""

    def function(x: Tensor) -> Tensor:
        return (x * 2).clone().sum(1)

    _inductor.install()
    graph = torch.fx.symbolic_trace(function).graph
    before = str(graph)
    for graph_pass in (_inductor._RECORD, _inductor._SEPARATE_REGIONS, _inductor._KEEP_APART):
        graph_pass(graph)
    assert str(graph) == before
    assert not any("mutation_region_id" in node.meta for node in graph.nodes)


@pytest.fixture
def untested(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(_inductor, "TESTED_TORCH", ("1.0",))
    monkeypatch.delenv(_inductor.FORCE_VARIABLE, raising=False)
    _inductor._is_tested.cache_clear()
    yield
    _inductor._is_tested.cache_clear()


def test_untested_torch_copies_and_warns_once(untested: None) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compiled = torch.compile(lazy_read, fullgraph=True)
        for slots in (40, 56):
            sizes = compare(lazy_read, compiled, _arguments(slots))
            assert max(sizes) >= 2 * slots * 8 * 4, "no copy: this torch needs no pass"
    texts = [str(warning.message) for warning in caught if "torch_hicache" in str(warning.message)]
    assert len(texts) == 1
    assert "HICACHE_COMPILE_HOOKS=force" in texts[0]


def test_untested_torch_with_the_hooks_forced(untested: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_inductor.FORCE_VARIABLE, "force")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        _assert_lean()


def test_torch_without_the_interfaces_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise AttributeError("no 'lowerings'")

    monkeypatch.setattr(_inductor, "_install_lowerings", missing)
    with pytest.raises(RuntimeError, match=r"\[transfer_kv\] can't be compiled rightly with torch"):
        _inductor.install()


IMPORT = """
import sys
import torch_hicache
assert not [name for name in sys.modules if name.startswith("torch._inductor")], "inductor imported"
import torch
p = torch.ones(4, 2)
torch_hicache.transfer_kv([p], [p * 2], torch.tensor([1]), torch.tensor([0]))
assert not [name for name in sys.modules if name.startswith("torch._inductor")], "eager imports it"
"""

CACHED = """
import json, sys
sys.path.insert(0, sys.argv[1])
import torch
from torch._dynamo.utils import counters
from compiling import compare
import test_compile_hooks as t
torch.manual_seed(0)
compiled = torch.compile(t.lazy_read, fullgraph=True)
for slots in (40, 56):
    sizes = compare(t.lazy_read, compiled, t._arguments(slots))
    assert max(sizes) < slots * 8 * 4, sizes
print(json.dumps(counters["aot_autograd"].get("autograd_cache_hit", 0)
                 + counters["inductor"].get("fxgraph_cache_hit", 0)))
"""


def _python(code: str, **environment: str) -> str:
    folder = str(Path(__file__).parent)
    result = subprocess.run(
        [sys.executable, "-c", code, folder],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


# A version of the package that does not realise pending reads, and the right one after it.
CHANGED = """
import os, sys
sys.path[:0] = [os.environ["PACKAGE"], sys.argv[1]]
import torch
from compiling import compare, pool
import test_compile_hooks as t
rows = torch.arange(5)  # those that are read
arguments = pool(2, 40, 8), pool(2, 40, 8), rows, rows
try:
    compare(t.lazy_read, torch.compile(t.lazy_read, fullgraph=True), arguments)
except AssertionError:
    print("wrong")
else:
    print("right")
"""


def older_and_newer_package(folder: Path) -> tuple[Path, Path]:
    """Links to this package, but for _inductor.py."""
    package = Path(_inductor.__file__).parent
    source = Path(_inductor.__file__).read_text()
    realizing = "        _realize_reads(args[0] if args else kwargs[written])\n"
    assert source.count(realizing) == 1
    folders = folder / "older", folder / "newer"
    for place, text in zip(folders, (source.replace(realizing, ""), source), strict=True):
        (place / "torch_hicache").mkdir(parents=True)
        for file in package.iterdir():
            if file.name not in ("_inductor.py", "__pycache__"):
                (place / "torch_hicache" / file.name).symlink_to(file)
        (place / "torch_hicache" / "_inductor.py").write_text(text)
    return folders


def answers_with_one_cache(packages: tuple[Path, ...], cache: Path) -> list[str]:
    caches = {"TORCHINDUCTOR_CACHE_DIR": str(cache)}
    return [_python(CHANGED, PACKAGE=str(place), **caches).split()[-1] for place in packages]


def test_a_changed_lowering_does_not_meet_the_graphs_of_the_old_one(tmp_path: Path) -> None:
    """Lowerings are no part of inductor's cache key; the digest of their file is."""
    packages = older_and_newer_package(tmp_path)
    assert answers_with_one_cache(packages, tmp_path / "cache") == ["wrong", "right"]


def test_import_is_free_of_inductor() -> None:
    _python(IMPORT)


def test_second_process_with_a_warm_cache(tmp_path: Path) -> None:
    hits = [json.loads(_python(CACHED, TORCHINDUCTOR_CACHE_DIR=str(tmp_path))) for _ in range(2)]
    assert hits[0] == 0
    assert hits[1] > 0
