"""Adapter for flash-attn 3, for Hopper, built from the source of flash-attn (GQA as it is).

Its signatures changed names but not places: up to `causal` all goes by place. Workspace: its results, and backward's fp32 sums of dq,
with GQA of dk and dv too.
"""
from __future__ import annotations

from importlib import import_module

import torch

from engine.kernels.limits import over
from sim.model import Model

NAME = "flash-attn-3"
PACKAGE, MODULE = "flash-attn-3", "flash_attn_interface"


def refuses(model: Model, dtype: str, capability: tuple[int, int] | None, elements: int = 0) -> str | None:
    """Why it cannot run these shapes, whose largest tensor has so many elements, on a device of this compute capability, or None."""
    if capability is not None and capability >= (10, 0):
        return "runs on no GPU of compute capability 10.0 or more"
    return over(model, dtype, capability, 256, least=(9, 0))


def forward(q_SHD, kv_T2KD, causal: bool, out_SHD=None, lse_HS=None):
    """(out [S, H, D], lse [H, S] fp32) of its own, scale 1/sqrt(D)."""
    k, v = (kv_T2KD[None, :, c] for c in (0, 1))
    out, lse, *_ = import_module(MODULE)._flash_attn_forward(q_SHD[None], k, v, *[None] * 20, q_SHD.shape[-1] ** -0.5, causal)
    return out[0], lse[0]


def backward(dout_SHD, q_SHD, kv_T2KD, out_SHD, lse_HS, causal: bool):
    """(dq [S, H, D], dk [T, K, D], dv [T, K, D]); out and lse are those of the whole row."""
    q, k, v = q_SHD[None], kv_T2KD[None, :, 0], kv_T2KD[None, :, 1]
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    import_module(MODULE)._flash_attn_backward(
        dout_SHD[None], q, k, v, out_SHD[None], lse_HS[None], *[None] * 6, dq, dk, dv, q.shape[-1] ** -0.5, causal,
        deterministic=torch.are_deterministic_algorithms_enabled())
    return dq[0], dk[0], dv[0]
