"""Block backward, save=qkvo, query-outer up, dK and dV accumulated in HBM.

Per query chunk: reload what forward saved, recompute the FFN's input, FFN and projection backward, one row of attention
backward, then the query half of the QKV backward. dK and dV are complete only after the last row; their half follows at the end.
The norm's backward is linear in its gradient, so the two halves add up.
"""
from __future__ import annotations

from sim.build.emit import AHEAD, Emit
from sim.build.saved import fetch
from sim.strategy import Strategy


class Backward:
    """Writes the bwd region."""

    def __init__(self, emit: Emit, strategy: Strategy) -> None:
        self.e, self.s, self.P = emit, strategy, emit.layout.P
        self.shapes = emit.layout.model.weight_shapes()
        self.row: dict[int, dict[str, str]] = {}
        self.dkv: dict[int, str] = {}

    def build(self):
        e = self.e
        self.load(0)
        self.enter(0)
        for i in range(e.u):
            if i + 1 < e.u:
                self.load(i + 1)
            self.attend(i)
            dq = self.scatter("dq", i, self.row[i]["dq"])
            if i + 1 < e.u:
                self.enter(i + 1)
            self.query(i, dq)
        self.key_values()
        return e.close()

    def load(self, i: int) -> None:
        """Reload row i's saved tensors; o also returns to this rank's tokens."""
        row = {role: fetch(self.e, role, i, f"reload.{role}[{i}]", AHEAD, self.s.offload) for role in ("o", "x", "q", "lse")}
        self.row[i] = row | {"o'": self.scatter("o", i, row["o"])}

    def scatter(self, role: str, i: int, buffer: str, depth: int = 1) -> str:
        """All-to-all between head-sharded and token-sharded; nothing at P = 1."""
        if self.P == 1:
            return buffer
        to = self.e.slot(f"{role}'", i, depth)
        self.e.op("comm", f"a2a.{role}[{i}]", (buffer,), (to,), n=self.e.n(i))
        return to

    def enter(self, i: int) -> None:
        """Recompute h, then FFN and output projection backward, then do to this rank's heads."""
        e, row, n = self.e, self.row[i], self.e.n(i)
        h, dh, do = e.slot("h", i, 1), e.slot("dh", i, AHEAD), e.slot("do", i, 1)
        row["dh"], row["do"] = dh, do
        e.op("compute", f"proj[{i}]", (row["o'"], row["x"], *e.weights("Wo", self.shapes)), (h,), n=n)
        W = e.weights("norm2 Wgu Wd", self.shapes)
        old, new = e.grads("dnorm2 dWgu dWd", self.shapes)
        e.op("compute", f"ffn_bwd[{i}]", (h, e.argument("dy", i), *W, *old), (dh, *new), n=n, sub=self.s.ffn_sub)
        made = do if self.P == 1 else e.slot("do'", i, 1)
        old, new = e.grads("dWo", self.shapes)
        e.op("compute", f"proj_bwd[{i}]", (dh, row["o'"], "Wo", *old), (made, *new), n=n)
        if self.P > 1:
            e.op("comm", f"a2a.do[{i}]", (made,), (do,), n=n)

    def attend(self, i: int) -> None:
        """Row i of attention backward: dq in one accumulator, dk and dv of each chunk in its own."""
        e, row = self.e, self.row[i]
        dq = row["dq"] = e.slot("dq", i, 1)
        for j in range(i + 1):
            kv = fetch(e, "kv", j, f"reload.kv[{i},{j}]", self.s.prefetch, self.s.offload, "slot")
            old = ((dq,) if j else ()) + ((self.dkv[j],) if j in self.dkv else ())
            self.dkv[j] = e.value("dkv", j)
            reads = (row["q"], kv, row["do"], row["o"], row["lse"], *old)
            e.op("compute", f"attn_bwd[{i},{j}]", reads, (dq, self.dkv[j]), q=e.n(i), kv=e.n(j), causal=i == j)

    def query(self, i: int, dq: str) -> None:
        """The query half of the QKV backward: dx = dh + its part."""
        e, row = self.e, self.row[i]
        old, new = e.grads("dnorm1 dWq", self.shapes)
        W = e.weights("norm1 Wq", self.shapes)
        e.op("compute", f"q_bwd[{i}]", (dq, row["x"], row["dh"], *W, *old), (e.argument("dx", i), *new), n=e.n(i), at=e.at(i))

    def key_values(self) -> None:
        """The key and value half, chunk after chunk, each one all-to-all ahead."""
        e = self.e
        ready = {0: self.ready(0)}
        for j in range(e.u):
            if j + 1 < e.u:
                ready[j + 1] = self.ready(j + 1)
            dkv, x = ready[j]
            old, new = e.grads("dnorm1 dWkv", self.shapes)
            W = e.weights("norm1 Wkv", self.shapes)
            dx = e.argument("dx", j)
            e.op("compute", f"kv_bwd[{j}]", (dkv, x, dx, *W, *old), (dx, *new), n=e.n(j), at=e.at(j))

    def ready(self, j: int) -> tuple[str, str]:
        """dkv and x of chunk j, on this rank's tokens."""
        dkv = self.scatter("dkv", j, self.dkv[j], depth=AHEAD)
        return dkv, fetch(self.e, "x", j, f"reload.x_kv[{j}]", AHEAD, self.s.offload)
