"""Text form of a schedule: print, and parse back to an equal object. Nothing is derived or repaired on the way.

    compute  fwd.attn[3,0]   q.1 slot.1 -> acc lse.1   q=2048 kv=2048   wait fwd.a2a.qkv[3] fwd.reload.kv[3,0]
"""
from __future__ import annotations

import difflib
import hashlib
import re
from dataclasses import fields

from sim import ops
from sim.check import check
from sim.errors import UserError, unknown
from sim.model import Model
from sim.schedule import LIVES, SPACES, STREAMS, Buffer, Op, Region, Schedule, kind_of

REGIONS = ("fwd", "loss", "bwd")
_MODEL = ("kind", "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab", "rotary", "rope_theta", "norm_eps")
_NAME = r"[A-Za-z][\w.']*(\[\d+\])?(@host)?"
_ID = r"[a-z]+\.[a-z0-9_]+(\.[a-z0-9_']+)?(\[\d+(,\d+)*\])?"


def show(schedule: Schedule) -> str:
    """The schedule as text; parse(show(s)) == s."""
    m = schedule.model
    lines = [
        f"schedule {m.name} S={schedule.seq} P={schedule.P} C={schedule.chunk} dtype={schedule.dtype}",
        "model    " + " ".join(f"{k}={getattr(m, k)}" for k in _MODEL),
        "order    " + " ".join(_order(schedule)),
    ]
    lines += [f"require  {region} {' '.join(names)}" for region, names in schedule.require.items()]
    lines += [f"arena    {s} stride={schedule.stride[s]} shared={schedule.shared[s]}" for s in ("hbm", "host")]
    lines += _table([_buffer("*", b) for b in schedule.saved.values()])
    for region in schedule.regions.values():
        lines += ["", f"region   {region.name}"]
        lines += _table([_buffer(region.name, b) for b in region.buffers.values()])
        lines += [""] + show_ops(region.ops)
    return "\n".join(lines) + "\n"


def _order(schedule: Schedule) -> list[str]:
    """The regions of a step, each with how often it runs."""
    return [r if r == "loss" else f"{r}*{schedule.layers}" for r in REGIONS if r in schedule.regions]


def digest(schedule: Schedule) -> str:
    """What the ranks compare before the first step."""
    return hashlib.sha256(show(schedule).encode()).hexdigest()[:16]


def show_ops(ops: list[Op]) -> list[str]:
    """Ops as aligned lines."""
    return _table([_op(op) for op in ops])


def show_op(op: Op) -> str:
    """One op as a line, not aligned."""
    return "  ".join(part for part in _op(op) if part)


def _buffer(region: str, b) -> tuple[str, ...]:
    offset = "-" if b.offset is None else f"@{b.offset}"
    return ("buffer", region, b.name, b.space, b.life, b.role, b.dtype, "x".join(map(str, b.shape)), offset)


def _op(op: Op) -> tuple[str, ...]:
    flow = f"{' '.join(op.reads)} -> {' '.join(op.writes)}".strip()
    args = " ".join(k if v is True else f"{k}={v}" for k, v in op.args.items())
    return (op.stream, op.id, flow, args, f"wait {' '.join(op.waits)}" if op.waits else "")


def _table(rows: list[tuple[str, ...]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows)]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths)).rstrip() for row in rows]


