"""Hidden states on the host: HBM does not grow with S, and the host has each of them once."""
from __future__ import annotations

import pytest
from test_lint import GQA

from sim.build.step import build
from sim.errors import UserError
from sim.lint import LintError, lint
from sim.machine import machine
from sim.metrics import peak_bytes
from sim.model import model
from sim.schedule import Schedule
from sim.simulate import simulate
from sim.strategy import Strategy
from sim.text import parse, show

ORDERS, SAVES = ("query-up", "query-down", "kv-outer"), ("all", "qkvo", "o", "input")


def block_peak(order: str, seq: int, chunk: int, rows: tuple[str, ...] = ("planned", "arguments", "workspace"), **settings) -> int:
    """HBM bytes of llama3-8b's block on two GPUs at their most, without model states."""
    strategy = Strategy(sp=2, chunk=chunk << 10, order=order, accum="host", **settings)
    schedule = build(model("llama3-8b", layers=1), strategy, seq << 10)
    curve = simulate(schedule, strategy, machine("h100-80g-sxm")).memory["hbm"]
    return int(sum(curve[row] for row in rows).max())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("save", SAVES)
def test_the_peak_of_a_block_does_not_depend_on_S(order, save):
    peaks = [block_peak(order, seq, 32, hidden="host", save=save) for seq in (128, 256, 512, 1024)]
    assert max(peaks) <= 1.01 * min(peaks), peaks


@pytest.mark.parametrize("order", ORDERS)
def test_it_goes_with_the_chunk_but_for_weight_gradients(order):
    """Which are all that is left of the arguments."""
    half, whole = (block_peak(order, 512, chunk, ("planned", "workspace"), hidden="host") for chunk in (16, 32))
    assert half <= 0.55 * whole
    assert block_peak(order, 512, 32) > 1.5 * block_peak(order, 512, 32, hidden="host")


@pytest.mark.parametrize("order", ORDERS)
def test_time_is_that_of_hidden_states_in_HBM_where_copies_are_short(order):
    ns = {}
    for hidden in ("hbm", "host"):
        strategy = Strategy(sp=2, chunk=32 << 10, order=order, accum="host", hidden=hidden)
        timeline = simulate(build(model("llama3-8b", layers=2), strategy, 512 << 10), strategy, machine("h100-80g-sxm"))
        ns[hidden] = int(timeline.end_ns[timeline.within("bwd.")].max() - timeline.start_ns[timeline.within("fwd.")].min())
    assert ns["host"] < 1.01 * ns["hbm"]


@pytest.mark.parametrize("P, layers", [(1, 1), (2, 3)])
def test_host_bytes_by_hand(P, layers):
    """S = 5000: what is saved but for x, a hidden state for each border, one gradient, labels. HBM has weight gradients only."""
    m, strategy = model("demo", layers=layers), Strategy(sp=P, chunk=1024, hidden="host")
    schedule = build(m, strategy, 5000)
    timeline = simulate(schedule, strategy, machine("h100-80g-sxm"))
    handed = (layers + 2) * 5000 // P * m.hidden * 2 + 5000 // P * 8
    assert schedule.handed_bytes == handed and peak_bytes(timeline, "host") == schedule.arena_bytes("host") + handed
    assert not any(name.startswith("x[") for name in schedule.saved)
    assert int(timeline.memory["hbm"]["arguments"].max()) <= 2 * 4 * max(m.block_params, m.head_params + 1)


def kinds(schedule: Schedule, region: str, role: str) -> dict[str, int]:
    """How often chunks of a role are copied, by direction."""
    found = {"offload": 0, "reload": 0}
    for op in schedule.regions[region].ops:
        if op.kind in found and schedule.buffer(region, (op.reads if op.kind == "reload" else op.writes)[0]).role == role:
            found[op.kind] += 1
    return found


@pytest.mark.parametrize("order, dx", [("query-up", (10, 5)), ("query-down", (5, 0)), ("kv-outer", (10, 5))])
def test_each_chunk_is_copied_as_often_as_its_order_needs(order, dx):
    """u = 5. dx goes out and comes back once more where rows lie between the parts that add up to it."""
    schedule = build(GQA, Strategy(sp=2, chunk=16, hidden="host", order=order), 80)
    lint(schedule)
    assert kinds(schedule, "fwd", "x") == {"offload": 0, "reload": 5} and kinds(schedule, "fwd", "y") == {"offload": 5, "reload": 0}
    assert kinds(schedule, "loss", "x")["reload"] == kinds(schedule, "loss", "label")["reload"] == kinds(schedule, "loss", "dx")["offload"] == 5
    assert kinds(schedule, "bwd", "dy") == {"offload": 0, "reload": 5}
    assert tuple(kinds(schedule, "bwd", "dx").values()) == dx


def test_a_block_waits_for_what_the_block_before_it_puts_on_the_host():
    """Space of its own for each buffer, so that no other wait implies this one."""
    schedule = build(GQA, Strategy(sp=2, chunk=16, hidden="host"), 80, reuse=False)
    reload = next(op for op in schedule.regions["bwd"].ops if op.id == "bwd.reload.dy[1]")
    assert reload.waits == ("prev:loss:loss.offload.dx[1]",)
    reload.waits = ()
    with pytest.raises(LintError, match=r"reload.dy.1. reads dy.1.@host but does not come after loss.offload.dx.1. of an earlier loss, which writes dx.1.@host; add"):
        lint(schedule)


def test_without_offload_it_is_refused():
    with pytest.raises(UserError, match="^hidden=host keeps .*; try offload=true$"):
        Strategy(hidden="host", offload=False)
    with pytest.raises(UserError, match="^hidden=disk is no such value; built: hbm, host$"):
        Strategy(hidden="disk")


def test_one_that_lies_elsewhere_is_refused():
    text = show(build(GQA, Strategy(sp=2, chunk=32, hidden="host"), 70))
    first = next(row for row in text.splitlines() if row.startswith("buffer  loss  x.0 "))
    mixed = text.replace(first, first + "\nbuffer loss dx[0] hbm argument dx bf16 16x64 -").replace("Whead -> dx.0 ", "Whead -> dx[0] ", 1)
    for wrong, line in ((mixed, "dx.0. of loss is an argument in hbm; hidden states"), (text.replace("y[1]@host", "y[1]"), "y.1. of fwd is an argument in host")):
        with pytest.raises(UserError, match=line):
            parse(wrong)
