"""Timeline: what ran when, predicted or measured: columns of spans and a memory curve.

The simulator and the engine return the same type, and everything printed or drawn is computed from it alone. Spans stand in
issue order: instance after instance of the step, list order within; ops of a stream are then in time order too.
"""
from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from sim.errors import UserError
from sim.files import write
from sim.machine import Machine
from sim.schedule import SPACES, STREAMS, Schedule
from sim.strategy import Strategy

ROWS = STREAMS + ("external",)
"""Streams by number, as in the `stream` column."""


@dataclass
class Timeline:
    """Spans as columns of equal length, times in ns from the step's begin."""

    names: list[str]
    """Op ids, each once."""
    op: np.ndarray
    """int32: index into names."""
    layer: np.ndarray
    """int32: the instance's layer; -1 where there is none."""
    stream: np.ndarray
    """int8: index into ROWS."""
    start_ns: np.ndarray
    end_ns: np.ndarray
    memory: dict[str, dict[str, np.ndarray]] = field(default_factory=dict)
    """Space -> t_ns and rows of bytes (planned, arguments, workspace, states, live), each holding from its t_ns to the next."""
    meta: dict = field(default_factory=dict)
    """What metrics need beside spans: model, seq, P, chunk, strategy, machine's numbers, assumptions, waits. JSON values only."""

    def __len__(self) -> int:
        return len(self.op)

    @classmethod
    def from_spans(cls, spans: Iterable[tuple[str, int, str, int, int]], meta: dict | None = None) -> "Timeline":
        """From rows (op id, layer, stream, start_ns, end_ns) in issue order."""
        spans = list(spans)
        number: dict[str, int] = {}
        op = np.array([number.setdefault(s[0], len(number)) for s in spans], np.int32)
        layer, stream = (np.array(column, kind) for column, kind in (([s[1] for s in spans], np.int32), ([ROWS.index(s[2]) for s in spans], np.int8)))
        start, end = (np.array([s[k] for s in spans], np.int64) for k in (3, 4))
        return cls(list(number), op, layer, stream, start, end, {}, meta or {})

    def spans(self) -> list[tuple[str, int, str, int, int]]:
        """Rows (op id, layer, stream, start_ns, end_ns) in issue order."""
        columns = (self.op, self.layer, self.stream, self.start_ns, self.end_ns)
        return [(self.names[o], l, ROWS[s], a, b) for o, l, s, a, b in zip(*(c.tolist() for c in columns))]

    def on(self, stream: str) -> np.ndarray:
        """Which spans ran on a stream, as a mask."""
        return self.stream == ROWS.index(stream)

    def within(self, prefix: str) -> np.ndarray:
        """Which spans have ids that begin so: 'fwd.' is a region, 'bwd.attn_bwd[' a kind."""
        return np.array([name.startswith(prefix) for name in self.names], bool)[self.op] if len(self) else np.zeros(0, bool)

    def save(self, path: str | Path) -> None:
        """Writes JSON, whole or not at all."""
        columns = {c: getattr(self, c).tolist() for c in _COLUMNS}
        memory = {space: {row: values.tolist() for row, values in rows.items()} for space, rows in self.memory.items()}
        write(path, json.dumps({"meta": self.meta, "names": self.names, "streams": ROWS, **columns, "memory": memory}) + "\n")


def meta(schedule: Schedule, strategy: Strategy, machine: Machine, assumptions: list[str]) -> dict:
    """What a timeline of this schedule carries beside its spans, for a prediction and a measurement alike."""
    return {
        "model": asdict(schedule.model), "seq": schedule.seq, "P": schedule.P, "chunk": schedule.chunk, "dtype": schedule.dtype,
        "strategy": asdict(strategy), "machine": machine.name, "kind": machine.kind, "numbers": {k: machine[k] for k in machine.numbers},
        "arena_bytes": {space: schedule.arena_bytes(space) for space in SPACES}, "assumptions": assumptions, "waits": waits(schedule),
    }


def waits(schedule: Schedule) -> dict[str, list[str]]:
    """Op id -> what it waits for, where that is anything."""
    return {op.id: list(op.waits) for region in schedule.regions.values() for op in region.ops if op.waits}


_COLUMNS = {"op": np.int32, "layer": np.int32, "stream": np.int8, "start_ns": np.int64, "end_ns": np.int64}


def load(path: str | Path) -> Timeline:
    """A saved timeline. Raises UserError if the file is none."""
    try:
        data = json.loads(Path(path).read_text())
        columns = [np.array(data[c], kind) for c, kind in _COLUMNS.items()]
        memory = {space: {row: np.array(v, np.int64) for row, v in rows.items()} for space, rows in data["memory"].items()}
        made = Timeline(data["names"], *columns, memory, data["meta"])
        if tuple(data["streams"]) != ROWS:
            raise ValueError("its streams are those of another version")
        if not _texts(made.names) or not _meta(made.meta):
            raise ValueError("its names or what is said beside them are of other types")
        if any(c.ndim != 1 or len(c) != len(made.op) for c in columns) or not all(
                ((0 <= column) & (column < many)).all() for column, many in ((made.op, len(made.names)), (made.stream, len(ROWS)))):
            raise ValueError("its columns do not fit each other")
        if (made.end_ns < made.start_ns).any():
            raise ValueError("a span ends before it starts")
        return made
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise UserError(f"{path} is no timeline ({error}); write one with fpdt simulate --save-timeline") from None


def _texts(names) -> bool:
    return isinstance(names, list) and all(isinstance(name, str) for name in names)


def _meta(meta) -> bool:
    """Whether what is read of it here has the types that `meta` writes."""
    numbers, waits = (meta.get(name, {}) for name in ("numbers", "waits"))
    return (isinstance(numbers, dict) and all(isinstance(numbers.get(name, 0), (int, float)) for name in ("gap_ns", "wake_ns"))
            and isinstance(waits, dict) and all(map(_texts, waits.values())))
