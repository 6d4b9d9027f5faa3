"""Waits: the fewest that make a schedule safe, given what it waits for already.

    add_waits: schedule without waits -> the same ops, each waiting for what its hazards need and nothing already implied.

Run over names first (so that the plan knows what happens before what), and over planned byte ranges afterwards.
"""
from __future__ import annotations

from sim.hazards import HOST, N, Walk, needs, walk
from sim.schedule import PREV, Op, Schedule


def add_waits(schedule: Schedule) -> None:
    """Adds waits in place. An op gets at most one per other stream, and none that stream order or another wait implies.

    A hazard with an instance further back than the previous one is carried by the last compute op of the one between.
    """
    w = Walk(schedule, walk(schedule))
    need = needs(w).tolist()
    given = {op.id: op.waits for region in schedule.regions.values() for op in region.ops}
    carriers: dict[str, Op] = {}
    while _derive(w, need, carriers):
        for region in schedule.regions.values():
            for op in region.ops:
                if op.id not in carriers:
                    op.waits = given[op.id]


def _derive(w: Walk, need: list[list[int]], carriers: dict[str, Op]) -> bool:
    """One pass over the walk. True if a carrier was given a wait that earlier ops have to be derived again for."""
    last: list[tuple[int, ...]] = [(0,) * N] * N
    clock: list[tuple[int, ...]] = []
    host, again = False, False
    waits = w.waits()
    for number, stream in enumerate(w.stream):
        c = last[stream]
        for target in waits[number]:
            c = tuple(map(max, c, clock[target]))
        if host:
            c = tuple(map(max, c, last[HOST]))
        host = host or stream == HOST
        row = need[number]
        missing = [s for s in range(N) if row[s] > c[s] and s != stream]
        if missing:
            sources = [w.on_stream[s][row[s]] for s in missing]
            for s, source in zip(missing, sources):
                if not any(clock[other][s] >= row[s] for other in sources if other != source):
                    near = _nameable(w, number, source)
                    again |= near != source and _carry(w, near, source, carriers)
                    _wait(w, number, near)
                    c = tuple(map(max, c, clock[near], clock[source]))
        c = c[:stream] + (w.position[number],) + c[stream + 1:]
        last[stream] = c
        clock.append(c)
    return again


def _wait(w: Walk, number: int, source: int) -> bool:
    """Makes one op wait for another, both by number. False if it did already."""
    op = w.ops[number]
    name = w.ops[source].id
    if w.at[source] != w.at[number]:
        name = f"{PREV}{w.instances[w.at[source]][0]}:{name}"
    if name in op.waits:
        return False
    op.waits += (name,)
    return True


def _nameable(w: Walk, number: int, source: int) -> int:
    """The op to wait for: the source, or, from two instances on, the last compute op of the instance between."""
    between = w.at[number] - 1
    if w.at[source] >= between:
        return source
    return max(k for k in range(w.first[between], w.first[between + 1]) if w.ops[k].stream == "compute")


def _carry(w: Walk, carrier: int, source: int, carriers: dict[str, Op]) -> bool:
    """Makes the carrier wait for the end of the source's stream in the instance before it."""
    carriers[w.ops[carrier].id] = w.ops[carrier]
    before = w.at[carrier] - 1
    end = max(k for k in range(w.first[before], w.first[before + 1]) if w.stream[k] == w.stream[source])
    return _wait(w, carrier, end)
