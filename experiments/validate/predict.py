"""Predict: a configuration's prediction, and those of poorer models of the same machine, so that what each part is worth is seen.

A predictor is a function of (schedule, strategy, machine) to a Timeline; PREDICTORS has them by the column that their step time goes to.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from statistics import mean

from engine.arenas import planned_bytes
from experiments.validate.calibration import Profile
from experiments.validate.case import Case
from experiments.validate.rows import Row, of
from sim.explain import sums
from sim.machine import Machine
from sim.metrics import overlap, overrun, peak_bytes, reserved_bytes, times
from sim.need import states
from sim.schedule import STREAMS, Schedule
from sim.simulate import simulate
from sim.strategy import Strategy
from sim.timeline import Timeline

Predictor = Callable[[Schedule, Strategy, Machine], Timeline]


def alone(schedule: Schedule, strategy: Strategy, machine: Machine) -> Timeline:
    """Every op as if nothing else ran."""
    return simulate(schedule, strategy, replace(machine, slowdown={}))


def factor(schedule: Schedule, strategy: Strategy, machine: Machine) -> Timeline:
    """One factor an overlap: all streams of a set slow down alike, by the mean of what was measured."""
    return simulate(schedule, strategy, replace(machine, slowdown={streams: one_factor(rates) for streams, rates in machine.slowdown.items()}))


def one_factor(rates: dict) -> dict:
    """The same entry with its mean rate for each stream."""
    streams = {stream: rates[stream] for stream in STREAMS if stream in rates}
    return rates | dict.fromkeys(streams, mean(streams.values()))


FULL = "predicted_s"
PREDICTORS: dict[str, Predictor] = {FULL: simulate, "alone_s": alone, "factor_s": factor}
"""Column -> predictor; the first is the one that is judged."""
NAMES = {FULL: "the full model", "alone_s": "no contention", "factor_s": "one factor an overlap"}

HBM_SHARE, HOST_SHARE = 0.9, 0.85
"""Of the memory there is, at most so much is planned for; the rest is the process's own, and the system's."""


def fits(timeline: Timeline) -> bool:
    """Whether there is room for it, with some to spare."""
    n = timeline.meta["numbers"]
    spare = {"hbm": (1 - HBM_SHARE) * n["hbm_bytes"], "host": (1 - HOST_SHARE) * n["host_bytes"]}
    return all(over <= -spare[space] for space, over in overrun(timeline).items())


def row(case: Case, schedule: Schedule, profile: Profile, session: str, band: tuple[float, float]) -> tuple[Row, Timeline]:
    """All that is predicted for a configuration, and its timeline."""
    found = {column: predictor(schedule, case.strategy, profile.machine) for column, predictor in PREDICTORS.items()}
    full = found[FULL]
    seconds = {column: times(timeline)["step_s"] for column, timeline in found.items()}
    made = Row(**of(case), profile=session, **seconds, low_s=seconds[FULL] * band[0], high_s=seconds[FULL] * band[1])
    made.hidden_predicted = hidden(full)
    made.planned_hbm_predicted, made.planned_host_predicted = (planned_bytes(schedule, space) for space in ("hbm", "host"))
    arena, peak = schedule.arena_bytes("hbm"), peak_bytes(full, "hbm")
    made.states_predicted = states(schedule, case.strategy.zero)
    made.workspace_predicted = int(full.memory["hbm"]["workspace"].max())
    made.arguments_predicted = peak - arena - made.states_predicted - made.workspace_predicted
    if case.device == "cuda":
        made.reserved_predicted = reserved_bytes(full)
    made.kinds = [[*key, ns, None] for key, ns in durations(full).items()]
    return made, full


def hidden(timeline: Timeline) -> float | None:
    """Share of the copies' time under compute; None where nothing is copied."""
    copies = timeline.on("h2d") | timeline.on("d2h")
    return overlap(timeline)["both"] if copies.any() else None


def durations(timeline: Timeline) -> dict[tuple[str, str], int]:
    """(kind, stream) -> ns of all its spans; the host's blocks are no work."""
    return {key: ns for key, (_, ns) in sorted(sums(timeline).items()) if key[1] != "host"}
