"""Clocks: what the clocks of a GPU's runs tell of it, by the model of sim.clock."""
from __future__ import annotations

import numpy as np
from scipy.optimize import nnls

from engine.worker import Run
from sim.clock import EXPONENT, Load, done
from sim.timeline import Timeline

APART = 0.2
"""How far apart the shares of attention in compute have to be in some runs, so that its clock can be told from the others'."""
CAPPED = 0.99
"""From this share of its highest clock on, a GPU may be held there: its power would allow more."""
BEYOND = 2.0
"""No work draws so little that its clock is taken for more than so many times the highest."""


def reference_MHz(runs: list[Run]) -> float | None:
    """The median clock of these runs, which their curves are to hold at; None where one of them does not tell."""
    found = [run.sensed.get("clock_MHz") for run in runs]
    return float(np.median(found)) if found and all(found) else None


def shares(run: Run) -> Load:
    """Of its traced steps, in which compute attended, did other work and idled."""
    steps = [done(Timeline.from_spans(trace)) for trace in run.traces.values()]
    return Load(*(float(np.median([t / run.step_ns[step] for step, t in zip(run.traces, column)])) for column in zip(*steps)))


def settled_MHz(runs: list[Run], most: float) -> tuple[float, float]:
    """(attention's, other compute's) clocks that explain those of these runs best: sum b_w (f / f_w)^3 is 1, or less where f is the most that the GPU
    does. Both are one where the runs are too much alike to tell, and the highest clock where none was below it."""
    busy = np.array([shares(run)[:2] for run in runs])
    drawn = busy * np.array([[run.sensed["clock_MHz"] / most] for run in runs]) ** EXPONENT
    limited = np.array([run.sensed["clock_MHz"] < CAPPED * most for run in runs])
    if not limited.any():
        return most, most
    while True:
        draws = _draws(drawn[limited])
        beyond = ~limited & (drawn @ draws > 1)
        if not beyond.any():
            return tuple(float(most * max(draw, BEYOND ** -EXPONENT) ** (-1 / EXPONENT)) for draw in draws)
        limited |= beyond


def _draws(rows: np.ndarray) -> np.ndarray:
    """What each kind of work draws so that each row, [attention, other], comes to 1 as nearly as can be."""
    total = rows.sum(1)
    if np.ptp(rows[:, 0] / total) < APART:
        return np.full(2, total.sum() / (total @ total))
    return nnls(rows, np.ones(len(rows)))[0]
