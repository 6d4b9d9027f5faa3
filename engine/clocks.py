"""Clocks: what the clocks of a GPU's runs tell of it, by the model of sim.clock."""
from __future__ import annotations

import numpy as np

from engine.worker import Run
from sim.clock import planned
from sim.cost import works
from sim.schedule import Schedule

CAPPED = 0.99
"""From this share of its highest clock on, a GPU may be held there: its power would allow more."""


def reference_MHz(runs: list[Run]) -> float | None:
    """The median clock of these runs, which their curves are to hold at; None where one of them does not tell."""
    found = [run.sensed.get("clock_MHz") for run in runs]
    return float(np.median(found)) if found and all(found) else None


def power_TFLOPS(made: list[Schedule], runs: list[Run], most_MHz: float) -> float | None:
    """TFLOP/s that power allows at the highest clock: the median over the runs that it held below that; None where there is none."""
    found = [computed_TFLOPS(schedule, run) * (run.sensed["clock_MHz"] / most_MHz) ** 2 for schedule, run in zip(made, runs) if run.sensed["clock_MHz"] < CAPPED * most_MHz]
    return float(np.median(found)) if found else None


def computed_TFLOPS(schedule: Schedule, run: Run) -> float:
    """TFLOP/s of a rank over its steps, the first apart."""
    each = works(schedule)
    return planned(schedule, each, dict.fromkeys(each, 0)).flops / float(np.median(run.step_ns[1:])) / 1e3
