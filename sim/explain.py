"""Explain: where two timelines part: op by op, kind by kind, and along the critical path of each.

Differences are A - B, in percent A / B - 1: with the prediction first, signs are those of every signed error here. An op's instance is
known by its id and layer; external work, whose layers only a prediction knows, by how often it came before.

A critical path is walked back from the span that ends last: before each stands what it had to wait for and what ended last of that. That
is the span before it on its stream, the ops that the schedule says it waits for, and the host's last block before it was issued; external
work, of which no schedule tells, where none of these ended just before. What is left between two of them is `latency` up to the machine's
own, else `issue`, the host thread's. All parts sum to the length of the step.
"""
from __future__ import annotations

from collections import Counter, defaultdict
from typing import NamedTuple

import numpy as np

from sim.errors import UserError
from sim.metrics import ISSUE
from sim.schedule import PREV, Schedule, kind_of
from sim.timeline import ROWS, Timeline, waits

LATENCY = "latency"
EXTERNAL, HOST = ROWS.index("external"), ROWS.index("host")
Key = tuple[str, int, int]
"""(op id, layer, how many of the same came before); of external work the layer is -1."""


class OpPair(NamedTuple):
    """An instance of an op that both timelines have."""

    id: str
    layer: int
    stream: str
    a_ns: int
    b_ns: int
    late_ns: int
    """A's start - B's."""
    gained_ns: int
    """What of that the end of the op before on its stream did not have yet; of external work, which has no one stream, the one of its kind."""

    @property
    def longer_ns(self) -> int:
        return self.a_ns - self.b_ns


class KindPair(NamedTuple):
    """All that one kind of op does on one stream."""

    kind: str
    stream: str
    a_count: int
    b_count: int
    a_ns: int
    b_ns: int

    @property
    def longer_ns(self) -> int:
        return self.a_ns - self.b_ns

    @property
    def error(self) -> float | None:
        """A / B - 1; None where B has none."""
        return self.a_ns / self.b_ns - 1 if self.b_ns else None


class Step(NamedTuple):
    """A span's part of a critical path."""

    id: str
    layer: int
    stream: str
    ns: int
    idle_ns: int
    """Before it, when nothing on the path ran."""
    idle: str
    """latency or issue."""


def pairs(a: Timeline, b: Timeline) -> list[OpPair]:
    """What both have, in A's issue order."""
    spans_b = dict(_keyed(b))
    before: dict[tuple[str, str], int] = {}
    found = []
    for key, (id, layer, stream, start, end) in _keyed(a):
        if key in spans_b:
            _, _, _, start_b, end_b = spans_b[key]
            late, row = start - start_b, (stream, kind_of(id) if stream == "external" else "")
            found.append(OpPair(id, key[1], stream, end - start, end_b - start_b, late, late - before.get(row, 0)))
            before[row] = end - end_b
    return found


def only(a: Timeline, b: Timeline) -> tuple[dict[str, int], dict[str, int]]:
    """(op id -> instances that A alone has, the same of B)."""
    keys_a, keys_b = ([key for key, _ in _keyed(t)] for t in (a, b))
    return tuple(dict(Counter(key[0] for key in mine if key not in others)) for mine, others in ((keys_a, set(keys_b)), (keys_b, set(keys_a))))


def kinds(a: Timeline, b: Timeline) -> list[KindPair]:
    """By kind and stream, the largest difference first."""
    of_a, of_b = sums(a), sums(b)
    found = [KindPair(*key, of_a[key][0], of_b[key][0], of_a[key][1], of_b[key][1]) for key in sorted(set(of_a) | set(of_b))]
    return sorted(found, key=lambda k: -abs(k.longer_ns))


def sums(t: Timeline) -> dict[tuple[str, str], list[int]]:
    """(kind, stream) -> [spans, ns of them all]."""
    kinds_of = [kind_of(name) for name in t.names]
    total: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for op, stream, ns in zip(t.op.tolist(), t.stream.tolist(), (t.end_ns - t.start_ns).tolist()):
        one = total[kinds_of[op], ROWS[stream]]
        one[0], one[1] = one[0] + 1, one[1] + ns
    return total


def critical_path(timeline: Timeline, schedule: Schedule | None = None) -> list[Step]:
    """First to last. The waits are the timeline's own (its meta), or those of a schedule. Raises UserError where there are none."""
    if not len(timeline):
        raise UserError("a timeline without spans has no critical path")
    found, before = _Before(timeline, _waits(timeline, schedule)), -1
    start, end = timeline.start_ns.tolist(), timeline.end_ns.tolist()
    begin, at = min(start), int(np.argmax(timeline.end_ns))
    cursor, steps, seen = end[at], [], set()
    while at >= 0:
        seen.add(at)
        before = found.span(at, seen)
        ended = end[before] if before >= 0 else begin
        since = min(cursor, ended if timeline.stream[at] == HOST and before >= 0 else start[at])  # a block lasts while others work
        ended = min(since, ended)
        idle = since - ended
        steps.append(Step(timeline.names[timeline.op[at]], int(timeline.layer[at]), ROWS[timeline.stream[at]], cursor - since, idle, ISSUE if idle > found.latency else LATENCY))
        cursor, at = ended, before
    return steps[::-1]


