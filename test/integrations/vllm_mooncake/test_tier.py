"""HiCacheMooncakeTier under vLLM's real TieringOffloadingSpec and manager, over a real Mooncake Store.

vLLM's worker needs a GPU: the tests write and read the chunks of its primary tier in its place.
"""

import hashlib
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm
from configs import keys_of, make_config
from store_processes import Master, Owner
from torch import Tensor
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext
from vllm.v1.kv_offload.factory import OffloadingSpecFactory

from torch_hicache.integrations.mooncake_client import Connection

MODULE = "torch_hicache.integrations.vllm"
BLOCK_BYTES, CHUNK_BYTES, CHUNKS = 1500, 4096, 6  # two blocks a chunk, and padding
HIT, MISS = LookupResult.HIT, LookupResult.MISS
PATIENCE_SECONDS = 60


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Master]:
    with Master(tmp_path) as running:
        yield running


@pytest.fixture
def owner(master: Master) -> Iterator[Owner]:
    with Owner(master.address, 64 << 20) as running:
        yield running


def bytes_of(key: bytes) -> Tensor:
    seed = int.from_bytes(hashlib.sha256(key).digest()[:7], "little")
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (CHUNK_BYTES,), dtype=torch.uint8, generator=generator)


class Engine:
    """The scheduler's side of one vLLM, by name."""

    def __init__(self, master: Master | None, name: str, *, model: Any = None, **tier: Any) -> None:
        tier = {"deadline_seconds": 5.0} | ({"master": master.address} if master else {}) | tier
        extra_config = {
            "spec_name": "TieringOffloadingSpec",
            "cpu_bytes_to_use": CHUNKS * CHUNK_BYTES,
            "secondary_tiers": [{"type": "HiCacheMooncakeTier", "module_path": MODULE} | tier],
        }
        changes = {"model": model} if model else {}
        self.config = make_config(
            extra_config, worker_kv_bytes_per_block=BLOCK_BYTES, engine_id=name, **changes
        )
        self.manager = OffloadingSpecFactory.create_spec(self.config).get_manager()
        (self.tier,) = self.manager.secondary_tiers
        view = self.manager.primary_tier.get_kv_memoryview()
        self.chunks = torch.frombuffer(view, dtype=torch.uint8).view(view.shape)
        self.chunks.fill_(0xA5)

    def request(self, name: str) -> ReqContext:
        context = ReqContext(req_id=name)
        self.manager.on_new_request(context)
        return context

    def step(self) -> None:
        self.manager.on_schedule_end(ScheduleEndContext(new_req_ids=[], preempted_req_ids=[]))

    def finish_jobs(self) -> None:
        eventually(lambda: self.step() or not self.manager.has_pending_work())

    def store(self, keys: list[Any], context: ReqContext) -> None:
        """As if the worker had, and down into the third tier."""
        output = self.manager.prepare_store(keys, context)
        assert list(output.keys_to_store) == keys
        for key, chunk in zip(keys, output.store_spec.block_ids, strict=True):
            self.chunks[int(chunk)] = bytes_of(key)
        self.manager.complete_store(keys, context)
        self.finish_jobs()

    def find(self, keys: list[Any], context: ReqContext) -> list[LookupResult]:
        """Step until all is known, and in the primary tier what was found."""
        found: list[LookupResult] = []

        def is_known() -> bool:
            found[:] = [self.manager.lookup(key, context) for key in keys]
            self.step()
            return set(found) <= {HIT, MISS}

        eventually(is_known)
        return found

    def ask(self, keys: list[Any], context: ReqContext) -> None:
        """Until the tier knows that it has them. No load starts before the manager is asked again."""
        for key in keys:
            assert self.manager.lookup(key, context) == LookupResult.RETRY

        def knows() -> bool:
            self.step()
            return all(self.tier.lookup(key, context) == HIT for key in keys)

        eventually(knows)

    def read(self, keys: list[Any], context: ReqContext) -> list[Tensor]:
        spec = self.manager.prepare_load(keys, context)
        chunks = [self.chunks[int(chunk)].clone() for chunk in spec.block_ids]
        self.manager.complete_load(keys, context)
        return chunks

    def __enter__(self) -> "Engine":
        return self

    def __exit__(self, *error: object) -> None:
        del self.chunks
        self.manager.shutdown()


