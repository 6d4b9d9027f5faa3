"""Fit: what a machine takes from the points of its microbenchmarks. Engine timelines stay the main source of what an op costs.

    numbers   pinned memory, host blocks, launch queue, memory, links alone and all at once
    slowdown  streams together
    fits      on GPUs, sizes beyond those of the timelines, and where the line does not follow them, its bend
"""
from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import numpy as np

from engine.lines import Point, fit
from sim.cost import bent
from sim.kernels import parted
from sim.machine import Machine

LIKE = {
    "reload": ("h2d", {}), "offload": ("d2h", {}), "a2a": ("all-to-all", {}),
    **{f"attn{merge}{mask}": ("attention forward", {"causal": bool(mask)}) for merge in ("", "+merge") for mask in ("", ".causal")},
    **{f"attn_bwd{merge}{mask}": ("attention backward", {"causal": bool(mask)}) for merge in ("", "+merge", "+merge+merge") for mask in ("", ".causal")},
}
"""Cost key -> the microbenchmark that grows with size as its ops do, and which of its points."""
BEND = 0.03
"""A line that is off by less than this everywhere is kept as it is."""


def improved(machine: Machine, points: list[dict], timelines: dict[str, list[Point]], P: int, source: str, shape: tuple[int, int, int]) -> Machine:
    """A calibrated machine with what its microbenchmarks add. `timelines`: the points its fits were made of, by cost key; `shape`: query heads,
    KV heads of a rank and head_dim of these."""
    here = int(machine["gpus_per_node"])
    numbers = machine.numbers | {name: {"value": value, "source": source} for name, value in numbers_of(points, P, here).items()}
    fits = dict(machine.fits)
    for key, samples in timelines.items() if machine.kind == "cuda" else ():  # a CPU's timelines have the sizes that it runs
        if key in LIKE and (more := _like(key, points, P, machine.kernel, shape)):
            fits[key] = fits[key] | extended(samples, more) | {"source": f"{fits[key]['source']}; beyond these sizes as {LIKE[key][0]} alone"}
    return replace(machine, numbers=numbers, fits=fits, slowdown=machine.slowdown | slowdown_of(points, source), points=points)


def numbers_of(points: list[dict], P: int, here: int) -> dict[str, float]:
    """Numbers of a machine, of whose P ranks so many are on this node; what was not measured is absent."""
    def rate(name: str, **args) -> float | None:
        """GB/s of the largest size."""
        largest = max((p for p in _measured(points, name, **args)), key=lambda p: p["args"]["bytes"], default=None)
        return largest and (largest.get("MB") or largest["args"]["bytes"] / 1e6) * 1e6 / largest["ns"]

    def value(name: str, unit: str) -> float | None:
        return next((p[unit] for p in points if p["name"] == name and p.get(unit)), None)

    ways = {way: (rate(way, ranks=1), rate(way, ranks=P)) for way in ("h2d", "d2h")}
    found = {
        "pin_GBps": rate("pin"), "zero_GBps": rate("zero pinned"), "sync_ns": value("sync", "ns"), "queue_depth": value("launch queue", "entries"),
        "hbm_GBps": rate("move"), "nvlink_GBps": rate("all-to-all", ranks=here), "network_GBps": rate("all-to-all", ranks=P) if P > here else None,
        **{f"{way}_GBps": alone for way, (alone, _) in ways.items()},
    }
    shares = [alone / all_ for alone, all_ in ways.values() if alone and all_]
    if here > 1 and shares:
        found["gpus_per_uplink"] = max(1, min(here, round(max(shares))))
    return {name: v for name, v in found.items() if v}


def slowdown_of(points: list[dict], source: str) -> dict[str, dict]:
    """The contention table: medians, none above 1, and their spread."""
    return {
        p["args"]["streams"]: {s: min(1.0, rate) for s, (_, rate, _) in p["rates"].items()} | {
            "spread": {s: [low, high] for s, (low, _, high) in p["rates"].items()}, "source": source}
        for p in points if p["name"] == "together" and set(p["rates"]) == set(p["args"]["streams"].split("|"))
    }


def extended(samples: list[Point], more: list[Point]) -> dict:
    """The line through an op's own points and, beyond their sizes, those of what grows like it, brought to the op's level where the two
    meet; with a bend where that line is off."""
    known = samples + beyond(samples, more)
    line = fit(known)
    pairs = defaultdict(list)
    for gflop, megabytes, ns in known:
        by_line = line["fixed_ns"] + line["ns_per_gflop"] * gflop + line["ns_per_MB"] * megabytes
        pairs[round(by_line, 3)].append(ns / by_line)
    bend = [[by_line, round(float(np.median(ratios)), 4)] for by_line, ratios in sorted(pairs.items()) if by_line > 0]
    off = max((abs(ratio - 1) for _, ratio in bend), default=0)
    return line | ({"bend": bend} if off > BEND else {})


def beyond(samples: list[Point], more: list[Point]) -> list[Point]:
    """Those of `more` that are smaller or larger than all samples, times what the op at the sample next to them takes, and moves, more than
    its like."""
    curves = [[[s, v] for s, v in sorted({_size(p): p[k] for p in more}.items()) if s > 0] for k in (2, 1)]
    if min(map(len, curves)) < 2:
        return []
    found = []
    for end, out in ((min(samples, key=_size), lambda p, e: _size(p) < _size(e)), (max(samples, key=_size), lambda p, e: _size(p) > _size(e))):
        here = [p for p in samples if _size(p) == _size(end)]
        slower, moves = (float(np.median([p[k] for p in here])) / (_along(curve, _size(end)) or 1.0) for k, curve in zip((2, 1), curves))
        found += [(p[0], p[1] * moves, p[2] * slower) for p in more if out(p, end)]
    return found


def _size(p: Point) -> float:
    """What an op grows with: GFLOPs, or MB where it only moves."""
    return p[0] or p[1]


def _along(curve: list, size: float) -> float:
    """A curve's value at a size: value a size, interpolated over the logarithm of sizes."""
    return size * bent([[s, v / s] for s, v in curve], size)


def _measured(points: list[dict], name: str, **args) -> list[dict]:
    return [p for p in points if p["name"] == name and p.get("ns") and all(p["args"].get(k, v) == v for k, v in args.items())]


def _like(key: str, points: list[dict], P: int, kernel: str, shape: tuple[int, int, int]) -> list[Point]:
    """Points that an op of this key grows like: of the kernel that ran, of its heads, square, all ranks at once."""
    name, args = LIKE[key]
    forward, backward = parted(kernel)
    if name.startswith("attention"):
        args = args | {"kernel": backward if name.endswith("backward") else forward} | dict(zip(("heads", "kv_heads", "head_dim"), shape))
    found = _measured(points, name, **args, **({} if name.startswith("attention") else {"ranks": P}))
    return [(p["GFLOPs"], p["MB"], p["ns"]) for p in found if p["args"].get("q") == p["args"].get("kv")]
