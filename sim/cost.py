"""Cost: how long each op takes on a machine with nothing else running, in integer nanoseconds.

A calibrated curve prices an op as fixed + slopes x (GFLOPs, MB). Without one, the longer of its arithmetic and its memory
traffic; a copy by its share of an uplink; an all-to-all by NVLink within a node and the network beyond.
"""
from __future__ import annotations

import math
from bisect import bisect
from dataclasses import replace

from sim import heads
from sim.machine import Machine
from sim.ops import KINDS, PARTS, Work, key, sub_chunks
from sim.schedule import Schedule


def works(schedule: Schedule) -> dict[str, Work]:
    """Op id -> what it costs on any machine, for every op of every region; one object for equal kinds, arguments and operand shapes."""
    cache: dict[tuple, Work] = {}
    shapes: dict[tuple, int] = {}
    result = {}
    for region in schedule.regions.values():
        form = {b.name: shapes.setdefault((b.role, b.dtype, b.shape, b.space), len(shapes))
                for buffers in (schedule.saved, region.buffers) for b in buffers.values()}
        for op in region.ops:
            operands = tuple([form[name] for name in op.reads + op.writes])
            args = tuple([value for name, value in op.args.items() if name != "at"])
            same = (op.kind, args, operands, len(set(op.reads) & set(op.writes)))
            if same not in cache:
                cache[same] = KINDS[op.kind].work(op, schedule)
            result[op.id] = cache[same]
    return result


def op_ns(machine: Machine, schedule: Schedule, each: dict[str, Work]) -> dict[str, int]:
    """Op id -> duration in ns; each: what `works` says, whose objects are priced once."""
    cache: dict[int, int] = {}
    result, slower = {}, attention_slower(machine, schedule)
    for region in schedule.regions.values():
        for op in region.ops:
            same = id(work := each[op.id])
            if same not in cache:
                cache[same] = round(slower.get(op.kind, 1) * price(machine, key(op), work, schedule.P, op.args.get(PARTS, 1)))
            result[op.id] = cache[same]
    return result


def attention_slower(machine: Machine, schedule: Schedule) -> dict[str, float]:
    """Kind -> how many times as long as by its curve, for head_dims that differ."""
    found = heads.other(machine, schedule.model.head_dim)
    return dict(zip(("attn", "attn_bwd"), found.slower)) if found else {}


def issue_ns(machine: Machine, schedule: Schedule) -> dict[str, int]:
    """Op id -> what the host pays to issue it, in ns: so much for each sub-chunk."""
    known, else_ns = {k: fit["issue_ns"] for k, fit in machine.fits.items() if "issue_ns" in fit}, round(machine["launch_ns"])
    ops = [op for region in schedule.regions.values() for op in region.ops]
    if not known:
        return {op.id: else_ns for op in ops}
    return {op.id: round(known[k] * sub_chunks(op, schedule)) if (k := key(op)) in known else else_ns for op in ops}


def features(work: Work) -> tuple[float, float]:
    """(GFLOPs, MB) that a cost curve is linear in; MB = 10^6 bytes over the link, or through HBM for computation."""
    return work.flops / 1e9, (work.link_bytes or work.hbm_bytes) / 1e6


def price(machine: Machine, key: str, work: Work, P: int, parts: int = 1) -> int:
    """ns of one op by its cost curve, or by the machine's rates if it has none; in `parts` equal messages, the fixed part counts so often."""
    if parts > 1:
        return parts * price(machine, key, replace(work, link_bytes=work.link_bytes // parts), P)
    if key in machine.fits:
        return fitted(machine.fits[key], *features(work))
    if not any((work.gemm_flops, work.attn_flops, work.hbm_bytes, work.link_bytes)):
        return 0
    if key in ("offload", "reload"):
        return round(work.link_bytes / copy_GBps(machine, "d2h" if key == "offload" else "h2d", P))
    if key.startswith("pin"):
        rates = [machine.get(rate) for rate in needed(key)]
        return round(sum(work.link_bytes / rate for rate in rates if rate))
    if key == "a2a":
        return round(work.link_bytes / link_GBps(machine, P))
    attn = machine["attn_bwd_TFLOPS" if key.startswith("attn_bwd") else "attn_fwd_TFLOPS"]
    arithmetic_ns = (work.gemm_flops / machine["gemm_TFLOPS"] + work.attn_flops / attn) / 1e3
    return round(max(arithmetic_ns, work.hbm_bytes / machine["hbm_GBps"]))


def needed(key: str) -> list[str]:
    """The numbers a cost key needs that a machine may lack."""
    kind, *flags = key.split(".")
    return ["pin_GBps"] * (kind == "pin" and "cached" not in flags) + ["zero_GBps"] * ("zero" in flags)


def fitted(fit: dict, gflop: float, megabytes: float) -> int:
    """ns by a cost curve: its line, bent where sizes were measured to differ from it."""
    ns = fit["fixed_ns"] + fit.get("ns_per_gflop", 0) * gflop + fit.get("ns_per_MB", 0) * megabytes
    return round(ns * bent(fit["bend"], ns) if fit.get("bend") else ns)


def bent(bend: list, ns: float) -> float:
    """What a line's ns are multiplied with: interpolated over their logarithm between the sizes measured, constant beyond."""
    at = bisect(bend, ns, key=lambda pair: pair[0])
    (low, a), (high, b) = bend[max(at - 1, 0)], bend[min(at, len(bend) - 1)]
    return a if low == high else a + (b - a) * math.log(ns / low) / math.log(high / low)


def copy_GBps(machine: Machine, way: str, P: int) -> float:
    """GB/s one rank gets to or from the host while every rank of its uplink copies."""
    return machine[f"{way}_GBps"] / min(P, int(machine["gpus_per_uplink"]))


def link_GBps(machine: Machine, P: int) -> float:
    """GB/s one rank sends at in a collective over P ranks."""
    return machine["nvlink_GBps" if P <= machine["gpus_per_node"] else "network_GBps"]


def unfitted(machine: Machine, schedule: Schedule) -> list[str]:
    """Cost keys of a schedule that a calibrated machine has no curve for, so that rates price them."""
    if not machine.fits:
        return []
    return sorted({key(op) for r in schedule.regions.values() for op in r.ops if op.stream != "host"} - set(machine.fits))
