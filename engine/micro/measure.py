"""Measure: groups of points in turns, on all ranks at once, kernels back to back at the steady clock.

Every rank walks through the same points; what they have to agree on (how many calls, whether to go on) is the slowest rank's or rank 0's
word. A point that cannot run says why and is N/A; what the time did not suffice for is left out and counted.
"""
from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from statistics import median

import torch

from engine.kernels.rates import in_a_line
from engine.meter import SENSED, Meter
from engine.micro.place import Place
from engine.micro.table import Args, Call, Group, Micro, load
from engine.oom import out_of_memory

SLICE_S = {"cpu": 0.004, "cuda": 0.03}
"""A point is called back to back for so long, each time."""
MOST_CALLS = 64
"""So many calls fit a launch queue, with what stands before them."""
STEADY_S = 0.5
"""Load before a group, as compiling it has let the card cool."""
Tick = Callable[[int, int, str], None]
"""Called with what is done, of how much, and its name."""


@dataclass
class Point:
    """One size of one kind."""

    micro: Micro
    args: Args
    work: tuple[float, float] = (0.0, 0.0)
    call: Call | None = None
    calls: int = 1
    why: str = ""
    """Why it is N/A."""
    ns: list[float] = field(default_factory=list)
    """A round each: of one call, on the slowest rank."""
    clocks: list[dict] = field(default_factory=list)

    def found(self) -> dict:
        """As a machine file keeps it."""
        row = {"name": self.micro.name, "args": self.args, "GFLOPs": self.work[0], "MB": self.work[1]}
        if not self.ns:
            return row | {"ns": None, "why": self.why}
        known = {name: [c[name] for c in self.clocks if c[name] is not None] for name in SENSED}
        return row | {"ns": round(median(self.ns)), "low_ns": round(min(self.ns)), "high_ns": round(max(self.ns)), "rounds": len(self.ns)} | {
            name: median(values) if values else None for name, values in known.items()}


def measure(place: Place, meter: Meter, groups: Iterable[Group], begin: float, tick: Tick = lambda done, total, name: None) -> Iterator[list[dict]]:
    """The points of one group after the other, each as `Point.found` says. `begin`: when the plan's time began, on time.monotonic."""
    plan = place.plan
    made = [(group, [Point(m, args) for m in group.entries for args in m.sizes(place)]) for group in groups]
    total, done = sum(len(points) for _, points in made) * (1 + plan.rounds), 0
    shares = sum(group.share for group, _ in made)
    for group, points in made:
        now = time.monotonic()
        end = now + max(0.0, begin + plan.budget_s - now) * group.share / shares  # what a group leaves, those after it have
        shares -= group.share
        ready = []
        for k, point in enumerate(points):
            tick(done + k, total, group.name)
            ready += [point] if _warm(place, point, end) else []
        if ready and place.device.type == "cuda":
            keep_busy(place, STEADY_S)
        for k in range(plan.rounds):
            if k and place.first(float(time.monotonic() > end)):
                break
            for n, point in enumerate(ready):
                _once(place, meter, point)
                tick(done + len(points) * (1 + k) + n, total, group.name)
        done += len(points) * (1 + plan.rounds)
        for point in points:
            point.call = None
        place.clear()
        yield [point.found() for point in points]
    tick(total, total, "done")


def keep_busy(place: Place, seconds: float) -> None:
    """Products back to back, so that clock and power settle."""
    call, stop = load(place), time.monotonic() + seconds
    while time.monotonic() < stop:
        place.backend.streams["compute"].launch(lambda: [call() for _ in range(8)])
        place.backend.settle()


def _warm(place: Place, point: Point, end: float) -> bool:
    """Makes a point's call, runs it, and counts how often it goes into a slice. False, with a reason, where a rank cannot or time is up."""
    point.work = point.micro.work(place, point.args)
    if place.first(float(time.monotonic() > end)):
        point.why = "not reached in the time there was"
        return False
    took, why = 0.0, ""
    try:
        if _mine(place, point):
            with torch.no_grad():
                point.call = point.micro.make(place, point.args)
            place.backend.settle()  # operands were made on the caller's stream
            _run(place, point, 1)
            took = _run(place, point, 2)
    except Exception as error:  # not for these shapes, GPUs or versions after all, in its own words
        why = out_of_memory(error) or in_a_line(error)
    failed, took = place.most(float(bool(why)), took)
    if failed:
        point.why, point.call = why or "cannot run on another rank", None
        return False
    point.calls = max(1, min(MOST_CALLS, math.ceil(SLICE_S[place.plan.device] * 1e9 / max(took, 1.0))))
    return True


def _once(place: Place, meter: Meter, point: Point) -> None:
    """One round of a point."""
    begin = time.monotonic()
    mine = _run(place, point, point.calls) if point.call else 0.0
    ns, = place.most(mine)
    point.ns.append(ns)
    point.clocks.append(meter.read(begin, time.monotonic()))


def _run(place: Place, point: Point, calls: int) -> float:
    """ns a call. On a GPU products keep the stream busy, whichever it is, while the host issues the calls; a CPU's caches get one call."""
    stream, span = place.backend.streams[point.micro.stream], []
    busy = load(place) if place.device.type == "cuda" else point.call
    stream.launch(lambda: [busy() for _ in range(4 if place.device.type == "cuda" else 1)])
    stream.launch(lambda: [point.call() for _ in range(calls)] and None, span)
    place.backend.settle()
    return (span[1] - span[0]) / calls


def _mine(place: Place, point: Point) -> bool:
    """Whether this rank takes part."""
    return place.rank < point.args.get("ranks", place.plan.P)
