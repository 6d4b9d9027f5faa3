"""Clock: compute is faster where it idles and where it computes less in its time, as far as power and the card allow; links are not."""
from __future__ import annotations

import pytest

from sim.clock import Load, done, planned, rate
from sim.cost import works
from sim.machine import Machine
from tests.sim.tiny import events, tiny_machine, tiny_schedule, world

IDLES = {"fwd": "h2d reload.x[0]\ncompute qkv[0] wait reload.x[0]"}
"""40 ns without compute, then 10 with."""
BUSY = {"fwd": "compute qkv[0]\ncompute ffn[0]"}
QKV, FFN = 2 * 4 * 8 * (8 + 2 * 8), 2 * 4 * 8 * 3 * 16
"""FLOPs: 2 x tokens x columns x rows."""


def card(flops_a_ns: float, most: float = 9000) -> Machine:
    """One whose power allows so much at 1000 MHz, where its curves hold."""
    return tiny_machine(clock_MHz=1000, clock_max_MHz=most, power_TFLOPS=flops_a_ns / 1e3 * (1000 / most) ** 2)


@pytest.mark.parametrize("most, faster, end", ((9000, 2.1149, 45), (1500, 1.5, 47), (1000, 1.0, 50)))
def test_a_card_that_idles_runs_faster(most, faster, end):
    """r^3 = (busy + idle r) / busy, no more than the card allows."""
    assert rate(card(100, most), Load(1000, 10, 40)) == pytest.approx(faster, abs=2e-3)
    assert events(IDLES, card(QKV / 10, most)) == [("fwd.reload.x[0]", 0, 40), ("fwd.qkv[0]", 40, end)]


def test_what_power_just_allows_or_was_never_measured_stays():
    assert events(BUSY, card((QKV + FFN) / 110)) == events(BUSY) == [("fwd.qkv[0]", 0, 10), ("fwd.ffn[0]", 10, 110)]
    for numbers in ({"clock_MHz": 1000, "clock_max_MHz": 9000}, {"clock_MHz": 1000, "power_TFLOPS": 1}, {"clock_max_MHz": 9000, "power_TFLOPS": 1}, {}):
        assert events(IDLES, tiny_machine(**numbers)) == [("fwd.reload.x[0]", 0, 40), ("fwd.qkv[0]", 40, 50)]


def test_what_computes_more_is_slower_and_what_computes_nothing_is_not():
    """A FLOP's energy grows as the clock's square and the FLOPs a second as the clock: 8 times too many are done at half of it."""
    assert rate(card(100), Load(8000, 10, 0)) == pytest.approx(0.5)
    assert events(BUSY, card((QKV + FFN) / 110 / 8)) == [("fwd.qkv[0]", 0, 20), ("fwd.ffn[0]", 20, 220)]
    assert rate(card(100, 1500), Load(0, 10, 40)) == rate(card(100, 1500), Load(1000, 0, 0)) == 1.5
    assert events({"fwd": "compute qkv[0]"}, tiny_machine(clock_MHz=1000, clock_max_MHz=3000, power_TFLOPS=1, ns={"qkv": 0})) == [("fwd.qkv[0]", 0, 0)]


def test_what_is_planned_is_what_is_done():
    """By layers, and back at the clock of the curves."""
    regions = {"fwd": "compute qkv[0]\ncompute attn[0,0]", "bwd": "h2d reload.x[0]\ncompute ffn[0] wait reload.x[0]"}
    ns = {"fwd.qkv[0]": 10, "fwd.attn[0,0]": 30, "bwd.reload.x[0]": 40, "bwd.ffn[0]": 100}
    schedule = tiny_schedule(regions, 3)
    plan = planned(schedule, works(schedule), ns)
    assert plan == Load(3 * (QKV + 4 * 4 * 4 * 2 * 4 + FFN), 420, 0)
    assert done(plan, world(regions, tiny_machine(ns={"attn": 30}), 3))[:2] == (plan.flops, 420)
    assert done(Load(7, 0, 0), world(BUSY), 0.5) == Load(7, 55, 0) and done(Load(7, 0, 0), world(IDLES)) == Load(7, 10, 40)


def test_a_step_is_simulated_again_only_where_that_changes_its_clock(monkeypatch):
    """What never idles has its clock before it is simulated."""
    from sim import simulate

    times, right = [], simulate._simulated
    monkeypatch.setattr(simulate, "_simulated", lambda *args: (times.append(1), right(*args))[1])
    for regions, many in ((BUSY, 1), (IDLES, 2)):
        times.clear()
        world(regions, card(QKV / 20))
        assert len(times) == many


def test_a_prediction_says_so():
    said, silent = (world(regions, card(QKV / 10, 1500)).meta["assumptions"] for regions in (IDLES, {"fwd": "compute qkv[0]"}))
    assert "clock: compute runs at 1500 MHz in such a step, its cost curves were taken at 1000" in said and not any("clock" in note for note in silent)
