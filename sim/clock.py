"""Clock: how fast a GPU runs that its power limits, by what it does in a step.

Dynamic power grows with the cube of the clock (frequency times voltage squared). A card that does one kind of work only settles at that work's
clock; where work w is done for a share b_w of a step, at f with sum b_w (f / f_w)^3 = 1, and at `clock_max_MHz` at most. What is idle draws
nothing of that. Attention is one kind of work, all other compute the other. Cost curves hold at `clock_MHz`.
"""
from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np

from sim.machine import Machine
from sim.schedule import Schedule, kind_of
from sim.timeline import Timeline

ATTENTION = ("attn", "attn_bwd")
CLOCKS = ("attn_clock_MHz", "other_clock_MHz")
"""Of each kind of work; `clock_MHz` where they were not told apart."""
EXPONENT = 3
WORTH = 0.005
"""A clock that differs by less than this is the same."""
ROUNDS = 8
"""Faster compute idles more, which makes it faster; this often is enough."""


class Load(NamedTuple):
    """What compute does in a step, in ns at `clock_MHz`."""

    attention: float
    other: float
    idle: float


def planned(schedule: Schedule, ns: dict[str, int]) -> Load:
    """That of a step that never idles; ns: each op's."""
    many = Counter(region for region, _ in schedule.order())
    ops = [(op, many[name] * ns[op.id]) for name, region in schedule.regions.items() for op in region.ops if op.stream == "compute"]
    return Load(sum(t for op, t in ops if op.kind in ATTENTION), sum(t for op, t in ops if op.kind not in ATTENTION), 0)


def done(timeline: Timeline, rate: float = 1.0) -> Load:
    """That of a step which ran so many times as fast."""
    compute = timeline.on("compute")
    attends = np.array([kind_of(name) in ATTENTION for name in timeline.names], bool)[timeline.op[compute]]
    ns = timeline.end_ns[compute] - timeline.start_ns[compute]
    return Load(rate * float(ns[attends].sum()), rate * float(ns[~attends].sum()), float(timeline.end_ns.max(initial=0) - ns.sum()))


def known(machine: Machine) -> bool:
    """Whether its clocks were measured; else compute always runs as its curves say."""
    return bool(machine.get("clock_MHz") and machine.get("clock_max_MHz"))


def rate(machine: Machine, load: Load) -> float:
    """How many times as fast as at `clock_MHz` compute runs, on a machine whose clocks are known."""
    base, most = machine["clock_MHz"], machine["clock_max_MHz"]
    busy = load.attention + load.other
    if not busy:
        return 1.0
    drawn = sum(ns * (base / (machine.get(name) or base)) ** EXPONENT for name, ns in zip(CLOCKS, load))
    found = 1.0
    for _ in range(ROUNDS):
        found = min(most / base, ((busy + load.idle * found) / drawn) ** (1 / EXPONENT))
    return found if differs(found, 1.0) else 1.0


def differs(rate: float, other: float) -> bool:
    """Whether that is worth another simulation."""
    return abs(rate / other - 1) > WORTH
