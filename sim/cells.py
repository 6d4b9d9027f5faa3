"""Cells: the pieces of memory that ops touch, numbered.

A cell is what lies between two neighbouring buffer borders of an arena; before planning, a whole buffer. Arguments are cells of
their own. The hidden state a block writes (y, or dx going back) is its neighbour's x (or dy), so one border in the chain of blocks
has one number on both sides. In HBM an argument is fresh each step. On the host each border's hidden state has one place for all
steps, and all their gradients have one: a chunk's dx is put where its dy came from.
"""
from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sim.schedule import SPACES, Op, Schedule

SHARED, SAVED, NEAR, FAR, NEXT = REACHES = range(5)
"""Which instances of a region mean the same bytes by a cell: all; those of one layer; those at the near border of a layer in one
step (its x and dx, and what is its own); those at its far border (its y and dy), which is the next layer's near one; those of the
next layer, by its own SAVED."""


@dataclass
class Accesses:
    """What the ops of one region touch: rows in op order."""

    op: np.ndarray
    write: np.ndarray
    cell: np.ndarray
    reach: np.ndarray

    @property
    def place(self) -> np.ndarray:
        """One number for a cell and its reach: equal within an instance where the bytes are."""
        return self.cell * len(REACHES) + self.reach


@dataclass
class Operands:
    """What the ops of one region name, wherever that lies: names, and rows in op order."""

    names: list[str]
    operand: np.ndarray
    """Which name."""
    op: np.ndarray
    write: np.ndarray


def operands(ops: list[Op]) -> Operands:
    number: dict[str, int] = {}
    named = [number.setdefault(name, len(number)) for op in ops for names in (op.reads, op.writes) for name in names]
    reads, writes = (np.array([len(names) for names in column], np.int64) for column in ([op.reads for op in ops], [op.writes for op in ops]))
    write = np.repeat(np.tile([False, True], len(ops)), np.stack([reads, writes], 1).ravel())
    return Operands(list(number), np.array(named, np.int64), np.repeat(np.arange(len(ops)), reads + writes), write)


class Cells:
    """Numbers for the memory of one schedule."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self._ids: dict = {}
        self._borders = {}
        for space in SPACES:
            for saved in (True, False):
                owners = [schedule.saved] if saved else [r.buffers for r in schedule.regions.values()]
                found = [b for bs in owners for b in bs.values() if b.space == space and b.offset is not None]
                self._borders[space, saved] = sorted({e for b in found for e in (b.offset, b.offset + b.size_bytes)})
        self._ranks = {key: {e: k for k, e in enumerate(borders)} for key, borders in self._borders.items()}
        self._written = {b for r in schedule.regions.values() for op in r.ops for b in op.writes}

    @property
    def count(self) -> int:
        return len(self._ids)

    def of(self, region: str, name: str) -> list[tuple[int, int]]:
        """(cell, reach) of a buffer as an op of that region means it."""
        b = self.schedule.buffer(region, name)
        if b.life == "argument":
            key, reach = border(region, name)
            return [(self._id(("argument", key)), reach)]
        saved = b.life == "saved"
        if b.offset is None:
            return [(self._id((name, "" if saved else region)), int(saved))]
        rank = self._ranks[b.space, saved]
        return [(self._id((b.space, saved, k)), int(saved)) for k in range(rank[b.offset], rank[b.offset + b.size_bytes])]

    def shifts(self, layer: int, step: int) -> np.ndarray:
        """By reach, which copy of a cell an instance means."""
        return np.array([0, 1 + layer, 8 + 8 * step + layer, 9 + 8 * step + layer, 2 + layer])

    def at(self, instance: tuple[str, int, int], name: str) -> set[tuple[int, int]]:
        """(cell, copy) of a buffer in one instance of a region."""
        region, layer, step = instance
        shifts = self.shifts(layer, step)
        return {(cell, int(shifts[reach])) for cell, reach in self.of(region, name)}

    def accesses(self, region: str, named: Operands) -> Accesses:
        """What each op touches. Memory that nothing writes is left out: weights, labels."""
        lists = [self.of(region, name) if name in self._written or name.startswith(_CHAIN) else [] for name in named.names]
        flat = np.array([pair for pairs in lists for pair in pairs], np.int64).reshape(-1, 2)
        sizes = np.array([len(pairs) for pairs in lists], np.int64)
        n = sizes[named.operand]
        within = np.arange(n.sum()) - np.repeat(np.cumsum(n) - n, n)
        rows = flat[np.repeat((np.cumsum(sizes) - sizes)[named.operand], n) + within]
        return Accesses(np.repeat(named.op, n), np.repeat(named.write, n), rows[:, 0], rows[:, 1])

    def _id(self, key) -> int:
        return self._ids.setdefault(key, len(self._ids))


_CHAIN = ("x[", "dy[", "y[", "dx[")


def border(region: str, name: str) -> tuple[str, int]:
    """(key, reach) of an argument."""
    tensor, _, rest = name.partition("[")
    host, far = name.endswith("@host"), tensor in ("y", "dy") or region == "loss"
    if tensor in ("x", "y"):
        return "hidden[" + rest, (NEXT if far else SAVED) if host else FAR if far else NEAR
    if tensor in ("dx", "dy"):
        return "gradient[" + rest, SHARED if host else FAR if far else NEAR
    return name if region != "loss" else "loss." + name, NEAR
