"""Hazards: which earlier ops each op must come after, and which it does come after, in linear time.

Every access must come after the latest earlier write of its cell on each stream, and a write also after the latest earlier read on
each stream. That is every RAW, WAW and WAR hazard: older ones follow, since the later access had to come after them.

What an op does come after is a vector clock: for each stream, how many of its ops (a stream runs in order) are over.

Both are found for each region alone, once, and then across a chain of instances, where only the first accesses to a cell and
the last ones matter.
"""
from __future__ import annotations

from functools import cached_property

import numpy as np

from sim.cells import Accesses, Cells, Operands, operands
from sim.schedule import PREV, STREAMS, Schedule

N = len(STREAMS)
HOST = STREAMS.index("host")
_NUMBER = {name: k for k, name in enumerate(STREAMS)}

STEPS = ((1, "loss", 1), (1, "loss", 1), (1, "", 1), (2, "", 2), (1, "", 0), (2, "loss", 2))
"""(layers forward, loss or not, layers backward) of the steps of `walk`."""


def walk(schedule: Schedule) -> list[tuple[str, int, int]]:
    """(region, layer, step) instances that stand for every run: steps with and without loss or backward, of one and more layers.

    An instance repeated (the next layer) only adds order between what comes before and after: whatever path led through it once
    leads along its streams. So chains are checked where their middle regions occur once, and with the layers that may share bytes.
    """
    found = []
    for step, (up, loss, down) in enumerate(STEPS):
        found += [("fwd", k, step) for k in range(up)]
        found += [(loss, up - 1, step)] if loss else []
        found += [("bwd", k, step) for k in reversed(range(down))]
    return [instance for instance in found if instance[0] in schedule.regions]


class Alone:
    """One region by itself: where its ops are on their streams, and what each must and does come after within it."""

    def __init__(self, schedule: Schedule, name: str, cells: Cells) -> None:
        self.name, self.ops = name, schedule.regions[name].ops
        self.index = {op.id: k for k, op in enumerate(self.ops)}
        self.stream = [_NUMBER[op.stream] for op in self.ops]
        self.position: list[int] = []
        """1-based place of each op on its stream."""
        self.on_stream: list[list[int]] = [[-1] for _ in STREAMS]
        """Ops by stream and position."""
        for k, stream in enumerate(self.stream):
            self.position.append(len(self.on_stream[stream]))
            self.on_stream[stream].append(k)
        self._cells = cells
        self._links: dict[str, list[tuple[np.ndarray, np.ndarray]]] = {}

    def place(self, cells: Cells) -> None:
        """The same ops on other cells, as after a plan; its waits within stay as they are."""
        self._cells = cells
        for name in ("accesses", "need", "first", "last"):
            self.__dict__.pop(name, None)

    @cached_property
    def operands(self) -> Operands:
        """What its ops name."""
        return operands(self.ops)

    @cached_property
    def accesses(self) -> Accesses:
        """What its ops touch."""
        return self._cells.accesses(self.name, self.operands)

    @cached_property
    def length(self) -> np.ndarray:
        """Ops on each stream."""
        return np.array([len(ops) - 1 for ops in self.on_stream])

    @cached_property
    def clock(self) -> np.ndarray:
        """[ops, streams]: how many ops of this instance come before each op, itself counted."""
        clock: list[tuple[int, ...]] = []
        last: list[tuple[int, ...]] = [(0,) * N] * N
        host = False
        for op, stream, position in zip(self.ops, self.stream, self.position):
            c = last[stream]
            for wait in op.waits:
                if not wait.startswith(PREV):
                    c = tuple(map(max, c, clock[self.index[wait]]))
            if host:
                c = tuple(map(max, c, last[HOST]))
            host = host or stream == HOST
            last[stream] = c = c[:stream] + (position,) + c[stream + 1:]
            clock.append(c)
        return np.array(clock, np.int64).reshape(-1, N)

    @cached_property
    def need(self) -> np.ndarray:
        """[ops, streams]: the position of the latest op on each stream that must come before each op."""
        a = self.accesses
        need = np.zeros((len(self.ops), N), np.int64)
        if not len(a.op):
            return need
        order = np.argsort(a.place, kind="stable")
        op, write, place = a.op[order], a.write[order], a.place[order]
        stream, position = np.array(self.stream)[op], np.array(self.position)[op]
        start = np.zeros(len(place), bool)
        start[_heads(place)] = True
        lift = np.cumsum(start) * (len(self.ops) + 1)  # sets places apart under one running maximum
        rows = np.zeros((len(op), N), np.int64)
        for s in np.flatnonzero(self.length):
            for sources, heed in ((write, write | True), (~write, write)):  # everything heeds writes, only writes heed reads
                running = np.maximum.accumulate(np.where(sources & (stream == s), position, 0) + lift) - lift
                earlier = np.where(start[1:], 0, running[:-1]) * heed[1:]
                np.maximum(rows[1:, s], earlier, out=rows[1:, s])
        back = np.empty_like(rows)
        back[order] = rows
        heads = _heads(a.op)
        need[a.op[heads]] = np.maximum.reduceat(back, heads)
        return need

    @cached_property
    def first(self) -> Accesses:
        """The first read and the first write of each cell on each stream."""
        a = self.accesses
        key = (a.place * N + np.array(self.stream, np.int64)[a.op]) * 2 + a.write
        rows = np.sort(np.unique(key, return_index=True)[1])
        return Accesses(a.op[rows], a.write[rows], a.cell[rows], a.reach[rows])

    @cached_property
    def last(self) -> list[tuple[np.ndarray, ...]]:
        """(cell, reach, stream, position) of the last writes of each cell on each stream, and of the last reads."""
        a, found = self.accesses, []
        stream, position = np.array(self.stream, np.int64)[a.op], np.array(self.position, np.int64)[a.op]
        for which in (a.write, ~a.write):
            key = a.place[which] * N + stream[which]
            rows = np.flatnonzero(which)[len(key) - 1 - np.unique(key[::-1], return_index=True)[1]]
            found.append((a.cell[rows], a.reach[rows], stream[rows], position[rows]))
        return found

    def links(self, before: str) -> list[tuple[np.ndarray, np.ndarray]]:
        """By stream: positions of the ops that wait for ops of the region before, and those ops. A first position stands for entry."""
        if before not in self._links:
            lead, other = f"{PREV}{before}:", self.others[before].index
            found: list[tuple[list[int], list[int]]] = [([1], []) for _ in STREAMS]
            for k, op in enumerate(self.ops):
                for wait in op.waits:
                    if wait.startswith(lead):
                        found[self.stream[k]][0].append(self.position[k])
                        found[self.stream[k]][1].append(other[wait[len(lead):]])
            self._links[before] = [(np.array(positions), np.array(targets, np.int64)) for positions, targets in found]
        return self._links[before]

    others: dict[str, "Alone"]
    """All regions, by name."""

    def forget(self) -> None:
        """To be called after waits that cross were changed."""
        self._links.clear()


