"""Alone: the simulator's contention taken back."""
from __future__ import annotations

from engine.alone import alone
from sim.build.step import build
from sim.model import model
from sim.simulate import simulate
from sim.strategy import Strategy
from tests.sim.tiny import tiny_machine

PAIR = {"compute|h2d": {"compute": 0.5, "h2d": 0.8}}


def test_the_part_that_overlaps_counts_at_its_rate():
    trace = [("a", 0, "compute", 0, 100), ("b", 0, "h2d", 60, 160), ("c", 0, "external", 0, 100), ("d", 0, "d2h", 10, 20)]
    assert [end - start for *_, start, end in alone(trace, PAIR)] == [60 + 20, 32 + 60, 100, 10]


def test_nothing_measured_changes_nothing():
    trace = [("a", 0, "compute", 0, 100), ("b", 0, "h2d", 60, 160)]
    assert alone(trace, {}) == trace


def test_neighbours_on_a_stream_are_one_busy_stream():
    trace = [("a", 0, "compute", 0, 50), ("b", 0, "compute", 50, 100), ("c", 0, "h2d", 0, 100), ("none", 0, "h2d", 100, 100)]
    assert [end - start for *_, start, end in alone(trace, PAIR)] == [25, 25, 80, 0]


def test_what_the_simulator_slowed_is_as_long_as_it_was_priced():
    slow = PAIR | {"compute|d2h": {"compute": 0.9, "d2h": 0.7}, "d2h|h2d": {"d2h": 0.6, "h2d": 0.75}, "comm|compute": {"comm": 0.8, "compute": 0.9}}
    s, strategy = build(model("demo"), Strategy(sp=2, chunk=256, zero=0), 1024, "fp32"), Strategy(sp=2, chunk=256, zero=0)
    machines = [tiny_machine(table, ns={kind: 1000 + 100 * k for k, kind in enumerate(("reload", "offload", "a2a", "qkv", "ffn", "attn", "attn_bwd"))}) for table in (slow, {})]
    slowed, free = (simulate(s, strategy, machine).spans() for machine in machines)
    want = sorted((id, layer, end - start) for id, layer, _, start, end in free)
    found = sorted((id, layer, end - start) for id, layer, _, start, end in alone(slowed, slow))
    assert sum(a[4] - a[3] > 1.05 * (b[4] - b[3]) for a, b in zip(slowed, free)) > 20
    assert all(f[:2] == w[:2] and abs(f[2] - w[2]) <= 2 for f, w in zip(found, want, strict=True))


def test_a_host_that_waits_slows_nothing():
    """Three measured together are no slower for it, though a part of them is."""
    slow = PAIR | {"compute|d2h|h2d": {"compute": 0.9, "d2h": 0.7, "h2d": 0.9}}
    trace = [("a", 0, "compute", 0, 100), ("b", 0, "h2d", 0, 100), ("c", 0, "d2h", 0, 100), ("sync", 0, "host", 0, 100)]
    assert [end - start for *_, start, end in alone(trace, slow)] == [90, 90, 70, 100]
