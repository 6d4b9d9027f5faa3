"""Contention: streams that run together slow each other. A fluid pool in integers, so that the same events give the same ns.

An op is an amount of work (its ns alone, in millionths) that drains at a rate in ppm. The rates depend only on which streams are
busy; a flow is settled and timed anew only when its own rate really changes.
"""
from __future__ import annotations

from simpy import Environment, Event
from simpy.events import Timeout

from sim.machine import Machine
from sim.schedule import STREAMS

PPM = 1_000_000


class Flow:
    """One op in the pool. Its timer is what its process waits for."""

    __slots__ = ("work", "rate", "since", "timer")

    def __init__(self, work: int, now: int) -> None:
        self.work, self.rate, self.since, self.timer = work, 0, now, None

    def left(self, now: int) -> int:
        """Work that remains, in ns x ppm."""
        return self.work - self.rate * (now - self.since)


class Table:
    """How fast streams run that are busy together, by what a machine has measured."""

    def __init__(self, slowdown: dict[str, dict]) -> None:
        sets = ((key.split("|"), rates) for key, rates in slowdown.items())
        self._measured = {frozenset(map(STREAMS.index, streams)): {STREAMS.index(s): rates[s] for s in streams} for streams, rates in sets}
        self._rates: dict[int, tuple[int, ...]] = {}

    def rates(self, busy: int) -> tuple[int, ...]:
        """ppm of each stream while the streams of a bit mask are busy: the measured set's, else the slowest measured part's."""
        if busy not in self._rates:
            streams = frozenset(k for k in range(len(STREAMS)) if busy >> k & 1)
            parts = [self._measured[streams]] if streams in self._measured else [r for s, r in self._measured.items() if s < streams]
            self._rates[busy] = tuple(max(1, round(PPM * min((p[k] for p in parts if k in p), default=1))) for k in range(len(STREAMS)))
        return self._rates[busy]

    def unmeasured(self) -> list[str]:
        """Sets of streams that were asked for and never measured together."""
        sets = [frozenset(k for k in range(len(STREAMS)) if busy >> k & 1) for busy in self._rates]
        return sorted("|".join(sorted(STREAMS[k] for k in s)) for s in sets if len(s) > 1 and s not in self._measured)


class Pool:
    """What runs at this moment, at most one op a stream."""

    def __init__(self, env: Environment, machine: Machine) -> None:
        self.env = env
        self.table = Table(machine.slowdown)
        self.flows: dict[int, Flow] = {}
        self._busy = 0

    def run(self, stream: int, ns: int) -> Event:
        """Starts an op that takes `ns` alone; the event comes when it is done."""
        flow = self.flows[stream] = Flow(ns * PPM, self.env.now)
        self._change(1 << stream)
        return flow.timer

    def _change(self, bit: int) -> None:
        self._busy ^= bit
        rates, now = self.table.rates(self._busy), self.env.now
        for stream, flow in self.flows.items():
            rate = rates[stream]
            if flow.rate != rate:
                work = flow.work = flow.work - flow.rate * (now - flow.since)
                flow.rate, flow.since = rate, now
                timer = Timeout(self.env, -(-work // rate) if work > 0 else 0, stream)
                if flow.timer is None:
                    timer.callbacks.append(self._expire)
                else:  # whoever waits now waits for the new one, and the old one wakes nobody
                    timer.callbacks, flow.timer.callbacks = flow.timer.callbacks, []
                flow.timer = timer

    def _expire(self, timer: Event) -> None:
        del self.flows[timer.value]
        self._change(1 << timer.value)