def by_stream(path: list[Step]) -> dict[str, int]:
    """Stream, latency or issue -> ns of the path; they sum to the step."""
    total = dict.fromkeys((*ROWS, LATENCY, ISSUE), 0)
    for step in path:
        total[step.stream] += step.ns
        total[step.idle] += step.idle_ns
    return total


def by_kind(path: list[Step]) -> dict[tuple[str, str], int]:
    """(kind, stream) -> ns of the path, the most first."""
    total: dict[tuple[str, str], int] = defaultdict(int)
    for step in path:
        total[kind_of(step.id), step.stream] += step.ns
    return dict(sorted(total.items(), key=lambda item: -item[1]))


def _keyed(t: Timeline) -> list[tuple[Key, tuple]]:
    """(key, span) in issue order."""
    came: Counter = Counter()
    found = []
    for span in t.spans():
        one = span[0], -1 if span[2] == "external" else span[1]
        found.append(((*one, came[one]), span))
        came[one] += 1
    return found


def _waits(timeline: Timeline, schedule: Schedule | None) -> dict[str, list[str]]:
    if schedule is None:
        if "waits" not in timeline.meta:
            raise UserError("a timeline says nothing of what its ops wait for; give its schedule with --schedule, as fpdt show --out writes it")
        return timeline.meta["waits"]
    known = {op.id for region in schedule.regions.values() for op in region.ops}
    for name, ours in zip(timeline.names, np.bincount(timeline.op[timeline.stream != EXTERNAL], minlength=len(timeline.names))):
        if ours and name not in known:
            raise UserError(f"the schedule is not the timeline's, it has no op {name}; give the one that was run")
    return waits(schedule)


class _Before:
    """What each span had to wait for."""

    def __init__(self, t: Timeline, waits: dict[str, list[str]]) -> None:
        numbers = t.meta.get("numbers", {})
        self.latency = max(numbers.get("gap_ns", 0), numbers.get("wake_ns", 0))
        self.t, self.waits = t, waits
        self.end = t.end_ns.tolist()
        self.earlier: list[tuple[int, int]] = []
        """Of each span: (the one before it on its stream, the host's last one before it was issued); -1 where there is none."""
        self.instance: list[int] = []
        self.region: list[str] = []
        """Of each instance."""
        self.place: dict[tuple[int, str], int] = {}
        last, now = [-1] * len(ROWS), None
        for k, (op, layer, stream) in enumerate(zip(t.op.tolist(), t.layer.tolist(), t.stream.tolist())):
            name = t.names[op]
            if stream != EXTERNAL:
                region = name.split(".", 1)[0]
                if (region, layer) != now:
                    now = region, layer
                    self.region.append(region)
                self.place[len(self.region) - 1, name] = k
            self.instance.append(len(self.region) - 1)
            self.earlier.append((last[stream] if stream != EXTERNAL else -1, last[HOST]))
            last[stream] = k
        self.by_end = np.argsort(t.end_ns, kind="stable")
        self.ends = t.end_ns[self.by_end]
        outside = t.stream[self.by_end] == EXTERNAL
        self.outside, self.outside_ends = self.by_end[outside], self.ends[outside]

    def span(self, k: int, seen: set[int]) -> int:
        """The one that ended last of what span k had to wait for; -1 if it waited for none."""
        start = int(self.t.start_ns[k])
        if self.t.stream[k] == EXTERNAL:
            return _last(self.by_end, self.ends, start, seen)
        found = [i for i in (*self.earlier[k], *self._named(k)) if i >= 0 and i not in seen]
        best = max(found, key=lambda i: self.end[i], default=-1)
        if best < 0 or start - self.end[best] > self.latency:
            outside = _last(self.outside, self.outside_ends, start, seen)
            if outside >= 0 and (best < 0 or self.end[outside] > self.end[best]):
                return outside
        return best

    def _named(self, k: int) -> list[int]:
        """The spans of an op's waits."""
        here, found = self.instance[k], []
        for wait in self.waits.get(self.t.names[self.t.op[k]], ()):
            if not wait.startswith(PREV):
                found.append(self.place.get((here, wait), -1))
            elif here and wait.split(":", 2)[1] == self.region[here - 1]:
                found.append(self.place.get((here - 1, wait.split(":", 2)[2]), -1))
        return found


def _last(spans: np.ndarray, ends: np.ndarray, until: int, seen: set[int]) -> int:
    """The last of spans in order of their ends that ended by then and was not seen; -1 if none did."""
    k = int(np.searchsorted(ends, until, side="right")) - 1
    while k >= 0 and int(spans[k]) in seen:
        k -= 1
    return int(spans[k]) if k >= 0 else -1
