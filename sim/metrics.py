"""Metrics: everything that is printed about a step, from a Timeline alone, predicted or measured.

FLOPs utilization is named by its convention. With N matmul parameters (LM head in, embedding out), S tokens, L layers and d = heads
x head_dim, model FLOPs of a step are 6 N S + attention, backward twice the forward:
    mfu_causal        attention 6 L S^2 d: the causal half
    mfu_palm          attention 12 L S^2 d: all of S^2
    hfu               causal, and the forward that is really recomputed (not flash's own fifth product)
    mfu_megatron_ds   all of S^2, and one more forward if everything is recomputed, as the released Megatron-DeepSpeed counts
each over step time x ranks x the machine's peak.
"""
from __future__ import annotations

import numpy as np

from sim import memory
from sim.errors import UserError
from sim.machine import Machine
from sim.model import Model
from sim.strategy import Strategy
from sim.timeline import ROWS, Timeline

KEYS = ("step_s", "fwd_s", "bwd_s", "mfu_causal", "mfu_palm", "hfu", "mfu_megatron_ds", "hbm_peak_bytes", "hbm_reserved_bytes",
        "host_peak_bytes", "fits", "binding", "overlap", "assumptions")
"""What --json prints, beside its inputs."""
ISSUE = "issue"
"""The host thread that issues the ops, as a part of the critical path; `host` is memory."""


def summary(timeline: Timeline) -> dict:
    """KEYS -> values: seconds, shares (0 to 1), bytes per rank; fits says if HBM and the node's host memory hold it. binding is the
    space of which there is too little (hbm, host), or where it fits the part of the critical path that takes the longest."""
    path = critical_path(timeline)
    over = overrun(timeline)
    worst = max(over, key=over.get)
    return {
        **times(timeline), **utilization(timeline), "hbm_peak_bytes": peak_bytes(timeline, "hbm"), "hbm_reserved_bytes": reserved_bytes(timeline),
        "host_peak_bytes": peak_bytes(timeline, "host"), "fits": over[worst] <= 0, "binding": worst if over[worst] > 0 else max(path, key=path.get),
        "overlap": overlap(timeline)["both"], "assumptions": list(timeline.meta.get("assumptions", [])),
    }


def times(timeline: Timeline) -> dict[str, float]:
    """step_s: all; fwd_s: until the loss begins; bwd_s: from there to the last gradient (the last op of a region)."""
    begin = int(timeline.start_ns.min(initial=0))
    regions = timeline.stream != ROWS.index("external")
    last = int(timeline.end_ns[regions].max(initial=begin))
    turn = next((timeline.start_ns[m] for m in map(timeline.within, ("loss.", "bwd.")) if m.any()), np.array([last])).min()
    return {"step_s": _step_ns(timeline) / 1e9, "fwd_s": (int(turn) - begin) / 1e9, "bwd_s": (last - int(turn)) / 1e9}


def _step_ns(timeline: Timeline) -> int:
    return int(timeline.end_ns.max(initial=0)) - int(timeline.start_ns.min(initial=0))


def model_flops(model: Model, seq: int, save: str) -> dict[str, int]:
    """FLOPs of a step over S tokens by convention."""
    linear, pairs = 6 * model.matmul_params * seq, model.layers * seq * seq * model.q_dim
    token = 2 * seq * model.layers * model.hidden
    again = {"all": 0, "qkvo": token * (model.q_dim + model.up_dim)}
    again["o"] = again["qkvo"] + token * (model.q_dim + 2 * model.kv_dim)
    again["input"] = again["o"] + 2 * pairs
    full = linear + 12 * pairs
    return {
        "mfu_causal": linear + 6 * pairs, "mfu_palm": full, "hfu": linear + 6 * pairs + again[save],
        "mfu_megatron_ds": full * 4 // 3 if save == "input" else full,
    }


def utilization(timeline: Timeline) -> dict[str, float]:
    """Share of peak by convention, each under its own name."""
    m = timeline.meta
    peak = _step_ns(timeline) / 1e9 * m["P"] * m["numbers"]["peak_TFLOPS"] * 1e12
    flops = model_flops(Model(**m["model"]), m["seq"], m["strategy"]["save"])
    return {name: f / peak if peak else 0.0 for name, f in flops.items()}


def busy_ns(timeline: Timeline) -> dict[str, int]:
    """Stream -> ns during which it runs something (for the host: during which it blocks)."""
    return {stream: int(_Busy(timeline, stream).total) for stream in ROWS}


def overlap(timeline: Timeline) -> dict[str, float]:
    """Share of the copies' time during which compute is busy: hidden. By direction, and both together; 1 if there are no copies."""
    compute = _Busy(timeline, "compute")
    hidden, total, result = 0, 0, {}
    for way in ("h2d", "d2h"):
        mine = timeline.on(way)
        start, end = timeline.start_ns[mine], timeline.end_ns[mine]
        under, all_ns = int((compute.until(end) - compute.until(start)).sum()), int((end - start).sum())
        result[way] = under / all_ns if all_ns else 1.0
        hidden, total = hidden + under, total + all_ns
    return result | {"both": hidden / total if total else 1.0}


def peak_bytes(timeline: Timeline, space: str) -> int:
    """Most bytes a rank needs at one time: the maximum of a sum over time, not a sum of maxima."""
    rows = timeline.memory.get(space)
    return int(memory.total(rows).max(initial=0)) if rows else 0


def reserved_bytes(timeline: Timeline) -> int:
    """Most bytes of HBM that an allocator holds which has a pool a stream, as torch's: workspaces belong to the compute stream's, arguments and states to
    the caller's, and what one has grown to is not the other's."""
    rows = timeline.memory["hbm"]
    return int(rows["planned"].max(initial=0) + rows["workspace"].max(initial=0) + (rows["arguments"] + rows["states"]).max(initial=0))


