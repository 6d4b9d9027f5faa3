"""Lint: two proofs that a schedule may run, or a counterexample.

Order: every op comes after all earlier ops on the bytes it touches, by stream order, waits and host blocking, over every pair of
regions that may follow each other (sim/hazards). Data: every output is what it should be (sim/data). A schedule is taken as it
stands; unreduced waits, redundant waits and any legal order are fine.
"""
from __future__ import annotations

from collections.abc import Sequence

from sim import data
from sim.cells import Cells
from sim.check import check
from sim.errors import UserError
from sim.hazards import alone, chain
from sim.schedule import PREV, Op, Schedule
from sim.text import show_ops


class LintError(UserError):
    """One line that says what is wrong and what would mend it; `drawing` shows the place in the schedule."""

    def __init__(self, line: str, drawing: str) -> None:
        super().__init__(line)
        self.drawing = drawing


def lint(schedule: Schedule) -> None:
    """Raises LintError at the first thing that is unsafe or wrong, UserError where the schedule is not even well formed."""
    check(schedule)
    try:
        data.prove(schedule)
    except data.Wrong as wrong:
        raise LintError(wrong.line, draw(schedule, wrong.region, wrong.op)) from None
    _order(schedule)


def _order(schedule: Schedule) -> None:
    regions, cells = alone(schedule)
    for region in regions.values():
        late = region.need > region.clock
        if late.any():
            k = int(late.any(axis=1).argmax())
            stream = int(late[k].argmax())
            here = (region.name, 0, 0)
            raise _race(schedule, cells, here, region.ops[k], here, region.ops[region.on_stream[stream][region.need[k, stream]]], ())
    for instance in chain(schedule, regions, cells):
        late = instance.late()
        if late.any():
            row = int(late.any(axis=1).argmax())
            stream = int(late[row].argmax())
            source, k = instance.source(stream, int(instance.need[row, stream]))
            between, near = [], instance.before
            while near is not source:
                between, near = [near.region.name, *between], near.before
            raise _race(schedule, cells, instance.what, instance.region.ops[instance.ops[row]], source.what, source.region.ops[k], between)


def _race(schedule: Schedule, cells: Cells, here: tuple, op: Op, there: tuple, other: Op, between: Sequence[str]) -> LintError:
    """The error for an op that does not come after another one, with the regions that ran between."""
    mine, its = ({name: cells.at(at, name) for name in o.reads + o.writes} for at, o in ((here, op), (there, other)))
    name, name2 = next((a, b) for a in mine for b in its if mine[a] & its[b] and (a in op.writes or b in other.writes))
    verbs = ["writes" if n in o.writes else "reads" for n, o in ((name, op), (name2, other))]
    region, before = here[0], there[0]
    if here == there:
        when, mend = "", f"add 'wait {other.id}' to {op.id}"
    elif not between:
        when, mend = f" in the {before} before", f"add 'wait {PREV}{before}:{other.id}' to {op.id}"
    else:
        when = f" in the {before} before the {' and the '.join(between)}"
        mend = f"let an op of {between[0]} wait for {PREV}{before}:{other.id}, and {op.id} for that op"
    line = f"{op.id} {verbs[0]} {name}{_bytes(schedule, region, name)} but does not come after {other.id}{when}, which {verbs[1]} {'it' if name == name2 else name2}; {mend}"
    return LintError(line, draw(schedule, region, op, other))


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
