"""What tests of the engine share: pools with contents, and streams that run when a test says so."""

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from torch_hicache import DevicePool, HostPool, PlaneSpec, TransferEngine, testing
from torch_hicache.streams import HostRuntime, HostStream
from torch_hicache.ticket import Ticket

SPECS = (PlaneSpec("k", (3, 8), torch.bfloat16), PlaneSpec("v", (5,), torch.float32))
LAYERS = (2, 3, 5, 8)
DEVICE_SLOTS, HOST_SLOTS = 24, 40


def make_pools(
    layers: Sequence[int] = LAYERS,
    device_slots: int = DEVICE_SLOTS,
    host_slots: int = HOST_SLOTS,
    *,
    layout: str = "page_first",
    page_size: int = 1,
    device: str = "cpu",
) -> tuple[DevicePool, HostPool]:
    """Two pools without a row in common."""
    device_pool = DevicePool(SPECS, layers, device_slots, device, page_size)
    host_pool = HostPool(SPECS, layers, host_slots, device=device, layout=layout, page_size=page_size)
    for seed, pool in enumerate((device_pool, host_pool)):
        testing.fill_pool(pool.buffers, seed=seed)
    return device_pool, host_pool


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


class Model:
    """Copies of two pools in which everything happens at once and in the order of the calls."""

    def __init__(self, device_pool: DevicePool, host_pool: HostPool, unit: str = "slot") -> None:
        self.pools = {"device": device_pool, "host": host_pool}
        self.unit = unit
        self.rows = {
            name: {
                layer: [plane.to("cpu", copy=True) for plane in pool.planes(layer, unit)]
                for layer in pool.layer_ids
            }
            for name, pool in self.pools.items()
        }

    def store(
        self, device_slots: Tensor, host_slots: Tensor, layers: Sequence[int] | None = None
    ) -> None:
        self._move("host", host_slots, "device", device_slots, layers)

    def load(self, host_slots: Tensor, device_slots: Tensor, layers: Sequence[int] | None = None) -> None:
        self._move("device", device_slots, "host", host_slots, layers)

    def _move(
        self, dst: str, dst_slots: Tensor, src: str, src_slots: Tensor, layers: Sequence[int] | None
    ) -> None:
        to, source = testing.entries_that_move(dst_slots, src_slots)
        for layer in layers or self.rows[dst]:
            for d, s in zip(self.rows[dst][layer], self.rows[src][layer], strict=True):
                d[to] = s[source]

    def compare(self) -> None:
        """AssertionError unless both pools hold, in every byte of every slot, what the model holds."""
        for name, pool in self.pools.items():
            for layer in pool.layer_ids:
                for i, plane in enumerate(pool.planes(layer, self.unit)):
                    wrong = bytes_of(plane) != bytes_of(self.rows[name][layer][i])
                    slots = wrong.flatten(1).any(1).nonzero().flatten().tolist()
                    assert not slots, f"{name} pool, layer {layer}, plane {i}: slots {slots} are wrong"


def bytes_of(tensor: Tensor) -> Tensor:
    """Fingerprints may be NaN as numbers."""
    return tensor.cpu().contiguous().view(torch.uint8)


