"""Streams and events behind one small interface: one engine serves every accelerator, the CPU and tests.

An accelerator's stream takes work at once and runs it later. The CPU has no streams: there each is a
thread that runs its work in order, and the caller's "current stream" is the calling thread itself.
"""

import ctypes
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, Protocol

import torch

Command = Callable[[], object]
WhenDone = Callable[[BaseException | None], None]


class Event(Protocol):
    """A point in a stream's work, recorded once."""

    def query(self) -> bool:
        """Whether the work before it has finished; never blocks."""

    def wait(self, timeout: float | None = None) -> bool:
        """Block the calling thread, without the interpreter lock; False after `timeout` seconds."""


class Stream(Protocol):
    """Work that runs in the order in which it was given."""

    def begin(self, nbytes: int, waits: Sequence[Any]) -> None:
        """A transfer of so many bytes comes next: it waits for these events, but the caller does not."""

    def flush(self) -> None:
        """Block until the device has been given all work so far; it need not have run. Raises what the
        newest transfer could not submit."""

    def run(self, work: Command) -> None:
        """Submit `work`: called with this stream as the current one, at once or later by a thread."""

    def record(self) -> Any:
        """An event behind all work so far."""

    def when_done(self, event: Any, callback: WhenDone) -> None:
        """Call back from a thread of this stream after the event, with the device's failure if any."""

    def close(self) -> None:
        """Stop the thread once its queue is empty, and wait for that. A second call does nothing."""


class LayerEvent(Protocol):
    """An event that is recorded again and again; a captured wait follows the newest record at replay."""

    def record(self, stream: Any) -> None: ...

    def current_wait(self) -> None: ...


class Runtime(Protocol):
    """Where streams and events come from."""

    def new_stream(self, name: str) -> Any: ...

    def record_current(self) -> Any:
        """An event behind all work of the caller's current stream."""

    def current_wait(self, event: Any) -> None:
        """Let the caller's current stream wait for the event."""

    def is_capturing(self) -> bool:
        """Whether the caller's current stream is being captured."""

    def new_layer_event(self) -> Any:
        """A LayerEvent, or None where this device has none that can be captured."""


def runtime_for(device: torch.device) -> "HostRuntime | DeviceRuntime":
    return HostRuntime() if device.type == "cpu" else DeviceRuntime(device)


