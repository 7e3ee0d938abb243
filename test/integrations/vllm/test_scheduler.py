"""Requests through vLLM's real scheduler: what comes back from host memory, and what a failure does."""

import inspect
import logging
import pathlib
import re
from collections.abc import Iterator
from typing import Any

import pytest
from engine import BLOCK_TOKENS, Engine, offloading
from vllm.v1.kv_offload.base import OffloadingWorker
from vllm.v1.outputs import KVConnectorOutput

from torch_hicache.integrations.vllm.spec import HiCacheOffloadingWorker

PROMPT = [(i * i) % 97 for i in range(5 * BLOCK_TOKENS + 3)]
OTHERS = [[(i * (7 + n)) % 89 for i in range(6 * BLOCK_TOKENS)] for n in range(3)]
NEW = [96] * 20
WITH_SEVERAL_GROUPS = pytest.mark.skipif(
    not hasattr(KVConnectorOutput(), "failed_recving"),
    reason="this vLLM can't be told of failed requests",
)


@pytest.fixture
def engines(tmp_path: pathlib.Path) -> Iterator[Any]:
    made: list[Engine] = []

    def make(transfer: Any = None, **options: Any) -> Engine:
        made.append(Engine(tmp_path, transfer or offloading(), **options))
        return made[-1]

    yield make
    for engine in made:
        engine.close()


def run_and_push_out(engine: Engine) -> list[int]:
    """A request, then others that take all blocks. Returns what the first one said."""
    first = engine.add("first", PROMPT)
    engine.run()
    for n, prompt in enumerate(OTHERS):
        engine.add(f"other{n}", prompt)
        engine.run()
    assert first.finish_reason == "length"
    assert first.computed == len(PROMPT) + 1
    return first.tokens


def failed_loads(caplog: pytest.LogCaptureFixture) -> list[str]:
    return re.findall(r"load \d+ of \d+ blocks failed", caplog.text)


def breaks(engine: Engine) -> None:
    """From now on, every transfer finds the host's rows gone."""
    for _, host_views in engine.transfers._views:
        host_views[:] = [view[:0] for view in host_views]


@pytest.mark.parametrize("blocks_per_chunk", [1, 2])
@pytest.mark.parametrize("groups", [1, pytest.param(2, marks=WITH_SEVERAL_GROUPS)])
def test_a_prompt_that_was_pushed_out_comes_back_from_host_memory(
    engines: Any, groups: int, blocks_per_chunk: int
) -> None:
    engine = engines(
        offloading(blocks_per_chunk=blocks_per_chunk), groups=groups, num_blocks=14 * groups
    ).start()
    said = run_and_push_out(engine)
    again = engine.add("again", PROMPT)
    engine.run()
    assert again.tokens == said
    from_host = 5 // blocks_per_chunk * blocks_per_chunk * BLOCK_TOKENS
    assert again.computed == len(PROMPT) + 1 - from_host


@pytest.mark.parametrize("groups", [1, pytest.param(2, marks=WITH_SEVERAL_GROUPS)])
def test_a_load_that_fails_is_computed_and_not_tried_again(
    engines: Any, groups: int, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engines(groups=groups, num_blocks=14 * groups).start()
    said = run_and_push_out(engine)
    breaks(engine)
    again = engine.add("again", PROMPT)
    engine.run()
    assert again.tokens == said
    assert again.finish_reason == "length"
    assert again.computed == len(PROMPT) + 1
    assert len(failed_loads(caplog)) == 1


def test_a_store_that_fails_is_never_loaded(engines: Any, caplog: pytest.LogCaptureFixture) -> None:
    engine = engines().start()
    whole = [list(host_views) for _, host_views in engine.transfers._views]
    breaks(engine)
    said = run_and_push_out(engine)
    assert "store 0 of" in caplog.text
    for (_, host_views), views in zip(engine.transfers._views, whole, strict=True):
        host_views[:] = views
    again = engine.add("again", PROMPT)
    engine.run()
    assert again.tokens == said
    assert again.computed == len(PROMPT) + 1
    assert "whose store failed" in caplog.text


def test_with_the_policy_fail_the_request_ends_with_an_error(
    engines: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        engine = engines(offloading(policy="fail")).start()
    assert "kv_load_failure_policy is 'fail'" in caplog.text
    run_and_push_out(engine)
    breaks(engine)
    again = engine.add("again", PROMPT)
    engine.run()
    assert again.finish_reason == "error"
    other = engine.add("new", NEW)
    engine.run()
    assert other.finish_reason == "length"


# --- Loads within the step --------------------------------------------------------------------------

IN_STEP = pytest.mark.skipif(
    "expedited" not in inspect.signature(OffloadingWorker.submit_load).parameters,
    reason="this vLLM has no loads within the step",
)


@IN_STEP
def test_a_load_within_the_step_is_there_before_the_model_reads_it(engines: Any) -> None:
    engine = engines(offloading(sync_load_budget_bytes=1 << 20)).start()
    said = run_and_push_out(engine)
    again = engine.add("again", PROMPT)
    engine.step()
    assert again.computed == len(PROMPT) - 5 * BLOCK_TOKENS
    engine.run()
    assert again.tokens == said


@IN_STEP
def test_a_load_within_the_step_that_fails_is_computed(
    engines: Any, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engines(offloading(sync_load_budget_bytes=1 << 20)).start()
    said = run_and_push_out(engine)
    breaks(engine)
    again = engine.add("again", PROMPT)
    engine.unchecked.add("again")  # in this step the model reads what is not there, for nothing
    engine.step()
    engine.unchecked.clear()
    engine.run()
    assert again.tokens == said
    assert again.finish_reason == "length"
    assert len(failed_loads(caplog)) == 1


@WITH_SEVERAL_GROUPS
def test_loads_within_the_step_are_refused_for_several_groups(engines: Any) -> None:
    with pytest.raises(ValueError, match="sync_load_budget_bytes must be 0"):
        engines(offloading(sync_load_budget_bytes=1 << 20), groups=2)


@pytest.mark.skipif(hasattr(KVConnectorOutput(), "failed_recving"), reason="this vLLM can be told")
def test_several_groups_are_refused_where_vllm_cant_be_told_of_failed_requests(engines: Any) -> None:
    with pytest.raises(ValueError, match=r"needs vLLM 0\.30 or newer"):
        engines(groups=2)


# --- What does not fit together --------------------------------------------------------------------


def test_vllms_connector_alone_is_refused(engines: Any) -> None:
    """It asks nobody which loads have failed."""
    engine = engines(offloading("OffloadingConnector"))
    with pytest.raises(ValueError, match="kv_connector must be HiCacheOffloadingConnector"):
        engine.start()


def test_our_connector_wants_our_spec(engines: Any) -> None:
    with pytest.raises(
        ValueError, match=r"spec_name must be HiCacheOffloadingSpec.*got CPUOffloadingSpec"
    ):
        engines(offloading(spec_name="CPUOffloadingSpec"))


def test_shutdown_ends_what_is_in_flight(engines: Any) -> None:
    engine = engines().start()
    worker = engine.connector.connector_worker.worker
    assert isinstance(worker, HiCacheOffloadingWorker)
    engine.add("first", PROMPT)
    for _ in range(2):
        engine.step()
    engine.connector.shutdown()
    engine.connector.shutdown()
    assert worker.get_finished() == []
