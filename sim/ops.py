"""Every op kind, once: its operands, its FLOPs and bytes, its workspace, and what its outputs stand for.

A kind is one entry here and one launcher in the engine, and nothing else. What outputs stand for is a small algebra: a value
is a tuple (tensor, chunk, coverage, layout). layout is t (token-sharded) or h (head-sharded); at P = 1 both are h. coverage is
a bit mask: of KV chunks for o and dq, of query chunks for dkv, of chunks for weight gradients, 1 | 2 (q part, kv part) for dx.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from types import MappingProxyType

from sim.errors import UserError
from sim.kernels import KERNELS, TYPICAL, Shape, parted
from sim.layout import ITEM
from sim.model import Model, groups
from sim.schedule import HANDED, Op, Schedule, chunk_of

FLAGS = ("causal", "zero", "cached")
"""Arguments that are present or absent; all others are name=number."""
PARTS = "parts"
"""An argument that an all-to-all may have: in how many messages it goes."""


class DataError(Exception):
    """An op was given something else than it needs; str() says what."""


@dataclass(frozen=True)
class Work:
    """What an op costs, independent of any machine."""

    gemm_flops: int = 0
    attn_flops: int = 0
    hbm_bytes: int = 0
    link_bytes: int = 0
    """Bytes over PCIe (copies) or sent over the GPU interconnect by one rank (all-to-alls)."""

    @property
    def flops(self) -> int:
        """Of products and attention."""
        return self.gemm_flops + self.attn_flops


@dataclass(frozen=True)
class Operands:
    """Names of what an op kind reads and writes for one kind of model; those that end in ? may be absent."""

    reads: tuple[str, ...]
    writes: tuple[str, ...]

    @cached_property
    def fixed(self) -> int:
        """How many reads come before the first that may be absent."""
        return next((k for k, name in enumerate(self.reads) if name.endswith("?")), len(self.reads))

    @cached_property
    def read(self) -> tuple[int, int]:
        """(least, most) reads."""
        return sum(not n.endswith("?") for n in self.reads), len(self.reads)

    @cached_property
    def written(self) -> tuple[int, int]:
        """(least, most) writes."""
        return sum(not n.endswith("?") for n in self.writes), len(self.writes)


@dataclass(frozen=True)
class Kind:
    """An op kind. Its operands are activations, then weights, then what it accumulates over chunks (read once something was
    written to it); names end in ? where optional. Weights and sums name a group of `Model.groups`: q is Wq, and bq if there are
    biases; dq their gradients. `args` must be present."""

    name: str
    stream: str
    reads: tuple[str, ...]
    weights: tuple[str, ...]
    writes: tuple[str, ...]
    sums: tuple[str, ...]
    args: tuple[str, ...]
    work: Callable[[Op, Schedule], Work]
    data: Callable[[Op, list, Schedule], list]
    workspace: Callable[[Op, Schedule, str], int] = lambda op, s, kernel: 0
    """Bytes beside its operands, given the name of the attention kernel (sim.kernels)."""

    def operands(self, model: Model) -> Operands:
        """What it reads and writes, in full for a model."""
        return _operands(self.name, model.kind)

    def in_place(self, read: int, write: int, model: Model) -> bool:
        """Whether a buffer may be both that read and that write operand: the accumulators, named alike on both sides."""
        reads, writes, fixed = (known := self.operands(model)).reads, known.writes, known.fixed
        return reads[read] == writes[write] if read < fixed else writes[write] + "?" in reads


KINDS: dict[str, Kind] = {}


@cache
def names(wanted: tuple[str, ...], kind: str) -> tuple[str, ...]:
    """Weights of the groups, or gradients where a group is led by d; whatever is no group stays as it is."""
    of = groups(kind)
    return tuple(n for g in wanted for n in of.get(g) or [f"d{w}" for w in of.get(g.removeprefix("d"), ())] or [g])


@cache
def _operands(op_kind: str, model_kind: str) -> Operands:
    kind = KINDS[op_kind]
    sums = names(kind.sums, model_kind)
    return Operands(kind.reads + names(kind.weights, model_kind) + tuple(f"{n}?" for n in sums), kind.writes + sums)


def sub_chunks(op: Op, s: Schedule) -> int:
    """How many sub-chunks an op works through, one after the other."""
    return min(op.args["sub"], op.args["n"] // s.P) if "sub" in op.args else 1


def split(op: Op, model: Model, operands: list) -> tuple[list, list, list]:
    """(activations, weights, sums so far) of what stands for an op's reads."""
    weights, sums = _borders(op, model)
    return operands[:weights], operands[weights:sums], operands[sums:]


