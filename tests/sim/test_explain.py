"""Explain: two hand-made timelines, every difference and every part of their critical paths, to the nanosecond."""
from __future__ import annotations

import pytest

from sim.errors import UserError
from sim.explain import KindPair, OpPair, Step, by_kind, by_stream, critical_path, kinds, only, pairs
from sim.schedule import kind_of
from sim.timeline import Timeline
from tests.sim.tiny import tiny_machine, tiny_schedule, world

WAITS = {"fwd.offload.kv[0]": ["fwd.qkv[0]"], "fwd.reload.kv[0]": ["fwd.offload.kv[0]"], "fwd.attn[1,0]": ["fwd.reload.kv[0]"], "bwd.ffn_bwd[0]": ["prev:fwd:fwd.reload.kv[0]"]}
A = [
    ("ext.embed", -1, "external", 0, 10),
    ("fwd.qkv[0]", 0, "compute", 10, 30), ("fwd.offload.kv[0]", 0, "d2h", 32, 50), ("fwd.ffn[0]", 0, "compute", 30, 40),
    ("fwd.reload.kv[0]", 0, "h2d", 50, 90), ("fwd.attn[1,0]", 0, "compute", 90, 120),
    ("bwd.ffn_bwd[0]", 0, "compute", 200, 220),
    ("ext.optimizer", -1, "external", 221, 230),
]
B = [
    ("ext.embed", 0, "external", 0, 10),
    ("fwd.qkv[0]", 0, "compute", 10, 25), ("fwd.offload.kv[0]", 0, "d2h", 25, 45), ("fwd.ffn[0]", 0, "compute", 25, 85),
    ("fwd.reload.kv[0]", 0, "h2d", 45, 55), ("fwd.attn[1,0]", 0, "compute", 85, 115), ("fwd.attn[1,1]", 0, "compute", 115, 118),
    ("ext.optimizer", 0, "external", 118, 130),
]


def hand(spans, waits=WAITS) -> Timeline:
    return Timeline.from_spans(spans, {"numbers": {"gap_ns": 1, "wake_ns": 3}} | ({} if waits is None else {"waits": waits}))


def test_kinds_have_no_region_and_no_tensor():
    assert [kind_of(i) for i in ("fwd.offload.kv[3]", "bwd.attn[1,0]", "ext.gather", "fwd.sync")] == ["offload", "attn", "gather", "sync"]


def test_ops_of_both_with_what_differs():
    assert pairs(hand(A), hand(B)) == [
        OpPair("ext.embed", -1, "external", 10, 10, 0, 0),
        OpPair("fwd.qkv[0]", 0, "compute", 20, 15, 0, 0), OpPair("fwd.offload.kv[0]", 0, "d2h", 18, 20, 7, 7), OpPair("fwd.ffn[0]", 0, "compute", 10, 60, 5, 0),
        OpPair("fwd.reload.kv[0]", 0, "h2d", 40, 10, 5, 5), OpPair("fwd.attn[1,0]", 0, "compute", 30, 30, 5, 50),
        OpPair("ext.optimizer", -1, "external", 9, 12, 103, 103),
    ]


def test_ids_of_one_alone():
    assert only(hand(A), hand(B)) == ({"bwd.ffn_bwd[0]": 1}, {"fwd.attn[1,1]": 1})


def test_layers_and_external_work_are_told_apart():
    one = [("fwd.ffn[0]", layer, "compute", 10 * layer, 10 * layer + 4 + layer) for layer in range(2)] + [("ext.reduce", 1, "external", 20, 22), ("ext.reduce", 0, "external", 22, 25)]
    two = [("fwd.ffn[0]", 1, "compute", 0, 9), ("ext.reduce", 0, "external", 20, 21)]
    assert pairs(hand(one), hand(two)) == [OpPair("fwd.ffn[0]", 1, "compute", 5, 9, 10, 10), OpPair("ext.reduce", -1, "external", 2, 1, 0, 0)]
    assert only(hand(one), hand(two)) == ({"fwd.ffn[0]": 1, "ext.reduce": 1}, {})


def test_external_work_is_late_by_its_own_kind():
    one, two = ([("ext.gather", 0, "external", at, at + 5), ("ext.reduce", 0, "external", at + 5, at + 9), ("ext.gather", 0, "external", at + 10, at + 15 + at)] for at in (20, 0))
    assert [(p.late_ns, p.gained_ns) for p in pairs(hand(one), hand(two))] == [(20, 20), (20, 20), (20, 0)]


def test_kinds_sum_over_regions():
    assert kinds(hand(A), hand(B))[:4] == [
        KindPair("ffn", "compute", 1, 1, 10, 60), KindPair("reload", "h2d", 1, 1, 40, 10), KindPair("ffn_bwd", "compute", 1, 0, 20, 0), KindPair("qkv", "compute", 1, 1, 20, 15)]
    assert [k.error for k in kinds(hand(A), hand(B))[:4]] == [10 / 60 - 1, 3.0, None, 20 / 15 - 1]


