"""Data: the schedule run on meanings instead of numbers, one layer, in list order.

Each op says what its outputs stand for given what its inputs stand for (sim/ops); a write spoils whatever overlaps it in the
plan. At the end every required output must cover exactly what it should, once. With the order proof, list order stands for
every order the streams may take.
"""
from __future__ import annotations

from sim import ops
from sim.cells import border
from sim.schedule import Buffer, Op, Region, Schedule


class Wrong(Exception):
    """The first op (or none) where the data go wrong, and how; `line` is what to tell the user."""

    def __init__(self, region: str, op: Op | None, line: str) -> None:
        super().__init__(line)
        self.region, self.op, self.line = region, op, line


def prove(schedule: Schedule) -> None:
    """Raises Wrong unless every region makes what it owes."""
    kept: dict[str, tuple] = {}
    for name in ("fwd", "loss", "bwd"):
        if name in schedule.regions:
            kept = _run(schedule, schedule.regions[name], kept)


def _run(schedule: Schedule, region: Region, kept: dict) -> dict:
    """Runs one region on the saved values `kept`; returns those it leaves."""
    given = {b.name: ops.initial(b.name, schedule) for b in region.buffers.values() if b.life == "argument"}
    given = {name: value for name, value in given.items() if value}
    held, spoiled = kept | given, {}
    clash = overlaps(schedule, region)
    fits: set[tuple] = set()
    for name, value in given.items():
        _fit(schedule, region, None, name, value, fits)
    for op in region.ops:
        try:
            made = ops.KINDS[op.kind].data(op, [held.get(name) for name in op.reads], schedule)
        except ops.DataError as error:
            raise Wrong(region.name, op, f"{error}; {_mend(op, held, spoiled)}") from None
        _in_place(schedule, region, op, clash)
        for name, value in zip(op.writes, made):
            for other in clash.get(name, ()):
                if held.pop(other, None):
                    spoiled[other] = op.id
            held[name] = value
            _fit(schedule, region, op, name, value, fits)
    for name, value in given.items():
        if held.get(name) != value and name not in clash:
            raise Wrong(region.name, None, f"{region.name} overwrites its argument {name}, which is not its own; write elsewhere")
    for tensor in schedule.require.get(region.name, ()):
        for name, value in ops.owed(tensor, schedule).items():
            if held.get(name) != value:
                raise Wrong(region.name, None, f"{region.name} owes {name} = {ops.describe(value)}, but leaves {ops.describe(held.get(name))}")
    return {name: held[name] for name in schedule.saved if name in held}


def _mend(op: Op, held: dict, spoiled: dict[str, str]) -> str:
    """What would give an op what it needs."""
    for name in op.reads:
        if name not in held and name in spoiled:
            return f"{spoiled[name]} overwrote {name}: read {name} above that op, or give one of them space of its own"
        if name not in held:
            return f"nothing above writes {name}: add the op that does, or read another buffer"
    return "change what it reads or says, or what was put there"


def overlaps(schedule: Schedule, region: Region) -> dict[str, list[str]]:
    """Buffers of a region that share bytes, by name: each with all the others it touches."""
    parts: dict[tuple, list[Buffer]] = {}
    places: dict[tuple, list[str]] = {}
    for b in [*region.buffers.values(), *schedule.saved.values()]:
        if b.offset is not None and b.size_bytes:
            parts.setdefault((b.space, b.life == "saved"), []).append(b)
        if b.life == "argument":
            places.setdefault(border(region.name, b.name), []).append(b.name)
    clash: dict[str, list[str]] = {name: [other for other in same if other != name] for same in places.values() if len(same) > 1 for name in same}
    for part in parts.values():
        open_: list[Buffer] = []
        for b in sorted(part, key=lambda b: b.offset):
            open_ = [a for a in open_ if a.offset + a.size_bytes > b.offset]
            for a in open_:
                clash.setdefault(a.name, []).append(b.name)
                clash.setdefault(b.name, []).append(a.name)
            open_.append(b)
    return clash


def _in_place(schedule: Schedule, region: Region, op: Op, clash: dict[str, list[str]]) -> None:
    """An op's outputs may share memory with its other operands only where its kind accumulates in place."""
    for place, name in enumerate(op.writes):
        for other in clash.get(name, ()):
            if other in op.reads or other in op.writes:
                raise Wrong(region.name, op, f"{op.id} writes {name}, which shares bytes with its operand {other}; give them space of their own")
        twice, kind, model = name in op.writes[:place], ops.KINDS[op.kind], schedule.model
        if twice or (name in op.reads and not all(kind.in_place(k, place, model) for k, n in enumerate(op.reads) if n == name)):
            raise Wrong(region.name, op, f"{op.id} uses {name} for two operands, which a {op.kind} cannot do in place; name another buffer")


def _fit(schedule: Schedule, region: Region, op: Op | None, name: str, value: tuple, fits: set[tuple]) -> None:
    """A buffer must be of the type and at least the size of what it holds. `fits` remembers what was found to."""
    key = name, ops.role(value, schedule), value[1]
    if key in fits:
        return
    fits.add(key)
    b, (dtype, shape) = schedule.buffer(region.name, name), ops.form(*key[1:], schedule)
    size = Buffer("", "", "", "", dtype, shape).size_bytes
    if b.life != "argument" and not schedule.layout.like(b.role, key[1]):
        raise Wrong(region.name, op, f"{op.id if op else region.name} puts {ops.describe(value)} into {name}, a buffer of role {b.role}; give it role {key[1]}, by which the engine takes its shape")
    if b.life == "argument" and b.shape != shape:
        raise Wrong(region.name, op, f"{name} of {region.name} is {'x'.join(map(str, b.shape))}, but what is handed over there is {'x'.join(map(str, shape))}; write that")
    if b.dtype != dtype or b.size_bytes < size:
        raise Wrong(region.name, op, f"{op.id if op else region.name} puts {ops.describe(value)}, {dtype} of {size} bytes, into {name}, {b.dtype} of {b.size_bytes} bytes; enlarge it or name another buffer")
