"""The third tier's parts that need no store: pieces of pages, calls with deadlines, the URL."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError

import pytest
import torch

from torch_hicache import HostPool, PlaneSpec
from torch_hicache.cli import main
from torch_hicache.deadline import Breaker, Calls
from torch_hicache.integrations import mooncake_client
from torch_hicache.layout import LAYOUTS
from torch_hicache.page_pieces import PagePieces
from torch_hicache.tier import check_tier_url, open_tier

# Two planes of one shape share an allocation; "scale" has its own, of odd rows.
PLANES = (
    PlaneSpec("key", (2, 6), torch.bfloat16),
    PlaneSpec("value", (2, 6), torch.bfloat16),
    PlaneSpec("scale", (2, 3), torch.uint8),
)


def pool_of(layout: str, page_size: int = 5, num_pages: int = 7) -> HostPool:
    pool = HostPool(PLANES, [1, 4, 6], num_pages * page_size, "cpu", layout, page_size)
    for seed, buffer in enumerate(pool.buffers):
        buffer.view(torch.uint8).random_(generator=torch.Generator().manual_seed(seed))
    return pool


# --- Pieces of pages ------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [1, 5])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_pieces_of_a_page_are_its_bytes_and_no_others(layout: str, page_size: int) -> None:
    pool = pool_of(layout, page_size)
    pieces = PagePieces(pool)
    assert pieces.page_bytes == page_size * pool.bytes_per_slot
    assert len(pieces.sizes) == (9 if layout == "layer_first" else 3)
    for page in (0, 3, 6):
        before = [stack.view(torch.uint8).clone() for stack in pool.stacks("page")]
        for view, size in zip(pieces.views(page), pieces.sizes, strict=True):
            assert len(view) == size
            torch.frombuffer(view, dtype=torch.uint8).bitwise_xor_(0xFF)
        for stack, old in zip(pool.stacks("page"), before, strict=True):
            old[:, page] ^= 0xFF
            assert torch.equal(stack.view(torch.uint8), old)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_addresses_are_those_of_the_views(layout: str) -> None:
    pool = pool_of(layout)
    pieces = PagePieces(pool)
    for page in range(7):
        for address, view in zip(pieces.addresses(page), pieces.views(page), strict=True):
            inside = [start <= address < start + nbytes for start, nbytes in pieces.regions]
            assert sum(inside) == 1
            start, _ = pieces.regions[inside.index(True)]
            buffer = pool.buffers[inside.index(True)].flatten().view(torch.uint8)
            assert bytes(buffer[address - start :][: len(view)].tolist()) == bytes(view)


# --- Calls and the breaker ------------------------------------------------------------------------------


def test_a_call_that_hangs_leaves_the_others_a_thread() -> None:
    calls, release = Calls("test", 2), threading.Event()
    hanging = calls.start(release.wait)
    assert calls.start(lambda: 7).result(30) == 7
    with pytest.raises(FutureTimeoutError):
        hanging.result(0.01)
    assert not hanging.cancel()  # it runs
    second = calls.start(release.wait)
    waiting = calls.start(lambda: 8)
    eventually(second.running)
    assert waiting.cancel()  # it never will
    assert not calls.close(0.01)
    release.set()
    assert hanging.result(30)


def test_what_a_call_raises_reaches_who_waits() -> None:
    def fail() -> None:
        raise RuntimeError("as told")

    calls = Calls("test", 1)
    with pytest.raises(RuntimeError, match="as told"):
        calls.start(fail).result(30)
    assert calls.close(30)


def test_the_breaker_opens_again_only_after_a_probe_that_succeeds() -> None:
    probes: list[Future[bool]] = []

    def probe() -> "Future[bool]":
        probes.append(Future())
        return probes[-1]

    breaker = Breaker(probe, retry_seconds=0.01)
    assert breaker.allows()
    breaker.trip()
    breaker.trip()
    assert breaker.num_trips == 1
    eventually(lambda: not breaker.allows() and len(probes) == 1)
    time.sleep(0.02)
    assert not breaker.allows()
    assert len(probes) == 1  # one at a time
    probes[0].set_result(False)
    eventually(lambda: not breaker.allows() and len(probes) == 2)
    probes[1].set_exception(RuntimeError())
    eventually(lambda: not breaker.allows() and len(probes) == 3)
    probes[2].set_result(True)
    assert breaker.allows()
    breaker.trip()
    assert not breaker.allows()
    assert breaker.num_trips == 2


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.002)


# --- The URL and the package ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "mooncake://host",
        "mooncake://:5",
        "mooncake://host:70000",
        "mooncake://host:5/path",
        "mooncake://user@host:5",
        "http://host:5",
        "host:5",
        "",
    ],
)
def test_a_url_of_another_form_is_refused(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=r"^\[tier\] a third tier must be mooncake://host:port, got"):
        check_tier_url(url)
    assert main(["replay", "--tier3", url]) == 2
    assert "--tier3: must be mooncake://HOST:PORT" in capsys.readouterr().err


def test_a_url_names_host_and_port() -> None:
    assert check_tier_url("mooncake://10.0.0.5:50051") == ("10.0.0.5", 50051)


def test_bytes_are_lent_to_a_tier_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", "--tier3-bytes", "1G"]) == 2
    assert "--tier3-bytes needs the --tier3" in capsys.readouterr().err


def test_a_missing_package_is_named_with_its_install_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def not_installed(package: str) -> str:
        raise mooncake_client.PackageNotFoundError(package)

    monkeypatch.setattr(mooncake_client, "version", not_installed)
    install = r"\(pip install mooncake-transfer-engine-non-cuda xxhash\)"
    with pytest.raises(ImportError, match=rf"^\[MooncakeTier\] needs Mooncake Store.*{install}"):
        open_tier("mooncake://127.0.0.1:1", pool_of("page_first"), namespace="n")
    assert main(["replay", "--device", "cpu", "--tier3", "mooncake://127.0.0.1:1"]) == 2
    assert "[MooncakeTier] needs Mooncake Store" in capsys.readouterr().err
