"""Lint: two proofs that a schedule may run, or a counterexample.

Order: every op comes after all earlier ops on the bytes it touches, by stream order, waits and host blocking, over every pair of
regions that may follow each other (sim/hazards). Data: every output is what it should be (sim/data). A schedule is taken as it
stands; unreduced waits, redundant waits and any legal order are fine.
"""
from __future__ import annotations

import numpy as np

from sim import data
from sim.cells import Cells
from sim.check import check
from sim.errors import UserError
from sim.hazards import Instance, alone, chain
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
            other = region.ops[region.on_stream[stream][region.need[k, stream]]]
            raise _race(schedule, cells, here, region.ops[k], here, other, f"add 'wait {other.id}' to {region.ops[k].id}")
    for instance in chain(schedule, regions, cells):
        late = instance.late()
        if late.any():
            row = int(late.any(axis=1).argmax())
            stream = int(late[row].argmax())
            position = int(instance.need[row, stream])
            source, k = instance.source(stream, position)
            op, other = instance.region.ops[instance.ops[row]], source.region.ops[k]
            raise _race(schedule, cells, instance.what, op, source.what, other, _mend(instance, op, source, other, stream, position))


def _mend(instance: Instance, op: Op, source: Instance, other: Op, stream: int, position: int) -> str:
    """Which wait makes an op come after one of an earlier region: on it, or on the first op between that does."""
    near = instance.before
    if near is source:
        return f"add 'wait {PREV}{near.region.name}:{other.id}' to {op.id}"
    after = near.clock(np.arange(len(near.region.ops)))[:, stream] >= position
    if after.any():
        return f"add 'wait {PREV}{near.region.name}:{near.region.ops[int(after.argmax())].id}' to {op.id}"
    while near.before is not source:
        near = near.before
    return f"add 'wait {PREV}{source.region.name}:{other.id}' to {near.region.ops[-1].id}, and let {op.id} come after that"


def _race(schedule: Schedule, cells: Cells, here: tuple, op: Op, there: tuple, other: Op, mend: str) -> LintError:
    """The error for an op of one instance that does not come after an op of another, or of the same one."""
    mine, its = ({name: cells.at(at, name) for name in o.reads + o.writes} for at, o in ((here, op), (there, other)))
    name, name2 = next((a, b) for a in mine for b in its if mine[a] & its[b] and (a in op.writes or b in other.writes))
    verbs = ["writes" if n in o.writes else "reads" for n, o in ((name, op), (name2, other))]
    when = "" if here == there else f" of an earlier {there[0]}"
    line = f"{op.id} {verbs[0]} {name}{_bytes(schedule, here[0], name)} but does not come after {other.id}{when}, which {verbs[1]} {'it' if name == name2 else name2}; {mend}"
    return LintError(line, draw(schedule, here[0], op, other))


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