def test_a_path_of_waits():
    """ffn_bwd waits for attn, on its stream; 80 ns after it, more than a wake takes, so it was not issued yet. The optimizer is no schedule's: after what ended last."""
    assert critical_path(hand(A)) == [
        Step("ext.embed", -1, "external", 10, 0, "latency"), Step("fwd.qkv[0]", 0, "compute", 20, 0, "latency"), Step("fwd.offload.kv[0]", 0, "d2h", 18, 2, "latency"),
        Step("fwd.reload.kv[0]", 0, "h2d", 40, 0, "latency"), Step("fwd.attn[1,0]", 0, "compute", 30, 0, "latency"), Step("bwd.ffn_bwd[0]", 0, "compute", 20, 80, "issue"),
        Step("ext.optimizer", -1, "external", 9, 1, "latency"),
    ]
    assert by_stream(critical_path(hand(A))) == {"compute": 70, "comm": 0, "h2d": 40, "d2h": 18, "host": 0, "external": 19, "latency": 3, "issue": 80}


def test_a_path_of_stream_order():
    path = critical_path(hand(B))
    assert [step.id for step in path] == ["ext.embed", "fwd.qkv[0]", "fwd.ffn[0]", "fwd.attn[1,0]", "fwd.attn[1,1]", "ext.optimizer"]
    assert by_kind(path) == {("ffn", "compute"): 60, ("attn", "compute"): 33, ("qkv", "compute"): 15, ("optimizer", "external"): 12, ("embed", "external"): 10}


def test_a_wait_on_the_instance_before_counts():
    late = [(*span[:4], 199) if span[0] == "fwd.reload.kv[0]" else span for span in A]
    assert [step.id for step in critical_path(hand(late))][-3:] == ["fwd.reload.kv[0]", "bwd.ffn_bwd[0]", "ext.optimizer"]


def test_the_host_blocks_what_it_has_not_issued():
    """The block from 5 on takes what comes after ffn's end, 2 ns of waking up; qkv is issued 40 later."""
    spans = [("fwd.ffn[0]", 0, "compute", 0, 50), ("fwd.sync", 0, "host", 5, 52), ("bwd.qkv[0]", 0, "compute", 92, 100)]
    path = critical_path(hand(spans, {"fwd.sync": ["fwd.ffn[0]"]}))
    assert path == [Step("fwd.ffn[0]", 0, "compute", 50, 0, "latency"), Step("fwd.sync", 0, "host", 2, 0, "latency"), Step("bwd.qkv[0]", 0, "compute", 8, 40, "issue")]


def test_spans_that_overlap_by_the_clocks_error_still_sum_to_the_step():
    spans = [("fwd.qkv[0]", 0, "compute", 0, 50), ("fwd.ffn[0]", 0, "compute", 48, 90)]
    assert [step.ns for step in critical_path(hand(spans))] == [48, 42]


REGIONS = {"fwd": "compute qkv[0]\nd2h offload.kv[0] wait qkv[0]\nh2d reload.kv[0] wait offload.kv[0]\ncompute ffn[0] wait reload.kv[0]", "bwd": "compute proj[0]"}


@pytest.mark.parametrize("numbers", [{}, {"gap_ns": 2, "wake_ns": 5}, {"launch_ns": 30}])
def test_parts_of_a_predicted_path_sum_to_the_step(numbers):
    timeline = world(REGIONS, tiny_machine(**numbers), layers=3)
    total = by_stream(critical_path(timeline))
    assert sum(total.values()) == timeline.end_ns.max() - timeline.start_ns.min()
    assert [total[s] for s in ("compute", "d2h", "h2d")] == [3 * (10 + 100 + 20), 3 * 50, 3 * 40]
    assert total["latency"] == {0: 0, 2: 9 * 5 + 5 * 2}[numbers.get("gap_ns", 0)]
    assert total["issue"] == {0: 0, 30: 30 + 20}[numbers.get("launch_ns", 0)], "qkv is issued at 30 and done at 40, the offload is issued at 60"


def test_a_timeline_carries_its_waits_and_a_schedule_gives_them_too(tmp_path):
    timeline = world(REGIONS, layers=2)
    path = critical_path(timeline)
    assert timeline.meta.pop("waits")["fwd.ffn[0]"] == ["fwd.reload.kv[0]"]
    with pytest.raises(UserError, match="give its schedule with --schedule"):
        critical_path(timeline)
    assert critical_path(timeline, tiny_schedule(REGIONS, 2)) == path
    with pytest.raises(UserError, match="it has no op bwd.proj"):
        critical_path(timeline, tiny_schedule({"fwd": REGIONS["fwd"]}, 2))


def test_no_spans_no_path():
    with pytest.raises(UserError, match="without spans"):
        critical_path(hand([]))
