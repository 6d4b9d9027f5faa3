"""Auto: what is chosen where the answer can be counted by hand. u = 4, one layer, one rank. In world() a reload takes 1000 ns and nothing
else any time, so a step takes 1000 ns a reload; in still() copies take no time and the loss does."""
from __future__ import annotations

import dataclasses

import pytest
from test_lint import MHA
from tiny import tiny_machine

from sim.build.step import build, draft
from sim.errors import UserError
from sim.machine import machine
from sim.metrics import overrun, peak_bytes, times
from sim.model import model
from sim.ops import KINDS
from sim.search import Found, choose, predict, settle
from sim.simulate import simulate
from sim.strategy import AUTO, Strategy

ONE, SEQ = dataclasses.replace(MHA, layers=1), 64
ROOM = 1 << 40
FREE = {key: 0 for kind in KINDS for key in (f"{kind}{merge}{causal}" for merge in ("", "+merge", "+merge+merge") for causal in ("", ".causal"))}


def world(hbm_bytes: int = ROOM, host_bytes: int = ROOM, takes: str = "reload"):
    return tiny_machine(ns=FREE | {takes: 1000}, hbm_bytes=hbm_bytes, host_bytes=host_bytes)


def still(**room: int):
    return world(takes="ce", **room)


def settled(computer, **fields) -> tuple[dict, str]:
    """(the values chosen, the line)."""
    open_ = Strategy(chunk=16, **fields)
    strategy, line = settle(ONE, open_, SEQ, "bf16", computer)
    assert strategy == open_.replace(**(found := {name: getattr(strategy, name) for name in open_.autos})) and not strategy.autos
    return found, line


def peak(space: str, **fields) -> int:
    strategy = Strategy(chunk=16, **fields)
    return peak_bytes(simulate(build(ONE, strategy, SEQ), strategy, world()), space)


def test_where_reloads_are_all_the_time_all_KV_stays():
    """Forward reloads 6 pairs, backward 10, and o, x, q, lse and once more x of 4 chunks; of the pairs, resident=0.75 leaves one."""
    found, line = settled(world(), resident="auto")
    assert found == {"resident": 1.0}
    assert line == "auto: resident=1, 2e-05 s a step predicted; the next, resident=0.75, takes +5.00% time and +0 B of HBM; 5 of 5 choices fit"
    assert [predict(ONE, Strategy(chunk=16, resident=r), SEQ, "bf16", world()).step_s for r in AUTO["resident"]] == [36e-6, 29e-6, 24e-6, 21e-6, 20e-6]


def test_where_copies_take_no_time_none_stays():
    assert settled(still(), resident="auto")[0] == {"resident": 0.0}


def test_as_much_stays_as_HBM_holds():
    for share, count in ((0.0, 1), (0.5, 3)):
        found, line = settled(world(hbm_bytes=peak("hbm", resident=share)), resident="auto")
        assert found == {"resident": share} and line.endswith(f"{count} of 5 choices fit")
    assert line.startswith("auto: resident=0.5, 2.4e-05 s a step predicted; the next, resident=0.25, takes +20.83% time and -")


def test_as_little_as_the_host_leaves():
    assert settled(still(host_bytes=peak("host", resident=0.75)), resident="auto")[0] == {"resident": 0.75}


def test_the_order_with_the_fewest_reloads():
    """query-up 36; query-down 32: x is still there when dkv is final; kv-outer 62: q, do, o and lse for each pair."""
    assert [predict(ONE, Strategy(chunk=16, order=order), SEQ, "bf16", world()).step_s for order in AUTO["order"]] == [36e-6, 32e-6, 62e-6]
    found, line = settled(world(), order="auto")
    assert found == {"order": "query-down"} and "the next, order=query-up, takes +12.50% time and " in line


def test_sums_go_to_the_host_only_where_they_must():
    assert settled(world(), accum="auto")[0] == {"accum": "hbm"}
    assert settled(world(hbm_bytes=peak("hbm", accum="hbm") - 1), accum="auto")[0] == {"accum": "host"}


def test_all_together():
    """16 reloads are left: o, x, q and lse."""
    found, line = settled(world(), order="auto", accum="auto", resident="auto")
    assert found == {"order": "query-down", "accum": "hbm", "resident": 1.0}
    assert line.startswith("auto: order=query-down accum=hbm resident=1, 1.6e-05 s a step predicted; the next, order=query-down accum=hbm resident=0.75, takes +6.25% time") and line.endswith("of 30 choices fit")


def test_what_fits_nowhere_says_by_how_much():
    with pytest.raises(UserError) as caught:
        settled(world(hbm_bytes=peak("hbm", resident=0.0) - 7), resident="auto")
    assert str(caught.value) == "auto: none of 5 choices fits tiny; the nearest, resident=0, takes 7 B of hbm memory too much; take a shorter sequence, or --set save=input"
    with pytest.raises(UserError, match="the nearest, resident=1, takes 7 B of host memory too much; take a shorter sequence, or --set save=input$"):
        settled(world(host_bytes=peak("host", resident=1.0) - 7), resident="auto")


def test_of_what_is_as_fast_it_is_the_smallest():
    """Within 0.5% of the fastest; then the fastest of those."""
    made = [Found(Strategy(prefetch=k + 1), step_s, {"hbm": hbm, "host": 0}) for k, (step_s, hbm) in enumerate(((1.0, -1), (1.004, -3), (1.006, -9), (1.001, -3)))]
    assert choose(made) is made[3]
    assert choose(made[:3]) is made[1] and choose(made[:1] + made[2:3]) is made[0]


@pytest.mark.parametrize("fields", [{}, {"order": "query-down", "resident": 0.25}, {"order": "kv-outer", "accum": "host", "resident": 0.75}], ids=str)
@pytest.mark.parametrize("GBps, error", ((1.0, 5e-3), (25.0, 1e-6)))
def test_a_long_sequence_is_extended_from_shorter_ones(fields, GBps, error):
    """48 chunks and a half: memory to the byte, time exactly where compute binds and nearly where copies do."""
    link = {name: {"value": GBps, "source": "assumed: a test"} for name in ("h2d_GBps", "d2h_GBps")}
    a100 = machine("a100-80g-sxm")
    m, strategy, computer = model("llama3-8b", layers=4), Strategy(chunk=16384, **fields), dataclasses.replace(a100, numbers=a100.numbers | link)
    seq = 48 * 16384 + 8192
    found, timeline = predict(m, strategy, seq, "bf16", computer), simulate(build(m, strategy, seq), strategy, computer)
    assert found.over == overrun(timeline) and found.step_s == pytest.approx(times(timeline)["step_s"], rel=error)


def test_what_is_still_open_is_not_built():
    with pytest.raises(UserError) as caught:
        draft(MHA, Strategy(order="auto", resident="auto"), 64)
    assert str(caught.value) == "order=auto is chosen for a machine; name one with --machine, or take order=query-up"
    assert Strategy.parse(["order=auto", "accum=auto", "resident=auto"]).autos == ("order", "accum", "resident") and Strategy().autos == ()
    with pytest.raises(UserError, match="^resident=auto keeps a share of what goes to the host and offload=false keeps all in HBM; try offload=true$"):
        Strategy(resident="auto", offload=False)
