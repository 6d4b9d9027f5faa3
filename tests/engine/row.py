"""A row of two pairs, earlier keys in full and its own causally, through attention kernels alone: errors against fp64."""
from __future__ import annotations

from importlib import import_module

import torch

from engine.merge import merge

S, T = 88, 56
"""Tokens of the row and of the earlier chunk."""


def row_errors(forward: str, backward: str, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: str = "cpu", given: bool = False) -> dict[str, float]:
    """Relative L2 errors of what adapters give: out and lse by `forward`, merged, and gradients by `backward` of the merged ones. given: the
    first part goes where out and lse are told to be, and has to be there."""
    first, second = (import_module(f"engine.kernels.{name}") for name in (forward, backward))
    random = torch.Generator().manual_seed(heads * head_dim + kv_heads)
    q, dout = (torch.randn(S, heads, head_dim, generator=random).to(device, dtype) for _ in range(2))
    kvs = [torch.randn(n, 2, kv_heads, head_dim, generator=random).to(device, dtype) for n in (T, S)]
    room = (torch.empty_like(q), torch.empty(heads, S, device=device)) if given else (None, None)
    found = part, lse = first.forward(q, kvs[0], False, *room)
    assert not given or all(mine is told for mine, told in zip(found, room))
    out = torch.empty(q.shape, device=device, dtype=torch.float32)
    lse = lse.clone(memory_format=torch.contiguous_format)  # as in the arenas
    merge(part.float(), lse, *first.forward(q, kvs[1], True), out, lse)
    grads = [second.backward(dout, q, kv, out.to(dtype), lse, causal) for kv, causal in zip(kvs, (False, True))]
    mine = {
        "out": out, "lse": lse, "dq": grads[0][0].double() + grads[1][0].double(),
        "dk": torch.cat([g[1] for g in grads]), "dv": torch.cat([g[2] for g in grads]),
    }
    right = _right(q, torch.cat(kvs), dout)
    assert {name: t.shape for name, t in mine.items()} == {name: t.shape for name, t in right.items()}
    return {name: float((mine[name].double() - right[name]).norm() / right[name].norm()) for name in right}


def _right(q_SHD: torch.Tensor, kv_N2KD: torch.Tensor, dout_SHD: torch.Tensor) -> dict[str, torch.Tensor]:
    """The same by autograd, in fp64."""
    q, k, v = (t.double().requires_grad_() for t in (q_SHD, kv_N2KD[:, 0], kv_N2KD[:, 1]))
    (S, H, D), (N, K, _) = q.shape, k.shape
    score_HSN = torch.einsum("sgkd,nkd->kgsn", q.view(S, K, H // K, D).transpose(1, 2), k).flatten(0, 1) / D**0.5
    later_SN = torch.arange(N, device=q.device) > torch.arange(N - S, N, device=q.device).unsqueeze(1)
    score_HSN = score_HSN.masked_fill(later_SN, -torch.inf)
    p_KGSN = score_HSN.softmax(-1).unflatten(0, (K, H // K))
    out = torch.einsum("kgsn,nkd->skgd", p_KGSN, v).flatten(1, 2)
    out.backward(dout_SHD.double())
    return {"out": out.detach(), "lse": score_HSN.detach().logsumexp(-1), "dq": q.grad, "dk": k.grad, "dv": v.grad}
