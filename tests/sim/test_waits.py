"""Waits are the fewest that make a schedule safe, and reuse of space adds none within a region."""
from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle import Oracle
from test_lint import CONFIGS, GQA, MHA, made

from sim.build.step import build, draft
from sim.lint import lint
from sim.schedule import PREV
from sim.strategy import Strategy
from sim.waits import add_waits

STRATEGIES = st.builds(
    lambda hidden, resident, **fields: Strategy(**fields, **({"hidden": hidden, "resident": resident} if fields["offload"] else {})),
    hidden=st.sampled_from(("hbm", "host")), resident=st.sampled_from((0.0, 0.3, 0.5, 0.8, 1.0)), sp=st.sampled_from((1, 2)), chunk=st.sampled_from((8, 10, 16, 30)), prefetch=st.integers(1, 4),
    offload=st.booleans(), save=st.sampled_from(("all", "qkvo", "o", "input")), order=st.sampled_from(("query-up", "query-down", "kv-outer")),
    accum=st.sampled_from(("hbm", "host")), rows=st.sampled_from(("ascending", "alternating")), skip_resident=st.booleans(), ffn_sub=st.integers(1, 3), host_sync=st.sampled_from(("none", "region", "chunk", "pair")),
    alloc=st.sampled_from(("plan", "chunk", "cached")), merge=st.sampled_from(("fused", "separate")), a2a=st.sampled_from(("together", "apart")), lookahead=st.integers(0, 1),
    copy_streams=st.integers(1, 2), input=st.sampled_from(("host", "hbm")), reload_first=st.booleans(),
)
LENGTHS = st.integers(2, 75)


def inside(schedule):
    return {op.id: [w for w in op.waits if not w.startswith(PREV)] for r in schedule.regions.values() for op in r.ops}


@given(STRATEGIES, LENGTHS, st.booleans())
@settings(max_examples=25, deadline=None)
def test_any_strategy_is_safe_and_right(strategy, seq, reuse):
    schedule = build(GQA, strategy, seq, reuse=reuse)
    lint(schedule)
    assert Oracle(schedule, most=2).harm(schedule, orders=1) is None


@given(STRATEGIES, LENGTHS)
@settings(max_examples=25, deadline=None)
def test_reuse_adds_no_wait_within_a_region(strategy, seq):
    assert inside(build(GQA, strategy, seq)) == inside(build(GQA, strategy, seq, reuse=False))


@pytest.mark.parametrize("config", CONFIGS)
def test_nothing_to_add_to_what_is_safe(config):
    schedule = made(config)
    before = {op.id: op.waits for r in schedule.regions.values() for op in r.ops}
    add_waits(schedule)
    assert {op.id: op.waits for r in schedule.regions.values() for op in r.ops} == before


def test_without_a_plan_names_are_enough():
    schedule = draft(MHA, Strategy(chunk=16), 80)
    add_waits(schedule)
    lint(schedule)
    assert Oracle(schedule).harm(schedule) is None


def test_one_region_alone():
    """A schedule with no loss, or with no backward, is one too."""
    whole = draft(GQA, Strategy(sp=2, chunk=16), 80)
    for names in (("fwd", "bwd"), ("fwd",), ("fwd", "loss")):
        some = replace(whole, regions={n: whole.regions[n] for n in names}, require={n: whole.require[n] for n in names})
        add_waits(some)
        lint(some)
