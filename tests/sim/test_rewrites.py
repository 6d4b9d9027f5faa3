"""Rewrites: each field moves or splits what it says and nothing else; the schedule of the released FPDT does what that does, in its order."""
from __future__ import annotations

import dataclasses

import pytest
from oracle import Oracle
from test_lint import GQA, MHA

from sim import upstream
from sim.build.step import build
from sim.cost import price
from sim.layout import align
from sim.lint import LintError, lint
from sim.machine import machine
from sim.model import model
from sim.ops import Work
from sim.simulate import simulate
from sim.strategy import Strategy
from sim.text import parse, show
from tests.sim.tiny import events, tiny_machine

FIELDS = {
    "host_sync": ("chunk", "pair"), "alloc": ("chunk", "cached"), "merge": ("separate",), "a2a": ("apart",), "lookahead": (0,), "copy_streams": (1,),
    "input": ("hbm",), "reload_first": (True,),
}


def made(**fields):
    return build(GQA, Strategy(sp=2, chunk=32, **fields), 90)


def ids(schedule, region: str) -> list[str]:
    return [op.id.removeprefix(f"{region}.") for op in schedule.regions[region].ops]


PLAIN = made()


@pytest.mark.parametrize("field, value", [(f, v) for f, values in FIELDS.items() for v in values])
@pytest.mark.parametrize("order", ("query-up", "query-down", "kv-outer"))
@pytest.mark.parametrize("save", ("all", "input"))
def test_every_field_alone_is_safe_and_right(field, value, order, save):
    for base in (Strategy(sp=2, chunk=32, order=order, save=save, accum="host"), Strategy(chunk=32, order=order, save=save, hidden="host"), Strategy(chunk=32, order=order, save=save, offload=False)):
        schedule = build(GQA if base.sp == 2 else MHA, base.replace(**{field: value}), 90)
        lint(schedule)
        assert parse(show(schedule)) == schedule


def test_without_lookahead_a_chunk_is_projected_when_its_row_begins():
    fwd = ids(made(lookahead=0), "fwd")
    assert sorted(fwd) == sorted(ids(PLAIN, "fwd"))
    for i in (1, 2):
        assert fwd.index(f"ffn[{i - 1}]") < fwd.index(f"qkv[{i}]") < fwd.index(f"a2a.qkv[{i}]") < fwd.index(f"reload.kv[{i},0]") < fwd.index(f"attn[{i},0]")
    assert ids(PLAIN, "fwd").index("qkv[1]") < ids(PLAIN, "fwd").index("attn[0,0]")


def test_a_slot_is_no_longer_than_what_comes_into_it():
    """Chunk 0 is never merged, nor fetched back twice: with two chunks, the short last one is all that is left."""
    schedule = build(MHA, Strategy(chunk=32, merge="separate", reload_first=True, order="kv-outer", prefetch=2), 40)
    bwd = schedule.regions["bwd"]
    assert [schedule.regions["fwd"].buffers[name].shape for name in ("part", "part_lse")] == [schedule.layout.shape(role, 8) for role in ("acc", "lse")]
    for name in {op.writes[0] for op in bwd.ops if op.kind == "reload"}:
        n = max(op.args["n"] for op in bwd.ops if op.kind == "reload" and op.writes[0] == name)
        assert bwd.buffers[name].shape == schedule.layout.shape(bwd.buffers[name].role, n)


def test_a_merge_of_its_own_follows_each_attention_but_a_rows_first():
    ops = {op.id: op for op in made(merge="separate").regions["fwd"].ops}
    assert [i for i in ops if ".merge" in i] == ["fwd.merge[1,1]", "fwd.merge[2,1]", "fwd.merge[2,2]"]
    assert (ops["fwd.attn[2,1]"].reads[0], ops["fwd.attn[2,1]"].writes) == ("q.0", ("part", "part_lse"))
    assert (ops["fwd.merge[2,1]"].reads, ops["fwd.merge[2,1]"].writes) == (("acc", "lse.0", "part", "part_lse"), ("acc", "lse.0"))
    assert ops["fwd.merge[2,2]"].writes == ("o.0", "lse.0")


