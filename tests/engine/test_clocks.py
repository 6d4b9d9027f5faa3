"""Clocks: what runs tell of a GPU's clock is what the simulator's model of it says they should."""
from __future__ import annotations

import pytest

from engine import calibrate
from engine.clocks import CAPPED, reference_MHz, settled_MHz, shares
from engine.worker import Run
from sim.clock import CLOCKS, Load, rate
from tests.sim.tiny import tiny_machine, tiny_schedule


def run(attention: int, other: int, idle: int, MHz: float | None) -> Run:
    """Of one step."""
    spans = [("fwd.attn[0,0]", 0, "compute", idle, idle + attention), ("fwd.ffn[0]", 0, "compute", idle + attention, idle + attention + other)]
    return Run(step_ns=[0, attention + other + idle], traces={1: spans}, sensed={"clock_MHz": MHz})


def test_the_clock_is_taken_out_of_what_ops_took():
    """At twice the clock an op took half as long: at the clock between, both took as long."""
    made = tiny_schedule({"fwd": "compute qkv[0]\ncompute ffn[0]"})
    slow, fast = run(0, 90, 0, 1000), run(0, 45, 315, 2000)
    assert shares(slow) == Load(0, 1, 0) and shares(fast) == Load(0, 0.125, 0.875)
    assert reference_MHz([slow, fast]) == 1500
    assert reference_MHz([slow, Run(sensed={"clock_MHz": None})]) is None and reference_MHz([]) is None
    assert [ns for *_, ns in calibrate.pooled([made] * 2, [slow, fast])["ffn"]] == [60, 60]


STEPS = tuple(Load(*load) for load in ((20_000, 80_000, 0), (55_000, 45_000, 0), (63_000, 34_000, 20_000)))


def settled(load: Load, most: float = 3000, clocks: tuple[float, float] = (1680, 1800)) -> Run:
    """A run on a card that settles at these clocks under attention and under all else."""
    faster = rate(tiny_machine(clock_MHz=1000, clock_max_MHz=most, **dict(zip(CLOCKS, clocks))), load)
    return run(round(load.attention / faster), round(load.other / faster), load.idle, 1000 * faster)


def test_the_clock_of_each_kind_of_work_is_found():
    assert settled_MHz([settled(load) for load in STEPS], 3000) == pytest.approx((1680, 1800), rel=1e-4)


def test_a_run_at_the_highest_clock_only_says_that_it_draws_no_more():
    """Three fit, and the fourth, which idles half its time, could run faster than it may."""
    idles = settled(Load(20_000, 20_000, 80_000), 1950)
    assert idles.sensed["clock_MHz"] == pytest.approx(1950) and settled(STEPS[2], 1950).sensed["clock_MHz"] < CAPPED * 1950
    assert settled_MHz([*(settled(load, 1950) for load in STEPS), idles], 1950) == pytest.approx((1680, 1800), rel=1e-4)


def test_a_run_at_the_highest_clock_still_tells_what_it_cannot_draw():
    """Attention alone was slow; that all else is not slower than the highest clock is known from the second alone."""
    assert settled_MHz([run(90_000, 10_000, 0, 1500), run(50_000, 50_000, 0, 1600), run(0, 100_000, 0, 1700)], 1700)[1] >= 1699


def test_a_card_that_is_always_at_its_highest_clock_is_predicted_there():
    runs = [settled(load, 1600, (1680, 1800)) for load in STEPS]
    assert settled_MHz(runs, 1600) == (1600, 1600) and reference_MHz(runs) == pytest.approx(1600)


def test_runs_that_are_alike_tell_one_clock():
    runs = [settled(Load(50_000, 50_000, 0)), settled(Load(60_000, 40_000, 50_000))]
    attention, other = settled_MHz(runs, 3000)
    assert attention == other and 1700 < other < 1750


def test_no_work_draws_nothing():
    assert settled_MHz([run(0, 100_000, 0, 1500), run(50_000, 50_000, 0, 2500)], 3000) [0] == pytest.approx(2 * 3000)


def test_loads_are_one_mostly_of_products_and_one_mostly_of_attention_without_copies():
    from sim.model import model

    short, long = calibrate.loads(model("llama3-8b"), 2, "bf16", device="cuda")
    assert (short.seq, short.chunk, long.seq, long.chunk) == (21504, 7168, 112896, 28672)
    assert not {op.kind for s in (short, long) for region in s.regions.values() for op in region.ops} & {"reload", "offload"}
    assert calibrate.loads(model("llama3-8b"), 2, "bf16") == []
