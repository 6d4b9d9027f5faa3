"""Calibrate: this machine's GPUs, or else its CPU cores, measured with a progress bar, as a file for --machine."""
from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from rich.progress import Progress

from engine import probe
from engine.calibrate import calibrate
from engine.micro.place import Plan
from engine.micro.serve import POINTS, TICK
from engine.ranks import Ranks, run
from engine.worker import Job, Run
from experiments.bars import pinning, progress
from sim.machine import Machine
from sim.model import Model
from sim.strategy import Strategy


def calibrated(
    model: Model, dtype: str, ranks: Ranks, P: int, bar: Progress, link_GBps: float | None = None, strategy: Strategy = Strategy(), device: str = "cpu",
    micro: Callable[[Plan], list[dict]] | None = None,
) -> Machine:
    """The machine that calibration runs of this model on these P ranks measure; each step advances the bar. `micro` as engine.calibrate says."""
    task, pin = bar.add_task("calibrate this machine", total=None, state=""), pinning(bar)

    def timelines(jobs: list[Job]) -> list[Run]:
        bar.update(task, total=sum(job.steps for job in jobs))
        return ranks.do(jobs, lambda: bar.advance(task), pin)

    return calibrate(model, P, dtype, timelines, link_GBps, strategy, device, micro)


def microbenchmarks(bar: Progress) -> Callable[[Plan], list[dict]]:
    """Runs a plan on ranks of its own, with a bar."""
    def measured(plan: Plan) -> list[dict]:
        task, found = bar.add_task("microbenchmarks", total=None, state=""), []

        def hear(line: str) -> None:
            if line.startswith(TICK):
                done, total, name = line.removeprefix(TICK).strip().split(" ", 2)
                bar.update(task, completed=int(done), total=int(total), state=name)
            elif line.startswith(POINTS):
                found.extend(json.loads(line.removeprefix(POINTS)))

        run("engine.micro.serve", asdict(plan), plan.P, plan.device, hear)
        bar.update(task, completed=bar.tasks[task].total, state="")
        return found

    return measured


def calibrate_command(model: Model, P: int, dtype: str, link_GBps: float | None, out: Path, micro: bool | None = None) -> None:
    """Calibrates, and writes the machine's JSON. `micro`: microbenchmarks too; where it is not said, on GPUs."""
    device = probe.device()
    with progress() as bar, Ranks(P, device) as ranks:
        wanted = device == "cuda" if micro is None else micro
        calibrated(model, dtype, ranks, P, bar, link_GBps, device=device, micro=microbenchmarks(bar) if wanted else None).save(out)
    print(f"{out}: use it with --machine {out}")
