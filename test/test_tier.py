"""The third tier's parts that need no store: pieces of pages, calls with deadlines, the URL, and what
becomes of a client's answers."""

import ctypes
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from hashlib import blake2b
from typing import Any

import pytest
import torch

from torch_hicache import HostPool, PlaneSpec
from torch_hicache.cli import main
from torch_hicache.deadline import Breaker, Calls
from torch_hicache.integrations import mooncake, mooncake_client
from torch_hicache.integrations.mooncake import MooncakeTier
from torch_hicache.integrations.mooncake_client import Connection
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


def test_a_probe_says_nothing_of_failures_since_it_was_started() -> None:
    probes: list[Future[bool]] = []

    def probe() -> "Future[bool]":
        probes.append(Future())
        return probes[-1]

    breaker = Breaker(probe, retry_seconds=0.001)
    breaker.trip()
    eventually(lambda: not breaker.allows() and len(probes) == 1)
    breaker.trip()  # a call that was under way
    probes[0].set_result(True)
    assert not breaker.allows()
    eventually(lambda: not breaker.allows() and len(probes) == 2)
    probes[1].set_result(True)
    assert breaker.allows()
    assert breaker.num_trips == 1


def test_a_probe_that_can_not_be_started_is_tried_again() -> None:
    started: list[int] = []

    def probe() -> "Future[bool]":
        started.append(0)
        if len(started) == 1:
            raise RuntimeError("no thread")
        if len(started) == 2:
            raise KeyboardInterrupt
        future: Future[bool] = Future()
        future.set_result(True)
        return future

    breaker = Breaker(probe, retry_seconds=0.001)
    breaker.trip()
    eventually(lambda: not breaker.allows() and len(started) == 1)
    with pytest.raises(KeyboardInterrupt):
        eventually(breaker.allows)
    eventually(breaker.allows)
    assert len(started) == 3


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
        "mooncake://host:0",
        "mooncake://h h:1",
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


@pytest.mark.parametrize("url", [5, None, b"mooncake://host:5"])
def test_what_is_no_string_is_no_url(url: Any) -> None:
    with pytest.raises(ValueError, match=r"a third tier must be mooncake://host:port, got"):
        check_tier_url(url)


@pytest.mark.parametrize("master", ["h h:1", "host:0", ":1", 5, None])
def test_a_master_of_another_form_is_refused(master: Any) -> None:
    with pytest.raises(ValueError, match=r"\[MooncakeTier\] master must be host:port, got"):
        Connection(master)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({}, "missing a required argument: 'namespace'"),
        ({"namespace": "n", "master": "host:5"}, "multiple values for keyword argument 'master'"),
        ({"namespace": "n", "colour": 1}, "unexpected keyword argument 'colour'"),
    ],
)
def test_options_of_another_name_are_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=rf"^\[tier\] options must be those of MooncakeTier.*{text}"):
        open_tier("mooncake://127.0.0.1:1", pool_of("page_first"), **options)


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), float("nan"), "1", None])
@pytest.mark.parametrize("name", ["deadline_seconds", "slowest_bytes_per_second", "retry_seconds"])
def test_seconds_and_rates_are_finite(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"{name} must be above 0 and finite, got"):
        MooncakeTier(pool_of("page_first"), master="host:5", namespace="n", **{name: value})


def test_options_of_a_tier_need_one(capsys: pytest.CaptureFixture[str]) -> None:
    for option, value in (("--tier3-bytes", "1G"), ("--tier3-deadline-ms", "50")):
        assert main(["replay", option, value]) == 2
        assert f"[replay] {option} needs the --tier3" in capsys.readouterr().err


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


# --- A client's answers ---------------------------------------------------------------------------------


class PlayedClient:
    """Mooncake's client in this process. `answer` changes what the next calls of a method give."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.answer: dict[str, Callable[[list[int]], Any]] = {}

    def register_buffer(self, address: int, nbytes: int) -> int:
        return 0

    def unregister_buffer(self, address: int) -> int:
        return 0

    def close(self) -> int:
        return 0

    def remove(self, key: str, force: bool) -> int:
        return 0 if self.objects.pop(key, None) else mooncake_client.NOT_FOUND

    def batch_is_exist(self, keys: list[str]) -> Any:
        is_probe = keys[0] == "hicache/absent"
        return self._given("probe" if is_probe else "exist", [int(key in self.objects) for key in keys])

    def batch_put_from_multi_buffers(
        self, keys: list[str], addresses: list[list[int]], sizes: list[list[int]]
    ) -> Any:
        for key, places, lengths in zip(keys, addresses, sizes, strict=True):
            self.objects[key] = b"".join(map(ctypes.string_at, places, lengths))
        return self._given("put", [0] * len(keys))

    def batch_get_into_multi_buffers(
        self, keys: list[str], addresses: list[list[int]], sizes: list[list[int]]
    ) -> Any:
        codes = []
        for key, places, lengths in zip(keys, addresses, sizes, strict=True):
            data = self.objects.get(key)
            codes.append(mooncake_client.NOT_FOUND if data is None else len(data))
            for address, length in zip(places, lengths, strict=True):
                if data is not None:
                    ctypes.memmove(address, data[:length], length)
                    data = data[length:]
        return self._given("get", codes)

    def _given(self, method: str, codes: list[int]) -> Any:
        return self.answer.get(method, list)(codes)


class PlayedHash:
    """Of the shape of xxhash's."""

    def __init__(self, data: bytes = b"", seed: int = 0) -> None:
        self._hash = blake2b(data, digest_size=8, salt=seed.to_bytes(16, "big"))
        self.update = self._hash.update

    def intdigest(self) -> int:
        return int.from_bytes(self._hash.digest(), "big")


