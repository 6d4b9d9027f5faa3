"""Fused functions against the same as written: whatever a compiler makes of reads and writes in one function, the numbers stay.

torch 2.11's compiler once moved a read of the logits behind the write over them. Sizes are those at which it loops over a row and those at which
it holds one whole; lengths are a full chunk's, a short one's and a single token's.
"""
from __future__ import annotations

import pytest
import torch

from engine import fused, merge, pointwise
from engine.deal import IGNORE
from tests.cuda.places import DEVICE, needs_cuda

LENGTHS = (96, 40, 1)
WIDTHS = (96, 4096)
H, K, D = 8, 2, 64
EPS = 1e-5
WORST = {torch.float32: 3e-6, torch.bfloat16: 8e-3}
"""Relative L2."""


def drawn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=drawn.generator, device=DEVICE).to(dtype)


def rows(T: int, W: int, dtype: torch.dtype) -> torch.Tensor:
    return drawn(T, W, dtype=dtype)


def norm_bwd(gpt: bool, inplace: bool, more: bool):
    def args(T: int, W: int, dtype: torch.dtype) -> tuple:
        x, grad, dx = (rows(T, W, dtype) for _ in range(3))
        sums = [drawn(W) for _ in range(1 + gpt)]
        return x, drawn(W, dtype=dtype), *([drawn(W, dtype=dtype)] * gpt), grad, dx if inplace else rows(T, W, dtype), dx, *sums, EPS, more

    return args


def partial(inplace: bool):
    def args(T: int, W: int, dtype: torch.dtype) -> tuple:
        acc, lse = drawn(T, H, D), drawn(H, T)
        out = (acc, lse) if inplace else (torch.empty(T, H, D, dtype=dtype, device=DEVICE), torch.empty_like(lse))
        return acc, lse, drawn(T, H, D, dtype=dtype), drawn(H, T), *out

    return args


def logits(T: int, W: int, dtype: torch.dtype) -> tuple:
    label_T = torch.randint(0, W, (T,), generator=drawn.generator, device=DEVICE)
    label_T[T // 2:T // 2 + 1] = IGNORE
    return 3 * rows(T, W, dtype), label_T, drawn(1), 0.125


def pair(keys: int):
    """Gradients of a pair of chunks, the second `keys` times as long."""
    def args(T: int, W: int, dtype: torch.dtype) -> tuple:
        return drawn(T, H, D, dtype=dtype), *(drawn(keys * T, K, D, dtype=dtype) for _ in range(2)), drawn(T, H, D), drawn(keys * T, 2, K, D), True, False

    return args


def turned(T: int) -> tuple:
    return pointwise.angles(1_000_000, T, D, 5e5, torch.device(DEVICE))


CASES = {
    "rms_norm": (pointwise.rms_norm, lambda T, W, dtype: (rows(T, W, dtype), drawn(W, dtype=dtype), EPS)),
    "layer_norm": (pointwise.layer_norm, lambda T, W, dtype: (rows(T, W, dtype), drawn(W, dtype=dtype), drawn(W, dtype=dtype), EPS)),
    **{f"rms_norm_bwd {inplace} {more}": (pointwise.rms_norm_bwd, norm_bwd(False, inplace, more)) for inplace in (False, True) for more in (False, True)},
    **{f"layer_norm_bwd {inplace}": (pointwise.layer_norm_bwd, norm_bwd(True, inplace, True)) for inplace in (False, True)},
    "swiglu": (pointwise.swiglu, lambda T, W, dtype: (rows(T, 2 * W, dtype),)),
    "swiglu_bwd": (pointwise.swiglu_bwd, lambda T, W, dtype: (rows(T, 2 * W, dtype), rows(T, W, dtype))),
    "gelu": (pointwise.gelu, lambda T, W, dtype: (rows(T, W, dtype),)),
    "gelu_bwd": (pointwise.gelu_bwd, lambda T, W, dtype: (rows(T, W, dtype), rows(T, W, dtype))),
    "cross_entropy": (pointwise.cross_entropy, logits),
    "add_columns": (pointwise.add_columns, lambda T, W, dtype: (rows(T, W, dtype), drawn(W), True)),
    "add_attn_grads": (pointwise.add_attn_grads, pair(1)),
    "add_attn_grads, other keys": (pointwise.add_attn_grads, pair(2)),
    "merge": (merge.merge, partial(False)),
    "merge in place": (merge.merge, partial(True)),
    "rope_q": (pointwise.rope_q, lambda T, W, dtype: (drawn(T, H, D, dtype=dtype), *turned(T), drawn(2, T, H // 2, D, dtype=dtype))),
    "rope_kv": (pointwise.rope_kv, lambda T, W, dtype: (drawn(T, 2, K, D, dtype=dtype), *turned(T), drawn(2, T, 2, K // 2, D, dtype=dtype))),
    "rope_q_bwd": (pointwise.rope_q_bwd, lambda T, W, dtype: (drawn(2, T, H // 2, D), *turned(T), dtype)),
    "rope_kv_bwd": (pointwise.rope_kv_bwd, lambda T, W, dtype: (drawn(4, T, 2, 1, D), *turned(T), K, dtype)),
}
"""name -> (function, its arguments for T tokens of width W)."""


def on(devices: set[str], function, args: tuple):
    """What a function gives when it is compiled on these devices."""
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(fused, "devices", devices)
        return function(*args)


def copied(args: tuple) -> tuple:
    """The same arguments; one tensor given twice stays one."""
    made: dict[int, torch.Tensor] = {}
    return tuple(made.setdefault(id(a), a.clone()) if isinstance(a, torch.Tensor) else a for a in args)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32), ids=("bf16", "fp32"))
@pytest.mark.parametrize("name", CASES)
def test_compiling_changes_no_number(note, name, dtype):
    function, make = CASES[name]
    for W in WIDTHS:
        for T in LENGTHS:
            drawn.generator = torch.Generator(DEVICE).manual_seed(T + W)
            args = make(T, W, dtype)
            one, other = copied(args), copied(args)
            found, right = on({DEVICE}, function, one), on(set(), function, other)
            pairs = [(a, b) for a, b in zip((*one, *_listed(found)), (*other, *_listed(right))) if isinstance(a, torch.Tensor)]
            for mine, its in pairs:
                error = float((mine.double() - its.double()).norm() / its.double().norm().clamp(min=1e-30))
                note(f"{name} {dtype}", error)
                assert error < WORST[dtype], (name, W, T)


def _listed(value) -> tuple:
    return () if value is None else value if isinstance(value, tuple) else (value,)


@needs_cuda
@pytest.mark.parametrize("name", CASES)
def test_a_second_length_compiles_nothing(name):
    """Of a full chunk or of a short one, whichever comes first. What is compiled asks of sizes too, when it chooses how to sum."""
    function, make = CASES[name]
    W = WIDTHS[-1]
    for lengths in ((2 * W + 8, 1040, 40), (40, 1040, 2 * W + 8)):
        torch._dynamo.reset()
        graphs = []
        for T in lengths:
            drawn.generator = torch.Generator(DEVICE).manual_seed(T)
            on({DEVICE}, function, make(T, W, torch.bfloat16))
            graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
        assert len(set(graphs)) == 1, (lengths, graphs)
