"""Most: what ranks agree on when one of them is the slowest, or the fullest."""
from __future__ import annotations

import torch
import torch.distributed as dist


def most(values: list[float], group: dist.ProcessGroup | None) -> list[float]:
    """Of each value, the most of any rank of a group (None: of this one alone). No rank goes on before all have asked."""
    found = torch.tensor(values, dtype=torch.float64)
    if group is not None:
        dist.all_reduce(found, dist.ReduceOp.MAX, group=group)
    return found.tolist()
