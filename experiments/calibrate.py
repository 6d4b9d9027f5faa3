"""Calibrate: this machine's GPUs, or else its CPU cores, measured with a progress bar, as a file for --machine."""
from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict
from itertools import chain
from pathlib import Path

from rich.progress import Progress

from engine import probe
from engine.calibrate import calibrate
from engine.micro.place import Plan
from engine.micro.serve import POINTS, TICK
from engine.micro.serve import run as run_micro
from engine.ranks import Ranks, run
from engine.worker import Job, Run, joined, run_job
from engine.world import started
from experiments.bars import pinning, progress
from sim.machine import Machine
from sim.model import Model
from sim.strategy import Strategy


def calibrated(
    model: Model, dtype: str, ranks: Ranks | Briefly, P: int, bar: Progress, link_GBps: float | None = None, strategy: Strategy = Strategy(), device: str = "cpu",
    micro: Callable[[Plan], list[dict]] | None = None,
) -> Machine:
    """The machine that calibration runs of this model on these P ranks measure; each step advances the bar. `micro` as engine.calibrate says."""
    task, pin = bar.add_task("calibrate this machine", total=None, state=""), pinning(bar)

    def timelines(jobs: list[Job]) -> list[Run]:
        bar.update(task, total=sum(job.steps for job in jobs))
        return ranks.do(jobs, lambda: bar.advance(task), pin)

    return calibrate(model, P, dtype, timelines, link_GBps, strategy, device, micro)


class Briefly:
    """Ranks that end after a list of jobs, so that what comes next has the GPUs to itself."""

    def __init__(self, P: int, device: str) -> None:
        self.P, self.device = P, device

    def do(self, jobs: list[Job], tick: Callable[[], None], pin: Callable[[int, int], None]) -> list[Run]:
        with Ranks(self.P, self.device) as ranks:
            return ranks.do(jobs, tick, pin)


def microbenchmarks(bar: Progress) -> Callable[[Plan], list[dict]]:
    """Runs a plan on ranks of its own, with a bar."""
    def measured(plan: Plan) -> list[dict]:
        show, found = _named_ticks(bar), []

        def hear(line: str) -> None:
            if line.startswith(TICK):
                done, total, name = line.removeprefix(TICK).strip().split(" ", 2)
                show(int(done), int(total), name)
            elif line.startswith(POINTS):
                found.extend(json.loads(line.removeprefix(POINTS)))

        run("engine.micro.serve", asdict(plan), plan.P, plan.device, hear)
        return found

    return measured


def calibrate_command(model: Model, P: int, dtype: str, link_GBps: float | None, out: Path, micro: bool | None = None) -> None:
    """Calibrates, and writes the machine's JSON. `micro`: microbenchmarks too; None: on GPUs. On ranks of its own, or on those that torchrun has started."""
    device = probe.device()
    micro = device == "cuda" if micro is None else micro
    if started():
        _calibrate_here(model, P, dtype, link_GBps, out, device, micro)
        return
    with progress() as bar:
        calibrated(model, dtype, Briefly(P, device), P, bar, link_GBps, device=device, micro=microbenchmarks(bar) if micro else None).save(out)
    print(f"{out}: use it with --machine {out}")


def _calibrate_here(model: Model, P: int, dtype: str, link_GBps: float | None, out: Path, device: str, micro: bool) -> None:
    """On this rank, as all others do; rank 0 shows the bar and writes."""
    with joined(device, "fpdt: ") as (rank, group), progress() if rank == 0 else nullcontext() as bar:
        def timelines(jobs: list[Job]) -> list[Run]:
            tick = _ticks(bar, "calibrate this machine", sum(job.steps for job in jobs))
            return [run_job(job, rank, group, tick) for job in jobs]

        def points(plan: Plan) -> list[dict]:
            return list(chain.from_iterable(run_micro(plan, rank, group, _named_ticks(bar))))

        found = calibrate(model, P, dtype, timelines, link_GBps, device=device, micro=points if micro else None)
        if rank == 0:
            found.save(out)
            bar.console.print(f"{out}: use it with --machine {out}")


def _ticks(bar: Progress | None, name: str, total: int) -> Callable[[], None]:
    """What to call after each step; nothing where there is no bar."""
    task = bar and bar.add_task(name, total=total, state="")
    return lambda: None if bar is None else bar.advance(task)


def _named_ticks(bar: Progress | None) -> Callable[[int, int, str], None]:
    """What to call with what is done, of how much, and its name."""
    task = bar and bar.add_task("microbenchmarks", total=None, state="")
    return lambda done, total, name: None if bar is None else bar.update(task, completed=done, total=total, state=name)
