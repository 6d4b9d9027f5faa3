"""Need: the most memory a rank takes in a step, from the schedule alone: no simulation, so that it can be asked before anything starts.

The same things as sim.memory counts over time: arenas and states throughout, and beside them the arguments of regions at work, their
largest workspace and the parameters gathered or cast for them. A bound from above, some percent high, where reductions keep up with the
regions that they follow; what the library of matrix products keeps (blas_bytes) is a machine's, and not in it.
"""
from __future__ import annotations

from sim.externals import GRADIENT_BYTES, STATE_BYTES, region_params, sharded
from sim.layout import ITEM
from sim.ops import KINDS, alike
from sim.schedule import SPACES, Schedule


def need(schedule: Schedule, zero: int) -> dict[str, int]:
    """Space -> bytes of one rank at its most, with the model states at ZeRO stage `zero`."""
    found = {space: schedule.arena_bytes(space) for space in SPACES}
    found["host"] += schedule.handed_bytes
    found["hbm"] += states(schedule, zero) + max(beside(schedule, zero), reduction(schedule, zero))
    return found


def states(schedule: Schedule, zero: int) -> int:
    """Parameters, gradients and optimizer that one rank keeps."""
    return STATE_BYTES * schedule.model.params // (schedule.P if zero == 3 else 1)


def beside(schedule: Schedule, zero: int) -> int:
    """What one rank needs beside arenas and states: the most of any two regions in a row, the second at work while the first ends."""
    hidden = schedule.seq // schedule.P * schedule.model.hidden * ITEM[schedule.dtype]
    waiting = schedule.layers if "bwd" in schedule.regions and "x" in arguments(schedule, "bwd") else 0
    prefetched = sharded(schedule, zero)
    grads = passing(schedule, zero)
    work = {r: workspace(schedule, r) for r in schedule.regions}
    made = parameters(schedule, zero)
    always = (3 + waiting) * hidden + 8 * schedule.seq // schedule.P if schedule.hidden == "hbm" else 0
    order = [r for r, _ in schedule.order(min(schedule.layers, 2))]
    pairs = list(zip(order, order[1:])) or [(r,) for r in order]
    return always + max(((sum if prefetched else max)(made[r] for r in pair) + sum(grads[r] for r in pair) + max(work[r] for r in pair) for pair in pairs), default=0)


def parameters(schedule: Schedule, zero: int) -> dict[str, int]:
    """By region, the bytes of the parameters that are made for it, gathered or cast, and gone after it."""
    made = sharded(schedule, zero) or ITEM[schedule.dtype] == 2
    return {r: region_params(schedule.model, r) * ITEM[schedule.dtype] * made for r in schedule.regions}


def reduction(schedule: Schedule, zero: int) -> int:
    """After the last region, what reducing the gradients takes: under ZeRO-0 all of them once more, side by side (fp32)."""
    return GRADIENT_BYTES * schedule.model.params if schedule.P > 1 and not sharded(schedule, zero) else 0


def workspace(schedule: Schedule, region: str) -> int:
    """The largest workspace of a region's operations."""
    return max((size for _, size in workspaces(schedule, region)), default=0)


def workspaces(schedule: Schedule, region: str, kernel: str = "") -> list[tuple[int, int]]:
    """(which op, bytes beside its operands) of a region's compute ops, in order; `kernel` is the attention kernel's name. Alike ones are asked once."""
    known: dict[tuple, int] = {}
    found = []
    for k, op in enumerate(schedule.regions[region].ops):
        if op.stream == "compute":
            same = alike(op, schedule)
            if same not in known:
                known[same] = KINDS[op.kind].workspace(op, schedule, kernel)
            found.append((k, known[same]))
    return found


def gradients(schedule: Schedule) -> dict[str, int]:
    """By region, the bytes of the weight gradients it makes."""
    return {r: sum(b.size_bytes for b in region.buffers.values() if b.role == "grad") for r, region in schedule.regions.items()}


def passing(schedule: Schedule, zero: int) -> dict[str, int]:
    """By region, the bytes of its whole weight gradients where they are gone once reduced; those that stay are states."""
    return gradients(schedule) if sharded(schedule, zero) else dict.fromkeys(schedule.regions, 0)


def arguments(schedule: Schedule, region: str) -> set[str]:
    """Roles of a region's arguments in HBM."""
    return {b.role for b in schedule.regions[region].buffers.values() if b.life == "argument" and b.space == "hbm"}
