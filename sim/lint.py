"""Lint: two proofs that a schedule may run, or a counterexample.

Order: every op comes after all earlier ops on the bytes it touches, by stream order, waits and host blocking, over every pair of
regions that may follow each other (sim/hazards). Data: every output is what it should be (sim/data). A schedule is taken as it
stands; unreduced waits, redundant waits and any legal order are fine.
"""
from __future__ import annotations

import numpy as np

from sim import data
from sim.check import check
from sim.errors import UserError
from sim.hazards import Cells, Walk, clocks, needs, walk
from sim.schedule import PREV, STREAMS, Op, Schedule
from sim.text import show_ops


class LintError(UserError):
    """One line that says what is wrong and what would mend it; `drawing` shows the place in the schedule."""

    def __init__(self, line: str, drawing: str) -> None:
        super().__init__(line)
        self.drawing = drawing


def lint(schedule: Schedule) -> None:
    """Raises LintError at the first thing that is unsafe or wrong, UserError where the schedule is not even well formed."""
    check(schedule)
    _order(schedule)
    try:
        data.prove(schedule)
    except data.Wrong as wrong:
        raise LintError(wrong.line, draw(schedule, wrong.region, wrong.op)) from None


def _order(schedule: Schedule) -> None:
    w = Walk(schedule, walk(schedule))
    need = needs(w)
    late = need > np.array(clocks(w, w.waits()), np.int64).reshape(-1, len(STREAMS))
    if late.any():
        number = int(np.flatnonzero(late.any(axis=1))[0])
        stream = int(np.flatnonzero(late[number])[0])
        _race(w, number, w.on_stream[stream][need[number, stream]])


def _race(w: Walk, number: int, source: int) -> None:
    """Raises the error for op `number` that does not come after op `source`."""
    op, first, region, other = w.ops[number], w.ops[source], w.instances[w.at[number]][0], w.instances[w.at[source]][0]
    cells = Cells(w.schedule)
    mine, its = (_touched(cells, w, k) for k in (number, source))
    name, name2 = next((a, b) for a in mine for b in its if mine[a] & its[b] and (a in op.writes or b in first.writes))
    verbs = ["writes" if n in o.writes else "reads" for n, o in ((name, op), (name2, first))]
    gap = w.at[number] - w.at[source]
    when = ("", f" in the {other} before", f" in the {other} {gap} regions before")[min(gap, 2)]
    mend = f"add 'wait {first.id if not gap else f'{PREV}{other}:{first.id}'}' to {op.id}"
    if gap > 1:
        between = w.instances[w.at[number] - 1][0]
        mend = f"let an op of {between} wait for it, and {op.id} for that op (prev:{between}:...)"
    line = f"{op.id} {verbs[0]} {name}{_bytes(w.schedule, region, name)} but does not come after {first.id}{when}, which {verbs[1]} {'it' if name == name2 else name2}; {mend}"
    raise LintError(line, draw(w.schedule, region, op, first))


def _touched(cells: Cells, w: Walk, number: int) -> dict[str, set[int]]:
    """Numbers of the cells of each operand of an op of the walk."""
    op = w.ops[number]
    return {name: cells.at(w.instances[w.at[number]], name) for name in op.reads + op.writes}


def _bytes(schedule: Schedule, region: str, name: str) -> str:
    b = schedule.buffer(region, name)
    return "" if b.offset is None else f" ({b.space} bytes {b.offset} to {b.offset + b.size_bytes}{' of its layer' if b.life == 'saved' else ''})"


def draw(schedule: Schedule, region: str, op: Op | None, other: Op | None = None, around: int = 2) -> str:
    """The lines around an op with an arrow at it, and around the op it should come after."""
    ops = schedule.regions[region].ops
    marks = {k: mark for mark, it in (("  after ", other), ("------> ", op)) for k in range(len(ops)) if ops[k] is it} or {len(ops): ""}
    keep = sorted({k for mark in marks for k in range(max(0, mark - around), min(len(ops), mark + around + 1))})
    lines = []
    for k, text in zip(keep, show_ops([ops[k] for k in keep])):
        if lines and k - 1 not in keep:
            lines.append("        ...")
        lines.append(marks.get(k, "        ") + text)
    return "\n".join(lines)
