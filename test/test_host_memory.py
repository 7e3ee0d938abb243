"""empty_host and device_view: what they give, refuse and keep alive. One suite for all kinds.

Kinds that need a device also run on the CPU, with a runtime that is made up ("fake" devices).
"""

import copy
import gc
import pickle
import re
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from fake_runtime import FakeRuntime

from torch_hicache import device_view, dlpack, empty_host, host_kinds
from torch_hicache.host_kinds import HostMemory, HostMemoryKind, HostRequest, register_host_kind
from torch_hicache.testing import check_transfer, fill_pool, storage_bytes

KINDS = [
    pytest.param("cpu", "pageable", marks=pytest.mark.backend("cpu")),
    pytest.param("cpu", "auto", marks=pytest.mark.backend("cpu")),
    pytest.param("cpu", "pinned", marks=pytest.mark.backend("cpu"), id="fake-pinned"),
    pytest.param("cpu", "pinned_elsewhere", marks=pytest.mark.backend("cpu"), id="fake-alias"),
    pytest.param("cpu", "own", marks=pytest.mark.backend("cpu"), id="fake-own"),
    pytest.param("cuda", "pageable", marks=pytest.mark.backend("cuda")),
    pytest.param("cuda", "pinned", marks=pytest.mark.backend("cuda")),
    pytest.param("cuda", "auto", marks=pytest.mark.backend("cuda")),
]
every_kind = pytest.mark.parametrize(("device", "kind"), KINDS)


class _PinnedElsewhere(host_kinds.PinnedKind):
    """On a device whose addresses are not the host's."""

    name = "pinned_elsewhere"


class _Own(HostMemoryKind):
    """As a backend would add one: memory that some library hands out."""

    name = "own"

    def allocate(self, request: HostRequest) -> HostMemory:
        request.budget().check("empty_host", request.nbytes)
        memory = torch.empty(request.nbytes, dtype=torch.uint8)
        return HostMemory(memory.data_ptr(), request.nbytes, memory.set_)


