"""The engine's counters as Prometheus samples."""

import gc
import subprocess
import sys

import pytest
from engine_fakes import GatedRuntime, failing_layers, ints, make_pools

from torch_hicache import TransferEngine


def test_samples_are_the_engines_counters() -> None:
    client = pytest.importorskip("prometheus_client")
    from torch_hicache.prometheus import EngineCollector

    runtime = GatedRuntime()
    registry = client.CollectorRegistry()
    engine = TransferEngine(*make_pools(), runtime=runtime)
    registry.register(EngineCollector(engine, "target"))

    def sample(name: str, direction: str = "load") -> float | None:
        return registry.get_sample_value(f"hicache_{name}", {"engine": "target", "direction": direction})

    assert sample("transfers_total") == 0
    engine.load(ints(1, 2), ints(3, 4)).wait()
    with failing_layers(5), pytest.raises(RuntimeError):
        engine.load(ints(1), ints(1)).wait()
    with runtime.blocked():
        engine.store(ints(1), ints(1))
        assert sample("in_flight", "store") == 1
        assert sample("in_flight_bytes", "store") == 4 * 68
    engine.close()
    assert sample("transfers_total") == 1
    assert sample("bytes_total") == 2 * 4 * 68
    assert sample("errors_total") == 1
    assert sample("cancelled_total") == 0
    assert sample("transfers_total", "store") == 1
    assert sample("in_flight", "store") == sample("queue_depth") == 0
    assert sample("busy_seconds_total") == engine.stats()["load"]["busy_seconds"]
    text = client.generate_latest(registry).decode()
    assert "# TYPE hicache_bytes_total counter" in text
    assert "# TYPE hicache_queue_depth gauge" in text
    del engine
    gc.collect()
    assert sample("transfers_total") is None


def test_without_the_client_it_says_what_to_install() -> None:
    code = """
import sys
sys.modules["prometheus_client"] = None
sys.modules["prometheus_client.core"] = None
import torch_hicache
try:
    import torch_hicache.prometheus
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == (
        "[prometheus] prometheus-client is not installed: pip install 'torch_hicache[prometheus]'.\n"
    )