def _heads(column: np.ndarray) -> np.ndarray:
    """Where each run of equal numbers begins."""
    return np.flatnonzero(np.concatenate(([True], column[1:] != column[:-1]))) if len(column) else np.zeros(0, np.int64)


def alone(schedule: Schedule) -> tuple[dict[str, Alone], Cells]:
    """Every region by itself."""
    cells = Cells(schedule)
    regions = {name: Alone(schedule, name, cells) for name in schedule.regions}
    for region in regions.values():
        region.others = regions
    return regions, cells


_NO_LINKS = [(np.array([1]), np.zeros(0, np.int64))] * N


class Instance:
    """One region in a chain of instances. Positions and clocks count from the start of the chain."""

    def __init__(self, what: tuple[str, int, int], region: Alone, before: "Instance | None", need: tuple[np.ndarray, np.ndarray]) -> None:
        self.what, self.region, self.before = what, region, before
        self.ops, self.need = need
        """Ops that touch what earlier instances touched, and [ops, streams] the positions they must come after."""
        self.base = before.end if before else np.zeros(N, np.int64)
        self.end = self.base + region.length
        self.refresh()

    def refresh(self) -> None:
        """Takes in the waits as they are now."""
        self._gates = []
        for s, (position, targets) in enumerate(self.region.links(self.before.region.name) if self.before else _NO_LINKS):
            known = np.zeros((2 + len(targets), N), np.int64)  # by places reached on the stream: none, some, past a wait, past two...
            if self.before:
                known[1] = self.before.exit[s]
            if len(targets):
                known[2:] = self.before.clock(targets)
                np.maximum.accumulate(known, out=known)
            self._gates.append((position, known))
        self.__dict__.pop("exit", None)

    def clock(self, ops: np.ndarray) -> np.ndarray:
        """Clocks of some of its ops: what is inside, and for each stream it has reached inside, what that stream had taken in by then."""
        inside = self.region.clock[ops]
        clock = np.where(inside > 0, inside + self.base, 0)
        for s, (position, known) in enumerate(self._gates):
            np.maximum(clock, known[np.searchsorted(position, inside[:, s], "right")], out=clock)
        return clock

    @cached_property
    def exit(self) -> np.ndarray:
        """[streams, streams]: clock of the last op so far on each stream; a host op holds up all that is issued after it."""
        last = +self.before.exit if self.before else np.zeros((N, N), np.int64)
        used = np.flatnonzero(self.region.length)
        last[used] = self.clock(np.array([self.region.on_stream[s][-1] for s in used], np.int64))
        return np.maximum(last, last[HOST])

    def late(self) -> np.ndarray:
        """[ops, streams] bool: what ops must come after but do not."""
        return self.need > self.clock(self.ops)

    def source(self, stream: int, position: int) -> tuple["Instance", int]:
        """The instance and op at a position of the chain."""
        found = self
        while found.base[stream] >= position:
            found = found.before
        return found, found.region.on_stream[stream][position - found.base[stream]]


def chain(schedule: Schedule, regions: dict[str, Alone], cells: Cells):
    """The instances of `walk`, in order, each with what it must come after."""
    instances = walk(schedule)
    firsts = {name: region.first for name, region in regions.items()}  # numbers every cell
    copies = 1 + max((int(cells.shifts(layer, step).max()) for _, layer, step in instances), default=0)
    over = np.zeros((2, copies * cells.count, N), np.int64)  # last writes, last reads
    before = None
    for what in instances:
        region, copy = regions[what[0]], cells.shifts(*what[1:]) * cells.count
        first = firsts[what[0]]
        at = first.cell + copy[first.reach]
        rows = np.maximum(over[0][at], over[1][at] * first.write[:, None])
        heads = _heads(first.op)
        need = np.maximum.reduceat(rows, heads) if len(at) else rows
        before = Instance(what, region, before, (first.op[heads], need))
        yield before
        for table, (cell, reach, stream, position) in zip(over, region.last):
            at = cell + copy[reach]
            table[at, stream] = position + before.base[stream]
