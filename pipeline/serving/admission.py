"""A bounded queue in front of the device: who may run, who waits, who is told to come back later. No TensorFlow."""

import asyncio
import contextlib
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from pipeline.serving import status
from pipeline.serving.status import ServingError


class Admission:
    """Runs at most `max_running` pieces of work at once, and lets at most `max_queued` more wait for their turn.

    First come, first served. Lives on one event loop, so that counts are exact without locks.
    """

    def __init__(self, max_running: int, max_queued: int):
        self.max_running, self.max_queued = max_running, max_queued
        self.running = self.queued = 0
        self.rejected = self.expired = self.abandoned = 0  # for metrics
        self._turns = asyncio.Semaphore(max_running)
        self._threads = ThreadPoolExecutor(max_running, thread_name_prefix="session")
        self._seconds = 0.0  # that a run takes, smoothed

    def check(self) -> None:
        """Raise RESOURCE_EXHAUSTED, with a time to come back after, when every place is taken."""
        if self.running + self.queued >= self.max_running + self.max_queued:
            self.rejected += 1
            seconds = max(1, math.ceil(self._seconds * (self.queued + self.running) / self.max_running))
            raise ServingError(
                status.RESOURCE_EXHAUSTED,
                f"the queue is full ({self.running} running, {self.queued} waiting); retry after {seconds} s",
                retry_after=seconds,
            )

    @contextlib.contextmanager
    def place(self):
        """Take a place in the queue and yield `run`, an async function (work, deadline) -> what work(seconds) returns.

        `work` gets the seconds left, None without a deadline. Deadlines are times of the event loop. While it waits,
        leaving (cancellation) frees the place at once; work that has started runs to its end, as XLA's does.

        Raises:
            ServingError: RESOURCE_EXHAUSTED without a place; DEADLINE_EXCEEDED when the deadline passed while queued.
        """
        self.check()
        self.queued += 1
        waiting = True

        async def run(work: Callable[[float | None], object], deadline: float | None):
            nonlocal waiting
            loop = asyncio.get_running_loop()
            try:
                async with asyncio.timeout_at(deadline):
                    await self._turns.acquire()
                # Its turn may come in the very moment its time is up.
                if deadline is not None and loop.time() >= deadline:
                    self._turns.release()
                    raise TimeoutError
            except TimeoutError:
                self.expired += 1
                raise ServingError(status.DEADLINE_EXCEEDED, "the deadline passed while the request waited") from None
            except asyncio.CancelledError:
                self.abandoned += 1
                raise
            self.queued -= 1
            waiting = False
            start = loop.time()
            future = loop.run_in_executor(self._threads, work, None if deadline is None else deadline - start)
            self.running += 1
            future.add_done_callback(lambda done: self._finish(done, loop.time() - start))
            try:
                return await asyncio.shield(future)
            except asyncio.CancelledError:
                # The device is busy, and the model in use, until the thread is done, whatever became of the client.
                await asyncio.wait([future])
                raise

        try:
            yield run
        finally:
            if waiting:
                self.queued -= 1

    def _finish(self, future: asyncio.Future, seconds: float) -> None:
        future.exception()  # whoever asked may be gone, and then nobody else looks at it
        self.running -= 1
        self._turns.release()
        self._seconds += (0.2 if self._seconds else 1.0) * (seconds - self._seconds)
