"""Alone: how long the ops of a trace would have taken had no other stream been busy, by the rates at which streams run together."""
from __future__ import annotations

from sim.contention import PPM, Table
from sim.schedule import STREAMS

Trace = list[tuple[str, int, str, int, int]]
"""(op id, layer, stream, start_ns, end_ns)."""

_DEVICE = set(STREAMS) - {"host"}


def alone(trace: Trace, slowdown: dict[str, dict]) -> Trace:
    """The same trace, each span ended where it would have ended; what is on none of the device's streams, as the host's waits, slows nothing and stays."""
    table, busy, rates, now = Table(slowdown), 0, (), 0
    work = [end - start for *_, start, end in trace]
    edges = sorted((at, side, k) for k, (_, _, stream, *span) in enumerate(trace) if stream in _DEVICE for side, at in ((1, span[0]), (0, span[1])) if span[0] < span[1])
    running: dict[int, int] = {}
    for at, begins, k in edges:
        for other, stream in running.items():
            work[other] -= (at - now) * (PPM - rates[stream]) / PPM
        now, stream = at, STREAMS.index(trace[k][2])
        if begins:
            running[k] = stream
        else:
            del running[k]
        busy = sum({1 << s for s in running.values()})
        rates = table.rates(busy)
    return [(id, layer, stream, start, start + round(ns)) for (id, layer, stream, start, _), ns in zip(trace, work)]
