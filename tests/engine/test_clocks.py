"""Clocks: what runs tell of a GPU's clock is what the simulator's model of it says they should."""
from __future__ import annotations

import pytest

from engine import calibrate
from engine.clocks import CAPPED, computed_TFLOPS, power_TFLOPS, reference_MHz
from engine.worker import Run
from sim.clock import Load, rate
from tests.sim.tiny import tiny_machine, tiny_schedule

MADE = tiny_schedule({"fwd": "compute qkv[0]\ncompute ffn[0]"}, 2)
FLOPS = 2 * 2 * 4 * 8 * (8 + 2 * 8 + 3 * 16)


def run(ns: int, MHz: float | None) -> Run:
    """Of three steps, the first of which also compiles."""
    return Run(step_ns=[10 * ns, ns, ns + 2], traces={1: [("fwd.qkv[0]", 0, "compute", 0, ns - 90), ("fwd.ffn[0]", 0, "compute", ns - 90, ns)]}, sensed={"clock_MHz": MHz})


def test_the_clock_is_taken_out_of_what_ops_took():
    """What took as long at half the clock took twice as long as it does there: at the clock between, its median is what either says."""
    slow, fast = run(100, 1000), run(100, 2000)
    assert reference_MHz([slow, fast]) == 1500
    assert reference_MHz([slow, Run(sensed={"clock_MHz": None})]) is None and reference_MHz([]) is None
    assert [ns for *_, ns in calibrate.pooled([MADE] * 2, [slow, fast])["ffn"]] == [60, 120]


def settled(idle_ns: float, most: float = 3000, power: float = 0.002) -> Run:
    """A run of MADE on a card that power allows so much, busy for 1000 ns at 1000 MHz."""
    faster = rate(tiny_machine(clock_MHz=1000, clock_max_MHz=most, power_TFLOPS=power), Load(FLOPS, 1000, idle_ns))
    return Run(step_ns=[0, round(1000 / faster + idle_ns)], sensed={"clock_MHz": 1000 * faster})


def test_what_a_run_computes_a_second():
    """FLOPs a ns are GFLOP/s; the first step does not count."""
    assert computed_TFLOPS(MADE, run(1000, 1000)) == FLOPS / 1001 / 1e3


@pytest.mark.parametrize("idles", ((0,), (0, 500, 2000), (500, 0)))
def test_what_power_allows_is_found_however_much_a_run_idles(idles):
    runs = [settled(idle) for idle in idles]
    assert all(r.sensed["clock_MHz"] < CAPPED * 3000 for r in runs)
    assert power_TFLOPS([MADE] * len(runs), runs, 3000) == pytest.approx(0.002, rel=2e-3)


def test_a_run_at_the_highest_clock_says_nothing_of_power():
    """One that idles could run faster than it may; where all do, power limits nothing."""
    free, limited = settled(20_000, 1200, 0.01), settled(0, 1200, 0.01)
    assert free.sensed["clock_MHz"] == pytest.approx(1200) and limited.sensed["clock_MHz"] < CAPPED * 1200
    assert power_TFLOPS([MADE] * 2, [free, limited], 1200) == pytest.approx(0.01, rel=2e-3)
    assert power_TFLOPS([MADE], [free], 1200) is None


def test_clocks_that_somebody_set_are_not_limited_by_power():
    """Nothing but the clock's setting explains that they are one, whatever is computed."""
    runs = [run(1000, 1410), run(1300, 1412), run(2000, 1408)]
    assert power_TFLOPS([MADE] * 3, runs, 1980) is None
    assert power_TFLOPS([MADE] * 3, [run(1000, 1410), run(1300, 1470), run(2000, 1408)], 1980) is not None
    assert power_TFLOPS([MADE] * 2, [run(1000, 1410), run(1050, 1410)], 1980) is not None


def test_loads_are_one_mostly_of_products_and_one_mostly_of_attention_without_copies():
    from sim.model import model

    short, long = calibrate.loads(model("llama3-8b"), 2, "bf16", device="cuda")
    assert (short.seq, short.chunk, long.seq, long.chunk) == (21504, 7168, 112896, 28672)
    assert not {op.kind for s in (short, long) for region in s.regions.values() for op in region.ops} & {"reload", "offload"}
    assert calibrate.loads(model("llama3-8b"), 2, "bf16") == []
