"""Facts of the package: what an import does and does not do, what the libraries need, what is missing."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import torch_hicache
from torch_hicache import _backends

FOLDER = Path(torch_hicache.__file__).parent
LIBRARIES = sorted(FOLDER.glob("_*.so"))


def run_python(code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_import_initialises_no_device_and_loads_no_compiler() -> None:
    run_python("""
import sys, torch
before = set(sys.modules)
import torch_hicache
assert not torch.cuda.is_initialized()
heavy = ("torch._inductor.", "torch._dynamo.", "triton.", "matplotlib.", "rich.", "numpy.")
found = [name for name in set(sys.modules) - before if (name + ".").startswith(heavy)]
assert not found, found
assert torch.get_num_threads() > 0
""")


def test_importing_twice_is_fine() -> None:
    """Also when the modules are thrown away in between: the libraries stay, and register once."""
    run_python("""
import importlib, sys
import torch, torch_hicache
import torch_hicache
importlib.reload(torch_hicache)
torch_hicache._backends.load()
at = torch.tensor([0])
torch.ops.hicache.transfer_kv([torch.ones(2, 2)], [torch.ones(2, 2)], at, at)
""")


def test_a_child_of_fork_can_transfer() -> None:
    run_python("""
import os, torch, torch_hicache
def transfer():
    dst, src, at = torch.zeros(3000, 400), torch.ones(3000, 400), torch.arange(3000)
    torch.ops.hicache.transfer_kv([dst], [src], at, at.flip(0))
    return bool((dst == 1).all())
torch.set_num_threads(1)
assert transfer()
child = os.fork()
if child == 0:
    os._exit(0 if transfer() else 1)
assert os.waitpid(child, 0)[1] == 0
""")


def test_public_names_exist_and_are_documented() -> None:
    for name in torch_hicache.__all__:
        assert getattr(torch_hicache, name) is not None
    for name in ("transfer_kv", "check_errors", "empty_host", "device_view", "backends"):
        assert getattr(torch_hicache, name).__doc__, name
    assert isinstance(torch_hicache.__version__, str)


def test_the_function_is_the_op() -> None:
    dst, src, at = torch.zeros(4, 6, 2), torch.ones(4, 6, 2), torch.tensor([1, 2])
    count = torch.tensor(1)
    torch_hicache.transfer_kv(
        (dst,), (src,), at, at, slot_dim=1, count=count, method="kernel", max_blocks=3
    )
    expected = torch.zeros(4, 6, 2)
    expected[:, 1] = 1
    assert torch.equal(dst, expected)


def test_backends_say_what_is_missing_and_how_to_get_it() -> None:
    known = {backend.name: backend for backend in torch_hicache.backends()}
    assert list(known) == ["cpu", "cuda", "hip", "ascend"]
    assert known["cpu"].loaded
    for backend in known.values():
        assert backend.loaded or (backend.reason and backend.remedy)
        assert backend.built or not backend.loaded
    assert torch_hicache.backends() == torch_hicache.backends()


def test_every_key_has_an_implementation() -> None:
    """The CUDA key always: without the backend it says how to get it."""
    for name in ("hicache::transfer_kv", "hicache::check_errors"):
        for key in ("CPU", "CUDA", "Meta"):
            assert torch._C._dispatch_has_kernel_for_dispatch_key(name, key), (name, key)


def test_the_fallback_of_a_missing_backend_gives_the_remedy() -> None:
    backend = _backends.Backend("vendor", "XLA", False, False, "no compiler was found", "install one")
    known = list(_backends._fallbacks)
    try:
        _backends._register_fallback(backend, "XLA")
        text = "the vendor backend is not loaded: no compiler was found. To get it, install one."
        at = torch.tensor([0])
        keys = torch._C.DispatchKeySet(torch._C.DispatchKey.XLA)
        with pytest.raises(RuntimeError) as error:
            torch.ops.hicache.transfer_kv.default.redispatch(keys, [], [], at, at)
        assert str(error.value) == f"[transfer_kv] {text}"
    finally:
        for library in _backends._fallbacks[len(known) :]:
            library._destroy()
        _backends._fallbacks[:] = known


def test_check_errors_of_the_cpu_has_nothing_to_report() -> None:
    assert torch_hicache.check_errors("cpu") is None


@pytest.mark.parametrize("version", ["2.9.1", "1.13.0", "2.9.0a0+git12"])
def test_an_old_torch_is_refused(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    with pytest.raises(ImportError, match=rf"needs torch 2\.10 or newer, found {version[:3]}"):
        _backends._check_torch_version()


@pytest.mark.parametrize("version", ["2.10.0", "2.14.1+cu130", "2.15.0a0+git1", "3.0.0"])
def test_newer_torches_are_taken(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    _backends._check_torch_version()


def test_a_missing_library_says_how_to_build_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(_backends, "_FOLDER", tmp_path)
    monkeypatch.setattr(_backends, "_backends", {})
    with pytest.raises(ImportError, match=r"_C\.so is missing\. Build it with `pip install \.`"):
        _backends.load()


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name)
def test_libraries_use_the_stable_abi_only(library: Path) -> None:
    """No Python C API, no C++ symbol of torch: one file serves every Python and every torch from 2.10."""
    if shutil.which("nm") is None:
        pytest.skip("nm (binutils) is not installed")
    listed = subprocess.run(
        ["nm", "--dynamic", "--undefined-only", str(library)], capture_output=True, text=True, check=True
    ).stdout
    symbols = [line.split()[-1].split("@")[0] for line in listed.splitlines()]
    assert symbols
    unstable = [
        name
        for name in symbols
        if name.startswith(("Py", "_Py", "_ZN2at", "_ZN3c10", "_ZNK3c10", "_ZN5torch"))
    ]
    assert unstable == []


@pytest.mark.parametrize("library", LIBRARIES, ids=lambda path: path.name)
def test_libraries_name_libtorch_as_needed(library: Path) -> None:
    """Else a process that has not loaded torch yet can't find its symbols."""
    content = library.read_bytes()
    assert b"\0libtorch.so\0" in content
    assert b"libpython" not in content


def test_the_package_is_typed_and_its_record_fits() -> None:
    assert (FOLDER / "py.typed").is_file()
    assert {path.name for path in LIBRARIES} <= {"_C.so", "_cuda.so", "_hip.so", "_ascend.so"}
    record = _backends._build_record()
    assert set(record) == {"built", "missing"}
    assert "cpu" in record["built"]
    assert not set(record["built"]) & set(record["missing"])


def test_ascend_is_loaded_with_torch_npu_only() -> None:
    backend = next(backend for backend in torch_hicache.backends() if backend.name == "ascend")
    has_npu = torch._C._get_privateuse1_backend_name() == "npu"
    assert backend.loaded == (backend.built and has_npu)
    if backend.built and not has_npu:
        assert backend.reason == "torch_npu is not imported"
        assert backend.remedy == "install torch_npu and import it before torch_hicache"
