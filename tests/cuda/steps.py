"""A step of llama3-8b shapes that a hook watches; the one before it compiles, and takes cuBLAS's workspace."""
from __future__ import annotations

from collections.abc import Callable

from engine.text import stdlib_bytes
from engine.train import Trainer
from sim.model import Model
from tests.engine.cases import Place, running, schedule


def second_step(rank: int, group, place: Place, model: Model, seq: int, chunk: int, watch: Callable):
    """What watch(program) found in it."""
    with running(schedule(model, seq, chunk, 1, "bf16", loss_sub=32), rank, group, place) as program:
        trainer, tokens = Trainer(program), stdlib_bytes(seq)
        trainer.step(tokens)
        found = watch(program)
        trainer.step(tokens)
        return found
