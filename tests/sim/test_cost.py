"""Prices by hand: rates, shared links, cost curves."""
from __future__ import annotations

import dataclasses

import pytest

from sim.build.step import build
from sim.cost import features, issue_ns, op_ns, price, unfitted, works
from sim.externals import externals, moved_bytes
from sim.machine import NUMBERS, Machine, machine
from sim.model import model
from sim.ops import KINDS, Work, key
from sim.strategy import Strategy

RATES = {"gemm_TFLOPS": 2, "attn_fwd_TFLOPS": 4, "attn_bwd_TFLOPS": 5, "hbm_GBps": 10, "h2d_GBps": 8, "d2h_GBps": 4, "nvlink_GBps": 100,
         "network_GBps": 25, "gpus_per_node": 4, "gpus_per_uplink": 2}
PLAIN = Machine("plain", "cuda", {k: {"value": RATES.get(k, 1), "source": "assumed: a test"} for k in (*NUMBERS, "peak_name")}
                | {"peak_name": {"value": "a test's", "source": "assumed: a test"}})


@pytest.mark.parametrize("kind, work, P, ns", [
    ("qkv", Work(gemm_flops=8000, hbm_bytes=10), 1, 4),            # 8000 FLOPs at 2 TFLOPS
    ("qkv", Work(gemm_flops=8000, hbm_bytes=90), 1, 9),            # memory is the longer one
    ("attn", Work(attn_flops=8000), 1, 2),
    ("attn+merge.causal", Work(attn_flops=8000), 1, 2),
    ("attn_bwd+merge", Work(attn_flops=10_000), 1, 2),
    ("reload", Work(link_bytes=80), 1, 10),                        # alone on its uplink
    ("reload", Work(link_bytes=80), 2, 20),                        # two ranks share it
    ("reload", Work(link_bytes=80), 8, 20),                        # as do each two of eight
    ("offload", Work(link_bytes=80), 1, 20),
    ("a2a", Work(link_bytes=1000), 4, 10),                         # within a node
    ("a2a", Work(link_bytes=1000), 8, 40),                         # over the network
    ("sync", Work(), 1, 0),
])
def test_prices_by_rates(kind, work, P, ns):
    assert price(PLAIN, kind, work, P) == ns


def test_a_cost_curve_wins_over_rates():
    curve = {"fixed_ns": 5, "ns_per_gflop": 100, "ns_per_MB": 10, "source": "measured: a test"}
    m = dataclasses.replace(PLAIN, fits={"qkv": curve, "reload": {"fixed_ns": 7, "source": "measured: a test"}})
    assert price(m, "qkv", Work(gemm_flops=2 * 10**9, hbm_bytes=3 * 10**6), 1) == 5 + 200 + 30
    assert price(m, "reload", Work(link_bytes=10**9), 2) == 7
    assert price(m, "offload", Work(link_bytes=80), 1) == 20


@pytest.mark.parametrize("gflop, ns", [
    (1, 150),          # below the smallest size that was measured: as there
    (10, 1500),        # at it
    (100, 10_000),     # between, in the middle of the logarithms: 1.5 and 0.5 give 1
    (1000, 50_000),
    (5000, 250_000),   # above the largest
])
def test_a_bent_line_is_interpolated_between_the_sizes_measured(gflop, ns):
    curve = {"fixed_ns": 0, "ns_per_gflop": 100, "bend": [[1000, 1.5], [100_000, 0.5]], "source": "measured: a test"}
    m = dataclasses.replace(PLAIN, fits={"qkv": curve})
    assert price(m, "qkv", Work(gemm_flops=gflop * 10**9), 1) == ns


def test_features_are_gflops_and_megabytes():
    assert features(Work(gemm_flops=10**9, attn_flops=10**9, hbm_bytes=10**6)) == (2, 1)
    assert features(Work(hbm_bytes=5, link_bytes=2 * 10**6)) == (0, 2)


def test_a_loss_moves_its_head_once_a_sub_chunk():
    """Twice the head in bf16, and its fp32 gradient read and written, beside eight hidden rows a token; no more sub-chunks than tokens."""
    m = model("demo")
    head = m.vocab * m.hidden
    for chunk, sub, times in ((1024, 4, 4), (1024, 1, 1), (8, 32, 8)):
        schedule = build(m, Strategy(chunk=chunk, loss_sub=sub), 4 * chunk)
        op = next(op for op in schedule.regions["loss"].ops if op.kind == "ce")
        assert features(KINDS["ce"].work(op, schedule)) == (6 * chunk * head / 1e9, (2 * 8 * chunk * m.hidden + times * 12 * head) / 1e6)


