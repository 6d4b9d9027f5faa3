"""Plan: lifetimes to offsets. Space is shared by two buffers only where every access of one happens before the other's first write.

So the plan adds no order of its own within a region; across regions the second waits pass adds what sharing needs. With slack, space
is shared too where one buffer has been dead in issue order for some ops; the second waits pass then adds waits within regions.
"""
from __future__ import annotations

import numpy as np

from sim.errors import UserError
from sim.hazards import N, Alone
from sim.layout import align
from sim.schedule import SPACES, Buffer, Schedule
from sim.units import show_bytes


def plan(schedule: Schedule, regions: dict[str, Alone], reuse: bool = True, slack: int = 0) -> None:
    """Gives every value, slot and saved buffer its offset, and the schedule its arena sizes, in place; regions: with their waits within."""
    for space in SPACES:
        top = 0
        for b in schedule.saved.values():
            if b.space == space:
                b.offset, top = top, top + align(b.size_bytes)
        schedule.stride[space] = top
    for space in SPACES:
        tops = (_pack(regions[name], list(region.buffers.values()), space, reuse, slack) for name, region in schedule.regions.items())
        schedule.shared[space] = max(tops, default=0)


def _pack(region: Alone, declared: list[Buffer], space: str, reuse: bool, slack: int) -> int:
    """Offsets for one region's buffers in one space; largest first, each at the lowest place that is free. Returns the top."""
    buffers = [b for b in declared if b.space == space and b.life != "argument"]
    if not buffers:
        return 0
    overlap = _overlap(region, buffers, slack) if reuse else np.ones((len(buffers),) * 2, bool)
    sizes = np.array([align(b.size_bytes) for b in buffers])
    offsets = np.full(len(buffers), -1)
    for k in np.argsort(-sizes, kind="stable"):
        rivals = np.flatnonzero(overlap[k] & (offsets >= 0))
        offsets[k] = _lowest(offsets[rivals], sizes[rivals], sizes[k])
    for b, offset in zip(buffers, offsets):
        b.offset = int(offset)
    return int((offsets + sizes).max())


def _lowest(starts: np.ndarray, sizes: np.ndarray, size: int) -> int:
    """The lowest offset where `size` bytes fit between taken intervals."""
    place = 0
    for k in np.argsort(starts, kind="stable"):
        if starts[k] >= place + size:
            break
        place = max(place, int(starts[k] + sizes[k]))
    return place


def _overlap(region: Alone, buffers: list[Buffer], slack: int) -> np.ndarray:
    """[n, n] bool: neither buffer is finished, in happens-before (or for `slack` ops), when the other is first written."""
    place = {b.name: k for k, b in enumerate(buffers)}
    first = [-1] * len(buffers)
    last = [[0] * N for _ in buffers]
    dead = [0] * len(buffers)
    for k, op in enumerate(region.ops):
        for name in op.reads + op.writes:
            b = place.get(name, -1)
            if b >= 0:
                last[b][region.stream[k]] = region.position[k]
                dead[b] = k + 1
                if first[b] < 0:
                    first[b] = k
    start = region.clock[first]
    start[np.arange(len(first)), np.array(region.stream)[first]] -= 1  # strictly before: an op's own operands never share
    before = np.all(np.array(last)[:, None, :] <= start[None, :, :], axis=2)
    if slack:
        before |= np.array(dead)[:, None] + slack - 1 <= np.array(first)[None, :]
    return ~(before | before.T)


def check_fit(schedule: Schedule, need: dict[str, int], have: dict[str, int], longest: str) -> None:
    """Raises UserError naming the first space that `need` bytes do not fit, by how much, and the longest S that would."""
    for space in SPACES:
        if need[space] > have[space]:
            over = show_bytes(need[space] - have[space])
            raise UserError(f"S={schedule.seq} needs {show_bytes(need[space])} of {space} memory, {over} more than the {show_bytes(have[space])} there is; {longest}")
