"""Norms, activations, RoPE and cross entropy on one chunk, forward and backward, statistics and angles in fp32 or better.

    NORM[kind](x_TC, *weights, eps)            RMSNorm (weight) for llama, LayerNorm (weight, bias) for gpt
    NORM_BWD[kind](...)                        its gradients, written where they belong
    ACTIVATION[kind](up_TU)                    SwiGLU (gate and up side by side) or GELU
    ACTIVATION_BWD[kind](up_TU, grad_TF)       the gradient of up; grad becomes the activation

GELU is the tanh form: GPT-2's and GPT-3's, and what Megatron's fused bias-GELU computes.
"""
from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.deal import IGNORE
from engine.fused import fused


@fused
def rms_norm(x_TC: torch.Tensor, weight_C: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight, in x's dtype."""
    x = x_TC.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return (x * weight_C.float()).to(x_TC.dtype)


def rms_norm_bwd(x_TC, weight_C, grad_TC, rest_TC, dx_TC, dweight_C, eps: float, more: bool) -> None:
    """dx = [rest +] the norm's backward of grad; dweight (fp32) (+)= its part. rest may be None, or dx itself. Linear in grad, so parts
    of a gradient can go through one by one."""
    _gain(dweight_C, _rms_norm_bwd(x_TC, weight_C, grad_TC, rest_TC, dx_TC, eps), more)


@fused
def _rms_norm_bwd(x_TC, weight_C, grad_TC, rest_TC, dx_TC, eps: float) -> torch.Tensor:
    """The part of dweight."""
    x, g = x_TC.float(), grad_TC.float()
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    unit = x * scale
    part_C = (g * unit).sum(0)
    g = g * weight_C.float()
    _put(dx_TC, scale * (g - unit * (g * unit).mean(-1, keepdim=True)), rest_TC)
    return part_C


@fused
def layer_norm(x_TC: torch.Tensor, weight_C: torch.Tensor, bias_C: torch.Tensor, eps: float) -> torch.Tensor:
    """(x - mean(x)) / std(x) * weight + bias, in x's dtype."""
    return F.layer_norm(x_TC.float(), weight_C.shape, weight_C.float(), bias_C.float(), eps).to(x_TC.dtype)


def layer_norm_bwd(x_TC, weight_C, bias_C, grad_TC, rest_TC, dx_TC, dweight_C, dbias_C, eps: float, more: bool) -> None:
    """As rms_norm_bwd, with a bias."""
    for into, part in zip((dweight_C, dbias_C), _layer_norm_bwd(x_TC, weight_C, grad_TC, rest_TC, dx_TC, eps)):
        _gain(into, part, more)


@fused
def _layer_norm_bwd(x_TC, weight_C, grad_TC, rest_TC, dx_TC, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """The parts of dweight and dbias."""
    x, g = x_TC.float(), grad_TC.float()
    x = x - x.mean(-1, keepdim=True)
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    unit = x * scale
    parts = (g * unit).sum(0), g.sum(0)
    g = g * weight_C.float()
    _put(dx_TC, scale * (g - g.mean(-1, keepdim=True) - unit * (g * unit).mean(-1, keepdim=True)), rest_TC)
    return parts


def _gain(into: torch.Tensor, part: torch.Tensor, more: bool) -> None:
    into.add_(part) if more else into.copy_(part)


def _put(into: torch.Tensor, part: torch.Tensor, rest: torch.Tensor | None) -> None:
    into.copy_(part if rest is None else part.add_(rest))


@fused
def swiglu(up_TU: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up."""
    gate_TF, up_TF = up_TU.chunk(2, dim=-1)
    return F.silu(gate_TF) * up_TF


@fused
def swiglu_bwd(up_TU: torch.Tensor, grad_TF: torch.Tensor) -> torch.Tensor:
    """The gradient of up_TU, given that of swiglu(up_TU), which is overwritten with swiglu(up_TU)."""
    gate_TF, up_TF = up_TU.chunk(2, dim=-1)
    act_TF = F.silu(gate_TF)
    dgate_TF = torch.ops.aten.silu_backward(grad_TF * up_TF, gate_TF)
    dup_TU = torch.cat((dgate_TF, grad_TF * act_TF), dim=-1)
    grad_TF.copy_(act_TF * up_TF)
    return dup_TU


@fused
def gelu(up_TF: torch.Tensor) -> torch.Tensor:
    """GELU, tanh form."""
    return F.gelu(up_TF, approximate="tanh")


@fused
def gelu_bwd(up_TF: torch.Tensor, grad_TF: torch.Tensor) -> torch.Tensor:
    """The gradient of up_TF, given that of gelu(up_TF), which is overwritten with gelu(up_TF)."""
    dup_TF = torch.ops.aten.gelu_backward(grad_TF, up_TF, approximate="tanh")
    grad_TF.copy_(F.gelu(up_TF, approximate="tanh"))
    return dup_TF


NORM = {"llama": rms_norm, "gpt": layer_norm}
NORM_BWD = {"llama": rms_norm_bwd, "gpt": layer_norm_bwd}
ACTIVATION = {"llama": swiglu, "gpt": gelu}
ACTIVATION_BWD = {"llama": swiglu_bwd, "gpt": gelu_bwd}


def angles(first: int, tokens: int, rotary_dim: int, theta: float, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin), each [tokens, 1, rotary_dim / 2] fp32, of global positions first .. first + tokens. Angles in fp64: positions reach millions."""
    return _angles(torch.arange(first, first + tokens, dtype=torch.float64, device=device), rotary_dim, theta)


@fused
def _angles(position_T: torch.Tensor, rotary_dim: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    frequency = theta ** -(torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=position_T.device) / rotary_dim)
    angle = torch.outer(position_T, frequency).unsqueeze(1)
    return angle.cos().float(), angle.sin().float()


def rotate(x_THD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    """RoPE over halves of the head's first dims, as many as there are angles for; the rest passes. fp32. inverse=True is its
    transpose, the backward. Without cat, which would keep its parts when compiled."""
    x, rotary = x_THD.float(), 2 * cos.shape[-1]
    halves_TH2R = x[..., :rotary].unflatten(-1, (2, -1))
    sign_21 = (torch.arange(2, device=x.device) * 2 - 1).unsqueeze(1) * (-1 if inverse else 1)
    turned = (halves_TH2R * cos.unsqueeze(-2) + halves_TH2R.flip(-2) * sign_21 * sin.unsqueeze(-2)).flatten(-2)
    if rotary == x.shape[-1]:
        return turned
    rotates_D = torch.arange(x.shape[-1], device=x.device) < rotary
    return torch.where(rotates_D, F.pad(turned, (0, x.shape[-1] - rotary)), x)


def rotate_keys(kv_T2GD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    """The same of keys; values pass."""
    kv, heads = kv_T2GD.flatten(1, 2), kv_T2GD.shape[2]
    key_H1 = (torch.arange(2 * heads, device=kv.device) < heads).unsqueeze(1)
    return torch.where(key_H1, rotate(kv, cos, sin, inverse), kv.float()).unflatten(1, (2, -1))


@fused
def rope_q(q_THD: torch.Tensor, cos_T1R: torch.Tensor, sin_T1R: torch.Tensor, to_PTHD: torch.Tensor) -> None:
    """Rotated queries, heads dealt to ranks: rank p gets heads p H ... of P H."""
    to_PTHD.copy_(rotate(q_THD, cos_T1R, sin_T1R).unflatten(1, (len(to_PTHD), -1)).transpose(0, 1))


@fused
def rope_kv(kv_T2GD: torch.Tensor, cos_T1R: torch.Tensor, sin_T1R: torch.Tensor, to_PT2KD: torch.Tensor) -> None:
    """Rotated keys, and values, heads dealt to ranks; a head goes to several ranks where there are fewer heads than ranks."""
    P, G = len(to_PT2KD), kv_T2GD.shape[2]
    kv = rotate_keys(kv_T2GD, cos_T1R, sin_T1R)
    if G < P:
        kv = kv.repeat_interleave(P // G, dim=2)
    to_PT2KD.copy_(kv.unflatten(2, (P, -1)).permute(2, 0, 1, 3, 4))


@fused
def rope_q_bwd(dq_PTHD: torch.Tensor, cos_T1R: torch.Tensor, sin_T1R: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The gradient of the query projection's output [T, P H D]."""
    return rotate(dq_PTHD.transpose(0, 1).flatten(1, 2), cos_T1R, sin_T1R, inverse=True).flatten(1).to(dtype)


@fused
def rope_kv_bwd(dkv_PT2KD: torch.Tensor, cos_T1R: torch.Tensor, sin_T1R: torch.Tensor, heads: int, dtype: torch.dtype) -> torch.Tensor:
    """The gradient of the key and value projection's output [T, 2 heads D]. Ranks that shared a head: their gradients sum."""
    P = len(dkv_PT2KD)
    if heads < P:
        dkv_PT2KD = dkv_PT2KD.unflatten(0, (heads, P // heads)).sum(1)
    dkv_T2GD = dkv_PT2KD.permute(1, 2, 0, 3, 4).flatten(2, 3)
    return rotate_keys(dkv_T2GD, cos_T1R, sin_T1R, inverse=True).flatten(1).to(dtype)


@fused
def add_attn_grads(dq_SHD, dk_TKD, dv_TKD, into_SHD, into_T2KD, more_q: bool, more_kv: bool) -> None:
    """dq and dkv accumulators (fp32) (+)= what one pair of chunks gives."""
    _gain(into_SHD, dq_SHD, more_q)
    _gain(into_T2KD, torch.stack((dk_TKD, dv_TKD), dim=1), more_kv)


def add_columns(grad_TN: torch.Tensor, into_N: torch.Tensor, more: bool) -> None:
    """A bias' gradient (fp32) (+)= the sum over tokens."""
    _gain(into_N, _columns(grad_TN), more)


@fused
def _columns(grad_TN: torch.Tensor) -> torch.Tensor:
    return grad_TN.float().sum(0)


def cross_entropy(logits_TV: torch.Tensor, label_T: torch.Tensor, loss_1: torch.Tensor, share: float) -> None:
    """loss += share * the sum over tokens that count; logits become their gradients. A token whose label is IGNORE does not count; any
    other label below 0 makes the loss NaN."""
    label_T1 = label_T.unsqueeze(1)
    picked_T1 = logits_TV.gather(1, label_T1.clamp(min=0))  # by itself: torch 2.11 compiles it to come after logits are overwritten
    _cross_entropy(logits_TV, label_T1, picked_T1, loss_1, torch.full_like(loss_1, share))  # a number would be compiled for


@fused
def _cross_entropy(logits_TV: torch.Tensor, label_T1: torch.Tensor, picked_T1: torch.Tensor, loss_1: torch.Tensor, share_1: torch.Tensor) -> None:
    logits = logits_TV.float()
    logp_TV = torch.log_softmax(logits, dim=-1)
    counts_T1 = label_T1 != IGNORE
    picked_logp_T1 = picked_T1.float() - logits.amax(-1, keepdim=True) + logp_TV.amax(-1, keepdim=True)
    loss_1.sub_(share_1 * picked_logp_T1.masked_fill(label_T1 < 0, float("nan")).masked_fill(~counts_T1, 0).sum())
    hit_TV = torch.arange(logits_TV.shape[1], device=logits_TV.device) == label_T1
    logits_TV.copy_((logp_TV.exp() - hit_TV.float()) * (counts_T1 * share_1))
