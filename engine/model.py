"""A small language model out of scheduled blocks: embedding, L blocks, chunked loss."""
from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from engine.block import Block, init
from engine.compile import Program
from engine.loss import Loss
from sim.model import Model


def initial(model: Model, seed: int, device: torch.device | str = "cpu") -> Iterator[tuple[str, torch.Tensor]]:
    """(state_dict name, fp32 weight), one at a time, drawn on a device; the same for a model, a seed and a kind of device, whatever the
    schedule and the ranks."""
    shapes = {f"blocks.{k}.{n}": s for k in range(model.layers) for n, s in model.weight_shapes().items()}
    shapes |= {f"loss.{n}": s for n, s in model.head_shapes().items()} | {"embedding": (model.vocab, model.hidden)}
    generator = torch.Generator(device).manual_seed(seed)
    for name, shape in shapes.items():
        yield name, init(name.rpartition(".")[2], shape, model.layers, generator)


class LanguageModel(nn.Module):
    """(tokens_T, label_T int64 [S/P] of this rank, valid) -> this rank's share of the mean loss. Weights are fp32, used in the schedule's dtype."""

    def __init__(self, program: Program, seed: int | None = 0) -> None:
        """Weights depend on the seed and the model alone, so every rank and every schedule starts from the same ones; None leaves them unset."""
        super().__init__()
        m = program.schedule.model
        self.program = program
        self.blocks = nn.ModuleList(Block(program, k, torch.float32) for k in range(m.layers))
        self.loss = Loss(program, torch.float32)
        self.embedding = nn.Parameter(torch.empty((m.vocab, m.hidden)))
        if seed is not None:
            self.load_state_dict(dict(initial(m, seed)))

    def forward(self, tokens_T: torch.Tensor, label_T: torch.Tensor, valid: int) -> torch.Tensor:
        x = self.program.chain.embed(tokens_T, self.embedding)
        for block in self.blocks:
            x = block(x)
        return self.loss(x, label_T, valid)
