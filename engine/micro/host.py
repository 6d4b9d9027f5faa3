"""Host: what the host thread pays on a GPU: a launch, a block, a full launch queue, pinned memory. All of it N/A on a CPU."""
from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median

import torch

from engine.kernels.rates import in_a_line
from engine.micro.place import Place

LAUNCHES = 200
HOLD_CYCLES = 700_000_000
"""About 0.4 s: the device does nothing else while the launch queue fills."""
MOST_QUEUED = 8192
BLOCKED_S = 0.02
PIN_BYTES = (64 << 20, 256 << 20, 1 << 30)
"""Powers of two, which the stock allocator does not round."""


def measure_host(place: Place, rounds: int) -> list[dict]:
    """Points as micro.measure gives them: ns, its spread, and how much it was."""
    if place.device.type != "cuda":
        return []
    small = torch.zeros(16, device=place.device)
    found = [
        _point(place, "launch", {}, rounds, lambda: _launch(small)),
        _point(place, "sync", {}, rounds, lambda: _sync(small)),
        _point(place, "launch queue", {}, 1, lambda: _queue(small), "entries"),
    ]
    for size in PIN_BYTES:
        taken: list[torch.Tensor] = []  # kept until the size is done, so that none is a cached one
        found.append(_point(place, "pin", {"bytes": size}, min(rounds, 3), lambda: _pin(size, taken)))
        found.append(_point(place, "zero pinned", {"bytes": size}, min(rounds, 3), lambda: _zero(taken[-1])))
        taken.clear()
        _forget_pinned()
    return found


def _point(place: Place, name: str, args: dict, rounds: int, once: Callable[[], float | None], unit: str = "ns") -> dict:
    values, why = [], ""
    for _ in range(rounds):
        try:
            mine = once()
        except Exception as error:
            mine, why = None, in_a_line(error)
        failed, value = place.most(float(mine is None), mine or 0.0)
        if not failed:
            values.append(value)
    row = {"name": name, "args": args}
    if not values:
        return row | {unit: None, "why": why or "no limit was met"}
    return row | {unit: round(median(values)), f"low_{unit}": round(min(values)), f"high_{unit}": round(max(values)), "rounds": len(values)}


def _launch(small: torch.Tensor) -> float:
    """Host ns to issue one small kernel, the queue being neither empty nor full."""
    torch.cuda.synchronize()
    small.mul_(1)
    start = time.perf_counter_ns()
    for _ in range(LAUNCHES):
        small.mul_(1)
    spent = (time.perf_counter_ns() - start) / LAUNCHES
    torch.cuda.synchronize()
    return spent


def _sync(small: torch.Tensor) -> float:
    """ns from a kernel's end until the host that waits for it goes on, the latency of its launch included."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start = time.perf_counter_ns()
    begin.record()
    torch.cuda._sleep(2_000_000)
    end.record()
    end.synchronize()
    spent = time.perf_counter_ns() - start
    return max(0.0, spent - begin.elapsed_time(end) * 1e6)


def _queue(small: torch.Tensor) -> float | None:
    """How many launches go in before one blocks; None where none does."""
    torch.cuda.synchronize()
    torch.cuda._sleep(HOLD_CYCLES)
    before, depth = time.perf_counter(), None
    for k in range(MOST_QUEUED):
        small.mul_(1)
        now = time.perf_counter()
        if now - before > BLOCKED_S:
            depth = k
            break
        before = now
    torch.cuda.synchronize()
    return None if depth is None else float(depth)


def _pin(size: int, taken: list[torch.Tensor]) -> float:
    start = time.perf_counter_ns()
    taken.append(torch.empty(size, dtype=torch.uint8, pin_memory=True))
    return time.perf_counter_ns() - start


def _zero(pinned: torch.Tensor) -> float:
    start = time.perf_counter_ns()
    pinned.zero_()
    return time.perf_counter_ns() - start


def _forget_pinned() -> None:
    """What torch caches of pinned memory goes back, where it can be told so."""
    if forget := getattr(torch._C, "_host_emptyCache", None):
        forget()
