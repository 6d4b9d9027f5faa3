"""Parts: a region behind one particular region, made ready to simulate: numbers for ops, ns, waits, and its external work.

Waits on the instance before depend on which region that was, so fwd behind nothing and fwd behind fwd are two parts. Instances that
have the same part do the same. Beside the schedule's waits, those at a region's borders (sim.borders).
"""
from __future__ import annotations

from dataclasses import dataclass

from sim.borders import meeting, touching
from sim.externals import Externals
from sim.schedule import PREV, STREAMS, Schedule

HOST = STREAMS.index("host")
GATHER, REDUCE = len(STREAMS), len(STREAMS) + 1
"""External streams; both are the timeline's `external` row."""


@dataclass
class Part:
    """A region with one particular region before it, ready to run. Op n is what has its parameters ready (a gather or a cast), op n + 1 its
    reduction, if any."""

    region: str
    size: int
    """Spans of an instance."""
    host: list[tuple[int, int]]
    """(stream, ns that issuing takes) of each op, in issue order."""
    streams: dict[int, list[tuple[int, int, tuple]]]
    """Stream -> (op, ns, waits) in order; a wait is (instances back, op)."""
    syncs: dict[int, tuple[tuple, int]]
    """Host op -> its waits, and ns that it takes then."""
    begins: int
    """First compute op, or -1."""


def parts(schedule: Schedule, ns: dict[str, int], issue: dict[str, int], ext: Externals, order: list[str]) -> list[Part]:
    """The parts of a step in order; equal neighbourhoods are one object."""
    index = {r: {op.id: k for k, op in enumerate(region.ops)} for r, region in schedule.regions.items()}
    ready = ext.gather or ext.cast
    size = {r: len(found) + (r in ready) + (r in ext.reduce) for r, found in index.items()}
    compute = {r: [k for k, op in enumerate(region.ops) if op.stream == "compute"] for r, region in schedule.regions.items()}
    last = touching(schedule)
    shared = {STREAMS.index(stream) for stream in meeting(last)}
    made: dict[tuple[str, str], Part] = {}

    within = {r: [tuple([(0, found[w]) for w in op.waits if not w.startswith(PREV)]) for op in schedule.regions[r].ops] for r, found in index.items()}
    across = {r: {k: prev for k, op in enumerate(region.ops) if (prev := [w.removeprefix(PREV) for w in op.waits if w.startswith(PREV)])} for r, region in schedule.regions.items()}

    def make(region: str, before: str) -> Part:
        ops = schedule.regions[region].ops
        host = [(STREAMS.index(op.stream), issue[op.id]) for op in ops]
        streams: dict[int, list] = {}
        syncs = {}
        mine = compute[region]
        gate = len(ops) if region in ready else -1
        border = {STREAMS.index(stream): (1, k) for stream, k in last[before].items()} if before else {}
        for k, (op, (s, _)) in enumerate(zip(ops, host)):
            waits = within[region][k]
            if k in across[region]:
                waits += tuple([(1, index[before][id]) for where, id in (w.split(":", 1) for w in across[region][k]) if where == before])
            if s == HOST:
                syncs[k] = waits, ns[op.id]
                continue
            if s in shared and s not in streams:
                waits += tuple([wait for other, wait in border.items() if other != s])
            streams.setdefault(s, []).append((k, ns[op.id], waits + ((0, gate),) if gate >= 0 and mine and k == mine[0] else waits))
        if region in ready:
            after = 0 if ext.gather else -1  # a gather is prefetched, a cast stands between the regions
            first = ((1, compute[before][after]),) if before and compute[before] else ()
            streams[GATHER] = [(gate, ready[region], first if ext.gather else tuple(dict.fromkeys((*first, *border.values()))))]
        if region in ext.reduce:
            streams[REDUCE] = [(size[region] - 1, ext.reduce[region], ((0, mine[-1]),) if mine else ())]
        return Part(region, size[region], host, streams, syncs, mine[0] if mine else -1)

    for pair in zip(order, ["", *order]):
        if pair not in made:
            made[pair] = make(*pair)
    return [made[pair] for pair in zip(order, ["", *order])]
