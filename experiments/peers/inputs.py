"""Inputs: x, dy and the weights, the same on every rank and for every peer; and how far a peer is from fp64 on them."""
from __future__ import annotations

import torch
import torch.distributed as dist

from engine import reference
from engine.arenas import DTYPES
from sim.model import Model
from sim.schedule import Schedule

SEED = 0


def weights(model: Model, dtype: str, part: str, device: torch.device) -> dict[str, torch.Tensor]:
    """Every weight of a block, scores of attention of order one. The attention half is the block whose FFN adds nothing."""
    generator = torch.Generator(device).manual_seed(SEED)
    found = {}
    for name, shape in model.weight_shapes().items():
        drawn = torch.randn(shape, generator=generator, device=device)
        found[name] = drawn / shape[1] ** 0.5 if len(shape) == 2 else (not name.startswith("b")) + 0.1 * drawn
        if part == "attention" and name in model.groups["down"]:
            found[name].zero_()
    return {name: t.to(DTYPES[dtype]) for name, t in found.items()}


def hidden(schedule: Schedule, device: torch.device, number: int) -> torch.Tensor:
    """A hidden state of the whole sequence [S, C]: x is number 1, dy number 2."""
    generator = torch.Generator(device).manual_seed(SEED + number)
    return torch.randn(schedule.seq, schedule.model.hidden, generator=generator, device=device, dtype=DTYPES[schedule.dtype])


def right(schedule: Schedule, w: dict[str, torch.Tensor], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, dx) of the whole sequence in fp64."""
    x_SC = hidden(schedule, device, 1).double().requires_grad_()
    y_SC = reference.block(x_SC, {name: t.double() for name, t in w.items()}, schedule.model)
    y_SC.backward(hidden(schedule, device, 2).double())
    return y_SC.detach(), x_SC.grad


def error(mine_TC: torch.Tensor, right_SC: torch.Tensor, positions_T: torch.Tensor, group: dist.ProcessGroup | None) -> float:
    """Relative L2 error of all ranks' tokens."""
    square = (mine_TC.detach().double() - right_SC[positions_T]).square().sum().cpu()
    if group is not None:
        dist.all_reduce(square, group=group)
    return float(square.sqrt()) / float(right_SC.norm())
