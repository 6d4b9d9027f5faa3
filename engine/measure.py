"""Measure: what a run gave, as the same Timeline that the simulator returns."""
from __future__ import annotations

import numpy as np

from engine.worker import Run
from sim import memory
from sim.machine import Machine
from sim.schedule import Schedule
from sim.strategy import Strategy
from sim.timeline import Timeline, meta


def timeline(schedule: Schedule, strategy: Strategy, machine: Machine, run: Run) -> Timeline:
    """The traced step whose length is the median of all traced ones."""
    length = {step: max(span[4] for span in trace) for step, trace in run.traces.items()}
    step = sorted(length, key=length.get)[len(length) // 2]
    measured = Timeline.from_spans([tuple(span) for span in run.traces[step]], meta(schedule, strategy, machine, []))
    measured.memory = memory.curves(schedule, measured, strategy, machine)
    return measured


def step_ns(run: Run) -> tuple[int, int]:
    """(median step time without per-op times, the same with), in ns; the first step warms up and does not count."""
    bare = [ns for step, ns in enumerate(run.step_ns) if step > 0 and step not in run.traces]
    traced = [ns for step, ns in enumerate(run.step_ns) if step in run.traces]
    return int(np.median(bare or traced)), int(np.median(traced or bare))
