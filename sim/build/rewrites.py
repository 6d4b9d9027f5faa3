"""Rewrites: what a strategy changes in a schedule whose order of work is already written down: draft -> draft, before any wait or offset.

    lookahead=0       qkv[1] a2a[1] attn[0,0] ...          -> attn[0,0] ... qkv[1] a2a[1] attn[1,0]
    merge=separate    attn q kv acc lse -> acc lse         -> attn q kv -> part part_lse; merge acc lse part part_lse -> acc lse
    a2a=apart         a2a.qkv q' kv' -> q kv               -> a2a.q q' -> q; a2a.kv kv' -> kv parts=2
    input=hbm         offload.x ... reload.x -> x.0        -> (backward reads x[i] where it was handed over)
    reload_first      fwd ends                             -> reload.q_first[0] q[0]@host -> q[0], which backward reads
    host_sync=chunk   a2a.q[1] a2a.kv[1]                   -> ... sync.kv[1]
    host_sync=pair    attn[1,0] reload[1,1] attn[1,1]      -> attn[1,0] reload[1,1] sync.attn[1,0] attn[1,1]
    alloc=chunk       offload.q[1]                         -> pin.q[1] offload.q[1]; sums are taken at once and set to zero
    alloc=cached      offload.q[1]                         -> offload.q[1]; sums are set to zero
    copy_streams=1    attn_bwd[1,0] offload.dq reload.q    -> attn_bwd[1,0] reload.q offload.dq, and a copy waits for the one before it
"""
from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

from sim.ops import PARTS
from sim.schedule import Buffer, Op, Region, Schedule, chunk_of
from sim.strategy import Strategy

PAIRS = ("attn", "merge", "attn_bwd")
OPERANDS = ("q", "kv", "do", "dq", "dkv", "qkv", "dqkv")
"""What goes to the host on the stream that attention's operands come back on; the rest goes beside it."""
SYNCED = ("chunk", "pair")
FIRST = ("q", "kv", "o", "lse")
"""What of chunk 0 forward fetches back at its end."""


def rewrite(s: Schedule, strategy: Strategy) -> None:
    """Applies a strategy's rewrites in place."""
    regions = list(s.regions.values())
    if not strategy.lookahead:
        _late(s.regions["fwd"])
    if strategy.merge == "separate":
        for region in regions:
            region.ops[:] = [new for op in region.ops for new in _merged_apart(op, s, region)]
    if strategy.a2a == "apart":
        for region in regions:
            region.ops[:] = [new for op in region.ops for new in _sent_apart(op, s, region)]
    if strategy.input == "hbm":
        _keep_input(s)
    if strategy.reload_first:
        _fetch_first(s)
    if strategy.host_sync in SYNCED:
        for region in regions:
            _block_chunks(region, s.P)
    if strategy.host_sync == "pair" or strategy.copy_streams == 1:
        for region in regions:
            _fetch_early(region)
    if strategy.host_sync == "pair":
        for region in regions:
            _block_pairs(region)
    if strategy.alloc != "plan":
        for region in regions:
            _pin(region, s, strategy.alloc == "cached", ("dq" if strategy.order == "kv-outer" else "dkv") if strategy.accum == "host" and region.name == "bwd" else None)
    if strategy.copy_streams == 1:
        for region in regions:
            _chain_copies(region)
    if strategy.merge == "separate" or strategy.reload_first:
        for region in regions:
            _fit_slots(region, s)
    for op in _all(regions, lambda op: op.kind == "sync" and not at(op)):  # the block at a region's end
        op.waits = tuple({other.stream: other.id for other in s.regions[op.id.split(".")[0]].ops if other.stream != "host"}.values())


def role(op: Op) -> str:
    """fwd.offload.kv[3] -> kv."""
    return op.id.split("[", 1)[0].split(".")[-1]


def at(op: Op) -> str:
    """fwd.attn[3,0] -> [3,0]."""
    return op.id[op.id.index("["):] if "[" in op.id else ""


def _all(regions: list[Region], good: Callable[[Op], bool]) -> list[Op]:
    return [op for region in regions for op in region.ops if good(op)]


