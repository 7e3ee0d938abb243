"""The hooks in SGLang's real registry, around the transfer methods of its real pools."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from pools import KINDS, LAYERS, PAGE, Pools, page_tokens
from sglang.srt import plugins
from sglang.srt.mem_cache.l2_transfer import L2Transfer, L2TransferEngine
from sglang.srt.plugins.hook_registry import HookRegistry

from torch_hicache.integrations.sglang import plugin

COMBINATIONS = [
    (kind, io_backend, layout)
    for kind in KINDS
    for io_backend, layouts in plugin.SERVED.items()
    for layout in layouts
    if not (kind == "mla" and layout == "page_head")
    if not (kind == "asymmetric" and layout in ("layer_first", "page_head"))
]
NAMES = [f"{kind}-{io_backend}-{layout}" for kind, io_backend, layout in COMBINATIONS]


@pytest.fixture(scope="module", autouse=True)
def _hooks() -> None:
    """Once for the process, as in SGLang: through its load_plugins and our entry point."""
    patch = pytest.MonkeyPatch()
    patch.setenv(plugin.SWITCH, "1")
    plugins.load_plugins()
    patch.undo()


def test_all_hooks_took() -> None:
    assert plugin.missing_hooks() == []


@pytest.mark.parametrize(("kind", "io_backend", "layout"), COMBINATIONS, ids=NAMES)
def test_load_one_layer(kind: str, io_backend: str, layout: str) -> None:
    pools = Pools(kind, layout)
    device_tokens, host_tokens = page_tokens(5, 1, 8), page_tokens(0, 15, 3)
    for layer in (0, LAYERS - 1):
        expected = pools.expect_load(device_tokens, host_tokens, layer)
        pools.host.load_to_device_per_layer(pools.device, host_tokens, device_tokens, layer, io_backend)
        pools.check(expected)


@pytest.mark.parametrize(("kind", "io_backend", "layout"), COMBINATIONS, ids=NAMES)
def test_store_all_layers(kind: str, io_backend: str, layout: str) -> None:
    pools = Pools(kind, layout)
    device_tokens, host_tokens = page_tokens(5, 1, 8), page_tokens(0, 15, 3)
    expected = pools.expect_store(device_tokens, host_tokens)
    pools.host.backup_from_device_all_layer(pools.device, host_tokens, device_tokens, io_backend)
    pools.check(expected)


@pytest.mark.parametrize("layout", ["layer_first", "page_first", "page_first_direct", "page_head"])
def test_the_pool_finds_what_was_stored(layout: str) -> None:
    """SGLang's own view of a page holds the device's rows of it."""
    pools = Pools("mha", layout)
    io_backend = "direct" if layout == "page_first_direct" else "kernel"
    pools.host.backup_from_device_all_layer(pools.device, page_tokens(3), page_tokens(5), io_backend)
    page = pools.host.get_data_page(3 * PAGE, flat=False)
    order = {
        "layer_first": (0, 1, 2, 3, 4),
        "page_first": (0, 2, 1, 3, 4),
        "page_first_direct": (0, 1, 2, 3, 4),
        "page_head": (0, 3, 2, 1, 4),
    }[layout]
    page = page.squeeze(1) if page.dim() == 6 else page
    rows = [torch.stack([layer[5 * PAGE : 6 * PAGE] for layer in side]) for side in _sides(pools)]
    stored = page.permute(order).contiguous()
    assert torch.equal(stored.view(torch.uint8), torch.stack(rows).view(torch.uint8))


def _sides(pools: Pools) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return pools.device.k_buffer, pools.device.v_buffer


def test_layers_that_are_not_the_models_are_passed_over() -> None:
    for kind in KINDS:
        pools = Pools(kind, "page_first")
        before = pools.copies()
        for layer in (-1, LAYERS):
            tokens = page_tokens(1)
            pools.host.load_to_device_per_layer(pools.device, tokens, tokens, layer, "kernel")
        pools.check(before)


def test_a_draft_layer_that_is_not_there() -> None:
    pools = Pools("mha", "page_first")
    tokens = page_tokens(1)
    with pytest.raises(IndexError, match="the host pool has no layer 3"):
        pools.host.load_to_device_per_layer(pools.device, tokens, tokens, LAYERS, "kernel", is_draft=True)


def test_bad_indices_move_nothing() -> None:
    pools = Pools("mha", "page_head")
    before, tokens = pools.copies(), page_tokens(1, 2)
    for wrong, error, text in (
        (tokens.flip(0), ValueError, "device_indices must be whole pages of 4 tokens"),
        (tokens[:6], ValueError, "must be whole pages of 4 tokens, got 6 indices"),
        (page_tokens(1, 9), IndexError, r"dst_indices\[1\] is 9, out of range for 9 slots"),
    ):
        with pytest.raises(error, match=text):
            pools.host.load_to_device_per_layer(pools.device, tokens, wrong, 0, "kernel")
    pools.check(before)


def test_indices_that_were_written_again() -> None:
    pools = Pools("mha", "page_head")
    device_tokens, host_tokens = page_tokens(1, 2), page_tokens(3, 4)
    for host_pages in ((3, 4), (6, 5)):
        host_tokens.copy_(page_tokens(*host_pages))
        expected = pools.expect_load(device_tokens, host_tokens, 0)
        pools.host.load_to_device_per_layer(pools.device, host_tokens, device_tokens, 0, "kernel")
        pools.check(expected)


def test_inference_mode() -> None:
    """As SGLang's scheduler runs; its index tensors have no version then."""
    with torch.inference_mode():
        for kind, io_backend, layout in COMBINATIONS:
            pools = Pools(kind, layout)
            device_tokens, host_tokens = page_tokens(1, 2), page_tokens(3, 4)
            for layer in range(LAYERS):
                expected = pools.expect_load(device_tokens, host_tokens, layer)
                pools.host.load_to_device_per_layer(
                    pools.device, host_tokens, device_tokens, layer, io_backend
                )
                pools.check(expected)


