"""Clock: compute is faster where it idles and where it does what draws less, as far as power and the card allow; links are not."""
from __future__ import annotations

import pytest

from sim.clock import Load, done, planned, rate
from tests.sim.tiny import events, tiny_machine, tiny_schedule, world

IDLES = {"fwd": "h2d reload.x[0]\ncompute qkv[0] wait reload.x[0]"}
"""40 ns without compute, then 10 with."""
BUSY = {"fwd": "compute qkv[0]\ncompute ffn[0]"}
ATTENDS = {"fwd": "compute qkv[0]\ncompute attn[0,0]"}


def clocks(most: float, **numbers: float):
    return tiny_machine(clock_MHz=1000, clock_max_MHz=most, ns={"attn": 30}, **numbers)


@pytest.mark.parametrize("most, faster, end", ((9000, 2.1149, 45), (1500, 1.5, 47), (1000, 1.0, 50)))
def test_a_card_that_idles_runs_faster(most, faster, end):
    """r^3 = (busy + idle r) / busy, no more than the card allows."""
    assert rate(clocks(most), Load(0, 10, 40)) == pytest.approx(faster, abs=2e-3)
    assert events(IDLES, clocks(most)) == [("fwd.reload.x[0]", 0, 40), ("fwd.qkv[0]", 40, end)]


def test_what_never_idles_or_was_never_measured_stays():
    assert events(BUSY, clocks(9000)) == events(BUSY) == [("fwd.qkv[0]", 0, 10), ("fwd.ffn[0]", 10, 110)]
    for numbers in ({"clock_MHz": 1000}, {"clock_max_MHz": 9000}, {}):
        assert events(IDLES, tiny_machine(**numbers)) == [("fwd.reload.x[0]", 0, 40), ("fwd.qkv[0]", 40, 50)]
    assert rate(clocks(9000), Load(0, 0, 40)) == 1.0


def test_attention_that_draws_more_is_slower_and_so_is_all_beside_it():
    """Attention alone settles at half the clock: it draws 8 times as much. 3/4 of the time it does: r^3 (3/4 x 8 + 1/4) = 1."""
    machine = clocks(9000, attn_clock_MHz=500)
    assert rate(machine, Load(30, 10, 0)) == pytest.approx(6.25 ** (-1 / 3))
    assert events(ATTENDS, machine) == [("fwd.qkv[0]", 0, 18), ("fwd.attn[0,0]", 18, 18 + 55)]
    assert rate(clocks(9000, other_clock_MHz=2000), Load(0, 10, 0)) == 2.0


def test_what_is_planned_is_what_is_done():
    """By layers, and back at the clock of the curves."""
    regions = {"fwd": "compute qkv[0]\ncompute attn[0,0]", "bwd": "h2d reload.x[0]\ncompute ffn[0] wait reload.x[0]"}
    ns = {"fwd.qkv[0]": 10, "fwd.attn[0,0]": 30, "bwd.reload.x[0]": 40, "bwd.ffn[0]": 100}
    assert planned(tiny_schedule(regions, 3), ns) == Load(90, 330, 0)
    assert done(world(regions, tiny_machine(ns={"attn": 30}), 3))[:2] == (90, 330)
    assert done(world(BUSY), 0.5) == Load(0, 55, 0) and done(world(IDLES)) == Load(0, 10, 40)


def test_a_step_is_simulated_again_only_where_that_changes_its_clock(monkeypatch):
    """What never idles has its clock before it is simulated."""
    from sim import simulate

    times, right = [], simulate._simulated
    monkeypatch.setattr(simulate, "_simulated", lambda *args: (times.append(1), right(*args))[1])
    for regions, many in ((BUSY, 1), (ATTENDS, 1), (IDLES, 2)):
        times.clear()
        world(regions, clocks(9000, attn_clock_MHz=500))
        assert len(times) == many


def test_a_prediction_says_so():
    said, silent = (world(regions, clocks(1500)).meta["assumptions"] for regions in (IDLES, BUSY))
    assert "clock: compute runs at 1500 MHz in such a step, its cost curves were taken at 1000" in said and not any("clock" in note for note in silent)
