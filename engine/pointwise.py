"""Norms, activations and RoPE on one chunk, forward and backward, statistics and angles in fp32 or better.

    NORM[kind](x_TC, *weights, eps)              RMSNorm (weight) for llama, LayerNorm (weight, bias) for gpt
    NORM_BWD[kind](x_TC, *weights, grad_TC, eps)  its (dx, dweight[, dbias])
    ACTIVATION[kind](up_TU)                      SwiGLU (gate and up side by side) or GELU, as (activation_TF, its backward)

GELU is the tanh form: GPT-2's and GPT-3's, and what Megatron's fused bias-GELU computes.
"""
from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F


def rms_norm(x_TC: torch.Tensor, weight_C: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight, in x's dtype."""
    x = x_TC.float()
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return (x * weight_C.float()).to(x_TC.dtype)


def rms_norm_bwd(x_TC: torch.Tensor, weight_C: torch.Tensor, grad_TC: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(dx [T, C] fp32, dweight [C] fp32). Linear in grad, so parts of a gradient can go through one by one."""
    x, g = x_TC.float(), grad_TC.float()
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    unit = x * scale
    dweight = (g * unit).sum(0)
    g = g * weight_C.float()
    return scale * (g - unit * (g * unit).mean(-1, keepdim=True)), dweight


def layer_norm(x_TC: torch.Tensor, weight_C: torch.Tensor, bias_C: torch.Tensor, eps: float) -> torch.Tensor:
    """(x - mean(x)) / std(x) * weight + bias, in x's dtype."""
    return F.layer_norm(x_TC.float(), weight_C.shape, weight_C.float(), bias_C.float(), eps).to(x_TC.dtype)


def layer_norm_bwd(x_TC: torch.Tensor, weight_C: torch.Tensor, bias_C: torch.Tensor, grad_TC: torch.Tensor, eps: float) -> tuple[torch.Tensor, ...]:
    """(dx [T, C] fp32, dweight [C] fp32, dbias [C] fp32). Linear in grad, as above."""
    x, g = x_TC.float(), grad_TC.float()
    x = x - x.mean(-1, keepdim=True)
    scale = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    unit = x * scale
    dweight, dbias = (g * unit).sum(0), g.sum(0)
    g = g * weight_C.float()
    return scale * (g - g.mean(-1, keepdim=True) - unit * (g * unit).mean(-1, keepdim=True)), dweight, dbias


def swiglu(up_TU: torch.Tensor) -> tuple[torch.Tensor, Callable]:
    """silu(gate) * up."""
    gate_TF, up_TF = up_TU.chunk(2, dim=-1)
    act_TF = F.silu(gate_TF)

    def backward(grad_TF: torch.Tensor) -> torch.Tensor:
        dgate_TF = torch.ops.aten.silu_backward(grad_TF * up_TF, gate_TF)
        return torch.cat((dgate_TF, grad_TF * act_TF), dim=-1)

    return act_TF * up_TF, backward


def gelu(up_TF: torch.Tensor) -> tuple[torch.Tensor, Callable]:
    """GELU, tanh form."""
    return F.gelu(up_TF, approximate="tanh"), lambda grad_TF: torch.ops.aten.gelu_backward(grad_TF, up_TF, approximate="tanh")


NORM = {"llama": rms_norm, "gpt": layer_norm}
NORM_BWD = {"llama": rms_norm_bwd, "gpt": layer_norm_bwd}
ACTIVATION = {"llama": swiglu, "gpt": gelu}


def angles(first: int, tokens: int, rotary_dim: int, theta: float, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin), each [tokens, 1, rotary_dim / 2] fp32, of global positions first .. first + tokens. Angles in fp64: positions reach millions."""
    frequency = theta ** -(torch.arange(0, rotary_dim, 2, dtype=torch.float64, device=device) / rotary_dim)
    angle = torch.outer(torch.arange(first, first + tokens, dtype=torch.float64, device=device), frequency).unsqueeze(1)
    return angle.cos().float(), angle.sin().float()


def rotate(x_THD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    """RoPE over halves of the head's first dims, as many as there are angles for; the rest passes. fp32. inverse=True is its
    transpose, the backward."""
    x, rotary = x_THD.float(), 2 * cos.shape[-1]
    a, b = x[..., :rotary].chunk(2, dim=-1)
    sin = -sin if inverse else sin
    return torch.cat((a * cos - b * sin, b * cos + a * sin, x[..., rotary:]), dim=-1)
