"""Bars: what has to hold, as arithmetic over rows. A bar without anything to judge holds for nobody: it is `n/a`, and fails nothing."""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from itertools import combinations
from typing import NamedTuple

import numpy as np

from experiments.validate.rows import Row

MEDIAN_ERROR, P90_ERROR, WORST_ERROR, BIAS = 0.03, 0.08, 0.12, 0.02
WORKSPACE_STATES, RESERVED = 0.02, 0.03
ORDERED, DIFFERENT, REGRET = 0.95, 0.02, 0.03
HIDDEN = 0.05
COVERED, HALF_WIDTH = (0.85, 0.97), 0.06


class Bar(NamedTuple):
    """A number, what it has to be, and whether it is."""

    name: str
    value: float | None
    """A share, or a count; None where there is nothing to judge."""
    rule: str
    holds: bool | None


def judge(rows: list[Row]) -> list[Bar]:
    """Every bar, over the rows of a finished grid."""
    ran = [row for row in rows if not row.reason]
    errors = np.array([row.error for row in ran])
    size = np.abs(errors)
    return [
        _most("configurations that did not run", len(rows) - len(ran), 0),
        _most("|error| of step time, median", _of(np.median, size), MEDIAN_ERROR),
        _most("|error| of step time, 90th percentile", _of(lambda e: np.percentile(e, 90), size), P90_ERROR),
        _most("|error| of step time, worst", _of(np.max, size), WORST_ERROR),
        _most("signed bias, mean", _of(np.mean, errors), BIAS),
        _most("planned memory, configurations that differ", sum(map(_unplanned, ran)) if ran else None, 0),
        _most("workspace + states, worst error", _worst(ran, workspace_states), WORKSPACE_STATES),
        _most("reserved memory, worst error", _worst(ran, reserved), RESERVED),
        _least(f"pairs of a group, > {DIFFERENT:.0%} apart, ordered right", ordered(ran), ORDERED),
        _most("regret of the predicted best, worst group", max(regrets(ran).values(), default=None), REGRET),
        _most("hidden share of copies, worst error", _worst(ran, hidden), HIDDEN),
        _between("steps inside the predicted 5-95% band", covered(ran), COVERED),
        _most("half width of the band, median", _of(np.median, [(row.high_s - row.low_s) / 2 / row.predicted_s for row in ran]), HALF_WIDTH),
    ]


def holds(bars: list[Bar]) -> bool:
    """No bar is missed."""
    return all(bar.holds is not False for bar in bars)


def workspace_states(row: Row) -> float | None:
    """Signed error of the largest workspace and the states together."""
    if row.workspace_measured is None or row.states_measured is None:
        return None
    return (row.workspace_predicted + row.states_predicted) / (row.workspace_measured + row.states_measured) - 1


def reserved(row: Row) -> float | None:
    """Signed error of what the allocator held."""
    return row.reserved_predicted / row.reserved_measured - 1 if row.reserved_measured and row.reserved_predicted else None


def hidden(row: Row) -> float | None:
    """Signed difference of the shares; None without copies."""
    return None if row.hidden_measured is None or row.hidden_predicted is None else row.hidden_predicted - row.hidden_measured


def groups(rows: list[Row]) -> dict[int, list[Row]]:
    """Rows of one model, S and P, by the group's number."""
    found = defaultdict(list)
    for row in rows:
        found[row.group].append(row)
    return dict(found)


def ordered(rows: list[Row]) -> float | None:
    """Share of the pairs of a group that differ, as measured by more than DIFFERENT of the faster one, whose order was predicted."""
    right = [(a.predicted_s < b.predicted_s) == (a.measured_s < b.measured_s) and a.predicted_s != b.predicted_s
             for group in groups(rows).values() for a, b in combinations(group, 2)
             if abs(a.measured_s - b.measured_s) > DIFFERENT * min(a.measured_s, b.measured_s)]
    return sum(right) / len(right) if right else None


def regrets(rows: list[Row]) -> dict[int, float]:
    """Group -> how much longer its predicted best takes than its best; of groups that offer a choice."""
    return {number: min(group, key=lambda row: row.predicted_s).measured_s / min(row.measured_s for row in group) - 1
            for number, group in groups(rows).items() if len(group) > 1}


def covered(rows: list[Row]) -> float | None:
    """Share of measured steps inside their bands; every configuration counts the same."""
    shares = [np.mean([row.low_s <= step <= row.high_s for step in row.steps_s]) for row in rows if row.steps_s]
    return float(np.mean(shares)) if shares else None


def _unplanned(row: Row) -> bool:
    return (row.planned_hbm_predicted, row.planned_host_predicted) != (row.planned_hbm_measured, row.planned_host_measured)


def _worst(rows: list[Row], error: Callable[[Row], float | None]) -> float | None:
    """The error that is largest, with its sign."""
    return max((e for row in rows if (e := error(row)) is not None), key=abs, default=None)


def _of(function: Callable, values) -> float | None:
    return float(function(values)) if len(values) else None


def _shown(limit: float) -> str:
    return str(limit) if isinstance(limit, int) else f"{limit:.0%}"


def _most(name: str, value: float | None, limit: float) -> Bar:
    return Bar(name, value, f"at most {_shown(limit)}", None if value is None else bool(abs(value) <= limit))


def _least(name: str, value: float | None, limit: float) -> Bar:
    return Bar(name, value, f"at least {_shown(limit)}", None if value is None else bool(value >= limit))


def _between(name: str, value: float | None, limits: tuple[float, float]) -> Bar:
    return Bar(name, value, f"{_shown(limits[0])} to {_shown(limits[1])}", None if value is None else bool(limits[0] <= value <= limits[1]))
