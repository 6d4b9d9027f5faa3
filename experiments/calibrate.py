"""Calibrate: this machine's CPU cores, measured with a progress bar, as a file for --machine."""
from __future__ import annotations

from pathlib import Path

from rich.progress import Progress

from engine import probe
from engine.calibrate import calibrate
from engine.ranks import Ranks
from engine.worker import Job, Run
from experiments.bars import pinning, progress
from sim.machine import Machine
from sim.model import Model
from sim.strategy import Strategy


def calibrated(
    model: Model, dtype: str, ranks: Ranks, P: int, bar: Progress, link_GBps: float | None = None, strategy: Strategy = Strategy(), device: str = "cpu",
) -> Machine:
    """The machine that calibration runs of this model on these P ranks measure; each step advances the bar."""
    task, pin = bar.add_task("calibrate this machine", total=None, state=""), pinning(bar)

    def run(jobs: list[Job]) -> list[Run]:
        bar.update(task, total=sum(job.steps for job in jobs))
        return ranks.do(jobs, lambda: bar.advance(task), pin)

    return calibrate(model, P, dtype, run, link_GBps, strategy, device)


def calibrate_command(model: Model, P: int, dtype: str, link_GBps: float | None, out: Path) -> None:
    """Calibrates, and writes the machine's JSON."""
    device = probe.device()
    with progress() as bar, Ranks(P, device) as ranks:
        calibrated(model, dtype, ranks, P, bar, link_GBps, device=device).save(out)
    print(f"{out}: use it with --machine {out}")
