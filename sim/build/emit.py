"""Emit: a small pen that writes ops and their buffers into a region."""
from __future__ import annotations

from collections.abc import Iterable

from sim.layout import Layout
from sim.ops import KINDS, names
from sim.schedule import HANDED, Buffer, Op, Region

AHEAD = 2
"""Slots of what is produced one chunk ahead: the row at work and the next one."""


class Emit:
    """Writes one region. Slots are named role.k, chunks at rest role[i]@host or role[i]."""

    def __init__(self, name: str, layout: Layout, chunks: list[tuple[int, int]], sync: bool = False, saved: Iterable[str] = ()) -> None:
        self.region = Region(name, [], {})
        self.layout, self.chunks, self._sync, self._saved = layout, chunks, sync, set(saved)
        m = layout.model
        self._shapes = m.weight_shapes() | m.head_shapes() | {"loss": (1,)}
        self._slots: dict[tuple[str, int], list[str]] = {}
        self._held: dict[str, tuple[str, int]] = {}

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
        """The slot that was not taken for longest, of `depth` of that name, for chunk i; each is as large as the longest chunk it ever holds."""
        name = name or role
        slots = self._slots.setdefault((name, depth), [])
        if len(slots) < depth:
            slots.append(f"{name}.{len(slots)}" if depth > 1 else name)
        else:
            slots.append(slots.pop(0))
        slot, shape = slots[-1], self.layout.shape(role, self.n(i))
        self._held[slot] = role, i
        self._declare(slot, "hbm", "slot", role, shape)
        self.region.buffers[slot].shape = max(self.region.buffers[slot].shape, shape)
        return slot

    def resident(self, role: str, i: int) -> str | None:
        """The slot that still has chunk i of a role, taken anew; None if none has."""
        for slots in self._slots.values():
            for slot in slots:
                if self._held[slot] == (role, i):
                    slots.append(slots.pop(slots.index(slot)))
                    return slot
        return None

    def rest(self, role: str, i: int, host: bool) -> str:
        """Where chunk i of a role rests between its uses: what forward saves, what is handed over, or a buffer of this region."""
        name, space = (f"{role}[{i}]@host", "host") if host else (f"{role}[{i}]", "hbm")
        life = "argument" if role in HANDED else "value"
        return name if name in self._saved else self._declare(name, space, life, role, self.layout.shape(role, self.n(i)))

    def op(self, stream: str, name: str, reads: tuple[str, ...], writes: tuple[str, ...], **args: int) -> None:
        """Appends region.name on these activations; its kind's weights and the sums it adds to follow by themselves."""
        op = Op(f"{self.region.name}.{name}", stream, reads, writes, {k: v for k, v in args.items() if v is not False})
        kind, model = KINDS[op.kind], self.layout.model.kind
        weights, sums = names(kind.weights, model), names(kind.sums, model)
        old = tuple(n for n in sums if n in self.region.buffers)
        for n in weights:
            self._declare(n, "hbm", "argument", "weight", self._shapes[n])
        for n in sums:
            self._declare(n, "hbm", "argument", "grad", self._shapes[n if n in self._shapes else n[1:]])
        op.reads, op.writes = reads + weights + old, writes + sums
        self.region.ops.append(op)

    def close(self) -> Region:
        """The finished region, with a host block at its end where the strategy asks for one. Copies out to the host that nothing reads
        back, here or after this region, are dropped."""
        region, kept = self.region, []
        wanted = self._saved | {b.name for b in region.buffers.values() if b.life == "argument"}
        for op in reversed(region.ops):
            if op.kind == "offload":
                if op.writes[0] not in wanted:
                    continue
                wanted.remove(op.writes[0])
            if op.kind == "reload":
                wanted.add(op.reads[0])
            kept.append(op)
        region.ops[:] = kept[::-1]
        used = {name for op in kept for name in op.reads + op.writes}
        region.buffers = {name: b for name, b in region.buffers.items() if name in used}
        if self._sync:
            waits = tuple({op.stream: op.id for op in region.ops}.values())
            region.ops.append(Op(f"{region.name}.sync", "host", (), (), {}, waits))
        return region

    def _declare(self, name: str, space: str, life: str, role: str, shape: tuple[int, ...]) -> str:
        if name not in self.region.buffers:
            dtype = "int64" if role == "label" else self.layout.dtype_of(role)
            self.region.buffers[name] = Buffer(name, space, life, role, dtype, shape)
        return name