def same(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    pairs = zip(first, second, strict=True)
    return all(torch.equal(bytes_of(a), bytes_of(b)) for a, b in pairs)


# --- The CPU's streams, with a gate ---------------------------------------------------------------


class GatedRuntime(HostRuntime):
    """Real threads; a test can keep a stream from going on."""

    def __init__(self) -> None:
        self.streams: dict[str, HostStream] = {}

    def new_stream(self, name: str) -> HostStream:
        stream = self.streams[name.removeprefix("hicache-")] = super().new_stream(name)
        return stream

    @contextmanager
    def blocked(self, *directions: str) -> Iterator[threading.Event]:
        """The streams do nothing until the block ends, the event is set, or a test hangs for a minute."""
        gate = threading.Event()
        for direction in directions or ("load", "store"):
            reached = threading.Event()
            self.streams[direction].run(lambda reached=reached: (reached.set(), gate.wait(60)))
            assert reached.wait(10)
        try:
            yield gate
        finally:
            gate.set()


@contextmanager
def gated_engine() -> Iterator[tuple[TransferEngine, GatedRuntime, Model]]:
    """An engine on the CPU whose streams can be blocked, and which moves layer by layer."""
    runtime = GatedRuntime()
    pools = make_pools()
    with TransferEngine(*pools, runtime=runtime, group_bytes=1) as engine:
        yield engine, runtime, Model(*pools)


def wait_until(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(3000):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("it did not happen within half a minute")


@contextmanager
def failing_layers(*layers: int) -> Iterator[list[int]]:
    """Submissions that contain one of the layers fail; the layers that were tried are listed."""
    tried: list[int] = []
    whole = Ticket._move

    def move(ticket: Ticket, position: int) -> None:
        def transfer(*_args: object) -> None:
            tried.extend(ticket._groups[position].layers)
            if set(layers) & set(ticket._groups[position].layers):
                raise RuntimeError("the link is down")
            Ticket._transfer(ticket, *_args)  # type: ignore[arg-type]

        ticket._transfer = transfer  # type: ignore[method-assign]
        whole(ticket, position)

    Ticket._move = move  # type: ignore[method-assign]
    try:
        yield tried
    finally:
        Ticket._move = whole  # type: ignore[method-assign]


# --- Streams that run when they are told to -------------------------------------------------------


class FakeEvent:
    def __init__(self, device: "FakeRuntime") -> None:
        self.device = device
        self.is_set = False

    def query(self) -> bool:
        return self.is_set

    def wait(self, timeout: float | None = None) -> bool:
        self.device.drain()
        return self.is_set


class FakeStream:
    """Takes work at once and runs it later, in order, like a device's stream."""

    def __init__(self, device: "FakeRuntime", name: str) -> None:
        self.device, self.name = device, name
        self.commands: deque[tuple[str, object]] = deque()

    def begin(self, nbytes: int, waits: Sequence[FakeEvent]) -> None:
        for event in waits:
            self.wait_event(event)

    def flush(self) -> None:
        pass

    def wait_event(self, event: FakeEvent) -> None:
        self.commands.append(("wait", event))

    def run(self, work: Callable[[], None]) -> None:
        self.commands.append(("run", work))

    def record(self) -> FakeEvent:
        event = FakeEvent(self.device)
        self.commands.append(("record", event))
        return event

    def when_done(self, event: FakeEvent, callback: Callable[[BaseException | None], None]) -> None:
        self.commands.append(("run", lambda: callback(None)))

    def close(self) -> None:
        self.device.drain()

    def step(self) -> bool:
        """Run the next command; False where there is none or it waits."""
        if not self.commands:
            return False
        kind, what = self.commands[0]
        if kind == "wait" and not what.is_set:
            return False
        self.commands.popleft()
        if kind == "run":
            what()
        elif kind == "record":
            what.is_set = True
        return True


class FakeLayerEvent:
    def __init__(self, device: "FakeRuntime") -> None:
        self.device = device
        self.records = 0

    def record(self, stream: FakeStream) -> None:
        self.records += 1
        self.newest = stream.record()

    def current_wait(self) -> None:
        """Captured: what a replay does is `replay`."""

    def replay(self) -> None:
        self.device.compute.wait_event(self.newest)


class FakeRuntime:
    """`compute` is the caller's current stream."""

    def __init__(self) -> None:
        self.compute = FakeStream(self, "compute")
        self.streams = {"compute": self.compute}
        self.capturing = False
        self.layer_events: list[FakeLayerEvent] = []

    def new_stream(self, name: str) -> FakeStream:
        stream = FakeStream(self, name.removeprefix("hicache-"))
        self.streams[stream.name] = stream
        return stream

    def record_current(self) -> FakeEvent:
        return self.compute.record()

    def current_wait(self, event: FakeEvent) -> None:
        self.compute.wait_event(event)

    def is_capturing(self) -> bool:
        return self.capturing

    def new_layer_event(self) -> FakeLayerEvent:
        self.layer_events.append(FakeLayerEvent(self))
        return self.layer_events[-1]

    def run_ahead(self, name: str) -> None:
        """Run one stream alone, as far as it gets."""
        while self.streams[name].step():
            pass

    def drain(self, first: Sequence[str] = (), seed: int | None = None) -> None:
        """Run all that is queued, those streams ahead of others, or at random."""
        names = [*first, *(name for name in self.streams if name not in first)]
        choose = random.Random(seed)
        while True:
            if seed is not None:
                choose.shuffle(names)
            if not any(self.streams[name].step() for name in names):
                break
        left = {name: len(stream.commands) for name, stream in self.streams.items() if stream.commands}
        assert not left, f"streams wait for each other: {left}"


@contextmanager
def fake_engine(
    pools: tuple[DevicePool, HostPool] | None = None, **options: object
) -> Iterator[tuple[TransferEngine, FakeRuntime, Model]]:
    device_pool, host_pool = pools or make_pools()
    runtime = FakeRuntime()
    engine = TransferEngine(device_pool, host_pool, runtime=runtime, **options)  # type: ignore[arg-type]
    try:
        yield engine, runtime, Model(device_pool, host_pool)
    finally:
        runtime.drain()  # else closing would wait for ever
        engine.close()
