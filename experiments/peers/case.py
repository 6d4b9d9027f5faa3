"""Case: one row to measure, as it is sent to its ranks; and what each rank measures it with."""
from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import NamedTuple

import torch
import torch.distributed as dist

from engine.backend.base import Backend
from engine.kernels import cudnn
from sim.errors import UserError
from sim.schedule import Schedule

PARTS = ("block", "attention")
"""The whole block; or norm, projections, attention and residual: what DeepSpeed's FPDT_Attention replaces."""


@dataclass
class Case:
    """A row of the table."""

    row: str
    part: str
    schedule: str
    """Schedule text: model, S, P, C and dtype of every peer, and what the engine runs."""
    small: str
    """The same at the size whose errors are taken; empty: they are not."""
    repeats: int
    device: str
    load_s: float
    """Seconds of work before anything is timed, so that a GPU is at its steady clock."""
    warm_ups: int = 2
    kernel: str = ""
    """The attention kernel's adapter (engine/kernels); empty: the fastest."""


class Place(NamedTuple):
    """What a rank has."""

    rank: int
    group: dist.ProcessGroup | None
    """None where it is alone."""
    device: torch.device
    backend: Backend
    """The engine's streams."""
    kernel: ModuleType
    """The attention kernel of every row."""


def one_call(schedule: Schedule, kernel: str) -> None:
    """Raises UserError where a kernel is wrong on a whole sequence in one call."""
    elements = schedule.seq * schedule.model.q_dim // schedule.P
    if cudnn.NAME in kernel and elements >= cudnn.MOST_ELEMENTS:
        raise UserError(f"{cudnn.NAME} gives wrong gradients of keys from {cudnn.MOST_ELEMENTS} elements a tensor on, and S in one call has {elements}; "
                        "use a shorter --seq or more GPUs")
