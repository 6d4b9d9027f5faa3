"""RMSNorm and RoPE on one chunk, forward and backward, statistics and angles in fp32 or better."""
from __future__ import annotations

import torch


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


def angles(first: int, tokens: int, head_dim: int, theta: float, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin), each [tokens, 1, head_dim / 2] fp32, of global positions first .. first + tokens. Angles in fp64: positions reach millions."""
    frequency = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64, device=device) / head_dim)
    angle = torch.outer(torch.arange(first, first + tokens, dtype=torch.float64, device=device), frequency).unsqueeze(1)
    return angle.cos().float(), angle.sin().float()


def rotate(x_THD: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, inverse: bool = False) -> torch.Tensor:
    """RoPE over halves of the head, fp32. inverse=True is its transpose, the backward."""
    a, b = x_THD.float().chunk(2, dim=-1)
    sin = -sin if inverse else sin
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
