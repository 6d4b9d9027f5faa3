"""Simulate: the schedule on a machine, in integer nanoseconds, one simpy process a stream and one for the host thread.

The host issues ops in list order, each in the time that its kind was measured to take (or `launch_ns`), after `region_ns` before each region,
and blocks when `queue_depth` of them are unfinished, or at a sync. An op starts when its stream is done with the one before (+ `gap_ns`), its
first part was issued (`launch_ns`), and its waits are done (+ `wake_ns` if it had to wait); it ends no sooner than all of it was issued.
External work (gathers, reductions) runs beside, with waits of the same form.

Layers repeat. When two layers in a row begin in the same state (pointers, work left, times, all relative), the step between them
repeats until the host's look-ahead reaches the end of the run of equal regions: those layers are copied, not simulated. To skip
n of them, n coming instances are struck from the list and what is recorded later is moved by n periods; no event is touched.
"""
from __future__ import annotations

from array import array

import numpy as np
from simpy import Environment, Event
from simpy.events import Timeout

from sim import clock, heads, memory
from sim.contention import Pool
from sim.cost import issue_ns, needed, op_ns, unfitted, works
from sim.errors import UserError
from sim.externals import NAMES, Externals, externals
from sim.machine import NEVER, NUMBERS, Machine
from sim.ops import key
from sim.parts import HOST, Part, parts
from sim.schedule import STREAMS, Schedule
from sim.strategy import Strategy
from sim.timeline import ROWS, Timeline, meta

COMPUTE = STREAMS.index("compute")
EXTERNAL = ROWS.index("external")


def simulate(schedule: Schedule, strategy: Strategy, machine: Machine, unroll: bool = False) -> Timeline:
    """The predicted timeline of one step. `unroll` simulates every layer; the result is the same. Raises UserError on a deadlock."""
    each = works(schedule)
    ns = op_ns(machine, schedule, each)
    plan = clock.planned(schedule, each, ns) if clock.known(machine) else None
    rate = clock.rate(machine, plan) if plan else 1.0
    timeline, notes = _simulated(schedule, strategy, machine, unroll, ns, rate)
    if plan and clock.differs(settled := clock.rate(machine, clock.done(plan, timeline, rate)), rate):
        del timeline
        timeline, notes = _simulated(schedule, strategy, machine, unroll, ns, rate := settled)
    if rate != 1:
        notes.append(f"clock: compute runs at {rate * machine['clock_MHz']:.0f} MHz in such a step, its cost curves were taken at {machine['clock_MHz']:.0f}")
    timeline.meta = meta(schedule, strategy, machine, notes)
    timeline.memory = memory.curves(schedule, timeline, strategy, machine)
    return timeline


def _simulated(schedule: Schedule, strategy: Strategy, machine: Machine, unroll: bool, ns: dict[str, int], rate: float) -> tuple[Timeline, list[str]]:
    """Spans with compute so many times as fast as its ops take, and what was assumed."""
    if rate != 1:
        ns = ns | {op.id: round(ns[op.id] / rate) for region in schedule.regions.values() for op in region.ops if op.stream == "compute"}
    ext = externals(machine, schedule, strategy.zero)
    world = _World(schedule, machine, ext, unroll, ns)
    world.run()
    return _timeline(schedule, world, ext), _assumptions(machine, schedule, world)


class _Stream:
    """Where a process is, for the snapshot: instance, op, and what it is at. `start` of the host: when its sync began, if it is at one."""

    __slots__ = ("v", "i", "phase", "start", "end", "ready")

    def __init__(self) -> None:
        self.v = self.i = self.phase = self.end = self.ready = 0
        self.start: int | None = None


IDLE, ISSUE, WAIT, RUN, PARKED = range(5)
"""Phases: between ops; not issued; waits not done; running (or about to, at a known time); nothing to do in this instance."""


