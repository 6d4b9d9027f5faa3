"""One llama block in fp64 where dy is zero but on a few rows: y and every gradient, in memory that grows with S, not with S x S."""
from __future__ import annotations

import torch
import torch.nn.functional as F

from sim.model import Model


def rows_reference(model: Model, inputs: dict[str, torch.Tensor], rows: list[int]) -> dict[str, torch.Tensor]:
    """What `picked` takes from a block's results. Only `rows` have queries; all rows before them are their keys."""
    m, w = model, {n: t.double().requires_grad_() for n, t in inputs.items() if n != "dy"}
    x_SC, at_R = w["x"], torch.tensor(rows, device=inputs["x"].device)
    xn_SC, at_S = _norm(x_SC, w["norm1"], m), torch.arange(len(x_SC), device=x_SC.device)
    k_SKD, v_SKD = F.linear(xn_SC, w["Wkv"]).view(len(x_SC), 2, m.kv_heads, m.head_dim).unbind(1)
    k_SKD = _rotated(k_SKD, at_S, m)
    q_RHD = _rotated(F.linear(xn_SC[at_R], w["Wq"]).view(-1, m.heads, m.head_dim), at_R, m)
    later_RS = at_S > at_R.unsqueeze(1)
    o = []
    for k_SD, v_SD, q_RGD in zip(k_SKD.unbind(1), v_SKD.unbind(1), q_RHD.chunk(m.kv_heads, 1)):
        score_GRS = (q_RGD.transpose(0, 1) @ k_SD.t() / m.head_dim**0.5).masked_fill(later_RS, -torch.inf)
        o.append(torch.softmax(score_GRS, -1) @ v_SD)
    h_RC = x_SC[at_R] + F.linear(torch.cat(o).transpose(0, 1).flatten(1), w["Wo"])
    gate, up = F.linear(_norm(h_RC, w["norm2"], m), w["Wgu"]).chunk(2, -1)
    y_RC = h_RC + F.linear(F.silu(gate) * up, w["Wd"])
    y_RC.backward(inputs["dy"][at_R].double())
    whole = torch.zeros_like(inputs["x"], dtype=torch.float64).index_copy_(0, at_R, y_RC.detach())
    return picked({"y": whole} | {f"d{n}": t.grad for n, t in w.items()}, rows)


def picked(found: dict[str, torch.Tensor], rows: list[int]) -> dict[str, torch.Tensor]:
    """y on the rows; dx on them and on all others, where it comes through keys and values alone; each weight's gradient."""
    other = torch.ones(len(found["dx"]), dtype=torch.bool, device=found["dx"].device)
    other[rows] = False
    weights = {n: t for n, t in found.items() if n not in ("y", "dx")}
    return {"y": found["y"][rows], "dx": found["dx"][rows], "dx of keys": found["dx"][other], **weights}


def only(rows: list[int], dy_SC: torch.Tensor) -> torch.Tensor:
    """dy, but zero on all other rows."""
    kept = torch.zeros_like(dy_SC)
    kept[rows] = dy_SC[rows]
    return kept


def _norm(x_SC: torch.Tensor, weight_C: torch.Tensor, m: Model) -> torch.Tensor:
    return x_SC * torch.rsqrt(x_SC.square().mean(-1, keepdim=True) + m.norm_eps) * weight_C


def _rotated(x_SHD: torch.Tensor, at_S: torch.Tensor, m: Model) -> torch.Tensor:
    """RoPE as a turn of complex numbers, unlike engine.pointwise and engine.reference."""
    a, b = x_SHD.chunk(2, -1)
    frequency = m.rope_theta ** -(torch.arange(0, m.head_dim, 2, device=at_S.device).double() / m.head_dim)
    angle_S1F = torch.outer(at_S.double(), frequency).unsqueeze(1)
    turned = torch.complex(a, b) * torch.polar(torch.ones_like(angle_S1F), angle_S1F)
    return torch.cat((turned.real, turned.imag), -1)
