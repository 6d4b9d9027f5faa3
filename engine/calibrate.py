"""Calibrate: cost curves of this machine, from the engine's own timelines at sizes other than those that will be predicted,
and what timelines do not tell from microbenchmarks (engine.micro).

A few short schedules are run and traced. Each op gives one point (its cost key, GFLOPs, MB, ns); each key gets the line
ns = fixed + a GFLOPs + b MB that has the smallest relative error, with no negative term. Latencies come from the same traces.
"""
from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import asdict, replace

import numpy as np

from engine import probe
from engine.alone import alone
from engine.clocks import power_TFLOPS, reference_MHz
from engine.lines import Point, fit
from engine.micro.fit import improved, slowdown_of
from engine.micro.place import Plan
from engine.micro.table import own_heads
from engine.worker import Job, Run
from engine.world import started, world
from sim import text
from sim.build.step import build
from sim.cost import features
from sim.externals import moved_bytes
from sim.machine import Machine, published
from sim.model import Model
from sim.ops import KINDS, key, sub_chunks
from sim.schedule import PREV, Schedule
from sim.strategy import Strategy

CHUNKS = {"cpu": (384, 768, 1536, 3072), "cuda": (7168, 14336, 28672, 57344)}
"""Chunk lengths of the calibration runs, in tokens."""
SEQ = 75264
"""S of all of them on a GPU: long enough for steps in which it never idles; the last chunk is short, which is another size. On a CPU: three chunks,
so that every kind of op occurs."""
LOADS = {"cpu": (), "cuda": ((21504, 7168), (112896, 28672))}
"""(S, C) of two more runs, one mostly products, one mostly attention: clocks of very different steps tell what the power allows."""
LOAD_S = {"cpu": 0.0, "cuda": 2.0}
"""Seconds of steps before the first that counts: a GPU's clock settles under load, and falls below that at first."""


def schedules(model: Model, P: int, dtype: str, strategy: Strategy = Strategy(), device: str = "cpu") -> list[Schedule]:
    """One-layer schedules of a strategy that touch every op kind at several sizes."""
    return [_schedule(model, P, dtype, strategy, device, 3 * chunk if device == "cpu" else SEQ, chunk) for chunk in CHUNKS[device]]


def loads(model: Model, P: int, dtype: str, strategy: Strategy = Strategy(), device: str = "cpu") -> list[Schedule]:
    """One-layer schedules of a strategy that load a GPU differently, without copies."""
    return [_schedule(model, P, dtype, strategy.replace(offload=False), device, seq, chunk) for seq, chunk in LOADS[device]]


