"""Compile: each op to its launcher, each buffer to its arena view, each wait to an event. Runs whatever schedule it is given.

    program = Program(schedule, backend, kernel, rank, group)
    program.run("fwd", layer, {"x": x_TC, "y": y_TC, **weights});  ...;  program.join()
"""
from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import contextmanager
from itertools import pairwise
from types import ModuleType

import torch
import torch.distributed as dist

from engine.arenas import Arenas, alone
from engine.backend.base import Backend, Event
from engine.chain import Chain, Whole
from engine.launch import LAUNCHERS, Runtime
from sim.borders import meeting, touching
from sim.errors import UserError
from sim.hazards import walk
from sim.lint import lint
from sim.schedule import HANDED, PREV, Op, Schedule, chunk_of
from sim.text import digest


class Program:
    """A schedule bound to a backend. One instance of a region at a time is issued; they overlap as their waits allow."""

    def __init__(self, schedule: Schedule, backend: Backend, kernel: ModuleType, rank: int = 0, group: dist.ProcessGroup | None = None) -> None:
        """Compares the schedule's hash over the ranks, lints it, takes the arenas. Raises UserError, on every rank if on one."""
        if schedule.P > 1 or group is not None:
            _agree(schedule, group)
        lint(schedule)
        _runnable(schedule)
        self.schedule, self.backend = schedule, backend
        self.runtime = Runtime(schedule.model, schedule.P, rank, kernel, group, backend.copy)
        self.arenas = Arenas(schedule, backend)
        self.chain = Chain(schedule, backend, self.outside) if schedule.hidden == "host" else Whole(schedule, backend, self.external)
        touched = touching(schedule)
        self._shared = [stream for stream in backend.streams if stream in meeting(touched)]
        self._proven = {(before, region) for (before, *_), (region, *_) in pairwise(walk(schedule))}
        """Regions that may follow each other: the lint has walked so."""
        self._last = {r: [region.ops[k].id for k in touched[r].values()] for r, region in schedule.regions.items()}
        """The ops that what comes behind a region waits for."""
        self.spans: list[tuple[str, int, str, list]] | None = None
        """(op id, layer, stream, [start_ns, end_ns]) of what was run, if this is a list."""
        self.issued: dict[str, list[int]] | None = None
        """Op id -> host ns of each time it was issued, with the device idle before its region, if this is a dict; and of what the host does
        between two regions, by the second's name."""
        self._left_ns = 0
        self.copied_bytes = {"h2d": 0, "d2h": 0}
        self.watch: Callable[[Op, Callable[[], None]], Callable[[], None]] | None = None
        """What stands in for an op's work, given the op and it, if anything does."""
        self._previous: tuple[str, dict[str, Event]] = ("", {})
        self._recorded = {r: waited.union(self._last[r]) for r, waited in _waited_for(schedule).items()}
        self._bound = {r: [_Bound(op, schedule, r) for op in region.ops] for r, region in schedule.regions.items()}

    def run(self, region: str, layer: int, arguments: dict[str, torch.Tensor]) -> None:
        """Issues one instance of a region; does not block unless the schedule says so.

        arguments: by name; x, y, dy, dx [S/P, hidden] and label [S/P] whole, in this rank's chunk order; those of the host are the chain's.
        """
        events: dict[str, Event] = {}
        before, earlier = self._previous
        if before and (before, region) not in self._proven:
            self.backend.join(self.backend.streams)
            self.backend.enter(self.backend.streams)
        if self.issued is not None:
            self.issued.setdefault(region, []).append(time.perf_counter_ns() - self._left_ns)
            self.backend.settle()
        self.backend.enter(self._shared)
        for bound in self._bound[region]:
            op, start = bound.op, time.perf_counter_ns()
            found = [self._event(w, events, before, earlier) for w in op.waits]
            found = [e for e in found if e is not None]
            if op.stream == "host":
                self._block(op, layer, found)
                continue
            stream = self.backend.streams[op.stream]
            for event in found:
                stream.wait(event)
            stream.launch(self._work(bound, layer, arguments), self._span(op, layer))
            if op.id in self._recorded[region]:
                events[op.id] = stream.record()
            if self.issued is not None:
                self.issued.setdefault(op.id, []).append(time.perf_counter_ns() - start)
        self._previous, self._left_ns = (region, events), time.perf_counter_ns()

    @contextmanager
    def external(self, name: str):
        """What the caller does inside is `ext.NAME` in the spans."""
        if self.spans is None:
            yield
            return
        self.spans.append((f"ext.{name}", 0, "external", []))
        with self.backend.timed(self.spans[-1][3]):
            yield

    @contextmanager
    def outside(self, name: str):
        """The same, for what uses the chain's memory: after all that was issued, before all that will be."""
        self.backend.join(self.backend.streams)
        with self.external(name):
            yield
        self.backend.enter(self.backend.streams)

    def join(self) -> None:
        """What the caller does next comes after everything issued that touches what the caller owns."""
        region, events = self._previous
        self.backend.meet(events[id] for id in self._last[region])

    def _work(self, bound: "_Bound", layer: int, arguments: dict[str, torch.Tensor]) -> Callable[[], None]:
        reads, writes = bound.tensors(self.arenas, layer, arguments)
        launcher, runtime, op = LAUNCHERS[bound.kind], self.runtime, bound.op
        if op.stream in self.copied_bytes:
            self.copied_bytes[op.stream] += writes[0].numel() * writes[0].element_size()

        def work() -> None:
            launcher(runtime, op, reads, writes)

        return self.watch(op, work) if self.watch else work

    def _span(self, op: Op, layer: int) -> list | None:
        if self.spans is None:
            return None
        self.spans.append((op.id, layer, op.stream, []))
        return self.spans[-1][3]

    def _block(self, op: Op, layer: int, events: list[Event]) -> None:
        span, start = self._span(op, layer), time.perf_counter_ns()
        for event in events:
            event.block()
        if span is not None:
            span[:] = (start, time.perf_counter_ns())

    @staticmethod
    def _event(wait: str, events: dict[str, Event], before: str, earlier: dict[str, Event]) -> Event | None:
        if not wait.startswith(PREV):
            return events[wait]
        _, region, op = wait.split(":", 2)
        return earlier[op] if region == before else None


