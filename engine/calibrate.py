"""Calibrate: cost curves of this machine, from the engine's own timelines at sizes other than those that will be predicted.

A few short schedules are run and traced. Each op gives one point (its cost key, GFLOPs, MB, ns); each key gets the line
ns = fixed + a GFLOPs + b MB that has the smallest relative error, with no negative term. Latencies come from the same traces.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace

import numpy as np
from scipy.optimize import nnls

from engine import probe
from engine.worker import Job, Run
from sim import text
from sim.build.step import build
from sim.cost import features
from sim.externals import moved_bytes
from sim.machine import Machine
from sim.model import Model
from sim.ops import KINDS, key
from sim.schedule import PREV, Schedule
from sim.strategy import Strategy

CHUNKS = {"cpu": (384, 768, 1536, 3072), "cuda": (6144, 12288, 24576)}
"""Chunk lengths of the calibration runs, in tokens; each runs over three chunks, so that every kind of op occurs."""


def schedules(model: Model, P: int, dtype: str, strategy: Strategy = Strategy(), device: str = "cpu") -> list[Schedule]:
    """One-layer schedules of a strategy that touch every op kind at several sizes."""
    one = replace(model, layers=1)
    made = []
    for chunk in CHUNKS[device]:
        chunk = -(-chunk // P) * P
        strategy = strategy.replace(sp=P, chunk=chunk, hidden="hbm", host_sync="region" if device == "cpu" else "none", zero=0)
        made.append(build(one, strategy, 3 * chunk, dtype))
    return made


def jobs(made: list[Schedule], link_GBps: float | None = None, device: str = "cpu") -> list[Job]:
    """A traced job for each schedule; a GPU gets seconds of load, so that the last and longest is measured at its steady clock."""
    return [Job(text.show(s), steps=2 if device == "cpu" else 6, link_GBps=link_GBps, trace_every=1, device=device) for s in made]


Point = tuple[float, float, float]
"""(GFLOPs, MB, ns)."""


def points(schedule: Schedule, run: Run) -> dict[str, list[Point]]:
    """By cost key: one point an op, the median over the traced steps."""
    spent = defaultdict(list)
    for trace in run.traces.values():
        for id, _, _, start, end in trace:
            spent[id].append(end - start)
    found = defaultdict(list)
    for region in schedule.regions.values():
        for op in region.ops:
            if op.id in spent and op.stream != "host":
                found[key(op)].append((*features(KINDS[op.kind].work(op, schedule)), float(np.median(spent[op.id]))))
    for name, size in moved_bytes(schedule, 0).items():
        if times := spent.get(name.replace("_", ".", 1)):
            found[name].append((0.0, size / 1e6, float(np.median(times))))
    return dict(found)


def fit(samples: list[Point]) -> dict[str, float]:
    """The line through points of one key: fixed_ns, ns_per_gflop, ns_per_MB, none negative, least relative error."""
    by_size = defaultdict(list)
    for gflop, megabytes, ns in samples:
        by_size[gflop, megabytes].append(ns)
    rows = np.array([(1.0, *size) for size in by_size])
    ns = np.array([np.median(times) for times in by_size.values()])
    scale = np.maximum(np.abs(rows).max(0), 1e-12)
    usable = rows / scale / ns[:, None]
    if len(ns) == 1:
        usable[:, 0] = 0  # one size tells no fixed part: proportional to work
    coefficients, _ = nnls(usable, np.ones(len(ns)))
    return dict(zip(("fixed_ns", "ns_per_gflop", "ns_per_MB"), (coefficients / scale).tolist()))


def curves(made: list[Schedule], runs: list[Run], source: str) -> dict[str, dict]:
    """By cost key, the line through the points of all these runs."""
    pooled: dict[str, list[Point]] = defaultdict(list)
    for schedule, run in zip(made, runs):
        for k, found in points(schedule, run).items():
            pooled[k] += found
    return {k: fit(found) | {"source": source} for k, found in sorted(pooled.items())}


def latencies(schedule: Schedule, run: Run) -> dict[str, list[int]]:
    """gap_ns: between ops of one stream, the second being ready; wake_ns: after a wait on another stream that took longer."""
    found: dict[str, list[int]] = {"gap_ns": [], "wake_ns": []}
    waits = {op.id: [w for w in op.waits if not w.startswith(PREV)] for r in schedule.regions.values() for op in r.ops}
    for trace in run.traces.values():
        end: dict[str, int] = {}
        tail: dict[str, int] = {}
        for id, _, stream, start, stop in trace:
            if stream in ("host", "external"):
                end.clear(), tail.clear()
                continue
            waited = max((end[w] for w in waits[id] if w in end), default=0)
            if stream in tail:
                found["wake_ns" if waited > tail[stream] else "gap_ns"].append(start - max(waited, tail[stream]))
            end[id] = tail[stream] = stop
    return found


def profile(model: Model, P: int, dtype: str, made: list[Schedule], runs: list[Run], link_GBps: float | None, device: str = "cpu") -> Machine:
    """The machine that these runs measured. Several runs of one schedule (rounds) are pooled."""
    late: dict[str, list[int]] = defaultdict(list)
    for schedule, run in zip(made, runs):
        for k, found in latencies(schedule, run).items():
            late[k] += found
    source = f"measured: {probe.provenance()}, {len(runs)} runs of {', '.join(sorted({f'S={s.seq} C={s.chunk}' for s in made}))}"
    tiny = build(replace(model, layers=1), Strategy(sp=1, chunk=16, zero=0), 128, dtype)
    fits = curves(made, runs, source)
    best = probe.best_gemm_TFLOPS(dtype, device)
    values = {
        "peak_TFLOPS": best, "gemm_TFLOPS": best, "attn_fwd_TFLOPS": _tflops(fits, "attn"), "attn_bwd_TFLOPS": _tflops(fits, "attn_bwd+merge"),
        "hbm_GBps": 10.0, "h2d_GBps": link_GBps or _copy(fits, "reload"), "d2h_GBps": link_GBps or _copy(fits, "offload"),
        "nvlink_GBps": _copy(fits, "a2a"), "network_GBps": _copy(fits, "a2a"),
        "launch_ns": probe.launch_ns(tiny, device), "wake_ns": _median(late["wake_ns"]), "gap_ns": _median(late["gap_ns"]),
    }
    numbers = {k: {"value": v, "source": source} for k, v in values.items()}
    numbers["peak_name"] = {"value": f"best GEMM of the calibration ({dtype}, one {'core' if device == 'cpu' else 'GPU'})", "source": source}
    if kernel := next((run.kernel for run in runs if run.kernel), ""):
        numbers["kernel"] = {"value": kernel, "source": source}
    numbers["dtype"] = {"value": dtype, "source": source}
    numbers["hbm_GBps"]["source"] = "assumed: used only for ops that no calibration run touched"
    numbers |= {
        "gpus_per_node": {"value": P, "source": "measured: ranks of the calibration"},
        "gpus_per_uplink": {"value": 1, "source": "assumed: copies are timed while all ranks copy"},
    } | probe.capacities(P, device)
    return Machine(device, device, numbers, fits, {}, f"calibration of {device}")


def _tflops(fits: dict, key: str) -> float:
    slope = fits.get(key, {}).get("ns_per_gflop", 0)
    return 1e6 / slope if slope else 0.1


def _copy(fits: dict, key: str) -> float:
    slope = fits.get(key, {}).get("ns_per_MB", 0)
    return 1e6 / slope if slope else 5.0


def _median(values: list[int]) -> float:
    return max(0.0, float(np.median(values))) if values else 0.0


def calibrate(
    model: Model, P: int, dtype: str, run_jobs: Callable[[list[Job]], list[Run]], link_GBps: float | None = None,
    strategy: Strategy = Strategy(), device: str = "cpu",
) -> Machine:
    """Runs the calibration through `run_jobs` (engine.ranks, or in this process) and fits a machine for schedules of this strategy."""
    made = schedules(model, P, dtype, strategy, device)
    return profile(model, P, dtype, made, run_jobs(jobs(made, link_GBps, device)), link_GBps, device)
