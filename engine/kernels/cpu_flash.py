"""Adapter for the flash kernel inside torch on CPU. Workspace: its results (out and lse; dq, dk and dv), which it allocates.

    forward:  q_SHD kv_T2KD -> out_SHD lse_HS          mask full, or causal (S = T):  1
    backward: dout_SHD q kv out lse -> dq_SHD dk_TKD dv_TKD                           1 1
"""
from __future__ import annotations

import torch

from sim.model import Model

NAME = "torch CPU flash"
PACKAGE, MODULE = "torch", "torch"
_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def refuses(model: Model, dtype: str, capability: tuple[int, int] | None, elements: int = 0) -> str | None:
    """Why it cannot run these shapes, whose largest tensor has so many elements, on a device of this compute capability (None: a CPU), or None."""
    return None if capability is None else "runs on a CPU"


def _batched(x_SHD: torch.Tensor) -> torch.Tensor:
    return x_SHD.transpose(0, 1).unsqueeze(0)


def _spread(x_SKD: torch.Tensor, heads: int) -> torch.Tensor:
    """Each KV head as often as query heads read it, for backward, which knows no groups; a single one without a copy."""
    K = x_SKD.shape[1]
    return x_SKD.expand(-1, heads, -1) if K == 1 else x_SKD.repeat_interleave(heads // K, dim=1) if K < heads else x_SKD


def forward(q_SHD: torch.Tensor, kv_T2KD: torch.Tensor, causal: bool, out_SHD=None, lse_HS=None) -> tuple[torch.Tensor, torch.Tensor]:
    """(out [S, H, D] in q's dtype, lse [H, S] fp32) of its own, scale 1/sqrt(D)."""
    k, v = (_batched(kv_T2KD[:, c]) for c in (0, 1))
    out, lse = _forward(_batched(q_SHD), k, v, 0.0, causal)
    return out[0].transpose(0, 1), lse[0]


def backward(dout_SHD, q_SHD, kv_T2KD, out_SHD, lse_HS, causal: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dq [S, H, D], dk [T, K, D], dv [T, K, D]) of these pairs; out and lse are those of the whole row. K summed over its group, in fp32."""
    H, K = q_SHD.shape[1], kv_T2KD.shape[2]
    k, v = (_batched(_spread(kv_T2KD[:, c], H)) for c in (0, 1))
    grads = _backward(_batched(dout_SHD), _batched(q_SHD), k, v, _batched(out_SHD), lse_HS.unsqueeze(0), 0.0, causal)
    dq, dk, dv = (g[0].transpose(0, 1) for g in grads)
    if H != K:
        dk, dv = (g.unflatten(1, (K, H // K)).sum(2, dtype=torch.float32) for g in (dk, dv))
    return dq, dk, dv