def test_a_merge_that_adds_a_pair_twice_is_found():
    text = show(made(merge="separate"))
    line = next(row for row in text.splitlines() if "fwd.merge[2,1]" in row)
    again = line.replace("fwd.merge[2,1]", "fwd.merge[2,0]")
    with pytest.raises(LintError, match=r"fwd.merge\[2,0\] merges o of chunk 2 covering \[0, 1\] with o of chunk 2 covering \[1\], which it has already"):
        lint(parse(text.replace(line, f"{line}\n{again}")))


def test_keys_and_values_apart_cost_two_messages():
    m = tiny_machine()
    curve = dataclasses.replace(m, fits={"a2a": {"fixed_ns": 100, "ns_per_MB": 10, "source": "measured: a test"}})
    assert (price(curve, "a2a", Work(link_bytes=8 * 10**6), 2), price(curve, "a2a", Work(link_bytes=8 * 10**6), 2, 2)) == (180, 280)
    apart = made(a2a="apart", order="kv-outer")
    parts = {op.id: op.args.get("parts") for r in apart.regions.values() for op in r.ops if op.kind == "a2a"}
    assert {i for i, n in parts.items() if n} == {f"{r}[{i}]" for r in ("fwd.a2a.kv", "bwd.a2a.dkv") for i in range(3)} and set(parts.values()) == {None, 2}
    assert {f"{r}[{i}]" for r in ("fwd.a2a.q", "bwd.a2a.dq", "fwd.a2a.o", "bwd.a2a.do") for i in range(3)} <= set(parts)


def test_the_input_may_stay_where_it_was_handed_over():
    schedule = made(input="hbm")
    assert not [op.id for r in schedule.regions.values() for op in r.ops if op.kind in ("offload", "reload") and ".x" in op.id]
    assert not any(b.role == "x" for b in schedule.saved.values())
    kept = 2 * sum(align(b.size_bytes) for b in PLAIN.saved.values() if b.role == "x")
    assert PLAIN.arena_bytes("host") - schedule.arena_bytes("host") == kept


def test_chunk_0_comes_back_at_the_end_of_forward_and_stays():
    schedule = made(reload_first=True, order="kv-outer")
    assert [i for i in ids(schedule, "fwd") if "_first" in i] == [f"reload.{role}_first[0]" for role in ("q", "kv", "o", "lse")]
    assert {b.name for b in schedule.saved.values() if b.space == "hbm"} == {"q[0]", "kv[0]", "o[0]", "lse[0]"}
    assert not [op.id for op in schedule.regions["bwd"].ops if op.kind == "reload" and op.reads[0] in ("q[0]@host", "kv[0]@host", "o[0]@host", "lse[0]@host")]


def test_the_host_blocks_after_each_pair_with_the_reloads_for_the_next_issued():
    schedule = made(host_sync="pair")
    fwd = ids(schedule, "fwd")
    pairs = [i for i in fwd if i.startswith("attn")]
    for pair, after in zip(pairs, pairs[1:]):
        block = fwd.index(f"sync.{pair}")
        assert fwd.index(pair) < block < fwd.index(after)
        coming = f"reload.kv{after.removeprefix('attn')}"
        assert coming not in fwd or fwd.index(pair) < fwd.index(coming) < block
    sync = next(op for op in schedule.regions["fwd"].ops if op.id == "fwd.sync.attn[2,0]")
    assert {"fwd.attn[2,0]", "fwd.reload.kv[2,1]"} <= set(sync.waits)
    assert [i for i in ids(made(host_sync="chunk"), "fwd") if i.startswith("sync")] == ["sync.qkv[0]", "sync.qkv[1]", "sync.qkv[2]", "sync"]


def test_memory_is_pinned_in_powers_of_two_just_before_it_is_copied_to():
    schedule = made(alloc="chunk", order="kv-outer", accum="host")
    fwd, bwd = ids(schedule, "fwd"), ids(schedule, "bwd")
    for name in ("q[0]", "kv[2]", "o[1]", "lse[1]", "x[0]"):
        assert fwd[fwd.index(f"offload.{name}") - 1] == f"pin.{name}"
    by_id = {op.id: op for r in schedule.regions.values() for op in r.ops}
    assert by_id["fwd.pin.q[2]"].args == {"bytes": 2048}  # 26 tokens x 2 heads x 16 x 2 bytes = 1664
    first = bwd.index("attn_bwd[0,0]")
    assert bwd[first - 3:first] == ["pin.dq[0]", "pin.dq[1]", "pin.dq[2]"]
    assert (by_id["bwd.pin.dq[0]"].args, by_id["bwd.pin.dq[1]"].args) == ({"bytes": 4096}, {"bytes": 4096, "zero": True})


