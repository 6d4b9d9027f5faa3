"""Fakes of the flash-attn packages, in plain torch on any device and dtype: the signatures of what the adapters call, and what they demand.

    with installed("flash_attn_4"): ...    as if the package of that adapter were there
"""
from __future__ import annotations

import math
import sys
from contextlib import contextmanager
from importlib import import_module
from types import SimpleNamespace

import torch


def attend(q_BSHD, k_BTKD, v_BTKD, scale: float, causal: bool):
    """(out [B, S, H, D], lse [B, H, S]), in fp64."""
    score_BHST, v_BTHD = _scores(q_BSHD, k_BTKD, scale, causal), _spread(v_BTKD, q_BSHD)
    return torch.einsum("bhst,bthd->bshd", score_BHST.softmax(-1), v_BTHD), score_BHST.logsumexp(-1)


def attend_bwd(dout_BSHD, q_BSHD, k_BTKD, v_BTKD, out_BSHD, lse_BHS, scale: float, causal: bool):
    """(dq, dk, dv) of these pairs, in fp64, by flash attention's formula: out and lse are those of the whole row."""
    dout, out, q = (t.double() for t in (dout_BSHD, out_BSHD, q_BSHD))
    p_BHST = (_scores(q_BSHD, k_BTKD, scale, causal) - lse_BHS.double().unsqueeze(-1)).exp()
    dp_BHST = torch.einsum("bshd,bthd->bhst", dout, _spread(v_BTKD, q_BSHD))
    ds_BHST = scale * p_BHST * (dp_BHST - (dout * out).sum(-1).transpose(1, 2).unsqueeze(-1))
    dq = torch.einsum("bhst,bthd->bshd", ds_BHST, _spread(k_BTKD, q_BSHD))
    dk, dv = torch.einsum("bhst,bshd->bthd", ds_BHST, q), torch.einsum("bhst,bshd->bthd", p_BHST, dout)
    K = k_BTKD.shape[2]
    return dq, *(g.unflatten(2, (K, -1)).sum(3) for g in (dk, dv))


def _spread(x_BTKD, q_BSHD):
    return x_BTKD.double().repeat_interleave(q_BSHD.shape[2] // x_BTKD.shape[2], dim=2)


def _scores(q_BSHD, k_BTKD, scale: float, causal: bool):
    score = scale * torch.einsum("bshd,bthd->bhst", q_BSHD.double(), _spread(k_BTKD, q_BSHD))
    S, T = score.shape[-2:]
    later = torch.ones(S, T, dtype=torch.bool, device=score.device).triu(T - S + 1)
    return score.masked_fill(later, -torch.inf) if causal else score


def _demand(q, k, v, *like_q, lse=None):
    """What all of them check of (batch, seq, heads, head_dim) tensors and of lse (batch, heads, seq)."""
    B, S, H, D = q.shape
    assert k.shape == v.shape and k.shape[0] == B and k.shape[3] == D and H % k.shape[2] == 0
    assert all(t.shape == q.shape for t in like_q)
    assert all(t.dtype == q.dtype and t.stride(-1) == 1 for t in (q, k, v, *like_q))
    assert lse is None or lse.shape == (B, H, S) and lse.dtype == torch.float32 and lse.is_contiguous()


def _fill(into, found):
    for to, value in zip(into, found, strict=True):
        to.copy_(value)


def _flash_attn_fwd_4(q, k, v, *, softmax_scale=None, causal=False, return_lse=False, out=None, lse=None):
    _demand(q, k, v, *[] if out is None else [out], lse=lse)
    out = torch.empty_like(q) if out is None else out
    assert lse is not None or return_lse
    cache = _flash_attn_fwd_4.compile_cache
    if causal not in cache:
        cache[causal] = lambda q, k, v, out, lse, scale, *nothing: _fill((out, lse), attend(q, k, v, scale, causal))
    cache[causal](q.detach(), k.detach(), v.detach(), out.detach(), lse, softmax_scale or 1 / math.sqrt(q.shape[-1]), None, None)
    return out, lse, None, None, None


_flash_attn_fwd_4.compile_cache = {}


def _flash_attn_bwd_4(q, k, v, out, dout, lse, softmax_scale=None, causal=False, *, deterministic=False, dq=None, dk=None, dv=None):
    _demand(q, k, v, out, dout, lse=lse)
    grads = tuple(torch.empty_like(t) if given is None else given for t, given in ((q, dq), (k, dk), (v, dv)))
    _fill(grads, attend_bwd(dout, q, k, v, out, lse, softmax_scale or 1 / math.sqrt(q.shape[-1]), causal))
    return grads


def _flash_attn_forward_3(
    q, k, v, k_new=None, v_new=None, qv=None, out_=None, cu_seqlens_q=None, cu_seqlens_k=None, cu_seqlens_k_new=None, seqused_q=None,
    seqused_k=None, max_seqlen_q=None, max_seqlen_k=None, page_table=None, kv_batch_idx=None, leftpad_k=None, rotary_cos=None,
    rotary_sin=None, seqlens_rotary=None, q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False,
):
    _demand(q, k, v)
    out, lse = attend(q, k, v, softmax_scale, causal)
    return out.to(q.dtype), lse.float(), torch.tensor([]), torch.tensor([])


def _flash_attn_backward_3(
    dout, q, k, v, out, softmax_lse, cu_seqlens_q=None, cu_seqlens_k=None, sequed_q=None, sequed_k=None, max_seqlen_q=None,
    max_seqlen_k=None, dq=None, dk=None, dv=None, softmax_scale=None, is_causal=False, window_size_left=-1, window_size_right=-1,
    softcap=0.0, deterministic=False, sm_margin=0,
):
    _demand(q, k, v, out, dout, dq, lse=softmax_lse)
    _fill((dq, dk, dv), attend_bwd(dout, q, k, v, out, softmax_lse, softmax_scale, is_causal))
    return torch.tensor([])


def _flash_attn_forward_2(q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, return_softmax):
    _demand(q, k, v)
    assert (dropout_p, window_size_left, window_size_right, softcap, alibi_slopes, return_softmax) == (0, -1, -1, 0, None, False)
    out, lse = attend(q, k, v, softmax_scale, causal)
    return out.to(q.dtype), lse.float(), torch.tensor([]), torch.tensor([0, 0])


def _flash_attn_backward_2(
    dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap,
    alibi_slopes, deterministic, rng_state=None,
):
    _demand(q, k, v, out, dout, dq, lse=softmax_lse)
    assert (dropout_p, window_size_left, window_size_right, softcap, alibi_slopes) == (0, -1, -1, 0, None)
    _fill((dq, dk, dv), attend_bwd(dout, q, k, v, out, softmax_lse, softmax_scale, causal))
    return torch.tensor([])


FAKES = {
    "flash_attn_4": SimpleNamespace(_flash_attn_fwd=_flash_attn_fwd_4, _flash_attn_bwd=_flash_attn_bwd_4),
    "flash_attn_3": SimpleNamespace(_flash_attn_forward=_flash_attn_forward_3, _flash_attn_backward=_flash_attn_backward_3),
    "flash_attn_2": SimpleNamespace(_flash_attn_forward=_flash_attn_forward_2, _flash_attn_backward=_flash_attn_backward_2),
}
"""By adapter: what stands for its MODULE."""


@contextmanager
def installed(*names: str):
    """As if the packages of these adapters were installed, and real ones were not."""
    modules = {import_module(f"engine.kernels.{name}").MODULE: FAKES[name] for name in names}
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            sys.modules.pop(name) if module is None else sys.modules.update({name: module})
