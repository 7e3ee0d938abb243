"""The third tier in Mooncake Store beside the store's own unchecked calls, and how soon a miss is known.

    unshare --map-root-user --net python benchmark/bench_mooncake.py    in a network of its own
    python benchmark/bench_mooncake.py --json results.json              and keep the figures

Starts the wheel's master and a process that lends memory, both on the loopback: Mooncake's clients listen
on every interface. "tier" is MooncakeTier.put and get with checksums, "store" the client's own
batch_put_from and batch_get_into of the same pages, in rounds that take turns; medians of the rounds, and
of the ratio of neighbours. Objects are removed after each round, so that every round writes memory that
was touched before. Misses are timed with the master killed: the first `get` after it, and the slowest and
the median of those that follow.
"""

import argparse
import fcntl
import os
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from bench_transfer_kv import MIB, machine, save

from torch_hicache import HostPool, PlaneSpec
from torch_hicache.integrations.mooncake import MooncakeTier
from torch_hicache.integrations.mooncake_client import Connection, check_version

NO_MOONCAKE = 2
_OWNER = """
import sys
from torch_hicache.integrations.mooncake_client import Connection

store = Connection(sys.argv[1], segment_bytes=int(sys.argv[2])).open()
print("ready", flush=True)
sys.stdin.read()
"""
Results = list[dict[str, object]]


def bring_loopback_up() -> None:
    """In a network namespace that has nothing else."""
    if [name for _, name in socket.if_nameindex()] == ["lo"]:
        with socket.socket() as any_socket:
            fcntl.ioctl(any_socket, 0x8914, struct.pack("16sH14x", b"lo", 1))  # SIOCSIFFLAGS, IFF_UP


def free_port() -> int:
    with socket.socket() as unbound:
        unbound.bind(("127.0.0.1", 0))
        return int(unbound.getsockname()[1])


