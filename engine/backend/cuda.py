"""CUDA backend: streams and events as they are, one HBM arena, one host arena pinned to the byte.

Nothing blocks the host but `Event.block`, `synchronize` and `settle`.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import contextmanager, suppress

import torch
import torch.nn.functional as F

from engine.backend.base import CALLER
from engine.backend.pinned import Pinned
from sim.errors import UserError
from sim.schedule import STREAMS
from sim.units import show_bytes

SPARE, SPARE_BYTES = 1 / 64, 4 << 20
"""Of a piece that is kept, for gaps: what was made first is not what goes first, and torch's allocator leaves a rest of up to 1 MiB with a tensor that it cuts off."""


class Event:
    """A CUDA event without timing."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._event = torch.cuda.Event()
        self._event.record(stream)

    def block(self) -> None:
        self._event.synchronize()


class Stream:
    """A CUDA stream; timed launches are bracketed by timing events."""

    def __init__(self, timed: list) -> None:
        self._stream, self._timed = torch.cuda.Stream(), timed

    def launch(self, work: Callable[[], None], span: list | None = None) -> None:
        with torch.cuda.stream(self._stream), torch.no_grad():
            if span is None:
                work()
                return
            with _timed(span, self._timed):
                work()

    def record(self) -> Event:
        return Event(self._stream)

    def wait(self, event: Event) -> None:
        self._stream.wait_event(event._event)


@contextmanager
def _timed(span: list, into: list):
    """Two timing events around what is issued to the current stream."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    yield
    end.record()
    into.append((span, start, end))


class CudaBackend:
    """The streams and arenas of one GPU."""

    def __init__(self, device: int = 0, tick: Callable[[int, int], None] = lambda done, total: None) -> None:
        """tick(bytes, of bytes) is called while host memory is taken."""
        torch.cuda.set_device(device)
        self.device = torch.device("cuda", device)
        self._tick = tick
        self._timed: list = []
        self._pinned: list[Pinned] = []
        self.streams = {s: Stream(self._timed) for s in STREAMS if s != "host"}
        self._base = torch.cuda.Event(enable_timing=True)
        self._base.record()

    def arena(self, space: str, size_bytes: int) -> torch.Tensor:
        """Raises UserError where the memory is not there, and keeps nothing."""
        if space == "hbm":
            try:
                return torch.empty(size_bytes, dtype=torch.uint8, device=self.device)
            except torch.OutOfMemoryError:
                free, _ = torch.cuda.mem_get_info()
                raise UserError(f"the HBM arena needs {show_bytes(size_bytes)}, {show_bytes(size_bytes - free)} more than is free; use a smaller chunk or more GPUs") from None
        self._pinned.append(Pinned(size_bytes, self._tick))
        return self._pinned[-1].tensor

    def keep(self, sizes: dict[str, int]) -> None:
        """By taking the pieces and leaving them with torch's allocator; all of them, or none where there is no room for all. Compute's lies behind what cuBLAS
        keeps for this stream from a thread's first product on, autograd's thread too: that would lie in the middle of it."""
        with torch.cuda.stream(self.streams["compute"]._stream), torch.enable_grad():
            a = torch.zeros(16, 16, dtype=torch.bfloat16, device=self.device, requires_grad=True)
            F.linear(a @ a, a, a[0]).sum().backward()
        del a
        torch.cuda.empty_cache()
        pieces = {name: round((1 + SPARE) * size_bytes) + SPARE_BYTES for name, size_bytes in sizes.items() if size_bytes}
        if sum(pieces.values()) > torch.cuda.mem_get_info()[0]:
            return
        for name, size_bytes in pieces.items():
            with torch.cuda.stream(torch.cuda.current_stream() if name == CALLER else self.streams[name]._stream), suppress(torch.OutOfMemoryError):
                torch.empty(size_bytes, dtype=torch.uint8, device=self.device)

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        to.copy_(source, non_blocking=True)

    def timed(self, span: list):
        return _timed(span, self._timed)

    def enter(self, streams: Iterable[str]) -> None:
        """The caller's is its current stream."""
        event = Event(torch.cuda.current_stream())
        for stream in streams:
            self.streams[stream].wait(event)

    def meet(self, events: Iterable[Event]) -> None:
        current = torch.cuda.current_stream()
        for event in events:
            current.wait_event(event._event)

    def join(self, streams: Iterable[str]) -> None:
        current = torch.cuda.current_stream()
        for stream in streams:
            current.wait_stream(self.streams[stream]._stream)

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def settle(self) -> None:
        self.synchronize()
        for span, start, end in self._timed:
            span[:] = (round(self._base.elapsed_time(t) * 1e6) for t in (start, end))
        self._timed.clear()

    def close(self) -> None:
        torch.cuda.synchronize()
        for memory in self._pinned:
            memory.free()
        self._pinned.clear()
