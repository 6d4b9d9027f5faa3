"""Launchers: one a kind of op. Each takes the runtime, the op, its reads and its writes as tensors, and returns nothing.

Weights come in groups: (weight,) or (weight, bias).

Legend. T this rank's tokens of a chunk (n / P), n all of them, C hidden, F ffn, V vocab, H query heads and K KV heads a rank,
D head_dim, P ranks. A write that the op also reads is accumulated into.
"""
from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from types import ModuleType

import torch
import torch.distributed as dist
import torch.nn.functional as F

from engine.arenas import alone
from engine.kernels.choose import Pair
from engine.merge import merge
from engine.pointwise import (
    ACTIVATION, ACTIVATION_BWD, NORM, NORM_BWD, add_attn_grads, add_columns, angles, cross_entropy, rope_kv, rope_kv_bwd, rope_q, rope_q_bwd,
)
from sim.model import Model
from sim.ops import KINDS, PARTS, split
from sim.schedule import Op


@dataclass
class Runtime:
    """What launchers need beside their operands."""

    model: Model
    P: int
    rank: int
    kernel: ModuleType | Pair
    group: dist.ProcessGroup | None
    copy: object
    """backend.copy."""
    valid: int = 0
    """Labels of the whole sequence that count in the loss."""


def _accumulate(op: Op, k: int) -> bool:
    return op.writes[k] in op.reads


def _add_mm(into: torch.Tensor, a_TM: torch.Tensor, b_TN: torch.Tensor, more: bool) -> None:
    """into [M, N] fp32 (+)= a^T b. A GPU sums bf16 products in fp32 where they go; a CPU cannot, and rounds them to bf16 first."""
    if a_TM.dtype == torch.float32:
        torch.addmm(into, a_TM.t(), b_TN, out=into) if more else torch.mm(a_TM.t(), b_TN, out=into)
    elif into.is_cuda:
        how = {"out_dtype": torch.float32, "out": into}
        torch.addmm(into, a_TM.t(), b_TN, **how) if more else torch.mm(a_TM.t(), b_TN, **how)
    elif more:
        into.add_(a_TM.t() @ b_TN)
    else:
        into.copy_(a_TM.t() @ b_TN)


def _rope(rt: Runtime, op: Op, tokens: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) at this rank's tokens of the chunk."""
    return angles(op.args["at"] + rt.rank * tokens, tokens, rt.model.rotary_dim, rt.model.rope_theta, device)


def _given(rt: Runtime, op: Op, reads: list) -> tuple:
    """(activations, groups of weights): the operands of an op by what they are for."""
    given, weights, _ = split(op, rt.model, reads)
    flat = iter(weights)
    return given, [[next(flat) for _ in rt.model.groups[g]] for g in KINDS[op.kind].weights]


def _all_heads(x_PTHD: torch.Tensor, T: int) -> torch.Tensor:
    """Token-sharded [P, T, H, D] to [T, P H D]."""
    return x_PTHD.view(-1, T, *x_PTHD.shape[-2:]).transpose(0, 1).reshape(T, -1)


def qkv(rt, op, reads, writes):
    (x_TC,), (norm1, q, kv) = _given(rt, op, reads)
    m, T, P = rt.model, op.args["n"] // rt.P, rt.P
    angle = _rope(rt, op, T, x_TC.device)
    xn_TC = NORM[m.kind](x_TC, *norm1, m.norm_eps)
    rope_q(F.linear(xn_TC, *q).view(T, m.heads, m.head_dim), *angle, writes[0].view(P, T, -1, m.head_dim))
    rope_kv(F.linear(xn_TC, *kv).view(T, 2, m.kv_heads, m.head_dim), *angle, writes[1].view(P, T, 2, -1, m.head_dim))


def a2a(rt, op, reads, writes):
    """Part p of each tensor goes to rank p. NCCL does several tensors in one kernel."""
    pairs = [[t.view(rt.P, -1).view(torch.uint8) for t in pair] for pair in zip(writes, reads)]
    if PARTS in op.args:
        for receive, send in pairs:
            _in_parts(rt, op.args[PARTS], receive, send)
        return
    with _together(rt.group, pairs):
        for receive, send in pairs:
            dist.all_to_all_single(receive, send, group=rt.group, async_op=False)


