"""Metrics from hand-made timelines, and FLOPs by hand."""
from __future__ import annotations

import numpy as np
import pytest

from sim.build.step import build
from sim.machine import machine
from sim.metrics import KEYS, busy_ns, critical_path, longest_fit, model_flops, overlap, overrun, peak_bytes, reserved_bytes, summary, times
from sim.model import model
from sim.simulate import simulate
from sim.strategy import MOST_CHUNKS, Strategy
from sim.timeline import Timeline, load
from tests.sim.tiny import tiny_machine, world

A100 = machine("a100-80g-sxm")


def test_flops_by_convention():
    m, S = model("demo"), 1000
    N = 4 * (2 * 256 * 256 + 2 * 64 * 256 + 3 * 512 * 256) + 256 * 256
    causal = 6 * N * S + 6 * 4 * S * S * 256
    assert model_flops(m, S, "qkvo") == {
        "mfu_causal": causal, "mfu_palm": 6 * N * S + 12 * 4 * S * S * 256, "hfu": causal + 2 * S * 4 * (256 * 256 + 2 * 512 * 256),
        "mfu_megatron_ds": 6 * N * S + 12 * 4 * S * S * 256}


def test_conventions_differ_by_up_to_2_63_at_2M_tokens():
    m, S = model("llama3-8b"), 2 << 20
    flops = model_flops(m, S, "qkvo")
    assert flops["mfu_palm"] * 4 / 3 / flops["mfu_causal"] == pytest.approx(2.63, abs=0.005)


@pytest.mark.parametrize("save", ("all", "qkvo", "o", "input"))
@pytest.mark.parametrize("name", ("demo", "gpt-2.7b"))
def test_schedule_flops_are_model_flops_and_recompute(name, save):
    """What the ops do: causal, flash's fifth product on top, and the recompute that hfu counts."""
    from sim.ops import KINDS

    m, S = model(name, layers=2), 8192
    schedule = build(m, Strategy(sp=2, chunk=1024, save=save, order="query-down"), S)
    work = [KINDS[op.kind].work(op, schedule) for region, _ in schedule.order() for op in schedule.regions[region].ops]
    fifth = m.layers * S * S * m.q_dim
    assert 2 * sum(w.gemm_flops + w.attn_flops for w in work) == pytest.approx(model_flops(m, S, save)["hfu"] + fifth, rel=1e-3)


SPANS = [
    ("ext.embed", -1, "external", 0, 10),
    ("fwd.qkv[0]", 0, "compute", 10, 20), ("fwd.offload.x[0]", 0, "d2h", 15, 35), ("fwd.ffn[0]", 0, "compute", 20, 30),
    ("loss.ce[0]", 0, "compute", 30, 40),
    ("bwd.reload.x[0]", 0, "h2d", 35, 75), ("bwd.ffn_bwd[0]", 0, "compute", 75, 95),
    ("ext.optimizer", -1, "external", 95, 100),
]


def hand(**numbers) -> Timeline:
    m = model("demo", layers=1)
    meta = {"numbers": {"gap_ns": 0, "wake_ns": 0} | numbers, "P": 1, "seq": 64}
    return Timeline.from_spans(SPANS, meta | {"model": m.__dict__})


def test_times_of_a_step():
    assert times(hand()) == {"step_s": 100e-9, "fwd_s": 30e-9, "bwd_s": 65e-9}


def test_busy_time():
    assert busy_ns(hand()) == {"compute": 50, "comm": 0, "h2d": 40, "d2h": 20, "host": 0, "external": 15}


def test_overlap_is_the_hidden_share_of_copies():
    assert overlap(hand()) == {"h2d": 5 / 40, "d2h": 20 / 20, "both": 25 / 60}


def test_the_critical_path_is_walked_back():
    """From the end: optimizer 5, ffn_bwd 20, reload 40, offload 20; nothing ended just before 15, so 5 went to issuing; embed 10."""
    assert critical_path(hand()) == {"compute": 20, "comm": 0, "h2d": 40, "d2h": 20, "external": 15, "issue": 5}


def test_a_gap_within_the_machines_belongs_to_the_chain():
    path = critical_path(world({"fwd": "compute qkv[0]\ncompute qkv[1]"}, tiny_machine(gap_ns=2)))
    assert path["compute"] == 22 and path["issue"] == 0


def test_waiting_for_the_host_thread_is_issue():
    """qkv at 30 to 40, 60 to 70, 90 to 100."""
    path = critical_path(world({"fwd": "compute qkv[0]\ncompute qkv[1]\ncompute qkv[2]"}, tiny_machine(launch_ns=30)))
    assert (path["compute"], path["issue"]) == (30, 70) and "host" not in path


def test_a_slow_host_thread_binds_by_another_name_than_host_memory():
    import dataclasses

    slow = dataclasses.replace(A100, numbers=A100.numbers | {"launch_ns": {"value": 5e9, "source": "assumed: a test"}})
    strategy = Strategy(sp=4, chunk=65536)
    schedule = build(model("llama3-8b", layers=2), strategy, 1 << 18)
    for machine_, said in ((slow, (True, "issue")), (slow.override(host_bytes=1 << 30), (False, "host"))):
        result = summary(simulate(schedule, strategy, machine_))
        assert (result["fits"], result["binding"]) == said