def _late(fwd: Region) -> None:
    """What project_in writes comes when its row does, not a chunk ahead."""
    ahead: dict[int, list[Op]] = {}
    rest = []
    for op in fwd.ops:
        mine = op.kind == "qkv" or op.kind in ("a2a", "offload", "reload") and role(op) in ("q", "kv", "qkv", "x") and "," not in at(op)
        if mine:
            ahead.setdefault(chunk_of(op.id)[1], []).append(op)
        else:
            rest.append(op)
    fwd.ops[:] = []
    for op in rest:
        row = re.match(r"\[(\d+),", at(op))
        fwd.ops += (ahead.pop(int(row[1]), []) if row else []) + [op]


def _merged_apart(op: Op, s: Schedule, region: Region) -> list[Op]:
    if op.kind != "attn" or len(op.reads) < 4:
        return [op]
    for name, of in (("part", "acc"), ("part_lse", "lse")):
        region.buffers.setdefault(name, Buffer(name, "hbm", "slot", of, s.layout.dtype_of(of), s.layout.shape(of, s.chunk)))
    q, kv, *row = op.reads
    merge = Op(f"{region.name}.merge{at(op)}", "compute", (*row, "part", "part_lse"), op.writes, {"q": op.args["q"]})
    op.reads, op.writes = (q, kv), ("part", "part_lse")
    return [op, merge]


def _sent_apart(op: Op, s: Schedule, region: Region) -> list[Op]:
    """One all-to-all a tensor, keys and values of one in two messages."""
    if op.kind != "a2a":
        return [op]
    found = []
    for read, write in zip(op.reads, op.writes):
        its = s.buffer(region.name, read).role.removesuffix("'")
        found.append(Op(f"{region.name}.a2a.{its}{at(op)}", "comm", (read,), (write,), op.args | ({PARTS: 2} if its in ("kv", "dkv") else {})))
    return found


def _keep_input(s: Schedule) -> None:
    """Saved inputs are dropped; whoever reloaded them reads the argument."""
    near = {name: name.removesuffix("@host") for name, b in s.saved.items() if b.role == "x" and b.space == "host"}
    s.regions["fwd"].ops[:] = [op for op in s.regions["fwd"].ops if not (op.kind == "offload" and op.writes[0] in near)]
    _read_directly(s.regions["bwd"], near)
    for far, name in near.items():
        b = s.saved.pop(far)
        s.regions["bwd"].buffers[name] = Buffer(name, "hbm", "argument", "x", b.dtype, b.shape)


def _fetch_first(s: Schedule) -> None:
    """Chunk 0 is fetched into saved buffers when all it takes has been copied out and the last pair is issued."""
    fwd, near = s.regions["fwd"], {name: name.removesuffix("@host") for b in list(s.saved.values()) if b.role in FIRST and (name := b.name).endswith("[0]@host")}
    after = max(k for k, op in enumerate(fwd.ops) if op.kind in PAIRS or near.keys() & {*op.writes})
    for far, name in near.items():
        b = s.saved[far]
        s.saved[name] = Buffer(name, "hbm", "saved", b.role, b.dtype, b.shape)
        after += 1
        fwd.ops.insert(after, Op(f"fwd.reload.{b.role}_first[0]", "h2d", (far,), (name,), {"n": s.chunks[0][1]}))
    _read_directly(s.regions["bwd"], near)


def _read_directly(region: Region, near: dict[str, str]) -> None:
    """Reloads of what is near are dropped; until their slot is taken anew, who reads it reads what is near."""
    held: dict[str, str] = {}
    kept = []
    for op in region.ops:
        if op.kind == "reload" and op.reads[0] in near:
            held[op.writes[0]] = near[op.reads[0]]
            continue
        op.reads = tuple(held.get(name, name) for name in op.reads)
        for name in op.writes:
            held.pop(name, None)
        kept.append(op)
    region.ops[:] = kept
    used = {name for op in kept for name in op.reads + op.writes}
    region.buffers = {name: b for name, b in region.buffers.items() if name in used}


def _fit_slots(region: Region, s: Schedule) -> None:
    """A slot is as long as the longest chunk that still comes into it: without chunk 0, which none merges, that may be the last one alone."""
    most: dict[str, int] = {}
    for op in region.ops:
        for name in op.reads + op.writes:
            b = region.buffers.get(name)
            if b is not None and b.life == "slot":
                n = op.args.get("n") or op.args["kv" if b.role in ("kv", "dkv") else "q"]
                most[name] = max(most.get(name, 0), n)
    for name, n in most.items():
        b = region.buffers[name]
        region.buffers[name] = replace(b, shape=s.layout.shape(b.role, n))


