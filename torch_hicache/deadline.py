"""Calls that may never return, and when to stop making them: Calls, Breaker.

A foreign client that hangs must not hang us. Each of its calls runs in a thread that is ours; who waits
for it gives it up at a deadline, and the call goes on until it returns by itself.
"""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any


class Calls:
    """Threads that run calls, a bounded number at once. A call that waits for a thread can be cancelled.

    The threads are daemons: a call that never returns does not keep the process from ending.
    """

    def __init__(self, name: str, num_threads: int) -> None:
        self._queue: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{i}", daemon=True)
            for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def start(self, call: Callable[[], Any]) -> "Future[Any]":
        future: Future[Any] = Future()
        self._queue.put((future, call))
        return future

    def close(self, seconds: float) -> bool:
        """Let the threads end; False if a call has not returned within `seconds`."""
        for _ in self._threads:
            self._queue.put(None)
        deadline = time.monotonic() + seconds
        for thread in self._threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in self._threads)

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            future, call = item
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)
            del item, future, call  # not kept alive until the next one comes


class Breaker:
    """Whether a service that was away is worth a call: after `trip`, not before a probe has succeeded.

    Probes run in the background, `retry_seconds` after the last failure and only when somebody asks.

    Args:
        probe: starts a probe, whose result says whether the service is back.
    """

    def __init__(self, probe: Callable[[], "Future[bool]"], retry_seconds: float) -> None:
        self._probe = probe
        self._retry_seconds = retry_seconds
        self._lock = threading.Lock()
        self._is_open = False
        self._is_probing = False
        self._retry_at = 0.0
        self._num_failures = 0
        self.num_trips = 0

    def allows(self) -> bool:
        """Never blocks. Starts a probe when one is due."""
        with self._lock:
            if not self._is_open:
                return True
            if self._is_probing or time.monotonic() < self._retry_at:
                return False
            self._is_probing = True
            num_failures = self._num_failures
        is_started = False
        try:
            self._probe().add_done_callback(partial(self._probed, num_failures))
            is_started = True
        except Exception:  # as good as a probe that fails
            pass
        finally:
            if not is_started:
                self._end_probe(num_failures, is_back=False)
        return False

    def trip(self) -> None:
        with self._lock:
            self.num_trips += not self._is_open
            self._is_open = True
            self._num_failures += 1
            self._retry_at = time.monotonic() + self._retry_seconds

    def _probed(self, num_failures: int, future: "Future[bool]") -> None:
        is_back = not future.cancelled() and future.exception() is None and future.result()
        self._end_probe(num_failures, is_back=is_back)

    def _end_probe(self, num_failures: int, *, is_back: bool) -> None:
        """`num_failures`: those before the probe began, which knows nothing of later ones."""
        with self._lock:
            self._is_probing = False
            if is_back and num_failures != self._num_failures:
                return
            self._is_open = not is_back
            self._retry_at = time.monotonic() + self._retry_seconds