def _schedule(model: Model, P: int, dtype: str, strategy: Strategy, device: str, seq: int, chunk: int) -> Schedule:
    seq, chunk = (-(-tokens // P) * P for tokens in (seq, chunk))
    strategy = strategy.replace(sp=P, chunk=chunk, hidden="hbm", host_sync="region" if device == "cpu" else "none", alloc="plan", zero=0)
    return build(replace(model, layers=1), strategy, seq, dtype)


def jobs(made: list[Schedule], link_GBps: float | None = None, device: str = "cpu") -> list[Job]:
    """A traced job for each schedule, on a GPU at its steady clock; what ops cost the host is asked where there are fewest."""
    gpu, longest = device != "cpu", max(s.chunk for s in made)
    return [Job(text.show(s), steps=6 if gpu else 2, lr=0.0, link_GBps=link_GBps, trace_every=1, device=device, load_s=LOAD_S[device], footprint=gpu, issue=gpu and s.chunk == longest) for s in made]


def points(schedule: Schedule, run: Run, slowdown: dict[str, dict], faster: float = 1.0) -> dict[str, list[Point]]:
    """By cost key: one point an op, the median over the traced steps of what it would have taken alone, and were compute not so many times as fast."""
    spent, outside = defaultdict(list), defaultdict(lambda: defaultdict(int))
    for step, trace in run.traces.items():
        for id, _, stream, start, end in alone(trace, slowdown):
            if stream == "external":
                outside[id][step] += end - start
            else:
                spent[id].append(end - start)
    found = defaultdict(list)
    for region in schedule.regions.values():
        for op in region.ops:
            if op.id in spent and op.stream != "host":
                ns = float(np.median(spent[op.id])) * (faster if op.stream == "compute" else 1.0)
                found[key(op)].append((*features(KINDS[op.kind].work(op, schedule)), ns))
    for name, size in moved_bytes(schedule, 0).items():
        if size and (times := outside.get(name.replace("_", ".", 1))):
            found[name].append((0.0, size / 1e6, float(np.median(list(times.values())))))
    return dict(found)


def pooled(made: list[Schedule], runs: list[Run], slowdown: dict[str, dict] = {}) -> dict[str, list[Point]]:
    """The points of all runs, by cost key. slowdown: how fast streams run together, as a machine has it."""
    found: dict[str, list[Point]] = defaultdict(list)
    reference = reference_MHz(runs)
    for schedule, run in zip(made, runs):
        for k, some in points(schedule, run, slowdown, run.sensed["clock_MHz"] / reference if reference else 1.0).items():
            found[k] += some
    return dict(found)


def curves(made: list[Schedule], runs: list[Run], source: str, slowdown: dict[str, dict] = {}) -> dict[str, dict]:
    """By cost key, the line through the points of all these runs, and what the host pays to issue such an op."""
    paid = issued(made, runs)
    return {k: fit(found) | ({"issue_ns": paid[k]} if k in paid else {}) | {"source": source} for k, found in sorted(pooled(made, runs, slowdown).items())}


def issued(made: list[Schedule], runs: list[Run]) -> dict[str, float]:
    """By cost key, ns a sub-chunk, the median over all ops of all runs that told it."""
    found = defaultdict(list)
    for schedule, run in zip(made, runs):
        for op in (op for region in schedule.regions.values() for op in region.ops if op.id in run.issue_ns):
            found[key(op)].append(run.issue_ns[op.id] / sub_chunks(op, schedule))
    return {k: float(np.median(ns)) for k, ns in found.items()}


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


def beside(run: Run) -> list[int]:
    """Of each traced step, its ns before its first span and after its last."""
    return [run.step_ns[step] - (max(end for *_, end in trace) - min(start for *_, start, _ in trace)) for step, trace in run.traces.items()]


def profile(
    model: Model, P: int, dtype: str, made: list[Schedule], runs: list[Run], link_GBps: float | None, device: str = "cpu", slowdown: dict[str, dict] = {},
) -> Machine:
    """The machine that these runs measured, on which streams are known to slow each other so. Several runs of one schedule (rounds) are pooled."""
    late: dict[str, list[int]] = defaultdict(list)
    for schedule, run in zip(made, runs):
        for k, found in latencies(schedule, run).items():
            late[k] += found
    source = f"measured: {probe.provenance()}, {len(runs)} runs of {', '.join(sorted({f'S={s.seq} C={s.chunk}' for s in made}))}"
    tiny = build(replace(model, layers=1), Strategy(sp=1, chunk=16, zero=0), 128, dtype)
    fits = curves(made, runs, source, slowdown)
    best = probe.best_gemm_TFLOPS(dtype, device)
    of_kind = issued(made, runs)
    paid = [ns for run in runs for region, ns in run.issue_ns.items() if "." not in region]
    values = {
        "peak_TFLOPS": best, "gemm_TFLOPS": best, "attn_fwd_TFLOPS": _tflops(fits, "attn"), "attn_bwd_TFLOPS": _tflops(fits, "attn_bwd+merge"),
        "hbm_GBps": 10.0, "h2d_GBps": link_GBps or _copy(fits, "reload"), "d2h_GBps": link_GBps or _copy(fits, "offload"),
        "nvlink_GBps": _copy(fits, "a2a"), "network_GBps": _copy(fits, "a2a"),
        "launch_ns": min(of_kind.values()) if of_kind else probe.launch_ns(tiny, device), "wake_ns": _median(late["wake_ns"]), "gap_ns": _median(late["gap_ns"]),
        **({"region_ns": _median(paid)} if paid else {}), "step_ns": _median([ns for run in runs for ns in beside(run)]),
    }
    numbers = {k: {"value": v, "source": source} for k, v in values.items()}
    numbers["peak_name"] = {"value": f"best GEMM of the calibration ({dtype}, one {'core' if device == 'cpu' else 'GPU'})", "source": source}
    if device == "cuda" and (known := published(probe.gpu(), dtype)):
        numbers |= {name: known.numbers[name] for name in ("peak_TFLOPS", "peak_name")}
    if reference := reference_MHz(runs):
        numbers["clock_MHz"] = {"value": round(reference), "source": source}
        if most := probe.clock_max_MHz():
            numbers["clock_max_MHz"] = {"value": most, "source": f"measured: {probe.provenance()}, as its driver says"}
            if allowed := power_TFLOPS(made, runs, most):
                numbers["power_TFLOPS"] = {"value": float(f"{allowed:.4g}"), "source": source}
    if blas := [run.memory_bytes["blas"] for run in runs if run.memory_bytes.get("blas")]:
        numbers["blas_bytes"] = {"value": int(np.median(blas)), "source": source}
    if kernel := next((run.kernel for run in runs if run.kernel), ""):
        numbers["kernel"] = {"value": kernel, "source": source}
    numbers |= {name: {"value": value, "source": "measured: the model of the calibration"} for name, value in (("model", model.name), ("head_dim", model.head_dim))}
    here = world().local_size if started() else P
    numbers["dtype"] = {"value": dtype, "source": source}
    numbers["hbm_GBps"]["source"] = "assumed: used only for ops that no calibration run touched"
    if P == 1:
        numbers |= {name: {"value": values[name], "source": "assumed: a placeholder, since one rank sends nothing; calibrate on more for P > 1"} for name in ("nvlink_GBps", "network_GBps")}
    numbers |= {
        "gpus_per_node": {"value": here, "source": "measured: ranks of the calibration"},
        "gpus_per_uplink": {"value": 1, "source": "assumed: copies are timed while all ranks copy"},
    } | probe.capacities(here, device)
    return Machine(device, device, numbers, fits, slowdown, where=f"calibration of {device}")


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
    strategy: Strategy = Strategy(), device: str = "cpu", micro: Callable[[Plan], list[dict]] | None = None,
) -> Machine:
    """Runs the calibration through `run_jobs` (engine.ranks, or in this process) and fits a machine for schedules of this strategy.

    `micro` runs the microbenchmarks of a plan, which tell what timelines do not; without it that stays N/A.
    """
    plan, source = Plan(asdict(model), P, dtype, device), f"measured: {probe.provenance()}, microbenchmarks"
    told = micro(plan) if micro else []
    slowdown = slowdown_of(told, source)
    made = schedules(model, P, dtype, strategy, device) + loads(model, P, dtype, strategy, device)
    runs = run_jobs(jobs(made, link_GBps, device))
    machine = profile(model, P, dtype, made, runs, link_GBps, device, slowdown)
    return improved(machine, told, pooled(made, runs, slowdown), P, source, own_heads(plan)) if told else machine
