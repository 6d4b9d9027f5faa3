"""Engine: a block of this project, its two regions run as their schedule says."""
from __future__ import annotations

import time
from statistics import median

import torch

from engine.block import Block
from engine.compile import Program
from engine.deal import deal
from experiments.peers import inputs
from experiments.peers.case import Place
from experiments.peers.layers import Weights
from sim.schedule import Schedule

FIRST_OPS = 500
"""Issue times are of so many ops after the device was idle: later ones may wait for room in its launch queue."""


class Engine:
    """Rank r has its part of each chunk."""

    note = ""

    def __init__(self, schedule: Schedule, part: str, w: Weights, place: Place) -> None:
        self.program = Program(schedule, place.backend, place.kernel, place.rank, place.group)
        with torch.device("meta"):
            self.block = Block(self.program, 0)
        for name in self.block.names:
            self.block.register_parameter(name, w[name])
        self.positions_T = deal(torch.arange(schedule.seq, device=place.device), schedule.chunk, schedule.P, place.rank)
        self.issued_ns: list[int] = []
        """When each op of the latest step was issued."""
        for stream in place.backend.streams.values():
            stream.launch = self._stamped(stream.launch)

    def __call__(self, x_TC: torch.Tensor) -> torch.Tensor:
        return self.block(x_TC)

    def issue(self) -> dict:
        """Of the latest step: its ops, and the host's median time for one of the first (us)."""
        first = self.issued_ns[:FIRST_OPS + 1]
        return {"ops": len(self.issued_ns), "issue_us": median(b - a for a, b in zip(first, first[1:])) / 1e3}

    def _stamped(self, launch):
        def stamped(work, span=None):
            launch(work, span)
            self.issued_ns.append(time.perf_counter_ns())

        return stamped


class Handed:
    """Forward and backward where hidden states lie on the host: x and dy are put there, y and dx found there."""

    def __init__(self, peer: Engine, w: Weights, schedule: Schedule, device: torch.device) -> None:
        self.peer, self.w, self.chain = peer, w, peer.program.chain
        self.chain.hidden_TC[0].copy_(inputs.hidden(schedule, device, 1)[peer.positions_T])
        self._dy_TC = inputs.hidden(schedule, device, 2)[peer.positions_T].cpu()
        self._on: torch.Tensor | None = None

    @property
    def y_TC(self) -> torch.Tensor:
        return self.chain.hidden_TC[1].to(self.peer.positions_T.device)

    @property
    def dx_TC(self) -> torch.Tensor:
        return self.chain.gradient_TC.to(self.peer.positions_T.device)

    def clear(self) -> None:
        """Gradients are made anew; dy, which dx was written over, is put back."""
        self._on = None
        self.peer.issued_ns.clear()
        self.chain.gradient_TC.copy_(self._dy_TC)
        for t in self.w.values():
            t.grad = None

    def forward(self) -> None:
        self._on = self.peer(self.chain.ticket().requires_grad_())

    def backward(self) -> None:
        self._on.backward(torch.ones_like(self._on))
