"""Together: how fast each of several streams runs while all of them are busy, 1 = alone.

Every pair and triple of compute, communication and the two directions of copies, and all four: each stream gets its work again and again
for a window, issued in the order in which it should end. What counts is what was done between the last first start and the first last
end, when all were at work; alone and together take turns.
"""
from __future__ import annotations

import itertools
import time
from statistics import median

import torch
import torch.distributed as dist

from engine.meter import Meter
from engine.micro.place import Place
from engine.micro.table import Call, own_heads
from sim.schedule import STREAMS

WINDOW_S = {"cpu": 0.1, "cuda": 0.25}
TOKENS = {"cpu": 128, "cuda": 8192}
COPY_BYTES = {"cpu": 1 << 20, "cuda": 64 << 20}
SEND_BYTES = {"cpu": 1 << 20, "cuda": 256 << 20}
MOST_OPS = 400
"""Of one stream in a window: the launch queue holds about a thousand entries, and each op has two events."""
Spans = list[tuple[int, int]]


def works(place: Place) -> dict[str, Call]:
    """What each stream does: attention, forward and backward, and a product of its size; copies; all-to-alls where there are ranks."""
    device, (H, G, D) = place.plan.device, own_heads(place.plan)
    m, T, kernel = place.plan.shapes, TOKENS[device], place.chosen
    q, do, kv = (place.tensor(r, *s) for r, s in (("q", (T, H, D)), ("do", (T, H, D)), ("kv", (T, 2, G, D))))
    out, lse = (t.contiguous() for t in kernel.forward(q, kv, False))
    x, W, to = place.tensor("x", T, m.hidden), place.tensor("W", m.up_dim, m.hidden), place.tensor("to", T, m.up_dim)

    def compute() -> None:
        kernel.forward(q, kv, False)
        kernel.backward(do, q, kv, out, lse, False)
        torch.mm(x, W.t(), out=to)

    near, far = ([place.tensor(f"{where}{k}", COPY_BYTES[device], dtype=torch.uint8, host=where == "far") for k in (0, 1)] for where in ("near", "far"))
    found = {"compute": compute, "h2d": lambda: place.backend.copy(near[0], far[0]), "d2h": lambda: place.backend.copy(far[1], near[1])}
    if place.plan.P > 1:
        send, receive = (place.tensor(role, SEND_BYTES[device], dtype=torch.uint8) for role in ("send", "receive"))
        found["comm"] = lambda: dist.all_to_all_single(receive, send, group=place.group)
    return {stream: found[stream] for stream in STREAMS if stream in found}


def sets(streams: list[str]) -> list[tuple[str, ...]]:
    """Every set of two streams or more."""
    return [s for n in range(2, len(streams) + 1) for s in itertools.combinations(sorted(streams), n)]


def rates(spans: dict[str, Spans], alone_ns: dict[str, float]) -> dict[str, float]:
    """Stream -> its speed, 1 = alone, while all of the streams were at work."""
    begin, end = max(s[0][0] for s in spans.values()), min(s[-1][1] for s in spans.values())
    if begin >= end:
        return {}
    return {stream: sum(max(0, min(b, end) - max(a, begin)) / (b - a) for a, b in done if b > a) * alone_ns[stream] / (end - begin) for stream, done in spans.items()}


def measure_together(place: Place, meter: Meter, rounds: int, tick=lambda done, total, name: None) -> list[dict]:
    """A point a set of streams: {"name": "together", "args": {"streams"}, "rates": {stream: [low, median, high]}, clock and power}."""
    calls = works(place)
    place.backend.settle()  # operands were made on the caller's stream
    every = [(s,) for s in calls] + sets(list(calls))
    for call_set in every[:len(calls)]:
        _spans(place, calls, call_set, {s: 1.0 for s in calls}, 2)
    rough = {s: place.most(_mean(_spans(place, calls, (s,), {s: 1.0}, 3)[s][1:]))[0] for s in calls}
    found: dict[tuple[str, ...], list[dict[str, float]]] = {s: [] for s in every}
    clocks: dict[tuple[str, ...], list[dict]] = {s: [] for s in every}
    for k in range(rounds):
        alone: dict[str, float] = {}
        for n, streams in enumerate(every):
            begin = time.monotonic()
            spans = _spans(place, calls, streams, rough)
            if len(streams) == 1:
                alone[streams[0]] = place.most(_mean(spans[streams[0]][1:] or spans[streams[0]]))[0]
            else:
                mine = rates(spans, alone)
                slow = place.most(*(-mine.get(s, 9.0) for s in streams))
                found[streams].append({s: -v for s, v in zip(streams, slow) if v > -9})
            clocks[streams].append(meter.read(begin, time.monotonic()))
            tick(k * len(every) + n, rounds * len(every), "streams together")
    place.clear()
    return [_point(s, found[s], clocks[s]) for s in every[len(calls):]]


def _point(streams: tuple[str, ...], rows: list[dict[str, float]], clocks: list[dict]) -> dict:
    by = {s: sorted(row[s] for row in rows if s in row) for s in streams}
    known = {name: [c[name] for c in clocks if c[name] is not None] for name in ("clock_MHz", "power_W")}
    return {
        "name": "together", "args": {"streams": "|".join(streams)},
        "rates": {s: [round(v, 4) for v in (values[0], median(values), values[-1])] for s, values in by.items() if values},
        "rounds": len(rows), **{name: median(values) if values else None for name, values in known.items()},
    }


def _spans(place: Place, calls: dict[str, Call], streams: tuple[str, ...], each_ns: dict[str, float], count: int | None = None) -> dict[str, Spans]:
    """What each stream did in a window, or so many times."""
    window = WINDOW_S[place.plan.device] * 1e9
    number = {s: count or max(3, min(MOST_OPS, round(window / each_ns[s]))) for s in streams}
    due = sorted((k * window / number[s], s) for s in streams for k in range(number[s]))
    spans: dict[str, list] = {s: [] for s in streams}
    for _, s in due:
        spans[s].append([])
        place.backend.streams[s].launch(calls[s], spans[s][-1])
    place.backend.settle()
    return {s: [tuple(span) for span in done] for s, done in spans.items()}


def _mean(spans: Spans) -> float:
    """ns an op, back to back."""
    return (spans[-1][1] - spans[0][0]) / len(spans)
