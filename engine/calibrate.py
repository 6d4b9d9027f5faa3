"""Calibrate: cost curves of a CPU machine, from the engine's own timelines at sizes other than those that will be predicted.

A few short schedules are run and traced. Each op gives one point (its cost key, GFLOPs, MB, ns); each key gets the line
ns = fixed + a GFLOPs + b MB that has the smallest relative error, with no negative term. Latencies come from the same traces.
"""
from __future__ import annotations

import os
import platform
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from datetime import date
from pathlib import Path

import numpy as np
from scipy.optimize import nnls

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

CHUNKS = (384, 768, 1536, 3072)
"""Chunk lengths of the calibration runs, in tokens; each runs over three chunks, so that every kind of op occurs."""


def schedules(model: Model, P: int, dtype: str, prefetch: int = 2, chunks: tuple[int, ...] = CHUNKS) -> list[Schedule]:
    """One-layer schedules that touch every op kind at several sizes."""
    one = replace(model, layers=1)
    made = []
    for chunk in chunks:
        chunk = -(-chunk // P) * P
        strategy = Strategy(sp=P, chunk=chunk, prefetch=prefetch, host_sync="region", zero=0)
        made.append(build(one, strategy, 3 * chunk, dtype))
    return made


def jobs(made: list[Schedule], link_GBps: float | None = None, steps: int = 3) -> list[Job]:
    """A traced job for each schedule."""
    return [Job(text.show(s), steps=steps, link_GBps=link_GBps, trace_every=1) for s in made]


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


def best_gemm_TFLOPS(dtype: str, size: int = 1536, tries: int = 4) -> float:
    """The best rate of one square GEMM on one thread."""
    import torch

    torch.set_num_threads(1)
    a = torch.randn(size, size).to({"fp32": torch.float32, "bf16": torch.bfloat16}[dtype])
    best = float("inf")
    for _ in range(tries):
        start = time.perf_counter()
        a @ a
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best / 1e12


def launch_ns(schedule: Schedule, tries: int = 3) -> float:
    """Host time to issue one op: the issue loop of a tiny forward, per op."""
    import torch

    from engine.arenas import DTYPES
    from engine.backend.cpu import CpuBackend
    from engine.compile import Program
    from engine.kernels import cpu_flash
    from engine.model import LanguageModel

    backend = CpuBackend()
    try:
        program = Program(schedule, backend, cpu_flash)
        block = LanguageModel(program).blocks[0]
        x = torch.zeros(schedule.seq, schedule.model.hidden, dtype=DTYPES[schedule.dtype])
        arguments = {"x": x, "y": torch.empty_like(x), **{n: block.get_parameter(n).detach().to(x.dtype) for n in block.names}}
        spent = []
        for _ in range(tries):
            start = time.perf_counter_ns()
            program.run("fwd", 0, arguments)
            spent.append((time.perf_counter_ns() - start) / len(schedule.regions["fwd"].ops))
            program.join()
        return float(np.median(spent))
    finally:
        backend.close()


def profile(model: Model, P: int, dtype: str, made: list[Schedule], runs: list[Run], link_GBps: float | None, name: str = "cpu") -> Machine:
    """The machine that these runs measured. Several runs of one schedule (rounds) are pooled."""
    pooled: dict[str, list[Point]] = defaultdict(list)
    late: dict[str, list[int]] = defaultdict(list)
    for schedule, run in zip(made, runs):
        for k, found in points(schedule, run).items():
            pooled[k] += found
        for k, found in latencies(schedule, run).items():
            late[k] += found
    source = f"measured: {provenance()}, {len(runs)} runs of {', '.join(sorted({f'S={s.seq} C={s.chunk}' for s in made}))}"
    tiny = build(replace(model, layers=1), Strategy(sp=1, chunk=16, zero=0), 128, dtype)
    fits = {k: fit(found) | {"source": source} for k, found in sorted(pooled.items())}
    ram = memory_bytes()
    half = f"assumed: half of this machine's memory ({ram} bytes, a container's limit heeded)"
    peak = best_gemm_TFLOPS(dtype)

    values = {
        "peak_TFLOPS": peak, "gemm_TFLOPS": peak, "attn_fwd_TFLOPS": _tflops(fits, "attn"), "attn_bwd_TFLOPS": _tflops(fits, "attn_bwd+merge"),
        "hbm_GBps": 10.0, "h2d_GBps": link_GBps or _copy(fits, "reload"), "d2h_GBps": link_GBps or _copy(fits, "offload"),
        "nvlink_GBps": _copy(fits, "a2a"), "network_GBps": _copy(fits, "a2a"),
        "launch_ns": launch_ns(tiny), "wake_ns": _median(late["wake_ns"]), "gap_ns": _median(late["gap_ns"]),
    }
    numbers = {k: {"value": v, "source": source} for k, v in values.items()}
    numbers["hbm_GBps"]["source"] = "assumed: used only for ops that no calibration run touched"
    numbers |= {
        "peak_name": {"value": f"best GEMM of the calibration ({dtype}, one core)", "source": source},
        "hbm_bytes": {"value": ram // 2 // P, "source": half + ", shared by the ranks"},
        "host_bytes": {"value": ram // 2, "source": half},
        "gpus_per_node": {"value": P, "source": "measured: ranks of the calibration"},
        "gpus_per_uplink": {"value": 1, "source": "assumed: copies are timed while all ranks copy"},
        "queue_depth": {"value": 1_000_000, "source": "assumed: a Python queue has no limit"},
    }
    return Machine(name, "cpu", numbers, fits, {}, f"calibration of {name}")


def _tflops(fits: dict, key: str) -> float:
    slope = fits.get(key, {}).get("ns_per_gflop", 0)
    return 1e6 / slope if slope else 0.1


def _copy(fits: dict, key: str) -> float:
    slope = fits.get(key, {}).get("ns_per_MB", 0)
    return 1e6 / slope if slope else 5.0


def _median(values: list[int]) -> float:
    return max(0.0, float(np.median(values))) if values else 0.0


def memory_bytes() -> int:
    """RAM of this machine, or a container's limit below it."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        if Path(path).exists() and (limit := Path(path).read_text().strip()).isdigit():
            found.append(int(limit))
    return min(found)


def provenance() -> str:
    """Date, processor and versions, in one line."""
    import torch

    cpu = next((line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), platform.machine())
    return f"{date.today()}, {cpu}, {os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__.split('+')[0]}"


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def calibrate(model: Model, P: int, dtype: str, run_jobs: Callable[[list[Job]], list[Run]], link_GBps: float | None = None) -> Machine:
    """Runs the calibration through `run_jobs` (engine.worker.launch, or in this process) and fits a machine."""
    made = schedules(model, P, dtype)
    return profile(model, P, dtype, made, run_jobs(jobs(made, link_GBps)), link_GBps)
