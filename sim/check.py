"""Check: a schedule is well formed. Names resolve, ids are unique, waits look back, operands suit their kinds, the plan is sound.

What it means and whether it is safe is the lint's business; this is what has to hold before either question makes sense.
"""
from __future__ import annotations

from sim import ops
from sim.errors import UserError
from sim.layout import ALIGN, align, pad
from sim.schedule import HANDED, PREV, SPACES, Buffer, Op, Region, Schedule, chunk_of
from sim.strategy import Strategy

_HOST_SIDE = {"offload": (False, True), "reload": (True, False)}
"""Which of (reads, writes) are on the host; every other kind works in HBM."""


def check(schedule: Schedule, where: str = "") -> None:
    """Raises UserError, its line led by `where`."""
    if schedule.seq % schedule.P:
        raise UserError(f"{where}S={schedule.seq} is not divisible by P={schedule.P}; pad it to S={pad(schedule.seq, schedule.P)}")
    try:
        Strategy(sp=schedule.P, chunk=schedule.chunk).check(schedule.model, schedule.seq)
    except UserError as error:
        raise UserError(f"{where}{error}") from None
    for space in SPACES:
        stride, shared = schedule.stride.get(space, -1), schedule.shared.get(space, -1)
        if min(stride, shared) < 0 or stride % ALIGN or shared % ALIGN:
            raise UserError(f"{where}the arena of {space} has stride={stride} shared={shared}; each space has one arena line, both numbers multiples of {ALIGN}, 0 or more")
    for name in schedule.regions:
        if set(schedule.require.get(name, ())) != set(owed := ops.owes(name, schedule.model)):
            raise UserError(f"{where}region {name} must owe all that the step takes from it; write: require  {name} {' '.join(owed)}")
    everywhere = {region: {op.id for op in r.ops} for region, r in schedule.regions.items()}
    for region in schedule.regions.values():
        seen: set[str] = set()
        for op in region.ops:
            if not op.id.startswith(region.name + "."):
                raise UserError(f"{where}{op.id} stands in region {region.name}; its id must start with {region.name}.")
            if op.id in seen:
                raise UserError(f"{where}{op.id} appears twice; ids are unique in a region, renumber one of them")
            if op.waits:
                _waits(op, region, seen, everywhere, where)
            ops.check(op, schedule.model, where)
            _operands(op, region, schedule, where)
            seen.add(op.id)
    hidden = schedule.hidden
    for name, buffers in [("saved", schedule.saved), *((r.name, r.buffers) for r in schedule.regions.values())]:
        for b in buffers.values():
            _placed(b, name, schedule, where)
            if b.life == "argument":
                _handed(b, name, hidden, where)


def _waits(op: Op, region: Region, seen: set[str], everywhere: dict[str, set[str]], where: str) -> None:
    for wait in op.waits:
        if wait.startswith(PREV):
            _, other, target = wait.split(":", 2) if wait.count(":") >= 2 else ("", "", "")
            if target not in everywhere.get(other, ()):
                raise UserError(f"{where}{op.id} waits for {wait!r}, which does not exist; write prev:REGION:OP with an op of that region")
        elif wait not in seen:
            later = "a later op" if wait in everywhere[region.name] else "an op that does not exist"
            raise UserError(f"{where}{op.id} waits for {wait}, {later}; a wait may only name an op above it (CUDA takes a wait on an unrecorded event as none)")


def _operands(op: Op, region: Region, schedule: Schedule, where: str) -> None:
    for names, host in zip((op.reads, op.writes), _HOST_SIDE.get(op.kind, (False, False))):
        for name in names:
            b = region.buffers.get(name) or schedule.saved.get(name)
            if b is None:
                raise UserError(f"{where}{op.id} names a buffer {name!r} that no buffer line declares; declare it or name another")
            if (b.space == "host") is not host:
                verb = "reads" if names is op.reads else "writes"
                raise UserError(f"{where}{op.id} {verb} {name}, which lies in {b.space} memory; a {op.kind} {verb} {SPACES[host]} memory")


def _handed(b: Buffer, owner: str, hidden: str, where: str) -> None:
    space = hidden if chunk_of(b.name)[0] in HANDED else "hbm"
    if (b.space, b.name.endswith("@host")) != (space, space == "host"):
        raise UserError(f"{where}{b.name} of {owner} is an argument in {b.space}; hidden states, gradients and labels of all regions lie in one space, on the host under names that end in @host, all others in hbm")


def _placed(b: Buffer, owner: str, schedule: Schedule, where: str) -> None:
    if (b.life == "saved") != (owner == "saved"):
        raise UserError(f"{where}{b.name} of {owner} has life {b.life}; life saved belongs to the buffers of owner *, and only to those")
    if b.life == "argument" and b.offset is not None:
        raise UserError(f"{where}{b.name} of {owner} is an argument but has offset {b.offset}; arguments lie outside the arenas, write -")
    if owner != "saved" and (b.life == "argument") is not ops.outside(b.name, schedule.model):
        raise UserError(f"{where}{b.name} of {owner} has life {b.life}; inputs, outputs, weights and gradients are arguments, and nothing else is")
    if b.offset is None:
        return
    part = (schedule.stride if b.life == "saved" else schedule.shared)[b.space]
    if b.offset % ALIGN or part % ALIGN:
        raise UserError(f"{where}{b.name} of {owner} is at {b.space} byte {b.offset} of a part of {part}; both must be multiples of {ALIGN}, such as {align(b.offset)} and {align(part)}")
    if b.offset < 0 or b.offset + b.size_bytes > part:
        raise UserError(f"{where}{b.name} of {owner} ends at {b.space} byte {b.offset + b.size_bytes}, past its part of {part} bytes; move it or enlarge the arena line")
