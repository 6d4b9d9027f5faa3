"""Contention: streams that run together slow each other. A fluid pool in integers, so that the same events give the same ns.

An op is an amount of work (its ns alone, in millionths) that drains at a rate in ppm. The rates depend only on which streams are
busy; a flow is settled and timed anew only when its own rate really changes.
"""
from __future__ import annotations

from simpy import Environment, Event

from sim.machine import Machine
from sim.schedule import STREAMS

PPM = 1_000_000


class Flow:
    """One op in the pool."""

    __slots__ = ("work", "rate", "since", "turn", "done")

    def __init__(self, work: int, now: int, done: Event) -> None:
        self.work, self.rate, self.since, self.turn, self.done = work, 0, now, 0, done

    def left(self, now: int) -> int:
        """Work that remains, in ns x ppm."""
        return self.work - self.rate * (now - self.since)


class Pool:
    """What runs at this moment, at most one op a stream."""

    def __init__(self, env: Environment, machine: Machine) -> None:
        self.env = env
        self.table = {frozenset(STREAMS.index(s) for s in key.split("|")): {STREAMS.index(s): v for s, v in rates.items() if s in STREAMS}
                      for key, rates in machine.slowdown.items()}
        self.flows: dict[int, Flow] = {}
        self._busy = 0
        self._rates: dict[int, tuple[int, ...]] = {}

    def run(self, stream: int, ns: int) -> Event:
        """Starts an op that takes `ns` alone; the event comes when it is done."""
        flow = self.flows[stream] = Flow(ns * PPM, self.env.now, self.env.event())
        self._change(1 << stream)
        return flow.done

    def unmeasured(self) -> list[str]:
        """Sets of streams that ran together but were never measured so."""
        sets = [frozenset(k for k in range(len(STREAMS)) if busy >> k & 1) for busy in self._rates]
        return sorted("|".join(sorted(STREAMS[k] for k in s)) for s in sets if len(s) > 1 and s not in self.table)

    def rates(self, busy: int) -> tuple[int, ...]:
        """ppm of each stream while the streams of a bit mask are busy: the measured set's, else the slowest measured part's."""
        if busy not in self._rates:
            streams = frozenset(k for k in range(len(STREAMS)) if busy >> k & 1)
            parts = [self.table[streams]] if streams in self.table else [r for s, r in self.table.items() if s < streams]
            self._rates[busy] = tuple(round(PPM * min((p[k] for p in parts if k in p), default=1)) for k in range(len(STREAMS)))
        return self._rates[busy]

    def _change(self, bit: int) -> None:
        self._busy ^= bit
        rates, now = self.rates(self._busy), self.env.now
        for stream, flow in self.flows.items():
            if flow.rate != rates[stream]:
                flow.work, flow.rate, flow.since = flow.left(now), rates[stream], now
                flow.turn += 1
                timer = self.env.timeout(max(0, -(-flow.work // flow.rate)), (stream, flow, flow.turn))
                timer.callbacks.append(self._expire)

    def _expire(self, timer: Event) -> None:
        stream, flow, turn = timer.value
        if turn == flow.turn:
            del self.flows[stream]
            flow.done.succeed()
            self._change(1 << stream)
