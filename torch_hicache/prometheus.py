"""The counters of a TransferEngine for Prometheus; needs `pip install 'torch_hicache[prometheus]'`.

registry.register(EngineCollector(engine, "target"))
"""

import weakref
from collections.abc import Iterator

try:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
except ImportError as missing:
    raise ImportError(
        "[prometheus] prometheus-client is not installed: pip install 'torch_hicache[prometheus]'."
    ) from missing

from torch_hicache.engine import TransferEngine

# What `TransferEngine.stats` calls it: (name of the metric, its help, whether it only grows).
_METRICS = {
    "transfers": ("transfers", "Transfers that have moved all they were asked for.", True),
    "bytes": ("bytes", "Bytes that these transfers have moved.", True),
    "busy_seconds": ("busy_seconds", "Time with a transfer in flight, as the host saw it.", True),
    "errors": ("errors", "Transfers that failed.", True),
    "cancelled": ("cancelled", "Transfers of which a part was cancelled.", True),
    "queue_depth": ("queue_depth", "Calls that wait for room in the queue.", False),
    "in_flight": ("in_flight", "Transfers in flight.", False),
    "in_flight_bytes": ("in_flight_bytes", "Bytes of the transfers in flight.", False),
}


class EngineCollector:
    """Reads an engine's counters when it is scraped. Labels: `engine` (its name) and `direction`.

    Args:
        engine: not kept alive; once it is gone there are no samples.
        name: tells engines of one process apart.
    """

    def __init__(self, engine: TransferEngine, name: str) -> None:
        self._engine, self._name = weakref.ref(engine), name

    def describe(self) -> list[Metric]:
        """Lets a registry know the names without a scrape."""
        return list(self._families().values())

    def collect(self) -> Iterator[Metric]:
        engine = self._engine()
        families = self._families()
        if engine is not None:
            for direction, stats in engine.stats().items():
                for key, family in families.items():
                    family.add_metric([self._name, direction], stats[key])
        yield from families.values()

    @staticmethod
    def _families() -> dict[str, CounterMetricFamily | GaugeMetricFamily]:
        return {
            key: (CounterMetricFamily if grows else GaugeMetricFamily)(
                f"hicache_{name}", text, labels=["engine", "direction"]
            )
            for key, (name, text, grows) in _METRICS.items()
        }
