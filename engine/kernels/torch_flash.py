"""Adapter for the flash kernel inside torch on CUDA (FA2). KV heads are spread over their query heads and summed back in fp32."""
from __future__ import annotations

import torch

from engine.kernels.cpu_flash import _batched, _spread
from engine.kernels.limits import over
from sim.model import Model

NAME = "torch flash (FA2)"
MOST_HEAD_DIM = 192
"""Backward's on every such GPU; some take 256."""


def refuses(model: Model, dtype: str, capability: tuple[int, int] | None, elements: int = 0) -> str | None:
    """Why it cannot run these shapes, whose largest tensor has so many elements, on a device of this compute capability, or None."""
    return over(model, dtype, capability, MOST_HEAD_DIM)


def forward(q_SHD, kv_T2KD, causal: bool):
    """(out [S, H, D], lse [H, S] fp32), scale 1/sqrt(D)."""
    k, v = (_batched(_spread(kv_T2KD[:, c], q_SHD.shape[1])) for c in (0, 1))
    found = torch.ops.aten._scaled_dot_product_flash_attention(_batched(q_SHD), k, v, 0.0, causal, False)
    return found[0][0].transpose(0, 1), found[1][0]


def backward(dout_SHD, q_SHD, kv_T2KD, out_SHD, lse_HS, causal: bool):
    """(dq [S, H, D], dk [T, K, D], dv [T, K, D]); out and lse are those of the whole row."""
    H, K = q_SHD.shape[1], kv_T2KD.shape[2]
    q = _batched(q_SHD)
    k, v = (_batched(_spread(kv_T2KD[:, c], H)) for c in (0, 1))
    none = torch.zeros((), dtype=torch.int64, device=q.device)
    grads = torch.ops.aten._scaled_dot_product_flash_attention_backward(
        _batched(dout_SHD), q, k, v, _batched(out_SHD), lse_HS.unsqueeze(0), None, None, q.shape[2], k.shape[2], 0.0, causal, none, none)
    dq, dk, dv = (g[0].transpose(0, 1) for g in grads)
    if H != K:
        dk, dv = (g.unflatten(1, (K, H // K)).sum(2, dtype=torch.float32) for g in (dk, dv))
    return dq, dk, dv
