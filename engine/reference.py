"""The same model in plain torch: no chunks, no ranks, no offload, any dtype (fp64 is what tests compare with)."""
from __future__ import annotations

import torch
import torch.nn.functional as F

from engine.deal import IGNORE
from sim.model import Model


def _norm(x_TC, w, name, m):
    """RMSNorm for llama, LayerNorm for gpt."""
    if m.kind == "gpt":
        return F.layer_norm(x_TC, x_TC.shape[-1:], w[name], w["b" + name], m.norm_eps)
    return x_TC * torch.rsqrt(x_TC.square().mean(-1, keepdim=True) + m.norm_eps) * w[name]


def _rope(x_SHD, m):
    """On the first part of each head."""
    S, D, theta = len(x_SHD), round(m.head_dim * m.rotary), m.rope_theta
    place = {"dtype": torch.float64, "device": x_SHD.device}
    angle = torch.outer(torch.arange(S, **place), theta ** -(torch.arange(0, D, 2, **place) / D)).unsqueeze(1)
    a, b = x_SHD[..., :D].chunk(2, dim=-1)
    cos, sin = angle.cos().to(x_SHD.dtype), angle.sin().to(x_SHD.dtype)
    return torch.cat((a * cos - b * sin, b * cos + a * sin, x_SHD[..., D:]), dim=-1)


def block(x_SC: torch.Tensor, w: dict[str, torch.Tensor], m: Model) -> torch.Tensor:
    """One block, [S, hidden] -> [S, hidden], weights as sim.model names them."""
    xn, S, D = _norm(x_SC, w, "norm1", m), len(x_SC), m.head_dim
    q = _rope(F.linear(xn, w["Wq"], w.get("bq")).view(S, m.heads, D), m)
    k, v = F.linear(xn, w["Wkv"], w.get("bkv")).view(S, 2, m.kv_heads, D).unbind(1)
    group = m.heads // m.kv_heads
    k, v = _rope(k, m).repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    o = F.scaled_dot_product_attention(*(t.transpose(0, 1).unsqueeze(0) for t in (q, k, v)), is_causal=True)
    h = x_SC + F.linear(o[0].transpose(0, 1).reshape(S, -1), w["Wo"], w.get("bo"))
    hn = _norm(h, w, "norm2", m)
    if m.kind == "gpt":
        return h + F.linear(F.gelu(F.linear(hn, w["Wu"], w["bu"]), approximate="tanh"), w["Wd"], w["bd"])
    gate, up = F.linear(hn, w["Wgu"]).chunk(2, -1)
    return h + F.linear(F.silu(gate) * up, w["Wd"])


def loss(x_SC: torch.Tensor, label_S: torch.Tensor, w: dict[str, torch.Tensor], m: Model) -> torch.Tensor:
    """Mean cross entropy over labels that are not IGNORE; 0 where there are none."""
    logp = torch.log_softmax(_norm(x_SC, w, "normf", m) @ w["Whead"].t(), dim=-1)
    return F.nll_loss(logp, label_S, ignore_index=IGNORE, reduction="sum") / max(1, int((label_S != IGNORE).sum()))


def language_model(weights: dict[str, torch.Tensor], tokens_S, label_S, m: Model) -> torch.Tensor:
    """The loss of LanguageModel from its state_dict."""
    x = F.embedding(tokens_S, weights["embedding"])
    for k in range(m.layers):
        x = block(x, {n: weights[f"blocks.{k}.{n}"] for n in m.weight_shapes()}, m)
    return loss(x, label_S, {n: weights[f"loss.{n}"] for n in m.head_shapes()}, m)
