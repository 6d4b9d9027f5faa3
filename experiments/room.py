"""Room: whether a schedule fits this machine's memory, asked before anything starts, and what would fit if it does not."""
from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from engine import probe
from sim.build.step import build
from sim.errors import UserError
from sim.need import need, states
from sim.schedule import Schedule
from sim.strategy import Strategy
from sim.units import show_bytes

TRIED = 128
"""Smaller chunks are tried down to so many a sequence: that many take a second to plan, 512 ten."""


class Limit(NamedTuple):
    """Memory of one kind, and how often a rank's need of each space comes out of it."""

    where: str
    have_bytes: int
    times: dict[str, int]

    def need_bytes(self, schedule: Schedule, zero: int) -> int:
        found = need(schedule, zero)
        return sum(found[space] * n for space, n in self.times.items())


def limits(device: str, ranks: int) -> list[Limit]:
    """Of this node, for the ranks that run on it. A CPU has one memory for everything."""
    if device == "cpu":
        return [Limit("of memory here", probe.memory_bytes(), {"hbm": ranks, "host": ranks})]
    return [Limit("free on a GPU here", probe.hbm_bytes(ranks), {"hbm": 1}), Limit("of host memory here", probe.memory_bytes(), {"host": ranks})]


def check_memory(schedule: Schedule, strategy: Strategy, device: str, ranks: int | None = None) -> None:
    """Raises UserError where the schedule, run by so many ranks of this node (all if not given), needs more than there is: by how much,
    and the longest S and the largest chunk that would fit."""
    zero = strategy.zero
    for limit in limits(device, schedule.P if ranks is None else ranks):
        if limit.need_bytes(schedule, zero) > limit.have_bytes:
            raise UserError(_refusal(schedule, strategy, limit))


def _refusal(schedule: Schedule, strategy: Strategy, limit: Limit) -> str:
    m, have = schedule.model, limit.have_bytes

    def fits(seq: int, chunk: int) -> bool:
        return limit.need_bytes(build(m, strategy.replace(chunk=chunk), seq, schedule.dtype), strategy.zero) <= have

    def lacks(size: int) -> str:
        return f"{show_bytes(size - have)} more than the {show_bytes(have)} {limit.where}"

    fixed = states(schedule, strategy.zero) * limit.times.get("hbm", 0)
    smaller = "take fewer layers (--layers) or a smaller model" + (", or more GPUs with --zero 3" if "hbm" in limit.times and "host" not in limit.times else "")
    if fixed > have:
        return f"{m.name} needs {show_bytes(fixed)} for its states alone, {lacks(fixed)}; {smaller}"
    size = limit.need_bytes(schedule, strategy.zero)
    said = f"S={schedule.seq} needs {show_bytes(size)}{_whose(limit)}, {lacks(size)}"
    longest = _most(schedule.P, schedule.seq, lambda seq: fits(seq, strategy.chunk))
    largest = _most(-(-schedule.seq // (TRIED * schedule.P)), schedule.chunk // schedule.P, lambda part: fits(schedule.seq, part * schedule.P)) * schedule.P
    could = [f"the longest S that fits is about {longest}"] if longest else [f"no S fits, {smaller}"]
    could += [f"the largest chunk for this S about {largest}"] if largest else []
    return f"{said}; {', '.join(could)}"


def _whose(limit: Limit) -> str:
    """What the bytes are for, in words."""
    if "hbm" not in limit.times:
        return f" for the host arenas of {limit.times['host']} ranks"
    return f" for the arenas and states of {limit.times['hbm']} ranks" if "host" in limit.times else " on each GPU for its arena and states"


def _most(low: int, high: int, fits: Callable[[int], bool]) -> int:
    """About the largest number from `low` up that fits, `high` being known not to; 0 if none does."""
    if low >= high or not fits(low):
        return 0
    while high - low > max(1, low // 256):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