class _World:
    """Processes, what they have done, and what they record. Instances are numbered v in the list that shrinks by skipping."""

    def __init__(self, schedule: Schedule, machine: Machine, ext: Externals, unroll: bool, ns: dict[str, int]) -> None:
        self.env, self.unroll = Environment(ext.embed), unroll
        self.wake, self.gap = (round(machine[f"{k}_ns"]) for k in ("wake", "gap"))
        self.enter = round(machine.get("region_ns") or 0)
        self.return_ = self.wake if machine.get("sync_ns") is None else round(machine["sync_ns"])
        self.launch = round(machine["launch_ns"])
        self.depth = int(machine["queue_depth"])
        self.pool = Pool(self.env, machine) if machine.slowdown else None
        self.instances = schedule.order()
        self.parts = parts(schedule, ns, issue_ns(machine, schedule), ext, [region for region, _ in self.instances])
        self.first = np.cumsum([0] + [p.size for p in self.parts]).tolist()
        self.base = self.first
        self.done: list[list[int]] = []
        self.issued = self.open = 0
        self.began = 0
        """When the host began to issue the op that it is at."""
        self.room: Event | None = None
        """What the host waits for while the queue is full."""
        self.asked: dict[int, Event] = {}
        self.waiting: dict[int, Event] = {}
        self.slots, self.starts, self.ends = array("q"), array("q"), array("q")
        self.jumps: list[tuple[int, int, int, int, int]] = []
        """(first record, end record, copies, period in ns, spans) of each window that repeats."""
        self._before: tuple | None = None
        busy = sorted({s for p in self.parts for s in p.streams})
        self.state = {s: _Stream() for s in (*busy, HOST)}
        self.host = self.state[HOST]

    def run(self) -> None:
        """Runs the step to its end."""
        for s in self.state:
            self.env.process(self._host() if s == HOST else self._stream(s))
        try:
            self.env.run()
        except OverflowError:  # of a record: 64 bits of ns are 292 years
            raise UserError("the step takes longer than 292 years; take a machine with faster rates, or a shorter sequence") from None
        stuck = [s for s, state in self.state.items() if state.v < len(self.parts)]
        if stuck:
            raise UserError(f"the schedule never ends: {', '.join((STREAMS + ('gather', 'reduce'))[s] for s in stuck)} wait for ops that never start; lint it")

    def _host(self):
        env, me = self.env, self.host
        while me.v < len(self.parts):
            part, base = self.parts[me.v], self.base[me.v]
            if self.enter:
                me.i, me.phase, me.end = -1, RUN, env.now + self.enter
                yield Timeout(env, self.enter)
            me.i = -1
            while me.i + 1 < len(part.host):
                stream, ns = part.host[me.i + 1]
                if stream == HOST:
                    me.i, me.phase = me.i + 1, IDLE
                    yield from self._sync(me, *part.syncs[me.i])
                elif self.open < self.depth:
                    self._issue(part, base)
                    if ns:
                        yield Timeout(env, ns)
                else:
                    self.room = Event(env)
                    yield self.room
            me.v += 1
            self.issued = base + part.size
            for s in [s for s in self.asked if self.state[s].phase == PARKED]:
                self.asked.pop(s).succeed()

    def _sync(self, me: _Stream, waits: tuple, ns: int):
        start, last, me.phase = self.env.now, 0, WAIT
        me.start = start
        for back, k in waits:
            if self._done(me.v - back)[k] < 0:
                yield self._event(me.v - back, k)
            last = max(last, self._done(me.v - back)[k])
        rest = ns + (self.return_ if last > start else 0)
        if rest:
            me.phase, me.end = RUN, self.env.now + rest
            yield Timeout(self.env, rest)
        self._finish(self._done(me.v), me.i, self.base[me.v] + me.i, start, self.env.now)
        me.start = None

    def _stream(self, s: int):
        env, me, pool, wake, gap, host = self.env, self.state[s], self.pool, self.wake, self.gap, self.host
        ours = s < len(STREAMS)
        me.ready, asked = env.now, self.asked
        while me.v < len(self.parts):
            v, part = me.v, self.parts[me.v]
            done, earlier, base = self._done(v), self._done(v - 1) if v else (), self.base[v]
            todo = part.streams.get(s, ())
            if not todo and self.issued < base + part.size:
                me.phase, me.i = PARKED, 0
                asked[s] = event = Event(env)
                yield event
                me.ready = max(me.ready, env.now)
            for i, ns, waits in todo:
                me.i = i
                if ours and self.issued <= base + i:
                    me.phase = ISSUE
                    asked[s] = event = Event(env)
                    yield event
                    if env.now > me.ready:
                        me.ready = env.now
                start, least = me.ready, 0
                if host.end > start and ours and host.i == i and host.v == v and host.phase == RUN:
                    start, least = max(start, min(self.began + self.launch, host.end)), host.end
                if waits:
                    me.phase, last = WAIT, 0
                    for back, k in waits:
                        t = (earlier if back else done)[k]
                        if t < 0:
                            yield self._event(v - back, k)
                            t = (earlier if back else done)[k]
                        if t > last:
                            last = t
                    if last > start:
                        start = last + wake
                me.phase, me.start, me.end = RUN, start, start + ns if start + ns > least else least
                if i == part.begins and s == COMPUTE and not self.unroll:
                    self._snapshot(v)
                if pool is None or not ours:
                    if me.end > env.now:
                        yield Timeout(env, me.end - env.now)
                else:
                    if start > env.now:
                        yield Timeout(env, start - env.now)
                    yield pool.run(s, ns)
                    me.end = env.now
                    if me.end < least:
                        wait, me.end = least - me.end, least
                        yield Timeout(env, wait)
                me.ready = me.end + gap if ours else me.end
                me.phase = IDLE
                self._finish(done, i, base + i, start, me.end)
                if ours:
                    self.open -= 1
                    if self.room is not None:
                        self._issue_into_room()
            me.v += 1

    def _issue(self, part: Part, base: int) -> None:
        """The host begins to issue its next op; a stream that waits for it wakes at its first part."""
        host, self.began = self.host, self.env.now
        host.i += 1
        stream, ns = part.host[host.i]
        host.phase, host.end = RUN, self.began + ns
        self.open += 1
        self.issued = base + host.i + 1
        event = self.asked.pop(stream, None)
        if event is not None:
            timer = Timeout(self.env, min(self.launch, ns))
            timer.callbacks, event.callbacks = event.callbacks, []

    def _issue_into_room(self) -> None:
        """The host, which waits for room, issues its next op, unless it still issues the one before. It wakes, when that is done, where it would not
        wait for room again."""
        host, part, now = self.host, self.parts[self.host.v], self.env.now
        if host.end <= now:
            self._issue(part, self.base[host.v])
            if host.i + 1 < len(part.host) and part.host[host.i + 1][0] != HOST:
                return
        timer = Timeout(self.env, host.end - now)
        timer.callbacks, self.room.callbacks, self.room = self.room.callbacks, [], None

    def _finish(self, done: list[int], i: int, slot: int, start: int, end: int) -> None:
        done[i] = end
        self.slots.append(slot)
        self.starts.append(start)
        self.ends.append(end)
        event = self.waiting.pop(slot, None)
        if event is not None:
            event.succeed()

    def _event(self, v: int, i: int) -> Event:
        """The event of an op's end; several may wait for it."""
        slot = self.base[v] + i
        if slot not in self.waiting:
            self.waiting[slot] = Event(self.env)
        return self.waiting[slot]

    def _done(self, v: int) -> list[int]:
        while len(self.done) <= v:
            self.done.append([-1] * self.parts[len(self.done)].size)
        return self.done[v]

    def _snapshot(self, v: int) -> None:
        """The state as an instance begins, relative to it; if it equals the one before, skip what repeats."""
        now, parts = self.env.now, self.parts
        low = min(s.v for s in self.state.values())
        high = max(s.v for s in self.state.values())
        state = tuple([self._relative(s, k, v, now) for k, s in self.state.items()])
        here = (state, now, len(self.slots), low)
        before, self._before = self._before, here
        if before is None or before[0] != state or high >= len(parts):
            return
        if not all(parts[w] is parts[w + 1] or w + 1 < v and self._same_rest(w) for w in range(before[3], high)):
            return
        last = high
        while last + 1 < len(parts) and parts[last + 1] is parts[high]:
            last += 1
        n = last - high
        if n:
            self.jumps.append((before[2], here[2], n, now - before[1], parts[v].size))
            del parts[high + 1:high + 1 + n]
            self.base = np.cumsum([0] + [p.size for p in parts]).tolist()

    def _same_rest(self, w: int) -> bool:
        """Whether the streams that are late in instance w + 1 have left there what they had left in w, without waits on what came before."""
        old, new = self.parts[w], self.parts[w + 1]
        late = [(s, me.i) for s, me in self.state.items() if me.v == w + 1]
        rests = [[op for op in part.streams.get(s, ()) if op[0] >= i] for s, i in late for part in (old, new)]
        return old.region == new.region and rests[::2] == rests[1::2] and not any(back for rest in rests for _, _, waits in rest for back, _ in waits)

    def _relative(self, s: _Stream, stream: int, v: int, now: int) -> tuple:
        if stream == HOST:
            return s.v - v, s.i, s.phase, max(s.end - now, 0) if s.phase == RUN else 0, None if s.start is None else s.start - now, self.room is None
        if s.phase != RUN:
            return s.v - v, s.i, s.phase, max(s.ready - now, -1)
        flow = self.pool.flows.get(stream) if self.pool else None
        return s.v - v, s.i, s.phase, s.start - now, flow.left(now) if flow else s.end - now


