"""Merge two partial attention outputs by their log-sum-exps, in fp32, stable for any gap between them."""
from __future__ import annotations

import torch

from engine.fused import fused


@fused
def merge(acc_SHD: torch.Tensor, lse_HS: torch.Tensor, part_SHD: torch.Tensor, part_lse_HS: torch.Tensor, out_SHD: torch.Tensor, out_lse_HS: torch.Tensor) -> None:
    """out <- the softmax-weighted mean of acc (fp32) and part; out_lse <- log(e^lse + e^part_lse). out may be acc itself, out_lse lse.

    The weight of the part is sigmoid(part_lse - lse), which neither overflows nor cancels.
    """
    weight = torch.sigmoid(part_lse_HS - lse_HS).transpose(0, 1).unsqueeze(-1)
    if out_SHD.is_cuda or out_SHD.dtype != acc_SHD.dtype:
        out_SHD.copy_(acc_SHD + weight * (part_SHD.float() - acc_SHD))
    else:  # the same in one pass, which on a GPU fusing makes it anyway
        torch.lerp(acc_SHD, part_SHD.to(acc_SHD.dtype), weight, out=out_SHD)
    out_lse_HS.copy_(torch.logaddexp(lse_HS, part_lse_HS))
