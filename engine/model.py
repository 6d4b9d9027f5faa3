"""A small language model out of scheduled blocks: embedding, L blocks, chunked loss."""
from __future__ import annotations

import torch
from torch import nn

from engine.block import Block, init
from engine.compile import Program
from engine.loss import Loss
from sim.model import Model


def initial(model: Model, seed: int) -> dict[str, torch.Tensor]:
    """fp32 weights by state_dict name; the same for a model and a seed, whatever the schedule and the ranks."""
    shapes = {f"blocks.{k}.{n}": s for k in range(model.layers) for n, s in model.weight_shapes().items()}
    shapes |= {f"loss.{n}": s for n, s in model.head_shapes().items()} | {"embedding": (model.vocab, model.hidden)}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return {name: init(name.rpartition(".")[2], shape, model.layers) for name, shape in shapes.items()}


class LanguageModel(nn.Module):
    """(tokens_T, label_T int64 [S/P] of this rank, valid) -> this rank's share of the mean loss."""

    def __init__(self, program: Program, seed: int = 0) -> None:
        """Weights depend on the seed and the model alone, so every rank and every schedule starts from the same ones."""
        super().__init__()
        m = program.schedule.model
        self.blocks = nn.ModuleList(Block(program, k) for k in range(m.layers))
        self.loss = Loss(program)
        self.embedding = nn.Parameter(torch.empty((m.vocab, m.hidden), dtype=self.loss.Whead.dtype))
        self.load_state_dict(initial(m, seed))

    def embed(self, tokens_T: torch.Tensor) -> torch.Tensor:
        """tokens_T int64 [S/P] -> x_TC."""
        return nn.functional.embedding(tokens_T, self.embedding)

    def head(self, x_TC: torch.Tensor, label_T: torch.Tensor, valid: int) -> torch.Tensor:
        """Everything after the embedding."""
        for block in self.blocks:
            x_TC = block(x_TC)
        return self.loss(x_TC, label_T, valid)

    def forward(self, tokens_T: torch.Tensor, label_T: torch.Tensor, valid: int) -> torch.Tensor:
        return self.head(self.embed(tokens_T), label_T, valid)
