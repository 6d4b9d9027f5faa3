"""Report: the grid before the run; after it every row, the verdict on each bar, what rivals would have said, and where errors come from."""
from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from experiments.validate import bars
from experiments.validate.bars import Bar
from experiments.validate.case import Case
from experiments.validate.predict import NAMES, PREDICTORS
from experiments.validate.rows import Row
from sim.units import show_tokens

WIDE = 160
"""Columns that a table may take; a narrower terminal wraps its lines."""
SOURCES = 10
"""Lines of the table of kinds."""


def listing(cases: list[Case], console: Console, seconds: list[float] | None = None) -> None:
    """What will be run."""
    extra = ("takes s",) if seconds else ()
    lines = [(case.number, case.group, *_of(case), *((f"{seconds[k]:.0f}",) if seconds else ())) for k, case in enumerate(cases)]
    table(("", "group", *WHAT, *extra), lines, console)
    vocab = {case.vocab for case in cases}
    say(f"{len(cases)} configurations in {len({case.group for case in cases})} groups (same model, layers, S and P), vocabulary {', '.join(map(str, vocab))}, {cases[0].dtype}"
         + (f"; {sum(seconds) / 60:.1f} min as predicted, calibration apart" if seconds else ""), console)


def report(rows: list[Row], verdict: list[Bar], record: dict, out: Path, console: Console) -> None:
    """Everything, and scatter.png."""
    rows = sorted(rows, key=lambda row: row.number)
    table(("", "group", *WHAT, "predicted s", "measured s", "its spread", "error", "hidden", "measured", "ws+states", "reserved"), [(row.number, row.group, *_of(row), *_results(row)) for row in rows], console)
    say("\nMemory of a rank, GiB, predicted | measured", console)
    table(("", *(name.replace("_", " ") for name in MEMORY)), [(row.number, *(_pair(row, name) for name in MEMORY)) for row in rows], console)
    for row in rows:
        if row.reason:
            say(f"{row.number} did not run: {row.reason}", console)
    ran = [row for row in rows if not row.reason]
    if ran:
        scatter(ran, out / "scatter.png")
        say("", console)
        table(("step time as predicted by", "median |error|", "worst", "bias"), [(name, *shares(said)) for name, said in rivals(rows).items()], console)
    say("", console)
    table(("bar", "found", "has to be", ""), [(bar.name, shown(bar), bar.rule, {True: "holds", False: "MISSED", None: "n/a"}[bar.holds]) for bar in verdict], console)
    if any(bar.holds is False for bar in verdict) and ran:
        say("\nWhere errors come from: predicted - measured time of all spans of a kind, in points of its step, mean over configurations", console)
        table(("kind", "stream", "points"), [(kind, stream, f"{share * 100:+.2f}") for (kind, stream), share in list(sources(rows).items())[:SOURCES]], console)
    say(f"\nRows in {out}/rows.csv, provenance in {out}/validate.json, picture in {out}/scatter.png. Signed errors: predicted / measured - 1; of shares, the difference.", console)


WHAT = ("model", "layers", "P", "S", "C", "order", "save", "kept in", "slots")


MEMORY = ("planned_hbm", "planned_host", "arguments", "workspace", "states", "reserved")
"""Rows of it, as columns of the CSV say them with _predicted and _measured."""


def _pair(row: Row, name: str) -> str:
    both = (getattr(row, f"{name}_{side}") for side in ("predicted", "measured"))
    return " | ".join("n/a" if size is None else f"{size / 2**30:.3f}" for size in both)


def _of(case: Case | Row) -> tuple:
    return (case.model, case.layers, case.P, show_tokens(case.seq), show_tokens(case.chunk), case.order, case.save, *(("host", case.prefetch) if case.offload else ("HBM", "")))


def _results(row: Row) -> tuple[str, ...]:
    if row.reason:
        return f"{row.predicted_s:.3f}", "failed", *[""] * 6
    spread = f"{row.p05_s / row.measured_s - 1:+.1%} {row.p95_s / row.measured_s - 1:+.1%}"
    return (f"{row.predicted_s:.3f}", f"{row.measured_s:.3f}", spread, f"{row.error:+.1%}", *(f"{s:.0%}" if s is not None else "" for s in (row.hidden_predicted, row.hidden_measured)),
            *(f"{e:+.1%}" if e is not None else "n/a" for e in (bars.workspace_states(row), bars.reserved(row))))