def _borders(op: Op, model: Model) -> tuple[int, int]:
    """How many reads of an op come before its weights, and before its sums so far."""
    kind = KINDS[op.kind]
    weights, sums = len(names(kind.weights, model.kind)), len(names(kind.sums, model.kind))
    end = len(op.reads) - sum(w in op.reads for w in op.writes[len(op.writes) - sums:])
    return end - weights, end


def check(op: Op, model: Model, where: str = "") -> None:
    """Stream, operand counts and arguments of an op fit its kind. Raises UserError."""
    kind = KINDS[op.kind]
    if op.stream != kind.stream:
        raise UserError(f"{where}{op.id} is on stream {op.stream}; a {op.kind} runs on {kind.stream}")
    known = kind.operands(model)
    for what, given, (least, most) in (("reads", op.reads, known.read), ("writes", op.writes, known.written)):
        if not least <= len(given) <= most:
            raise UserError(f"{where}{op.id} {what} {len(given)} buffers; a {op.kind} {what}: {' '.join(getattr(known, what)) or 'nothing'}")
    if kind.sums:  # which may be absent, so that the count alone does not tell whether what comes before them is there
        least, most = sum(not n.endswith("?") for n in kind.reads), len(kind.reads)
        given, _ = _borders(op, model)
        if not least <= given <= most:
            raise UserError(f"{where}{op.id} reads {given} buffers before its weights; a {op.kind} reads: {' '.join(known.reads)}, the last {len(names(kind.sums, model.kind))} those that it writes")
    for name in kind.args:
        if op.args.get(name, -1) < (name != "at"):
            raise UserError(f"{where}{op.id} needs {name}= with a positive number; a {op.kind} takes {' '.join(f'{a}=' for a in kind.args)}")
    if len(op.args) > len(kind.args):
        for name in op.args.keys() - kind.args - set(FLAGS) - ({PARTS} if op.kind == "a2a" else set()):
            raise UserError(f"{where}{op.id} has {name}=, which a {op.kind} does not know; it takes {' '.join(f'{a}=' for a in kind.args) or 'nothing'}")


def key(op: Op) -> str:
    """The name of an op's cost curve: its kind, and for attention what else changes its speed per FLOP."""
    name = op.kind
    if name == "attn" and len(op.reads) > 2:
        name += "+merge"
    if name == "attn_bwd":
        name += "+merge" * sum(w in op.reads for w in op.writes)
    return name + "".join(f".{flag}" for flag in FLAGS if op.args.get(flag))


# ---- what an output stands for ------------------------------------------------------------------------------------------

def initial(name: str, s: Schedule):
    """What an argument buffer holds before a region runs, or None if it is an output."""
    base, chunk = chunk_of(name)
    if base in ("x", "dy", "label"):
        return (base, chunk, 0, "t" if s.P > 1 else "h")
    if base in names(tuple(groups(s.model.kind)), s.model.kind):
        return (base, 0, 0, "W")
    return None


def owes(region: str, model: Model) -> tuple[str, ...]:
    """What a region must leave."""
    head, block = (tuple(f"d{n}" for n in shapes) for shapes in (model.head_shapes(), model.weight_shapes()))
    return {"fwd": ("y",), "loss": ("dx", "loss", *head), "bwd": ("dx", *block)}[region]


@cache
def weights_of(model: Model) -> Mapping[str, tuple[int, ...]]:
    """Shapes of the weights of a block and of the head."""
    return MappingProxyType(model.weight_shapes() | model.head_shapes())


