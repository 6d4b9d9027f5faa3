"""Tiny worlds with exact lists of events, and replayed layers against unrolled ones."""
from __future__ import annotations

import dataclasses
import itertools
import random

import numpy as np
import pytest

from sim.build.step import build
from sim.errors import UserError
from sim.machine import Machine, machine
from sim.model import model
from sim.simulate import simulate
from sim.strategy import Strategy
from sim.timeline import Timeline
from tests.sim.tiny import NS, events, tiny_machine, world


def test_a_stream_runs_in_order():
    assert events({"fwd": "compute qkv[0]\ncompute proj[0]"}) == [("fwd.qkv[0]", 0, 10), ("fwd.proj[0]", 10, 30)]


def test_streams_run_beside_each_other():
    assert events({"fwd": "compute qkv[0]\nh2d reload.x[0]"}) == [("fwd.qkv[0]", 0, 10), ("fwd.reload.x[0]", 0, 40)]


def test_a_wait_holds_until_the_other_op_ends():
    assert events({"fwd": "h2d reload.x[0]\ncompute qkv[0] wait reload.x[0]"}) == [("fwd.reload.x[0]", 0, 40), ("fwd.qkv[0]", 40, 50)]


def test_the_host_issues_one_op_after_another():
    lines = "compute qkv[0]\nh2d reload.x[0]\ncompute proj[0]"
    assert events({"fwd": lines}, tiny_machine(launch_ns=3)) == [("fwd.qkv[0]", 3, 13), ("fwd.reload.x[0]", 6, 46), ("fwd.proj[0]", 13, 33)]


def test_a_slow_host_leaves_the_device_idle():
    assert events({"fwd": "compute qkv[0]\ncompute qkv[1]"}, tiny_machine(launch_ns=30)) == [("fwd.qkv[0]", 30, 40), ("fwd.qkv[1]", 60, 70)]


def test_each_kind_of_op_takes_the_host_as_long_as_was_measured():
    machine = tiny_machine(launch_ns=3)
    machine.fits["proj"]["issue_ns"] = 50
    assert events({"fwd": "compute qkv[0]\ncompute proj[0]\nh2d reload.x[0]"}, machine) == [("fwd.qkv[0]", 3, 13), ("fwd.proj[0]", 13, 53), ("fwd.reload.x[0]", 56, 96)]  # proj begins with its first part, and ends with its last
    machine.fits["proj"]["issue_ns"] = 25
    assert events({"fwd": "compute qkv[0]\ncompute proj[0]\nh2d reload.x[0]"}, machine) == [("fwd.qkv[0]", 3, 13), ("fwd.proj[0]", 13, 33), ("fwd.reload.x[0]", 31, 71)]
    assert events({"fwd": "compute proj[0]\ncompute qkv[0]"}, machine) == [("fwd.proj[0]", 3, 25), ("fwd.qkv[0]", 28, 38)]


def test_a_gap_lies_between_ops_of_a_stream():
    assert events({"fwd": "compute qkv[0]\ncompute qkv[1]"}, tiny_machine(gap_ns=2)) == [("fwd.qkv[0]", 0, 10), ("fwd.qkv[1]", 12, 22)]


def test_waking_takes_time_only_after_real_waiting():
    lines = "compute qkv[0]\nh2d reload.x[0] wait qkv[0]\ncompute ffn[0]\ncompute proj[0] wait reload.x[0]"
    assert events({"fwd": lines}, tiny_machine(wake_ns=7)) == [
        ("fwd.qkv[0]", 0, 10), ("fwd.reload.x[0]", 17, 57), ("fwd.ffn[0]", 10, 110), ("fwd.proj[0]", 110, 130)]


def test_the_last_of_two_waits_counts():
    lines = "h2d reload.x[0]\nd2h offload.x[0]\ncompute qkv[0] wait offload.x[0] reload.x[0]"
    assert events({"fwd": lines}, tiny_machine(wake_ns=7))[-1] == ("fwd.qkv[0]", 57, 67)


@pytest.mark.parametrize("depth, second", [(1, 10), (2, 0)])
def test_a_full_queue_blocks_the_host(depth, second):
    lines = "compute qkv[0]\nh2d reload.x[0]\nd2h offload.x[0]"
    third = 50 if depth == 1 else 10
    assert events({"fwd": lines}, tiny_machine(queue_depth=depth)) == [
        ("fwd.qkv[0]", 0, 10), ("fwd.reload.x[0]", second, second + 40), ("fwd.offload.x[0]", third, third + 50)]


