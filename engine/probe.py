"""Probe: what a machine is and has, and the two of its numbers that no timeline gives."""
from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from datetime import date
from pathlib import Path

import numpy as np
import torch

from engine.arenas import DTYPES
from engine.compile import Program
from engine.meter import number
from engine.model import LanguageModel
from engine.worker import Job, backend, check_gpus
from engine.world import started, world
from sim import text
from sim.errors import UserError
from sim.schedule import Schedule


def device() -> str:
    """cuda where there is a GPU, else cpu."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def best_gemm_TFLOPS(dtype: str, device: str = "cpu", tries: int = 4) -> float:
    """The best rate of one square GEMM, on one thread or one GPU."""
    size = 1536 if device == "cpu" else 8192
    torch.set_num_threads(1)
    a = torch.randn(size, size, device=device).to(DTYPES[dtype])
    best = float("inf")
    for _ in range(tries):
        _wait(device)
        start = time.perf_counter()
        a @ a
        _wait(device)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best / 1e12


def launch_ns(schedule: Schedule, device: str = "cpu", tries: int = 3) -> float:
    """Host time to issue one op: the issue loop of a tiny forward, per op."""
    streams, kernel = backend(Job(text.show(schedule), device=device), schedule, 0)
    try:
        program = Program(schedule, streams, kernel)
        block = LanguageModel(program).blocks[0].to(device)
        x = torch.zeros(schedule.seq, schedule.model.hidden, dtype=DTYPES[schedule.dtype], device=device)
        arguments = {"x": x, "y": torch.empty_like(x), **{n: block.get_parameter(n).detach().to(x.dtype) for n in block.names}}
        spent = []
        for _ in range(tries):
            start = time.perf_counter_ns()
            program.run("fwd", 0, arguments)
            spent.append((time.perf_counter_ns() - start) / len(schedule.regions["fwd"].ops))
            streams.settle()
        return float(np.median(spent))
    finally:
        streams.close()


def capacities(P: int, device: str) -> dict[str, dict]:
    """hbm_bytes, host_bytes and queue_depth as a machine's numbers. On CPU both spaces share the memory there is."""
    ram = memory_bytes()
    if device == "cuda":
        return {
            "hbm_bytes": {"value": torch.cuda.get_device_properties(0).total_memory, "source": f"measured: {provenance()}"},
            "host_bytes": {"value": ram, "source": f"measured: {provenance()}, a container's limit heeded"},
            "queue_depth": {"value": 1000, "source": "assumed: about a thousand launches, as CUDA drivers have"},
        }
    half = f"assumed: half of this machine's memory ({ram} bytes, a container's limit heeded)"
    return {
        "hbm_bytes": {"value": ram // 2 // P, "source": half + ", shared by the ranks"},
        "host_bytes": {"value": ram // 2, "source": half},
        "queue_depth": {"value": 1_000_000, "source": "assumed: a Python queue has no limit"},
    }


def memory_bytes() -> int:
    """RAM of this machine, or a container's limit below it."""
    found = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        if Path(path).exists() and (limit := Path(path).read_text().strip()).isdigit():
            found.append(int(limit))
    return min(found)


def hbm_bytes(ranks: int) -> int:
    """Free memory of the fullest of the GPUs that this node's ranks take; of its own where this process is such a rank.

    Asked in a process of its own: whoever asks takes some hundred MB on each GPU, for as long as it lives.
    """
    if started():
        return torch.cuda.mem_get_info(world().local_rank)[0]
    check_gpus(ranks)
    ask = f"import torch; print(min(torch.cuda.mem_get_info(gpu)[0] for gpu in range({ranks})))"
    answer = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True)
    if answer.returncode:
        raise UserError(f"the GPUs do not answer: {(answer.stderr.strip() or 'nothing was said').splitlines()[-1]}; see nvidia-smi")
    return int(answer.stdout)


def clock_max_MHz() -> float | None:
    """The most that the GPUs' SM clock may be, None where nothing answers."""
    try:
        said = subprocess.run(["nvidia-smi", "--query-gpu=clocks.max.sm", "--format=csv,noheader,nounits"], capture_output=True, text=True, errors="replace", timeout=10).stdout
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = [number(line) for line in said.splitlines()]
    return min(found) if found and all(found) else None


def gpu() -> str:
    """What the driver calls the first GPU."""
    return torch.cuda.get_device_name(0)


def provenance() -> str:
    """Date, processor and versions, in one line."""
    cpu = next((line.split(":", 1)[1].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")), platform.machine())
    gpus = f", {torch.cuda.device_count()} x {gpu()}" if torch.cuda.is_available() else ""
    return f"{date.today()}, {cpu}, {os.cpu_count()} cores{gpus}, Python {platform.python_version()}, torch {torch.__version__.split('+')[0]}"


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
