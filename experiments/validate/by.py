"""By: what another machine's profile would have said of configurations that were measured. Nothing is run, so it tells how far one profile carries:
to another card of its kind, another day, models that it was not calibrated for."""
from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rich.console import Console

from experiments.validate import bars, report, rows
from experiments.validate.record import recorded
from experiments.validate.rows import Row
from sim.errors import UserError
from sim.machine import Machine
from sim.metrics import times
from sim.simulate import simulate

ALL = "all"


def by(machine: Machine, out: Path, console: Console | None = None) -> dict[str, list[Row]]:
    """Model, or ALL -> the rows of a folder with this machine's step times for predictions; printed. Raises UserError where it has no rows."""
    console, done = console or Console(), rows.load(out / "rows.csv", Row)
    if not any(not row.reason for row in done):
        raise UserError(f"{out} has no configuration that was measured; name the folder of a run of fpdt validate with --out")
    asked, sessions = recorded(out)
    if asked.device != machine.kind:
        raise UserError(f"{out} was measured on {asked.device}, {machine.name} is a machine of kind {machine.kind}; give --by one of kind {asked.device} (fpdt machines)")
    cases = asked.drawn(out)
    rows.check(out / "rows.csv", done, cases)
    told, assumed = [], {}
    for row in (row for row in done if not row.reason):
        timeline = simulate(cases[row.number].schedule(), cases[row.number].strategy, machine)
        told.append(replace(row, predicted_s=times(timeline)["step_s"]))
        assumed |= dict.fromkeys(note for note in timeline.meta["assumptions"] if not note.startswith("clock:"))
    report.say(f"{out}, measured on {'; '.join(str(sessions.get(name, {}).get('provenance', 'an unknown machine')) for name in sorted({row.profile for row in told}))}", console)
    found = {ALL: told} | {name: [row for row in told if row.model == name] for name in sorted({row.model for row in told})}
    lines = [(name, len(mine), *_said(mine)) for name, mine in found.items()]
    report.table((f"step time by {machine.name}", "configurations", "median |error|", "worst", "bias", "ordered right", "regret, worst"), lines, console)
    report.say("Assumed:", console)
    for note in assumed:
        report.say(f"- {note}", console)
    return found


def _said(rows: list[Row]) -> tuple[str, ...]:
    right, most = bars.ordered(rows), max(bars.regrets(rows).values(), default=None)
    return *report.shares(report.summary([row.error for row in rows])), *("n/a" if share is None else f"{share:.1%}" for share in (right, most))
