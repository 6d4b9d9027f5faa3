"""Train loop: deal the text to ranks, run the model, reduce gradients once, step a torch optimizer.

States are replicated (ZeRO 0): every rank holds all parameters, and one all-reduce sums their gradients.
"""
from __future__ import annotations

import time
from contextlib import contextmanager

import torch
import torch.distributed as dist

from engine.compile import Program
from engine.deal import IGNORE, deal, padded, shift
from engine.model import LanguageModel


class Trainer:
    """A model on one program and its optimizer."""

    def __init__(self, program: Program, seed: int = 0, lr: float = 3e-3) -> None:
        self.program, self.s = program, program.schedule
        self.model = LanguageModel(program, seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)

    def step(self, tokens_S: torch.Tensor, update: bool = True) -> float:
        """One step on a whole sequence [S] (the same on every rank); returns the mean loss over its labels. Spans go to program.spans.

        update=False stops at the loss.
        """
        label_S = shift(tokens_S)
        valid = int((label_S != IGNORE).sum())
        tokens_T, label_T = (self._mine(t, fill) for t, fill in ((tokens_S, 0), (label_S, IGNORE)))
        with self._external("embed"):
            x_TC = self.model.embed(tokens_T)
        loss = self.model.head(x_TC, label_T, valid)
        if not update:
            return float(self._sum(loss.detach()))
        loss.backward()
        with self._external("reduce"):
            total = self._reduce(loss.detach())
        with self._external("optimizer"):
            self.optimizer.step()
            self.optimizer.zero_grad()
        return float(total)

    def grad_norm(self) -> float:
        """Of the gradients as they are now."""
        return float(torch.nn.utils.get_total_norm([p.grad for p in self.model.parameters()]))

    def _mine(self, x_S: torch.Tensor, fill: int) -> torch.Tensor:
        return deal(padded(x_S, self.s.P, fill), self.s.chunk, self.s.P, self.program.runtime.rank)

    def _sum(self, loss: torch.Tensor) -> torch.Tensor:
        if self.s.P > 1:
            dist.all_reduce(loss, group=self.program.runtime.group)
        return loss

    def _reduce(self, loss: torch.Tensor) -> torch.Tensor:
        """Sums gradients and loss over the ranks, in one flat fp32 tensor."""
        if self.s.P == 1:
            return loss
        grads = [p.grad for p in self.model.parameters()]
        flat = torch.cat([loss.view(1), *(g.reshape(-1).float() for g in grads)])
        dist.all_reduce(flat, group=self.program.runtime.group)
        for grad, part in zip(grads, flat[1:].split([g.numel() for g in grads])):
            grad.copy_(part.view_as(grad))
        return flat[0]

    @contextmanager
    def _external(self, name: str):
        start = time.perf_counter_ns()
        yield
        if self.program.spans is not None:
            self.program.spans.append((f"ext.{name}", 0, "external", [start, time.perf_counter_ns()]))