def test_a_sync_blocks_the_host():
    lines = "h2d reload.x[0]\nhost sync wait reload.x[0]\ncompute qkv[0]"
    assert events({"fwd": lines}, tiny_machine(launch_ns=3, wake_ns=2)) == [("fwd.reload.x[0]", 3, 43), ("fwd.sync", 3, 45), ("fwd.qkv[0]", 48, 58)]


def test_a_sync_takes_what_was_measured_for_it():
    lines = "h2d reload.x[0]\nhost sync wait reload.x[0]\ncompute qkv[0]"
    assert events({"fwd": lines}, tiny_machine(wake_ns=2, sync_ns=9))[1:] == [("fwd.sync", 0, 49), ("fwd.qkv[0]", 49, 59)]


def test_prev_means_the_instance_just_before():
    fwd = "compute qkv[0]\nd2h offload.x[0] wait qkv[0]"
    assert events({"fwd": f"compute proj[0] wait prev:fwd:fwd.offload.x[0]\n{fwd}"}, layers=2) == [
        ("fwd.proj[0]", 0, 20), ("fwd.qkv[0]", 20, 30), ("fwd.offload.x[0]", 30, 80),
        ("fwd.proj[0]", 80, 100), ("fwd.qkv[0]", 100, 110), ("fwd.offload.x[0]", 110, 160)]


def test_prev_of_another_region_is_satisfied():
    bwd = "h2d reload.x[0] wait prev:fwd:fwd.offload.x[0]"
    regions = {"fwd": "d2h offload.x[0]", "loss": "compute ffn[0]", "bwd": bwd}
    assert events(regions)[-1] == ("bwd.reload.x[0]", 0, 40)
    del regions["loss"]
    assert events(regions)[-1] == ("bwd.reload.x[0]", 50, 90)


def test_layers_overlap_as_their_waits_allow():
    assert events({"fwd": "compute qkv[0]\nd2h offload.x[0] wait qkv[0]"}, layers=3) == [
        ("fwd.qkv[0]", 0, 10), ("fwd.offload.x[0]", 10, 60), ("fwd.qkv[0]", 10, 20),
        ("fwd.offload.x[0]", 60, 110), ("fwd.qkv[0]", 20, 30), ("fwd.offload.x[0]", 110, 160)]


def test_streams_that_run_together_slow_each_other():
    slow = {"compute|h2d": {"compute": 0.8, "h2d": 0.5}}
    assert events({"fwd": "compute ffn[0]\nh2d reload.x[0]"}, tiny_machine(slow)) == [("fwd.ffn[0]", 0, 116), ("fwd.reload.x[0]", 0, 80)]


def test_work_left_is_settled_when_another_stream_joins_late():
    slow = {"compute|h2d": {"compute": 0.5, "h2d": 1.0}}
    lines = "compute qkv[0]\ncompute ffn[0]\nh2d reload.x[0] wait qkv[0]"
    assert events({"fwd": lines}, tiny_machine(slow)) == [("fwd.qkv[0]", 0, 10), ("fwd.ffn[0]", 10, 130), ("fwd.reload.x[0]", 10, 50)]


def test_three_streams_are_as_slow_as_their_slowest_measured_pair():
    slow = {"compute|h2d": {"compute": 0.5, "h2d": 1.0}, "d2h|h2d": {"d2h": 0.8, "h2d": 0.8}}
    timeline = world({"fwd": "compute ffn[0]\nh2d reload.x[0]\nd2h offload.x[0]"}, tiny_machine(slow))
    assert [s[3:] for s in timeline.spans()[1:4]] == [(0, 125), (0, 50), (0, 60)]
    assert "contention of compute|d2h|h2d: never measured together, priced like its slowest measured part" in timeline.meta["assumptions"]
    assert any(note.startswith("contention of compute|d2h:") for note in timeline.meta["assumptions"])


@pytest.mark.parametrize("entry, end", (({"compute": 1e-9, "h2d": 1}, 140), ({"compute": 1, "h2d": 1, "d2h": 0}, 100), ({"compute": 1, "h2d": 1, "host": "x"}, 100)))
def test_odd_rates_of_a_table_neither_stop_the_step_nor_count_for_streams_outside_their_set(entry, end):
    """Nothing is slower than a millionth."""
    lines = "compute ffn[0]\nh2d reload.x[0]\nd2h offload.x[0]"
    assert max(e for *_, e in events({"fwd": lines}, tiny_machine({"compute|h2d": entry}))) == end


