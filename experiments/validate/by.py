"""By: what another machine's profile would have said of configurations that were measured. Nothing is run, so it tells how far one profile carries:
to another card of its kind, another day, models that it was not calibrated for."""
from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from experiments.validate import bars, report, rows
from experiments.validate.case import Case
from experiments.validate.rows import Row
from sim.errors import UserError
from sim.machine import Machine
from sim.metrics import times
from sim.simulate import simulate

ALL = "all"


def by(machine: Machine, out: Path, console: Console | None = None) -> dict[str, list[Row]]:
    """Model, or ALL -> the rows of a folder with this machine's step times for predictions; printed. Raises UserError where it has no rows."""
    cases = {case.number: case for case in rows.load(out / "grid.csv", Case)}
    done = rows.load(out / "rows.csv", Row)
    rows.check(out / "rows.csv", done, list(cases.values()))
    if other := next((case.device for case in cases.values() if case.device != machine.kind), None):
        raise UserError(f"{out} was measured on {other}, {machine.name} is a machine of kind {machine.kind}; give --by one of kind {other} (fpdt machines)")
    told = [replace(row, predicted_s=predicted(cases[row.number], machine)) for row in done if not row.reason]
    if not told:
        raise UserError(f"{out} has no configuration that was measured; name the folder of a run of fpdt validate with --out")
    found = {ALL: told} | {name: [row for row in told if row.model == name] for name in sorted({row.model for row in told})}
    lines = [(name, len(mine), *_said(mine)) for name, mine in found.items()]
    report.table((f"step time by {machine.name}", "configurations", "median |error|", "worst", "bias", "ordered right", "regret, worst"), lines, console or Console())
    return found


def predicted(case: Case, machine: Machine) -> float:
    """Seconds of a step."""
    return times(simulate(case.schedule(), case.strategy, machine))["step_s"]


def _said(rows: list[Row]) -> tuple[str, ...]:
    three = report.three([row.error for row in rows])
    right, most = bars.ordered(rows), max(bars.regrets(rows).values(), default=None)
    return f"{three['median']:.1%}", f"{three['worst']:+.1%}", f"{three['bias']:+.1%}", *("n/a" if share is None else f"{share:.1%}" for share in (right, most))
