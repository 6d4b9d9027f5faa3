"""Fused: a chain of pointwise work and reductions is one or two kernels on a GPU, through torch.compile; on CPU it runs as it is written.

    @fused
    def scale(x_TC, factor): ...

The dims that a parameter's name calls T or S (tokens) are dynamic: one compilation serves full and short chunks, and gives both the
same bits. Everything else (dtypes, heads, flags) is compiled for.
"""
from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from functools import cache, wraps

import torch

devices = {"cuda"}
"""Where functions are compiled. Empty: nowhere, for tools that have to see each operation."""
TOKENS = "TS"
OPTIONS = {"triton.mix_order_reduction": False}
"""Whether to fuse a sum over tokens with one over columns, torch asks how many tokens there are, and compiles again on the other side of that."""
VARIANTS = 64
"""Compilations of one function at most; more means that something varies which should not."""


def fused(function: Callable) -> Callable:
    """The function, compiled where its first argument is on a GPU. It may write into its arguments; `function` and what it calls stay plain torch."""
    tokens = [(k, dim) for k, name in enumerate(inspect.signature(function).parameters) if (dim := _token_dim(name)) is not None]

    @wraps(function)
    def call(*args):
        if args[0].device.type not in devices:
            return function(*args)
        for k, dim in tokens:
            if args[k] is not None:
                torch._dynamo.maybe_mark_dynamic(args[k], dim)
        if not hasattr(_thread, "ready"):
            torch._dynamo.config.recompile_limit = VARIANTS  # settings of each thread, and autograd has its own
            torch._dynamo.config.automatic_dynamic_shapes = False  # else a second model gets kernels for any width, which have other bits
            _thread.ready = True
        return _compiled(function)(*args)

    return call


_thread = threading.local()


@cache
def _compiled(function: Callable) -> Callable:
    return torch.compile(function, fullgraph=True, options=OPTIONS)


def _token_dim(name: str) -> int | None:
    """Which dim of a tensor called like lse_HS counts tokens."""
    _, underscore, dims = name.rpartition("_")
    return next((k for k, dim in enumerate(dims) if dim in TOKENS), None) if underscore and dims.isupper() else None
