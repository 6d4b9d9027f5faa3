"""Memory: the bytes that are pinned and touched are the plan's."""
from __future__ import annotations

import pytest

from engine.arenas import GUARD_BYTES, planned_bytes
from tests.cuda.places import CHUNK, CUDNN, MODEL, SEQ, needs_cuda, one_and_two_ranks
from tests.engine.cases import Place, running, schedule
from tests.engine.test_arenas import touched

CASES = [{}, {"offload": False}, {"prefetch": 1, "save": "all"}, {"save": "input", "order": "kv-outer", "accum": "host", "reuse_slack": 4}]


def pinned(rank: int, group, place: Place, case: dict) -> int:
    """Bytes registered with the driver."""
    with running(schedule(MODEL, P=group.size() if group else 1, **case), rank, group, place) as program:
        return sum(memory.tensor.numel() for memory in program.backend._pinned)


def of(case: dict) -> dict:
    return {"seq": SEQ, "chunk": CHUNK, "dtype": "bf16", **case}


@needs_cuda
@one_and_two_ranks
@pytest.mark.parametrize("case", CASES, ids=str)
def test_bytes_pinned_are_the_plans(ranks, P, case):
    planned = schedule(MODEL, P=P, **of(case)).arena_bytes("host") + 2 * GUARD_BYTES
    assert ranks(P).run(pinned, CUDNN, of(case)) == [planned] * P


@one_and_two_ranks
@pytest.mark.parametrize("case", CASES, ids=str)
def test_bytes_touched_are_bytes_planned(ranks, P, case):
    s = schedule(MODEL, P=P, **of(case))
    for found, intact in ranks(P).run(touched, of(case), MODEL, CUDNN):
        assert found == {space: planned_bytes(s, space) for space in ("hbm", "host")}
        assert intact