class _Bound:
    """An op with what can be known of its operands before it runs."""

    def __init__(self, op: Op, schedule: Schedule, region: str) -> None:
        self.op, self.kind = op, op.kind
        self._operands = {name: self._operand(schedule, region, name) for name in op.reads + op.writes}

    def tensors(self, arenas: Arenas, layer: int, arguments: dict[str, torch.Tensor]) -> tuple[list, list]:
        """What it reads and writes; a buffer that it names twice is one tensor."""
        found: dict[str, torch.Tensor] = {}
        for name, (buffer, shape, base, rows) in self._operands.items():
            if buffer.life != "argument":
                found[name] = arenas.view(buffer, layer, shape)
            else:
                found[name] = arguments[base] if rows is None else alone(arguments[base][rows[0]:rows[1]])
        return [found[name] for name in self.op.reads], [found[name] for name in self.op.writes]

    def _operand(self, schedule: Schedule, region: str, name: str):
        buffer, args = schedule.buffer(region, name), self.op.args
        base, chunk = chunk_of(name)
        if buffer.life == "argument":
            chunked = base in HANDED
            at, n = schedule.chunks[chunk] if chunked else (0, 0)
            return buffer, buffer.shape, base, (at // schedule.P, (at + n) // schedule.P) if chunked else None
        n = args.get("n") or args["kv" if buffer.role in ("kv", "dkv") else "q"]
        return buffer, schedule.layout.shape(buffer.role, n), base, None


def _runnable(schedule: Schedule) -> None:
    """A proved schedule may still be a part, or without a plan. Raises UserError."""
    for region in ("fwd", "loss", "bwd"):
        if region not in schedule.regions:
            raise UserError(f"the schedule has no region {region}, so no step can be run; write all three, as fpdt show does")
    for op in (op for region in schedule.regions.values() for op in region.ops if op.kind == "pin"):
        raise UserError(f"{op.id} takes pinned memory in the middle of a step, which is priced and not run; build the schedule with --set alloc=plan")
    for owner, buffers in [("*", schedule.saved), *((r.name, r.buffers) for r in schedule.regions.values())]:
        for b in buffers.values():
            if b.life != "argument" and b.offset is None:
                raise UserError(f"{b.name} of {owner} has no offset, so it lies nowhere; give it one inside its arena, such as @0")


def _waited_for(schedule: Schedule) -> dict[str, set[str]]:
    """By region, the ops that some op waits for."""
    found: dict[str, set[str]] = {r: set() for r in schedule.regions}
    for name, region in schedule.regions.items():
        for op in region.ops:
            for wait in op.waits:
                where, id = wait.split(":", 2)[1:] if wait.startswith(PREV) else (name, wait)
                found[where].add(id)
    return found


def _agree(schedule: Schedule, group: dist.ProcessGroup | None) -> None:
    ranks = dist.get_world_size(group) if dist.is_initialized() else 1
    hashes: list[str | None] = [None] * ranks
    if ranks > 1:
        dist.all_gather_object(hashes, digest(schedule), group=group)
    if len(set(hashes)) > 1:
        raise UserError(f"the ranks hold different schedules: {', '.join(f'rank {r} has {h}' for r, h in enumerate(hashes))}; give all the same file")
    if ranks != schedule.P:
        raise UserError(f"the schedule is for P={schedule.P}, but {ranks} ranks run it; start {schedule.P}")
