"""Arenas: one block of memory a space, laid out exactly as the plan says, between guards, and filled with a pattern."""
from __future__ import annotations

import torch
from torch.utils.dlpack import from_dlpack, to_dlpack

from engine.backend.base import Backend
from sim.schedule import SPACES, Buffer, Schedule

FILL = 0x7FC0DEAD
"""Fill pattern of every fp32-sized word: a NaN, so that what was never written poisons what reads it."""
GUARD_BYTES = 4096
PIECE_WORDS = 1 << 26
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int64": torch.int64}


class Arenas:
    """The memory of a schedule on one rank."""

    def __init__(self, schedule: Schedule, backend: Backend) -> None:
        self.schedule = schedule
        self._whole = {s: backend.arena(s, schedule.arena_bytes(s) + 2 * GUARD_BYTES) for s in SPACES}
        self._inner = {s: t[GUARD_BYTES:GUARD_BYTES + schedule.arena_bytes(s)] for s, t in self._whole.items()}
        self._views: dict[tuple, torch.Tensor] = {}
        self.fill()

    def fill(self) -> None:
        """Writes the pattern everywhere, guards too."""
        for t in self._whole.values():
            t.view(torch.int32).fill_(FILL)

    def view(self, buffer: Buffer, layer: int, shape: tuple[int, ...]) -> torch.Tensor:
        """The start of a planned buffer, as a tensor of this shape; each time the same one."""
        place = buffer.space, self.schedule.address(buffer, layer), buffer.dtype, shape
        if place not in self._views:
            memory = self._inner[buffer.space][place[1]:]
            self._views[place] = alone(memory[:buffer.size_bytes].view(DTYPES[buffer.dtype])[:_count(shape)].view(shape))
        return self._views[place]

    def touched_bytes(self, space: str) -> int:
        """Bytes whose word is no longer the fill pattern. Looked at where HBM is, piece by piece: a full GPU and a large host arena are no matter."""
        device = self._inner["hbm"].device
        return 4 * sum(int((words.to(device) != FILL).sum()) for words in self._inner[space].view(torch.int32).split(PIECE_WORDS))

    def guards_intact(self) -> bool:
        """Nothing was written outside the plan."""
        edges = (edge for t in self._whole.values() for edge in (t[:GUARD_BYTES], t[-GUARD_BYTES:]))
        return all(bool((edge.view(torch.int32) == FILL).all()) for edge in edges)


def alone(part: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor with a storage of its own. torch.compile asks of two tensors in one storage whether they overlap, each
    time and for each place; that none do is what the lint proves."""
    return from_dlpack(to_dlpack(part.detach()))


def planned_bytes(schedule: Schedule, space: str) -> int:
    """Bytes of an arena that some buffer covers: the arena less alignment gaps."""

    def covered(buffers) -> int:
        total = top = 0
        for b in sorted((b for b in buffers if b.space == space and b.life != "argument"), key=lambda b: b.offset):
            start, end = max(top, b.offset), b.offset + b.size_bytes
            total, top = total + max(0, end - start), max(top, end)
        return total

    return schedule.layers * covered(schedule.saved.values()) + covered(b for r in schedule.regions.values() for b in r.buffers.values())


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for dim in shape:
        count *= dim
    return count
