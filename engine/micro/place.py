"""Place: what a rank measures with: the engine's streams, the kernels that are installed, tensors shared by shape; and what it is to measure."""
from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
import torch.distributed as dist

from engine.arenas import DTYPES
from engine.backend.base import Backend
from engine.kernels.choose import Pair
from engine.most import most
from sim.model import Model


@dataclass
class Plan:
    """What to measure, as it is sent to the ranks."""

    model: dict
    P: int
    dtype: str
    device: str
    budget_s: float = 120.0
    """All of it ends by then; what was not reached stays N/A."""
    load_s: float = 3.0
    """Load before the first measurement, so that a GPU is at its steady clock."""
    rounds: int = 5
    """Each point is measured so often, all of a group in turns."""
    kinds: bool = True
    """Whether every kind of work is measured at its sizes too, not streams together and the host alone."""

    @property
    def shapes(self) -> Model:
        return Model(**self.model)


class Place:
    """One rank, and what all ranks agree on."""

    def __init__(self, plan: Plan, rank: int, group: dist.ProcessGroup | None, backend: Backend, kernels: list[ModuleType], chosen: ModuleType | Pair) -> None:
        """kernels: all that are installed; chosen: what the engine would use."""
        self.plan, self.rank, self.group, self.backend = plan, rank, group, backend
        self.device, self.dtype = backend.device, DTYPES[plan.dtype]
        self.chosen = chosen
        self.capability = torch.cuda.get_device_capability(self.device) if self.device.type == "cuda" else None
        self.kernels = {kernel.NAME: kernel for kernel in kernels}
        self.groups = {plan.P: group}
        for ranks in range(2, plan.P):
            if not ranks & (ranks - 1):
                self.groups[ranks] = dist.new_group(range(ranks))
        self._tensors: dict[tuple, torch.Tensor] = {}

    def tensor(self, role: str, *shape: int, dtype: torch.dtype | None = None, host: bool = False) -> torch.Tensor:
        """Random values, as the power that a product takes depends on them. On the host: pinned where there is a GPU."""
        key = role, shape, dtype, host
        if key not in self._tensors:
            dtype = dtype or self.dtype
            if host:
                self._tensors[key] = torch.ones(shape, dtype=dtype, pin_memory=self.device.type == "cuda")
            else:
                self._tensors[key] = torch.randn(shape, device=self.device).to(dtype)
        return self._tensors[key]

    def clear(self) -> None:
        """Gives the tensors back."""
        self._tensors.clear()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def most(self, *values: float) -> list[float]:
        """Of each value, the most of any rank."""
        return most(list(values), self.group)

    def first(self, value: float) -> float:
        """Rank 0's value; it must not be negative."""
        return self.most(value if self.rank == 0 else 0.0)[0]
