"""Adapter for flash-attn-4, for Hopper and Blackwell (GQA as it is). Forward writes where it is told to.

Workspace: forward, what it is not given; backward, its results and the fp32 sums of dq, with GQA of dk and dv too.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module

import torch

from engine.kernels.direct import bound
from engine.kernels.limits import over
from sim.model import Model

NAME = "flash-attn-4"
PACKAGE, MODULE = "flash-attn-4", "flash_attn.cute.interface"
MOST_HEAD_DIM = 128
ALIGNED = 16
"""Bytes; the package copies what is not."""
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
    operands = q_SHD[None], *_keys_and_values(kv_T2KD), out_SHD[None], lse_HS[None]
    form = causal, *((t.dtype, t.shape, t.stride(), t.data_ptr() % ALIGNED) for t in operands)
    if form in _launches:
        _launches[form](*operands)
    else:
        _launches[form] = bound(import_module(MODULE)._flash_attn_fwd, partial(_package, causal), operands)
    return out_SHD, lse_HS


_launches: dict[tuple, Callable] = {}
"""What is called, by the form of the operands."""


def _package(causal: bool, q_1SHD, k_1TKD, v_1TKD, out_1SHD, lse_1HS) -> None:
    import_module(MODULE)._flash_attn_fwd(q_1SHD, k_1TKD, v_1TKD, causal=causal, out=out_1SHD, lse=lse_1HS)


def _keys_and_values(kv_T2KD) -> tuple[torch.Tensor, torch.Tensor]:
    return kv_T2KD[None, :, 0], kv_T2KD[None, :, 1]


def backward(dout_SHD, q_SHD, kv_T2KD, out_SHD, lse_HS, causal: bool):
    """(dq [S, H, D], dk [T, K, D], dv [T, K, D]); out and lse are those of the whole row."""
    grads = import_module(MODULE)._flash_attn_bwd(
        q_SHD[None], *_keys_and_values(kv_T2KD), out_SHD[None], dout_SHD[None], lse_HS[None], causal=causal, deterministic=torch.are_deterministic_algorithms_enabled())
    return tuple(g[0] for g in grads[:3])