@pytest.fixture(autouse=True)
def runtime(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FakeRuntime | None:
    """The made-up runtime of a case that needs one."""
    case = getattr(getattr(request.node, "callspec", None), "params", {})
    kinds = {"pinned": "same", "pinned_elsewhere": "far", "own": "same"}
    if case.get("device") != "cpu" or case.get("kind") not in kinds or "text" in case:
        return None
    for kind in (_PinnedElsewhere(), _Own()):
        monkeypatch.setitem(host_kinds.KINDS, kind.name, kind)
    return FakeRuntime(kinds[case["kind"]]).install(monkeypatch)


@every_kind
@pytest.mark.parametrize(
    "dtype", [torch.uint8, torch.bfloat16, torch.float8_e4m3fn, torch.complex128, torch.bool]
)
@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5, 11), (4096,), (3, 0, 2), (0,), (1 << 14, 3)])
def test_shape_and_size_are_as_asked(
    device: str, kind: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    """Not rounded to a power of two: the storage is exactly the tensor."""
    tensor = empty_host(shape, dtype, device, kind)
    assert tensor.device.type == "cpu"
    assert tensor.dtype == dtype
    assert tensor.shape == shape
    assert tensor.is_contiguous()
    assert tensor.untyped_storage().nbytes() == tensor.numel() * dtype.itemsize
    fill_pool([tensor.flatten()])
    assert torch.count_nonzero(storage_bytes(tensor)) == storage_bytes(tensor).numel()


@every_kind
def test_two_are_apart_and_views_keep_the_memory(device: str, kind: str) -> None:
    one, two = (empty_host((5, 1000), torch.int32, device, kind).fill_(n) for n in (1, 2))
    view = one[3:, 1::2]
    del one
    gc.collect()
    others = [empty_host((5, 1000), torch.int32, device, kind).fill_(9) for _ in range(4)]
    assert bool((view == 1).all())
    assert bool((two == 2).all())
    assert len(others) == 4


@every_kind
def test_from_several_threads(device: str, kind: str) -> None:
    failures = []

    def work(number: int) -> None:
        for _ in range(20):
            tensor = empty_host((1 << 16,), torch.uint8, device, kind).fill_(number)
            if not bool((tensor == number).all()):
                failures.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


@every_kind
def test_lists_and_sizes_of_torch_are_shapes(device: str, kind: str) -> None:
    assert empty_host([2, 3], torch.uint8, device, kind).shape == (2, 3)
    assert empty_host(torch.Size([2, 3]), torch.uint8, torch.device(device), kind).shape == (2, 3)


@pytest.mark.parametrize(
    ("shape", "device", "kind", "text"),
    [
        (
            (4,),
            "cpu",
            "huge",
            "[empty_host] kind must be one of auto, pinned, pageable, memfabric, got 'huge'.",
        ),
        ((4, -1), "cpu", "auto", "[empty_host] shape must not be negative, got [4, -1]."),
        (
            (4,),
            "cpu",
            "pinned",
            "[empty_host] kind 'pinned' needs an accelerator as device, got cpu; use 'pageable'.",
        ),
    ],
)
def test_refusals(shape: tuple[int, ...], device: str, kind: str, text: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(text)}$"):
        empty_host(shape, torch.uint8, device, kind)


@every_kind
@pytest.mark.parametrize("shape", [(1 << 50,), (1 << 62,), (1 << 40, 1 << 40)])
def test_more_than_there_is_is_a_memory_error(device: str, kind: str, shape: tuple[int, ...]) -> None:
    """With the bytes asked for; what comes after it works."""
    with pytest.raises(MemoryError, match=r"\[empty_host\] .*[0-9,]{10,} bytes"):
        empty_host(shape, torch.bfloat16, device, kind)
    assert empty_host((3,), torch.uint8, device, kind).shape == (3,)


def _kernel_counts() -> dict[str, int]:
    """Kilobytes that the kernel counts for this process."""
    with open("/proc/self/status") as status:
        lines = [line.split() for line in status if line.startswith(("VmLck", "VmPin", "VmSize"))]
    return {line[0]: int(line[1]) for line in lines}


@every_kind
def test_fifty_times_allocated_and_released(device: str, kind: str, runtime: FakeRuntime | None) -> None:
    """Nothing locked, registered or mapped is left over."""
    if runtime:
        runtime.locks = True
    nbytes = 1 << 20

    def cycle() -> dict[str, int]:
        tensor = empty_host((nbytes,), torch.uint8, device, kind).fill_(1)
        counts = _kernel_counts()
        del tensor
        return counts

    during = [cycle() for _ in range(3)]
    before = _kernel_counts()
    during += [cycle() for _ in range(50)]
    after = _kernel_counts()
    assert (after["VmLck:"], after["VmPin:"]) == (before["VmLck:"], before["VmPin:"])
    assert after["VmSize:"] - before["VmSize:"] < 10 * nbytes >> 10
    if runtime and kind != "own":
        assert runtime.log
        assert not runtime.registered
        assert during[-1]["VmLck:"] - after["VmLck:"] == nbytes >> 10


@every_kind
def test_copies_are_plain_memory(device: str, kind: str) -> None:
    """Pickled and copied by value, as torch does with any tensor."""
    tensor = empty_host((5, 7), torch.int16, device, kind)
    fill_pool([tensor])
    for twin in (pickle.loads(pickle.dumps(tensor)), copy.deepcopy(tensor), tensor.clone()):
        assert torch.equal(twin, tensor)
        assert twin.data_ptr() != tensor.data_ptr()
        assert not twin.is_pinned()


@pytest.mark.parametrize(
    ("device", "kind"), [param for param in KINDS if (param.id or "") in ("fake-pinned", "fake-alias")]
)
def test_memory_is_unregistered_with_its_last_view(device: str, kind: str, runtime: FakeRuntime) -> None:
    tensor = empty_host((64, 8), torch.uint8, device, kind).fill_(5)
    part = tensor[1:]
    del tensor
    gc.collect()
    assert bool((part == 5).all())
    assert runtime.verbs() == ["register"]
    del part
    gc.collect()
    assert runtime.verbs() == ["register", "unregister"]


@every_kind
@pytest.mark.parametrize("shape", [(3, 0, 2), (0,)])
def test_no_bytes_are_no_memory(
    device: str, kind: str, shape: tuple[int, ...], runtime: FakeRuntime | None
) -> None:
    assert empty_host(shape, torch.uint8, device, kind).numel() == 0
    assert not runtime or not runtime.log


def test_a_kind_is_added_by_name_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_kinds, "KINDS", dict(host_kinds.KINDS))
    register_host_kind(_Own())
    assert empty_host((4,), torch.uint8, "cpu", "own").shape == (4,)
    for name in ("own", "auto", "pinned"):
        kind = _Own()
        kind.name = name
        with pytest.raises(ValueError, match=rf"^\[host_memory\] there is a kind '{name}' already\.$"):
            register_host_kind(kind)


def test_the_kind_added_last_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """A backend's own memory goes before memory that its kernels can't reach."""
    monkeypatch.setattr(host_kinds, "KINDS", dict(host_kinds.KINDS))
    monkeypatch.setattr(_Own, "is_default_for", lambda self, device: device.type == "cuda")
    register_host_kind(_Own())
    assert host_kinds.choose_kind("auto", torch.device("cuda")).name == "own"
    assert host_kinds.choose_kind("auto", torch.device("cpu")).name == "pageable"


def test_device_view_on_the_cpu_is_the_tensor_itself() -> None:
    tensor = torch.ones(3)
    assert device_view(tensor, "cpu") is tensor


