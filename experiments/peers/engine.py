"""Engine: a block of this project, its two regions run as their schedule says."""
from __future__ import annotations

import torch

from engine.block import Block
from engine.compile import Program
from engine.deal import deal
from experiments.peers.case import Place
from experiments.peers.layers import Weights
from sim.schedule import Schedule


class Engine:
    """Rank r has its part of each chunk."""

    note = ""

    def __init__(self, schedule: Schedule, part: str, w: Weights, place: Place) -> None:
        program = Program(schedule, place.backend, place.kernel, place.rank, place.group)
        with torch.device("meta"):
            self.block = Block(program, 0)
        for name in self.block.names:
            self.block.register_parameter(name, w[name])
        self.positions_T = deal(torch.arange(schedule.seq, device=place.device), schedule.chunk, schedule.P, place.rank)

    def __call__(self, x_TC: torch.Tensor) -> torch.Tensor:
        return self.block(x_TC)
