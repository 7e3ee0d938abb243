"""MooncakeTier when its store is not well: all is a miss, soon, and no page is ever wrong or torn."""

import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from pages import (
    contents,
    fill,
    first_bytes,
    large_pool,
    open_tier,
    poisoned,
    same,
    small_pool,
    wanted,
)
from store_processes import Master, Owner, expect, free_port, start_python

from torch_hicache import HostPool
from torch_hicache.integrations.mooncake import MooncakeTier

KEYS = ["first", "second", "third", "fourth"]
PAGES = [0, 1, 2, 3]
PATIENCE_SECONDS = 60


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.05)


def put_pages(tier: MooncakeTier, pool: HostPool) -> None:
    """More than once where a busy machine does not keep a short deadline."""
    fill(pool, KEYS, PAGES)
    eventually(lambda: tier.put(KEYS, PAGES) == [True] * 4)


def all_come_back(tier: MooncakeTier, pool: HostPool) -> bool:
    """All pages, right, or none of it counts; no page is ever wrong."""
    poisoned(pool)
    before = contents(pool)
    found = tier.get(KEYS, [4, 5, 6, 7])
    if not all(found):
        return False
    assert same(contents(pool), wanted(pool, before, KEYS, [4, 5, 6, 7]))
    return True


# --- The master ---------------------------------------------------------------------------------------


def test_with_a_killed_master_all_is_a_miss_at_once(master: Master, owner: Owner) -> None:
    pool = large_pool(8)
    with open_tier(pool, master.address, deadline_seconds=0.05) as tier:
        put_pages(tier, pool)
        master.kill()
        before = tier.stats()
        started = time.monotonic()
        for _ in range(20):
            assert tier.get(KEYS, [4, 5, 6, 7]) == [False] * 4
            assert tier.put(["other"], [0]) == [False]
            assert tier.contains(KEYS) == [False] * 4
        # Each of the client's own calls blocks for 4.3 s then.
        assert time.monotonic() - started < 4
        stats = tier.stats()
        assert stats.outages == before.outages + 1
        assert stats.calls_abandoned <= before.calls_abandoned + 1  # nobody waits a second time


def test_a_master_that_hangs_is_given_up_and_comes_back(master: Master, owner: Owner) -> None:
    pool = large_pool(8)
    with open_tier(pool, master.address, deadline_seconds=0.3, retry_seconds=0.2) as tier:
        put_pages(tier, pool)
        before = tier.stats()
        master.signal(signal.SIGSTOP)
        assert tier.get(KEYS, [4, 5, 6, 7]) == [False] * 4
        assert tier.contains(KEYS) == [False] * 4
        assert tier.put(["other"], [0]) == [False]
        stats = tier.stats()  # nothing was asked after the first call
        assert stats.calls_abandoned == before.calls_abandoned + 1
        assert stats.outages == before.outages + 1
        master.signal(signal.SIGCONT)
        eventually(lambda: all_come_back(tier, pool))


def test_a_restarted_master_has_lost_its_keys_and_takes_new_ones(master: Master, owner: Owner) -> None:
    pool = large_pool(8)
    with open_tier(pool, master.address, retry_seconds=0.2) as tier:
        put_pages(tier, pool)
        master.kill()
        assert tier.get(KEYS, [4, 5, 6, 7]) == [False] * 4
        master.start()
        fill(pool, KEYS, PAGES)
        eventually(lambda: tier.put(KEYS, PAGES) == [True] * 4)  # 0 would be told for keys that exist
        eventually(lambda: all_come_back(tier, pool))


def test_a_master_that_hangs_during_a_put_leaves_no_wrong_page(master: Master, owner: Owner) -> None:
    pool = large_pool(24)
    keys = [f"page {i}" for i in range(12)]
    stop = threading.Timer(0.02, lambda: master.signal(signal.SIGSTOP))
    with open_tier(
        pool,
        master.address,
        deadline_seconds=0.3,
        retry_seconds=0.2,
        slowest_bytes_per_second=1e9,
    ) as tier:
        fill(pool, keys, range(12))
        stop.start()
        tier.put(keys, range(12))
        stop.join()
        poisoned(pool)  # the pages change while a call that was given up may read them
        master.signal(signal.SIGCONT)
        eventually(lambda: tier.contains(["absent"]) == [False] and tier.put(["last"], [12]) == [True])
        before = contents(pool)
        found = tier.get(keys, range(12, 24))
        right = [(key, 12 + i) for i, key in enumerate(keys) if found[i]]
        expected = wanted(pool, before, [key for key, _ in right], [page for _, page in right])
        missed = [12 + i for i in range(12) if not found[i]]
        for stack, expected_stack in zip(contents(pool), expected, strict=True):
            for page in set(range(24)) - set(missed):
                assert stack[:, page].equal(expected_stack[:, page])


