"""Launchers: one a kind of op. Each takes the runtime, the op, its reads and its writes as tensors, and returns nothing.

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
from engine.pointwise import angles, rms_norm, rms_norm_bwd, rotate
from engine.merge import merge
from sim.model import Model
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
    return angles(op.args["at"] + rt.rank * tokens, tokens, rt.model.head_dim, rt.model.rope_theta, device)


def _kv_heads(rt: Runtime) -> list[int]:
    """For each rank in turn, the KV heads it works on: a part of them, or one that several ranks share."""
    K = max(1, rt.model.kv_heads // rt.P)
    return [r * rt.model.kv_heads // rt.P + k for r in range(rt.P) for k in range(K)]


def _all_heads(x_PTHD: torch.Tensor, T: int) -> torch.Tensor:
    """Token-sharded [P, T, H, D] to [T, P H D]."""
    return x_PTHD.view(-1, T, *x_PTHD.shape[-2:]).transpose(0, 1).reshape(T, -1)


def qkv(rt, op, reads, writes):
    x_TC, norm1, Wq, Wkv = reads
    m, T, P = rt.model, op.args["n"] // rt.P, rt.P
    cos, sin = _rope(rt, op, T, x_TC.device)
    xn_TC = rms_norm(x_TC, norm1, m.norm_eps)
    q_THD = rotate((xn_TC @ Wq.t()).view(T, m.heads, m.head_dim), cos, sin)
    writes[0].view(P, T, m.heads // P, m.head_dim).copy_(q_THD.view(T, P, -1, m.head_dim).transpose(0, 1))
    kv_T2GD = (xn_TC @ Wkv.t()).view(T, 2, m.kv_heads, m.head_dim)
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
    o, x_TC, Wo = reads
    torch.addmm(x_TC, _all_heads(o, len(x_TC)), Wo.t(), out=writes[0])


def _subs(op: Op, *tensors: torch.Tensor):
    """Sub-chunks of tensors over their tokens."""
    return zip(*(t.tensor_split(min(op.args["sub"], len(t))) for t in tensors))


def ffn(rt, op, reads, writes):
    h, norm2, Wgu, Wd = reads
    for h_TC, y_TC in _subs(op, h, writes[0]):
        gate_TF, up_TF = (rms_norm(h_TC, norm2, rt.model.norm_eps) @ Wgu.t()).chunk(2, dim=-1)
        torch.addmm(h_TC, F.silu(gate_TF) * up_TF, Wd.t(), out=y_TC)


def ce(rt, op, reads, writes):
    x, label, normf, Whead = reads[:4]
    dx, loss, dnormf, dWhead = writes
    more, eps = _accumulate(op, 1), rt.model.norm_eps
    if not more:
        loss.zero_(), dnormf.zero_(), dWhead.zero_()
    share = 1.0 / rt.valid if rt.valid else 0.0
    for x_TC, label_T, dx_TC in _subs(op, x, label, dx):
        xn_TC = rms_norm(x_TC, normf, eps)
        logp_TV = torch.log_softmax((xn_TC @ Whead.t()).float(), dim=-1)
        loss += F.nll_loss(logp_TV, label_T, ignore_index=IGNORE, reduction="sum") * share
        counts_T1 = (label_T != IGNORE).float().unsqueeze(1)
        grad_TV = logp_TV.exp_().scatter_add_(1, label_T.clamp(min=0).unsqueeze(1), -counts_T1).mul_(counts_T1 * share)
        grad_TV = grad_TV.to(x_TC.dtype)
        _add_mm(dWhead, grad_TV, xn_TC, True)
        part, dweight = rms_norm_bwd(x_TC, normf, grad_TV @ Whead, eps)
        dx_TC.copy_(part)
        dnormf += dweight


def ffn_bwd(rt, op, reads, writes):
    h, dy, norm2, Wgu, Wd = reads[:5]
    dh, dnorm2, dWgu, dWd = writes
    more, eps = _accumulate(op, 1), rt.model.norm_eps
    for h_TC, dy_TC, dh_TC in _subs(op, h, dy, dh):
        hn_TC = rms_norm(h_TC, norm2, eps)
        gate_TF, up_TF = (hn_TC @ Wgu.t()).chunk(2, dim=-1)
        act_TF = F.silu(gate_TF)
        _add_mm(dWd, dy_TC, act_TF * up_TF, more)
        dact_TF = dy_TC @ Wd
        dgate_TF = torch.ops.aten.silu_backward(dact_TF * up_TF, gate_TF)
        dgu = torch.cat((dgate_TF, dact_TF * act_TF), dim=-1)
        _add_mm(dWgu, dgu, hn_TC, more)
        part, dweight = rms_norm_bwd(h_TC, norm2, dgu @ Wgu, eps)
        dh_TC.copy_(part.add_(dy_TC))
        dnorm2.add_(dweight) if more else dnorm2.copy_(dweight)
        more = True


def proj_bwd(rt, op, reads, writes):
    dh_TC, o, Wo = reads[:3]
    T = len(dh_TC)
    do_THD = (dh_TC @ Wo).view(T, rt.P, -1, rt.model.head_dim)
    writes[0].view(rt.P, T, -1, rt.model.head_dim).copy_(do_THD.transpose(0, 1))
    _add_mm(writes[1], dh_TC, _all_heads(o, T), _accumulate(op, 1))


def attn_bwd(rt, op, reads, writes):
    q, kv, do, o, lse = reads[:5]
    dq, dk, dv = rt.kernel.backward(do, q, kv, o, lse, bool(op.args.get("causal")))
    _add(op, 0, writes[0], dq)
    _add(op, 1, writes[1][:, 0], dk)
    _add(op, 1, writes[1][:, 1], dv)


def q_bwd(rt, op, reads, writes):
    dq, x_TC, dh_TC, norm1, Wq = reads[:5]
    m, T = rt.model, len(x_TC)
    dq_THD = rotate(_all_heads(dq, T).view(T, m.heads, m.head_dim), *_rope(rt, op, T, x_TC.device), inverse=True)
    _input_grad(rt, op, dq_THD.reshape(T, -1).to(x_TC.dtype), x_TC, dh_TC, norm1, Wq, writes)


def kv_bwd(rt, op, reads, writes):
    dkv, x_TC, dx_TC, norm1, Wkv = reads[:5]
    m, T, P = rt.model, len(x_TC), rt.P
    dkv_PT2KD = dkv.view(P, T, 2, -1, m.head_dim)
    if m.kv_heads < P:  # ranks that shared a KV head: their gradients sum
        dkv_PT2KD = dkv_PT2KD.unflatten(0, (m.kv_heads, P // m.kv_heads)).sum(1)
    dkv_T2GD = dkv_PT2KD.permute(1, 2, 0, 3, 4).reshape(T, 2, m.kv_heads, m.head_dim)
    dk_TGD = rotate(dkv_T2GD[:, 0], *_rope(rt, op, T, x_TC.device), inverse=True)
    flat = torch.stack((dk_TGD, dkv_T2GD[:, 1]), dim=1).view(T, -1).to(x_TC.dtype)
    _input_grad(rt, op, flat, x_TC, dx_TC, norm1, Wkv, writes)


def _input_grad(rt, op, dproj_TM, x_TC, rest_TC, norm1, W_MC, writes):
    """dx = rest + norm's backward of (dproj W); dnorm1 and dW gain their parts."""
    dx_TC, dnorm1, dW = writes
    eps = rt.model.norm_eps
    _add_mm(dW, dproj_TM, rms_norm(x_TC, norm1, eps), _accumulate(op, 2))
    part, dweight = rms_norm_bwd(x_TC, norm1, dproj_TM @ W_MC, eps)
    dx_TC.copy_(part.add_(rest_TC))
    _add(op, 1, dnorm1, dweight)


LAUNCHERS = {
    "qkv": qkv, "a2a": a2a, "offload": copy, "reload": copy, "attn": attn, "proj": proj, "ffn": ffn, "ce": ce,
    "ffn_bwd": ffn_bwd, "proj_bwd": proj_bwd, "attn_bwd": attn_bwd, "q_bwd": q_bwd, "kv_bwd": kv_bwd,
}