def _in_parts(rt: Runtime, parts: int, receive: torch.Tensor, send: torch.Tensor) -> None:
    """One tensor in so many messages."""
    for part, to in zip(send.chunk(parts, dim=1), receive.chunk(parts, dim=1)):
        part = part.contiguous()
        got = torch.empty_like(part)
        dist.all_to_all_single(got, part, group=rt.group, async_op=False)
        to.copy_(got)


def _together(group: dist.ProcessGroup, pairs: list):
    """What is launched inside is one launch, where there are several and the library can."""
    several = len(pairs) > 1 and pairs[0][0].is_cuda
    return dist._coalescing_manager(group, device=pairs[0][0].device, async_ops=False) if several else nullcontext()


def copy(rt, op, reads, writes):
    rt.copy(writes[0], reads[0])


def attn(rt, op, reads, writes):
    q, kv, *row = reads
    fits = not row and writes[0].dtype == q.dtype
    part, lse = rt.kernel.forward(q, kv, bool(op.args.get("causal")), writes[0] if fits else None, None if row else writes[1])
    if row:
        merge(*row, part, lse, *writes)
        return
    for to, found in zip(writes, (part, lse)):
        if found is not to:
            to.copy_(found)


def merge_apart(rt, op, reads, writes):
    """The steps of the formula one by one, none fused."""
    merge.__wrapped__(*reads, *writes)


def proj(rt, op, reads, writes):
    (o, x_TC), (Wo,) = _given(rt, op, reads)
    _residual(x_TC, _all_heads(o, len(x_TC)), *Wo, out=writes[0])


def _residual(x_TC: torch.Tensor, a_TM: torch.Tensor, W_CM: torch.Tensor, *bias: torch.Tensor, out: torch.Tensor) -> None:
    """out = x + a W^T [+ bias]."""
    torch.addmm(x_TC, a_TM, W_CM.t(), out=out)
    for b_C in bias:
        out.add_(b_C)


def _subs(op: Op, *tensors: torch.Tensor):
    """Sub-chunks of tensors over their tokens, each one `alone`: torch compiles anew for a view that begins inside a tensor, and takes it for unaligned."""
    return zip(*(map(alone, t.tensor_split(min(op.args["sub"], len(t)))) for t in tensors))


def ffn(rt, op, reads, writes):
    (h,), (norm2, up, down) = _given(rt, op, reads)
    for h_TC, y_TC, *kept in _subs(op, h, *writes):
        up_TU = _linear(NORM[rt.model.kind](h_TC, *norm2, rt.model.norm_eps), *up, out=kept[0] if kept else None)
        act_TF = ACTIVATION[rt.model.kind](up_TU)
        del up_TU
        _residual(h_TC, act_TF, *down, out=y_TC)
        del act_TF


