"""Choose: the attention kernels to use, for a model, a dtype and a device.

On a GPU the usable ones are timed and each direction takes its fastest: any kernel's backward takes any kernel's (out, lse), as lse is
natural and the scale 1/sqrt(head_dim) in all. All ranks take what rank 0 chose. On a CPU there is one, and nothing to time.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from types import ModuleType
from typing import NamedTuple

import torch.distributed as dist

from engine.kernels.rates import Rate, in_a_line, rates
from sim.errors import UserError, unknown
from sim.kernels import joined
from sim.model import Model

CUDA = ("flash_attn_4", "flash_attn_3", "flash_attn_2", "cudnn", "torch_flash")
CPU = ("cpu_flash",)
"""Adapters of this folder, in the order that decides where two are about as fast."""
MARGIN = 1.02
"""A kernel is faster than one before it if it is by so much: what differs less differs otherwise the next time."""


class Pair(NamedTuple):
    """Two adapters as one: forward of one, backward of the other."""

    NAME: str
    forward: Callable
    backward: Callable


def adapters(names: Sequence[str]) -> list[ModuleType]:
    """The modules of this folder. Their packages are loaded when they are first called."""
    return [import_module(f"engine.kernels.{name}") for name in names]


def refusal(kernel: ModuleType, model: Model, dtype: str, capability: tuple[int, int] | None, elements: int = 0) -> str | None:
    """Why an adapter cannot be used here, or None: its own refusal, or that its package does not load."""
    if reason := kernel.refuses(model, dtype, capability, elements):
        return reason
    try:
        import_module(kernel.MODULE)
    except ModuleNotFoundError as error:
        return f"is not installed ({error})"
    except Exception as error:  # a broken installation may raise anything
        return f"does not load ({in_a_line(error)})"
    return None


def named(only: str, device: str) -> tuple[str, ...]:
    """The adapters of a device, or the one that `only` names. Raises UserError if it has no such one."""
    names = CPU if device == "cpu" else CUDA
    if only and only not in names:
        raise unknown(f"attention kernel on {device}", only, names)
    return (only,) if only else names


def usable(model: Model, dtype: str, capability: tuple[int, int] | None, elements: int = 0, only: str = "") -> list[ModuleType]:
    """The adapters (or the one that `only` names) that take a model on a GPU of this compute capability (None: on a CPU), `elements` in its
    largest tensor. Raises UserError that says why each was refused."""
    names = named(only, "cpu" if capability is None else "cuda")
    reasons = {kernel: refusal(kernel, model, dtype, capability, elements) for kernel in adapters(names)}
    if found := [kernel for kernel, reason in reasons.items() if reason is None]:
        return found
    where = "a CPU" if capability is None else "a GPU of compute capability {}.{}".format(*capability)
    said = "; ".join(f"{kernel.NAME} {reason}" for kernel, reason in reasons.items())
    raise UserError(f"no attention kernel runs {model.name} in {dtype} on {where}: {said}")


def choose(kernels: Sequence[ModuleType], model: Model, P: int, group: dist.ProcessGroup | None = None) -> ModuleType | Pair:
    """The fastest of the kernels that every rank can use, as rank 0 times them on its GPU. Raises UserError where there is none."""
    everywhere = set.intersection(*_gathered({kernel.NAME for kernel in kernels}, group))
    kernels = [kernel for kernel in kernels if kernel.NAME in everywhere]
    if not kernels:
        raise UserError("no attention kernel runs on the GPUs of all ranks; give all of them the same packages (see fpdt kernels)")
    forward, backward = _gathered(_fastest(kernels, model, P) if group is None or dist.get_rank(group) == 0 else None, group)[0]
    return _pair(*(next(kernel for kernel in kernels if kernel.NAME == name) for name in (forward, backward)))


def _fastest(kernels: list[ModuleType], model: Model, P: int) -> tuple[str, str]:
    if len(kernels) == 1:
        return kernels[0].NAME, kernels[0].NAME
    return fastest(rates(tuple(kernels), model.heads // P, max(1, model.kv_heads // P), model.head_dim))


def fastest(found: dict[str, Rate | str]) -> tuple[str, str]:
    """Names of (forward's, backward's) kernel, given all rates. Raises UserError that says why each failed."""
    good = {name: rate for name, rate in found.items() if isinstance(rate, Rate)}
    if not good:
        raise UserError(f"no attention kernel runs: {'; '.join(f'{name} {why}' for name, why in found.items())}")
    best = [next(iter(good))] * 2
    for name, rate in good.items():
        for k in (0, 1):
            if rate[k] > MARGIN * good[best[k]][k]:
                best[k] = name
    return tuple(best)


def _pair(forward: ModuleType, backward: ModuleType) -> ModuleType | Pair:
    return forward if forward is backward else Pair(joined(forward.NAME, backward.NAME), forward.forward, backward.backward)


def _gathered(value, group: dist.ProcessGroup | None) -> list:
    """The value of each rank."""
    found = [value] if group is None else [None] * dist.get_world_size(group)
    if group is not None:
        dist.all_gather_object(found, value, group=group)
    return found
