"""CPU backend: a worker thread a stream. torch releases the GIL in kernels and copies, so they really overlap on two cores.

Copies go between two disjoint arenas and can be paced to a link's speed, to rehearse any ratio of copies to compute.
"""
from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from queue import SimpleQueue

import torch

from sim.schedule import STREAMS

PIECE_BYTES = 1 << 20
"""A paced copy moves this much between two looks at the clock."""


class Event:
    """Set once. A lock that starts taken: threads that wait queue in the kernel, not in Python."""

    def __init__(self) -> None:
        self._gate = threading.Lock()
        self._gate.acquire()

    def set(self) -> None:
        self._gate.release()

    def block(self) -> None:
        with self._gate:
            pass


class Stream:
    """A thread that runs what is put in its queue."""

    def __init__(self, name: str, cores: set[int] | None, failures: list[BaseException]) -> None:
        self._queue: SimpleQueue = SimpleQueue()
        self._failures = failures
        self._thread = threading.Thread(target=self._run, args=(cores,), name=f"stream-{name}", daemon=True)
        self._thread.start()

    def launch(self, work: Callable[[], None], span: list | None = None) -> None:
        self._queue.put((work, span))

    def record(self) -> Event:
        event = Event()
        self._queue.put((event.set, None))
        return event

    def wait(self, event: Event) -> None:
        self._queue.put((event.block, None))

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _run(self, cores: set[int] | None) -> None:
        if cores:
            os.sched_setaffinity(0, cores)
        torch.set_num_threads(1)
        while item := self._queue.get():
            work, span = item
            event = getattr(work, "__self__", None)
            if self._failures and not isinstance(event, Event):
                continue  # a failed run drains: events are set, work is not done
            start = time.perf_counter_ns()
            try:
                with torch.no_grad():
                    work()
            except BaseException as failure:  # noqa: BLE001 - handed to join, which raises it on the host
                self._failures.append(failure)
            if span is not None:
                span[:] = (start, time.perf_counter_ns())


class CpuBackend:
    """Threads for streams, two tensors for spaces."""

    device = torch.device("cpu")

    def __init__(self, cores: dict[str, set[int]] | None = None, link_GBps: float | None = None) -> None:
        """cores: which CPU cores each stream may run on. link_GBps: pace of copies, each direction; None is as fast as they go."""
        self._failures: list[BaseException] = []
        self.link_GBps = link_GBps
        self.streams = {s: Stream(s, (cores or {}).get(s), self._failures) for s in STREAMS if s != "host"}

    def arena(self, space: str, size_bytes: int) -> torch.Tensor:
        return torch.empty(size_bytes, dtype=torch.uint8)

    def keep(self, sizes: dict[str, int]) -> None:
        pass  # the C library sees to it

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        if self.link_GBps is None:
            to.copy_(source)
            return
        to, source = to.view(-1).view(torch.uint8), source.view(-1).view(torch.uint8)
        start = time.perf_counter()
        for at in range(0, to.numel(), PIECE_BYTES):
            to[at:at + PIECE_BYTES].copy_(source[at:at + PIECE_BYTES])
            rest = start + min(at + PIECE_BYTES, to.numel()) / (self.link_GBps * 1e9) - time.perf_counter()
            if rest > 0:
                time.sleep(rest)

    @contextmanager
    def timed(self, span: list):
        start = time.perf_counter_ns()
        yield
        span[:] = (start, time.perf_counter_ns())

    def enter(self, streams: Iterable[str]) -> None:
        pass  # the caller's own work is done when its call returns

    def synchronize(self) -> None:
        self.join(self.streams)

    settle = synchronize

    def join(self, streams: Iterable[str]) -> None:
        self.meet([self.streams[s].record() for s in streams])

    def meet(self, events: Iterable[Event]) -> None:
        for event in events:
            event.block()
        if self._failures:
            for event in [stream.record() for stream in self.streams.values()]:
                event.block()  # what is still queued drains before the failure is forgotten
            failure = self._failures[0]
            self._failures.clear()
            try:
                raise failure
            finally:
                del failure  # or it and this frame hold each other, and what the failed run had saved

    def close(self) -> None:
        for stream in self.streams.values():
            stream.close()
