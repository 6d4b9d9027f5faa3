"""Rows: one line of CSV a configuration, typed by its field; what has no value is empty. Sums and lists stand as JSON in their cell."""
from __future__ import annotations

import csv
import io
import json
import typing
from collections import Counter
from dataclasses import dataclass, field, fields
from pathlib import Path

from experiments.validate.case import Case
from sim.errors import UserError
from sim.files import write
from sim.machine import MOST

Bytes = typing.Optional[int]
Seconds = typing.Optional[float]


@dataclass
class Row:
    """What was predicted for a configuration, and what was measured."""

    number: int
    group: int
    model: str = ""
    layers: int = 1
    P: int = 1
    seq: int = 0
    chunk: int = 0
    offload: bool = True
    prefetch: int = 2
    order: str = ""
    save: str = ""
    profile: str = ""
    """Session of calibration that it was predicted with."""
    predicted_s: Seconds = None
    alone_s: Seconds = None
    """Predicted without contention."""
    factor_s: Seconds = None
    """Predicted with one factor an overlap."""
    low_s: Seconds = None
    high_s: Seconds = None
    """5 to 95% band of single steps, as predicted."""
    measured_s: Seconds = None
    p05_s: Seconds = None
    p95_s: Seconds = None
    traced_s: Seconds = None
    """With per-op times taken."""
    steps_s: list = field(default_factory=list)
    """Each step that measured_s is the median of."""
    hidden_predicted: Seconds = None
    """Share of the copies' time under compute; none without copies."""
    hidden_measured: Seconds = None
    planned_hbm_predicted: Bytes = None
    planned_hbm_measured: Bytes = None
    planned_host_predicted: Bytes = None
    planned_host_measured: Bytes = None
    arguments_predicted: Bytes = None
    """Whatever else the peak holds: under ZeRO-3 gathered parameters too."""
    arguments_measured: Bytes = None
    workspace_predicted: Bytes = None
    workspace_measured: Bytes = None
    states_predicted: Bytes = None
    states_measured: Bytes = None
    reserved_predicted: Bytes = None
    reserved_measured: Bytes = None
    clock_MHz: Seconds = None
    """Mean over its steps, as temperature and power; none where nothing tells."""
    power_W: Seconds = None
    temperature_C: Seconds = None
    took_s: Seconds = None
    """All of its job."""
    kernel: str = ""
    kinds: list = field(default_factory=list)
    """[kind, stream, predicted ns, measured ns], over all layers."""
    reason: str = ""
    """Why there is no measurement."""

    @property
    def error(self) -> float | None:
        """Signed, of the step time; None where it was not measured."""
        return self.predicted_s / self.measured_s - 1 if self.measured_s else None


NEEDED = ("predicted_s", "alone_s", "factor_s", "low_s", "high_s", "measured_s", "p05_s", "p95_s", "traced_s")
"""What every row has that ran."""


def of(case: Case | Row) -> dict:
    """The fields of a row that its case says."""
    return {f.name: getattr(case, f.name) for f in fields(Case) if f.name not in ("vocab", "dtype", "device")}


def save(path: Path, rows: list) -> None:
    """Writes rows, of one dataclass, whole or not at all."""
    sheet = io.StringIO()
    if rows:
        writer = csv.writer(sheet, lineterminator="\n")
        names = [f.name for f in fields(rows[0])]
        writer.writerow(names)
        writer.writerows([_cell(getattr(row, name)) for name in names] for row in rows)
    write(path, sheet.getvalue())


def load(path: Path, kind: type) -> list:
    """Rows of a dataclass; none where there is no file. Raises UserError where it holds something else."""
    types = typing.get_type_hints(kind)
    try:
        if not path.exists():
            return []
        with open(path, newline="") as sheet:
            lines = csv.DictReader(sheet)
            if lines.fieldnames is not None and not set(lines.fieldnames) <= set(types):
                raise ValueError("its first line names other columns")
            return [kind(**{name: _value(text, types[name]) for name, text in line.items()}) for line in lines]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError, csv.Error) as error:
        raise UserError(f"{path} is no table that fpdt validate wrote ({error}); name another folder with --out") from None


def check(path: Path, done: list[Row], cases: list[Case]) -> None:
    """Raises UserError unless each row is of its grid, measured or failed."""
    given = {case.number: of(case) for case in cases}
    if twice := [number for number, times in Counter(row.number for row in done).items() if times > 1]:
        raise UserError(f"{path}: row {twice[0]} stands there twice; remove one, or name another folder with --out")
    for row in done:
        if given.get(row.number) != {name: getattr(row, name) for name in of(row)}:
            raise UserError(f"{path}: row {row.number} is not the grid's; put both files back as they were, or name another folder with --out")
        if not row.reason and not (all(map(_time, (getattr(row, name) for name in NEEDED))) and isinstance(row.kinds, list) and all(isinstance(kind, list) and len(kind) == 4 for kind in row.kinds)):
            raise UserError(f"{path}: row {row.number} has neither a whole measurement nor a reason; remove it, and it is measured anew")


def _time(seconds: float | None) -> bool:
    return seconds is not None and MOST > seconds > 1 / MOST


def _cell(value) -> str:
    return "" if value is None else json.dumps(value, separators=(",", ":")) if isinstance(value, (list, bool)) else str(value)


def _value(text: str, kind: type):
    if text is None:
        raise ValueError("a line ends early")
    if kind is str:
        return text
    if text == "":
        return None
    kind = next((k for k in typing.get_args(kind) if k is not type(None)), kind) if kind is not list else list
    return json.loads(text) if kind in (list, bool) else kind(text)
