"""Timing: a forward and a backward, again and again, on all ranks at once: the slowest rank's time counts."""
from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Protocol

import torch

from engine.most import most
from experiments.peers.case import Case, Place


class Step(Protocol):
    """What is timed."""

    def clear(self) -> None:
        """Drops what an earlier step left; not timed."""

    def forward(self) -> None: ...

    def backward(self) -> None: ...


def measure(step: Step, place: Place, case: Case, tick: Callable[[int, int], None]) -> dict:
    """forward_s and total_s of each repeat, the peak of allocated HBM, and how often torch's allocator pinned host memory meanwhile (both None
    on CPU). tick(done, of) follows each step."""
    warm_ups, repeats, last = case.warm_ups, case.repeats, math.inf
    for k in range(warm_ups):
        _, last = timed(step, place)
        tick(k + 1, warm_ups + repeats)
    more = math.ceil(case.load_s / last)  # the same on every rank
    for k in range(more):
        timed(step, place)
        tick(warm_ups + k + 1, warm_ups + more + repeats)
    if place.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    pinned = _pinned(place)
    found = []
    for k in range(repeats):
        found.append(timed(step, place))
        tick(warm_ups + more + k + 1, warm_ups + more + repeats)
    peak = int(most([torch.cuda.max_memory_allocated()], place.group)[0]) if place.device.type == "cuda" else None
    forward_s, total_s = zip(*found)
    pinned = None if pinned is None else _pinned(place) - pinned
    return {"forward_s": forward_s, "total_s": total_s, "peak_hbm_bytes": peak, "pinned_allocations": pinned, "load_steps": more}


def _pinned(place: Place) -> int | None:
    """Allocations of pinned memory by torch so far, of which what it had cached is none."""
    return torch.cuda.host_memory_stats().get("num_host_alloc") if place.device.type == "cuda" else None


def timed(step: Step, place: Place) -> tuple[float, float]:
    """Seconds until forward is done, and all; the most of any rank. The host waits for the device at the end alone."""
    step.clear()
    most([0.0], place.group)  # nobody starts before all are here
    _settle(place)
    marks = [_mark(place)]
    start = time.perf_counter()
    step.forward()
    marks.append(_mark(place))
    step.backward()
    _settle(place)
    total = time.perf_counter() - start
    return tuple(most([_between(*marks), total], place.group))


def _mark(place: Place):
    if place.device.type == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(first, second) -> float:
    return second - first if isinstance(first, float) else first.elapsed_time(second) / 1e3


def _settle(place: Place) -> None:
    place.backend.settle()
