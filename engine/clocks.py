"""Clocks: what the clocks of a GPU's runs tell of it, by the model of sim.clock."""
from __future__ import annotations

import numpy as np

from engine.worker import Run
from sim.clock import computes, flops
from sim.cost import works
from sim.schedule import Schedule

CAPPED = 0.99
"""From this share of its highest clock on, a GPU may be held there: its power would allow more."""
ALIKE, APART = 1.01, 1.1
"""Clocks that differ by less than the one factor while TFLOP/s differ by more than the other were set, not limited."""


def reference_MHz(runs: list[Run]) -> float | None:
    """The median clock of these runs, which their curves are to hold at; None where one of them does not tell."""
    found = [run.sensed.get("clock_MHz") for run in runs]
    return float(np.median(found)) if found and all(found) else None


def power_TFLOPS(made: list[Schedule], runs: list[Run], most_MHz: float) -> float | None:
    """TFLOP/s that power allows at the highest clock: the median over the runs that it held below that; None where there is none, or where it was not
    power that held them: then all have one clock, whatever they compute."""
    limited = [(computed_TFLOPS(schedule, run), run.sensed["clock_MHz"]) for schedule, run in zip(made, runs) if run.sensed["clock_MHz"] < CAPPED * most_MHz]
    if not limited:
        return None
    computed, clocks = np.array(limited).T
    if clocks.max() / clocks.min() < ALIKE < APART < computed.max() / computed.min():
        return None
    return float(np.median(computed * (clocks / most_MHz) ** 2))


def computed_TFLOPS(schedule: Schedule, run: Run) -> float:
    """TFLOP/s of a rank over its steps, the first apart: those that its clock was sensed in, traced or not."""
    return flops(computes(schedule), works(schedule)) / float(np.median(run.step_ns[1:])) / 1e3
