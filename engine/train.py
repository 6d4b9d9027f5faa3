"""Train loop: deal the text to ranks, run the model, reduce gradients once, clip, step the optimizer (see engine.states)."""
from __future__ import annotations

from typing import NamedTuple

import torch

from engine.backend.base import CALLER
from engine.compile import Program
from engine.deal import IGNORE, deal, padded, shift
from engine.model import LanguageModel, initial
from engine.states import States
from sim.need import transient, workspace


class Step(NamedTuple):
    """What a step gave, the same on every rank."""

    loss: float
    """Mean over the labels of the whole sequence."""
    grad_norm: float
    """Global norm of the gradients, before clipping."""


class Trainer:
    """A model on one program and its states."""

    def __init__(self, program: Program, seed: int = 0, lr: float = 3e-3, zero: int = 0, clip: float | None = None) -> None:
        self.program, self.s, self.clip = program, program.schedule, clip
        self.device = program.backend.device
        with torch.device("meta"):
            self.model = LanguageModel(program, None)
        self.states = States(self.model, zero, program.runtime.group, self.device, self.s.dtype, lr)
        self.states.load(initial(self.s.model, seed, self.device))
        self._room = {"compute": max(workspace(self.s, r, program.runtime.kernel.NAME) for r in self.s.regions), CALLER: 0 if self.states.sharded else transient(self.s)}
        self.make_room()

    def make_room(self) -> None:
        """Has the backend keep what a step takes beside arenas and states, and nothing else; to be called again where that was given back. FSDP2 takes
        what it gathers and reduces as it comes, on streams of its own."""
        self.program.backend.keep(self._room)

    def step(self, tokens_S: torch.Tensor, update: bool = True) -> Step:
        """One step on a whole sequence [S] (the same on every rank). Spans go to program.spans. update=False stops at the loss."""
        label_S = shift(tokens_S)
        valid = int((label_S != IGNORE).sum())
        tokens_T = self._mine(tokens_S, 0).to(self.device)
        label_T = self._mine(label_S, IGNORE).to(self.program.chain.label_device)
        loss = self.model(tokens_T, label_T, valid)
        if not update:
            return Step(float(self.states.total(loss)), 0.0)
        loss.backward()
        with self.program.external("reduce"):
            total = self.states.reduce(loss)
        with self.program.external("optimizer"):
            norm = self.states.update(self.clip)
        return Step(*torch.stack((total, norm)).tolist())

    def _mine(self, x_S: torch.Tensor, fill: int) -> torch.Tensor:
        return deal(padded(x_S, self.s.P, fill), self.s.chunk, self.s.P, self.program.runtime.rank)
