"""Limits: why a kernel for GPUs cannot run a model, in words."""
from __future__ import annotations

from sim.model import Model


def over(model: Model, dtype: str, capability: tuple[int, int] | None, head_dim: int, least: tuple[int, int] = (8, 0)) -> str | None:
    """What of a bf16 kernel's limits is passed: the least compute capability, the largest head_dim. None if nothing is."""
    if capability is None or capability < least:
        return "needs a GPU of compute capability {}.{} or more".format(*least)
    if dtype != "bf16":
        return f"takes no {dtype}; use --dtype bf16"
    if model.head_dim % 8 or model.head_dim > head_dim:
        return f"takes a head_dim that is a multiple of 8 and at most {head_dim}, not {model.head_dim}"
    return None
