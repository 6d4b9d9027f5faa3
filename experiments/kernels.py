"""Kernels: which attention kernels this machine has, how fast they are, which are used for what, and why."""
from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

import torch

from engine.kernels.choose import CPU, CUDA, adapters, fastest, refusal
from engine.kernels.rates import Rate, rates
from experiments.tables import table
from sim.model import Model

DIRECTIONS = ("forward", "backward")
GPUS = {"Ampere": (8, 0), "Ada": (8, 9), "Hopper": (9, 0), "Blackwell": (10, 0)}
"""Compute capabilities that a machine without a GPU tells about."""


def kernels_command(model: Model, P: int, dtype: str) -> None:
    """Prints them, for one rank's share of a model's heads. Times those that can be used on a GPU here."""
    gpu = torch.cuda.is_available()
    capability = torch.cuda.get_device_capability() if gpu else None
    heads, kv_heads = model.heads // P, max(1, model.kv_heads // P)
    reasons = {kernel: refusal(kernel, model, dtype, capability) for kernel in adapters(CUDA if gpu else CPU + CUDA)}
    good = [kernel for kernel, reason in reasons.items() if reason is None]
    found = rates(tuple(good), heads, kv_heads, model.head_dim) if gpu and good else {}
    timed = any(isinstance(rate, Rate) for rate in found.values())
    used = fastest(found) if timed else () if gpu else (good[0].NAME,) * 2
    rows = []
    for kernel, reason in reasons.items():
        name, rate = kernel.NAME, found.get(kernel.NAME)
        speed = [f"{TFLOPS:.0f}" for TFLOPS in rate] if isinstance(rate, Rate) else ["n/a", "n/a"]
        does = [direction for direction, winner in zip(DIRECTIONS, used) if winner == name]
        why = reason or (rate if isinstance(rate, str) else "the one for CPUs" if not gpu else "the fastest" if does else "slower")
        rows.append((name, installed(kernel.PACKAGE), *speed, "both" if len(does) == 2 else "".join(does) or "-", why))
    where = f"{torch.cuda.get_device_name()}, compute capability {capability[0]}.{capability[1]}" if gpu else "this machine's CPU"
    print(f"{model.name} in {dtype} on {where}; a rank has {heads} query and {kv_heads} KV heads, head_dim {model.head_dim}.\n")
    table(("kernel", "installed", "fwd", "bwd", "used for", "why"), rows)
    if timed:
        print("\nfwd, bwd: TFLOP/s of one chunk, full and causal (2 and 5 products a pair).")
    if not gpu:
        print("\nOn a GPU each direction takes the fastest of these, timed there:")
        table(("GPU", "kernels"), [(f"{name} ({a}.{b})", _would_use(model, dtype, (a, b))) for name, (a, b) in GPUS.items()])
        print("pip install -e '.[hopper]' brings flash-attn-4, '.[ampere]' flash-attn-2; flash-attn-3 is built from source.")


def installed(package: str) -> str:
    """Name and version of what is installed, or that it is not."""
    try:
        return f"{package} {version(package).split('+')[0]}"
    except PackageNotFoundError:
        return "no"


def _would_use(model: Model, dtype: str, capability: tuple[int, int]) -> str:
    takes = [kernel for kernel in adapters(CUDA) if kernel.refuses(model, dtype, capability) is None]
    return ", ".join(kernel.NAME + (" (not installed)" if installed(kernel.PACKAGE) == "no" else "") for kernel in takes) or "none"
