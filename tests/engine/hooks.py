"""Hooks: what a test does to a program while it runs. Each wraps an op's work on its own stream; the schedule stays as it is."""
from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import NamedTuple
from unittest.mock import patch

import torch

from engine.compile import Program
from sim.ops import KINDS
from sim.schedule import Op, Region, Schedule

POISON = 0xFF
"""Every byte of a poisoned buffer: NaN in fp32 and bf16."""


def jitter(program: Program, most_s: float = 1e-3, seed: int = 0) -> None:
    """Each op starts up to `most_s` late, so that whatever no wait orders comes in another order than usual."""
    make, dice = program._work, random.Random(seed)

    def late(bound, layer, arguments):
        work, delay_s = make(bound, layer, arguments), dice.random() * most_s

        def run():
            time.sleep(delay_s)
            work()

        return run

    program._work = late


class Poison:
    """After an offload, when the last op that uses the device copy has run, the copy is overwritten with NaN.

    Whichever of its users ends last does it, on its own stream: what comes next on those bytes has to wait for all of them.
    `early` poisons as soon as the offload has run, which its readers must notice.
    """

    def __init__(self, program: Program, early: bool = False) -> None:
        self.count = 0
        """Copies poisoned."""
        self._program, self._make, self._lock = program, program._work, threading.Lock()
        self._users = {name: offloaded(region, early) for name, region in program.schedule.regions.items()}
        self._due: dict[tuple, int] = {}
        self._run = 0
        program._work = self._work
        run = program.run

        def numbered(region, layer, arguments):
            self._run += 1
            run(region, layer, arguments)

        program.run = numbered

    def _work(self, bound, layer, arguments):
        work, number = self._make(bound, layer, arguments), self._run
        region = bound.op.id.split(".")[0]
        mine = self._users[region].get(bound.op.id, [])
        for life, uses in mine:
            self._due.setdefault((number, life), uses)

        def run():
            work()
            with self._lock:
                for life, _ in mine:
                    self._due[number, life] -= 1
                    if not self._due[number, life]:
                        self._overwrite(region, life[0], layer)

        return run

    def _overwrite(self, region: str, name: str, layer: int) -> None:
        buffer = self._program.schedule.buffer(region, name)
        at = self._program.schedule.address(buffer, layer)
        self._program.arenas._inner["hbm"][at:at + buffer.size_bytes].fill_(POISON)
        self.count += 1


def offloaded(region: Region, early: bool = False) -> dict[str, list[tuple[tuple[str, int], int]]]:
    """op id -> [((buffer, which of its lives), ops that use it in that life)], of lives that are offloaded. Early: only the offload counts."""
    turn: dict[str, int] = {}
    users: dict[tuple[str, int], list[str]] = {}
    copied = {}
    for op in region.ops:
        for name in op.writes:
            if name not in op.reads:
                turn[name] = turn.get(name, 0) + 1
        for name in {*op.reads, *op.writes}:
            users.setdefault((name, turn.get(name, 0)), []).append(op.id)
        if op.kind == "offload" and region.buffers[op.reads[0]].life != "argument":
            copied[op.reads[0], turn[op.reads[0]]] = op.id
    found: dict[str, list] = {}
    for life, copy in copied.items():
        for id in [copy] if early else users[life]:
            found.setdefault(id, []).append((life, 1 if early else len(users[life])))
    return found


def count_copies(program: Program) -> dict[str, int]:
    """Bytes that the backend is really given to copy, by direction, filled in as they are."""
    counted = {"h2d": 0, "d2h": 0}
    copy = program.runtime.copy
    host = [program.arenas._inner["host"]] + ([program.chain.memory] if program.schedule.hidden == "host" else [])
    ends = [(t.data_ptr(), t.data_ptr() + t.numel()) for t in host]

    def counting(to: torch.Tensor, source: torch.Tensor) -> None:
        outward, inward = (any(low <= t.data_ptr() < high for low, high in ends) for t in (to, source))
        assert outward != inward, "a copy has one end on the host"
        counted["d2h" if outward else "h2d"] += to.numel() * to.element_size()
        copy(to, source)

    program.runtime.copy = counting
    return counted


def late_copies(program: Program, delay: Callable[[], None]) -> None:
    """Each offload and reload begins with a delay, on its own stream."""
    copy = program.runtime.copy

    def late(to: torch.Tensor, source: torch.Tensor) -> None:
        delay()
        copy(to, source)

    program.runtime.copy = late


def workspaces(program: Program) -> dict[str, tuple[int, int]]:
    """op id -> (most bytes its launcher had taken at one time, bytes declared), filled in as ops are launched on CUDA.

    Bytes as they are asked for: the allocator rounds small ones up to 512, and may leave up to 1 MiB of a large block unsplit.
    """
    make, found = program._work, {}

    def watched(bound, layer, arguments):
        work, op = make(bound, layer, arguments), bound.op

        def run():
            before = torch.cuda.memory_stats()["requested_bytes.all.current"]
            torch.cuda.reset_peak_memory_stats()
            work()
            used = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
            found[op.id] = max(used, found.get(op.id, (0, 0))[0]), KINDS[op.kind].workspace(op, program.schedule, program.runtime.kernel.NAME)

        return run

    program._work = watched
    return found


class Issued(NamedTuple):
    """How far the GPU was when the host had issued a whole region."""

    region: str
    layer: int
    before_half: bool
    """The middle one of the region's compute ops had not ended."""
    issue_s: float


def issued(program: Program) -> list[Issued]:
    """An entry a region, filled in as regions are run on CUDA."""
    make, run, found, half = program._work, program.run, [], {}
    for name, region in program.schedule.regions.items():
        compute = [op.id for op in region.ops if op.stream == "compute"]
        half[compute[len(compute) // 2]] = torch.cuda.Event()

    def marked(bound, layer, arguments):
        work, event = make(bound, layer, arguments), half.get(bound.op.id)
        if event is None:
            return work

        def both():
            work()
            event.record()

        return both

    def timed(region, layer, arguments):
        start = time.perf_counter()
        run(region, layer, arguments)
        issue_s = time.perf_counter() - start
        event = next(event for id, event in half.items() if id.startswith(f"{region}."))
        found.append(Issued(region, layer, not event.query(), issue_s))

    program._work, program.run = marked, timed
    return found


def unlinted():
    """Programs compile unproved, so that a test can run a schedule that is wrong."""
    return patch("engine.compile.lint", lambda schedule: None)
