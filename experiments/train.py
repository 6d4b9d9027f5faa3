"""Train: a model by its schedule on real text, on ranks of its own or on those that torchrun has started."""
from __future__ import annotations

import json
from contextlib import nullcontext
from pathlib import Path

from rich.console import Console

from engine.ranks import start
from engine.resume import clean
from engine.training import Training, train
from engine.worker import check_gpus, joined
from engine.world import started, world
from experiments.bars import pinning, progress
from experiments.room import check_memory
from sim.files import claimed
from sim.schedule import Schedule
from sim.strategy import Strategy
from sim.units import show_tokens


def train_command(schedule: Schedule, strategy: Strategy, training: Training, console: Console | None = None) -> None:
    """Raises UserError, RankLost, and KeyboardInterrupt when told to stop; whatever ends it, no checkpoint is half there."""
    device = training.job.device
    if started():
        if device == "cuda":
            check_gpus(world().local_size)
        check_memory(schedule, strategy, device, world().local_size)
        with joined(device, "fpdt: ") as (rank, group), claimed(Path(training.checkpoint)) if training.checkpoint and rank == 0 else nullcontext():
            train(training, rank, group)
        return
    check_memory(schedule, strategy, device)
    with claimed(Path(training.checkpoint)) if training.checkpoint else nullcontext():
        _on_own_ranks(schedule, training, console)


def _on_own_ranks(schedule: Schedule, training: Training, console: Console | None) -> None:
    title = f"train {schedule.model.name}, S={show_tokens(schedule.seq)}, {schedule.P} ranks"
    try:
        with progress(console) as bar:
            task = bar.add_task(title, total=training.job.steps, state="")

            def hear(line: str) -> None:
                step = json.loads(line)
                if not bar.console.is_terminal:
                    print(line, end="", flush=True)
                bar.update(task, completed=step["step"] + 1, state=f"loss {step['loss']:.4f}  grad norm {step['grad_norm']:.3f}  {step['step_s']:.2f} s/step")

            start(training, schedule.P, hear, pinning(bar))
    finally:
        if training.checkpoint:
            clean(Path(training.checkpoint))
