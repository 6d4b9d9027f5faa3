"""What the builders write: the paper's order of work, for any S, C and P."""
from __future__ import annotations

from dataclasses import replace

import pytest
from test_lint import GQA, MHA

from sim.build.step import build
from sim.errors import UserError
from sim.lint import lint
from sim.model import model
from sim.strategy import Strategy


def ids(schedule, region, kind):
    return [op.id for op in schedule.regions[region].ops if op.kind == kind]


@pytest.mark.parametrize("sp", (1, 2))
@pytest.mark.parametrize("seq", (31, 32, 33, 64, 65, 97))
def test_lengths_that_divide_by_nothing(sp, seq):
    """S < C, S = C, S = C + 1, and S not divisible by P: chunks cover the padded sequence, pairs are the causal ones."""
    schedule = build(GQA, Strategy(sp=sp, chunk=32), seq)
    lint(schedule)
    padded = seq + seq % sp
    assert schedule.seq == padded and sum(n for _, n in schedule.chunks) == padded
    u = -(-padded // 32)
    assert len(ids(schedule, "fwd", "attn")) == len(ids(schedule, "bwd", "attn_bwd")) == u * (u + 1) // 2


def test_one_rank_needs_no_all_to_all_and_resident_no_copies():
    schedule = build(MHA, Strategy(chunk=16, offload=False), 80)
    assert {op.stream for r in schedule.regions.values() for op in r.ops} == {"compute"}
    assert all(not op.waits for r in schedule.regions.values() for op in r.ops)


def test_projections_are_issued_one_chunk_ahead_of_their_row():
    """Or every all-to-all would be exposed."""
    order = ids(build(GQA, Strategy(sp=2, chunk=16), 80), "fwd", "qkv"), [op.id for op in build(GQA, Strategy(sp=2, chunk=16), 80).regions["fwd"].ops]
    for i, qkv in enumerate(order[0][1:], 1):
        assert order[1].index(qkv) < order[1].index(f"fwd.attn[{i},0]")
        assert i < 2 or order[1].index(qkv) < order[1].index(f"fwd.proj[{i - 2}]")


def test_two_slots_let_a_reload_run_beside_the_attention_before_it():
    """With one slot a reload waits for the attention just issued; with two, for the one before that."""
    for prefetch, waits in ((1, "fwd.attn[3,0]"), (2, "fwd.attn[2,1]")):
        schedule = build(MHA, Strategy(chunk=16, prefetch=prefetch), 80)
        reload = next(op for op in schedule.regions["fwd"].ops if op.id == "fwd.reload.kv[3,1]")
        assert waits in reload.waits


def test_host_bytes_are_what_forward_saves():
    """save=qkvo: x, q, k, v, o in bf16 and lse in fp32, per token and layer."""
    schedule = build(model("llama3-8b"), Strategy(sp=4, chunk=65536), 262144)
    m = schedule.model
    per_token = 2 * (m.hidden + 2 * m.q_dim + 2 * m.kv_dim) + 4 * m.heads
    assert schedule.arena_bytes("host") == m.layers * 262144 * per_token // 4


@pytest.mark.parametrize("change, strategy, seq, line", [
    ({}, Strategy(sp=3), 64, "4 query heads are not divisible by P=3; P must divide the heads, try P=2"),
    ({"heads": 28, "kv_heads": 4}, Strategy(sp=7), 64, "4 KV heads neither split over nor replicate to P=7; one must divide the other, try P=4"),
    ({}, Strategy(sp=2, chunk=33), 64, "C=33 is not divisible by P=2; P must divide C, try C=34"),
    ({}, Strategy(sp=4), 3, "S=3 is shorter than P=4; every rank needs a token, try S=4"),
])
def test_what_does_not_fit_together_is_refused(change, strategy, seq, line):
    with pytest.raises(UserError) as caught:
        build(replace(GQA, **change), strategy, seq)
    assert str(caught.value) == line


def test_kv_heads_fewer_than_ranks_replicate():
    schedule = build(replace(GQA, kv_heads=1), Strategy(sp=4, chunk=32), 64)
    lint(schedule)
    assert schedule.regions["fwd"].buffers["kv.0"].shape == (32, 2, 1, 16)


def test_what_is_saved_is_on_the_host_and_nothing_else():
    """Bytes a token and layer: x; and o, lse; and q, k, v; and h, gate and up. Recompute needs room for one layer, not for each."""
    m, seq = model("llama3-8b", layers=2), 262144
    x, o, qkv, ffn = 2 * m.hidden, 2 * m.q_dim + 4 * m.heads, 2 * (m.q_dim + 2 * m.kv_dim), 2 * (m.hidden + 2 * m.ffn)
    for save, per_token in (("input", x), ("o", x + o), ("qkvo", x + o + qkv), ("all", x + o + qkv + ffn)):
        schedule = build(m, Strategy(sp=4, chunk=65536, save=save), seq)
        assert schedule.stride["host"] == seq * per_token // 4
    assert schedule.shared["host"] == 0


@pytest.mark.parametrize("save, kinds", [("all", set()), ("qkvo", {"proj"}), ("o", {"proj", "qkv"}), ("input", {"proj", "qkv", "attn"})])
def test_backward_recomputes_what_was_not_saved(save, kinds):
    schedule = build(GQA, Strategy(chunk=16, save=save), 80)
    assert {op.kind for op in schedule.regions["bwd"].ops} & {"proj", "qkv", "attn", "ffn"} == kinds
    lint(schedule)


def walked(**settings):
    schedule = build(GQA, Strategy(chunk=16, **settings), 80)
    lint(schedule)
    return schedule


def test_orders_of_backward():
    """u = 5. Pairs as walked; dq and dkv of a chunk are used as soon as they are final."""
    up, down, outer = ([op.id[4:] for op in walked(order=order).regions["bwd"].ops if op.kind in ("attn_bwd", "q_bwd", "kv_bwd")] for order in ("query-up", "query-down", "kv-outer"))
    assert up[:4] == ["attn_bwd[0,0]", "q_bwd[0]", "attn_bwd[1,0]", "attn_bwd[1,1]"] and up[-5:] == [f"kv_bwd[{j}]" for j in range(5)]
    assert down[:8] == [f"attn_bwd[4,{j}]" for j in range(5)] + ["q_bwd[4]", "kv_bwd[4]", "attn_bwd[3,0]"]
    assert outer[:8] == [f"attn_bwd[{i},0]" for i in range(5)] + ["q_bwd[0]", "kv_bwd[0]", "attn_bwd[1,1]"]


def test_alternating_rows_leave_more_chunks_in_their_slots():
    """Reloads of KV in backward, u = 5 and two slots: all 15 pairs; or without the chunks that the row before left."""
    def reloads(**settings):
        return sum(op.id.startswith("bwd.reload.kv[") for op in walked(**settings).regions["bwd"].ops)

    assert reloads() == reloads(rows="alternating") == 15
    assert reloads(skip_resident=True) < 15 and reloads(skip_resident=True, rows="alternating") <= 11


@pytest.mark.parametrize("order, sums", [("query-up", "dkv"), ("query-down", "dkv"), ("kv-outer", "dq")])
def test_accumulators_rest_where_they_are_told(order, sums):
    """On the host they take two slots of HBM, whatever the number of chunks, and never go out twice without coming back between."""
    for accum, space in (("hbm", "hbm"), ("host", "host")):
        buffers = walked(order=order, accum=accum).regions["bwd"].buffers.values()
        assert {b.space for b in buffers if b.role == sums and b.life == "value"} == {space}
    assert sum(b.role == sums and b.space == "hbm" for b in buffers) == 2


def test_slack_gives_space_away_for_waits():
    """The plan with slack is never larger; where it is smaller, order was added."""
    tight, loose = (build(model("llama3-8b"), Strategy(sp=4, chunk=65536, reuse_slack=slack, save="all", order="kv-outer", accum="host"), 1 << 19) for slack in (0, 1))
    lint(loose)
    assert loose.shared["hbm"] < tight.shared["hbm"]
    assert sum(len(op.waits) for r in loose.regions.values() for op in r.ops) > sum(len(op.waits) for r in tight.regions.values() for op in r.ops)
