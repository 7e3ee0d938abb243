"""`hicache replay --tier3`: the trace over three tiers, every restored row verified."""

import json
import signal
import subprocess
import sys
import time
from typing import Any

import pytest
from store_processes import Master, Owner, free_port
from test_trace import real_trace

from torch_hicache import Ticket
from torch_hicache.models import MODELS
from torch_hicache.replay import Replay, ReplayOptions, ReplayResult
from torch_hicache.trace import Request, generate_trace

# 64 blocks of 64 KiB on the device, 256 in the host pool.
POOLS = ("--device-bytes", "4M", "--host-bytes", "16M")


def replay(master: str, *arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "torch_hicache", "replay", "--json", "--device", "cpu", *POOLS),
            *("--tier3", f"mooncake://{master}", "--tier3-deadline-ms", "5000", *arguments),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


@pytest.mark.parametrize("layout", ["page_first", "layer_first"])
def test_blocks_come_back_from_the_third_tier(layout: str, shared_master: Master) -> None:
    arguments = ("--requests", "300", "--layout", layout, "--seed", "7")
    first = replay(shared_master.address, *arguments)
    assert first["hit_rate_tier3"] > 0.01
    assert first["bytes_put_tier3"] > 0
    assert first["bytes_got_tier3"] == first["tier3"]["bytes_got"] > 0
    assert first["rows_verified"] > 0
    assert first["mismatches"] == first["tier3"]["pages_corrupt"] == 0
    hits = sum(first[f"hit_rate_{tier}"] for tier in ("device", "host", "tier3"))
    assert hits <= 1
    # Another process with the same blocks finds those of the first, too: some twice as many hits.
    # One with other blocks (below) has as many as the first.
    second = replay(shared_master.address, *arguments)
    assert second["hit_rate_tier3"] > 1.5 * first["hit_rate_tier3"]
    assert second["mismatches"] == 0
    # Of another seed the same ids stand for other bytes.
    other = replay(shared_master.address, *arguments[:-1], "8")
    assert other["hit_rate_tier3"] < 1.5 * first["hit_rate_tier3"]
    assert other["mismatches"] == 0


def test_the_published_trace_over_three_tiers(master: Master) -> None:
    trace = real_trace()
    with Owner(master.address, 512 << 20):
        run = replay(master.address, str(trace), "--requests", "400", "--layout", "page_first")
    assert run["requests"] == 400
    assert run["hit_rate_tier3"] > 0.02
    assert run["rows_verified"] > 0
    assert run["mismatches"] == 0


def test_the_process_may_lend_the_memory_itself(master: Master) -> None:
    run = replay(master.address, "--requests", "200", "--layout", "page_first", "--tier3-bytes", "256M")
    assert run["hit_rate_tier3"] > 0.01
    assert run["mismatches"] == 0


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("whose", ["master", "owner"])
def test_a_replay_outlives_its_store(
    whose: str, end: signal.Signals, master: Master, owner: Owner
) -> None:
    options = ReplayOptions(
        MODELS["gqa_8b"],
        num_layers=4,
        block_tokens=4,
        device_bytes=4 << 20,
        host_bytes=16 << 20,
        layout="page_first",
        tier3=f"mooncake://{master.address}",
        tier3_deadline_seconds=0.5,
    )
    replay = Replay(options)
    hits_before_the_end = 0

    def after_100(result: ReplayResult) -> None:
        nonlocal hits_before_the_end
        if len(result.records) == 100:
            hits_before_the_end = result.total("tier3_hits")
            (master if whose == "master" else owner).signal(end)

    requests: list[Request] = generate_trace(200)
    try:
        result = replay.run(requests, on_served=after_100)
    finally:
        replay.close()
    assert len(result.records) == 200
    assert hits_before_the_end > 0
    assert result.mismatches == 0
    assert result.tier3 is not None
    # A killed owner's pages fail one by one, or not in time.
    assert result.tier3.outages >= (whose == "master" or end == signal.SIGSTOP)


def test_a_block_is_put_only_when_its_store_is_done(
    shared_master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stores are late, and the host pool has room for two blocks: they leave it right behind their store.
    The device pool has two pages to spare, so that no request waits for a store."""
    transfer = Ticket._transfer

    def late(ticket: Ticket, *arguments: Any) -> None:
        if ticket.direction == "store":
            time.sleep(0.05)
        transfer(ticket, *arguments)

    monkeypatch.setattr(Ticket, "_transfer", late)
    options = ReplayOptions(
        MODELS["gqa_8b"],
        num_layers=4,
        block_tokens=4,
        device_bytes=32 << 16,
        host_bytes=2 << 16,
        layout="page_first",
        seed=31,
        tier3=f"mooncake://{shared_master.address}",
        tier3_deadline_seconds=5.0,
    )
    prompts = [(2 * i, 2 * i + 1) for i in range(20)] * 2
    replay = Replay(options)
    try:
        result = replay.run([Request(0, 1024, 1, prompt) for prompt in prompts])
    finally:
        replay.close()
    assert result.total("tier3_hits") > 0
    assert result.mismatches == 0


def test_a_replay_without_a_master_says_so() -> None:
    address = f"127.0.0.1:{free_port()}"
    done = subprocess.run(
        [sys.executable, "-m", "torch_hicache", "replay", "--tier3", f"mooncake://{address}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert f"[MooncakeTier] no Mooncake master answers at {address}" in done.stderr


def test_the_table_has_the_third_tier(shared_master: Master) -> None:
    command = [sys.executable, "-m", "torch_hicache", "replay", *POOLS, "--requests", "100"]
    command += ["--device", "cpu", "--tier3", f"mooncake://{shared_master.address}"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    for row in ("tier3 hits", "tier3 put", "tier3 get", "tier3 misses", "0 corrupt"):
        assert row in done.stdout
