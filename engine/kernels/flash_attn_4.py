"""Adapter for flash-attn-4, for Hopper and Blackwell (GQA as it is). Forward writes where it is told to.

Workspace: forward, what it is not given; backward, its results and the fp32 sums of dq, with GQA of dk and dv too.
"""
from __future__ import annotations

from importlib import import_module

import torch

from engine.kernels.limits import over
from sim.model import Model

NAME = "flash-attn-4"
PACKAGE, MODULE = "flash-attn-4", "flash_attn.cute.interface"
MOST_HEAD_DIM = 128
PROVEN = {9: (64, 128)}
"""Head dims whose gradients were found right, by major compute capability; elsewhere nothing was measured. On Hopper 4.0.0b36 is silently wrong
at 80 (dq off by 59%; tests/cuda/test_kernels.py)."""


def refuses(model: Model, dtype: str, capability: tuple[int, int] | None, elements: int = 0) -> str | None:
    """Why it cannot run these shapes, whose largest tensor has so many elements, on a device of this compute capability, or None."""
    if reason := over(model, dtype, capability, MOST_HEAD_DIM, least=(9, 0)):
        return reason
    proven = PROVEN.get(capability[0], (model.head_dim,))
    if model.head_dim not in proven:
        return f"is used at head_dim {' and '.join(map(str, proven))} only, not {model.head_dim}: its dq is wrong at 80 on Hopper"
    return None


def forward(q_SHD, kv_T2KD, causal: bool, out_SHD=None, lse_HS=None):
    """(out [S, H, D], lse [H, S] fp32), scale 1/sqrt(D); written into out and lse where they are given."""
    S, H, _ = q_SHD.shape
    out_SHD = torch.empty_like(q_SHD) if out_SHD is None else out_SHD
    lse_HS = torch.empty(H, S, dtype=torch.float32, device=q_SHD.device) if lse_HS is None else lse_HS
    k, v = (kv_T2KD[None, :, c] for c in (0, 1))
    import_module(MODULE)._flash_attn_fwd(q_SHD[None], k, v, causal=causal, out=out_SHD[None], lse=lse_HS[None])
    return out_SHD, lse_HS


def backward(dout_SHD, q_SHD, kv_T2KD, out_SHD, lse_HS, causal: bool):
    """(dq [S, H, D], dk [T, K, D], dv [T, K, D]); out and lse are those of the whole row."""
    k, v = (kv_T2KD[None, :, c] for c in (0, 1))
    grads = import_module(MODULE)._flash_attn_bwd(
        q_SHD[None], k, v, out_SHD[None], dout_SHD[None], lse_HS[None], causal=causal, deterministic=torch.are_deterministic_algorithms_enabled())
    return tuple(g[0] for g in grads[:3])
