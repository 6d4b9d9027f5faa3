"""Block backward: what was not saved is made again, then rows of attention backward, one a chunk of the outer walk.

    query-up, query-down   a row holds q, do, o and lse of one query chunk and meets its KV chunks; dkv of each is returned to
    kv-outer               a row holds one KV chunk and meets its query chunks; dq of each is returned to

A chunk enters by its FFN's and output projection's backward (before its row; under kv-outer all enter first) and is finished by the
QKV projection's backward, in two halves: the norm's backward is linear in its gradient, so they add up. dq of a chunk is final after
its row, dkv too except under query-up, where all are after the last row. dx holds a chunk's residual gradient until then; on the host
it is an accumulator of three parts, and comes back where rows lie between them.
"""
from __future__ import annotations

from sim.build.emit import AHEAD, Emit
from sim.build.forward import Forward
from sim.build.saved import SAVE, Store, handed, hosted, inner
from sim.strategy import Strategy

HELD = {"query": {"x": "x", "q": "q", "lse": "lse"}, "kv": {"x": "x_kv", "kv": "kv"}}
"""What a row reloads and holds, by what is outermost, and the names for it."""
MET = {"query": {"kv": "slot"}, "kv": {role: f"slot.{role}" for role in ("q", "do", "o", "lse")}}
"""What it meets chunk after chunk, and the slots for it."""