@pytest.fixture
def client(monkeypatch: pytest.MonkeyPatch) -> PlayedClient:
    client = PlayedClient()
    monkeypatch.setattr(mooncake, "check_version", lambda: "0.3.13")
    monkeypatch.setattr(mooncake, "_hash_class", lambda: PlayedHash)
    monkeypatch.setattr(Connection, "open", lambda connection: client)
    return client


def tier_on(pool: HostPool, deadline_seconds: float = 30.0) -> MooncakeTier:
    return MooncakeTier(
        pool,
        master="host:5",
        namespace="n",
        deadline_seconds=deadline_seconds,
        retry_seconds=0.01,
    )


def raises(error: Exception) -> Callable[[list[int]], Any]:
    def answer(codes: list[int]) -> Any:
        raise error

    return answer


@pytest.mark.parametrize(
    "answer",
    [
        *map(raises, (RuntimeError("x"), ValueError("x"), MemoryError(), IndexError("x"), TypeError())),
        lambda codes: codes[:-1],
        lambda codes: [*codes, 0],
        lambda codes: [],
        lambda codes: None,
        lambda codes: [None] * len(codes),
    ],
)
@pytest.mark.parametrize("method", ["probe", "exist", "put", "get"])
def test_whatever_a_client_answers_is_a_miss_and_no_error(
    client: PlayedClient, method: str, answer: Callable[[list[int]], Any]
) -> None:
    pool = pool_of("page_first")
    keys, pages = ["a", "b", "c"], pool.allocate(3, unit="page").tolist()
    wanted = [view.tobytes() for page in pages for view in PagePieces(pool).views(page)]
    with tier_on(pool) as tier:
        assert tier.put(keys, pages) == [True] * 3
        client.answer[method] = answer
        results = {
            "exist": tier.contains(keys) if method in ("exist", "probe") else None,
            "put": tier.put(keys, pages) if method in ("put", "probe") else None,
            "get": tier.get(keys, pages) if method in ("get", "probe") else None,
        }
        assert all(found in (None, [False] * 3) for found in results.values())
        assert tier.stats().outages >= 1
        client.answer.clear()
        eventually(lambda: tier.contains(keys) == [True] * 3)
        assert tier.get(keys, pages) == [True] * 3
        assert wanted == [view.tobytes() for page in pages for view in PagePieces(pool).views(page)]


@pytest.mark.parametrize("method", ["put", "get"])
def test_one_call_is_under_way_while_the_checksum_of_another_is_computed(
    client: PlayedClient, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setattr(mooncake, "_PART_BYTES", 1)  # a call for each page
    tier = tier_on(pool_of("page_first"))
    keys, pages = ["a", "b", "c", "d"], [0, 1, 2, 3]
    assert tier.put(keys, pages) == [True] * 4
    hashed: list[int] = []
    begun: list[int] = []
    ended: list[int] = []
    checksum = tier._checksum

    def counted(key: str, page: int) -> int:
        if method == "get":  # of what the call before has brought
            eventually(lambda: len(begun) > min(len(hashed) + 1, 3))
        hashed.append(page)
        return checksum(key, page)

    def during_another(codes: list[int]) -> list[int]:
        assert len(begun) == len(ended)
        begun.append(len(begun))
        eventually(lambda: len(hashed) >= (min(len(begun) + 1, 4) if method == "put" else begun[-1]))
        ended.append(begun[-1])
        return codes

    monkeypatch.setattr(tier, "_checksum", counted)
    client.answer[method] = during_another
    assert getattr(tier, method)(keys, pages) == [True] * 4
    tier.close()


def test_pages_of_a_call_that_was_given_up_are_left_out(client: PlayedClient) -> None:
    release = threading.Event()
    tier = tier_on(pool_of("page_first"), deadline_seconds=0.3)
    eventually(lambda: tier.put(["a"], [0]) == [True])
    client.answer["get"] = lambda codes: codes if release.wait(30) else []
    eventually(lambda: tier.get(["a"], [3]) == [False] and tier.stats().calls_abandoned > 0)
    del client.answer["get"]
    eventually(lambda: tier.get(["a"], [4]) == [True])
    assert tier.get(["a", "a"], [3, 4]) == [False, True]
    release.set()
    eventually(lambda: tier.get(["a"], [3]) == [True])
    tier.close()


def test_a_string_is_no_list_of_keys(client: PlayedClient) -> None:
    with tier_on(pool_of("page_first")) as tier:
        for call in (lambda: tier.put("ab", [0, 1]), lambda: tier.get("ab", [0, 1])):
            with pytest.raises(ValueError, match=r"keys must be a list of strings, got the string 'ab'"):
                call()
        with pytest.raises(ValueError, match="got the string 'ab'"):
            tier.contains("ab")
        assert client.objects == {}