def outside(buffer: str, model: Model) -> bool:
    """Whether a buffer of this name is handed over from outside."""
    base, weights = buffer.partition("[")[0], weights_of(model)
    return base in (*HANDED, "loss") or base in weights or base[:1] == "d" and base[1:] in weights


def owed(tensor: str, s: Schedule) -> dict[str, tuple]:
    """What a required output must stand for at the end of its region, by buffer name."""
    if tensor in ("y", "dx"):
        return {f"{tensor}[{i}]{'@host' * (s.hidden == 'host')}": (tensor, i, {"y": 0, "dx": 3}[tensor], _tok(s)) for i in range(_u(s))}
    return {tensor: (tensor, 0, (1 << _u(s) * (2 if tensor in _twice(s) else 1)) - 1, "W")}


def _twice(s: Schedule) -> tuple[str, ...]:
    """Gradients that each chunk adds to twice: through q, and through kv."""
    return names(("dnorm1",), s.model.kind)


def role(value: tuple, s: Schedule) -> str:
    """The layout role of what a buffer holds (a weight's or gradient's is its name)."""
    tensor, chunk, cover, layout = value
    if tensor == "o" and cover != _causal(chunk):
        return "acc"
    return tensor + "'" if layout == "t" and tensor in _SPLIT and s.P > 1 else tensor


def form(role: str, chunk: int, s: Schedule) -> tuple[str, tuple[int, ...]]:
    """dtype and shape of what a buffer holds."""
    if role == "loss":
        return "fp32", (1,)
    weights = weights_of(s.model)
    if role in weights:
        return s.dtype, weights[role]
    if role[1:] in weights:
        return "fp32", weights[role[1:]]
    return "int64" if role == "label" else s.layout.dtype_of(role), s.layout.shape(role, _n(chunk, s))


def _want(op: Op, value, tensor: str, layout: str, s: Schedule, chunk: int | None = None, cover: int | None = None):
    layout = "h" if layout == "t" and s.P == 1 else layout
    good = value is not None and value[0] == tensor and value[3] == layout
    if not good or (chunk is not None and value[1] != chunk) or (cover is not None and value[2] != cover):
        need = tensor if chunk is None else f"{tensor} of chunk {chunk}"
        raise DataError(f"{op.id} needs {need}{' in full' if cover else ''}{'' if good else f' ({_LAYOUT[layout]})'}, but is given {describe(value)}")
    return value


_SPLIT = ("q", "kv", "o", "do", "dq", "dkv")
"""Tensors that are split by tokens on one side of an all-to-all and by heads on the other."""
_LAYOUT = {"t": "token-sharded", "h": "head-sharded", "W": "a weight"}


def describe(value) -> str:
    """A value in words."""
    if value is None:
        return "nothing written"
    tensor, chunk, cover, layout = value
    if layout == "W":
        return tensor
    bits = [k for k in range(cover.bit_length()) if cover >> k & 1]
    return f"{tensor} of chunk {chunk}" + (f" covering {bits}" if cover else "")


def _causal(i: int) -> int:
    return (2 << i) - 1


def _tok(s: Schedule) -> str:
    return "t" if s.P > 1 else "h"


