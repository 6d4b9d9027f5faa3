"""Training: steps on real text, a line of JSON after each, a checkpoint every so many. Runs on every rank (see engine.worker)."""
from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.worker import Job, Session
from sim.errors import UserError


@dataclass
class Training:
    """A training to do, or to go on with."""

    job: Job
    """Its `steps` are those of the whole training, done ones included."""
    checkpoint: str | None = None
    """Folder of checkpoints; None saves nothing."""
    every: int = 10
    """Steps between checkpoints; the last step has one too."""
    resume: bool = False
    """Go on from the newest checkpoint."""
    log: str | None = None
    """File that gets a line of JSON a step."""


def train(training: Training, rank: int, group, pin: Callable[[int, int], None] = lambda done, total: None) -> None:
    """Rank 0 prints each step's line too; `pin` as Session says. Raises UserError."""
    from engine.checkpoint import Checkpoints

    job, session = training.job, Session(training.job, rank, group, pin)
    try:
        saved = Checkpoints(Path(training.checkpoint), session.trainer.states, session.program.schedule) if training.checkpoint else None
        session.first = saved.start(training.resume) if saved else 0
        log = Log(training.log, session.first) if rank == 0 else None
        for step in range(session.first, job.steps):
            session.step(traced=False)
            if log:
                log.line({"step": step, "loss": session.run.losses[-1], "grad_norm": session.run.grad_norms[-1], "step_s": session.run.step_ns[-1] / 1e9})
            if saved and ((step + 1) % training.every == 0 or step + 1 == job.steps):
                saved.save(step + 1)
    finally:
        session.end()


class Log:
    """One line of JSON a step, to stdout and to a file; each goes out in one write, so none is ever cut."""

    def __init__(self, path: str | None, first: int) -> None:
        """Keeps the file's lines of steps before `first`: later ones were not saved and will be done again."""
        self._file = None
        if path:
            file = Path(path)
            try:
                kept = [line for line in file.read_text().splitlines(True) if json.loads(line)["step"] < first] if first and file.exists() else []
            except (ValueError, KeyError, TypeError) as error:
                raise UserError(f"{file} is no log of a training ({error}); remove it, or name another with --log") from None
            try:
                part = file.with_name(file.name + ".part")
                part.parent.mkdir(parents=True, exist_ok=True)
                part.write_text("".join(kept))
                part.replace(file)
                self._file = os.open(file, os.O_WRONLY | os.O_APPEND)
            except OSError as error:
                raise UserError(f"{file} cannot be written ({error.strerror}); name another file with --log") from None

    def line(self, data: dict) -> None:
        line = (json.dumps(data) + "\n").encode()
        if self._file:
            os.write(self._file, line)
        os.write(1, line)
