"""Clock: compute is faster where it idles, as far as power and the card allow; links are not."""
from __future__ import annotations

import pytest

from sim.clock import faster
from tests.sim.tiny import events, tiny_machine, world

IDLES = {"fwd": "h2d reload.x[0]\ncompute qkv[0] wait reload.x[0]"}
"""40 ns without compute, then 10 with."""
BUSY = {"fwd": "compute qkv[0]\ncompute ffn[0]"}


def clocks(most: float, base: float = 1000):
    return tiny_machine(clock_MHz=base, clock_max_MHz=most)


@pytest.mark.parametrize("most, rate, end", ((9000, 2.1149, 45), (1500, 1.5, 47), (1000, 1.0, 50)))
def test_a_card_that_idles_runs_faster(most, rate, end):
    """r^3 = (busy + idle r) / busy, no more than the card allows."""
    assert faster(clocks(most), world(IDLES)) == pytest.approx(rate, abs=2e-3)
    assert events(IDLES, clocks(most)) == [("fwd.reload.x[0]", 0, 40), ("fwd.qkv[0]", 40, end)]


def test_what_never_idles_or_was_never_measured_stays():
    assert events(BUSY, clocks(9000)) == events(BUSY) == [("fwd.qkv[0]", 0, 10), ("fwd.ffn[0]", 10, 110)]
    for numbers in ({"clock_MHz": 1000}, {"clock_max_MHz": 9000}, {}):
        assert events(IDLES, tiny_machine(**numbers)) == [("fwd.reload.x[0]", 0, 40), ("fwd.qkv[0]", 40, 50)]
    assert faster(clocks(9000), world({"fwd": "h2d reload.x[0]"})) == 1.0


def test_a_prediction_says_so():
    said, silent = (world(regions, clocks(1500)).meta["assumptions"] for regions in (IDLES, BUSY))
    assert "clock: compute idles enough to run at 1500 MHz instead of 1000" in said and not any("clock" in note for note in silent)
