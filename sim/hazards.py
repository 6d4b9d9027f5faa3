"""Hazards: which earlier op each op must come after, over a walk of region instances, in linear time.

A walk is a list of region instances as the engine runs them. Every pair of regions that may follow each other is in it, and
every triple with the middle one single, so that what one region leaves open for the one after next is seen too; longer
distances follow, since an op of a repeated region comes after its own earlier instance on the same stream.

Accesses are to cells: the pieces of an arena between neighbouring buffer borders (before planning: whole buffers). For each
access the latest earlier write on each stream, and for a write the latest earlier read on each stream, must happen before.
That is every RAW, WAW and WAR hazard; older ones follow because the later access had to wait for them.
"""
from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from sim.schedule import PREV, SPACES, STREAMS, Buffer, Op, Schedule

N = len(STREAMS)
HOST = STREAMS.index("host")


def walk(schedule: Schedule) -> list[tuple[str, int, int]]:
    """(region, layer, step) instances that stand for every run of the schedule."""
    full = [("fwd", 0, 0), ("loss", 0, 0), ("bwd", 0, 0), ("fwd", 0, 1), ("fwd", 1, 1), ("bwd", 1, 1), ("bwd", 0, 1), ("fwd", 0, 2), ("loss", 0, 2)]
    if "loss" not in schedule.regions:
        full = [("fwd", 0, 0), ("fwd", 1, 0), ("bwd", 1, 0), ("bwd", 0, 0), ("fwd", 0, 1)]
    return [item for item in full if item[0] in schedule.regions]


@dataclass
class Walk:
    """A walk unrolled: one entry an op instance, in issue order."""

    schedule: Schedule
    instances: list[tuple[str, int, int]]
    ops: list[Op] = field(default_factory=list)
    at: list[int] = field(default_factory=list)
    """Instance number of each op."""
    first: list[int] = field(default_factory=list)
    """Number of each instance's first op."""
    stream: list[int] = field(default_factory=list)
    position: list[int] = field(default_factory=list)
    """1-based place of each op on its stream."""
    on_stream: list[list[int]] = field(default_factory=lambda: [[-1] for _ in STREAMS])
    """Op numbers by stream; index 0 is no op."""
    index: dict[str, dict[str, int]] = field(default_factory=dict)
    """Op id -> place in its region."""

    def __post_init__(self) -> None:
        streams = {}
        for region in self.schedule.regions.values():
            self.index[region.name] = {op.id: k for k, op in enumerate(region.ops)}
            streams[region.name] = [STREAMS.index(op.stream) for op in region.ops]
        for k, (region, _, _) in enumerate(self.instances):
            self.first.append(len(self.ops))
            self.ops += self.schedule.regions[region].ops
            self.stream += streams[region]
            self.at += [k] * len(streams[region])
        for number, stream in enumerate(self.stream):
            self.position.append(len(self.on_stream[stream]))
            self.on_stream[stream].append(number)

    def target(self, number: int, wait: str) -> int | None:
        """Op number that a wait of op `number` means, or None where there is no such instance."""
        k = self.at[number]
        if not wait.startswith(PREV):
            return self.first[k] + self.index[self.instances[k][0]][wait]
        _, region, id = wait.split(":", 2)
        if k == 0 or self.instances[k - 1][0] != region:
            return None
        return self.first[k - 1] + self.index[region][id]

    def waits(self) -> list[list[int]]:
        """Op numbers each op waits for."""
        targets: list[list[int]] = []
        cache: dict[tuple[str, str], list] = {}
        for k, (region, _, _) in enumerate(self.instances):
            before = self.instances[k - 1][0] if k else ""
            if (region, before) not in cache:
                rows = []
                for op in self.schedule.regions[region].ops:
                    row = []
                    for w in op.waits:
                        if not w.startswith(PREV):
                            row.append((0, self.index[region][w]))
                        elif before and w.startswith(f"{PREV}{before}:"):
                            row.append((1, self.index[before][w.split(":", 2)[2]]))
                    rows.append(row)
                cache[region, before] = rows
            base = (self.first[k], self.first[k - 1])
            targets += [[base[which] + place for which, place in row] if row else [] for row in cache[region, before]]
        return targets


def clocks(w: Walk, waits: list[list[int]]) -> list[tuple[int, ...]]:
    """Vector clock of each op: how many ops of each stream happen before it (itself counted). Stream order, waits, host blocking."""
    last: list[tuple[int, ...]] = [(0,) * N] * N
    clock: list[tuple[int, ...]] = []
    host = False
    for stream, position, targets in zip(w.stream, w.position, waits):
        c = last[stream]
        if targets:
            for target in targets:
                c = tuple(map(max, c, clock[target]))
        if host:
            c = tuple(map(max, c, last[HOST]))
        host = host or stream == HOST
        c = c[:stream] + (position,) + c[stream + 1:]
        last[stream] = c
        clock.append(c)
    return clock


