"""Layers: the parts of a block in plain autograd, on the engine's own pointwise functions (fused on GPUs), for peers that bring attention only."""
from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.fused import fused
from engine.pointwise import ACTIVATION, NORM, rotate
from sim.model import Model

Weights = dict[str, torch.Tensor]
Angles = tuple[torch.Tensor, torch.Tensor]
"""(cos, sin), each [T, 1, R] fp32."""


def angles(positions_T: torch.Tensor, m: Model) -> Angles:
    """RoPE's of these tokens, as engine.pointwise has them, taken once."""
    frequency = m.rope_theta ** -(torch.arange(0, m.rotary_dim, 2, dtype=torch.float64, device=positions_T.device) / m.rotary_dim)
    angle = torch.outer(positions_T.double(), frequency).unsqueeze(1)
    return angle.cos().float(), angle.sin().float()


@fused
def turn(x_THD: torch.Tensor, cos_T1R: torch.Tensor, sin_T1R: torch.Tensor) -> torch.Tensor:
    """RoPE, in x's dtype."""
    return rotate(x_THD, cos_T1R, sin_T1R).to(x_THD.dtype)


def group(w: Weights, m: Model, name: str) -> list[torch.Tensor]:
    """[weight], or [weight, bias]."""
    return [w[n] for n in m.groups[name]]


def norm1(x_TC: torch.Tensor, w: Weights, m: Model) -> torch.Tensor:
    return NORM[m.kind](x_TC, *group(w, m, "norm1"), m.norm_eps)


def project_in(x_TC: torch.Tensor, w: Weights, m: Model, at: Angles) -> tuple[torch.Tensor, torch.Tensor]:
    """(q [T, H, D], kv [T, 2, G, D]), rotated; all heads."""
    T, xn_TC = len(x_TC), norm1(x_TC, w, m)
    q = F.linear(xn_TC, *group(w, m, "q")).view(T, m.heads, m.head_dim)
    k, v = F.linear(xn_TC, *group(w, m, "kv")).view(T, 2, m.kv_heads, m.head_dim).unbind(1)
    return turn(q, *at), torch.stack((turn(k, *at), v), dim=1)


def project_out(x_TC: torch.Tensor, o_THD: torch.Tensor, w: Weights, m: Model) -> torch.Tensor:
    """h = x + output projection."""
    return x_TC + F.linear(o_THD.flatten(1), *group(w, m, "o"))


def ffn(h_TC: torch.Tensor, w: Weights, m: Model) -> torch.Tensor:
    """y = h + FFN of h's norm."""
    hn_TC = NORM[m.kind](h_TC, *group(w, m, "norm2"), m.norm_eps)
    return h_TC + F.linear(ACTIVATION[m.kind](F.linear(hn_TC, *group(w, m, "up"))), *group(w, m, "down"))
