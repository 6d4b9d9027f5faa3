"""Bits: what a schedule does with memory and copies changes when things happen and where they lie, and never a bit of what comes out."""
from __future__ import annotations

import copy
import math
from contextlib import nullcontext
from functools import partial

import pytest

from sim import ops
from sim.schedule import Schedule
from tests.engine.cases import digest, running, schedule, text, tiny, train
from tests.engine.hooks import Poison, count_copies, jitter, unlinted

MODEL, SEQ, CHUNK, STEPS = tiny(4, 2, 16, layers=2), 61, 12, 3


def trained(rank: int, group, hook: str = "", link_GBps: float | None = None, dtype: str = "fp32", **strategy):
    """((loss of each step, digest of each weight after the last), what was counted)."""
    s = schedule(MODEL, SEQ, CHUNK, 1 if group is None else group.size(), dtype, **strategy)
    unsafe = hook == "no waits"
    with unlinted() if unsafe else nullcontext(), running(without_waits(s) if unsafe else s, rank, group, link_GBps=link_GBps) as program:
        copied = count_copies(program)
        poison = Poison(program, early=hook == "early poison") if "poison" in hook else None
        if hook in ("jitter", "no waits"):
            jitter(program)
        losses, weights = train(program, rank, group, *text(MODEL, SEQ), STEPS)
        assert unsafe or program.arenas.guards_intact()
        return (losses, {n: digest(w) for n, w in weights.items()}), (copied, program.copied_bytes, poison and poison.count)


def without_waits(s: Schedule) -> Schedule:
    s = copy.deepcopy(s)
    for region in s.regions.values():
        for op in region.ops:
            op.waits = ()
    return s


@pytest.fixture(scope="module")
def plain(ranks):
    """What every run below must equal, by P and dtype."""
    found = {}

    def of(P: int, dtype: str = "fp32"):
        if (P, dtype) not in found:
            found[P, dtype] = [bits for bits, _ in ranks(P).run(trained, "", None, dtype)]
        return found[P, dtype]

    return of


def run(ranks, P: int, **how):
    return ranks(P).run(partial(trained, **how))


@pytest.mark.parametrize("P", (1, 2))
@pytest.mark.parametrize("how", [
    {"offload": False}, {"reuse": False}, {"offload": False, "reuse": False}, {"prefetch": 1}, {"prefetch": 3}, {"host_sync": "region"}, {"host_sync": "chunk", "input": "hbm"},
    {"host_sync": "pair", "lookahead": 0, "a2a": "apart", "copy_streams": 1, "reload_first": True},
    {"hook": "jitter"}, {"hook": "jitter", "prefetch": 1}, {"hook": "jitter", "offload": False},
    {"link_GBps": 0.02}, {"dtype": "bf16", "offload": False}, {"dtype": "bf16", "reuse": False}, {"dtype": "bf16", "hook": "poison"},
    {"hook": "poison"}, {"hook": "poison", "prefetch": 1}, {"hook": "poison", "reuse": False},
    {"hidden": "host"}, {"hidden": "host", "hook": "jitter"}, {"hidden": "host", "hook": "jitter", "accum": "host", "prefetch": 1},
    {"resident": 0.5}, {"resident": 1.0}, {"resident": 0.5, "hook": "jitter"}, {"resident": 0.5, "hook": "poison"}, {"resident": 0.5, "hidden": "host", "prefetch": 1},
    {"hidden": "host", "hook": "poison"}, {"hidden": "host", "link_GBps": 0.02}, {"hidden": "host", "host_sync": "region"},
], ids=str)
def test_three_steps_are_bit_equal(ranks, plain, P, how):
    found = run(ranks, P, **how)
    assert [bits for bits, _ in found] == plain(P, how.get("dtype", "fp32"))
    assert all(math.isfinite(loss) for loss in found[0][0][0])


@pytest.mark.parametrize("P", (1, 2))
def test_runs_repeat(ranks, plain, P):
    for _ in range(5):
        assert [bits for bits, _ in run(ranks, P)] == plain(P)


@pytest.mark.parametrize("P", (1, 2))
def test_every_rank_ends_with_the_same_weights(plain, P):
    assert all(bits == plain(P)[0] for bits in plain(P))
    assert plain(P)[0][0][-1] < plain(P)[0][0][0]


@pytest.mark.parametrize("how", [{"hook": "no waits"}, {"hook": "early poison"}], ids=str)
def test_what_these_tests_must_notice(ranks, plain, how):
    """Streams that wait for nothing, and readers of a copy that is gone: the bits differ."""
    assert run(ranks, 1, **how)[0][0] != plain(1)[0]


@pytest.mark.parametrize("P", (1, 2))
@pytest.mark.parametrize("where", ({}, {"offload": False}, {"hidden": "host"}, {"resident": 0.5}), ids=str)
def test_bytes_copied_are_the_schedules(ranks, P, where):
    s = schedule(MODEL, SEQ, CHUNK, P, **where)
    expected = {"h2d": 0, "d2h": 0}
    for region, _ in s.order() * STEPS:
        for op in s.regions[region].ops:
            if op.stream in expected:
                expected[op.stream] += ops.KINDS[op.kind].work(op, s).link_bytes
    assert bool(expected["h2d"]) == bool(expected["d2h"]) == where.get("offload", True)
    for _, (copied, claimed, _) in run(ranks, P, **where):
        assert copied == claimed == expected


def test_each_offloaded_copy_was_poisoned(ranks):
    s = schedule(MODEL, SEQ, CHUNK)
    offloads = sum(op.kind == "offload" and not op.reads[0].startswith("x[") for op in s.regions["fwd"].ops)
    assert offloads == 4 * len(s.chunks)
    _, (_, _, poisoned) = run(ranks, 1, hook="poison")[0]
    assert poisoned == offloads * MODEL.layers * STEPS