def _u(s: Schedule) -> int:
    """Chunks of the sequence."""
    return -(-s.seq // s.chunk)


def _n(chunk: int, s: Schedule) -> int:
    """Tokens of a chunk."""
    return min(s.chunk, s.seq - chunk * s.chunk)


def _length(op: Op, arg: str, chunk: int, s: Schedule) -> None:
    if op.args[arg] != _n(chunk, s):
        raise DataError(f"{op.id} says {arg}={op.args[arg]}, but chunk {chunk} has {_n(chunk, s)} tokens")


def _place(op: Op, chunk: int, s: Schedule) -> None:
    _length(op, "n", chunk, s)
    if op.args["at"] != chunk * s.chunk:
        raise DataError(f"{op.id} says at={op.args['at']}, but chunk {chunk} begins at token {chunk * s.chunk}")


def _given(op: Op, values: list, s: Schedule) -> list:
    """What the activations stand for; the weights must be the right ones."""
    found, weights, _ = split(op, s.model, values)
    for value, name in zip(weights, names(KINDS[op.kind].weights, s.model.kind)):
        _want(op, value, name, "W", s)
    return found


def _grads(op: Op, values: list, chunk: int, s: Schedule) -> list:
    """Sums over chunks: fresh ones stand for this chunk, accumulated ones for one chunk more; one bit a chunk and half."""
    result, given, sums = [], dict(zip(op.reads, values)), names(KINDS[op.kind].sums, s.model.kind)
    for buffer, name in zip(op.writes[-len(sums):], sums):
        bit = 1 << (chunk + _u(s) if op.kind == "kv_bwd" and name in _twice(s) else chunk)
        cover = 0
        if buffer in given:
            cover = _want(op, given[buffer], name, "W", s)[2]
            if cover & bit:
                raise DataError(f"{op.id} adds to {name} a chunk that it already has")
        result.append((name, 0, cover | bit, "W"))
    return result


def _qkv(op, v, s):
    given = _given(op, v, s)
    i = _want(op, given[0], "x", "t", s)[1]
    _place(op, i, s)
    return [("q", i, 0, _tok(s)), ("kv", i, 0, _tok(s))]


def _a2a(op, v, s):
    if len(op.writes) != len(v):
        raise DataError(f"{op.id} sends {len(v)} tensors and receives {len(op.writes)}")
    return [_dealt(op, value, s) for value in v]


def _dealt(op, value, s):
    tensor, chunk, cover, layout = value or _want(op, None, "a tensor", "t", s)
    if tensor not in _SPLIT:
        raise DataError(f"{op.id} needs one of {', '.join(_SPLIT)}, but is given {describe(value)}")
    _length(op, "n", chunk, s)
    return tensor, chunk, cover, "h" if layout == "t" else "t"


def _copy(op, v, s):
    if v[0] is None:
        raise DataError(f"{op.id} copies a buffer that holds nothing written")
    if v[0][3] != "W":
        _length(op, "n", v[0][1], s)
    return [v[0]]


def _attn(op, v, s):
    i, j = _want(op, v[0], "q", "h", s)[1], _want(op, v[1], "kv", "h", s)[1]
    _pair(op, i, j, s)
    cover = 0
    if len(v) > 2:
        cover = _want(op, v[2], "o", "h", s, i)[2]
        _want(op, v[3] if len(v) > 3 else None, "lse", "h", s, i, cover)
    if cover >> j & 1:
        raise DataError(f"{op.id} attends to KV chunk {j} twice for query chunk {i}")
    cover |= 1 << j
    return [("o", i, cover, "h"), ("lse", i, cover, "h")]


def _merge(op, v, s):
    i = _want(op, v[0], "o", "h", s)[1]
    _length(op, "q", i, s)
    covers = []
    for o, lse in (v[:2], v[2:]):
        covers.append(_want(op, o, "o", "h", s, i)[2])
        _want(op, lse, "lse", "h", s, i, covers[-1])
    if covers[0] & covers[1]:
        raise DataError(f"{op.id} merges {describe(v[0])} with {describe(v[2])}, which it has already")
    return [("o", i, covers[0] | covers[1], "h"), ("lse", i, covers[0] | covers[1], "h")]


def _pair(op, i, j, s):
    _length(op, "q", i, s)
    _length(op, "kv", j, s)
    if j > i or bool(op.args.get("causal")) != (i == j):
        mask = "causal" if op.args.get("causal") else "full"
        raise DataError(f"{op.id} attends from query chunk {i} to KV chunk {j} with a {mask} mask; {'no pair is causal' if j > i else 'it must be ' + ('causal' if i == j else 'full')}")


def _proj(op, v, s):
    given = _given(op, v, s)
    i = _want(op, given[0], "o", "t", s)[1]
    _want(op, given[0], "o", "t", s, i, _causal(i))
    _want(op, given[1], "x", "t", s, i)
    _length(op, "n", i, s)
    return [("h", i, 0, _tok(s))]


def _ffn(op, v, s):
    given = _given(op, v, s)
    i = _want(op, given[0], "h", "t", s)[1]
    _length(op, "n", i, s)
    return [("y", i, 0, _tok(s)), ("up", i, 0, _tok(s))][:len(op.writes)]


def _ce(op, v, s):
    given = _given(op, v, s)
    i = _want(op, given[0], "x", "t", s)[1]
    _want(op, given[1], "label", "t", s, i)
    _length(op, "n", i, s)
    return [("dx", i, 3, _tok(s))] + _grads(op, v, i, s)


def _ffn_bwd(op, v, s):
    given = _given(op, v, s)
    i = _want(op, given[0], "h", "t", s)[1]
    _want(op, given[1], "dy", "t", s, i)
    for up in given[2:]:
        _want(op, up, "up", "t", s, i)
    _length(op, "n", i, s)
    return [("dh", i, 0, _tok(s))] + _grads(op, v, i, s)


def _proj_bwd(op, v, s):
    given = _given(op, v, s)
    i = _want(op, given[0], "dh", "t", s)[1]
    _want(op, given[1], "o", "t", s, i, _causal(i))
    _length(op, "n", i, s)
    return [("do", i, 0, _tok(s))] + _grads(op, v, i, s)


def _attn_bwd(op, v, s):
    i, j = _want(op, v[0], "q", "h", s)[1], _want(op, v[1], "kv", "h", s)[1]
    _pair(op, i, j, s)
    _want(op, v[2], "do", "h", s, i)
    _want(op, v[3], "o", "h", s, i, _causal(i))
    _want(op, v[4], "lse", "h", s, i, _causal(i))
    given, covers = dict(zip(op.reads[5:], v[5:])), []
    for buffer, tensor, own, other in ((op.writes[0], "dq", i, j), (op.writes[1], "dkv", j, i)):
        cover = _want(op, given[buffer], tensor, "h", s, own)[2] if buffer in given else 0
        if cover >> other & 1:
            raise DataError(f"{op.id} adds pair ({i},{j}) to {tensor} of chunk {own} twice")
        covers.append(cover | 1 << other)
    return [("dq", i, covers[0], "h"), ("dkv", j, covers[1], "h")]


def _q_bwd(op, v, s):
    given = _given(op, v, s)
    i = _want(op, given[0], "dq", "t", s)[1]
    _want(op, given[0], "dq", "t", s, i, _causal(i))
    _want(op, given[1], "x", "t", s, i)
    _want(op, given[2], "dh", "t", s, i)
    _place(op, i, s)
    return [("dx", i, 1, _tok(s))] + _grads(op, v, i, s)


def _kv_bwd(op, v, s):
    given = _given(op, v, s)
    i = _want(op, given[0], "dkv", "t", s)[1]
    every = (1 << _u(s)) - 1
    _want(op, given[0], "dkv", "t", s, i, every & ~((1 << i) - 1))
    _want(op, given[1], "x", "t", s, i)
    _want(op, given[2], "dx", "t", s, i, 1)
    _place(op, i, s)
    return [("dx", i, 3, _tok(s))] + _grads(op, v, i, s)


def _sync(op, v, s):
    """The host makes nothing."""
    return []


# ---- what an op costs ---------------------------------------------------------------------------------------------------

def _gemm(weights: Callable, passes: int, moves: int, extra: Callable = lambda op, s: 0):
    """passes GEMM passes over `weights(model)` parameters, `moves` activations of one hidden row read or written a token."""

    def work(op: Op, s: Schedule) -> Work:
        t, m, e = op.args["n"] // s.P, s.model, ITEM[s.dtype]
        return Work(gemm_flops=2 * t * (passes * weights(m) + extra(op, s)), hbm_bytes=e * (moves * t * m.hidden + passes * weights(m)))

    return work


def _ce_work(op: Op, s: Schedule) -> Work:
    """Logits, their gradient times the head, and the head's gradient; each sub-chunk reads the head twice, and reads and writes its fp32 gradient."""
    t, m, e = op.args["n"] // s.P, s.model, ITEM[s.dtype]
    head = m.vocab * m.hidden
    return Work(gemm_flops=6 * t * head, hbm_bytes=e * 8 * t * m.hidden + sub_chunks(op, s) * head * (2 * e + 8))


def _attn_work(passes: int):
    """passes matmuls a query-key pair (forward 2, flash backward 5); a causal chunk pair counts half."""

    def work(op: Op, s: Schedule) -> Work:
        m, q, kv = s.model, op.args["q"], op.args["kv"]
        flops = 2 * passes * q * kv * (m.heads // s.P) * m.head_dim // (2 if op.args.get("causal") else 1)
        touched = sum(s.layout.size_bytes(r, n) for r, n in (("q", q), ("o", q), ("kv", kv)))
        merged = s.layout.size_bytes("acc", q) * (3 if len(op.reads) > 2 and passes == 2 else 0)
        if passes == 5:
            merged = 3 * (s.layout.size_bytes("dq", q) + s.layout.size_bytes("dkv", kv))
        return Work(attn_flops=flops, hbm_bytes=touched + merged)

    return work


def _link(op: Op, s: Schedule) -> Work:
    """A copy between HBM and host moves the bytes of its host side, which is exact."""
    side = next(b for b in op.reads + op.writes if b.endswith("@host"))
    return Work(link_bytes=s.buffer(op.id.split(".", 1)[0], side).size_bytes)


def _a2a_work(op: Op, s: Schedule) -> Work:
    """Each rank sends all but its own part."""
    roles = [s.buffer(op.id.split(".", 1)[0], name).role for name in op.reads]
    return Work(link_bytes=sum(s.layout.size_bytes(role, op.args["n"]) for role in roles) * (s.P - 1) // s.P)


def _merge_work(op: Op, s: Schedule) -> Work:
    """One kernel a step of the formula: the part to fp32, both scaled, added."""
    part = s.layout.size_bytes("o", op.args["q"])
    return Work(hbm_bytes=part + 8 * s.layout.size_bytes("acc", op.args["q"]))


def _pinned(op: Op, s: Schedule) -> Work:
    return Work(link_bytes=op.args["bytes"])


def _free(op: Op, s: Schedule) -> Work:
    return Work()


def _scratch(rows: Callable, sub: bool = False):
    """Workspace of `rows(model, element bytes, P, up is an operand)` bytes a token of one sub-chunk, and what statistics take."""

    def workspace(op: Op, s: Schedule, kernel: str = "") -> int:
        t = op.args["n"] // s.P
        return -(-t // op.args["sub"] if sub else -t) * rows(s.model, ITEM[s.dtype], s.P, saves_up(op, s)) + _statistics(t, s.model)

    return workspace


def _statistics(tokens: int, model: Model) -> int:
    """What norms, losses and RoPE positions keep by row, and sums over tokens by column until they are added up."""
    return 16 * tokens + 256 * model.hidden


def saves_up(op: Op, s: Schedule) -> bool:
    """Whether the FFN's up projection is an operand: written by forward, read by backward, which then need not do it again."""
    return len(op.writes) > 1 if op.kind == "ffn" else op.kind == "ffn_bwd" and len(split(op, s.model, op.reads)[0]) > 2


def _attn_scratch(op: Op, s: Schedule, kernel: str = TYPICAL) -> int:
    m, (q, kv) = s.model, (op.args["q"], op.args["kv"])
    forward, backward = parted(kernel or TYPICAL)
    shape = Shape(q, kv, m.heads // s.P, max(1, m.kv_heads // s.P), m.head_dim, ITEM[s.dtype], *_given_room(op, s))
    return KERNELS[backward].backward(shape) if op.kind == "attn_bwd" else KERNELS[forward].forward(shape)


def _given_room(op: Op, s: Schedule) -> tuple[bool, bool]:
    """Whether attention's (lse, output) may be written where they belong, not merged with what is there nor kept in another dtype."""
    first = op.kind == "attn" and len(op.reads) == 2
    return first, first and s.buffer(op.id.split(".", 1)[0], op.writes[0]).dtype == s.dtype


def alike(op: Op, s: Schedule) -> tuple:
    """Equal for ops that take the same workspace."""
    return op.kind, *(v for k, v in op.args.items() if k != "at"), len(op.reads), len(op.writes), *_given_room(op, s)


def _ce_scratch(op: Op, s: Schedule, kernel: str = "") -> int:
    """The chunk normed, which its gradient overwrites, and the logits of one sub-chunk."""
    t, m, e = op.args["n"] // s.P, s.model, ITEM[s.dtype]
    return t * e * m.hidden + _statistics(t, m) + -(-t // op.args["sub"]) * e * m.vocab


def _ffn_again(op: Op, s: Schedule) -> int:
    return 0 if saves_up(op, s) else s.model.up_dim * s.model.hidden


def _add(name, stream, reads, weights, writes, sums, args, work, data, workspace=lambda op, s, kernel="": 0):
    KINDS[name] = Kind(name, stream, *(tuple(part.split()) for part in (reads, weights, writes, sums, args)), work, data, workspace)


_add("qkv", "compute", "x", "norm1 q kv", "q kv", "", "n at",
     _gemm(lambda m: m.hidden * (m.q_dim + 2 * m.kv_dim), 1, 6), _qkv,
     _scratch(lambda m, e, P, up: e * (m.hidden + max(m.q_dim, 2 * m.kv_dim)) + 4 * m.rotary_dim))
_add("a2a", "comm", "from also_from?", "", "to also_to?", "", "n", _a2a_work, _a2a)
_add("offload", "d2h", "from", "", "to", "", "n", _link, _copy)
_add("reload", "h2d", "from", "", "to", "", "n", _link, _copy)
_add("attn", "compute", "q kv o? lse?", "", "o lse", "", "q kv", _attn_work(2), _attn, _attn_scratch)
_add("proj", "compute", "o x", "o", "h", "", "n", _gemm(lambda m: m.q_dim * m.hidden, 1, 4), _proj,
     _scratch(lambda m, e, P, up: e * m.q_dim * (P > 1)))
_add("ffn", "compute", "h", "norm2 up down", "y up?", "", "n sub", _gemm(lambda m: (m.up_dim + m.ffn) * m.hidden, 1, 10), _ffn,
     _scratch(lambda m, e, P, up: e * (max(m.hidden, m.ffn) + m.up_dim * (not up)), sub=True))
_add("ce", "compute", "x label", "normf head", "dx", "loss dnormf dhead", "n sub", _ce_work, _ce,
     _ce_scratch)
_add("ffn_bwd", "compute", "h dy up?", "norm2 up down", "dh", "dnorm2 dup ddown", "n sub",
     _gemm(lambda m: (m.up_dim + m.ffn) * m.hidden, 2, 16, _ffn_again), _ffn_bwd,
     _scratch(lambda m, e, P, up: e * (m.hidden + m.ffn + m.up_dim * (2 - up)), sub=True))
_add("proj_bwd", "compute", "dh o", "o", "do", "do", "n", _gemm(lambda m: m.q_dim * m.hidden, 2, 6), _proj_bwd,
     _scratch(lambda m, e, P, up: e * m.q_dim * (P > 1)))
_add("attn_bwd", "compute", "q kv do o lse dq? dkv?", "", "dq dkv", "", "q kv", _attn_work(5), _attn_bwd, _attn_scratch)
_add("q_bwd", "compute", "dq x dx", "norm1 q", "dx", "dnorm1 dq", "n at",
     _gemm(lambda m: m.q_dim * m.hidden, 2, 10), _q_bwd, _scratch(lambda m, e, P, up: e * m.q_dim + max(e * m.hidden, 4 * m.rotary_dim)))
_add("kv_bwd", "compute", "dkv x dx", "norm1 kv", "dx", "dnorm1 dkv", "n at",
     _gemm(lambda m: 2 * m.kv_dim * m.hidden, 2, 10), _kv_bwd, _scratch(lambda m, e, P, up: e * 2 * m.kv_dim + max(e * m.hidden, 4 * m.rotary_dim)))
_add("sync", "host", "", "", "", "", "", _free, _sync)
_add("merge", "compute", "o lse part part_lse", "", "o lse", "", "q", _merge_work, _merge, lambda op, s, kernel="": 3 * s.layout.size_bytes("acc", op.args["q"]))
_add("pin", "host", "", "", "", "", "bytes", _pinned, _sync)
