"""The interface a backend fills: what CUDA streams and events do, and no more.

A stream runs what it is given in order. An event is recorded on one stream and waited for on another, or by the host. A wait
on an event is issued after its record was (the lint guarantees it). Nothing blocks the host but `Event.block`, `synchronize`,
`settle` and, where the caller's own work runs on the host, `join`.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Protocol

import torch


CALLER = "caller"
"""The stream that a program is run from."""


class Event(Protocol):
    """A point on a stream."""

    def block(self) -> None:
        """Blocks the host until the stream has reached it."""


class Stream(Protocol):
    """A queue of work that runs in order, beside the others."""

    def launch(self, work: Callable[[], None], span: list | None = None) -> None:
        """Issues work; if a span is given, its [start_ns, end_ns] is filled in once it has run (see settle)."""

    def record(self) -> Event:
        """Issues a new event."""

    def wait(self, event: Event) -> None:
        """Makes what is issued from now on run after the event."""


class Backend(Protocol):
    """Streams by name, memory by space."""

    streams: dict[str, Stream]
    device: torch.device

    def arena(self, space: str, size_bytes: int) -> torch.Tensor:
        """uint8 [size_bytes] of a space: device memory, or host memory that copies can run from. Taken once."""

    def keep(self, sizes: dict[str, int]) -> None:
        """Gives back what nobody uses, then keeps so many bytes of device memory free for each stream, CALLER's too, in one piece: what is made on that
        stream is cut from it, and it is whole again when all that is gone. Pieces as they would come one by one fit nothing else later."""

    def copy(self, to: torch.Tensor, source: torch.Tensor) -> None:
        """Copies bytes between spaces; called on the h2d or d2h stream."""

    def timed(self, span: list) -> AbstractContextManager[None]:
        """Fills a span with the time of what the caller itself issues inside (see settle)."""

    def enter(self, streams: Iterable[str]) -> None:
        """What is issued to these streams from now on comes after what the caller did before."""

    def meet(self, events: Iterable[Event]) -> None:
        """What the caller issues next comes after these."""

    def join(self, streams: Iterable[str]) -> None:
        """Whatever the caller does next comes after all that was issued to these streams. Raises what a stream raised."""

    def synchronize(self) -> None:
        """Blocks the host until all that was issued has run. Raises what a stream raised."""

    def settle(self) -> None:
        """Synchronizes, and fills every span in, which takes a while for each."""

    def close(self) -> None:
        """Gives streams and memory back."""