def test_no_indices_are_a_no_op() -> None:
    none = torch.empty(0, dtype=torch.int64)
    for kind, io_backend, layout in COMBINATIONS:
        pools = Pools(kind, layout)
        before = pools.copies()
        pools.host.load_to_device_per_layer(pools.device, none, none, 0, io_backend)
        pools.host.backup_from_device_all_layer(pools.device, none, none, io_backend)
        pools.check(before)


def test_what_is_not_served_stays_sglangs() -> None:
    pools, tokens = Pools("mha", "page_first"), page_tokens(1)
    with pytest.raises(ValueError, match="Unsupported layout: page_first"):
        pools.host.load_to_device_per_layer(pools.device, tokens, tokens, 0, "direct")
    with pytest.raises(ValueError, match="Unsupported IO backend: other"):
        pools.host.backup_from_device_all_layer(pools.device, tokens, tokens, "other")

    class Special(type(pools.host)):  # type: ignore[misc]
        pass

    pools.host.__class__ = Special
    with pytest.raises(NameError, match="transfer_kv_per_layer_pf_lf"):  # SGLang's kernels need a GPU
        pools.host.load_to_device_per_layer(pools.device, tokens, tokens, 0, "kernel")


def test_a_destroyed_pool_is_not_used() -> None:
    pools, tokens = Pools("mla", "page_first"), page_tokens(1)
    pools.host.load_to_device_per_layer(pools.device, tokens, tokens, 0, "kernel")
    pools.host.destroy()
    with pytest.raises((NameError, TypeError)):  # as SGLang's own method has it
        pools.host.load_to_device_per_layer(pools.device, tokens, tokens, 0, "kernel")


@pytest.mark.parametrize(("kind", "io_backend", "layout"), COMBINATIONS, ids=NAMES)
def test_a_round_trip_through_sglangs_engine(kind: str, io_backend: str, layout: str) -> None:
    """Its L2TransferEngine with slots of its allocator: out, over the device's rows, and back."""
    pools = Pools(kind, layout)
    engine = L2TransferEngine(io_backend)
    device_tokens, host_tokens = page_tokens(6, 2, 3), pools.host.alloc(3 * PAGE)
    transfers = [L2Transfer(pools.host, pools.device, host_tokens, device_tokens)]
    before = pools.copies()
    expected = pools.expect_store(device_tokens, host_tokens)
    engine.submit_device_to_host(transfers)
    pools.check(expected)
    for tensor in pools.device_tensors:
        tensor[device_tokens] = 0
    done: list[int] = []
    engine.submit_host_to_device(transfers, transfer_layer_id_max=LAYERS, on_layer_done=done.append)
    number = len(pools.device_tensors)
    pools.check([*before[:number], *expected[number:]])
    assert done == list(range(LAYERS))
    assert pools.host.free(host_tokens) == len(host_tokens)


# --- The entry point, in processes of its own -----------------------------------------------------