class _Worker:
    """A daemon thread that runs commands in order, and ends with its owner."""

    def __init__(self, name: str) -> None:
        self._commands: queue.SimpleQueue[Command | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        # The thread knows the queue only, so that dropping the worker ends it.
        weakref.finalize(self, self._commands.put, None).atexit = False
        self._thread = threading.Thread(
            target=_run_commands, args=(self._commands,), name=name, daemon=True
        )
        self._thread.start()

    def put(self, command: Command) -> None:
        with self._lock:
            if self._closed:
                raise RuntimeError("[TransferEngine] the engine must be open, it was closed.")
            self._commands.put(command)

    def close(self) -> None:
        """Run what has been put, and take no more."""
        with self._lock:
            self._closed = True
            self._commands.put(None)
        if self._thread is not threading.current_thread():
            self._thread.join()


def _run_commands(commands: "queue.SimpleQueue[Command | None]") -> None:
    while True:
        command = commands.get()
        if command is None:
            return
        try:
            command()
        except BaseException:  # a fault of ours; without its thread an engine would hang
            logging.getLogger("torch_hicache").exception("a command of an engine's thread failed")
        del command  # what it holds (pools, indices) must not live on while the queue is empty


# --- The CPU -------------------------------------------------------------------------------------


class HostEvent:
    """Set by a HostStream's thread."""

    def __init__(self, *, is_set: bool = False) -> None:
        self._flag = threading.Event()
        if is_set:
            self._flag.set()

    def set(self) -> None:
        self._flag.set()

    def query(self) -> bool:
        return self._flag.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        return self._flag.wait(timeout)


class HostStream:
    """A thread with a queue. The transfer releases the interpreter lock while it copies."""

    def __init__(self, name: str) -> None:
        self._worker = _Worker(name)

    def begin(self, nbytes: int, waits: Sequence[HostEvent]) -> None:
        for event in waits:
            if not event.query():
                self._worker.put(event.wait)

    def flush(self) -> None:
        pass

    def run(self, work: Command) -> None:
        self._worker.put(work)

    def record(self) -> HostEvent:
        event = HostEvent()
        self._worker.put(event.set)
        return event

    def when_done(self, event: HostEvent, callback: WhenDone) -> None:
        self._worker.put(partial(callback, None))

    def close(self) -> None:
        self._worker.close()


class HostRuntime:
    """The calling thread is the current stream: its work is done when a call is reached, and a wait
    blocks it."""

    def new_stream(self, name: str) -> HostStream:
        return HostStream(name)

    def record_current(self) -> HostEvent:
        return HostEvent(is_set=True)

    def current_wait(self, event: HostEvent) -> None:
        event.wait()

    def is_capturing(self) -> bool:
        return False

    def new_layer_event(self) -> None:
        return None


# --- Accelerators --------------------------------------------------------------------------------

# A wait looks at its event this often: an eighth of the time waited so far, between these bounds.
# Event.synchronize would burn a core on CUDA, and takes no timeout.
_SHORTEST_SLEEP = 20e-6
_LONGEST_SLEEP = 1e-3

# Transfers from this size on are submitted by a thread. On an H200 the copy engine takes 0.3 ms for so
# much, and the host 20 microseconds (a kernel) to 0.2 ms (256 rows of a copy engine).
BACKGROUND_BYTES = 16 << 20


@cache
def _exchange_capture_mode(device_type: str) -> Callable[[Any], int] | None:
    """The driver's switch of the calling thread's capture mode, where it is known."""
    names = {
        "cuda": ("libcuda.so.1", "cuThreadExchangeStreamCaptureMode"),
        "hip": (None, "hipThreadExchangeStreamCaptureMode"),
    }
    kind = "hip" if torch.version.hip is not None else device_type
    if kind not in names:
        return None
    library, symbol = names[kind]
    try:
        return getattr(ctypes.CDLL(library), symbol)
    except (OSError, AttributeError):
        return None


class DeviceEvent:
    """Recorded at once or, by the thread of a DeviceStream, soon. Till then it has not come."""

    def __init__(self, device: torch.device) -> None:
        self.event = torch.Event(device)
        self._device_index = device.index
        self._exchange = _exchange_capture_mode(device.type)
        self._recorded = threading.Event()
        self._lost: BaseException | None = None  # what has kept it from being recorded
        self._failure: BaseException | None = None  # of the work before it

    def record(self, stream: torch.Stream, failure: BaseException | None = None) -> None:
        """Behind all work of the stream, also where some of it could not be submitted: `failure`."""
        self._failure = failure
        try:
            self.event.record(stream)
        except BaseException as error:
            self._lost = error
            raise
        finally:
            self._recorded.set()

    @property
    def is_recorded(self) -> bool:
        return self._recorded.is_set()

    def wait_recorded(self, timeout: float | None = None) -> bool:
        """Block until a stream can wait for it. Raises what has kept it from being recorded."""
        if not self._recorded.wait(timeout):
            return False
        _raise_again(self._lost)
        return True

    def query(self) -> bool:
        """Raises, once it has come, what kept work before it from being submitted."""
        if not self._recorded.is_set():
            return False
        self.wait_recorded()
        # The caller's thread may not have chosen its device.
        with torch.accelerator.device_index(self._device_index):
            has_come = self._query()
        if has_come:
            self.raise_failure()
        return has_come

    def raise_failure(self) -> None:
        """Of the work before it, once it is recorded."""
        _raise_again(self._failure)

    def _query(self) -> bool:
        # A query breaks captures of other threads unless this thread says that it is no part of them.
        mode = ctypes.c_int(2)  # relaxed
        if self._exchange is None or self._exchange(ctypes.byref(mode)):
            return bool(self.event.query())
        try:
            return bool(self.event.query())
        finally:
            self._exchange(ctypes.byref(mode))

    def wait(self, timeout: float | None = None) -> bool:
        start = time.monotonic()
        if not self.wait_recorded(timeout):
            return False
        while not self.query():
            elapsed = time.monotonic() - start
            pause = min(max(elapsed / 8, _SHORTEST_SLEEP), _LONGEST_SLEEP)
            if timeout is not None:
                if elapsed >= timeout:
                    return False
                pause = min(pause, timeout - elapsed)
            time.sleep(pause)
        return True


def _raise_again(error: BaseException | None) -> None:
    """In a thread that did not meet it."""
    if error is not None:
        raise RuntimeError(f"[TransferEngine] a transfer could not be submitted: {error}") from error


class _Submission:
    """What a thread submits for one transfer: nothing follows what could not be submitted."""

    def __init__(self) -> None:
        self.failure: BaseException | None = None


class DeviceStream:
    """A stream of the accelerator, a thread that submits to it, and one that waits for its events.

    Big transfers take the host milliseconds to submit (a copy engine is told of each row), so these are
    submitted by the thread, while the caller launches the layers that wait for them. Small ones are
    submitted by the caller: handing them over would take longer.
    """

    def __init__(self, device: torch.device, name: str) -> None:
        self._device = device
        try:
            self.stream = torch.Stream(device, priority=-1)
        except (RuntimeError, TypeError):  # a device without priorities
            self.stream = torch.Stream(device)
        self._submitter, self._watcher = _Worker(name), _Worker(f"{name}-done")
        for worker in (self._submitter, self._watcher):
            # Else the thread's device is device 0, where the end of an event would create a context.
            worker.put(partial(torch.accelerator.set_device_index, device.index))
        self._submitter.put(partial(_take_no_part_in_captures, device))
        self._counting = threading.Lock()
        self._put = self._run_so_far = 0  # commands of the thread
        self._background: _Submission | None = None  # None: the caller submits

    def begin(self, nbytes: int, waits: Sequence[DeviceEvent]) -> None:
        # The caller must not block for events that another thread has yet to record.
        must_wait = not all(event.is_recorded for event in waits)
        in_background = self._is_busy() or must_wait or nbytes >= BACKGROUND_BYTES
        self._background = _Submission() if in_background else None
        for event in waits:
            self._do(partial(self._wait_event, event))

    def _wait_event(self, event: DeviceEvent) -> None:
        event.wait_recorded()
        self.stream.wait_event(event.event)

    def run(self, work: Command) -> None:
        self._do(partial(self._run, work))

    def _run(self, work: Command) -> None:
        with self.stream:  # makes its device the current one too
            work()

    def record(self) -> DeviceEvent:
        event = DeviceEvent(self._device)
        submission = self._background
        if submission is None:
            event.record(self.stream)
        else:
            self._hand_over(lambda: event.record(self.stream, submission.failure))
        return event

    def flush(self) -> None:
        if self._is_busy():
            done = threading.Event()
            self._hand_over(done.set)
            done.wait()
        if self._background is not None:
            _raise_again(self._background.failure)

    def _is_busy(self) -> bool:
        with self._counting:
            return self._put != self._run_so_far

    def _do(self, command: Command) -> None:
        submission = self._background
        if submission is None:
            command()
            return

        def attempt() -> None:
            if submission.failure is None:
                command()

        self._hand_over(attempt, submission)

    def _hand_over(self, command: Command, submission: _Submission | None = None) -> None:
        def run() -> None:
            try:
                command()
            except BaseException as error:
                if submission is not None:
                    submission.failure = error.with_traceback(None)  # whose frames keep pools alive
            finally:
                with self._counting:
                    self._run_so_far += 1

        with self._counting:
            self._submitter.put(run)
            self._put += 1

    def when_done(self, event: DeviceEvent, callback: WhenDone) -> None:
        def watch() -> None:
            failure = None
            try:
                event.wait()
            except RuntimeError as error:  # of a submission or of the device: nothing of it runs any more
                failure = error
            callback(failure)

        self._watcher.put(watch)

    def close(self) -> None:
        self._submitter.close()
        self._watcher.close()


def _take_no_part_in_captures(device: torch.device) -> None:
    """Let the calling thread allocate memory while another one captures."""
    exchange = _exchange_capture_mode(device.type)
    if exchange is not None:
        exchange(ctypes.byref(ctypes.c_int(2)))  # relaxed


class _ExternalEvent:
    """A CUDA event whose waits are captured as such, not as an order between captured streams."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._event = torch.cuda.Event(external=True)

    def record(self, stream: DeviceStream) -> None:
        stream.run(
            self._event.record
        )  # torch asks the current stream whether it is captured: it never is

    def current_wait(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)


class DeviceRuntime:
    def __init__(self, device: torch.device) -> None:
        self.device = device

    def new_stream(self, name: str) -> DeviceStream:
        return DeviceStream(self.device, name)

    def record_current(self) -> DeviceEvent:
        event = DeviceEvent(self.device)
        event.record(torch.accelerator.current_stream(self.device))
        return event

    def current_wait(self, event: DeviceEvent) -> None:
        event.wait_recorded()
        torch.accelerator.current_stream(self.device).wait_event(event.event)
        event.raise_failure()

    def is_capturing(self) -> bool:
        stream = torch.accelerator.current_stream(self.device)
        if hasattr(stream, "is_capturing"):
            return bool(stream.is_capturing())
        module = torch.get_device_module(self.device)
        return bool(getattr(module, "is_current_stream_capturing", lambda: False)())

    def new_layer_event(self) -> _ExternalEvent | None:
        if self.device.type != "cuda":
            return None
        try:
            return _ExternalEvent(self.device)
        except (TypeError, RuntimeError):  # a torch without external events, such as ROCm's
            return None
