"""Fixtures `device` and `placement`, and the rule that a required backend must not skip.

A test is bound to a backend by `@pytest.mark.backend("cuda")` or by its `device` or `placement`. Where
the backend is missing it skips; with HICACHE_REQUIRE=cuda (a list with commas) every skip of such a test
is a failure, whatever skipped it. Tests that are bound to no backend may skip, say for want of a package.
"""

import os
import signal
from collections.abc import Generator
from pathlib import Path
from types import ModuleType
from typing import Any

import hip_objects
import pytest
import torch

import torch_hicache
from torch_hicache import backends, check_errors, testing

KNOWN = ("cpu", "cuda", "npu")
BACKENDS = (*KNOWN, *(name for name in testing.devices() if name not in KNOWN))
# Of the rest "cuda:1" is for tests of two GPUs, "hip" for those of code for AMD GPUs, which need none.
BINDINGS = (*BACKENDS, "cuda:1", "hip")
REQUIRED = tuple(name for name in os.environ.get("HICACHE_REQUIRE", "").split(",") if name)


def missing_reason(name: str) -> str:
    return hip_objects.missing() if name == "hip" else testing.missing_reason(name)


def pytest_configure(config: pytest.Config) -> None:
    # A shell that runs the suite in the background lets it ignore Ctrl-C, which some tests send.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ["HICACHE_CALIBRATION"] = os.devnull  # no table that this machine's user has stored
    config.addinivalue_line("markers", "backend(name): runs on this device, skips without it")
    hip = next(backend for backend in backends() if backend.name == "hip")
    if os.environ.get("HICACHE_HIP_KEY") and not hip.loaded:
        folder = Path(torch_hicache.__file__).parent
        raise pytest.UsageError(f"HICACHE_HIP_KEY is set, but {folder} has no HIP backend: {hip.reason}")
    for name in REQUIRED:
        if name not in BINDINGS:
            raise pytest.UsageError(f"HICACHE_REQUIRE names '{name}'; there are {', '.join(BINDINGS)}")


def _params(values_of) -> list:
    """One parameter for each value on each backend; one that skips for a backend that is missing."""
    params = []
    for name in BACKENDS:
        mark = pytest.mark.backend(name)
        if missing_reason(name):
            params.append(pytest.param(None, marks=mark, id=name))
        else:
            params += [pytest.param(value, marks=mark, id=str(value)) for value in values_of(name)]
    return params


@pytest.fixture(params=_params(lambda name: [name]))
def device(request: pytest.FixtureRequest) -> str:
    """Every device of this machine, as a string."""
    return request.param


@pytest.fixture(params=_params(testing.placements))
def placement(request: pytest.FixtureRequest) -> testing.Placement:
    """Every place for pools and indices on every device of this machine."""
    return request.param


def _checked_placements(name: str) -> list[testing.Placement]:
    return [placement for placement in testing.placements(name) if placement.checks_indices]


@pytest.fixture(params=_params(_checked_placements))
def checked_placement(request: pytest.FixtureRequest) -> testing.Placement:
    """The placements whose indices the host reads: duplicates are resolved, overlap is refused."""
    return request.param


@pytest.fixture
def sim() -> Generator[Any, None, None]:
    """The simulated driver under torch_npu, without counts and faults; what is made once is made."""
    import ascend_sim

    if not ascend_sim.FOLDER:
        pytest.skip(ascend_sim.REASON)
    simulator = ascend_sim.Simulator()
    at = torch.tensor([0]).to("npu")
    row = torch.zeros(1, 4).to("npu")
    torch.ops.hicache.transfer_kv([row], [row], at, at)
    torch.npu.synchronize()
    simulator.forget()
    yield simulator
    torch.npu.synchronize()
    simulator.forget()


def _module_of(name: str) -> ModuleType:
    """torch.cuda of "cuda:1"."""
    return getattr(torch, name.partition(":")[0])


@pytest.fixture(autouse=True)
def _no_error_is_left(request: pytest.FixtureRequest) -> Generator[None, None, None]:
    """A bad index that a kernel recorded must not surface in the next test."""
    yield
    for mark in request.node.iter_markers("backend"):
        name = mark.args[0]
        device = name.partition(":")[0]
        if device in testing.devices() and device != "cpu" and _module_of(name).is_initialized():
            check_errors(name)


def pytest_runtest_setup(item: pytest.Item) -> None:
    for mark in item.iter_markers("backend"):
        if reason := missing_reason(mark.args[0]):
            pytest.skip(reason)


def _fail(report: pytest.TestReport | pytest.CollectReport, name: str) -> None:
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
    reason = getattr(report, "wasxfail", reason)
    report.outcome = "failed"
    report.longrepr = f"HICACHE_REQUIRE={name}: a skip is a failure ({reason})"


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item):
    report = yield
    bound = {mark.args[0] for mark in item.iter_markers("backend")}
    for name in REQUIRED:
        if report.skipped and name in bound:
            _fail(report, name)
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report(collector: pytest.Collector):
    """The same for a whole file of one backend, such as test_cuda.py."""
    report = yield
    for name in REQUIRED:
        if report.skipped and name in Path(collector.path).stem.split("_"):
            _fail(report, name)
    return report