PROGRAM = """
import logging, sys
sys.path.insert(0, {folder!r})
import import_stubs
import_stubs.install()
{before}
from sglang.srt.plugins import load_plugins
logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(name)s %(levelname)s %(message)s")
load_plugins()
{after}
"""


def run(before: str = "", after: str = "", switch: str | None = "1") -> str:
    environment = {name: value for name, value in os.environ.items() if name != plugin.SWITCH}
    environment |= {plugin.SWITCH: switch} if switch is not None else {}
    folder = str(Path(__file__).parent)
    program = PROGRAM.format(folder=folder, before=before, after=after)
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_one_line_says_that_the_hooks_took() -> None:
    """Also where a plug-in that comes later has wrapped one of them."""
    before = """
import torch_hicache.integrations.sglang.plugin as plugin
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
ours, target = plugin.activate, plugin.POOLS[0] + ".load_to_device_per_layer"
def activate():
    ours()
    HookRegistry.register(target, lambda f, *a, **k: f(*a, **k), HookType.AROUND)
plugin.activate = activate
"""
    lines = [line for line in run(before).splitlines() if line.startswith("torch_hicache.")]
    assert lines == [
        "torch_hicache.integrations.sglang.plugin INFO torch_hicache serves the transfers of SGLang "
        "0.5.23's MHATokenToKVPoolHost, AsymmetricMHATokenToKVPoolHost, MLATokenToKVPoolHost "
        "(io backends kernel and direct)."
    ]


def test_it_is_off_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    after = """
from sglang.srt.plugins.hook_registry import HookRegistry
print("hooks", len(HookRegistry._hooks), "sglang.srt.mem_cache.pool_host.mha" in sys.modules)
"""
    assert "hooks 0 False" in run(after=after, switch=None)
    monkeypatch.setenv(plugin.SWITCH, "0")
    before = {target: list(hooks) for target, hooks in HookRegistry._hooks.items()}
    plugin.activate()
    assert HookRegistry._hooks == before


def test_a_hook_that_did_not_take_is_named() -> None:
    before = """
import sglang.srt.mem_cache.pool_host.mla as mla
del mla.MLATokenToKVPoolHost
"""
    shown = run(before)
    assert "ERROR torch_hicache: hooks did not take, SGLang's own code serves: " in shown
    assert "mla.MLATokenToKVPoolHost.load_to_device_per_layer (" in shown


def test_an_unknown_version_is_refused() -> None:
    before = """
import torch_hicache.integrations.sglang.plugin as plugin
plugin.version = lambda name: "0.6.0"
"""
    shown = run(before)
    assert "Failed to execute general plugin: torch_hicache" in shown
    assert "[sglang] SGLang 0.6.0 is not known; this torch_hicache serves 0.5.23." in shown
    assert "serves the transfers" not in shown


@pytest.mark.parametrize(
    ("installed", "is_known"),
    [
        ("0.5.23", True),
        ("0.5.23+cu130", True),
        ("0.5.23.post1", False),
        ("0.5.22", False),
        ("0.5.24", False),
    ],
)
def test_versions(installed: str, is_known: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(plugin.SWITCH, "1")
    monkeypatch.setattr(plugin, "version", lambda _name: installed)
    monkeypatch.setattr(plugin, "missing_backend", lambda: "the version is known")
    with pytest.raises(RuntimeError, match="the version is known" if is_known else "serves 0.5.23."):
        plugin.activate()


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> str:
        raise plugin.PackageNotFoundError(name)

    monkeypatch.setenv(plugin.SWITCH, "1")
    monkeypatch.setattr(
        plugin, "missing_backend", lambda: "the cuda backend is not loaded: why (do this)"
    )
    with pytest.raises(
        RuntimeError, match=r"\[sglang\] the cuda backend is not loaded: why \(do this\)\."
    ):
        plugin.activate()
    monkeypatch.setattr(plugin, "version", missing)
    with pytest.raises(ImportError, match=r"sglang is not installed\. pip install sglang==0\.5\.23"):
        plugin.activate()


def test_importing_the_adapter_imports_no_sglang() -> None:
    names = ("plugin", "kvcacheio", "jit")
    program = "import sys\n" + "".join(
        f"import torch_hicache.integrations.sglang.{name}\n" for name in names
    )
    program += "assert not any(name.partition('.')[0] == 'sglang' for name in sys.modules)\n"
    subprocess.run([sys.executable, "-c", program], check=True)
