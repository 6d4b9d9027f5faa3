"""Memory curves: exact where a formula exists, brute force elsewhere."""
from __future__ import annotations

import numpy as np
import pytest

from sim import memory
from sim.build.step import build
from sim.machine import machine
from sim.metrics import peak_bytes
from sim.model import Model, model
from sim.ops import KINDS
from sim.schedule import Schedule
from sim.simulate import simulate
from sim.strategy import Strategy
from sim.timeline import Timeline

A100 = machine("a100-80g-sxm")


def run(m: Model, seq: int, dtype: str = "bf16", **strategy) -> tuple[Schedule, Strategy, Timeline]:
    s = Strategy(**strategy)
    schedule = build(m, s, seq, dtype)
    return schedule, s, simulate(schedule, s, A100)


def at(timeline: Timeline, t_ns: int, row: str, space: str = "hbm") -> int:
    rows = timeline.memory[space]
    return int(rows[row][np.searchsorted(rows["t_ns"], t_ns, side="right") - 1])


def loss_begins(timeline: Timeline) -> int:
    return int(timeline.start_ns[timeline.within("loss.")].min())


def forward_ends(timeline: Timeline) -> int:
    """The first time after every forward op, copies included."""
    return int(timeline.end_ns[timeline.within("fwd.")].max())


@pytest.mark.parametrize("layers, P", [(1, 1), (4, 2), (7, 4)])
def test_offloading_frees_exactly_the_block_inputs(layers, P):
    m, seq = model("demo", layers=layers), 8192
    on, off = (run(m, seq, sp=P, chunk=1024, offload=offload)[2] for offload in (True, False))
    t = max(forward_ends(on), loss_begins(on))
    assert at(off, loss_begins(off), "arguments") - at(on, t, "arguments") == layers * seq * m.hidden * 2 // P


def test_arguments_at_the_peak_of_a_layer():
    """Forward with offload: this layer's x and y and the labels. Backward: dy, dx and the weight gradients, which a rank keeps a share of. (One layer at a time.)"""
    m, seq = model("demo"), 8192
    _, _, timeline = run(m, seq, chunk=1024, host_sync="region")
    mask = timeline.within("bwd.kv_bwd[7]") & (timeline.layer == 1)
    assert at(timeline, int(timeline.start_ns[mask][0]), "arguments") == 2 * seq * m.hidden * 2
    seq *= 2
    _, _, timeline = run(m, seq, sp=2, chunk=1024, host_sync="region")
    seq //= 2
    hidden, labels = seq * m.hidden * 2, seq * 8
    mask = timeline.within("fwd.ffn[0]") & (timeline.layer == 1)
    assert at(timeline, int(timeline.start_ns[mask][0]), "arguments") == 2 * hidden + labels
    mask = timeline.within("bwd.kv_bwd[15]") & (timeline.layer == 1)
    assert at(timeline, int(timeline.start_ns[mask][0]), "arguments") == 2 * hidden + 4 * m.block_params


def test_without_offload_each_backward_frees_one_input():
    m, seq = model("demo"), 8192
    _, _, timeline = run(m, seq, chunk=1024, offload=False, host_sync="region")
    times = [int(timeline.start_ns[timeline.within("bwd.q_bwd[3]") & (timeline.layer == layer)][0]) for layer in (3, 2, 1, 0)]
    levels = [at(timeline, t, "arguments") for t in times]
    assert np.diff(levels).tolist() == [-seq * m.hidden * 2] * 3


def test_a_peak_is_no_sum_of_maxima():
    rows = run(model("llama3-8b", layers=2), 1 << 18, sp=4)[2].memory["hbm"]
    peak = int(memory.total(rows).max())
    assert peak == max(sum(int(rows[r][k]) for r in memory.COUNTED) for k in range(len(rows["t_ns"])))
    assert peak < sum(int(rows[r].max()) for r in memory.COUNTED)


@pytest.mark.parametrize("where", [{}, {"resident": 0.5}, {"offload": False}], ids=str)
@pytest.mark.parametrize("P", [1, 2])
def test_rows_equal_a_brute_force_count(where, P):
    schedule, strategy, timeline = run(model("demo", layers=3), 5000, sp=P, chunk=1024, **where)
    lives = {space: {} for space in ("hbm", "host")}
    work = []
    for op, layer, stream, start, end in timeline.spans():
        region = op.split(".")[0]
        if stream == "external":
            continue
        ir = next(o for o in schedule.regions[region].ops if o.id == op)
        work.append((start, end, KINDS[ir.kind].workspace(ir, schedule)))
        for name in ir.reads + ir.writes:
            b = schedule.buffer(region, name)
            if b.life != "argument":
                place = lives[b.space].setdefault((name, layer, "" if b.life == "saved" else region), [start, end, b.size_bytes])
                place[0], place[1] = min(place[0], start), max(place[1], end)
    for t in np.random.default_rng(0).integers(0, timeline.end_ns.max(), 300).tolist():
        assert at(timeline, t, "workspace") == sum(n for a, z, n in work if a <= t < z)
        for space in lives:
            assert at(timeline, t, "live", space) == sum(n for a, z, n in lives[space].values() if a <= t < z)


def test_live_never_exceeds_planned():
    for where in ({}, {"resident": 0.5}, {"offload": False}):
        timeline = run(model("demo"), 10_000, sp=2, chunk=1024, **where)[2]
        for rows in timeline.memory.values():
            assert (rows["live"] <= rows["planned"]).all() and (rows["live"][-1:] == 0).all()


def test_states_by_zero_stage():
    m = model("demo")
    sharded, whole = (run(m, 8192, sp=2, chunk=1024, zero=zero)[2].memory["hbm"]["states"] for zero in (3, 0))
    head = m.vocab * m.hidden + m.hidden
    made = [4 + 4 * (head + k * m.block_params) for k in range(5)]  # the loss, and gradients from the region on that makes them
    cast = 2 * head, 2 * m.block_params
    assert set(whole.tolist()[:-1]) == {12 * m.params + extra for extra in (
        0, *cast, made[0], made[0] + cast[0], *(grads + cast[1] for grads in made), *made[1:4], 4 * m.params)}  # whole, and reduced in place
    extra = sharded[:-1] - 16 * m.params // 2
    assert extra.min() >= 0 and extra.max() in (2 * 2 * m.block_params, 2 * (m.block_params + head))


def test_the_host_holds_what_is_saved():
    schedule, _, timeline = run(model("demo"), 8192, sp=2, chunk=1024)
    assert peak_bytes(timeline, "host") == schedule.arena_bytes("host") == 4 * schedule.stride["host"]


def test_measured_spans_are_taken_as_they_are():
    """Spans that jitter and come in rows, as an engine gives them."""
    schedule, strategy, timeline = run(model("demo", layers=2), 4096, chunk=1024)
    late = [(op, layer, stream, a + 1000 + 13 * k % 7, b + 1000 + 13 * k % 7) for k, (op, layer, stream, a, b) in enumerate(timeline.spans())]
    measured = Timeline.from_spans([s for s in late if s[2] != "external"], timeline.meta)
    rows = memory.curves(schedule, measured, strategy)["hbm"]
    assert abs(int(memory.total(rows).max()) - peak_bytes(timeline, "hbm")) < 0.05 * peak_bytes(timeline, "hbm")
    assert (np.diff(rows["t_ns"]) > 0).all()
