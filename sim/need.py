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
    found["hbm"] += states(schedule, zero) + beside(schedule, zero)
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


def transient(schedule: Schedule) -> int:
    """The most bytes of HBM that a rank which keeps whole states makes and frees around regions, call by call: hidden states, their gradients and labels,
    weight gradients, the embedding's last, and parameters made for a region. Workspaces are apart."""
    given, made, grads = handed(schedule), parameters(schedule, 0), gradients(schedule)
    found = kept = 0
    for k, (region, _) in enumerate(schedule.order()):
        kept += grads[region]
        found = max(found, sum(size for first, last, size in given if first <= k <= last) + made[region] + kept)
    return max(found, kept + GRADIENT_BYTES * schedule.model.vocab * schedule.model.hidden + summed(schedule))


def summed(schedule: Schedule) -> int:
    """Bytes beside the embedding's fp32 gradient of what it is the sum of: all of it in the schedule's dtype, or a chunk of the host's hidden states in
    that and in fp32."""
    m, item = schedule.model, ITEM[schedule.dtype]
    halves = item < GRADIENT_BYTES
    if schedule.hidden == "hbm":
        return item * halves * m.vocab * m.hidden
    return (item + GRADIENT_BYTES * halves) * (max(n for _, n in schedule.chunks) // schedule.P) * m.hidden


def handed(schedule: Schedule) -> list[tuple[int, int, int]]:
    """(first, last, bytes) of each hidden state, gradient of one and label in HBM: the regions that are given it first and last, by their place in
    schedule.order(), -1 before all. Hidden state k enters layer k, and its gradient leaves it."""
    layers, hidden = schedule.layers, schedule.seq // schedule.P * schedule.model.hidden * ITEM[schedule.dtype]
    place = {"x": ("hidden", 0), "y": ("hidden", 1), "dy": ("gradient", 1), "dx": ("gradient", 0), "label": ("label", 0)}
    given = {r: arguments(schedule, r) & set(place) for r in schedule.regions}
    lives: dict[tuple[str, int], list[int]] = {("hidden", 0): [-1, -1], ("label", layers): [-1, -1]} if schedule.hidden == "hbm" else {}
    for k, (region, layer) in enumerate(schedule.order()):
        for role in given[region]:
            kind, step = place[role]
            lives.setdefault((kind, layers if region == "loss" else layer + step), [k, k])[1] = k
    return [(first, last, hidden if kind != "label" else 8 * schedule.seq // schedule.P) for (kind, _), (first, last) in lives.items()]


def parameters(schedule: Schedule, zero: int) -> dict[str, int]:
    """By region, the bytes of the parameters that are made for it, gathered or cast, and gone after it."""
    made = sharded(schedule, zero) or ITEM[schedule.dtype] == 2
    return {r: region_params(schedule.model, r) * ITEM[schedule.dtype] * made for r in schedule.regions}


def workspace(schedule: Schedule, region: str, kernel: str = "") -> int:
    """The largest workspace of a region's operations."""
    return max((size for _, size in workspaces(schedule, region, kernel)), default=0)


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