class Backward:
    """Writes the bwd region."""

    def __init__(self, emit: Emit, strategy: Strategy) -> None:
        self.e, self.s, self.P = emit, strategy, emit.layout.P
        self.saved = SAVE[strategy.save]
        self.outer = "kv" if strategy.order == "kv-outer" else "query"
        self.own, self.other = ("dkv", "dq") if self.outer == "kv" else ("dq", "dkv")
        made = [role for role in ("q", "kv", "o", "lse") if role not in self.saved] + ["do"] * (self.outer == "kv")
        self.store = Store(emit, tuple(made), hosted(strategy, emit.u), strategy.skip_resident)
        self.sums = Store(emit, (self.other,), lambda *_: strategy.accum == "host", True)
        self.hidden = handed(emit, strategy)
        self.depth = max(AHEAD, strategy.prefetch)
        self.row: dict[int, dict[str, str]] = {}
        self.begun: set[int] = set()

    def build(self):
        order = list(range(self.e.u))
        if "q" not in self.saved:
            Forward(self.e, self.s).again(self.store)
        if self.s.order == "query-down":
            order.reverse()
        for i in order if self.outer == "kv" else order[:1]:
            self.load(i)
            self.enter(i)
        if self.outer == "kv":
            self.row.clear()
        self.hold(order[0])
        for i, after in zip(order, [*order[1:], None]):
            if self.outer == "query":
                self.load(after)
            self.hold(after)
            self.attend(i)
            name, final = ("dq", ("dq",)) if self.s.order == "query-up" else ("dqkv", ("dq", "dkv"))
            dq, *dkv = self.scatter(name, i, {role: self.total(role, i) for role in final})
            if self.outer == "query":
                self.enter(after)
            self.query(i, dq)
            for its in dkv:
                self.key_values(i, its, self.row[i]["x"], self.row[i]["dx"])
        if self.s.order == "query-up":
            self.all_key_values()
        return self.e.close()

    def load(self, i: int | None) -> None:
        """Reload what chunk i enters with; o also returns to this rank's tokens."""
        if i is not None:
            roles = ("o", "h", "up") if "h" in self.saved else ("o", "x")
            row = {role: self.store.fetch(role, i, f"reload.{role}[{i}]", AHEAD) for role in roles}
            self.row[i] = row | {"o'": self.scatter("o", i, {"o": row["o"]})[0]}

    def hold(self, r: int | None) -> None:
        """Reload what row r holds."""
        if r is not None:
            row = self.row.setdefault(r, {})
            for role, name in HELD[self.outer].items():
                if role not in row:
                    row[role] = self.store.fetch(role, r, f"reload.{name}[{r}]", AHEAD)

    def scatter(self, name: str, i: int, buffers: dict[str, str], depth: int = 1) -> tuple[str, ...]:
        """One all-to-all of these roles of a chunk from this rank's heads to its tokens; nothing at P = 1."""
        if self.P == 1:
            return tuple(buffers.values())
        to = tuple(self.e.slot(f"{role}'", i, depth) for role in buffers)
        self.e.op("comm", f"a2a.{name}[{i}]", tuple(buffers.values()), to, n=self.e.n(i))
        return to

    def enter(self, i: int | None) -> None:
        """h, recomputed or saved, then FFN and output projection backward, then do to this rank's heads."""
        if i is None:
            return
        e, row, n = self.e, self.row[i], self.e.n(i)
        dx = row["dx"] = self.hidden.home("dx", i, AHEAD)
        if "h" not in row:
            row["h"] = e.slot("h", i, 1)
            e.op("compute", f"proj[{i}]", (row["o'"], row["x"]), (row["h"],), n=n)
        up = (row["up"],) if "up" in row else ()
        dy = self.hidden.fetch("dy", i, f"reload.dy[{i}]", AHEAD)
        e.op("compute", f"ffn_bwd[{i}]", (row["h"], dy, *up), (dx,), n=n, sub=self.s.ffn_sub)
        self.hidden.keep("dx", i, dx, f"dx_ffn[{i}]")
        do = row["do"] = self.store.home("do", i, 1)
        made = do if self.P == 1 else e.slot("do'", i, 1)
        e.op("compute", f"proj_bwd[{i}]", (dx, row["o'"]), (made,), n=n)
        if self.P > 1:
            e.op("comm", f"a2a.do[{i}]", (made,), (do,), n=n)
        self.store.keep("do", i, do)

    def attend(self, r: int) -> None:
        """Row r: its own gradient in one accumulator, that of each chunk it meets in the chunk's."""
        e, u, depth = self.e, self.e.u, self.s.prefetch
        own = self.row[r][self.own] = e.slot(self.own, r, 1)
        for k, c in enumerate(inner(self.s, r, range(r, u) if self.outer == "kv" else range(r + 1))):
            i, j = (c, r) if self.outer == "kv" else (r, c)
            have = self.row[r] | {role: self.store.fetch(role, c, f"reload.{role}[{i},{j}]", depth, slot) for role, slot in MET[self.outer].items()}
            more = c in self.begun
            its = self.sums.fetch(self.other, c, f"reload.{self.other}[{i},{j}]", self.depth) if more else self.sums.home(self.other, c, self.depth)
            old = (own,) * (k > 0) + (its,) * more
            reads = (*(have[role] for role in ("q", "kv", "do", "o", "lse")), *old)
            writes = (own, its) if self.own == "dq" else (its, own)
            e.op("compute", f"attn_bwd[{i},{j}]", reads, writes, q=e.n(i), kv=e.n(j), causal=i == j)
            self.sums.keep(self.other, c, its, f"{self.other}[{i},{j}]")
            self.begun.add(c)

    def total(self, role: str, i: int) -> str:
        """The final dq or dkv of chunk i: its row's own, or the one that rows returned to."""
        return self.row[i][role] if role == self.own else self.sums.fetch(role, i, f"reload.{role}[{i}]", self.depth)

    def query(self, i: int, dq: str) -> None:
        """The query half of the QKV backward: dx gains its part."""
        e, row = self.e, self.row[i]
        if "dx" not in row:
            row["dx"] = self.hidden.fetch("dx", i, f"reload.dx_q[{i}]", AHEAD)
        dx = row["dx"]
        e.op("compute", f"q_bwd[{i}]", (dq, row["x"], dx), (dx,), n=e.n(i), at=e.at(i))
        self.hidden.keep("dx", i, dx, f"dx_q[{i}]")

    def key_values(self, j: int, dkv: str, x: str, dx: str) -> None:
        """The key and value half of chunk j; then its dx is final."""
        self.e.op("compute", f"kv_bwd[{j}]", (dkv, x, dx), (dx,), n=self.e.n(j), at=self.e.at(j))
        self.hidden.keep("dx", j, dx)

    def all_key_values(self) -> None:
        """That half of all chunks, after all rows; each one's all-to-all and reloads are issued one chunk ahead."""
        def ready(j: int) -> tuple[str, str, str]:
            dkv, = self.scatter("dkv", j, {"dkv": self.total("dkv", j)}, AHEAD)
            return dkv, self.store.fetch("x", j, f"reload.x_kv[{j}]", AHEAD), self.hidden.fetch("dx", j, f"reload.dx_kv[{j}]", AHEAD)

        after = ready(0)
        for j in range(self.e.u):
            this, after = after, ready(j + 1) if j + 1 < self.e.u else None
            self.key_values(j, *this)