def parse(text: str, name: str = "schedule") -> Schedule:
    """A schedule from its text. Raises UserError with the line's number, what is wrong and what would be right."""

    head: dict = {"saved": {}, "regions": {}, "require": {}, "stride": {}, "shared": {}}
    region, first = None, {}
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.split("#", 1)[0].strip()
        if not line:
            continue
        word, _, rest = line.partition(" ")
        where = f"{name}:{number}"
        header = f"{word} {rest.split()[0]}" if word in ("require", "arena") and rest.split() else word
        if header in first:
            raise UserError(f"{where}: a second {header} line, after line {first[header]}; keep one of them")
        if word in ("schedule", "model", "order", "require", "arena"):
            first[header] = number
        try:
            match word:
                case "schedule":
                    head["model"], *pairs = rest.split()
                    pairs = dict(p.split("=") for p in pairs)
                    head |= {"seq": int(pairs["S"]), "P": int(pairs["P"]), "chunk": int(pairs["C"]), "dtype": pairs["dtype"]}
                    if min(head["seq"], head["P"], head["chunk"]) < 1 or pairs["dtype"] not in ("fp32", "bf16"):
                        raise ValueError
                case "model":
                    if "model" not in head:
                        raise UserError(f"{where}: the schedule line, with S, P, C and dtype, must stand above the model line; start from what `fpdt show` prints")
                    pairs = dict(p.split("=") for p in rest.split())
                    kinds = {f.name: f.type for f in fields(Model)}
                    cast = {"str": str, "int": int, "float": float}
                    values = {k: cast[kinds[k]](v) for k, v in pairs.items()}
                    try:
                        head["model"] = Model(head["model"], **values)
                    except UserError as error:
                        raise UserError(f"{where}: {error}") from None
                case "order":
                    head["order"] = rest.split()
                case "require":
                    which, *names = rest.split()
                    if which not in REGIONS:
                        raise UserError(f"{where}: {unknown('region', which, REGIONS)}")
                    head["require"][which] = tuple(names)
                case "arena":
                    space, *pairs = rest.split()
                    if space not in SPACES:
                        raise ValueError
                    pairs = dict(p.split("=") for p in pairs)
                    head["stride"][space], head["shared"][space] = int(pairs["stride"]), int(pairs["shared"])
                case "buffer":
                    owner, b, space, life, role, dtype, shape, offset = rest.split()
                    if not re.fullmatch(_NAME, b) or space not in SPACES or life not in LIVES:
                        raise ValueError
                    buffer = Buffer(b, space, life, role, dtype, tuple(map(int, shape.split("x"))), None if offset == "-" else int(offset[1:]))
                    buffer.size_bytes  # KeyError on an unknown dtype
                    owned = head["saved"] if owner == "*" else head["regions"][owner].buffers
                    if b in owned:
                        raise UserError(f"{where}: buffer {b} of {owner} is declared twice; keep one of the lines")
                    owned[b] = buffer
                case "region":
                    if rest.strip() not in REGIONS:
                        raise UserError(f"{where}: {unknown('region', rest.strip(), REGIONS)}")
                    region = Region(rest.strip(), [], {})
                    if region.name in head["regions"]:
                        raise UserError(f"{where}: region {region.name} stands here a second time; a region is written once and run once a layer")
                    head["regions"][region.name] = region
                case _:
                    if region is None:
                        raise UserError(f"{where}: unknown header word {word!r}; it may be schedule, model, order, require, arena, buffer or region")
                    region.ops.append(_parse_op(line, where))
        except UserError:
            raise
        except (ValueError, KeyError, IndexError, TypeError):
            raise UserError(f"{where}: cannot read {line[:60]!r}; write it as `fpdt show` prints such a line") from None
    missing = [k for k in ("seq", "stride") if not head.get(k)] + ([] if isinstance(head.get("model"), Model) else ["model"])
    if missing or not head["regions"]:
        raise UserError(f"{name}: the header lacks {', '.join(missing) or 'a region'}; start from what `fpdt show` prints")
    order = head.pop("order", None)
    schedule = Schedule(**head)
    if order != _order(schedule):
        raise UserError(f"{name}: the order line says {' '.join(order or ['nothing'])}, but {schedule.layers} layers of these regions are {' '.join(_order(schedule))}; write that")
    check(schedule, f"{name}: ")
    return schedule


def _parse_op(line: str, where: str) -> Op:

    body, _, waits = line.partition(" wait ")
    stream, id, *flow = body.split()
    if stream not in STREAMS:
        raise UserError(f"{where}: unknown stream {stream!r}; it may be {', '.join(STREAMS)}")
    kind = kind_of(id) if re.fullmatch(_ID, id) else id
    if kind not in ops.KINDS:
        near = difflib.get_close_matches(kind, ops.KINDS, n=3, cutoff=0.3) or sorted(ops.KINDS)
        raise UserError(f"{where}: unknown op {kind!r} in {id!r}; closest: {', '.join(near)}")
    if "->" not in flow:
        raise UserError(f"{where}: {id} has no '->' between what it reads and what it writes; write reads -> writes")
    arrow = flow.index("->")
    args, writes = {}, []
    for token in flow[arrow + 1:]:
        key, eq, value = token.partition("=")
        if eq:
            args[key] = int(value)
        elif token in ops.FLAGS:
            args[token] = True
        else:
            writes.append(token)
    return Op(id, stream, tuple(flow[:arrow]), tuple(writes), args, tuple(waits.split()))
