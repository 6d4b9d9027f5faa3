"""The plan: as small as what is live, and never two things in one place."""
from __future__ import annotations

import pytest
from hypothesis import given, settings
from oracle import Oracle
from test_lint import GQA
from test_waits import LENGTHS, STRATEGIES

from sim.build.step import build
from sim.errors import UserError
from sim.model import model
from sim.plan import check_fit
from sim.schedule import SPACES
from sim.strategy import Strategy


def most_live(schedule, space: str) -> int:
    """Bytes that are live at once, at most, in one step in list order: from first write to last read, op after op."""
    first, last, size, now = {}, {}, {}, 0
    for region, layer in schedule.order():
        for op in schedule.regions[region].ops:
            now += 1
            for name in op.reads + op.writes:
                b = schedule.buffer(region, name)
                if b.space == space and b.life != "argument":
                    key = (name, layer) if b.life == "saved" else (name, region, layer)
                    first.setdefault(key, now)
                    last[key], size[key] = now, b.size_bytes
    change = [0] * (now + 2)
    for key in first:
        change[first[key]] += size[key]
        change[last[key] + 1] -= size[key]
    live = peak = 0
    for step in change:
        live += step
        peak = max(peak, live)
    return peak


@pytest.mark.parametrize("prefetch", (2, 3))
@pytest.mark.parametrize("offload", (True, False))
def test_planned_over_most_ever_live(prefetch, offload):
    schedule = build(model("llama3-8b"), Strategy(sp=2, chunk=32 << 10, prefetch=prefetch, offload=offload), 512 << 10)
    for space in SPACES:
        live = most_live(schedule, space)
        assert live == schedule.arena_bytes(space) == 0 or 1 <= schedule.arena_bytes(space) / live <= 1.05, space


@given(STRATEGIES, LENGTHS)
@settings(max_examples=25, deadline=None)
def test_what_shares_bytes_is_never_live_together(strategy, seq):
    """Of two buffers of one region on the same bytes, one is over, by happens-before, before the other begins."""
    schedule = build(GQA, strategy, seq)
    oracle = Oracle(schedule)
    for region in schedule.regions.values():
        before = oracle.before(schedule, [(region.name, 0, 0)])
        uses = {b.name: [k for k, op in enumerate(region.ops) if b.name in op.reads + op.writes] for b in region.buffers.values()}
        planned = [b for b in region.buffers.values() if b.offset is not None]
        for a in planned:
            assert a.offset % 256 == 0 and a.offset + a.size_bytes <= schedule.shared[a.space]
            for b in planned:
                if a.name < b.name and a.space == b.space and a.offset < b.offset + b.size_bytes and b.offset < a.offset + a.size_bytes:
                    over = [all(before[y[0]] >> k & 1 for k in x) for x, y in ((uses[a.name], uses[b.name]), (uses[b.name], uses[a.name]))]
                    assert any(over), (a.name, b.name)


@given(STRATEGIES, LENGTHS)
@settings(max_examples=10, deadline=None)
def test_no_reuse_gives_everything_its_own_bytes(strategy, seq):
    schedule = build(GQA, strategy, seq, reuse=False)
    for buffers in [schedule.saved, *(r.buffers for r in schedule.regions.values())]:
        for space in SPACES:
            planned = sorted((b.offset, b.offset + b.size_bytes) for b in buffers.values() if b.offset is not None and b.space == space)
            assert all(a[1] <= b[0] for a, b in zip(planned, planned[1:]))


def test_what_does_not_fit_says_which_by_how_much_and_what_would():
    schedule = build(GQA, Strategy(chunk=16), 80)
    need = {s: schedule.arena_bytes(s) for s in SPACES}
    with pytest.raises(UserError, match=r"^S=80 needs [\d.]+ KiB of host memory, 1 B more than the [\d.]+ KiB there is; the longest is S=64$"):
        check_fit(schedule, need, need | {"host": need["host"] - 1}, "the longest is S=64")
    check_fit(schedule, need, need, "")
