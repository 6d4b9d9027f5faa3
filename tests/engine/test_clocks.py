"""Clocks: what runs tell of a GPU's clock is what the simulator's model of it says they should."""
from __future__ import annotations

import pytest

from engine import calibrate
from engine.clocks import load_clocks_MHz, shares, steady_MHz
from engine.worker import Run
from sim.clock import CLOCKS, Work, rate
from tests.sim.tiny import tiny_machine, tiny_schedule


def run(attention: int, other: int, idle: int, MHz: float | None) -> Run:
    """Of one step."""
    spans = [("fwd.attn[0,0]", 0, "compute", idle, idle + attention), ("fwd.ffn[0]", 0, "compute", idle + attention, idle + attention + other)]
    return Run(step_ns=[0, attention + other + idle], traces={1: spans}, sensed={"clock_MHz": MHz})


def test_the_clock_is_taken_out_of_what_ops_took():
    """One run never idles, at 1000 MHz; one idles 7/8 of its time, at twice that; its op counts twice as long."""
    made = tiny_schedule({"fwd": "compute qkv[0]\ncompute ffn[0]"})
    steady, idling = run(0, 100, 0, 1000), run(0, 50, 350, 2000)
    assert shares(steady) == Work(0, 1, 0) and shares(idling) == Work(0, 0.125, 0.875)
    assert steady_MHz([steady, idling]) == 1000
    assert steady_MHz([steady, Run(sensed={"clock_MHz": None})]) is None and steady_MHz([]) is None
    assert [ns for *_, ns in calibrate.pooled([made] * 2, [steady, idling])["ffn"]] == [100, 100]


def settled(work: Work, most: float = 3000) -> Run:
    """A run on a card that settles at 1680 MHz under attention and at 1800 under all else."""
    faster = rate(tiny_machine(clock_MHz=1000, clock_max_MHz=most, **dict(zip(CLOCKS, (1680, 1800)))), work)
    return run(round(work.attention / faster), round(work.other / faster), work.idle, 1000 * faster)


def test_the_clock_of_each_kind_of_work_is_found():
    runs = [settled(Work(*work)) for work in ((20_000, 80_000, 0), (55_000, 45_000, 0), (63_000, 34_000, 20_000))]
    assert load_clocks_MHz(runs, 3000) == pytest.approx((1680, 1800), rel=1e-4)


def test_no_clock_is_found_above_the_card_s_own():
    runs = [settled(Work(*work), 1700) for work in ((0, 100_000, 0), (50_000, 50_000, 0))]
    assert max(load_clocks_MHz(runs, 1700)) <= 1700
    assert load_clocks_MHz([run(90_000, 10_000, 0, 1500), run(0, 100_000, 0, 1800)], 1700)[1] == 1700


def test_runs_that_are_alike_tell_nothing():
    assert load_clocks_MHz([settled(Work(50_000, 50_000, 0)), settled(Work(69_000, 31_000, 0))], 3000) is None


def test_loads_are_one_mostly_of_products_and_one_mostly_of_attention_without_copies():
    from sim.model import model

    short, long = calibrate.loads(model("llama3-8b"), 2, "bf16", device="cuda")
    assert (short.seq, short.chunk, long.seq, long.chunk) == (21504, 7168, 112896, 28672)
    assert not {op.kind for s in (short, long) for region in s.regions.values() for op in region.ops} & {"reload", "offload"}
    assert calibrate.loads(model("llama3-8b"), 2, "bf16") == []