def _linear(x_TM: torch.Tensor, W_NM: torch.Tensor, *bias: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
    """x W^T [+ bias], into `out` if that is given."""
    if out is None:
        return F.linear(x_TM, W_NM, *bias)
    return torch.addmm(*bias, x_TM, W_NM.t(), out=out) if bias else torch.mm(x_TM, W_NM.t(), out=out)


def ce(rt, op, reads, writes):
    (x, label), (normf, (Whead,)) = _given(rt, op, reads)
    dx, loss, *dnormf, dWhead = writes
    eps, kind, more = rt.model.norm_eps, rt.model.kind, _accumulate(op, 1)
    if not more:
        loss.zero_()
    share = 1.0 / rt.valid if rt.valid else 0.0
    xn, begun = NORM[kind](x, *normf, eps), more
    for xn_TC, label_T in _subs(op, xn, label):
        grad_TV = xn_TC @ Whead.t()
        cross_entropy(grad_TV, label_T, loss, share)
        _add_mm(dWhead, grad_TV, xn_TC, begun)
        torch.mm(grad_TV, Whead, out=xn_TC)  # what was normed is not needed again
        del grad_TV
        begun = True
    NORM_BWD[kind](x, *normf, xn, None, dx, *dnormf, eps, more)


def ffn_bwd(rt, op, reads, writes):
    (h, dy, *saved), (norm2, up, down) = _given(rt, op, reads)
    dh, *sums = writes
    dnorm2, dup, ddown = _groups(rt, op, sums)
    more, eps, kind = _accumulate(op, 1), rt.model.norm_eps, rt.model.kind
    for h_TC, dy_TC, dh_TC, *kept in _subs(op, h, dy, dh, *saved):
        hn_TC = NORM[kind](h_TC, *norm2, eps)
        up_TU = kept[0] if kept else F.linear(hn_TC, *up)
        act_TF = dy_TC @ down[0]
        dup_TU = ACTIVATION_BWD[kind](up_TU, act_TF)
        _add_linear(ddown, dy_TC, act_TF, more)
        _add_linear(dup, dup_TU, hn_TC, more)
        del up_TU, act_TF, hn_TC
        NORM_BWD[kind](h_TC, *norm2, dup_TU @ up[0], dy_TC, dh_TC, *dnorm2, eps, more)
        del dup_TU
        more = True


def _groups(rt: Runtime, op: Op, sums: list) -> list:
    """Gradient accumulators by group, as _given groups weights."""
    flat = iter(sums)
    return [[next(flat) for _ in rt.model.groups[g[1:]]] for g in KINDS[op.kind].sums if g[1:] in rt.model.groups]


def _add_linear(into: list, grad_TN: torch.Tensor, input_TM: torch.Tensor, more: bool) -> None:
    """The gradients of a linear layer's weight and bias (+)= their parts."""
    _add_mm(into[0], grad_TN, input_TM, more)
    for b_N in into[1:]:
        add_columns(grad_TN, b_N, more)


def proj_bwd(rt, op, reads, writes):
    (dh_TC, o), (Wo,) = _given(rt, op, reads)
    T = len(dh_TC)
    if rt.P == 1:
        torch.mm(dh_TC, Wo[0], out=writes[0].view(T, -1))
    else:
        do_THD = (dh_TC @ Wo[0]).view(T, rt.P, -1, rt.model.head_dim)
        writes[0].view(rt.P, T, -1, rt.model.head_dim).copy_(do_THD.transpose(0, 1))
        del do_THD
    _add_linear(writes[1:], dh_TC, _all_heads(o, T), _accumulate(op, 1))


def attn_bwd(rt, op, reads, writes):
    q, kv, do, o, lse = reads[:5]
    grads = rt.kernel.backward(do, q, kv, o, lse, bool(op.args.get("causal")))
    add_attn_grads(*grads, *writes, _accumulate(op, 0), _accumulate(op, 1))


def q_bwd(rt, op, reads, writes):
    dq, x_TC = reads[:2]
    T = len(x_TC)
    dq_PTHD = dq.view(rt.P, T, -1, rt.model.head_dim)
    _input_grad(rt, op, rope_q_bwd(dq_PTHD, *_rope(rt, op, T, x_TC.device), x_TC.dtype), reads, writes)


def kv_bwd(rt, op, reads, writes):
    dkv, x_TC = reads[:2]
    T = len(x_TC)
    dkv_PT2KD = dkv.view(rt.P, T, 2, -1, rt.model.head_dim)
    _input_grad(rt, op, rope_kv_bwd(dkv_PT2KD, *_rope(rt, op, T, x_TC.device), rt.model.kv_heads, x_TC.dtype), reads, writes)


def _input_grad(rt, op, dproj_TM, reads, writes):
    """dx = what it was + norm's backward of (dproj W); the gradients of norm1 and of the projection gain their parts."""
    (_, x_TC, rest_TC), (norm1, W) = _given(rt, op, reads)
    dx_TC, *sums = writes
    dnorm1, dW = _groups(rt, op, sums)
    eps, kind, more = rt.model.norm_eps, rt.model.kind, _accumulate(op, len(writes) - 1)
    _add_linear(dW, dproj_TM, NORM[kind](x_TC, *norm1, eps), more)
    NORM_BWD[kind](x_TC, *norm1, dproj_TM @ W[0], rest_TC, dx_TC, *dnorm1, eps, _accumulate(op, 1))


LAUNCHERS = {
    "qkv": qkv, "a2a": a2a, "offload": copy, "reload": copy, "attn": attn, "proj": proj, "ffn": ffn, "ce": ce,
    "ffn_bwd": ffn_bwd, "proj_bwd": proj_bwd, "attn_bwd": attn_bwd, "q_bwd": q_bwd, "kv_bwd": kv_bwd,
    "merge": merge_apart,
}
