"""Memory: five rows over time, from a timeline's spans and the schedule they ran. A peak is the maximum of their sum over time.

    planned     the arenas, whole                                             live       of them: first write to last access
    arguments   hidden states and their gradients, labels (in HBM, or on the host), under ZeRO-3 weight gradients of a running region (fp32)
    workspace   what a kernel needs beside its operands, while it runs, and what the library of matrix products keeps for itself
    states      parameters, gradients, optimizer (under ZeRO-3 a rank's share), the parameters gathered or cast for regions at work, and under
                ZeRO-0 each gradient from the region that makes it on

In HBM a hidden state lives while a region is given it: without offload backward reads it too, so every layer's stays. On the host each
border between blocks has one, for good, and they all share one gradient.
The same function serves predicted and measured spans.
"""
from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from sim import heads
from sim.externals import GRADIENT_BYTES, sharded
from sim.layout import ITEM
from sim.machine import Machine
from sim.need import gradients, handed, parameters, passing, states, summed, workspaces
from sim.schedule import SPACES, Schedule
from sim.strategy import Strategy
from sim.timeline import Timeline

ROWS = ("planned", "arguments", "workspace", "states", "live")
COUNTED = ROWS[:4]
"""The rows whose sum is what a rank needs."""


def curves(schedule: Schedule, timeline: Timeline, strategy: Strategy, machine: Machine | None = None) -> dict[str, dict[str, np.ndarray]]:
    """Space -> {"t_ns", and bytes by row}; a value holds until the next t_ns. The machine says which attention kernel runs (sim.kernels), and what its
    libraries keep. Workspace and states on the host are 0."""
    when = _When(schedule, timeline)
    live = _live(schedule, when)
    end = int(timeline.end_ns.max(initial=0))
    lives = {
        "hbm": {"arguments": _arguments(schedule, when, strategy.zero), "workspace": _workspace(schedule, when, machine), "states": _states(schedule, when, strategy.zero)},
        "host": {"arguments": _lives([0], [end], [schedule.handed_bytes])},
    }
    return {space: _curve(schedule.arena_bytes(space), end, lives[space] | {"live": live[space]}) for space in SPACES}


def total(rows: dict[str, np.ndarray]) -> np.ndarray:
    """Bytes that a rank needs over time: planned + arguments + workspace + states."""
    return sum(rows[row] for row in COUNTED)


Lives = tuple[np.ndarray, np.ndarray, np.ndarray]
"""(from ns, to ns, bytes) of things that exist for a while."""


class _When:
    """Times of ops by region and layer, and which ops touch a buffer first and last on each stream."""

    def __init__(self, schedule: Schedule, timeline: Timeline) -> None:
        self.layers, self.timeline = schedule.layers, timeline
        number = {}
        self.base: dict[str, int] = {}
        self.layer_of = {r: [layer for region, layer in schedule.order() if region == r] for r in schedule.regions}
        for name, region in schedule.regions.items():
            self.base[name] = len(number)
            for op in region.ops:
                number[op.id] = len(number)
        other = len(number)  # a row of its own for what no region has
        row = np.array([number.get(name, other) for name in timeline.names], np.int64)[timeline.op]
        at = row * self.layers + np.clip(timeline.layer, 0, self.layers - 1)
        start, end = np.full((other + 1) * self.layers, np.iinfo(np.int64).max), np.full((other + 1) * self.layers, -1)
        start[at], end[at] = timeline.start_ns, timeline.end_ns
        self.start, self.end = (column.reshape(-1, self.layers)[:other] for column in (start, end))
        self.compute = {r: [self.base[r] + k for k, op in enumerate(region.ops) if op.stream == "compute"] for r, region in schedule.regions.items()}
        self.touched = {r: self._touched(schedule, r) for r in schedule.regions}

    def _touched(self, schedule: Schedule, region: str) -> dict[str, list[int]]:
        """Arena buffer -> ops that may be its first or its last access: the first and the last of each stream."""
        arena = {name for name, b in (schedule.saved | schedule.regions[region].buffers).items() if b.life != "argument"}
        first: dict[tuple[str, str], int] = {}
        last: dict[tuple[str, str], int] = {}
        for k, op in enumerate(schedule.regions[region].ops, self.base[region]):
            for name in op.reads + op.writes:
                if name in arena:
                    first.setdefault((name, op.stream), k)
                    last[name, op.stream] = k
        found: dict[str, list[int]] = {}
        for (name, _), k in [*first.items(), *last.items()]:
            found.setdefault(name, []).append(k)
        return found

    def span(self, region: str, name: str) -> tuple[np.ndarray, np.ndarray] | None:
        """(first access, last access) in ns of a buffer, by layer; None if the region does not touch it."""
        ops = self.touched.get(region, {}).get(name)
        return None if ops is None else (self.start[ops].min(0), self.end[ops].max(0))

    def region(self, region: str) -> tuple[np.ndarray, np.ndarray]:
        """(first start, last end) of a region's compute ops, by layer. Its copies may run beside the regions around it; what it is given comes and goes with
        the calls, which are one after the other."""
        ops = self.compute[region]
        return self.start[ops].min(0, initial=np.iinfo(np.int64).max), self.end[ops].max(0, initial=-1)

    def external(self, name: str) -> tuple[np.ndarray, np.ndarray]:
        """(start, end) of the external spans of one name, in order."""
        mine = self.timeline.op == (self.timeline.names.index(name) if name in self.timeline.names else -1)
        return self.timeline.start_ns[mine], self.timeline.end_ns[mine]


