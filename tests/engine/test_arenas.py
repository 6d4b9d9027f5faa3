"""Arenas: what the plan says is what is touched, all of it and nothing else."""
from __future__ import annotations

import pytest
import torch

from engine.arenas import GUARD_BYTES, planned_bytes
from sim.model import Model
from tests.engine.cases import CPU, Place, running, schedule, text, tiny, train

MODEL = tiny(4, 1, 16, layers=2)
CASES = [
    dict(seq=61, chunk=12), dict(seq=61, chunk=12, offload=False), dict(seq=61, chunk=12, resident=0.5), dict(seq=61, chunk=12, reuse=False), dict(seq=61, chunk=12, prefetch=3),
    dict(seq=61, chunk=12, prefetch=1, dtype="bf16"), dict(seq=61, chunk=64), dict(seq=61, chunk=40), dict(seq=61, chunk=40, offload=False),
    dict(seq=61, chunk=24), dict(seq=61, chunk=20, dtype="bf16", offload=False), dict(seq=60, chunk=12, prefetch=3),
]


def touched(rank: int, group, case: dict, model: Model = MODEL, place: Place = CPU):
    """(bytes touched, guards intact) of one step, by space."""
    s = schedule(model, P=1 if group is None else group.size(), **case)
    with running(s, rank, group, place) as program:
        assert program.arenas.touched_bytes("hbm") == program.arenas.touched_bytes("host") == 0
        train(program, rank, group, *text(model, case["seq"]), steps=1)
        return {space: program.arenas.touched_bytes(space) for space in ("hbm", "host")}, program.arenas.guards_intact()


@pytest.mark.parametrize("P", (1, 2))
@pytest.mark.parametrize("case", CASES, ids=str)
def test_bytes_touched_are_bytes_planned(ranks, P, case):
    s = schedule(MODEL, P=P, **case)
    planned = {space: planned_bytes(s, space) for space in ("hbm", "host")}
    assert 0 < planned["hbm"] <= s.arena_bytes("hbm") and (planned["host"] > 0) == case.get("offload", True)
    for found, intact in ranks(P).run(touched, case):
        assert found == planned
        assert intact


def test_arenas_are_disjoint_and_as_large_as_planned():
    s = schedule(tiny(), 61, 12)
    with running(s) as program:
        ends = []
        for space, whole in program.arenas._whole.items():
            assert whole.numel() == s.arena_bytes(space) + 2 * GUARD_BYTES
            ends.append((whole.data_ptr(), whole.data_ptr() + whole.numel()))
        (a, b), (c, d) = sorted(ends)
        assert b <= c


@pytest.mark.parametrize("space", ("hbm", "host"))
@pytest.mark.parametrize("edge", (-1, 0))
def test_a_byte_outside_the_plan_is_seen(space, edge):
    with running(schedule(tiny(), 61, 12)) as program:
        assert program.arenas.guards_intact()
        whole = program.arenas._whole[space]
        whole[GUARD_BYTES - 1 if edge else len(whole) - GUARD_BYTES] = 1
        assert not program.arenas.guards_intact()


def test_what_was_never_written_is_nan():
    with running(schedule(tiny(), 61, 12)) as program:
        inner = program.arenas._inner["hbm"]
        assert torch.isnan(inner.view(torch.float32)).all()
