"""Adapter for cuDNN's attention inside torch (GQA as it is). Workspace: its results, and an fp32 dq that backward sums in."""
from __future__ import annotations

import torch

from engine.kernels.limits import over
from sim.model import Model

NAME = "cuDNN"
MOST_HEAD_DIM = 128
"""Backward's; forward alone would take 256 on Hopper."""
MOST_ELEMENTS = 1 << 31
"""cuDNN 9.19 is silently wrong beyond (one chunk of 132096 tokens, 128 heads, head_dim 128: dx through keys off by 9%)."""


def refuses(model: Model, dtype: str, capability: tuple[int, int] | None, elements: int = 0) -> str | None:
    """Why it cannot run these shapes, whose largest tensor has so many elements, on a device of this compute capability, or None."""
    if reason := over(model, dtype, capability, MOST_HEAD_DIM):
        return reason
    if elements >= MOST_ELEMENTS:
        return f"gives wrong gradients of keys from {MOST_ELEMENTS} elements a tensor on, and a chunk's queries have {elements}; use a smaller --chunk"
    return None


def _batched(x_SHD: torch.Tensor) -> torch.Tensor:
    return x_SHD.transpose(0, 1).unsqueeze(0)


def forward(q_SHD, kv_T2KD, causal: bool):
    """(out [S, H, D], lse [H, S] fp32), scale 1/sqrt(D)."""
    k, v = (_batched(kv_T2KD[:, c]) for c in (0, 1))
    found = torch.ops.aten._scaled_dot_product_cudnn_attention(_batched(q_SHD), k, v, None, True, 0.0, causal, False)
    return found[0][0].transpose(0, 1), found[1].view(q_SHD.shape[1], q_SHD.shape[0])


def backward(dout_SHD, q_SHD, kv_T2KD, out_SHD, lse_HS, causal: bool):
    """(dq [S, H, D], dk [T, K, D], dv [T, K, D]); out and lse are those of the whole row."""
    q = _batched(q_SHD)
    k, v = (_batched(kv_T2KD[:, c]) for c in (0, 1))
    none = torch.zeros((), dtype=torch.int64, device=q.device)
    grads = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        _batched(dout_SHD), q, k, v, _batched(out_SHD), lse_HS.view(1, *lse_HS.shape, 1), none, none, None, None, None,
        q.shape[2], k.shape[2], 0.0, causal)
    return tuple(g[0].transpose(0, 1) for g in grads)
