"""Clock: a GPU that its power limits runs the faster, the more of a step it idles.

Cost curves hold at `clock_MHz`, where the card settles while compute never idles. Dynamic power grows with the cube of the clock (frequency
times voltage squared), so a card whose compute is busy for a share b of a step affords b^(-1/3) times that clock, and `clock_max_MHz` at most.
"""
from __future__ import annotations

from sim.machine import Machine
from sim.timeline import Timeline

EXPONENT = 3
WORTH = 0.005
"""A clock that is higher by less than this is the same."""
ROUNDS = 8
"""Faster compute idles more, which makes it faster; this often is enough."""


def faster(machine: Machine, timeline: Timeline) -> float:
    """How many times as fast compute runs as in this timeline of a step at `clock_MHz`; 1 where no clocks were measured."""
    base, most = machine.get("clock_MHz"), machine.get("clock_max_MHz")
    if not base or not most or not len(timeline):
        return 1.0
    compute = timeline.on("compute")
    busy = int((timeline.end_ns[compute] - timeline.start_ns[compute]).sum())
    idle, rate = int(timeline.end_ns.max()) - busy, 1.0
    for _ in range(ROUNDS if busy else 0):
        rate = min(most / base, (busy / (busy + idle * rate)) ** (-1 / EXPONENT))
    return max(1.0, rate)