FOUR = "compute ffn[0]\nh2d reload.x[0]\nd2h offload.x[0]\ncomm a2a.x[0]"
"""100, 40, 50 and 5 ns alone, all begun at 0."""


@pytest.mark.parametrize("streams", [s for n in (2, 3, 4) for s in itertools.combinations(("comm", "compute", "d2h", "h2d"), n)])
def test_each_set_of_streams_runs_at_the_rate_measured_for_it(streams):
    """All at half speed until the first one ends; the rest was not measured, so alone or in a set without a measured part each runs at full speed."""
    lines = "\n".join(line for line in FOUR.splitlines() if line.split()[0] in streams)
    alone = {"compute": 100, "h2d": 40, "d2h": 50, "comm": 5}
    slow = {"|".join(streams): {s: 0.5 for s in streams}}
    first = 2 * min(alone[s] for s in streams)
    found = {op: (a, b) for op, a, b in events({"fwd": lines}, tiny_machine(slow))}
    assert sorted(found.values()) == sorted((0, first + alone[s] - first // 2) for s in streams)


def test_each_stream_of_a_set_has_its_own_rate_and_parts_count_where_the_set_was_not_measured():
    slow = {"compute|d2h|h2d": {"compute": 0.9, "d2h": 0.5, "h2d": 0.8}, "compute|d2h": {"compute": 0.95, "d2h": 0.6}}
    assert events({"fwd": "compute ffn[0]\nh2d reload.x[0]\nd2h offload.x[0]"}, tiny_machine(slow)) == [
        ("fwd.ffn[0]", 0, 108),       # 45 of 100 by 50 ns, then 0.95 beside d2h (25 left at 0.6: until 92), then alone
        ("fwd.reload.x[0]", 0, 50), ("fwd.offload.x[0]", 0, 92)]


def test_a_table_of_ones_is_no_table():
    lines = "compute ffn[0]\nh2d reload.x[0]\ncompute qkv[0] wait reload.x[0]\nd2h offload.x[0] wait qkv[0]"
    ones = {"compute|h2d": {"compute": 1, "h2d": 1}}
    assert events({"fwd": lines}, tiny_machine(ones), layers=3) == events({"fwd": lines}, layers=3)


def test_gathers_run_one_layer_ahead_and_reductions_after():
    ns = {"ext_reduce": 25, "ext_embed": 4, "ext_optimizer": 6}
    regions = {"fwd": "compute qkv[0]\ncompute ffn[0]", "bwd": "compute ffn[0]"}
    assert events(regions, tiny_machine(ns=ns), layers=2, P=2, zero=3, external=True) == [
        ("ext.embed", 0, 29),
        ("fwd.qkv[0]", 54, 64), ("fwd.ffn[0]", 64, 164), ("ext.gather", 29, 54),
        ("fwd.qkv[0]", 164, 174), ("fwd.ffn[0]", 174, 274), ("ext.gather", 64, 89),
        ("bwd.ffn[0]", 274, 374), ("ext.gather", 174, 199), ("ext.reduce", 374, 399),
        ("bwd.ffn[0]", 399, 499), ("ext.gather", 374, 399), ("ext.reduce", 499, 524),
        ("ext.reduce", 524, 549), ("ext.optimizer", 549, 555)]


def test_replicated_states_are_reduced_once():
    ns = {"ext_reduce": 25, "ext_embed": 4, "ext_optimizer": 6}
    assert events({"fwd": "compute qkv[0]"}, tiny_machine(ns=ns), P=2, external=True) == [
        ("ext.embed", 0, 4), ("fwd.qkv[0]", 4, 14), ("ext.reduce", 14, 39), ("ext.optimizer", 39, 45)]


def test_whole_parameters_are_cast_between_regions():
    """Reloads go on meanwhile, compute does not."""
    regions = {"fwd": "compute qkv[0]\nd2h offload.x[0] wait qkv[0]", "loss": "compute ffn[0]"}
    assert events(regions, tiny_machine(ns={"ext_cast": 7}), layers=2, external=True)[1:] == [
        ("fwd.qkv[0]", 7, 17), ("fwd.offload.x[0]", 17, 67), ("ext.cast", 0, 7),
        ("fwd.qkv[0]", 24, 34), ("fwd.offload.x[0]", 67, 117), ("ext.cast", 17, 24),
        ("loss.ffn[0]", 41, 141), ("ext.cast", 34, 41)]
    assert not [e for e in events(regions, tiny_machine(ns={"ext_cast": 7}), P=2, zero=3, external=True) if e[0] == "ext.cast"]


def test_a_schedule_that_never_ends_is_an_error():
    with pytest.raises(UserError, match="never ends: compute, h2d wait"):
        events({"fwd": "compute qkv[0] wait reload.x[0]\nh2d reload.x[0] wait qkv[0]"})


def test_a_step_of_centuries_is_refused():
    """Times are 64 bits of nanoseconds; a machine of tiny rates would overflow them."""
    slow = machine("h200-141g-sxm")
    slow = dataclasses.replace(slow, numbers=slow.numbers | {"gemm_TFLOPS": {"value": 1e-15, "source": "assumed: a test"}})
    strategy = Strategy(chunk=1024)
    with pytest.raises(UserError, match="longer than 292 years"):
        simulate(build(model("demo"), strategy, 2048), strategy, slow)


def test_every_op_of_the_schedule_has_one_span():
    strategy = Strategy(sp=2, chunk=1024)
    schedule = build(model("demo"), strategy, 5000)
    spans = [(op, layer) for op, layer, stream, _, _ in simulate(schedule, strategy, machine("h200-141g-sxm")).spans() if stream != "external"]
    assert spans == [(op.id, layer) for region, layer in schedule.order() for op in schedule.regions[region].ops]


def test_a_host_that_still_issues_an_op_leaves_room_empty():
    """Two may be open. qkv ends at 10, and proj takes the host from then to 110: the room that the copy leaves at 40 is taken at 110."""
    m = tiny_machine(queue_depth=2)
    m.fits["proj"]["issue_ns"] = 100
    found = events({"fwd": "compute qkv[0]\nh2d reload.x[0]\ncompute proj[0]\nd2h offload.x[0]"}, m)
    assert found == [("fwd.qkv[0]", 0, 10), ("fwd.reload.x[0]", 0, 40), ("fwd.proj[0]", 10, 110), ("fwd.offload.x[0]", 110, 160)]


# ---- repeated layers ----------------------------------------------------------------------------------------------------

def changed(slowdown: dict | None = None, **numbers: float) -> Machine:
    m = machine("h200-141g-sxm")
    new = {k: {"value": v, "source": "assumed: a test"} for k, v in numbers.items()}
    return dataclasses.replace(m, numbers=m.numbers | new, slowdown=m.slowdown if slowdown is None else slowdown)


TABLE = {"compute|h2d": {"compute": 0.7, "h2d": 0.6}, "d2h|h2d": {"d2h": 0.5, "h2d": 0.77}, "comm|compute": {"comm": 0.9, "compute": 0.83}}
MACHINES = {
    "h200": changed(),
    "h200, no table": changed({}),
    "a100": machine("a100-80g-sxm"),
    "slow host": changed(launch_ns=50_000, queue_depth=1),
    "short queue": changed(queue_depth=3, launch_ns=1),
    "no latency": changed({}, launch_ns=0, wake_ns=0, gap_ns=0),
    "slow links": changed(h2d_GBps=3, d2h_GBps=2),
    "slow links that disturb": changed(TABLE, h2d_GBps=3, d2h_GBps=2, nvlink_GBps=1),
    "far look-ahead": changed(launch_ns=1000, queue_depth=2000),
}


def same(a: Timeline, b: Timeline) -> bool:
    columns = all(np.array_equal(getattr(a, c), getattr(b, c)) for c in ("op", "layer", "stream", "start_ns", "end_ns"))
    return columns and all(np.array_equal(a.memory[s][row], b.memory[s][row]) for s in a.memory for row in a.memory[s])


@pytest.mark.parametrize("name", MACHINES)
def test_replayed_layers_equal_unrolled_ones(name):
    cases = itertools.product(((1, 3), (2, 3), (4, 0)), (True, False), ("none", "region"), (1, 2, 3, 7), ((10_000, 4096), (2048, 4096)))
    for (P, zero), offload, sync, layers, (seq, chunk) in cases:
        strategy = Strategy(sp=P, chunk=chunk, offload=offload, host_sync=sync, zero=zero)
        schedule = build(model("demo", layers=layers), strategy, seq)
        replayed, unrolled = (simulate(schedule, strategy, MACHINES[name], unroll) for unroll in (False, True))
        assert same(replayed, unrolled), (P, zero, offload, sync, layers, seq)


def test_replayed_layers_equal_unrolled_ones_on_random_schedules():
    """Odd latencies, ties, syncs anywhere, streams with nothing to do: what builders never write, an editor may. In the last two, streams are late
    in two layers with unequal rests."""
    for seed in (*range(300), 6076, 9663):
        r = random.Random(seed)
        slowdown = r.choice([{}, {"compute|h2d": {"compute": 0.7, "h2d": 0.9}, "d2h|h2d": {"d2h": 0.5, "h2d": 0.33}}])
        ns = {kind: r.choice([0, 1, 5, 10, 40, 77]) for kind in NS}
        m = tiny_machine(slowdown, ns, launch_ns=r.choice([0, 1, 5, 20]), wake_ns=r.choice([0, 3, 11]), gap_ns=r.choice([0, 2]),
                         queue_depth=r.choice([1, 2, 3, 7, 1000]))
        for kind in r.sample(sorted(m.fits), r.choice([0, 2, 4])):
            m.fits[kind]["issue_ns"] = r.choice([0, 1, 5, 30, 90])
        P, zero = r.choice([(1, 3), (2, 3), (2, 0)])
        case = random_regions(r), m, r.randint(1, 12), P, zero
        assert same(world(*case), world(*case, unroll=True)), seed


def random_regions(r: random.Random) -> dict[str, str]:
    kinds = {"compute": ("qkv", "proj", "ffn"), "comm": ("a2a",), "h2d": ("reload",), "d2h": ("offload",), "host": ("sync",)}
    names: dict[str, list[str]] = {}
    lines: dict[str, list[str]] = {}
    for region in ("fwd", "loss", "bwd"):
        names[region], lines[region] = [], []
        for k in range(r.randint(1, 10)):
            stream = "compute" if region == "loss" and not k else r.choices(list(kinds), (4, 2, 2, 2, 1))[0]
            waits = r.sample(names[region], min(k, r.choice([0, 0, 1, 2])))
            names[region].append(f"{r.choice(kinds[stream])}.x[{k}]")
            lines[region].append(" ".join([stream, names[region][-1], "wait", *waits]))
    for region, before in (("fwd", ["fwd"]), ("loss", ["fwd"]), ("bwd", ["loss", "bwd"])):
        for k in range(len(lines[region])):
            if r.random() < 0.3:
                other = r.choice(before)
                lines[region][k] += f" prev:{other}:{other}.{r.choice(names[other])}"
    return {region: "\n".join(rows) for region, rows in lines.items()}


def test_most_layers_are_not_simulated():
    """Without this, equality above would say nothing."""
    from sim.cost import op_ns, works
    from sim.externals import externals
    from sim.simulate import _World

    strategy = Strategy(sp=4, chunk=4096)
    schedule = build(model("llama3-8b"), strategy, 1 << 16)
    m = machine("a100-80g-sxm")
    simulated = _World(schedule, m, externals(m, schedule, 3), False, op_ns(m, schedule, works(schedule)))
    simulated.run()
    assert [n for _, _, n, _, _ in simulated.jumps] and sum(n for _, _, n, _, _ in simulated.jumps) >= 64 - 12


def test_attention_of_another_head_dim_is_an_assumption():
    strategy, known = Strategy(chunk=1024), machine("a100-80g-sxm")
    nowhere = dataclasses.replace(known, numbers={name: entry for name, entry in known.numbers.items() if name != "head_dim"})
    said = "attention: measured at head_dim 128, taken for 80; most kernels are slower there"
    for name, m, expected in (("gpt-2.7b", known, True), ("llama3-8b", known, False), ("gpt-2.7b", nowhere, False)):
        assert (said in simulate(build(model(name, layers=1), strategy, 4096), strategy, m).meta["assumptions"]) == expected


def test_curves_of_another_model_are_an_assumption():
    known, strategy = machine("h200-1gpu"), Strategy(chunk=1024)
    said = "cost curves: measured on llama3-8b, taken for gpt-13b by FLOPs and bytes"
    for name in ("gpt-13b", "llama3-8b"):
        assert (said in simulate(build(model(name, layers=1), strategy, 4096, "bf16"), strategy, known).meta["assumptions"]) == (name == "gpt-13b")


def test_curves_of_another_dtype_are_an_assumption():
    schedule, strategy = build(model("demo"), Strategy(chunk=1024), 4096, "bf16"), Strategy(chunk=1024)
    known = machine("a100-80g-sxm")
    measured = dataclasses.replace(known, numbers=known.numbers | {"dtype": {"value": "fp32", "source": "measured: here"}})
    said = "cost curves: measured in fp32, taken for bf16"
    assert said in simulate(schedule, strategy, measured).meta["assumptions"]
    assert said not in simulate(schedule, strategy, known).meta["assumptions"]
