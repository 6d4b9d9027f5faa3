"""Rates: how fast each attention kernel is here and now, forward and backward.

All get one chunk, full and causal. After rounds that warm up (compilation, clocks) they take turns, so that whatever the GPU's clock
does it does to all; the median counts.
"""
from __future__ import annotations

from collections import defaultdict
from functools import cache
from statistics import median
from types import ModuleType
from typing import NamedTuple

import torch

TOKENS = 8192
WARM, ROUNDS = 5, 9


class Rate(NamedTuple):
    """TFLOP/s: 2 products a pair forward, 5 backward; a causal chunk counts half."""

    forward_TFLOPS: float
    backward_TFLOPS: float


@cache
def rates(kernels: tuple[ModuleType, ...], heads: int, kv_heads: int, head_dim: int, device: str = "cuda", tokens: int = TOKENS) -> dict[str, Rate | str]:
    """By the kernels' names. Where one fails: why, in a line."""
    random = torch.Generator(device).manual_seed(0)
    q, dout = (torch.randn(tokens, heads, head_dim, generator=random, device=device).bfloat16() for _ in range(2))
    kv = torch.randn(tokens, 2, kv_heads, head_dim, generator=random, device=device).bfloat16()
    found: dict[str, Rate | str] = {}
    runs = []
    for kernel in kernels:
        try:
            _turn(kernel, q, kv, dout)
            torch.cuda.synchronize()
            runs.append(kernel)
        except Exception as error:  # not for this GPU or driver after all, in its own words
            found[kernel.NAME] = f"fails here ({in_a_line(error)})"
    spans = defaultdict(list)
    for k in range(WARM + ROUNDS):
        for kernel in runs:
            for what, span in _turn(kernel, q, kv, dout).items():
                if k >= WARM:
                    spans[kernel.NAME, what].append(span)
    torch.cuda.synchronize()
    flops = 1.5 * 4 * tokens**2 * heads * head_dim  # forward, full and causal

    def ms(name: str, direction: str) -> float:
        return sum(median(start.elapsed_time(end) for start, end in spans[name, (direction, causal)]) for causal in (False, True))

    for kernel in runs:
        forward, backward = (ms(kernel.NAME, direction) for direction in ("forward", "backward"))
        found[kernel.NAME] = Rate(flops / forward / 1e9, 2.5 * flops / backward / 1e9)
    if device == "cuda":
        del q, kv, dout
        torch.cuda.empty_cache()  # the arenas come next
    return found


def _turn(kernel: ModuleType, q: torch.Tensor, kv: torch.Tensor, dout: torch.Tensor) -> dict[tuple[str, bool], tuple]:
    """(direction, causal) -> (event before, event after)."""
    spans = {}
    for causal in (False, True):
        start = _now()
        out, lse = kernel.forward(q, kv, causal)
        spans["forward", causal] = start, _now()
        out, lse = out.contiguous(), lse.contiguous()  # as they lie in the arenas
        start = _now()
        kernel.backward(dout, q, kv, out, lse, causal)
        spans["backward", causal] = start, _now()
    return spans


def _now() -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def in_a_line(error: Exception) -> str:
    """What it is and the first line of what it says."""
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['nothing said'])[0]}"
