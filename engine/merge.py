"""Merge two partial attention outputs by their log-sum-exps, in fp32, stable for any gap between them."""
from __future__ import annotations

import torch


def merge(acc_SHD: torch.Tensor, lse_HS: torch.Tensor, part_SHD: torch.Tensor, part_lse_HS: torch.Tensor, out_SHD: torch.Tensor) -> None:
    """out <- the softmax-weighted mean of acc (fp32) and part; lse <- log(e^lse + e^part_lse), in place. out may be acc itself.

    The weight of the part is sigmoid(part_lse - lse), which neither overflows nor cancels.
    """
    weight = torch.sigmoid(part_lse_HS - lse_HS).transpose(0, 1).unsqueeze(-1)
    part = part_SHD.to(acc_SHD.dtype)
    if out_SHD.dtype == acc_SHD.dtype:
        torch.lerp(acc_SHD, part, weight, out=out_SHD)
    else:
        out_SHD.copy_(torch.lerp(acc_SHD, part, weight))
    torch.logaddexp(lse_HS, part_lse_HS, out=lse_HS)
