"""Block forward, query chunk after query chunk (FPDT, section 4): QKV and all-to-all one chunk ahead, then one row of
attention over all earlier KV chunks reloaded from the host, then output projection and FFN of that chunk."""
from __future__ import annotations

from sim.build.emit import AHEAD, Emit
from sim.build.saved import fetch, home, keep
from sim.strategy import Strategy


class Forward:
    """Writes the fwd region."""

    def __init__(self, emit: Emit, strategy: Strategy) -> None:
        self.e, self.s, self.P = emit, strategy, emit.layout.P
        self.shapes = emit.layout.model.weight_shapes()
        self.q: dict[int, str] = {}
        self.kv: dict[int, str] = {}
        self.o: dict[int, str] = {}

    def build(self):
        e = self.e
        for i in range(min(2, e.u)):
            self.project_in(i)
        for i in range(e.u):
            self.attend(i)
            o_tok = self.gather(i)
            if i + 2 < e.u:
                self.project_in(i + 2)
            self.project_out(i, o_tok)
        return e.close()

    def project_in(self, i: int) -> None:
        """qkv, all-to-all, and the copies out that can start at once."""
        e, offload = self.e, self.s.offload
        x = e.argument("x", i)
        q, kv = home(e, "q", i, AHEAD, offload), home(e, "kv", i, AHEAD, offload)
        W = e.weights("norm1 Wq Wkv", self.shapes)
        made = (q, kv) if self.P == 1 else (e.slot("q'", i, 1), e.slot("kv'", i, 1))
        e.op("compute", f"qkv[{i}]", (x, *W), made, n=e.n(i), at=e.at(i))
        if self.P > 1:
            e.op("comm", f"a2a.q[{i}]", (made[0],), (q,), n=e.n(i))
            e.op("comm", f"a2a.kv[{i}]", (made[1],), (kv,), n=e.n(i))
        self.q[i], self.kv[i] = q, kv
        for role, buffer in (("kv", kv), ("q", q), ("x", x)):
            keep(e, role, i, buffer, offload)

    def attend(self, i: int) -> None:
        """Row i of attention, KV chunks 0..i; the last one writes o."""
        e = self.e
        o, lse = home(e, "o", i, AHEAD, self.s.offload), home(e, "lse", i, AHEAD, self.s.offload)
        for j in range(i + 1):
            kv = self.kv[i] if j == i else fetch(e, "kv", j, f"reload.kv[{i},{j}]", self.s.prefetch, self.s.offload, "slot")
            acc = o if j == i else e.slot("acc", i, 1)
            merge = ("acc", lse) if j else ()
            e.op("compute", f"attn[{i},{j}]", (self.q[i], kv, *merge), (acc, lse), q=e.n(i), kv=e.n(j), causal=j == i)
        self.o[i] = o
        keep(e, "o", i, o, self.s.offload)
        keep(e, "lse", i, lse, self.s.offload)

    def gather(self, i: int) -> str:
        """All-to-all of o back to this rank's tokens."""
        if self.P == 1:
            return self.o[i]
        o_tok = self.e.slot("o'", i, 1)
        self.e.op("comm", f"a2a.o[{i}]", (self.o[i],), (o_tok,), n=self.e.n(i))
        return o_tok

    def project_out(self, i: int, o_tok: str) -> None:
        """Output projection, residual, FFN in sub-chunks."""
        e = self.e
        h = e.slot("h", i, 1)
        e.op("compute", f"proj[{i}]", (o_tok, e.argument("x", i), *e.weights("Wo", self.shapes)), (h,), n=e.n(i))
        W = e.weights("norm2 Wgu Wd", self.shapes)
        e.op("compute", f"ffn[{i}]", (h, *W), (e.argument("y", i),), n=e.n(i), sub=self.s.ffn_sub)
