"""Emit: a small pen that writes ops and their buffers into a region."""
from __future__ import annotations

from sim.layout import Layout
from sim.schedule import Buffer, Op, Region


AHEAD = 2
"""Slots of what is produced one chunk ahead: the row at work and the next one."""


class Emit:
    """Writes one region. Slots are named role.k; chunk arguments role[i]; saved copies role[i]@host or role[i]."""

    def __init__(self, name: str, layout: Layout, chunks: list[tuple[int, int]], sync: bool) -> None:
        self.region = Region(name, [], {})
        self.layout, self.chunks, self._sync = layout, chunks, sync
        self._turn: dict[str, int] = {}
        self._stream_last: dict[str, str] = {}

    @property
    def u(self) -> int:
        return len(self.chunks)

    def n(self, i: int) -> int:
        """Global tokens of chunk i."""
        return self.chunks[i][1]

    def at(self, i: int) -> int:
        """First token of chunk i."""
        return self.chunks[i][0]

    def slot(self, role: str, i: int, depth: int, name: str | None = None) -> str:
        """The next slot of a rotation of `depth`, for chunk i; each is as large as the longest chunk it ever holds."""
        name = name or role
        turn = self._turn.get(name, 0)
        self._turn[name] = turn + 1
        slot, shape = f"{name}.{turn % depth}" if depth > 1 else name, self.layout.shape(role, self.n(i))
        self._declare(slot, "hbm", "slot", role, shape)
        self.region.buffers[slot].shape = max(self.region.buffers[slot].shape, shape)
        return slot

    def value(self, role: str, i: int) -> str:
        """A buffer of chunk i alone, in HBM."""
        return self._declare(f"{role}[{i}]", "hbm", "value", role, self.layout.shape(role, self.n(i)))

    def argument(self, role: str, i: int) -> str:
        """Chunk i of an argument."""
        return self._declare(f"{role}[{i}]", "hbm", "argument", role, self.layout.shape(role, self.n(i)))

    def weights(self, names: str, shapes: dict[str, tuple[int, ...]]) -> tuple[str, ...]:
        """Weight arguments by name."""
        return tuple(self._declare(n, "hbm", "argument", "weight", shapes[n]) for n in names.split())

    def grads(self, names: str, shapes: dict[str, tuple[int, ...]]) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """(what to read, what to write) of fp32 gradient accumulators: read too once something was written to each."""
        names = names.split()
        old = tuple(n for n in names if n in self.region.buffers)
        for n in names:
            self._declare(n, "hbm", "argument", "grad", shapes[n.removeprefix("d")])
        return old, tuple(names)

    def op(self, stream: str, name: str, reads: tuple[str, ...], writes: tuple[str, ...], **args: int) -> None:
        """Appends region.name reading and writing these buffers."""
        args = {k: v for k, v in args.items() if v is not False}
        self.region.ops.append(Op(f"{self.region.name}.{name}", stream, reads, writes, args))
        self._stream_last[stream] = self.region.ops[-1].id

    def close(self) -> Region:
        """The finished region, with a host block at its end where the strategy asks for one."""
        if self._sync:
            waits = tuple(self._stream_last.values())
            self.region.ops.append(Op(f"{self.region.name}.sync", "host", (), (), {}, waits))
        return self.region

    def _declare(self, name: str, space: str, life: str, role: str, shape: tuple[int, ...]) -> str:
        if name not in self.region.buffers:
            dtype = "int64" if role == "label" else self.layout.dtype_of(role)
            self.region.buffers[name] = Buffer(name, space, life, role, dtype, shape)
        return name
