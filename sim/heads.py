"""Heads: attention of another head_dim than that of a machine's cost curves or rates, as its microbenchmarks tell it.

They time each kernel at several head_dims, everything else equal. So a calibration for one model says how much longer another's attention takes
a FLOP (at one clock), and which kernel is the fastest there.
"""
from __future__ import annotations

from collections import defaultdict
from statistics import median
from typing import NamedTuple

from sim.kernels import joined, parted
from sim.machine import Machine

WAYS = ("forward", "backward")
ALIKE = ("causal", "q", "kv", "heads", "kv_heads")
"""What two points that are compared have in common."""


class Other(NamedTuple):
    """Attention of another head_dim."""

    slower: tuple[float, float]
    """How many times the ns of a FLOP at the curves' head_dim, forward and backward."""
    kernel: str
    """The fastest, or the two (sim.kernels)."""
    unmeasured: tuple[str, ...]
    """Directions that no microbenchmark told, so that the other one stands for them."""


def other(machine: Machine, head_dim: int) -> Other | None:
    """None where the curves are of this head_dim, or nobody knows better."""
    base = machine.get("head_dim")
    if base in (None, head_dim):
        return None
    found = {way: best for way, kernel in zip(WAYS, parted(machine.kernel)) if (best := _fastest(machine, way, kernel, base, head_dim))}
    if not found:
        return None
    missing = tuple(way for way in WAYS if way not in found)
    pairs = [found.get(way) or next(iter(found.values())) for way in WAYS]
    return Other(tuple(slower for slower, _ in pairs), joined(*(kernel for _, kernel in pairs)), missing)


def kernel(machine: Machine, head_dim: int) -> str:
    """Name of the attention kernel that runs there, or of the two; empty if nobody knows."""
    return found.kernel if (found := other(machine, head_dim)) else machine.kernel


def said(machine: Machine, head_dim: int) -> str:
    """What is taken for granted of attention of this head_dim, in a line; empty if nothing."""
    base = machine.get("head_dim")
    if base in (None, head_dim):
        return ""
    if not (found := other(machine, head_dim)):
        return f"attention: measured at head_dim {base}, taken for {head_dim}; {'most kernels are slower there' if head_dim < base else 'kernels may be faster or slower there'}"
    times = ", ".join(f"{slower:.2f} times as long {way}" + " (not measured, taken as the other way)" * (way in found.unmeasured) for way, slower in zip(WAYS, found.slower))
    return f"attention: measured at head_dim {base}; at {head_dim}, by microbenchmarks of {found.kernel}, a FLOP takes {times}"


def _fastest(machine: Machine, way: str, kernel: str, base: int, head_dim: int) -> tuple[float, str] | None:
    """(times as slow, kernel) of the fastest at a head_dim, beside `kernel` at the curves'."""
    here, there = _measured(machine, way, base).get(kernel, {}), _measured(machine, way, head_dim)
    ratios = {name: [_slower(point, here[alike]) for alike, point in told.items() if alike in here] for name, told in there.items()}
    return min(((median(all_), name) for name, all_ in ratios.items() if all_), default=None)


def _measured(machine: Machine, way: str, head_dim: int) -> dict[str, dict[tuple, dict]]:
    """Kernel -> what points have in common -> the point."""
    found: dict[str, dict[tuple, dict]] = defaultdict(dict)
    for point in machine.points:
        args = point.get("args", {})
        if point["name"] == f"attention {way}" and args.get("head_dim") == head_dim and point.get("ns") and point.get("GFLOPs"):
            found[args["kernel"]][tuple(args.get(name) for name in ALIKE)] = point
    return found


def _slower(point: dict, base: dict) -> float:
    """How many times as long a FLOP takes: in clock cycles, or in ns where a clock was not read."""
    clocks = point.get("clock_MHz"), base.get("clock_MHz")
    return point["ns"] / point["GFLOPs"] / (base["ns"] / base["GFLOPs"]) * (clocks[0] / clocks[1] if all(clocks) else 1)
