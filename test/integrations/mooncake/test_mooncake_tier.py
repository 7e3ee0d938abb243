"""MooncakeTier with a master that is well: what comes back, to whom, and what does not fit."""

import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from pages import (
    PLANES,
    contents,
    fill,
    large_pool,
    open_tier,
    poisoned,
    same,
    small_pool,
    wanted,
)
from store_processes import Master, Owner, expect, start_python

from torch_hicache.integrations import mooncake_client
from torch_hicache.integrations.mooncake import MooncakeTier
from torch_hicache.layout import LAYOUTS, PlaneSpec
from torch_hicache.tier import ThirdTier

KEYS = ["first", "second", "third"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_come_back_whole_and_nothing_else_changes(layout: str, shared_master: Master) -> None:
    pool = small_pool(layout=layout, layers=[2, 5, 9])
    with open_tier(pool, shared_master.address, namespace=f"whole {layout}") as tier:
        fill(pool, KEYS, [7, 0, 23])
        assert tier.put(KEYS, [7, 0, 23]) == [True, True, True]
        poisoned(pool)
        before = contents(pool)
        assert tier.get([*KEYS, "absent"], [3, 22, 4, 9]) == [True, True, True, False]
        assert same(contents(pool), wanted(pool, before, KEYS, [3, 22, 4]))
        stats = tier.stats()
    assert (stats.pages_put, stats.pages_got, stats.pages_missed) == (3, 3, 1)
    assert stats.bytes_put == stats.bytes_got == 3 * 16 * pool.bytes_per_slot


def test_a_tier_is_what_the_interface_says(shared_master: Master) -> None:
    with open_tier(small_pool(), shared_master.address) as opened:
        tier: ThirdTier = opened
        assert tier.put([], []) == tier.get([], []) == tier.contains([]) == []
    tier.close()  # once more does nothing
    for call in (lambda: tier.put(["k"], [0]), lambda: tier.contains(["k"])):
        with pytest.raises(RuntimeError, match="needs an open tier, this one is closed"):
            call()


def test_pages_of_many_pieces_go_in_many_calls(shared_master: Master) -> None:
    """512 layers of 16 rows of 64 bytes: 8 MiB are 8,192 pieces, more than the client queues."""
    planes = [PlaneSpec("key", (64,), torch.uint8)]
    pool = small_pool(layout="layer_first", layers=512, planes=planes)
    keys = [f"piece {page}" for page in range(24)]
    with open_tier(pool, shared_master.address, namespace="pieces") as tier:
        fill(pool, keys, range(24))
        expected = contents(pool)
        assert all(tier.put(keys, range(24)))
        poisoned(pool)
        assert all(tier.get(keys, range(24)))
        assert same(contents(pool), expected)


def test_two_processes_share_a_prefix(shared_master: Master) -> None:
    code = """
import sys
sys.path.insert(0, sys.argv[2])
from pages import fill, open_tier, small_pool

pool = small_pool()
with open_tier(pool, sys.argv[1], namespace="shared") as tier:
    fill(pool, ["a", "b", "c"], [1, 2, 3])
    print(tier.put(["a", "b", "c"], [1, 2, 3]), flush=True)
    sys.stdin.readline()
    print(tier.get(["ours"], [9]), flush=True)
    sys.stdin.read()
"""
    pool = small_pool()
    process = start_python(code, shared_master.address, str(Path(__file__).parent))
    try:
        expect(process, "[True, True, True]")
        with open_tier(pool, shared_master.address, namespace="shared") as tier:
            before = contents(pool)
            assert tier.contains(["a", "b", "c", "d"]) == [True, True, True, False]
            assert tier.get(["a", "b", "d"], [20, 10, 11]) == [True, True, False]
            assert same(contents(pool), wanted(pool, before, ["a", "b"], [20, 10]))
            fill(pool, ["ours"], [5])
            assert tier.put(["ours"], [5]) == [True]
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
            expect(process, "[True]")
    finally:
        process.kill()
        process.wait()


def test_what_is_there_already_stays(shared_master: Master) -> None:
    pool = small_pool()
    with open_tier(pool, shared_master.address, namespace="stays") as tier:
        fill(pool, ["key"], [0])
        assert tier.put(["key"], [0]) == [True]
        assert tier.put(["key"], [1]) == [True]  # of other bytes
        poisoned(pool)
        before = contents(pool)
        assert tier.get(["key"], [2]) == [True]
        assert same(contents(pool), wanted(pool, before, ["key"], [2]))


@pytest.mark.parametrize(
    "other",
    [
        {"namespace": "another model"},
        {"layers": [0, 1, 3]},
        {"layout": "layer_first"},
        {"planes": (PlaneSpec("key", (4, 64), torch.float16), *PLANES[1:])},
    ],
    ids=lambda other: next(iter(other)),
)
def test_a_page_of_another_kind_is_a_miss(other: dict, shared_master: Master) -> None:
    pool = small_pool()
    with open_tier(pool, shared_master.address, namespace="kinds") as tier:
        fill(pool, ["key"], [0])
        assert tier.put(["key"], [0]) == [True]
    namespace = other.pop("namespace", "kinds")
    with open_tier(small_pool(**other), shared_master.address, namespace=namespace) as tier:
        assert tier.contains(["key"]) == [False]
        assert tier.get(["key"], [0]) == [False]


def test_a_page_under_a_wrong_key_is_not_handed_out(shared_master: Master) -> None:
    """As if the master had given another object: right bytes, right checksum, wrong key."""
    pool = small_pool()
    with open_tier(pool, shared_master.address, namespace="wrong key") as tier:
        fill(pool, ["right"], [0])
        assert tier.put(["right"], [0]) == [True]
        get, prefix = tier._store.batch_get_into_multi_buffers, tier._prefix

        class Confused:
            """The real client, but for the key that it asks for."""

            def batch_get_into_multi_buffers(self, keys: list[str], *rest: object) -> list[int]:
                return get([prefix + "right"] * len(keys), *rest)

            def __getattr__(self, name: str) -> object:
                return getattr(store, name)

        store, tier._store = tier._store, Confused()
        assert tier.get(["wrong"], [1]) == [False]
        assert tier.get(["right"], [2]) == [True]
        assert tier.stats().pages_corrupt == 1


# --- A full store -------------------------------------------------------------------------------------


def test_a_full_store_evicts_and_never_gives_a_wrong_page(master: Master, owner: Owner) -> None:
    pool = large_pool(8)
    keys = [f"page {i}" for i in range(48)]
    with open_tier(pool, master.address) as tier:
        placed = []
        for start in range(0, 48, 8):
            fill(pool, keys[start : start + 8], range(8))
            placed += tier.put(keys[start : start + 8], range(8))
        assert sum(placed) > 24  # far more than the 16 that the store holds; how many is its own affair
        assert tier.stats().pages_dropped == 48 - sum(placed)
        num_found = 0
        for start in range(0, 48, 8):
            batch = keys[start : start + 8]
            poisoned(pool)
            before = contents(pool)
            found = tier.get(batch, range(8))
            num_found += sum(found)
            right = [(key, page) for page, key in enumerate(batch) if found[page]]
            expected = wanted(pool, before, [key for key, _ in right], [page for _, page in right])
            assert same(contents(pool), expected)
        assert 0 < num_found <= 16


def test_a_store_without_room_drops_pages(master: Master) -> None:
    pool = large_pool(4)
    with Owner(master.address, 64 << 20), open_tier(pool, master.address) as tier:
        keys = [f"kept {i}" for i in range(16)]
        placed = []
        for start in range(0, 16, 4):
            placed += tier.put(keys[start : start + 4], range(4))
        kept = [key for key, was_placed in zip(keys, placed, strict=True) if was_placed]
        assert len(kept) > 10
        for start in range(0, len(kept), 4):
            batch = kept[start : start + 4]
            tier.get(batch, range(len(batch)))  # what was just got can't be evicted
        started = time.monotonic()
        assert tier.put([f"more {i}" for i in range(4)], range(4)) != [True] * 4
        assert time.monotonic() - started < 5
        assert tier.stats().outages == 0


@pytest.mark.parametrize("max_leased_pages", [3, 1000])
def test_checks_do_not_keep_the_store_from_evicting(
    max_leased_pages: int, master: Master, owner: Owner
) -> None:
    """Beyond the limit nothing is asked. Without it, a sweep over all keys closes the store for 10 s."""
    pool = large_pool(16)
    with (
        open_tier(pool, master.address) as writer,
        open_tier(large_pool(1), master.address, max_leased_pages=max_leased_pages) as reader,
    ):
        keys = [f"page {i}" for i in range(15)]
        for i, key in enumerate(keys):
            writer.put([key], [i])
        found = reader.contains(keys)
        more = [writer.put([f"more {i}"], [i])[0] for i in range(8)]
        if max_leased_pages == 3:
            retry_until = time.monotonic() + 4  # it evicts in the background: late on a busy machine
            while not all(more) and time.monotonic() < retry_until:
                more = [was_put or writer.put([f"more {i}"], [i])[0] for i, was_put in enumerate(more)]
            assert sum(found) == 3
            assert reader.stats().checks_withheld > 8
            assert all(more)
        else:
            assert sum(found) > 10
            assert reader.stats().checks_withheld == 0
            assert not all(more)


def test_a_page_that_was_got_no_longer_counts_as_checked(shared_master: Master) -> None:
    pool = small_pool()
    keys = ["x", "y", "z"]
    with open_tier(pool, shared_master.address, namespace="checked", max_leased_pages=2) as tier:
        assert all(tier.put(keys, [0, 1, 2]))
        assert tier.contains(keys) == [True, True, False]
        assert tier.contains(["z"]) == [False]
        assert tier.get(["x"], [3]) == [True]
        assert tier.contains(["z"]) == [True]


# --- Arguments and packages ---------------------------------------------------------------------------


def test_bad_arguments_are_refused_before_anything_is_done(shared_master: Master) -> None:
    pool = small_pool(4)
    with open_tier(pool, shared_master.address, namespace="arguments") as tier:
        for keys, pages, error, text in (
            (["a"], [0, 1], ValueError, "the same length, got 1 and 2"),
            (["a", ""], [0, 1], ValueError, "strings of one or more characters, got '' at position 1"),
            ([7], [0], ValueError, "got 7 at position 0"),
            (["a", "b"], [0, 4], IndexError, "from 0 to 3, got 4 at position 1"),
            (["a", "b"], [0, -1], IndexError, "got -1 at position 1"),
            (["a", "b"], [2, 2], ValueError, "once each"),
        ):
            for call in (tier.put, tier.get):
                with pytest.raises(error, match=text):
                    call(keys, pages)
        assert tier.contains(["a"]) == [False]
        assert tier.stats().outages == 0


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"master": "nowhere"}, "master must be host:port, got 'nowhere'"),
        ({"master": "host:99999"}, "master must be host:port"),
        ({"namespace": ""}, "namespace must say whose pages"),
        ({"segment_bytes": -1}, "segment_bytes must be 0 or more, got -1"),
        ({"protocol": "smoke"}, "protocol must be one of tcp, rdma, got 'smoke'"),
        ({"deadline_seconds": 0}, "deadline_seconds must be above 0 and finite, got 0"),
        ({"max_leased_pages": -1}, "max_leased_pages must be 0 or more, got -1"),
    ],
)
def test_bad_options_are_refused(options: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        MooncakeTier(small_pool(1), **({"master": "127.0.0.1:1", "namespace": "n"} | options))


@pytest.mark.skipif(any(Path("/sys/class/infiniband").glob("*")), reason="this machine has RDMA")
def test_rdma_is_refused_where_the_client_would_take_tcp_instead() -> None:
    with pytest.raises(ValueError, match="needs an RDMA device, this machine has none"):
        MooncakeTier(small_pool(1), master="127.0.0.1:1", namespace="n", protocol="rdma")


@pytest.mark.parametrize("found", ["0.3.12.post1", "0.3.14", "1.0", "nonsense"])
def test_an_unknown_version_is_refused(found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mooncake_client, "version", lambda package: found)
    text = rf"must be 0\.3\.13 or newer, and older than 0\.3\.14, got {found}"
    with pytest.raises(RuntimeError, match=text):
        MooncakeTier(small_pool(1), master="127.0.0.1:1", namespace="n")


def test_settings_that_come_too_late_are_told(shared_master: Master) -> None:
    code = """
import os, sys, warnings
for name in [name for name in os.environ if name.startswith("MC_")]:
    del os.environ[name]
import mooncake
sys.path.insert(0, sys.argv[2])
from pages import open_tier, small_pool

with warnings.catch_warnings(record=True) as seen:
    warnings.simplefilter("always")
    open_tier(small_pool(1), sys.argv[1]).close()
print([str(w.message) for w in seen if "MooncakeTier" in str(w.message)])
"""
    arguments = [shared_master.address, str(Path(__file__).parent)]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
    )
    assert "imported before its settings were made" in done.stdout
    assert "MC_RPC_TIMEOUT_MS=500" in done.stdout


def test_the_adapter_imports_nothing_of_mooncake_until_it_is_used() -> None:
    code = (
        "import sys, torch_hicache.integrations.mooncake, torch_hicache.tier, torch_hicache.cli\n"
        "print([name for name in ('mooncake', 'xxhash') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_missing_checksum_package_is_named_too() -> None:
    code = (
        "import sys, torch_hicache as h, torch\n"
        "sys.modules['xxhash'] = None\n"
        "from torch_hicache.tier import open_tier\n"
        "pool = h.HostPool([h.PlaneSpec('k', (2,), torch.int8)], 1, 4)\n"
        "try: open_tier('mooncake://127.0.0.1:1', pool, namespace='n')\n"
        "except ImportError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("[MooncakeTier] needs xxhash, which is not installed (pip install")
