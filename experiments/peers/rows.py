"""Rows: cases measured one after the other in one set of ranks. One that cannot run has a reason instead of numbers, and the rest get new ranks."""
from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from statistics import median

from rich.progress import Progress

from engine import probe
from engine.ranks import run
from experiments.bars import pinning
from experiments.peers.case import Case
from experiments.peers.serve import ROW, TICK
from sim import text
from sim.errors import RankLost, UserError
from sim.schedule import SPACES, Schedule
from sim.units import show_bytes

ENGINE = ("engine", "resident")
"""Rows that run a schedule."""


def measure(cases: dict[str, Case], P: int, bar: Progress, keep: Callable[[str, dict], None]) -> None:
    """Calls keep(name, result) for each case, in order, as soon as it is there."""
    left = dict(cases)

    def done(result: dict) -> None:
        name = next(iter(left))
        case = left.pop(name)
        keep(name, {"row": case.row} | result)

    while left:
        try:
            _together(left, P, bar, done)
        except (UserError, RankLost, RuntimeError) as error:
            done({"reason": str(error)})


def _together(cases: dict[str, Case], P: int, bar: Progress, done: Callable[[dict], None]) -> None:
    """One set of ranks, from the first case to the last or to one that cannot run, which raises."""
    first = next(iter(cases.values()))
    if first.row in ENGINE:
        _room(text.parse(first.schedule), first.device)
    names = iter(tuple(cases))
    task = bar.add_task(next(names), total=None, state="")

    def hear(line: str) -> None:
        if line.startswith(TICK):
            step, of = map(int, line.split()[1:])
            bar.update(task, completed=step, total=of)
        if line.startswith(ROW):
            result = json.loads(line.removeprefix(ROW))
            done(result | _medians(**result))
            if name := next(names, None):
                bar.reset(task, description=name, total=None)

    try:
        run("experiments.peers.serve", [asdict(case) for case in cases.values()], P, first.device, hear, pinning(bar))
    except BaseException:
        bar.update(task, state="not measured")
        raise
    finally:
        bar.stop_task(task)


def _medians(forward_s: list[float], total_s: list[float], **_) -> dict[str, float]:
    backward_s = [total - forward for forward, total in zip(forward_s, total_s)]
    return {"median_forward_s": median(forward_s), "median_backward_s": median(backward_s), "median_total_s": median(total_s)}


def _room(schedule: Schedule, device: str) -> None:
    """Raises UserError where the host has less memory than all ranks take there."""
    spaces = SPACES if device == "cpu" else ("host",)
    need = schedule.P * (sum(schedule.arena_bytes(space) for space in spaces) + schedule.handed_bytes)
    if need > (have := probe.memory_bytes()):
        raise UserError(f"the arenas of {schedule.P} ranks need {show_bytes(need)} of host memory, {show_bytes(need - have)} more than there is; use a shorter --seq")