def _timeline(schedule: Schedule, world: _World, ext: Externals) -> Timeline:
    """Columns in issue order: the embedding, every instance, the embedding's gradient, the last reduction, the optimizer, what else a step takes."""
    names, tables = [*NAMES], {}
    for name, region in schedule.regions.items():
        extra = [NAMES.index(k) for k, has in (("ext.gather", ext.gather), ("ext.cast", ext.cast), ("ext.reduce", ext.reduce)) if name in has]
        ops = np.r_[np.arange(len(region.ops)) + len(names), extra].astype(np.int32)
        streams = np.array([ROWS.index(op.stream) for op in region.ops] + [EXTERNAL] * len(extra), np.int8)
        tables[name] = ops, streams
        names += [op.id for op in region.ops]
    last = (("ext.embed_bwd", ext.embed_bwd), ("ext.reduce", ext.final), ("ext.optimizer", ext.optimizer), ("ext.step", ext.step))
    last = [(NAMES.index(name), ns) for name, ns in last if ns]
    start, end = _times(world, len(last))
    end[0], now = ext.embed, max(int(end.max(initial=0)), ext.embed)
    for k, (_, ns) in enumerate(last, len(end) - len(last)):
        start[k], end[k] = now, now + ns
        now += ns
    op = [np.zeros(1, np.int32), *(tables[region][0] for region, _ in world.instances), np.array([k for k, _ in last], np.int32)]
    stream = [np.full(1, EXTERNAL, np.int8), *(tables[region][1] for region, _ in world.instances), np.full(len(last), EXTERNAL, np.int8)]
    layer = np.repeat(np.array([-1] + [k for _, k in world.instances] + [-1], np.int32), [len(part) for part in op])
    return Timeline(names, np.concatenate(op), layer, np.concatenate(stream), start, end)