def test_no_master_at_the_start_is_an_error_that_says_so(master: Master) -> None:
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(RuntimeError, match=rf"no Mooncake master answers at {address} \(.*refused"):
        open_tier(small_pool(1), address)
    master.signal(signal.SIGSTOP)
    with pytest.raises(RuntimeError, match=r"no Mooncake master answers at .* \(setup gave -1\)"):
        open_tier(small_pool(1), master.address)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("whose", ["master", "owner"])
def test_a_process_ends_well_whose_store_is_gone(
    whose: str, end: signal.Signals, master: Master, owner: Owner
) -> None:
    """It does not close its tier, and a call may be under way when it ends."""
    code = """
import sys
sys.path.insert(0, sys.argv[2])
from pages import open_tier, small_pool

tier = open_tier(small_pool(), sys.argv[1], deadline_seconds=0.5)
print(tier.put(["a"], [0]), flush=True)
sys.stdin.readline()
print(tier.get(["a"], [1]), flush=True)
"""
    process = start_python(code, master.address, str(Path(__file__).parent))
    try:
        expect(process, "[True]")
        (master if whose == "master" else owner).signal(end)
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
        expect(process, "[False]")
        assert process.wait(PATIENCE_SECONDS) == 0
    except subprocess.TimeoutExpired:
        process.kill()
        raise


# --- The owner of the memory --------------------------------------------------------------------------


def test_a_killed_owner_takes_its_pages_with_it(master: Master, owner: Owner) -> None:
    pool = large_pool(8)
    with open_tier(pool, master.address, retry_seconds=0.2) as tier:
        put_pages(tier, pool)
        owner.kill()
        assert tier.get(KEYS, [4, 5, 6, 7]) == [False] * 4
        with Owner(master.address, 64 << 20):
            eventually(lambda: all(tier.put([f"new {key}" for key in KEYS], PAGES)))


def test_pages_of_a_call_that_hangs_are_not_handed_out(master: Master, owner: Owner) -> None:
    pool = large_pool(8)
    options = {"deadline_seconds": 0.3, "slowest_bytes_per_second": 1e9, "retry_seconds": 0.2}
    with open_tier(pool, master.address, **options) as tier:
        put_pages(tier, pool)
        before = tier.stats()
        pages = pool.allocate(2, unit="page")
        owner.signal(signal.SIGSTOP)
        assert tier.get(KEYS[:2], pages.tolist()) == [False] * 2
        assert tier.stats().calls_abandoned == before.calls_abandoned + 1
        pool.free(pages, unit="page")
        assert pool.available == 6 * pool.page_size
        eventually(tier._breaker.allows)
        # The pages are the call's, whatever the caller believes.
        assert tier.get(["absent"], pages[:1].tolist()) == [False]
        assert tier.put(["more"], pages[:1].tolist()) == [False]
        owner.signal(signal.SIGCONT)
        eventually(lambda: pool.available == 8 * pool.page_size)
        eventually(lambda: tier.get(KEYS[:2], pages.tolist()) == [True] * 2)


def test_a_page_corrupted_in_the_owners_memory_is_a_miss_until_it_is_put_again(
    master: Master, owner: Owner
) -> None:
    pool = large_pool(8)
    with open_tier(pool, master.address) as tier:
        put_pages(tier, pool)
        assert owner.flip_byte_behind(first_bytes(pool, 2)) == 1
        poisoned(pool)
        before = contents(pool)
        assert tier.get(KEYS, [4, 5, 6, 7]) == [True, True, False, True]
        assert tier.stats().pages_corrupt == 1
        found = contents(pool)
        expected = wanted(pool, before, ["first", "second", "fourth"], [4, 5, 7])
        for stack, expected_stack in zip(found, expected, strict=True):
            for page in (0, 1, 2, 3, 4, 5, 7):
                assert stack[:, page].equal(expected_stack[:, page])
        eventually(lambda: tier.contains(["third"]) == [False])
        put_pages(tier, pool)
        assert all_come_back(tier, pool)