def test_the_host_pays_for_each_sub_chunk():
    """The last chunk is shorter than its sub-chunks are many; a kind without issue_ns takes launch_ns."""
    schedule = build(model("demo"), Strategy(chunk=6, ffn_sub=3, loss_sub=4), 8, "fp32")
    told = dataclasses.replace(PLAIN, fits={k: {"fixed_ns": 0, "issue_ns": ns} for k, ns in (("ffn", 10.25), ("ce", 100), ("proj", 7))})
    found = issue_ns(told, schedule)
    assert [found[id] for id in ("fwd.ffn[0]", "fwd.ffn[1]", "loss.ce[0]", "loss.ce[1]", "fwd.proj[0]", "fwd.qkv[0]")] == [31, 20, 400, 200, 7, 1]
    assert set(issue_ns(PLAIN, schedule).values()) == {1}
    shared = build(model("demo"), Strategy(sp=2, chunk=6, ffn_sub=4), 6, "fp32")  # three tokens a rank
    assert issue_ns(told, shared)["fwd.ffn[0]"] == 31


@pytest.mark.parametrize("seq, P", [(16_384, 1), (10_000, 2), (9_000, 4)])
def test_caching_changes_no_price(seq, P):
    schedule = build(model("demo"), Strategy(sp=P, chunk=2048), seq)
    m = machine("a100-80g-sxm")
    ns = op_ns(m, schedule, works(schedule))
    for region in schedule.regions.values():
        for op in region.ops:
            assert ns[op.id] == price(m, key(op), KINDS[op.kind].work(op, schedule), P)


def test_short_chunks_and_masks_cost_their_share():
    schedule = build(model("llama3-8b"), Strategy(sp=4, chunk=65536), 2 * 65536 + 16384)
    ns = op_ns(machine("a100-80g-sxm"), schedule, works(schedule))
    assert ns["fwd.attn[1,1]"] == pytest.approx(ns["fwd.attn[1,0]"] / 2, rel=1e-6)
    assert ns["fwd.attn[2,0]"] == pytest.approx(ns["fwd.attn[1,0]"] / 4, rel=1e-6)
    assert ns["fwd.reload.kv[1,0]"] == round(65536 * 2 * 2 * 128 * 2 / 12.48)
    assert ns["fwd.a2a.qkv[0]"] == round(65536 // 4 * (4096 + 2 * 1024) * 2 * 3 // 4 / 225)


def test_keys_without_a_curve_are_named():
    schedule = build(model("demo"), Strategy(chunk=2048), 4096)
    m = dataclasses.replace(PLAIN, fits={k: {"fixed_ns": 1, "source": "measured: a test"} for k in ("qkv", "proj", "ffn", "ce")})
    assert unfitted(PLAIN, schedule) == []
    assert "attn.causal" in unfitted(m, schedule) and "qkv" not in unfitted(m, schedule)


def test_external_work_by_hand():
    m = model("demo")
    schedule = build(m, Strategy(sp=2, chunk=2048), 4096)
    ext = externals(PLAIN, schedule, zero=3)
    block = round(m.block_params * 2 // 2 / 100)
    assert ext.gather == {"fwd": block, "loss": round((256 * 256 + 256) * 2 // 2 / 100), "bwd": block}
    assert ext.reduce == {k: v for k, v in ext.gather.items() if k != "fwd"}
    assert ext.optimizer == round(m.params // 2 * 30 / 10)
    assert ext.embed_bwd == 0
    assert externals(PLAIN, schedule, zero=0).final == round(m.params * 2 // 2 * 2 / 100)
    assert externals(PLAIN, schedule, zero=0).gather == {}
    assert moved_bytes(schedule, 0)["ext_embed"] == 2 * 2048 * 256 * 2


def test_an_embedding_on_the_host_is_copied_out_and_its_gradient_back():
    """S = 5000 at P = 1: three copies, the last one short."""
    m = model("demo")
    near, far = (externals(PLAIN, build(m, Strategy(chunk=2048, hidden=hidden), 5000), zero=0) for hidden in ("hbm", "host"))
    copies = [n * 256 * 2 for n in (2048, 2048, 904)]
    assert far.embed - near.embed == sum(round(size / PLAIN["d2h_GBps"]) for size in copies)
    assert (near.embed_bwd, far.embed_bwd) == (0, sum(round(size / PLAIN["h2d_GBps"]) for size in copies))