def _times(world: _World, after: int) -> tuple[np.ndarray, np.ndarray]:
    """Start and end of every span of every instance: what was recorded, and the windows that repeat. Zeros, one before and so many after them."""
    start, end = (np.zeros(1 + world.first[-1] + after, np.int64) for _ in range(2))
    slots, starts, ends = (np.frombuffer(a, np.int64) if len(a) else np.zeros(0, np.int64) for a in (world.slots, world.starts, world.ends))
    at = ns = 0
    moved = 1
    for low, high, n, period, spans in [*world.jumps, (0, len(slots), 0, 0, 0)]:
        place = slots[at:high] + moved
        start[place], end[place] = starts[at:high] + ns, ends[at:high] + ns
        for k in range(1, n + 1):
            place = slots[low:high] + (moved + k * spans)
            start[place], end[place] = starts[low:high] + (ns + k * period), ends[low:high] + (ns + k * period)
        at, ns, moved = high, ns + n * period, moved + n * spans
    return start, end


def _assumptions(machine: Machine, schedule: Schedule, world: _World) -> list[str]:
    """What the prediction takes for granted, one line each."""
    notes = [f"{name}: {machine.source(name)}" for name in NUMBERS if machine.source(name).startswith("assumed")]
    if world.pool is None:
        notes.append("contention: never measured, streams run together at full speed")
    else:
        notes += [f"contention of {streams}: never measured together, priced like its slowest measured part" for streams in world.pool.table.unmeasured()]
    if machine.dtype not in ("", schedule.dtype):
        notes.append(f"cost curves: measured in {machine.dtype}, taken for {schedule.dtype}")
    if machine.model not in ("", schedule.model.name):
        notes.append(f"cost curves: measured on {machine.model}, taken for {schedule.model.name} by FLOPs and bytes")
    if said := heads.said(machine, schedule.model.head_dim):
        notes.append(said)
    if schedule.P > machine["gpus_per_node"]:
        notes.append(f"P={schedule.P} spans nodes of {int(machine['gpus_per_node'])}: all-to-alls and reductions run wholly at the network's speed")
    for name in sorted({n for region in schedule.regions.values() for op in region.ops if op.kind == "pin" for n in needed(key(op))}):
        if machine.get(name) is None or machine.source(name).startswith("assumed"):
            notes.append(f"{name}: {machine.source(name)}" + ", priced at nothing" * (machine.get(name) is None))
    if unknown := [name for name in ("region_ns", "step_ns") if machine.get(name) is None]:
        notes.append(f"{' and '.join(unknown)}: {NEVER}, the host's own work at the borders of regions and of a step costs nothing")
    notes += [f"{name}: no cost curve was measured, priced by rates" for name in unfitted(machine, schedule)]
    notes.append("external work (embedding, gathers, reductions, optimizer) slows nothing else")
    return notes
