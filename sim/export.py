"""Export: timelines as a trace that opens in Perfetto (ui.perfetto.dev) or chrome://tracing.

One process a timeline, one thread a stream, one counter a memory space. The format is Chrome's trace events: JSON, times in
microseconds. Every field name of it stands in this file once, with its unit.
"""
from __future__ import annotations

import json
from pathlib import Path

from sim.files import write
from sim.timeline import ROWS, Timeline

EVENTS = "traceEvents"
TIME_UNIT = "displayTimeUnit"
PHASE, NAME, CATEGORY, ARGS = "ph", "name", "cat", "args"
PROCESS, THREAD = "pid", "tid"
START_US, DURATION_US = "ts", "dur"
LAYER, SIZE_BYTES = "layer", "size_bytes"
SPAN, COUNTER, META = "X", "C", "M"
"""Phases: a span of time, a counter's value from here on, a name or place for a process or thread."""
PROCESS_NAME, PROCESS_PLACE, THREAD_NAME, THREAD_PLACE, PLACE = "process_name", "process_sort_index", "thread_name", "thread_sort_index", "sort_index"


def trace(timelines: dict[str, Timeline]) -> dict:
    """The trace of timelines by name, in the order given."""
    events = []
    for process, (name, timeline) in enumerate(timelines.items(), 1):
        events += _names(process, name, timeline) + _spans(process, timeline) + _counters(process, timeline)
    return {EVENTS: events, TIME_UNIT: "ns"}


def save(timelines: dict[str, Timeline], path: str | Path) -> None:
    """Writes the trace, whole or not at all."""
    write(path, json.dumps(trace(timelines), separators=(",", ":")) + "\n")


def _names(process: int, name: str, timeline: Timeline) -> list[dict]:
    where = {PHASE: META, PROCESS: process}
    events = [where | {NAME: PROCESS_NAME, ARGS: {NAME: name}}, where | {NAME: PROCESS_PLACE, ARGS: {PLACE: process}}]
    for row, stream in enumerate(ROWS):
        if timeline.on(stream).any():
            at = where | {THREAD: row}
            events += [at | {NAME: THREAD_NAME, ARGS: {NAME: stream}}, at | {NAME: THREAD_PLACE, ARGS: {PLACE: row}}]
    return events


def _spans(process: int, timeline: Timeline) -> list[dict]:
    return [
        {PHASE: SPAN, PROCESS: process, THREAD: ROWS.index(stream), NAME: op, CATEGORY: op.split("[")[0],
         START_US: start_ns / 1e3, DURATION_US: (end_ns - start_ns) / 1e3, ARGS: {LAYER: layer}}
        for op, layer, stream, start_ns, end_ns in timeline.spans()
    ]


def _counters(process: int, timeline: Timeline) -> list[dict]:
    """A counter a memory space; its series are the rows of the memory curve."""
    events = []
    for space, rows in timeline.memory.items():
        series = [row for row in rows if row != "t_ns"]
        for k, t_ns in enumerate(rows["t_ns"].tolist()):
            values = {f"{row}_{SIZE_BYTES}": int(rows[row][k]) for row in series}
            events.append({PHASE: COUNTER, PROCESS: process, NAME: space, START_US: t_ns / 1e3, ARGS: values})
    return events
