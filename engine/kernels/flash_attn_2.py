"""Adapter for flash-attn 2 (2.7 or later), for Ampere (GQA as it is).

Workspace: its results; backward's fp32 sum of dq; with GQA dk and dv of every query head, which it then sums.
"""
from __future__ import annotations

from importlib import import_module

import torch

from engine.kernels.limits import over
from sim.model import Model

NAME = "flash-attn-2"
PACKAGE, MODULE = "flash-attn", "flash_attn.flash_attn_interface"


def refuses(model: Model, dtype: str, capability: tuple[int, int] | None, elements: int = 0) -> str | None:
    """Why it cannot run these shapes, whose largest tensor has so many elements, on a device of this compute capability, or None."""
    return over(model, dtype, capability, 256)


def _common(q_SHD: torch.Tensor, causal: bool) -> dict:
    """What both directions are told."""
    return {"dropout_p": 0.0, "softmax_scale": q_SHD.shape[-1] ** -0.5, "causal": causal, "window_size_left": -1, "window_size_right": -1,
            "softcap": 0.0, "alibi_slopes": None}


def forward(q_SHD, kv_T2KD, causal: bool, out_SHD=None, lse_HS=None):
    """(out [S, H, D], lse [H, S] fp32) of its own, scale 1/sqrt(D)."""
    k, v = (kv_T2KD[None, :, c] for c in (0, 1))
    out, lse, *_ = import_module(MODULE)._flash_attn_forward(q_SHD[None], k, v, **_common(q_SHD, causal), return_softmax=False)
    return out[0], lse[0]


def backward(dout_SHD, q_SHD, kv_T2KD, out_SHD, lse_HS, causal: bool):
    """(dq [S, H, D], dk [T, K, D], dv [T, K, D]); out and lse are those of the whole row."""
    q, k, v = q_SHD[None], kv_T2KD[None, :, 0], kv_T2KD[None, :, 1]
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    import_module(MODULE)._flash_attn_backward(
        dout_SHD[None], q, k, v, out_SHD[None], lse_HS[None], dq, dk, dv, **_common(q_SHD, causal),
        deterministic=torch.are_deterministic_algorithms_enabled())
    return dq[0], dk[0], dv[0]