@pytest.mark.backend("cuda")
class TestPinned:
    def test_it_is_page_locked_for_torch_too(self) -> None:
        """A copy by torch from it does not wait for the stream."""
        host = empty_host((1 << 20,), torch.uint8, "cuda").fill_(3)
        assert host.is_pinned()
        device = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        torch.cuda._sleep(100_000_000)
        device.copy_(host, non_blocking=True)
        assert not torch.cuda.current_stream().query()
        torch.cuda.synchronize()
        assert bool((device == 3).all())

    def test_the_memory_is_released(self) -> None:
        host = empty_host((1 << 20,), torch.uint8, "cuda")
        address = host.data_ptr()
        view = device_view(host, "cuda")
        del host
        gc.collect()
        assert torch.ops.hicache.host_device_address(view, address, 1 << 20) != 0
        del view
        gc.collect()
        with pytest.raises(ValueError, match="pageable host memory"):
            torch.ops.hicache.host_device_address(torch.empty(0, device="cuda"), address, 1 << 20)

    def test_unregistering_what_is_not_ours_is_refused(self) -> None:
        host = torch.empty(1 << 20, dtype=torch.uint8).pin_memory()
        on_device = torch.empty(0, device="cuda")
        with pytest.raises(ValueError, match="was not registered here"):
            torch.ops.hicache.unregister_host_memory(on_device, host.data_ptr())
        assert host.is_pinned()

    def test_registering_twice_fails_and_leaves_no_pending_error(self) -> None:
        host = empty_host((1 << 20,), torch.uint8, "cuda")
        on_device = torch.empty(0, device="cuda")
        with pytest.raises(RuntimeError, match="cudaErrorHostMemoryAlreadyRegistered"):
            torch.ops.hicache.register_host_memory(on_device, host.data_ptr(), 1 << 20)
        assert float(torch.ones(4, device="cuda").sum()) == 4.0  # a pending error would surface here
        assert host.is_pinned()

    def test_views_have_the_geometry_of_their_tensor(self) -> None:
        host = empty_host((6, 8, 10), torch.bfloat16, "cuda").zero_()
        for view in (host, host[2:, 1], host.transpose(0, 2), host[:, ::3], host[5, 7, 9], host[:0]):
            on_device = device_view(view, "cuda")
            assert on_device.device == torch.device("cuda", torch.cuda.current_device())
            assert (on_device.dtype, on_device.shape) == (view.dtype, view.shape)
            assert on_device.stride() == view.stride()
            on_device.fill_(2)
            torch.cuda.synchronize()
            assert bool((view == 2).all())
            host.zero_()

    def test_a_view_of_a_view_of_the_device_is_refused(self) -> None:
        view = device_view(empty_host((6,), torch.uint8, "cuda"), "cuda")
        with pytest.raises(ValueError, match=r"tensor must be on the CPU, got cuda:0"):
            device_view(view, "cuda")

    def test_the_owner_lives_as_long_as_any_view(self) -> None:
        host = empty_host((64, 8), torch.uint8, "cuda").fill_(5)
        gc.collect()
        known = len(dlpack._alive)
        part = device_view(host, "cuda")[10:20].t()
        assert len(dlpack._alive) == known + 1
        del host
        gc.collect()
        assert bool((part == 5).all())
        owner = weakref.ref(part)
        del part
        gc.collect()
        assert owner() is None
        assert len(dlpack._alive) == known

    def test_pools_of_pinned_memory_serve_the_cpu(self) -> None:
        """Both pools on the host: the CPU loop, with CPU indices."""
        dst = empty_host((9, 40), torch.uint8, "cuda")
        src = empty_host((9, 40), torch.uint8, "cuda")
        fill_pool([dst])
        fill_pool([src], seed=1)
        check_transfer([dst], [src], torch.tensor([8, 0]), torch.tensor([1, 1]))


@pytest.mark.parametrize(
    "device", [pytest.param(d, marks=pytest.mark.backend(d)) for d in ("cpu", "cuda")]
)
def test_the_interpreter_exits_with_memory_in_use(device: str) -> None:
    """Destructors that run late neither crash nor print."""
    code = f"""
import torch, torch_hicache
pool = torch_hicache.empty_host((1 << 20,), torch.uint8, "{device}").fill_(1)
view = torch_hicache.device_view(pool, "{device}")
class Keeps: pass
keeps = Keeps(); keeps.itself, keeps.view = keeps, view
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("device", ["cuda", "meta"])
def test_without_the_device_the_error_is_a_plain_one(device: str) -> None:
    """No half-made memory, no crash in its destructor."""
    if device == "cuda" and torch.cuda.is_available():
        device = "cuda:99"
    with pytest.raises((RuntimeError, AssertionError, MemoryError)):
        empty_host((4,), torch.uint8, device, "pinned")
    gc.collect()
