"""Waits: the fewest that make a schedule safe, given what it waits for already.

    add_waits: schedule without waits -> the same ops, each waiting for what its hazards need and nothing already implied.

Within regions first (over names is enough: the plan shares space only where order holds), across regions over planned bytes.
"""
from __future__ import annotations

import numpy as np

from sim.cells import Cells
from sim.hazards import HOST, N, Alone, Instance, alone, chain
from sim.schedule import PREV, STREAMS, Op, Schedule

_COMPUTE = STREAMS.index("compute")


def add_waits(schedule: Schedule) -> None:
    """Adds all waits in place."""
    wait_across(schedule, wait_within(schedule))


def wait_within(schedule: Schedule) -> dict[str, Alone]:
    """Adds the waits that each region needs by itself: at most one per other stream, none that stream order or another wait implies. Returns the
    regions as they are then."""
    regions, _ = alone(schedule)
    for region in regions.values():
        _within(region)
    return regions


def _within(region: Alone) -> None:
    last: list[tuple[int, ...]] = [(0,) * N] * N
    clock: list[tuple[int, ...]] = []
    host = False
    for op, stream, position, need in zip(region.ops, region.stream, region.position, region.need.tolist()):
        c = last[stream]
        for wait in op.waits:
            if not wait.startswith(PREV):
                c = tuple(map(max, c, clock[region.index[wait]]))
        if host:
            c = tuple(map(max, c, last[HOST]))
        host = host or stream == HOST
        sources = [region.on_stream[s][need[s]] for s in range(N) if need[s] > c[s] and s != stream]
        for source in sources:
            s = region.stream[source]
            if len(sources) == 1 or not any(clock[other][s] >= need[s] for other in sources if other != source):
                op.waits += (region.ops[source].id,)
                c = tuple(map(max, c, clock[source]))
        last[stream] = c = c[:stream] + (position,) + c[stream + 1:]
        clock.append(c)
    region.clock = np.array(clock, np.int64).reshape(-1, N)


def wait_across(schedule: Schedule, regions: dict[str, Alone]) -> None:
    """Adds the waits on earlier instances, over the memory as it is planned by now. What lies further back than the last one is carried by a compute
    op between."""
    given = [(op, op.waits) for region in schedule.regions.values() for op in region.ops]
    cells = Cells(schedule)
    for region in regions.values():
        region.place(cells)
    carriers: dict[str, Op] = {}
    while not _across(schedule, regions, cells, carriers):
        for op, waits in given:
            if op.id not in carriers:
                op.waits = waits
        for region in regions.values():
            region.forget()


def _across(schedule: Schedule, regions: dict[str, Alone], cells: Cells, carriers: dict[str, Op]) -> bool:
    """One pass over the chain. False where an earlier op was made a carrier, so that what follows it has to be found again."""
    for instance in chain(schedule, regions, cells):
        while (late := instance.late()).any():
            row = int(late.any(axis=1).argmax())
            streams = late[row].nonzero()[0]
            found = [instance.source(s, int(instance.need[row, s])) for s in streams]
            clocks = [i.clock(np.array([k]))[0] for i, k in found]
            for n, (s, (before, source)) in enumerate(zip(streams, found)):  # the one furthest back that no other one implies
                if not any(c[s] >= instance.need[row, s] for m, c in enumerate(clocks) if m != n):
                    break
            if not _reach(instance, int(instance.ops[row]), before, source, carriers):
                return False
            instance.refresh()
    return True


def _reach(instance: Instance, k: int, before: Instance, source: int, carriers: dict[str, Op]) -> bool:
    """Makes op k of an instance come after an op of an earlier one. False if that took a new carrier between."""
    near = instance.before
    if near is before:
        _wait(instance.region, k, near.region, source)
        return True
    carrier = near.region.on_stream[_COMPUTE][-1]
    stream = before.region.stream[source]
    if near.clock(np.array([carrier]))[0][stream] >= before.base[stream] + before.region.position[source]:
        _wait(instance.region, k, near.region, carrier)
        return True
    carriers[near.region.ops[carrier].id] = near.region.ops[carrier]
    _reach(near, carrier, before, before.region.on_stream[stream][-1], carriers)
    return False


def _wait(region: Alone, k: int, before: Alone, source: int) -> None:
    region.ops[k].waits += (f"{PREV}{before.name}:{before.ops[source].id}",)
    region.forget()
