"""Launchers: one a kind of op. Each takes the runtime, the op, its reads and its writes as tensors, and returns nothing.

Weights come in groups: (weight,) or (weight, bias).

Legend. T this rank's tokens of a chunk (n / P), n all of them, C hidden, F ffn, V vocab, H query heads and K KV heads a rank,
D head_dim, P ranks. A write that the op also reads is accumulated into.
"""
from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType

import torch
import torch.distributed as dist
import torch.nn.functional as F

from engine.deal import IGNORE
from engine.merge import merge
from engine.pointwise import ACTIVATION, NORM, NORM_BWD, angles, rotate
from sim.model import Model
from sim.ops import KINDS, split
from sim.schedule import Op


@dataclass
class Runtime:
    """What launchers need beside their operands."""

    model: Model
    P: int
    rank: int
    kernel: ModuleType
    group: dist.ProcessGroup | None
    copy: object
    """backend.copy."""
    valid: int = 0
    """Labels of the whole sequence that count in the loss."""


def _accumulate(op: Op, k: int) -> bool:
    return op.writes[k] in op.reads


def _add(op: Op, k: int, into: torch.Tensor, part: torch.Tensor) -> None:
    """into (fp32) += part, or = part where the op does not accumulate."""
    if _accumulate(op, k):
        into.add_(part)
    else:
        into.copy_(part)


def _add_mm(into: torch.Tensor, a_TM: torch.Tensor, b_TN: torch.Tensor, more: bool) -> None:
    """into [M, N] fp32 (+)= a^T b."""
    if a_TM.dtype == torch.float32:
        into.addmm_(a_TM.t(), b_TN, beta=float(more)) if more else torch.mm(a_TM.t(), b_TN, out=into)
    elif more:
        into.add_(a_TM.t() @ b_TN)
    else:
        into.copy_(a_TM.t() @ b_TN)


def _rope(rt: Runtime, op: Op, tokens: int, device: torch.device):
    return angles(op.args["at"] + rt.rank * tokens, tokens, rt.model.rotary_dim, rt.model.rope_theta, device)


def _given(rt: Runtime, op: Op, reads: list) -> tuple:
    """(activations, groups of weights): the operands of an op by what they are for."""
    given, weights, _ = split(op, rt.model, reads)
    flat = iter(weights)
    return given, [[next(flat) for _ in rt.model.groups[g]] for g in KINDS[op.kind].weights]


