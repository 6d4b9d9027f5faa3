"""Bound: the matrix products and attention calls of a block's schedule, recompute included, back to back on one stream: no pointwise work, no
copies, no communication. What the engine would take if it hid everything else."""
from __future__ import annotations

from collections.abc import Callable

import torch

from engine.arenas import DTYPES
from engine.launch import _add_mm
from experiments.peers.case import Place
from sim.ops import saves_up
from sim.schedule import Op, Schedule

Product = tuple[str, int, int, int]
"""(form, tokens T, out N, in M) on a weight [N, M]: apply, a [T, M] to [T, N]; input, the gradient [T, N] to [T, M]; weight, both to fp32 [N, M]."""
FFN = ("ffn", "ffn_bwd")


def ops(schedule: Schedule, region: str, part: str) -> list[Op]:
    """Those of a region that multiply, in order."""
    return [op for op in schedule.regions[region].ops if op.stream == "compute" and (part == "block" or op.kind not in FFN)]


def products(op: Op, s: Schedule) -> list[Product]:
    """The matrix products of an op, as its launcher does them."""
    m, T = s.model, op.args.get("n", 0) // s.P
    sub = min(op.args.get("sub", 1), T)
    subs = [T // sub + (k < T % sub) for k in range(sub)]
    h, up, ffn = m.hidden, m.up_dim, m.ffn
    match op.kind:
        case "qkv":
            return [("apply", T, m.q_dim, h), ("apply", T, 2 * m.kv_dim, h)]
        case "proj":
            return [("apply", T, h, m.q_dim)]
        case "ffn":
            return [product for t in subs for product in (("apply", t, up, h), ("apply", t, h, ffn))]
        case "ffn_bwd":
            again = [] if saves_up(op, s) else [("apply", up, h)]
            forms = [*again, ("input", h, ffn), ("weight", h, ffn), ("weight", up, h), ("input", up, h)]
            return [(form, t, *shape) for t in subs for form, *shape in forms]
        case "proj_bwd":
            return [("input", T, h, m.q_dim), ("weight", T, h, m.q_dim)]
        case "q_bwd" | "kv_bwd":
            out = m.q_dim if op.kind == "q_bwd" else 2 * m.kv_dim
            return [("weight", T, out, h), ("input", T, out, h)]
    return []


class Bound:
    """Operands are shared by shape; what they hold is random, as the power a product takes depends on it."""

    note = ""

    def __init__(self, schedule: Schedule, part: str, place: Place) -> None:
        self.s, self.place, self.dtype = schedule, place, DTYPES[schedule.dtype]
        self._tensors: dict[tuple, torch.Tensor] = {}
        self._calls = {region: [call for op in ops(schedule, region, part) for call in self._bind(op)] for region in ("fwd", "bwd")}

    def clear(self) -> None:
        """Nothing is kept from step to step."""

    @torch.no_grad()
    def forward(self) -> None:
        for call in self._calls["fwd"]:
            call()

    @torch.no_grad()
    def backward(self) -> None:
        for call in self._calls["bwd"]:
            call()

    def _bind(self, op: Op) -> list[Callable[[], object]]:
        if op.kind in ("attn", "attn_bwd"):
            return [self._attention(op)]
        return [self._product(*product) for product in products(op, self.s)]

    def _product(self, form: str, T: int, N: int, M: int) -> Callable[[], object]:
        a, g, W = self._tensor("a", T, M), self._tensor("g", T, N), self._tensor("W", N, M)
        if form == "weight":
            into = self._tensor("dW", N, M, dtype=torch.float32)
            return lambda: _add_mm(into, g, a, True)
        if form == "apply":
            to = self._tensor("to", T, N)
            return lambda: torch.mm(a, W.t(), out=to)
        to = self._tensor("to", T, M)
        return lambda: torch.mm(g, W, out=to)

    def _attention(self, op: Op) -> Callable[[], object]:
        m, P, (q, kv) = self.s.model, self.s.P, (op.args["q"], op.args["kv"])
        kernel, causal = self.place.kernel, bool(op.args.get("causal"))
        heads, kv_heads = m.heads // P, max(1, m.kv_heads // P)
        q_SHD, kv_T2KD = self._tensor("q", q, heads, m.head_dim), self._tensor("kv", kv, 2, kv_heads, m.head_dim)
        if op.kind == "attn":
            return lambda: kernel.forward(q_SHD, kv_T2KD, causal)
        made = "made", q, kv, causal
        if made not in self._tensors:
            self._tensors[made] = tuple(t.contiguous() for t in kernel.forward(q_SHD, kv_T2KD, causal))
        do_SHD = self._tensor("do", q, heads, m.head_dim)
        return lambda: kernel.backward(do_SHD, q_SHD, kv_T2KD, *self._tensors[made], causal)

    def _tensor(self, role: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        if (role, *shape) not in self._tensors:
            self._tensors[role, *shape] = torch.randn(shape, device=self.place.device).to(dtype or self.dtype)
        return self._tensors[role, *shape]
