"""Oracle: decides by brute force whether a schedule is harmful, with no code of the lint or of sim/hazards, sim/data, sim/ops.

    1. Real runs are unrolled, one after another: steps of 1, 2 and 3 layers with and without loss, repeated, and forwards that
       no backward follows. Happens-before is closed transitively (a bit set an op) from stream order, waits and host blocking;
       every two accesses to the same byte, one of them a write, must be ordered.
    2. A step is executed on symbols in list order and in random orders that happens-before allows. Memory is bytes: a write
       stamps each piece of its range, a read needs all pieces of its range from one write. What each op computes is written
       down from the mathematics of the block: sets of query-key pairs for attention, of chunks for weight gradients.
"""
from __future__ import annotations

import random
from dataclasses import replace

HEADS = {"q", "kv", "o", "do", "dq", "dkv"}
LLAMA = {
    "qkv": ["norm1", "Wq", "Wkv"], "proj": ["Wo"], "ffn": ["norm2", "Wgu", "Wd"], "ce": ["normf", "Whead"],
    "ffn_bwd": ["norm2", "Wgu", "Wd"], "proj_bwd": ["Wo"], "q_bwd": ["norm1", "Wq"], "kv_bwd": ["norm1", "Wkv"],
}
GPT = {
    "qkv": ["norm1", "bnorm1", "Wq", "bq", "Wkv", "bkv"], "proj": ["Wo", "bo"], "ffn": ["norm2", "bnorm2", "Wu", "bu", "Wd", "bd"],
    "ce": ["normf", "bnormf", "Whead"], "ffn_bwd": ["norm2", "bnorm2", "Wu", "bu", "Wd", "bd"], "proj_bwd": ["Wo", "bo"],
    "q_bwd": ["norm1", "bnorm1", "Wq", "bq"], "kv_bwd": ["norm1", "bnorm1", "Wkv", "bkv"],
}
WEIGHTS = {"llama": LLAMA, "gpt": GPT}
FIRST = {"qkv": 1, "proj": 2, "ffn": 1, "ce": 2, "ffn_bwd": 2, "proj_bwd": 2, "q_bwd": 3, "kv_bwd": 3}
"""Activations before the weights; one more where ffn_bwd is given the saved up projection."""
STREAM = dict.fromkeys(("qkv", "attn", "proj", "ffn", "ce", "ffn_bwd", "proj_bwd", "attn_bwd", "q_bwd", "kv_bwd", "merge"), "compute") | {
    "a2a": "comm", "offload": "d2h", "reload": "h2d", "sync": "host", "pin": "host"}


GRADIENT = "gradient on the host"


class Harm(Exception):
    """Why a schedule is harmful."""


# ---- runs ---------------------------------------------------------------------------------------------------------------

def runs(regions, most: int = 3) -> list[list[tuple[str, int, int]]]:
    """(region, layer, step) lists, the short ones first."""
    def step(number, layers, loss=True, back=True):
        down = [("loss", layers - 1, number)] * loss + [("bwd", k, number) for k in reversed(range(layers))] * back
        return [("fwd", k, number) for k in range(layers)] + down

    found = []
    for L in range(1, most + 1):
        found += [
            step(0, L) + step(1, L),
            step(0, L, loss=False) + step(1, L, loss=False),
            step(0, L, loss=False, back=False) + step(1, L) + step(2, L, loss=False, back=False) + step(3, L, loss=False),
        ]
    return [[i for i in run if i[0] in regions] for run in found]


# ---- the oracle ---------------------------------------------------------------------------------------------------------