def parts_at_peak(timeline: Timeline, space: str) -> dict[str, int]:
    """The bytes of each row that the peak is the sum of, when it is reached; it is reached first there."""
    rows = timeline.memory[space]
    at = int(memory.total(rows).argmax())
    return {row: int(rows[row][at]) for row in memory.COUNTED}


def overrun(timeline: Timeline) -> dict[str, int]:
    """Space -> bytes beyond its capacity, negative where there is room. Host memory is a node's, shared by its ranks."""
    n = timeline.meta["numbers"]
    ranks = min(timeline.meta["P"], int(n["gpus_per_node"]))
    return {"hbm": peak_bytes(timeline, "hbm") - int(n["hbm_bytes"]), "host": ranks * peak_bytes(timeline, "host") - int(n["host_bytes"])}


def critical_path(timeline: Timeline) -> dict[str, int]:
    """Stream (or issue) -> ns of the chain that ends last, walked back from the last span.

    A span follows the one before it on its stream if that ended just before (the machine's gap); else the one that ended last
    on any stream. Time in which nothing ended is `issue`, the host thread's: the op was not issued yet.
    """
    n = timeline.meta.get("numbers", {})
    gap, wake = n.get("gap_ns", 0), n.get("wake_ns", 0)
    path = dict.fromkeys((*(row for row in ROWS if row != "host"), ISSUE), 0)
    chains = {s: c for s in ROWS if s != "host" and len((c := _Chains(timeline, s, gap)).end)}
    if not chains:
        return path
    stream = max(chains, key=lambda s: chains[s].end[-1])
    k = len(chains[stream].end) - 1
    begin = min(c.start.item(0) for c in chains.values())
    now = chains[stream].end.item(k)
    while True:
        head = chains[stream].head.item(k)
        start = chains[stream].start.item(head)
        path[stream] += now - start
        before = {s: c.last_until(start, head if s == stream else len(c.end)) for s, c in chains.items()}
        before = {s: i for s, i in before.items() if i >= 0}
        if not before:
            path[ISSUE] += start - begin
            return path
        stream = max(before, key=lambda s: chains[s].end.item(before[s]))
        k = before[stream]
        now = chains[stream].end.item(k)
        if start - now > max(gap, wake):
            path[ISSUE] += start - now


class _Chains:
    """Spans of a stream in time order, and where each one's unbroken chain begins."""

    def __init__(self, timeline: Timeline, stream: str, gap: float) -> None:
        mine = timeline.on(stream)
        start, end = timeline.start_ns[mine], timeline.end_ns[mine]
        if stream == "external":
            order = np.argsort(end, kind="stable")
            start, end = start[order], end[order]
        self.start, self.end = start, end
        broken = np.r_[True, (start[1:] - end[:-1] > gap) | (start[1:] < end[:-1])] if len(end) else np.zeros(0, bool)
        self.head = np.maximum.accumulate(np.where(broken, np.arange(len(end)), 0)) if len(end) else broken

    def last_until(self, t: int, below: int) -> int:
        """The last span, of the first `below`, that ended by t; -1 if none did."""
        return min(self.end.searchsorted(t, "right").item(), below) - 1


class _Busy:
    """How long a stream was busy until any time."""

    def __init__(self, timeline: Timeline, stream: str) -> None:
        mine = timeline.on(stream)
        start, end = timeline.start_ns[mine], timeline.end_ns[mine]
        if len(start) and (start[1:] < end[:-1]).any():
            start, end = _merge(start, end)
        self.start, self.end = start, end
        self.sums = np.r_[0, np.cumsum(end - start)]

    @property
    def total(self) -> int:
        return self.sums[-1]

    def until(self, t: np.ndarray) -> np.ndarray:
        """ns busy before each t."""
        if not len(self.start):
            return np.zeros(len(t), np.int64)
        k = np.searchsorted(self.start, t, side="right")
        return np.where(k > 0, self.sums[k - 1] + np.minimum(t, self.end[k - 1]) - self.start[k - 1], 0)


def _merge(start: np.ndarray, end: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Union of overlapping intervals."""
    order = np.argsort(start, kind="stable")
    start, reach = start[order], np.maximum.accumulate(end[order])
    new = np.r_[True, start[1:] > reach[:-1]]
    return start[new], reach[np.r_[np.flatnonzero(new)[1:] - 1, len(reach) - 1]]


def longest_fit(model: Model, strategy: Strategy, machine: Machine, dtype: str = "bf16") -> int:
    """The longest S, of 2^k and 3 x 2^k tokens, that fits the machine; 0 if none does.

    Up to a dozen chunks are planned and simulated, or so many that the resident share of them and of half as many is whole; from there
    memory grows by the same bytes a chunk, so it is extended.
    """
    from sim.build.step import build
    from sim.simulate import simulate

    def over(seq: int) -> dict[str, int]:
        return overrun(simulate(build(model, strategy, seq, dtype), strategy, machine))

    half = next((u for u in (6, 8) if u * strategy.resident % 1 == 0), 10)
    few, more = half * strategy.chunk, 2 * half * strategy.chunk
    a, b = over(few), over(more)

    def fits(seq: int) -> bool:
        try:
            strategy.check(model, seq)
            there = over(seq) if seq < more else {s: b[s] + (b[s] - a[s]) * (seq - more) // (more - few) for s in b}
        except UserError:
            return False
        return max(there.values()) <= 0

    sizes = sorted((m << k for k in range(36) for m in (2, 3)), reverse=True)
    return next((s for s in sizes if s >= strategy.sp and fits(s)), 0)