def _kv_heads(rt: Runtime) -> list[int]:
    """For each rank in turn, the KV heads it works on: a part of them, or one that several ranks share."""
    K = max(1, rt.model.kv_heads // rt.P)
    return [r * rt.model.kv_heads // rt.P + k for r in range(rt.P) for k in range(K)]


def _all_heads(x_PTHD: torch.Tensor, T: int) -> torch.Tensor:
    """Token-sharded [P, T, H, D] to [T, P H D]."""
    return x_PTHD.view(-1, T, *x_PTHD.shape[-2:]).transpose(0, 1).reshape(T, -1)


def qkv(rt, op, reads, writes):
    (x_TC,), (norm1, q, kv) = _given(rt, op, reads)
    m, T, P = rt.model, op.args["n"] // rt.P, rt.P
    cos, sin = _rope(rt, op, T, x_TC.device)
    xn_TC = NORM[m.kind](x_TC, *norm1, m.norm_eps)
    q_THD = rotate(F.linear(xn_TC, *q).view(T, m.heads, m.head_dim), cos, sin)
    writes[0].view(P, T, m.heads // P, m.head_dim).copy_(q_THD.view(T, P, -1, m.head_dim).transpose(0, 1))
    kv_T2GD = F.linear(xn_TC, *kv).view(T, 2, m.kv_heads, m.head_dim)
    to_PT2KD, heads = writes[1].view(P, T, 2, -1, m.head_dim), _kv_heads(rt)
    K = len(heads) // P
    k_TGD = rotate(kv_T2GD[:, 0], cos, sin)
    for r in range(P):
        mine = heads[r * K:(r + 1) * K]
        to_PT2KD[r, :, 0].copy_(k_TGD[:, mine[0]:mine[-1] + 1])
        to_PT2KD[r, :, 1].copy_(kv_T2GD[:, 1, mine[0]:mine[-1] + 1])


def a2a(rt, op, reads, writes):
    send, receive = (t.view(rt.P, -1).view(torch.uint8) for t in (reads[0], writes[0]))
    dist.all_to_all_single(receive, send, group=rt.group, async_op=False)


def copy(rt, op, reads, writes):
    rt.copy(writes[0], reads[0])


def attn(rt, op, reads, writes):
    part, lse = rt.kernel.forward(reads[0], reads[1], bool(op.args.get("causal")))
    if len(reads) > 2:
        merge(reads[2], reads[3], part, lse, writes[0])
        if writes[1].data_ptr() != reads[3].data_ptr():
            writes[1].copy_(reads[3])
    else:
        writes[0].copy_(part)
        writes[1].copy_(lse)


def proj(rt, op, reads, writes):
    (o, x_TC), (Wo,) = _given(rt, op, reads)
    _residual(x_TC, _all_heads(o, len(x_TC)), *Wo, out=writes[0])


def _residual(x_TC: torch.Tensor, a_TM: torch.Tensor, W_CM: torch.Tensor, *bias: torch.Tensor, out: torch.Tensor) -> None:
    """out = x + a W^T [+ bias]."""
    torch.addmm(x_TC, a_TM, W_CM.t(), out=out)
    for b_C in bias:
        out.add_(b_C)


def _subs(op: Op, *tensors: torch.Tensor):
    """Sub-chunks of tensors over their tokens."""
    return zip(*(t.tensor_split(min(op.args["sub"], len(t))) for t in tensors))


def ffn(rt, op, reads, writes):
    (h,), (norm2, up, down) = _given(rt, op, reads)
    for h_TC, y_TC, *kept in _subs(op, h, *writes):
        up_TU = F.linear(NORM[rt.model.kind](h_TC, *norm2, rt.model.norm_eps), *up)
        for to_TU in kept:
            to_TU.copy_(up_TU)
        _residual(h_TC, ACTIVATION[rt.model.kind](up_TU)[0], *down, out=y_TC)


def ce(rt, op, reads, writes):
    (x, label), (normf, (Whead,)) = _given(rt, op, reads)
    dx, loss, *dnormf, dWhead = writes
    eps, kind = rt.model.norm_eps, rt.model.kind
    if not _accumulate(op, 1):
        for each in writes[1:]:
            each.zero_()
    share = 1.0 / rt.valid if rt.valid else 0.0
    for x_TC, label_T, dx_TC in _subs(op, x, label, dx):
        xn_TC = NORM[kind](x_TC, *normf, eps)
        logp_TV = torch.log_softmax((xn_TC @ Whead.t()).float(), dim=-1)
        loss += F.nll_loss(logp_TV, label_T, ignore_index=IGNORE, reduction="sum") * share
        counts_T1 = (label_T != IGNORE).float().unsqueeze(1)
        grad_TV = logp_TV.exp_().scatter_add_(1, label_T.clamp(min=0).unsqueeze(1), -counts_T1).mul_(counts_T1 * share)
        grad_TV = grad_TV.to(x_TC.dtype)
        _add_mm(dWhead, grad_TV, xn_TC, True)
        part, *dweights = NORM_BWD[kind](x_TC, *normf, grad_TV @ Whead, eps)
        dx_TC.copy_(part)
        for into, dweight in zip(dnormf, dweights):
            into += dweight


def ffn_bwd(rt, op, reads, writes):
    (h, dy, *saved), (norm2, up, down) = _given(rt, op, reads)
    dh, *sums = writes
    dnorm2, dup, ddown = _groups(rt, op, sums)
    more, eps, kind = _accumulate(op, 1), rt.model.norm_eps, rt.model.kind
    for h_TC, dy_TC, dh_TC, *kept in _subs(op, h, dy, dh, *saved):
        hn_TC = NORM[kind](h_TC, *norm2, eps)
        act_TF, back = ACTIVATION[kind](*kept or [F.linear(hn_TC, *up)])
        _add_linear(ddown, dy_TC, act_TF, more)
        dup_TU = back(dy_TC @ down[0])
        _add_linear(dup, dup_TU, hn_TC, more)
        part, *dweights = NORM_BWD[kind](h_TC, *norm2, dup_TU @ up[0], eps)
        dh_TC.copy_(part.add_(dy_TC))
        for into, dweight in zip(dnorm2, dweights):
            into.add_(dweight) if more else into.copy_(dweight)
        more = True


def _groups(rt: Runtime, op: Op, sums: list) -> list:
    """Gradient accumulators by group, as _given groups weights."""
    flat = iter(sums)
    return [[next(flat) for _ in rt.model.groups[g[1:]]] for g in KINDS[op.kind].sums if g[1:] in rt.model.groups]


def _add_linear(into: list, grad_TN: torch.Tensor, input_TM: torch.Tensor, more: bool) -> None:
    """The gradients of a linear layer's weight and bias (+)= their parts."""
    _add_mm(into[0], grad_TN, input_TM, more)
    for b_N in into[1:]:
        part = grad_TN.sum(0, dtype=torch.float32)
        b_N.add_(part) if more else b_N.copy_(part)


def proj_bwd(rt, op, reads, writes):
    (dh_TC, o), (Wo,) = _given(rt, op, reads)
    T = len(dh_TC)
    do_THD = (dh_TC @ Wo[0]).view(T, rt.P, -1, rt.model.head_dim)
    writes[0].view(rt.P, T, -1, rt.model.head_dim).copy_(do_THD.transpose(0, 1))
    _add_linear(writes[1:], dh_TC, _all_heads(o, T), _accumulate(op, 1))


def attn_bwd(rt, op, reads, writes):
    q, kv, do, o, lse = reads[:5]
    dq, dk, dv = rt.kernel.backward(do, q, kv, o, lse, bool(op.args.get("causal")))
    _add(op, 0, writes[0], dq)
    _add(op, 1, writes[1][:, 0], dk)
    _add(op, 1, writes[1][:, 1], dv)


def q_bwd(rt, op, reads, writes):
    dq, x_TC, _ = reads[:3]
    m, T = rt.model, len(x_TC)
    dq_THD = rotate(_all_heads(dq, T).view(T, m.heads, m.head_dim), *_rope(rt, op, T, x_TC.device), inverse=True)
    _input_grad(rt, op, dq_THD.reshape(T, -1).to(x_TC.dtype), reads, writes)


def kv_bwd(rt, op, reads, writes):
    dkv, x_TC, _ = reads[:3]
    m, T, P = rt.model, len(x_TC), rt.P
    dkv_PT2KD = dkv.view(P, T, 2, -1, m.head_dim)
    if m.kv_heads < P:  # ranks that shared a KV head: their gradients sum
        dkv_PT2KD = dkv_PT2KD.unflatten(0, (m.kv_heads, P // m.kv_heads)).sum(1)
    dkv_T2GD = dkv_PT2KD.permute(1, 2, 0, 3, 4).reshape(T, 2, m.kv_heads, m.head_dim)
    dk_TGD = rotate(dkv_T2GD[:, 0], *_rope(rt, op, T, x_TC.device), inverse=True)
    flat = torch.stack((dk_TGD, dkv_T2GD[:, 1]), dim=1).view(T, -1).to(x_TC.dtype)
    _input_grad(rt, op, flat, reads, writes)


def _input_grad(rt, op, dproj_TM, reads, writes):
    """dx = what it was + norm's backward of (dproj W); the gradients of norm1 and of the projection gain their parts."""
    (_, x_TC, rest_TC), (norm1, W) = _given(rt, op, reads)
    dx_TC, *sums = writes
    dnorm1, dW = _groups(rt, op, sums)
    eps, kind = rt.model.norm_eps, rt.model.kind
    _add_linear(dW, dproj_TM, NORM[kind](x_TC, *norm1, eps), _accumulate(op, len(writes) - 1))
    part, *dweights = NORM_BWD[kind](x_TC, *norm1, dproj_TM @ W[0], eps)
    dx_TC.copy_(part.add_(rest_TC))
    for k, (into, dweight) in enumerate(zip(dnorm1, dweights), 1):
        _add(op, k, into, dweight)


LAUNCHERS = {
    "qkv": qkv, "a2a": a2a, "offload": copy, "reload": copy, "attn": attn, "proj": proj, "ffn": ffn, "ce": ce,
    "ffn_bwd": ffn_bwd, "proj_bwd": proj_bwd, "attn_bwd": attn_bwd, "q_bwd": q_bwd, "kv_bwd": kv_bwd,
}