def _arguments(schedule: Schedule, when: _When, zero: int) -> Lives:
    """Those in HBM, each from the first to the last region that is given it. Whole weight gradients of which only a share stays live until they are reduced.
    Of hidden states on the host, chunks from which the embedding's gradient is summed."""
    grads, spans = passing(schedule, zero), {r: when.region(r) for r in schedule.regions}
    reduced = when.external("ext.reduce")[1].tolist()
    times = [tuple(int(t[layer]) for t in spans[region]) for region, layer in schedule.order()]
    low, high, size = [], [], []
    for (region, _), (start, end) in zip(schedule.order(), times):
        if grads[region]:
            low.append(start), high.append(max(end, reduced.pop(0)) if len(reduced) > 1 else end), size.append(grads[region])
    for start, end in zip(*when.external("ext.embed_bwd")):  # of hidden states on the host alone
        low.append(start), high.append(end), size.append(summed(schedule))
    for first, last, given in handed(schedule):
        low.append(times[first][0] if first >= 0 else 0), high.append(times[last][1] if last >= 0 else 0), size.append(given)
    return _lives(low, high, size)


def _workspace(schedule: Schedule, when: _When, machine: Machine | None) -> Lives:
    size, ops, kernel = [], [], heads.kernel(machine, schedule.model.head_dim) if machine else ""
    for name in schedule.regions:
        for k, needed in workspaces(schedule, name, kernel):
            size.append(needed)
            ops.append(when.base[name] + k)
    start, end = when.start[ops], when.end[ops]
    kept = int(machine.get("blas_bytes") or 0) if machine else 0
    return _lives(np.r_[0, start.T.ravel()], np.r_[int(when.timeline.end_ns.max(initial=0)), end.T.ravel()], np.r_[kept, np.tile(np.array(size, np.int64), when.layers)])


def _states(schedule: Schedule, when: _When, zero: int) -> Lives:
    m, shared = schedule.model, sharded(schedule, zero)
    end = int(when.timeline.end_ns.max(initial=0))
    made, order, grads = parameters(schedule, zero), schedule.order(), {} if shared else gradients(schedule)
    later = GRADIENT_BYTES * m.params if any(grads.values()) else 0
    low, high, size = [0], [end], [states(schedule, zero) - later]
    gathered = when.external("ext.gather" if shared else "ext.cast")[0]
    regions = {r: when.region(r) for r in schedule.regions}
    for k, (region, layer) in enumerate(order):
        start, last = (t[layer] for t in regions[region])
        low.append(min(start, gathered[k]) if len(gathered) == len(order) else start)
        high.append(last)
        size.append(made[region])
        if later:
            low.append(start), high.append(end), size.append(grads[region])
            later -= grads[region]
    if later:  # the embedding's
        low.append(last), high.append(end), size.append(later)
    embedded = when.external("ext.embed")[1]
    if shared and len(embedded):
        low.append(0), high.append(embedded[0]), size.append(m.vocab * m.hidden * ITEM[schedule.dtype])
    return _lives(low, high, size)


def _live(schedule: Schedule, when: _When) -> dict[str, Lives]:
    """Arena buffers by space: each instance's own from first to last access, saved ones from forward to backward."""
    found: dict[str, list] = {space: [] for space in SPACES}
    for name, region in schedule.regions.items():
        for b in region.buffers.values():
            span = when.span(name, b.name) if b.life != "argument" else None
            if span:
                layers = when.layer_of[name]
                found[b.space].append((span[0][layers], span[1][layers], b.size_bytes))
    for b in schedule.saved.values():
        spans = [s for s in (when.span(r, b.name) for r in schedule.regions) if s]
        if spans:
            found[b.space].append((np.min([s[0] for s in spans], 0), np.max([s[1] for s in spans], 0), b.size_bytes))
    return {
        space: _lives(*(np.concatenate(c) if rows else [] for c in zip(*[(a, z, np.full(len(a), n)) for a, z, n in rows] or [((), (), ())])))
        for space, rows in found.items()
    }


def _lives(low: Iterable, high: Iterable, size: Iterable) -> Lives:
    """Columns, without what never ran."""
    low, high, size = (np.asarray(c, np.int64) for c in (low, high, size))
    good = (high > low) & (size > 0)
    return low[good], high[good], size[good]


def _curve(planned: int, end: int, lives: dict[str, Lives]) -> dict[str, np.ndarray]:
    """Rows over the times where any of them changes; at one time all changes count together."""
    times = np.concatenate([[0, end], *(c for low, high, _ in lives.values() for c in (low, high))]).astype(np.int64)
    order = np.argsort(times, kind="stable")
    t = times[order]
    last = np.r_[t[1:] != t[:-1], True]
    rows, at = {"t_ns": t[last], "planned": np.full(int(last.sum()), planned)}, 2
    for name in ROWS[1:]:
        if name not in lives:
            rows[name] = np.zeros(int(last.sum()), np.int64)
            continue
        _, _, size = lives[name]
        change = np.zeros(len(times), np.int64)
        change[at:at + len(size)], change[at + len(size):at + 2 * len(size)] = size, -size
        at += 2 * len(size)
        rows[name] = np.cumsum(change[order])[last]
    return rows
