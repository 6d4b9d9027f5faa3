"""The process of one rank that runs all microbenchmarks: python -m engine.micro.serve PLAN DEVICE, under torchrun where there are several.

Rank 0 prints lines: `tick DONE OF NAME`, and `points JSON` for every part that is done.
"""
from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed as dist

from engine.kernels.choose import choose, usable
from engine.meter import Meter
from engine.micro.host import measure_host
from engine.micro.measure import keep_busy, measure
from engine.micro.place import Place, Plan
from engine.micro.table import GROUPS
from engine.micro.together import measure_together
from engine.serve import ranked
from engine.worker import check_gpus, placement
from engine.world import world

TICK, POINTS = "tick ", "points "


def run(plan: Plan, rank: int, group: dist.ProcessGroup | None, tick: Callable[[int, int, str], None] = lambda done, total, name: None) -> Iterator[list[dict]]:
    """All points of a plan, on every rank alike, as soon as they are known."""
    torch.set_num_threads(1)
    torch.manual_seed(rank)
    begin = time.monotonic()
    backend, kernels = _backend(plan, rank)
    meter = Meter(backend.device)
    try:
        place = Place(plan, rank, group, backend, kernels, choose(kernels, plan.shapes, plan.P, group))
        keep_busy(place, plan.load_s)
        yield measure_together(place, meter, min(plan.rounds, 3), tick)
        yield measure_host(place, plan.rounds)
        if plan.kinds:
            yield from measure(place, meter, GROUPS, begin, tick)
    finally:
        meter.close()
        backend.close()


def _backend(plan: Plan, rank: int):
    """(streams, every attention kernel that is installed here). Raises UserError where the node has too few GPUs."""
    if plan.device == "cpu":
        from engine.backend.cpu import CpuBackend

        return CpuBackend(placement(rank, plan.P)), usable(plan.shapes, plan.dtype, None)
    from engine.backend.cuda import CudaBackend

    here = world()
    check_gpus(here.local_size)
    torch.cuda.set_device(here.local_rank)
    return CudaBackend(here.local_rank), usable(plan.shapes, plan.dtype, torch.cuda.get_device_capability(here.local_rank))


def main(path: str, device: str) -> None:
    plan = Plan(**json.loads(Path(path).read_text()))

    def work(rank: int, group) -> None:
        say = (lambda line: print(line, flush=True)) if rank == 0 else (lambda line: None)
        for found in run(plan, rank, group, lambda done, total, name: say(f"{TICK}{done} {total} {name}")):
            say(POINTS + json.dumps(found))

    ranked(device, work)


if __name__ == "__main__":
    main(*sys.argv[1:])