class Store:
    """A master and an owner of memory, as processes."""

    def __init__(self, segment_bytes: int) -> None:
        spec = find_spec("mooncake")
        folder = Path(spec.origin if spec and spec.origin else "").parent
        port = free_port()
        self.address = f"127.0.0.1:{port}"
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the processes
        self.master = subprocess.Popen(
            [
                str(folder / "mooncake_master"),
                "-rpc_address=127.0.0.1",
                f"-rpc_port={port}",
                "-metrics_host=127.0.0.1",
                f"-metrics_port={free_port()}",
                "-logtostderr",
            ],
            stdout=self._log,
            stderr=self._log,
        )
        wait_for(port)
        self.owner = subprocess.Popen(
            [sys.executable, "-c", _OWNER, self.address, str(segment_bytes)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
        )
        assert self.owner.stdout is not None
        if self.owner.stdout.readline().strip() != b"ready":
            raise RuntimeError("the owner of the store's memory did not start")

    def close(self) -> None:
        for process in (self.owner, self.master):
            process.kill()
            process.wait()


def wait_for(port: int) -> None:
    for _ in range(300):
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise RuntimeError("the master did not start")


def pool_of(page_bytes: int, num_pages: int) -> HostPool:
    """One plane of rows of 1 KiB: a page is one piece, as with MLA."""
    tokens = page_bytes // 1024
    plane = PlaneSpec("latent", (512,), torch.bfloat16)
    pool = HostPool([plane], 1, num_pages * tokens, "cpu", "page_first", tokens)
    for buffer in pool.buffers:
        buffer.view(torch.uint8).random_(generator=torch.Generator().manual_seed(0))
    return pool


def seconds(call: Callable[[], list[Any]], is_good: Callable[[Any], bool]) -> float:
    begin = time.perf_counter()
    results = call()
    elapsed = time.perf_counter() - begin
    if not all(is_good(result) for result in results):
        raise RuntimeError(f"pages were not moved: {results[:20]}")
    return elapsed


def bench_rates(address: str, page_bytes: int, total_bytes: int, batch: int, rounds: int) -> Results:
    num_pages = total_bytes // page_bytes
    pool = pool_of(page_bytes, num_pages)
    tier = MooncakeTier(pool, master=address, namespace=f"bench {page_bytes}", deadline_seconds=30)
    plain = Connection(address).open()
    base = pool.buffers[0].data_ptr()
    plain.register_buffer(base, pool.nbytes)
    batches = [range(start, min(start + batch, num_pages)) for start in range(0, num_pages, batch)]
    names = [f"plain {page_bytes} {page}" for page in range(num_pages)]

    def plainly(call: Callable[..., list[int]]) -> list[int]:
        return [
            code
            for pages in batches
            for code in call(
                [names[page] for page in pages],
                [base + page * page_bytes for page in pages],
                [page_bytes] * len(pages),
            )
        ]

    def tiered(call: Callable[..., list[bool]]) -> list[bool]:
        return [done for pages in batches for done in call([names[page] for page in pages], list(pages))]

    times: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        measured = {
            "store put": seconds(lambda: plainly(plain.batch_put_from), lambda code: code == 0),
            "store get": seconds(lambda: plainly(plain.batch_get_into), lambda code: code == page_bytes),
        }
        plain.batch_remove(names, True)
        measured["tier put"] = seconds(lambda: tiered(tier.put), bool)
        measured["tier get"] = seconds(lambda: tiered(tier.get), bool)
        plain.batch_remove([tier._prefix + name for name in names], True)
        if number:  # the first touches the memory
            for name, elapsed in measured.items():
                times.setdefault(name, []).append(elapsed)
    tier.close()
    plain.close()
    results: Results = []
    for way in ("put", "get"):
        ratios = [s / t for s, t in zip(times[f"store {way}"], times[f"tier {way}"], strict=True)]
        gbps = {
            who: num_pages * page_bytes / statistics.median(times[f"{who} {way}"]) / 1e9
            for who in ("store", "tier")
        }
        results.append(
            {
                "section": "mooncake",
                "case": f"{way}, pages of {page_bytes >> 10:,} KiB, batches of {batch}",
                "gbps": gbps["tier"],
                "store_gbps": gbps["store"],
                "of_store": statistics.median(ratios),
                "best_of_store": min(times[f"store {way}"]) / min(times[f"tier {way}"]),
            }
        )
    return results


def bench_misses(store: Store) -> Results:
    pool = pool_of(4 * MIB, 16)
    tier = MooncakeTier(pool, master=store.address, namespace="bench misses")
    keys, pages = [f"page {i}" for i in range(16)], list(range(16))
    tier.put(keys, pages)
    store.master.send_signal(signal.SIGKILL)
    store.master.wait()
    times = []
    for _ in range(1000):
        begin = time.perf_counter()
        found = tier.get(keys, pages)
        times.append(1e3 * (time.perf_counter() - begin))
        if any(found):
            raise RuntimeError("a page came from a store whose master is dead")
        time.sleep(0.01)
    tier.close()
    return [
        {"section": "mooncake", "case": "miss, master killed: the first", "ms": times[0]},
        {"section": "mooncake", "case": "miss, master killed: slowest of 999 more", "ms": max(times[1:])},
        {"section": "mooncake", "case": "miss, master killed: median", "ms": statistics.median(times)},
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="of pages in a round (256)")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="write machine and results here")
    options = parser.parse_args()
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    try:
        print(f"Mooncake {check_version()}", flush=True)
    except (ImportError, RuntimeError) as error:
        print(f"[bench_mooncake] {error}", file=sys.stderr)
        return NO_MOONCAKE
    bring_loopback_up()
    store = Store(4 * options.mib * MIB)
    results: Results = []
    try:
        for page_bytes, batch in ((4 * MIB, 16), (MIB, 64), (64 << 10, 256)):
            total = options.mib * MIB if page_bytes >= MIB else options.mib * MIB // 8
            rows = bench_rates(store.address, page_bytes, total, batch, options.rounds)
            results += rows
            for row in rows:
                print(
                    f"{row['case']:45} {row['gbps']:6.2f} GB/s, store {row['store_gbps']:6.2f} GB/s, "
                    f"{row['of_store']:.2f} of it (of the best rounds {row['best_of_store']:.2f})",
                    flush=True,
                )
        misses = bench_misses(store)
        results += misses
        for row in misses:
            print(f"{row['case']:45} {row['ms']:8.3f} ms", flush=True)
    finally:
        store.close()
    save(options.json, results, {})
    print(machine())
    return 0


if __name__ == "__main__":
    sys.exit(main())
