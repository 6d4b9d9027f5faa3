"""Block forward, query chunk after query chunk (FPDT, section 4): QKV and all-to-all one chunk ahead, then one row of
attention over all earlier KV chunks reloaded from the host, then output projection and FFN of that chunk."""
from __future__ import annotations

from collections.abc import Callable

from sim.build.emit import AHEAD, Emit
from sim.build.saved import SAVE, Store, handed, hosted, inner, saves
from sim.strategy import Strategy


class Forward:
    """Writes the fwd region; `again` writes, into bwd, the part of it that was not saved."""

    def __init__(self, emit: Emit, strategy: Strategy) -> None:
        self.e, self.s, self.P = emit, strategy, emit.layout.P
        self.store = Store(emit, (*saves(strategy), "kv"), hosted(strategy, emit.u), strategy.skip_resident)
        self.hidden = handed(emit, strategy)
        self.given: Callable[[int], str] = lambda i: self.hidden.fetch("x", i, f"reload.x[{i}]", AHEAD + 1)
        self.tag = ""
        self.x: dict[int, str] = {}
        self.q: dict[int, str] = {}
        self.kv: dict[int, str] = {}
        self.o: dict[int, str] = {}

    def build(self):
        for i in range(AHEAD):
            self.project_in(i)
        for i in range(self.e.u):
            self.attend(i)
            o_tok = self.gather(i)
            self.project_in(i + AHEAD)
            self.project_out(i, o_tok)
        return self.e.close()

    def again(self, store: Store) -> None:
        """Recomputes q and kv of all chunks, and the attention rows too where o is not saved, into the stores of another region."""
        self.store, self.tag = store, "_fwd"
        self.given = lambda i: store.fetch("x", i, f"reload.x_fwd[{i}]", AHEAD)
        for i in range(AHEAD):
            self.project_in(i)
        for i in range(self.e.u):
            if "o" not in SAVE[self.s.save]:
                self.attend(i)
            self.project_in(i + AHEAD)

    def project_in(self, i: int) -> None:
        """qkv, all-to-all, and the copies out that can start at once. Nothing past the last chunk."""
        if i >= self.e.u:
            return
        e, x = self.e, self.given(i)
        q, kv = self.store.home("q", i, AHEAD), self.store.home("kv", i, AHEAD)
        made = (q, kv) if self.P == 1 else (e.slot("q'", i, 1), e.slot("kv'", i, 1))
        e.op("compute", f"qkv[{i}]", (x,), made, n=e.n(i), at=e.at(i))
        if self.P > 1:
            e.op("comm", f"a2a.qkv[{i}]", made, (q, kv), n=e.n(i))
        self.x[i], self.q[i], self.kv[i] = x, q, kv
        for role, buffer in (("kv", kv), ("q", q), ("x", x)):
            self.store.keep(role, i, buffer)

    def attend(self, i: int) -> None:
        """Row i of attention, KV chunks 0..i; the last one writes o."""
        e, store = self.e, self.store
        o, lse = store.home("o", i, AHEAD), store.home("lse", i, AHEAD)
        row = inner(self.s, i, range(i + 1))
        for j in row:
            kv = self.kv[i] if j == i else store.fetch("kv", j, f"reload.kv{self.tag}[{i},{j}]", self.s.prefetch, "slot")
            acc = o if j == row[-1] else e.slot("acc", i, 1)
            merge = ("acc", lse) if j != row[0] else ()
            e.op("compute", f"attn[{i},{j}]", (self.q[i], kv, *merge), (acc, lse), q=e.n(i), kv=e.n(j), causal=j == i)
        self.o[i] = o
        store.keep("o", i, o)
        store.keep("lse", i, lse)

    def gather(self, i: int) -> str:
        """All-to-all of o back to this rank's tokens."""
        if self.P == 1:
            return self.o[i]
        o_tok = self.e.slot("o'", i, 1)
        self.e.op("comm", f"a2a.o[{i}]", (self.o[i],), (o_tok,), n=self.e.n(i))
        return o_tok

    def project_out(self, i: int, o_tok: str) -> None:
        """Output projection, residual, FFN in sub-chunks."""
        e, store = self.e, self.store
        h = store.home("h", i, 1)
        e.op("compute", f"proj[{i}]", (o_tok, self.x[i]), (h,), n=e.n(i))
        up = (store.home("up", i, 1),) if "up" in store.roles else ()
        y = self.hidden.home("y", i, AHEAD)
        e.op("compute", f"ffn[{i}]", (h,), (y, *up), n=e.n(i), sub=self.s.ffn_sub)
        self.hidden.keep("y", i, y)
        for role, buffer in zip(("h", "up"), (h, *up)):
            store.keep(role, i, buffer)
