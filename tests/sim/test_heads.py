"""Attention of another head_dim, by points made up by hand."""
from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from sim import heads, memory
from sim.build.step import build
from sim.cost import op_ns, works
from sim.machine import Machine, machine
from sim.model import model
from sim.simulate import simulate
from sim.strategy import Strategy


def point(way: str, kernel: str, head_dim: int, ns: float | None, clock_MHz: float | None = 1000, GFLOPs: float = 1.0, **args) -> dict:
    """Of 8192 tokens on 32 heads."""
    alike = {"causal": False, "q": 8192, "kv": 8192, "heads": 32, "kv_heads": 32} | args
    return {"name": f"attention {way}", "args": {"kernel": kernel, "head_dim": head_dim} | alike, "GFLOPs": GFLOPs, "ns": ns, "clock_MHz": clock_MHz}


def measured(*points: dict, kernel: str = "flash-attn-4", head_dim: int = 128) -> Machine:
    """An A100 whose curves were measured so, with these points."""
    known = machine("a100-80g-sxm")
    numbers = {"head_dim": {"value": head_dim, "source": "measured: here"}, "kernel": {"value": kernel, "source": "measured: here"}}
    return dataclasses.replace(known, numbers=known.numbers | numbers, points=list(points))


FORWARD = (point("forward", "flash-attn-4", 128, 100), point("forward", "cuDNN", 128, 110), point("forward", "cuDNN", 80, 150), point("forward", "torch flash (FA2)", 80, 300))
BACKWARD = (point("backward", "flash-attn-4", 128, 200), point("backward", "cuDNN", 80, 520), point("backward", "torch flash (FA2)", 80, 500))


def test_the_fastest_kernel_there_beside_the_one_that_the_curves_are_of():
    found = heads.other(measured(*FORWARD, *BACKWARD), 80)
    assert found == heads.Other((1.5, 2.5), "cuDNN forward, torch flash (FA2) backward", ())
    assert heads.kernel(measured(*FORWARD, *BACKWARD), 80) == found.kernel and heads.kernel(measured(*FORWARD), 128) == "flash-attn-4"


def test_clocks_are_brought_together():
    points = (point("forward", "cuDNN", 128, 100, 1500), point("forward", "cuDNN", 80, 150, 2000))
    assert heads.other(measured(*points, kernel="cuDNN"), 80).slower[0] == 2
    assert heads.other(measured(*(p | {"clock_MHz": None} for p in points), kernel="cuDNN"), 80).slower[0] == 1.5


def test_a_clock_that_one_point_lacks_counts_for_neither():
    points = (point("forward", "cuDNN", 128, 100, 1500), point("forward", "cuDNN", 80, 150, None))
    assert heads.other(measured(*points, kernel="cuDNN"), 80).slower[0] == 1.5


def test_it_is_a_flop_s_time():
    points = (point("forward", "cuDNN", 128, 100, GFLOPs=2), point("forward", "cuDNN", 80, 150, GFLOPs=1))
    assert heads.other(measured(*points, kernel="cuDNN"), 80).slower[0] == 3


@pytest.mark.parametrize("differs", ("causal", "q", "kv", "heads", "kv_heads"))
def test_points_that_differ_in_anything_else_are_not_compared(differs):
    right = (point("forward", "cuDNN", 128, 100), point("forward", "cuDNN", 80, 150))
    wrong = (point("forward", "cuDNN", 128, 1, **{differs: 7}), point("forward", "cuDNN", 80, 1, **{differs: 8}))
    for points in ((*right, *wrong), (*wrong, *right)):
        assert heads.other(measured(*points, kernel="cuDNN"), 80).slower[0] == 1.5


def test_only_points_alike_are_compared_and_the_median_of_them_counts():
    pairs = [(point("forward", "cuDNN", 128, 100, q=q), point("forward", "cuDNN", 80, ns, q=q)) for q, ns in ((1, 110), (2, 130), (3, 300))]
    alone = point("forward", "cuDNN", 80, 900, heads=16), point("forward", "cuDNN", 128, 1, causal=True)
    assert heads.other(measured(*(p for pair in pairs for p in pair), *alone, kernel="cuDNN"), 80).slower[0] == 1.3


def test_a_direction_that_was_not_measured_is_as_the_other():
    found = heads.other(measured(*FORWARD, point("backward", "cuDNN", 80, None)), 80)
    assert found == heads.Other((1.5, 1.5), "cuDNN", ("backward",))
    assert heads.said(measured(*FORWARD), 80) == (
        "attention: measured at head_dim 128; at 80, by microbenchmarks of cuDNN, a FLOP takes 1.50 times as long forward, "
        "1.50 times as long backward (not measured, taken as the other way)")
    assert heads.said(measured(*FORWARD, *BACKWARD), 80) == (
        "attention: measured at head_dim 128; at 80, by microbenchmarks of cuDNN forward, torch flash (FA2) backward, a FLOP takes 1.50 times as long forward, "
        "2.50 times as long backward")


@pytest.mark.parametrize("points, head_dim", ((FORWARD, 128), (FORWARD, 96), ((), 80), (FORWARD[1:], 80)))
def test_nothing_is_known_of_other_ones(points, head_dim):
    assert heads.other(measured(*points), head_dim) is None and heads.kernel(measured(*points), head_dim) == "flash-attn-4"
    assert heads.other(machine("a100-80g-sxm"), head_dim) is None
    assert bool(heads.said(measured(*points), head_dim)) == (head_dim != 128)


def test_attention_alone_is_slower_and_takes_its_kernel_s_workspace():
    strategy = Strategy(chunk=4096)
    schedule = build(model("gpt-2.7b", layers=1), strategy, 8192, "bf16")
    plain, other = (measured(*points) for points in ((), (*FORWARD, *BACKWARD)))
    before, after = (op_ns(m, schedule, works(schedule)) for m in (plain, other))
    ratio = {"attn": 1.5, "attn_bwd": 2.5}
    assert after == {op.id: round(before[op.id] * ratio.get(op.kind, 1)) for region in schedule.regions.values() for op in region.ops}
    same = dataclasses.replace(plain, numbers=plain.numbers | {"kernel": {"value": heads.kernel(other, 80), "source": "measured: here"}})
    timeline = simulate(schedule, strategy, plain)
    first, second, third = (memory.curves(schedule, timeline, strategy, m)["hbm"]["workspace"] for m in (plain, other, same))
    assert not np.array_equal(first, second) and np.array_equal(second, third)