def test_a_summary_has_the_promised_keys():
    strategy = Strategy(sp=4, chunk=65536)
    timeline = simulate(build(model("llama3-8b"), strategy, 1 << 18), strategy, A100)
    result = summary(timeline)
    assert tuple(result) == KEYS
    assert result["fits"] and result["binding"] == "compute"
    assert result["step_s"] > result["fwd_s"] + result["bwd_s"]
    assert 0.3 < result["mfu_causal"] < result["hfu"] < 0.62
    assert any(note.startswith("wake_ns: assumed") for note in result["assumptions"])


def test_hbm_that_is_too_small_binds():
    strategy = Strategy(sp=4, chunk=65536)
    timeline = simulate(build(model("llama3-8b"), strategy, 1 << 18), strategy, A100.override(hbm_bytes=16 << 30))
    assert (summary(timeline)["fits"], summary(timeline)["binding"]) == (False, "hbm")
    assert overrun(timeline)["hbm"] == summary(timeline)["hbm_peak_bytes"] - (16 << 30)


def test_host_memory_is_shared_by_the_ranks_of_a_node():
    strategy = Strategy(sp=4, chunk=65536)
    schedule = build(model("llama3-8b"), strategy, 1 << 20)
    per_rank = schedule.arena_bytes("host")
    for host_bytes, fits in ((4 * per_rank, True), (4 * per_rank - 1, False)):
        result = summary(simulate(schedule, strategy, A100.override(host_bytes=host_bytes)))
        assert (result["fits"], result["binding"]) == (fits, "compute" if fits else "host")
        assert result["host_peak_bytes"] == per_rank


def test_slow_links_bind():
    import dataclasses

    slow = {k: {"value": 0.5, "source": "assumed: a test"} for k in ("h2d_GBps", "d2h_GBps")}
    m = dataclasses.replace(A100, numbers=A100.numbers | slow)
    strategy = Strategy(sp=4, chunk=65536)
    assert summary(simulate(build(model("llama3-8b"), strategy, 1 << 18), strategy, m))["binding"] == "h2d"


@pytest.mark.parametrize("offload", [True, False])
def test_the_longest_sequence_fits_and_the_next_does_not(offload):
    strategy = Strategy(sp=4, chunk=65536, offload=offload)
    longest = longest_fit(model("llama3-8b"), strategy, A100)
    step = longest // 3 if longest % 3 == 0 else longest // 2
    for seq, fits in ((longest, True), (longest + step, False)):
        assert summary(simulate(build(model("llama3-8b"), strategy, seq), strategy, A100))["fits"] is fits


@pytest.mark.parametrize("resident", (0.25, 0.5, 0.75, 1))
def test_the_longest_sequence_is_right_to_the_byte_with_a_resident_share(resident):
    shapes, strategy, seq = model("demo", layers=2), Strategy(chunk=1024, resident=resident), 48 << 10
    over = overrun(simulate(build(shapes, strategy, seq), strategy, A100))
    for more, longest in ((0, seq), (1, seq * 2 // 3)):
        snug = {f"{space}_bytes": int(A100[f"{space}_bytes"]) + extra for space, extra in over.items()}
        assert longest_fit(shapes, strategy, A100.override(**snug | {"host_bytes": snug["host_bytes"] - more})) == longest


def test_the_longest_sequence_is_one_that_is_built():
    assert longest_fit(model("demo"), Strategy(chunk=1024), A100) == MOST_CHUNKS * 1024


def test_nothing_fits_a_machine_too_small_for_the_states():
    assert longest_fit(model("llama3-8b"), Strategy(sp=4), A100.override(hbm_bytes=1 << 30)) == 0


def test_a_saved_timeline_says_the_same(tmp_path):
    strategy = Strategy(sp=2, chunk=1024)
    timeline = simulate(build(model("demo"), strategy, 5000), strategy, A100)
    timeline.save(tmp_path / "t.json")
    assert summary(load(tmp_path / "t.json")) == summary(timeline)
    assert load(tmp_path / "t.json").spans() == timeline.spans()


def test_a_pool_a_stream_holds_what_each_has_at_its_most():
    """Arenas 100; the compute stream's 7; the caller's 20 + 30, not when its arguments or its states alone are most. The peak is 100 + 5 + 50."""
    timeline = simulate(build(model("demo"), Strategy(chunk=1024), 1024), Strategy(chunk=1024), A100)
    timeline.memory["hbm"] = {"t_ns": np.array([0, 1, 2]), "planned": np.array([100] * 3), "arguments": np.array([40, 20, 0]), "workspace": np.array([7, 5, 0]),
                              "states": np.array([0, 30, 35]), "live": np.array([1] * 3)}
    assert (reserved_bytes(timeline), peak_bytes(timeline, "hbm")) == (157, 155)


def test_full_recompute_counts_one_more_forward_as_megatron_deepspeed_does():
    m, S = model("gpt-2.7b"), 1 << 16
    full, none = (model_flops(m, S, save) for save in ("input", "all"))
    assert full["mfu_megatron_ds"] == none["mfu_megatron_ds"] * 4 // 3 and none["hfu"] == none["mfu_causal"] == full["mfu_causal"]