def needs(w: Walk) -> np.ndarray:
    """[ops, streams] int64: the latest op of each stream (as a 1-based position) that must happen before each op."""
    op, cell, write = _accesses(w)
    need = np.zeros((len(w.ops), N), np.int64)
    if not len(op):
        return need
    order = np.argsort(cell, kind="stable")
    group = np.cumsum(np.r_[0, np.diff(cell[order]) != 0])
    start = np.r_[True, np.diff(group) != 0]
    stream, position = np.array(w.stream)[op[order]], np.array(w.position)[op[order]]
    writes, big = write[order], len(w.ops) + 1
    rows = np.zeros((len(op), N), np.int64)
    for s in range(N):
        for sources, heed in ((writes, True), (~writes, writes)):  # everything heeds writes, only writes heed reads
            value = np.where(sources & (stream == s), position, 0)
            if value.any():
                running = np.maximum.accumulate(value + group * big) - group * big
                before = np.where(start, 0, np.r_[0, running[:-1]])
                rows[:, s] = np.maximum(rows[:, s], before * heed)
    back = np.empty_like(rows)
    back[order] = rows
    heads = np.flatnonzero(np.r_[True, np.diff(op) != 0])
    need[op[heads]] = np.maximum.reduceat(back, heads)
    return need


def _accesses(w: Walk) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(op number, cell, is write) rows in op order. Cells never written, and reads by an op that also writes, are left out."""
    cells = Cells(w.schedule)
    tables = {r: cells.table(r) for r in {i[0] for i in w.instances}}
    ops, ids, writes = [], [], []
    for k, (region, layer, step) in enumerate(w.instances):
        op, cell, write, life = tables[region]
        shift = np.array([0, layer, 8 * step + layer, 8 * step + layer + 1])[life] * cells.count
        ops.append(op + w.first[k])
        ids.append(cell + shift)
        writes.append(write)
    return np.concatenate(ops), np.concatenate(ids), np.concatenate(writes)


class Cells:
    """Numbers for the pieces of memory that ops touch.

    Life of a cell: 0 shared, 1 saved (one a layer), 2 and 3 arguments. An argument is fresh each step; the hidden state a
    block writes (y, or dy going up) is the next block's x (or dx), so one place in the chain has one number on both sides.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self._ids: dict = {}
        self._borders = {}
        for space in SPACES:
            for saved in (True, False):
                owners = [schedule.saved] if saved else [r.buffers for r in schedule.regions.values()]
                found = [b for bs in owners for b in bs.values() if b.space == space and b.offset is not None and (b.life == "saved") == saved]
                self._borders[space, saved] = np.unique([e for b in found for e in (b.offset, b.offset + b.size_bytes)])

    @property
    def count(self) -> int:
        return len(self._ids)

    def of(self, region: str, name: str) -> list[tuple[int, int]]:
        """(cell, life) of a buffer as an op of that region means it."""
        b = self.schedule.buffer(region, name)
        if b.life == "argument":
            key, life = _chain(region, name)
            return [(self._id(("argument", key)), life)]
        saved = b.life == "saved"
        if b.offset is None:
            return [(self._id((name, "" if saved else region)), int(saved))]
        borders = self._borders[b.space, saved]
        low, high = np.searchsorted(borders, (b.offset, b.offset + b.size_bytes))
        return [(self._id((b.space, saved, int(k))), int(saved)) for k in range(low, high)]

    def at(self, instance: tuple[str, int, int], name: str) -> set[tuple]:
        """The pieces of memory that a buffer means in one instance of a region."""
        region, layer, step = instance
        return {(cell, (0, layer, 8 * step + layer, 8 * step + layer + 1)[life]) for cell, life in self.of(region, name)}

    def table(self, region: str) -> tuple[np.ndarray, ...]:
        """(op, cell, is write, life) rows of one region, in op order."""
        rows: list[tuple[int, int, bool, int]] = []
        cache: dict[str, list[tuple[int, int]]] = {}
        written = {b for r in self.schedule.regions.values() for op in r.ops for b in op.writes}
        for k, op in enumerate(self.schedule.regions[region].ops):
            touched = {}
            for name in op.reads + op.writes:
                if name not in cache:
                    cache[name] = self.of(region, name)
                for cell in cache[name] if name in written or _hidden(name) else ():
                    touched[cell] = touched.get(cell, False) or name in op.writes
            rows += [(k, cell, write, life) for (cell, life), write in touched.items()]
        table = np.array(rows, np.int64).reshape(-1, 4)
        return table[:, 0], table[:, 1], table[:, 2].astype(bool), table[:, 3]

    def _id(self, key) -> int:
        return self._ids.setdefault(key, len(self._ids))


def _hidden(name: str) -> bool:
    return name.startswith(("x[", "dy[", "y[", "dx["))


def _chain(region: str, name: str) -> tuple[str, int]:
    """Place of an argument in the chain of hidden states: (key, life), life 3 where it belongs to the next layer's border."""
    base, _, rest = name.partition("[")
    if base in ("x", "y"):
        return "hidden[" + rest, 3 if base == "y" or region == "loss" else 2
    if base in ("dx", "dy"):
        return "gradient[" + rest, 3 if base == "dy" or region == "loss" else 2
    return name if region != "loss" else "loss." + name, 2
