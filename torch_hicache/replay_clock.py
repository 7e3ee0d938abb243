"""The times of a replay: of its transfers, and of a forward pass that is played beside them.

On an accelerator events on the streams tell them, once the device has passed them; on the CPU the clock
of the thread that works.
"""

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from torch_hicache.streams import Command, Runtime, Stream, WhenDone, runtime_for
from torch_hicache.ticket import Ticket

_PROBE_CYCLES = 50_000_000  # of the GPU's clock, about 30 ms


@dataclass
class Moved:
    """Bytes that transfers moved in one direction, and the seconds that their stream worked on them."""

    num_bytes: int = 0
    seconds: float = 0.0

    @property
    def gbps(self) -> float:
        """1e9 bytes a second; 0 when nothing moved."""
        return self.num_bytes / self.seconds / 1e9 if self.seconds else 0.0


class Clock:
    """Marks of the current stream, and the times between them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # The last two are events. A deque, since the threads of an engine add to it.
        self._pending: deque[tuple[Any, str, Any, Any]] = deque()

    def mark(self) -> Any:
        """Here in the work of the calling thread's current stream."""
        if self._device.type == "cpu":
            return time.perf_counter()
        module = torch.get_device_module(self._device)
        event = module.Event(enable_timing=True)
        event.record(module.current_stream(self._device))
        return event

    def add(self, total: Any, name: str, start: Any, end: Any) -> None:
        """Add the seconds between two marks to an attribute of `total`: now, or when they are known."""
        if self._device.type == "cpu":
            setattr(total, name, getattr(total, name) + end - start)
        else:
            self._pending.append((total, name, start, end))

    def collect(self, *, wait: bool) -> None:
        """Add what the device has passed by now; with `wait` all."""
        for _ in range(len(self._pending)):
            total, name, start, end = self._pending.popleft()
            if wait:
                end.synchronize()
            if wait or end.query():
                setattr(total, name, getattr(total, name) + start.elapsed_time(end) / 1e3)
            else:
                self._pending.append((total, name, start, end))


class TimedRuntime:
    """The runtime of a device for one engine. What its streams run is added to `moved`, which is set
    before a transfer is submitted; what they wait for is not."""

    def __init__(self, device: torch.device, clock: Clock) -> None:
        self._runtime: Runtime = runtime_for(device)
        self._clock = clock
        self.moved = Moved()

    def new_stream(self, name: str) -> "_TimedStream":
        return _TimedStream(self._runtime.new_stream(name), self)

    def record_current(self) -> Any:
        return self._runtime.record_current()

    def current_wait(self, event: Any) -> None:
        self._runtime.current_wait(event)

    def is_capturing(self) -> bool:
        return self._runtime.is_capturing()

    def new_layer_event(self) -> None:
        return None  # a replay captures nothing

    def timed(self, work: Command) -> Command:
        moved = self.moved

        def run() -> None:
            start = self._clock.mark()
            work()
            self._clock.add(moved, "seconds", start, self._clock.mark())

        return run


class _TimedStream:
    def __init__(self, stream: Stream, runtime: TimedRuntime) -> None:
        self._stream, self._runtime = stream, runtime

    def begin(self, nbytes: int, waits: Sequence[Any]) -> None:
        self._stream.begin(nbytes, waits)

    def flush(self) -> None:
        self._stream.flush()

    def run(self, work: Command) -> None:
        self._stream.run(self._runtime.timed(work))

    def record(self) -> Any:
        return self._stream.record()

    def when_done(self, event: Any, callback: WhenDone) -> None:
        self._stream.when_done(event, callback)

    def close(self) -> None:
        self._stream.close()


class ForwardPass:
    """A forward pass that is played: each layer waits for its load, then takes its share of the time.

    A layer is a kernel that spins on the current stream of a GPU; on the CPU the calling thread sleeps.

    Args:
        seconds: of all layers together; with 0 there is no pass, and a load is waited for as a whole.
    """

    def __init__(self, device: torch.device, layers: Sequence[int], seconds: float, clock: Clock) -> None:
        self._layers, self._clock = layers, clock
        self._is_played = seconds > 0
        self._compute = _delay(device, seconds / len(layers)) if self._is_played else None

    @property
    def layers_of_loads(self) -> str | None:
        """What loads are asked for: each layer, or all at once."""
        return "all" if self._is_played else None

    def run(self, load: Ticket | None, times: Any) -> None:
        """Adds to `times.compute_seconds`, and to `times.exposed_seconds` the wait for the load."""
        if self._compute is None:
            if load is not None:
                self._timed(times, "exposed_seconds", load.wait_stream)
            return
        for layer in self._layers:
            if load is not None:
                self._timed(times, "exposed_seconds", partial(load.wait_layer, layer))
            self._timed(times, "compute_seconds", self._compute)

    def _timed(self, times: Any, name: str, work: Callable[[], object]) -> None:
        start = self._clock.mark()
        work()
        self._clock.add(times, name, start, self._clock.mark())


def _delay(device: torch.device, seconds: float) -> Callable[[], None]:
    if device.type == "cpu":
        return partial(time.sleep, seconds)
    if device.type != "cuda":
        raise ValueError(f"[replay] a forward pass can't be played on {device}; leave out --compute-ms.")
    with torch.cuda.device(device):
        for _ in range(2):  # the first one loads the kernel
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            torch.cuda._sleep(_PROBE_CYCLES)
            end.record()
            end.synchronize()
    cycles = int(_PROBE_CYCLES * seconds / (start.elapsed_time(end) / 1e3))

    def spin() -> None:
        with torch.cuda.device(device):
            torch.cuda._sleep(cycles)

    return spin