class Oracle:
    """Judges schedules that share the buffers of `base`."""

    def __init__(self, base, most: int = 3, chains=None) -> None:
        self.base, self.runs = base, chains or runs(base.regions, most)
        """The first one begins with fwd, loss and bwd of one layer (or those of them that there are)."""
        self.weights = WEIGHTS[base.model.kind]
        self.starts = list(range(0, base.seq, base.chunk))
        self.lengths = [min(base.chunk, base.seq - at) for at in self.starts]
        self._pieces: dict = {}
        self._hazards: dict = {}
        self._made: dict = {}
        self._sound: set = set()
        """What was found to fit, and operands that were found apart: mutants share nearly all of their ops with the base."""
        m = base.model
        square, wide = m.heads * m.head_dim * m.hidden, m.ffn * m.hidden
        self._sizes = {"norm1": m.hidden, "norm2": m.hidden, "normf": m.hidden, "Wq": square, "Wkv": 2 * m.kv_heads * m.head_dim * m.hidden,
                       "Wo": square, "Wgu": 2 * wide, "Wd": wide, "Whead": m.vocab * m.hidden, "Wu": wide,
                       "bnorm1": m.hidden, "bnorm2": m.hidden, "bnormf": m.hidden, "bq": m.heads * m.head_dim, "bkv": 2 * m.kv_heads * m.head_dim,
                       "bo": m.hidden, "bu": m.ffn, "bd": m.hidden}
        self._touches = [[(op.reads, op.writes) for op in r.ops] for r in base.regions.values()]
        self._cuts = {}
        for space in ("hbm", "host"):
            for saved in (False, True):
                ends = set()
                for owner in [base.saved] if saved else [r.buffers for r in base.regions.values()]:
                    for b in owner.values():
                        if b.space == space and b.offset is not None:
                            ends |= {b.offset, b.offset + b.size_bytes}
                self._cuts[space, saved] = sorted(ends)

    def harm(self, schedule, orders: int = 2, seed: int = 0) -> str | None:
        """Why the schedule is harmful, or None."""
        try:
            well_formed(schedule)
            self._execute(schedule, self.runs[0][:3], None)
            for run in self.runs:
                self._ordered(schedule, run, self.before(schedule, run))
            rng = random.Random(seed)
            for _ in range(orders):
                self._execute(schedule, self.runs[0][:3], rng)
        except Harm as harm:
            return str(harm)
        return None

    # -- order

    def before(self, schedule, run) -> list[int]:
        """For each op of a run, the bit set of ops that happen before it."""
        return closure(self.edges(schedule, run))

    def edges(self, schedule, run) -> list[list[tuple[str | None, int]]]:
        """For each op of a run, (wait or None, op) of those it comes right after: on its stream, by its waits, by a blocked host."""
        found: list[list[tuple[str | None, int]]] = []
        last: dict[str, int] = {}
        ids_before: dict[str, int] = {}
        name_before = None
        for region, _, _ in run:
            ids: dict[str, int] = {}
            for op in schedule.regions[region].ops:
                number = len(found)
                before = [(None, last[s]) for s in (op.stream, "host") if s in last]
                for wait in op.waits:
                    if wait[:5] != "prev:":
                        before.append((wait, ids[wait]))
                    else:
                        _, name, id = wait.split(":", 2)
                        if name == name_before:
                            before.append((wait, ids_before[id]))
                found.append(before)
                ids[op.id] = last[op.stream] = number
            ids_before, name_before = ids, region
        return found

    def _ordered(self, schedule, run, closed) -> None:
        for number, (must, before) in enumerate(zip(self.hazards(schedule, run), closed)):
            if must & ~before:
                raise Harm(f"op {number} of {run} races with op {(must & ~before).bit_length() - 1}")

    def hazards(self, schedule, run) -> list[int]:
        """For each op of a run, the bit set of earlier ops that touch a byte it touches, one of the two writing."""
        touches = [[(op.reads, op.writes) for op in r.ops] for r in schedule.regions.values()]
        if touches == self._touches and tuple(run) in self._hazards:
            return self._hazards[tuple(run)]
        wrote: dict = {}
        touched: dict = {}
        found = []
        for region, layer, step in run:
            pieces = self._names(region, layer, step)
            for op in schedule.regions[region].ops:
                mine, must = 1 << len(found), 0
                read = [p for name in op.reads for p in pieces(name)]
                written = [p for name in op.writes for p in pieces(name)]
                for piece in read:
                    must |= wrote.get(piece, 0)
                for piece in written:
                    must |= touched.get(piece, 0)
                found.append(must)
                for piece in read:
                    touched[piece] = touched.get(piece, 0) | mine
                for piece in written:
                    touched[piece] = touched.get(piece, 0) | mine
                    wrote[piece] = wrote.get(piece, 0) | mine
        if touches == self._touches:  # kept for all changes of waits alone
            self._hazards[tuple(run)] = found
        return found

    def unreduced(self, schedule):
        """The schedule with a wait for every hazard pair within an instance or with the one before, beside those it has."""
        waits = {op.id: dict.fromkeys(op.waits) for r in schedule.regions.values() for op in r.ops}
        for run in self.runs:
            jobs = [(k, region, op) for k, (region, _, _) in enumerate(run) for op in schedule.regions[region].ops]
            starts = [next(n for n, job in enumerate(jobs) if job[0] == k) for k in range(len(run))]
            for (k, region, op), must in zip(jobs, self.hazards(schedule, run)):
                for number in range(starts[max(k - 1, 0)], must.bit_length()):
                    if must >> number & 1:
                        there, before, other = jobs[number]
                        waits[op.id][other.id if there == k else f"prev:{before}:{other.id}"] = None
        regions = {r.name: replace(r, ops=[replace(op, waits=tuple(waits[op.id])) for op in r.ops]) for r in schedule.regions.values()}
        return replace(schedule, regions=regions)

    def implied(self, schedule):
        """(region, place, wait) of the waits without which the op would come after that op all the same, in every run."""
        needed, every = set(), set()
        for run in self.runs:
            edges = self.edges(schedule, run)
            closed = closure(edges)
            jobs = [(region, k) for region, _, _ in run for k in range(len(schedule.regions[region].ops))]
            for (region, k), before in zip(jobs, edges):
                once = twice = 0  # reached through one edge, through two
                for _, number in before:
                    reached = closed[number] | 1 << number
                    once, twice = once | reached, twice | once & reached
                for label, number in before:
                    if label:
                        every.add((region, k, label))
                        if not twice >> number & 1:
                            needed.add((region, k, label))
        return every - needed

    def _names(self, region, layer, step):
        """name -> pieces of memory, in one instance."""
        cache = self._pieces.setdefault((region, layer, step), {})

        def pieces(name):
            if name not in cache:
                cache[name] = self._find(region, layer, step, name)
            return cache[name]

        return pieces

    def _find(self, region, layer, step, name) -> list[tuple]:
        b = self.base.regions[region].buffers.get(name) or self.base.saved[name]
        if b.life == "argument":
            tensor, _, rest = name.partition("[")
            if name[-5:] == "@host" and tensor in ("x", "y"):  # a hidden state has its place in every step
                return [("hidden on the host", layer + (tensor == "y" or region == "loss"), rest)]
            if name[-5:] == "@host" and tensor in ("dx", "dy"):  # and there is one gradient
                return [(GRADIENT, rest)]
            if tensor == "y" or (tensor == "x" and region == "loss"):
                return [("hidden", step, layer + 1, rest)]
            if tensor == "x":
                return [("hidden", step, layer, rest)]
            if tensor == "dy" or (tensor == "dx" and region == "loss"):
                return [("gradient", step, layer + 1, rest)]
            if tensor == "dx":
                return [("gradient", step, layer, rest)]
            return [("loss" if region == "loss" else "layer", step, layer, name)]
        saved = b.life == "saved"
        if b.offset is None:
            return [(name, layer) if saved else (region, name)]
        low, high = b.offset, b.offset + b.size_bytes
        return [(b.space, layer if saved else -1, cut) for cut in self._cuts[b.space, saved] if low <= cut < high]

    # -- data

    def _execute(self, schedule, run, rng) -> None:
        """Runs one step of one layer; in list order, or in a random order that happens-before allows."""
        jobs = [(instance, op) for instance in run for op in schedule.regions[instance[0]].ops]
        order = range(len(jobs)) if rng is None else shuffled(self.before(schedule, run), [op.stream for _, op in jobs], rng)
        memory: dict = {}
        top = {"hid0"} | ({"hid1"} if "fwd" not in self.base.regions else set()) | ({"grad1"} if "loss" not in self.base.regions else set())
        for region, layer, step in run:
            for b in self.base.regions[region].buffers.values():
                value = self._given(b.name, region) if b.life == "argument" else None
                if value:
                    self._fits(b, value)
                    if value[0][:-1] not in ("hid", "grad") or value[0] in top:
                        for piece in self._names(region, layer, step)(b.name):
                            memory[piece] = (-1, value, None)
        stamp = 0
        for number in order:
            (region, layer, step), op = jobs[number]
            pieces = self._names(region, layer, step)
            made = self._outputs(op, region, tuple([load(memory, pieces(name), (region, name)) for name in op.reads]))
            self._apart(op, pieces, (region, layer, step))
            for name, value in zip(op.writes, made):
                self._fits(self.base.regions[region].buffers.get(name) or self.base.saved[name], value)
                stamp += 1
                for piece in pieces(name):
                    memory[piece] = (stamp, value, (region, name))
        for region, layer, step in run:
            pieces = self._names(region, layer, step)
            owed = {b.name: self._given(b.name, region) for b in self.base.regions[region].buffers.values() if b.life == "argument"}
            for tensor in schedule.require.get(region, ()):
                owed |= self._owed(tensor, region)
            gone = "dx[" if region == "loss" and "bwd" in self.base.regions else "dy["  # on the host, the last dx lies there
            owed = {name: value for name, value in owed.items() if name[:3] != gone or name[-5:] != "@host"}
            for name, want in owed.items():
                if want and load(memory, pieces(name)) != want:
                    raise Harm(f"{region} ends with {name} = {load(memory, pieces(name))}")

    def _given(self, name, region):
        """What an input argument holds when its region starts."""
        tensor, _, rest = name.partition("[")
        tok = "tok" if self.base.P > 1 else "head"
        if tensor in ("x", "dy", "label"):
            kind = {"x": "hid1" if region == "loss" else "hid0", "dy": "grad1", "label": "label"}[tensor]
            return (kind, int(rest.split("]")[0]), frozenset(("q", "kv")) if tensor == "dy" else frozenset(), tok)
        if any(tensor in names for names in self.weights.values()):
            return (tensor, None, frozenset(), "whole")
        return None

    def _owed(self, tensor, region):
        every, tok = range(len(self.lengths)), "tok" if self.base.P > 1 else "head"
        at = "@host" if "x[0]@host" in self.base.regions[region].buffers or "dx[0]@host" in self.base.regions[region].buffers else ""
        if tensor == "y":
            return {f"y[{i}]{at}": ("hid1", i, frozenset(), tok) for i in every}
        if tensor == "dx":
            return {f"dx[{i}]{at}": ("grad1" if region == "loss" else "grad0", i, frozenset(("q", "kv")), tok) for i in every}
        parts = ("q", "kv") if tensor in ("dnorm1", "dbnorm1") else ("",)
        return {tensor: (tensor, None, frozenset((part, i) for part in parts for i in every), "whole")}

    def _fits(self, b, value) -> None:
        if (b.shape, b.dtype, value) in self._sound:
            return
        m, P = self.base.model, self.base.P
        name, chunk, pairs, _ = value
        n, D, weight = 0 if chunk is None else self.lengths[chunk], m.head_dim, self._sizes
        K, H = max(1, m.kv_heads // P), m.heads // P
        dtype = self.base.dtype
        if name in weight:
            count = weight[name]
        elif name[1:] in weight or name == "loss":
            count, dtype = weight.get(name[1:], 1), "fp32"
        elif name == "label":
            count, dtype = n // P, "int64"
        elif name in ("q", "o", "do", "dq"):
            partial = name == "o" and pairs != {(chunk, j) for j in range(chunk + 1)}
            count, dtype = n * H * D, "fp32" if partial or name == "dq" else dtype
        elif name in ("kv", "dkv"):
            count, dtype = 2 * n * K * D, "fp32" if name == "dkv" else dtype
        elif name == "lse":
            count, dtype = H * n, "fp32"
        elif name == "up":
            count = n // P * m.ffn * (2 if m.kind == "llama" else 1)
        else:
            count = n // P * m.hidden
        have = 1
        for d in b.shape:
            have *= d
        if b.dtype != dtype or have < count:
            raise Harm(f"{b.name} cannot hold {name} of chunk {chunk}")
        self._sound.add((b.shape, b.dtype, value))

    def _outputs(self, op, region, values) -> list:
        key = region, op.id, op.reads, op.writes, tuple(op.args.items()), values
        if key not in self._made:
            self._made[key] = Maths(self, op, region).outputs(values)
        return self._made[key]

    def _apart(self, op, pieces, instance) -> None:
        """Outputs share no byte with other operands, but for accumulators."""
        kind = kind_of(op)
        if (kind, op.reads, op.writes, instance) in self._sound:
            return
        same = {"attn": {(2, 0), (3, 1)}, "merge": {(0, 0), (1, 1)}, "kv_bwd": {(2, 0)}, "q_bwd": {(2, 0)}}.get(kind, set())
        later = 5 if kind == "attn_bwd" else FIRST[kind] + len(self.weights[kind]) if kind in ("ce", "ffn_bwd", "proj_bwd", "q_bwd", "kv_bwd") else 99
        for w, name in enumerate(op.writes):
            for r, other in enumerate(op.reads):
                if set(pieces(name)) & set(pieces(other)):
                    accumulates = (r, w) in same or (r >= later and not (w == 0 and kind != "attn_bwd"))
                    if name != other or not accumulates:
                        raise Harm(f"{op.id} overwrites its own input {other}")
            for v, other in enumerate(op.writes):
                if v != w and set(pieces(name)) & set(pieces(other)):
                    raise Harm(f"{op.id} writes {name} and {other} over each other")
        self._sound.add((kind, op.reads, op.writes, instance))


def closure(edges) -> list[int]:
    """For each op, the bit set of all that happen before it."""
    closed: list[int] = []
    for before in edges:
        mask = 0
        for _, k in before:
            mask |= closed[k] | 1 << k
        closed.append(mask)
    return closed


def kind_of(op) -> str:
    return op.id.split("[")[0].split(".")[1]


def load(memory, pieces, reader=None):
    """The value in a range, or None where it is not all from one write, or in shared space from a write under another name."""
    found = memory.get(pieces[0])
    if not found or any(memory.get(p, (None,))[0] != found[0] for p in pieces):
        return None
    if reader and pieces[0][0] in ("hbm", "host") and pieces[0][1] == -1 and found[2] != reader:
        return None
    if reader and pieces[0][0] == GRADIENT and found[2] and found[2][0] == reader[0] and found[2][1] != reader[1]:  # dy, where dx is by now
        return None
    return found[1]


def shuffled(before: list[int], streams: list[str], rng) -> list[int]:
    """A random order that happens-before allows: a random one of the streams whose next op has nothing left before it, each time."""
    queues: dict[str, list[int]] = {}
    for k in reversed(range(len(before))):
        queues.setdefault(streams[k], []).append(k)
    done, order = 0, []
    while len(order) < len(before):
        queue = rng.choice([q for q in queues.values() if q and not before[q[-1]] & ~done])
        order.append(queue.pop())
        done |= 1 << order[-1]
    return order


def well_formed(schedule) -> None:
    """The rules of the text form: unique ids, waits that look back, memory in its space, the right stream."""
    everywhere = {r.name: {op.id for op in r.ops} for r in schedule.regions.values()}
    for region in schedule.regions.values():
        seen = set()
        for op in region.ops:
            if op.id in seen:
                raise Harm(f"{op.id} twice")
            for wait in op.waits:
                if wait[:5] == "prev:":
                    _, other, id = wait.split(":", 2)
                    if id not in everywhere.get(other, ()):
                        raise Harm(f"{op.id} waits for nothing")
                elif wait not in seen:
                    raise Harm(f"{op.id} waits for {wait}, which is not above it")
            seen.add(op.id)
            kind = kind_of(op)
            for names, host in ((op.reads, kind == "reload"), (op.writes, kind == "offload")):
                for name in names:
                    b = region.buffers.get(name) or schedule.saved.get(name)
                    if b is None or (b.space == "host") != host:
                        raise Harm(f"{op.id} cannot use {name}")
            if op.stream != STREAM[kind]:
                raise Harm(f"{op.id} is on the wrong stream")


class Maths:
    """What one op computes. A value: (tensor, chunk, pairs or contributions, how it is spread)."""

    def __init__(self, oracle: Oracle, op, region: str) -> None:
        self.op, self.o = op, oracle
        self.kind = kind_of(op)
        self.tok = "tok" if oracle.base.P > 1 else "head"
        self.level = 1 if region == "loss" else 0

    def bad(self, why):
        raise Harm(f"{self.op.id}: {why}")

    def need(self, value, tensor, spread, chunk=None, pairs=None):
        if value is None or value[0] != tensor or value[3] != spread or (chunk is not None and value[1] != chunk) or (pairs is not None and value[2] != pairs):
            self.bad(f"needs {tensor} {chunk}, has {value}")
        return value

    def length(self, arg, chunk):
        if self.op.args.get(arg) != self.o.lengths[chunk]:
            self.bad(f"{arg} is not the length of chunk {chunk}")

    def row(self, i):
        return frozenset((i, j) for j in range(i + 1))

    def outputs(self, v):
        op, tok = self.op, self.tok
        x, y, dx, dy = f"hid{self.level}", "hid1", f"grad{self.level}", "grad1"
        both, none = frozenset(("q", "kv")), frozenset()
        names = self.o.weights.get(self.kind, [])
        first = FIRST.get(self.kind, 0)
        if self.kind == "ffn_bwd" and len(v) > 2 and v[2] and v[2][0] == "up":
            first = 3
        later, sums = first + len(names), [f"d{name}" for name in names]
        if len(v) < (5 if self.kind == "attn_bwd" else later):
            self.bad("too few inputs")
        for value, name in zip(v[first:], names):
            self.need(value, name, "whole")
        match self.kind:
            case "sync" | "pin":
                return []
            case "merge":
                i = self.need(v[0], "o", "head")[1]
                self.length("q", i)
                kept, part = (self.need(v[k], "o", "head", i)[2] for k in (0, 2))
                self.need(v[1], "lse", "head", i, kept), self.need(v[3], "lse", "head", i, part)
                if kept & part:
                    self.bad("a pair twice")
                return [(name, i, kept | part, "head") for name in ("o", "lse")]
            case "qkv":
                i = self.need(v[0], x, tok)[1]
                self.at(i)
                return [("q", i, none, tok), ("kv", i, none, tok)]
            case "a2a":
                for each in v:
                    if each is None or each[0] not in HEADS:
                        self.bad(f"cannot exchange {each}")
                    self.length("n", each[1])
                return [(*each[:3], "head" if each[3] == "tok" else "tok") for each in v]
            case "offload" | "reload":
                if v[0] is None:
                    self.bad("copies garbage")
                if v[0][1] is not None:
                    self.length("n", v[0][1])
                return [v[0]]
            case "attn":
                i, j = self.pair(v)
                pairs = none
                if len(v) > 2:
                    pairs = self.need(v[2], "o", "head", i)[2]
                    self.need(v[3] if len(v) > 3 else None, "lse", "head", i, pairs)
                if (i, j) in pairs:
                    self.bad("a pair twice")
                pairs = pairs | {(i, j)}
                return [("o", i, pairs, "head"), ("lse", i, pairs, "head")]
            case "proj":
                i = self.need(v[0], "o", tok)[1]
                self.need(v[0], "o", tok, i, self.row(i))
                self.need(v[1], x, tok, i)
                self.length("n", i)
                return [("h", i, none, tok)]
            case "ffn":
                i = self.need(v[0], "h", tok)[1]
                self.length("n", i)
                return [(y, i, none, tok), ("up", i, none, tok)][:len(op.writes)]
            case "ce":
                i = self.need(v[0], x, tok)[1]
                self.need(v[1], "label", tok, i)
                self.length("n", i)
                return [(dx, i, both, tok)] + self.sums(v, later, ["loss", *sums], ("", i))
            case "ffn_bwd":
                i = self.need(v[0], "h", tok)[1]
                self.need(v[1], dy, tok, i, both)
                if first == 3:
                    self.need(v[2], "up", tok, i)
                self.length("n", i)
                return [("dh", i, none, tok)] + self.sums(v, later, sums, ("", i))
            case "proj_bwd":
                i = self.need(v[0], "dh", tok)[1]
                self.need(v[1], "o", tok, i, self.row(i))
                self.length("n", i)
                return [("do", i, none, tok)] + self.sums(v, later, sums, ("", i))
            case "attn_bwd":
                i, j = self.pair(v)
                self.need(v[2], "do", "head", i)
                self.need(v[3], "o", "head", i, self.row(i))
                self.need(v[4], "lse", "head", i, self.row(i))
                made = []
                for name, tensor, chunk in zip(op.writes, ("dq", "dkv"), (i, j)):
                    old = none
                    if name in op.reads[5:]:
                        old = self.need(v[5 + op.reads[5:].index(name)], tensor, "head", chunk)[2]
                    if (i, j) in old:
                        self.bad("a gradient pair twice")
                    made.append((tensor, chunk, old | {(i, j)}, "head"))
                return made
            case "q_bwd":
                i = self.need(v[0], "dq", tok)[1]
                self.need(v[0], "dq", tok, i, self.row(i))
                self.need(v[1], x, tok, i)
                self.need(v[2], "dh", tok, i)
                self.at(i)
                return [(dx, i, frozenset(("q",)), tok)] + self.sums(v, later, sums, ("q", i), ("dnorm1", "dbnorm1"))
            case "kv_bwd":
                j = self.need(v[0], "dkv", tok)[1]
                self.need(v[0], "dkv", tok, j, frozenset((i, j) for i in range(j, len(self.o.lengths))))
                self.need(v[1], x, tok, j)
                self.need(v[2], dx, tok, j, frozenset(("q",)))
                self.at(j)
                return [(dx, j, both, tok)] + self.sums(v, later, sums, ("kv", j), ("dnorm1", "dbnorm1"))
        self.bad("unknown")

    def at(self, i):
        self.length("n", i)
        if self.op.args.get("at") != self.o.starts[i]:
            self.bad("begins elsewhere")

    def pair(self, v):
        i, j = self.need(v[0], "q", "head")[1], self.need(v[1], "kv", "head")[1]
        self.length("q", i)
        self.length("kv", j)
        if j > i or bool(self.op.args.get("causal")) != (i == j):
            self.bad("wrong mask")
        return i, j

    def sums(self, v, first, tensors, what, split=()):
        """Weight gradients, added to where the op reads what it writes."""
        made = []
        for name, tensor in zip(self.op.writes[1:], tensors):
            part = what if tensor in split else ("", what[1])
            old = frozenset()
            if name in self.op.reads[first:]:
                old = self.need(v[first + self.op.reads[first:].index(name)], tensor, "whole")[2]
            if part in old:
                self.bad(f"adds to {tensor} twice")
            made.append((tensor, None, old | {part}, "whole"))
        return made
