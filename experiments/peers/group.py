"""Group: a process group even for a rank that is alone, for peers that know no other way."""
from __future__ import annotations

import torch.distributed as dist

from experiments.peers.case import Place


def some_group(place: Place) -> dist.ProcessGroup:
    """The ranks' group, or one of this rank alone."""
    if place.group is not None:
        return place.group
    if not dist.is_initialized():
        dist.init_process_group("nccl" if place.device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    return dist.group.WORLD