def shown(bar: Bar) -> str:
    """A bar's number."""
    return "nothing to judge" if bar.value is None else str(bar.value) if isinstance(bar.value, int) else f"{bar.value:.1%}" if bar.rule.startswith("at least") or " to " in bar.rule else f"{bar.value:+.2%}"


def rivals(rows: list[Row]) -> dict[str, dict[str, float]]:
    """Predictor -> median |error|, worst error and bias of its step times."""
    found = {}
    for column in PREDICTORS:
        errors = [getattr(row, column) / row.measured_s - 1 for row in rows if not row.reason]
        if errors:
            found[NAMES[column]] = summary(errors)
    return found


def summary(errors: list[float]) -> dict[str, float]:
    """Of signed errors."""
    return {"median": float(np.median(np.abs(errors))), "worst": max(errors, key=abs), "bias": float(np.mean(errors))}


def shares(said: dict[str, float]) -> tuple[str, ...]:
    """A summary's cells."""
    return tuple(f"{said[k]:{sign}.1%}" for k, sign in (("median", ""), ("worst", "+"), ("bias", "+")))


def sources(rows: list[Row]) -> dict[tuple[str, str], float]:
    """(kind, stream) -> predicted - measured time of its spans over the measured step, mean over configurations; the largest first."""
    ran = [row for row in rows if not row.reason]
    total: dict[tuple[str, str], float] = defaultdict(float)
    for row in ran:
        for kind, stream, predicted, found in row.kinds:
            total[kind, stream] += (predicted - found) / 1e9 / row.measured_s / len(ran)
    return dict(sorted(total.items(), key=lambda item: -abs(item[1])))


def scatter(rows: list[Row], path: Path) -> None:
    """Predicted against measured step time, with the predicted band across and the measured spread along; below, their ratio."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 8), layout="constrained")
    above, below = figure.subplots(2, 1, height_ratios=(3, 1), sharex=True)
    ends = [f(getattr(row, name) for row in rows for name in ("predicted_s", "measured_s")) for f in (min, max)]
    above.plot(ends, ends, color="0.6", linewidth=1)
    below.axhline(0, color="0.6", linewidth=1)
    for k, P in enumerate(sorted({row.P for row in rows})):
        mine = [row for row in rows if row.P == P]
        x, y = (np.array([getattr(row, name) for row in mine]) for name in ("predicted_s", "measured_s"))
        across = [x - [row.low_s for row in mine], [row.high_s for row in mine] - x]
        along = [y - [row.p05_s for row in mine], [row.p95_s for row in mine] - y]
        style = {"fmt": "os^v"[k % 4], "markersize": 4, "linewidth": 0.8, "color": f"C{k}", "label": f"P = {P}"}
        above.errorbar(x, y, xerr=np.maximum(across, 0), yerr=np.maximum(along, 0), **style)
        below.plot(x, 100 * (x / y - 1), style["fmt"], markersize=4, color=style["color"])
    above.set(xscale="log", yscale="log", ylabel="measured step, s (5 to 95% of repeats)")
    above.legend()
    below.set(xlabel="predicted step, s (5 to 95% band)", ylabel="error, %")
    part = path.with_name(f".{path.name}")
    figure.savefig(part, dpi=130, format="png")
    part.replace(path)


def table(columns: tuple[str, ...], lines: list[tuple], console: Console) -> None:
    """Lines in columns, whatever the width of the terminal."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for k, name in enumerate(columns):
        cells = [str(line[k]) for line in lines]
        numeric = all(cell == "" or cell.lstrip("+-")[:1].isdigit() for cell in cells)
        made.add_column(name, justify="right" if numeric else "left", no_wrap=True)
    for line in lines:
        made.add_row(*map(str, line))
    for line in console.render_lines(made, console.options.update(width=WIDE), pad=False):
        say("".join(segment.text for segment in line).rstrip(), console)


def say(line: str, console: Console) -> None:
    """A line as it is, however wide."""
    console.print(line, highlight=False, markup=False, soft_wrap=True)