def test_what_is_cached_is_only_set_to_zero():
    schedule = made(alloc="cached", order="kv-outer", accum="host")
    assert {op.id: op.args for r in schedule.regions.values() for op in r.ops if op.kind == "pin"} == {
        f"bwd.pin.dq[{i}]": {"bytes": 4096, "zero": True, "cached": True} for i in (1, 2)}
    m = tiny_machine(pin_GBps=0.5, zero_GBps=4)
    assert price(m, "pin.zero.cached", Work(link_bytes=40), 1) == 10


PINNED = "compute qkv[0]\nhost pin.x[0]\ncompute proj[0]"


@pytest.mark.parametrize("rates, end", [({}, 0), ({"pin_GBps": 0.5}, 8), ({"pin_GBps": 0.5, "zero_GBps": 4}, 8)])
def test_taking_memory_holds_the_host_for_as_long_as_it_was_measured_to(rates, end):
    """4 bytes at half a byte a ns."""
    assert events({"fwd": PINNED}, tiny_machine(**rates)) == [("fwd.qkv[0]", 0, 10), ("fwd.pin.x[0]", 0, end), ("fwd.proj[0]", 10, 30)]


def test_zeroing_comes_on_top_and_what_is_unknown_is_said():
    m = tiny_machine(pin_GBps=0.5, zero_GBps=4)
    assert (price(m, "pin", Work(link_bytes=40), 1), price(m, "pin.zero", Work(link_bytes=40), 1), price(tiny_machine(), "pin.zero", Work(link_bytes=40), 1)) == (80, 90, 0)
    strategy = Strategy(chunk=1024, alloc="chunk", order="kv-outer", accum="host")
    notes = simulate(build(model("demo"), strategy, 4096), strategy, machine("a100-80g-sxm")).meta["assumptions"]
    assert [n for n in notes if "GBps: never" in n] == ["pin_GBps: never measured, priced at nothing", "zero_GBps: never measured, priced at nothing"]


def test_copies_on_one_stream_come_one_after_the_other():
    strategy = Strategy(chunk=2048, copy_streams=1, order="kv-outer", accum="host")
    timeline = simulate(build(model("demo"), strategy, 8192), strategy, machine("h200-141g-sxm"))
    spans = sorted((start, end) for name, _, stream, start, end in timeline.spans()
                   if (stream == "h2d" and ".x" not in name) or (stream == "d2h" and name.split("[")[0].split(".")[-1] in ("q", "kv", "do", "dq")))
    assert len(spans) > 20 and all(a[1] <= b[0] for a, b in zip(spans, spans[1:]))


def test_upstream_pins_seven_GiB_a_forward_at_512K():
    """llama3-8b on two GPUs, C = 64K: x, q, o 2 GiB each, keys and values 1, lse 32 MiB; in backward do 2 and fp32 dq 4."""
    schedule = build(dataclasses.replace(model("llama3-8b"), layers=1), Strategy(sp=2, **upstream.FIELDS), 1 << 19)
    pinned = {r: sum(op.args["bytes"] for op in region.ops if op.kind == "pin") for r, region in schedule.regions.items()}
    assert pinned == {"fwd": (7 << 30) + (32 << 20), "loss": 0, "bwd": (2 << 30) + (4 << 30)}


def test_nothing_harms_the_upstream_schedule():
    """As an oracle sees it that shares no code with the lint."""
    schedule = build(GQA, Strategy(sp=2, chunk=32, **upstream.FIELDS), 90)
    lint(schedule)
    assert Oracle(schedule, most=2).harm(schedule, orders=2) is None


def test_upstream_terms_are_fields_switched_back():
    for term in upstream.TERMS:
        assert set(term.off) <= {f.name for f in dataclasses.fields(Strategy)}
        assert Strategy(**upstream.FIELDS).replace(**term.off) != Strategy(**upstream.FIELDS)
