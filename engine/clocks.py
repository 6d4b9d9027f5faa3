"""Clocks: what the clocks of a GPU's runs tell of it, by the model of sim.clock."""
from __future__ import annotations

import numpy as np
from scipy.optimize import nnls

from engine.worker import Run
from sim.clock import EXPONENT, Work, done
from sim.timeline import Timeline

APART = 0.2
"""How far apart the shares of attention in compute have to be in some runs, so that its clock can be told from the others'."""


def steady_MHz(runs: list[Run]) -> float | None:
    """The clock that these runs would have settled at, had compute never idled (sim.clock); None where one of them does not tell."""
    found = [run.sensed.get("clock_MHz") for run in runs]
    return float(np.median([mhz * sum(shares(run)[:2]) ** (1 / EXPONENT) for mhz, run in zip(found, runs)])) if found and all(found) else None


def shares(run: Run) -> Work:
    """Of its traced steps, in which compute attended, did other work and idled."""
    steps = [done(Timeline.from_spans(trace)) for trace in run.traces.values()]
    return Work(*(float(np.median([t / run.step_ns[step] for step, t in zip(run.traces, column)])) for column in zip(*steps)))


def load_clocks_MHz(runs: list[Run], most: float) -> tuple[float, float] | None:
    """(that of attention, that of other compute) that explain the clocks of these runs best (sim.clock), `most` at most; None where the runs
    are too much alike to tell."""
    rows = np.array([shares(run)[:2] for run in runs]) * np.array([[run.sensed["clock_MHz"]] for run in runs]) ** EXPONENT
    if np.ptp(rows[:, 0] / rows.sum(1)) < APART:
        return None
    scale = rows.max()
    drawn, _ = nnls(rows / scale, np.ones(len(rows)))
    return tuple(float(min(most, (d / scale) ** (-1 / EXPONENT))) if d else most for d in drawn)
