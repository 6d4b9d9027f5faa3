"""Calibration: a profile of this machine for a model on P ranks, and how wrong it is about sizes that it was fitted without.

Cost curves come from engine.calibrate, over as many strategies as it takes to meet every kind of op of the grid. Cross-validation: for each
chunk length the curves are fitted without its runs, and predict their steps. What those predictions miss, and how much repeats scatter,
make the band around every prediction.
"""
from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from pathlib import Path

import numpy as np

from engine import calibrate, measure, probe
from engine.micro.fit import improved, slowdown_of
from engine.micro.place import Plan
from engine.worker import Job, Run
from experiments.validate.case import Space, shapes
from sim import machine as machines
from sim import text
from sim.cost import features
from sim.errors import UserError
from sim.files import folder, replaced, write
from sim.machine import Machine
from sim.ops import KINDS, key
from sim.schedule import Schedule
from sim.simulate import simulate
from sim.strategy import Strategy

STEPS = 5
"""Of a calibration job, every other one traced."""
LOW, HIGH = 5, 95
"""Percentiles of the band."""


@dataclass
class Profile:
    """What calibration says of a model on P ranks."""

    machine: Machine
    ratios: list[float]
    """Measured / predicted of steps that the curves were not fitted on."""
    repeats: list[float]
    """Step / median of its run, of every repeat."""
    runs: list[dict] = field(default_factory=list)
    """All that calibration measured, {"schedule": text, "run"}; kept for who wants to fit it otherwise, and not read again."""

    def save(self, path: Path) -> None:
        """As a machine's file, for --machine too, and the rest beside it."""
        folder(path.parent)
        write(_beside(path), json.dumps({"ratios": self.ratios, "repeats": self.repeats}) + "\n")
        runs = gzip.compress(json.dumps(self.runs).encode(), mtime=0)
        replaced(path.with_suffix(".runs.json.gz"), lambda part: part.write_bytes(runs))
        self.machine.save(path)

    @classmethod
    def load(cls, path: Path) -> "Profile":
        """Raises UserError."""
        try:
            made = cls(machines.load(path), **json.loads(_beside(path).read_text()))
            if not np.isfinite(band([made])).all():
                raise ValueError("its residuals are no numbers")
            return made
        except (OSError, ValueError, TypeError, IndexError) as error:
            raise UserError(f"{path} is no profile of fpdt validate ({error}); remove it, and it is measured anew") from None


def _beside(path: Path) -> Path:
    return path.with_suffix(".residuals.json")


def band(profiles: list[Profile]) -> tuple[float, float]:
    """Factors of a prediction between which 90% of single steps lie, as far as calibration can tell: every residual with every repeat."""
    both = np.outer(*(np.concatenate([getattr(p, name) for p in profiles]) for name in ("ratios", "repeats")))
    return tuple(float(factor) for factor in np.percentile(both, (LOW, HIGH)))


def contention(space: Space, P: int, device: str, micro: Callable[[Plan], list[dict]]) -> list[dict]:
    """What streams together and the host take on P ranks, whatever the model."""
    return micro(Plan(asdict(shapes(space.models[-1], 1, space.vocab)), P, space.dtype, device, kinds=False))


def profile(space: Space, name: str, P: int, device: str, told: list[dict], do: Callable[[list[Job]], list[Run]]) -> Profile:
    """Runs the calibration through `do` (engine.ranks) and fits. told: what `contention` found."""
    one = shapes(name, 1, space.vocab)
    strategies = covering(space, name, P, device)
    made = [s for strategy in strategies for s in calibrate.schedules(one, P, space.dtype, strategy, device)]
    made += calibrate.loads(one, P, space.dtype, strategies[-1], device)
    runs, source = do(jobs(made, device)), f"measured: {probe.provenance()}, microbenchmarks"
    machine = calibrate.profile(one, P, space.dtype, made, runs, None, device, slowdown_of(told, source))
    machine = replace(improved(machine, told, {}, P, source, ()), name=f"{name}-P{P}")
    kept = [{"schedule": text.show(s), "run": asdict(run)} for s, run in zip(made, runs)]
    return Profile(machine, crossed(machine, made, runs), [ns / median for run in runs for ns, median in _scatter(run)], kept)


def jobs(made: list[Schedule], device: str) -> list[Job]:
    """Those of engine.calibrate with untraced steps between, and memory."""
    return [replace(job, steps=STEPS, trace_every=2, footprint=True) for job in calibrate.jobs(made, None, device)]


def covering(space: Space, name: str, P: int, device: str) -> list[Strategy]:
    """The fewest strategies of the space (greedily) whose schedules have every op that any of them has, by cost key and what a curve is linear in."""
    one = shapes(name, 1, space.vocab)
    keys = {}
    for save, order, offload in product(space.save, space.order, space.offload):
        strategy = Strategy(save=save, order=order, offload=offload, loss_sub=space.loss_sub)
        schedule = calibrate.schedules(one, P, space.dtype, strategy, device)[0]
        keys[strategy] = {(key(op), *features(KINDS[op.kind].work(op, schedule))) for region in schedule.regions.values() for op in region.ops if op.stream != "host"}
    chosen, left = [], set.union(*keys.values())
    while left:
        chosen.append(max(keys, key=lambda strategy: len(keys[strategy] & left)))
        left -= keys[chosen[-1]]
    return chosen


def crossed(machine: Machine, made: list[Schedule], runs: list[Run]) -> list[float]:
    """Measured / predicted of each run's step, by curves fitted without all runs of its chunk length."""
    found = []
    for chunk in sorted({schedule.chunk for schedule in made}):
        others = [k for k, schedule in enumerate(made) if schedule.chunk != chunk]
        fits = calibrate.curves([made[k] for k in others], [runs[k] for k in others], "cross-validation", machine.slowdown)
        without = replace(machine, fits=fits)
        for schedule, run in zip(made, runs):
            if schedule.chunk == chunk:
                predicted = simulate(schedule, Strategy(sp=schedule.P, chunk=schedule.chunk, zero=0), without)
                found.append(measure.step_ns(run)[0] / int(predicted.end_ns.max()))
    return found


def _scatter(run: Run) -> list[tuple[int, int]]:
    """(ns, median ns) of each untraced step."""
    median = measure.step_ns(run)[0]
    return [(ns, median) for step, ns in enumerate(run.step_ns) if step and step not in run.traces]


def spent(schedule: Schedule, memory: dict[str, int]) -> tuple[int, int]:
    """(workspace, arguments) bytes of what engine.footprint found on a GPU."""
    workspace = memory["workspace"] + memory["blas"]
    return workspace, memory["peak"] - schedule.arena_bytes("hbm") - memory["states"] - workspace