def _block(region: Region, name: str, before: list[Op]) -> Op:
    """A block until every stream has done what was issued to it; copies beside those of the operands may go on."""
    last = {op.stream: op.id for op in before if op.stream != "host" and not (op.kind == "offload" and role(op) not in OPERANDS)}
    return Op(f"{region.name}.sync.{name}", "host", (), (), {}, tuple(last.values()))


def _block_chunks(region: Region, P: int) -> None:
    """After the all-to-alls of a chunk, or at P = 1 where they would be."""
    def ends(op: Op) -> bool:
        return op.kind == "a2a" and role(op) in OPERANDS if P > 1 else op.kind == "qkv"

    ops, region.ops[:] = region.ops[:], []
    for op, after in zip(ops, [*ops[1:], None]):
        region.ops.append(op)
        if ends(op) and not (after is not None and ends(after)):
            region.ops.append(_block(region, f"{role(op)}{at(op)}", region.ops))


def _end(op: Op, after: Op | None) -> bool:
    """Whether a pair ends with this op."""
    return op.kind in PAIRS and not (after is not None and after.kind == "merge")


def _fetch_early(region: Region) -> None:
    """The reloads for the next pair are issued right after a pair, before the copies out of what it made."""
    rest, region.ops[:] = region.ops[:], []
    while rest:
        op = rest.pop(0)
        region.ops.append(op)
        if _end(op, rest[0] if rest else None):
            coming = next((k for k, other in enumerate(rest) if other.kind in PAIRS), len(rest))
            early, late = _hoisted(rest[:coming])
            rest[:coming] = early + late


def _block_pairs(region: Region) -> None:
    """After each pair, and the reloads for the next one."""
    ops, region.ops[:] = region.ops[:], []
    due: Op | None = None
    for op, after in zip(ops, [*ops[1:], None]):
        if due is not None and not _early(op):
            region.ops.append(_block(region, f"{due.kind}{at(due)}", region.ops))
            due = None
        region.ops.append(op)
        due = op if _end(op, after) else due
    if due is not None:
        region.ops.append(_block(region, f"{due.kind}{at(due)}", region.ops))


def _early(op: Op) -> bool:
    """A reload for one pair, or of chunk 0 at forward's end."""
    return op.kind == "reload" and ("," in at(op) or role(op).endswith("_first"))


def _hoisted(ops: list[Op]) -> tuple[list[Op], list[Op]]:
    """(the early reloads that nothing before them touches; the rest)."""
    early, late = [], []
    touched: set[str] = set()
    for op in ops:
        free = _early(op) and not touched & {*op.reads, *op.writes}
        (early if free else late).append(op)
        if not free:
            touched |= {*op.reads, *op.writes}
    return early, late


def _pin(region: Region, s: Schedule, cached: bool, sums: str | None) -> None:
    """Each host buffer that a region copies to is taken just before; those of sums all before the first pair, and set to zero but for the
    first, also where a slot spares the copy. The stock allocator takes a power of two. What is cached is only set to zero."""
    taken: set[str] = set()

    def pin(name: str, size: int, zero: bool = False) -> Op:
        taken.add(name)
        return Op(f"{region.name}.pin.{name.removesuffix('@host')}", "host", (), (), {"bytes": 1 << (size - 1).bit_length()} | {flag: True for flag, on in (("zero", zero), ("cached", cached)) if on})

    early = [pin(f"{sums}[{i}]@host", s.layout.size_bytes(sums, n), i > 0) for i, (_, n) in enumerate(s.chunks) if sums and (i > 0 or not cached)]
    made: list[Op] = []
    for op in region.ops:
        if op.kind in PAIRS:
            made += early
            early = []
        if op.kind == "offload" and op.writes[0] not in taken and not cached:
            made.append(pin(op.writes[0], s.buffer(region.name, op.writes[0]).size_bytes))
        made.append(op)
    region.ops[:] = made


def _chain_copies(region: Region) -> None:
    before: Op | None = None
    for op in region.ops:
        if op.kind == "reload" and not role(op).startswith("x") or op.kind == "offload" and role(op) in OPERANDS:
            if before is not None and before.stream != op.stream:
                op.waits += (before.id,)
            before = op