def eventually(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it never became true"
        time.sleep(0.005)


def are_right(engine: Engine, keys: list[Any], context: ReqContext) -> bool:
    found = engine.read(keys, context)
    return all(torch.equal(chunk, bytes_of(key)) for key, chunk in zip(keys, found, strict=True))


def test_what_one_engine_has_stored_another_one_loads(master: Master, owner: Owner) -> None:
    keys = [*keys_of(1, 2, 3), *keys_of(1, group=1)]
    with Engine(master, "first", staging_pages=4) as first:
        first.store(keys, first.request("a"))
    with Engine(master, "second", staging_pages=4) as second:
        context = second.request("b")
        asked = [*keys[:3], *keys_of(9), keys[3]]
        assert second.manager.lookup(keys[0], context) == LookupResult.RETRY  # it asks first
        assert second.find(asked, context) == [HIT, HIT, HIT, MISS, HIT]
        assert are_right(second, keys, context)
        untouched = second.chunks[(second.chunks == 0xA5).all(1)]
        assert len(untouched) == CHUNKS - len(keys)
        second.manager.on_request_finished(context)


def test_a_chunk_pushed_out_of_the_primary_tier_comes_back(master: Master, owner: Owner) -> None:
    keys = keys_of(*range(1, 13))
    with Engine(master, "one") as engine:
        context = engine.request("a")
        engine.store(keys[:6], context)
        engine.store(keys[6:], context)  # there is room for six
        context = engine.request("b")
        assert engine.find(keys[:6], context) == [HIT] * 6
        assert are_right(engine, keys[:6], context)


@pytest.mark.parametrize("difference", ["namespace", "model", "vllm"])
def test_engines_that_differ_share_nothing(
    difference: str, master: Master, owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = keys_of(1, 2)
    with Engine(master, "first") as first:
        first.store(keys, first.request("a"))
        changes: dict[str, Any] = {}
        if difference == "namespace":
            changes["namespace"] = "other weights"
        elif difference == "model":
            changes["model"] = type(first.config.model)(name="other", dtype="float16")
        else:
            monkeypatch.setattr(vllm, "__version__", "0.32.99")
        with Engine(master, "second", **changes) as second:
            assert second.find(keys, second.request("b")) == [MISS, MISS]


def names_in_store(engine: Engine, keys: list[Any]) -> list[str]:
    return [engine.tier._staged._tier._prefix + key.hex() for key in keys]


def test_of_a_load_that_fails_in_part_the_rest_is_kept(master: Master, owner: Owner) -> None:
    keys = keys_of(1, 2, 3)
    with Engine(master, "first") as first:
        first.store(keys, first.request("a"))
        gone = names_in_store(first, keys[1:2])
    client = Connection(master.address).open()
    with Engine(master, "second") as second:
        context, other = second.request("b"), second.request("c")
        second.ask(keys, context)
        assert [second.tier.lookup(key, other) for key in keys] == [HIT] * 3
        assert client.batch_remove(gone, True) == [0]  # after it was found
        assert second.find(keys, context) == [HIT, MISS, HIT]
        assert second.find(keys, other) == [HIT, MISS, HIT]  # and is not loaded again
        assert are_right(second, [keys[0], keys[2]], context)
    client.close()


def test_a_changed_byte_in_the_store_is_a_miss(master: Master, owner: Owner) -> None:
    keys = keys_of(1, 2)
    with Engine(master, "first") as first:
        first.store(keys, first.request("a"))
    assert owner.flip_byte_behind(bytes(bytes_of(keys[0])[:64].tolist())) >= 1
    with Engine(master, "second") as second:
        context = second.request("b")
        assert second.find(keys, context) == [MISS, HIT]
        assert are_right(second, keys[1:], context)


def test_with_a_dead_master_vllm_waits_for_nothing(master: Master, owner: Owner) -> None:
    keys = keys_of(1, 2)
    with Engine(master, "first", deadline_seconds=0.2) as engine:
        engine.store(keys, engine.request("a"))
        master.kill()
        context = engine.request("b")
        started = time.monotonic()
        assert engine.find(keys_of(7, 8), context) == [MISS, MISS]
        engine.store(keys_of(3, 4), context)  # its store job fails, and ends
        assert engine.find(keys_of(3, 4), context) == [HIT, HIT]
        assert time.monotonic() - started < 10
        assert are_right(engine, keys_of(3, 4), context)


def test_a_load_that_was_given_up_never_writes_to_vllms_chunk(master: Master, owner: Owner) -> None:
    keys = keys_of(1, 2, 3)
    with Engine(master, "first") as first:
        first.store(keys, first.request("a"))
    with Engine(master, "second", deadline_seconds=0.3, staging_pages=2) as second:
        context = second.request("b")
        before = second.chunks.clone()
        second.ask(keys, context)
        owner.signal(signal.SIGSTOP)
        assert second.find(keys, context) == [MISS] * 3
        owner.signal(signal.SIGCONT)
        time.sleep(1)  # the call goes on into a page of our own
        assert torch.equal(second.chunks, before)


def test_a_drain_ends_all_jobs_and_a_reset_keeps_the_store(master: Master, owner: Owner) -> None:
    keys = keys_of(1, 2, 3)
    with Engine(master, "one") as engine:
        context = engine.request("a")
        output = engine.manager.prepare_store(keys, context)
        for key, chunk in zip(keys, output.store_spec.block_ids, strict=True):
            engine.chunks[int(chunk)] = bytes_of(key)
        engine.manager.complete_store(keys, context)
        engine.tier.drain_jobs()
        assert all(moved.done() for _, moved in engine.tier._jobs.values())
        engine.manager.reset_cache()
        getattr(engine.manager, "on_reset_flushed", lambda: None)()
        assert engine.find(keys, context) == [HIT] * 3
        assert are_right(engine, keys, context)


def test_jobs_left_at_shutdown_end(master: Master, owner: Owner) -> None:
    engine = Engine(master, "one")
    context = engine.request("a")
    output = engine.manager.prepare_store(keys_of(1, 2), context)
    assert output is not None
    owner.signal(signal.SIGSTOP)
    engine.manager.complete_store(keys_of(1, 2), context)
    (_, moved) = next(iter(engine.tier._jobs.values()))
    owner.kill()
    engine.__exit__()
    assert moved.done()


def test_a_config_without_a_master_is_refused() -> None:
    with pytest.raises(TypeError, match="required keyword-only argument: 'master'"):
        Engine(None, "one")


@pytest.mark.parametrize("version", ["0.28.1", "0.34.0"])
def test_other_versions_are_refused(
    version: str, master: Master, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch_hicache.integrations.vllm.tier import HiCacheMooncakeTier

    monkeypatch.setattr(vllm, "__version__", version)
    text = re.escape(f"[vllm] version must be 0.29 to 0.33, got {version}")
    with pytest.raises(RuntimeError, match=text):
        Engine(master, "one")
    with pytest.raises(RuntimeError, match=text):  # also to who has imported it before
        HiCacheMooncakeTier(None, None, "tier", master=master.address)
