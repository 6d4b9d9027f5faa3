"""Attention: the engine's kernel under torch autograd, causal, over one piece."""
from __future__ import annotations

import torch


class Attention(torch.autograd.Function):
    """(kernel, q [S, H, D], kv [S, 2, K, D]) -> o [S, H, D]."""

    @staticmethod
    def forward(ctx, kernel, q_SHD: torch.Tensor, kv_S2KD: torch.Tensor) -> torch.Tensor:
        out, lse = kernel.forward(q_SHD, kv_S2KD, True)
        out = out.contiguous()
        ctx.kernel = kernel
        ctx.save_for_backward(q_SHD, kv_S2KD, out, lse)
        return out

    @staticmethod
    def backward(ctx, dout_SHD: torch.Tensor):
        dq, dk, dv = ctx.kernel.backward(dout_SHD.contiguous(), *ctx.saved_tensors, True)
        return None, dq.to(dout_SHD.dtype), torch.stack((dk, dv), dim=1).to(dout_SHD.dtype)
