"""Mutations: every small way to break a schedule, or to change it without breaking it. Each is (what was done, a new schedule)."""
from __future__ import annotations

import random
from dataclasses import replace

from sim.schedule import Op, Schedule


def with_ops(s: Schedule, region: str, ops: list[Op]) -> Schedule:
    """The schedule with another list of ops in one region; the rest is shared."""
    return replace(s, regions={**s.regions, region: replace(s.regions[region], ops=ops)})


def changed(s: Schedule, region: str, k: int, **fields) -> Schedule:
    """The schedule with one op's fields replaced."""
    ops = list(s.regions[region].ops)
    ops[k] = replace(ops[k], **fields)
    return with_ops(s, region, ops)


def places(s: Schedule):
    """(region, place, op) of every op; each function below takes the ones to work on, all by default."""
    for region in s.regions.values():
        for k, op in enumerate(region.ops):
            yield region.name, k, op


def delete_waits(s: Schedule, where=None):
    """Each wait, alone."""
    for region, k, op in where or places(s):
        for w in op.waits:
            yield f"delete {op.id} wait {w}", changed(s, region, k, waits=tuple(x for x in op.waits if x != w))


def add_waits(s: Schedule, rng: random.Random, where=None):
    """A wait on some earlier op of the region, and one on some op of a region before, for each op."""
    for region, k, op in where or places(s):
        if k:
            other = s.regions[region].ops[rng.randrange(k)].id
            yield f"add {op.id} wait {other}", changed(s, region, k, waits=op.waits + (other,))
        before = rng.choice({"fwd": ["fwd", "bwd"], "loss": ["fwd"], "bwd": ["loss", "fwd", "bwd"]}[region])
        if before in s.regions:
            wait = f"prev:{before}:{rng.choice(s.regions[before].ops).id}"
            yield f"add {op.id} wait {wait}", changed(s, region, k, waits=op.waits + (wait,))


def wrong_buffers(s: Schedule, most: int, where=None):
    """Each operand replaced by up to `most` others of its role and space: a wrong chunk reloaded or copied out, a wrong slot read or written."""
    for region, k, op in where or places(s):
        pool = [*s.regions[region].buffers.values(), *s.saved.values()]
        for field in ("reads", "writes"):
            for place, name in enumerate(getattr(op, field)):
                b = s.buffer(region, name)
                alike = [c.name for c in pool if c.role == b.role and c.space == b.space and c.size_bytes == b.size_bytes]
                here = alike.index(name) if name in alike else 0
                for other in (alike[here + 1:] + alike[:here])[:most]:
                    names = list(getattr(op, field))
                    names[place] = other
                    yield f"{op.id} {field} {other} for {name}", changed(s, region, k, **{field: tuple(names)})


def moves(s: Schedule, rng: random.Random, far: int, where=None):
    """Each op before each op it waits for, down and up by one line, and to `far` random places."""
    for region, k, op in where or places(s):
        ops = s.regions[region].ops
        index = {o.id: n for n, o in enumerate(ops)}
        targets = {index[w] for w in op.waits if w in index} | {k - 1, k + 1} | {rng.randrange(len(ops)) for _ in range(far)}
        for to in sorted(targets - {k, -1, len(ops)}):
            rest = ops[:k] + ops[k + 1:]
            yield f"move {op.id} from {k} to {to}", with_ops(s, region, rest[:to] + [op] + rest[to:])


def again(op: Op) -> Op:
    """The op with a new id."""
    head, bracket, tail = op.id.partition("[")
    return replace(op, id=head + ("'" if head.count(".") > 1 else ".again") + bracket + tail)


def duplicates(s: Schedule, rng: random.Random, where=None):
    """Each op done again, at once and at a random later place."""
    for region, k, op in where or places(s):
        ops = s.regions[region].ops
        for to in sorted({k + 1, rng.randrange(k + 1, len(ops) + 1)}):
            yield f"repeat {op.id} at {to}", with_ops(s, region, ops[:to] + [again(op)] + ops[to:])


def drops(s: Schedule, where=None):
    """Each op left out: with the waits on it left dangling, and with whoever waited for it waiting for what it waited for."""
    for region, k, op in where or places(s):
        ops = s.regions[region].ops
        yield f"drop {op.id}", with_ops(s, region, ops[:k] + ops[k + 1:])
        name = {r: (op.id if r == region else "") for r in s.regions}
        fresh = {}
        for r in s.regions.values():
            kept = []
            for o in r.ops:
                if o is not op:
                    waits = tuple(w for w in o.waits if w != f"prev:{region}:{op.id}" and w != name[r.name])
                    if op.id in o.waits and r.name == region:
                        waits += tuple(w for w in op.waits if w not in waits)
                    kept.append(o if waits == o.waits else replace(o, waits=waits))
            fresh[r.name] = replace(r, ops=kept)
        yield f"drop {op.id}, its waits inherited", replace(s, regions=fresh)


def wrong_args(s: Schedule, where=None):
    """Each argument one off, the mask flipped."""
    for region, k, op in where or places(s):
        for name in op.args:
            if name not in ("causal", "sub"):
                yield f"{op.id} {name}+2", changed(s, region, k, args=op.args | {name: op.args[name] + 2})
        if "attn" in op.kind:
            args = {a: v for a, v in op.args.items() if a != "causal"} if "causal" in op.args else op.args | {"causal": True}
            yield f"{op.id} mask flipped", changed(s, region, k, args=args)


def sample(s: Schedule, rng: random.Random):
    """One random mutation, each kind as likely as any other."""
    every = list(places(s))
    kinds = (
        delete_waits, drops, wrong_args,
        lambda s, where: add_waits(s, rng, where),
        lambda s, where: wrong_buffers(s, 2, where),
        lambda s, where: moves(s, rng, 2, where),
        lambda s, where: duplicates(s, rng, where),
    )
    while True:
        kind = rng.choice(kinds)
        found = list(kind(s, where=[rng.choice(every)]))
        if found:
            return rng.choice(found)
