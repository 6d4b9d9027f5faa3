"""Clock: how fast a GPU runs that its power limits, by how much it computes in a step.

Arithmetic takes energy: the more, the higher the voltage, which rises with the clock, so that a FLOP's energy grows as the clock's square. Power
that allows `power_TFLOPS` at `clock_max_MHz` allows (clock_max / f)^2 as many at f: a card settles where its step has that many, on average over all
of the step, idle time included. Cost curves hold at `clock_MHz`.
"""
from __future__ import annotations

from collections import Counter
from typing import NamedTuple

from sim.machine import Machine
from sim.ops import Work
from sim.schedule import Schedule
from sim.timeline import Timeline

WORTH = 0.005
"""A clock that differs by less than this is the same."""
ROUNDS = 8
"""Faster compute idles more, which makes it faster; this often is enough."""
NUMBERS = ("clock_MHz", "clock_max_MHz", "power_TFLOPS")
"""What a machine's clocks are known by."""


class Load(NamedTuple):
    """What compute does in a step."""

    flops: int
    """Of products and attention."""
    busy_ns: float
    """At `clock_MHz`."""
    idle_ns: float


def computes(schedule: Schedule) -> list[tuple[str, int]]:
    """(op id, how often a step runs it) of what compute does."""
    many = Counter(region for region, _ in schedule.order())
    return [(op.id, many[name]) for name, region in schedule.regions.items() for op in region.ops if op.stream == "compute"]


def flops(ops: list[tuple[str, int]], works: dict[str, Work]) -> int:
    """Of all these products and attention; works: each op's."""
    return sum(times * works[id].flops for id, times in ops)


def planned(schedule: Schedule, works: dict[str, Work], ns: dict[str, int]) -> Load:
    """That of a step that never idles; ns: each op's."""
    ops = computes(schedule)
    return Load(flops(ops, works), sum(times * ns[id] for id, times in ops), 0)


def done(plan: Load, timeline: Timeline, rate: float = 1.0) -> Load:
    """That of a step so planned, which ran so many times as fast."""
    compute = timeline.on("compute")
    ns = float((timeline.end_ns[compute] - timeline.start_ns[compute]).sum())
    return plan._replace(busy_ns=rate * ns, idle_ns=float(timeline.end_ns.max(initial=0)) - ns)


def known(machine: Machine) -> bool:
    """Whether its clocks were measured, and limited by power; else compute always runs as its curves say."""
    return all(machine.get(number) for number in NUMBERS)


def rate(machine: Machine, load: Load) -> float:
    """How many times as fast as at `clock_MHz` compute runs, on a machine whose clocks are known."""
    base, most, power = (machine[number] for number in NUMBERS)
    most /= base
    if not load.flops or not load.busy_ns:
        return most
    allowed_ns = load.flops / (power * 1e3 * most ** 2)
    found = 1.0
    for _ in range(ROUNDS):
        found = min(most, ((load.busy_ns + load.idle_ns * found) / allowed_ns) ** (1 / 3))
    return found if differs(found, 1.0) else 1.0


def differs(rate: float, other: float) -> bool:
    """Whether that is worth another simulation."""
    return abs(rate / other - 1) > WORTH
