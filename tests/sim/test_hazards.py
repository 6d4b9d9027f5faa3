"""Hazards and happens-before on schedules small enough to see, and against brute force on drawn ones."""
from __future__ import annotations

import random

import mutations
import pytest
from oracle import Oracle
from test_lint import CONFIGS, GQA, made

from sim.build.step import build
from sim.hazards import alone, chain, walk
from sim.schedule import STREAMS
from sim.strategy import Strategy


def test_one_row_by_hand():
    """P = 2, one chunk: qkv, its all-to-all and attention. The all-to-all needs qkv (RAW), attn both, of which it is told the last."""
    fwd = alone(build(GQA, Strategy(sp=2, chunk=32), 32))[0]["fwd"]
    ids = [op.id for op in fwd.ops]
    compute, comm = STREAMS.index("compute"), STREAMS.index("comm")
    assert ids[:2] == ["fwd.qkv[0]", "fwd.a2a.qkv[0]"]
    attn = ids.index("fwd.attn[0,0]")
    assert fwd.need[1, compute] == 1 and fwd.need[attn, comm] == 1
    assert fwd.clock[attn, comm] == 1 and fwd.clock[attn, compute] == 2
    assert "fwd.a2a.qkv[0]" in fwd.ops[attn].waits and "fwd.qkv[0]" not in fwd.ops[attn].waits


def test_the_walk_has_every_pair_that_may_follow():
    pairs = {(a[0], b[0]) for a, b in zip(walk(made("P1-slots1")), walk(made("P1-slots1"))[1:])}
    assert pairs == {("fwd", "fwd"), ("fwd", "loss"), ("loss", "bwd"), ("fwd", "bwd"), ("bwd", "bwd"), ("bwd", "fwd")}


@pytest.mark.parametrize("config", CONFIGS)
def test_clocks_are_the_transitive_closure(config):
    """Along the whole chain: an op's clock counts exactly the ops before it, for schedules right and wrong."""
    rng = random.Random(4)
    schedule = made(config)
    broken = [m for _, m in mutations.delete_waits(schedule)]
    for s in [schedule, *rng.sample(broken, min(5, len(broken)))]:
        regions, cells = alone(s)
        run = walk(s)
        closed = Oracle(s).before(s, run)
        streams = [STREAMS.index(op.stream) for region, _, _ in run for op in s.regions[region].ops]
        on = [sum(1 << k for k, x in enumerate(streams) if x == stream) for stream in range(len(STREAMS))]
        number = 0
        for instance in chain(s, regions, cells):
            for row in instance.clock(range(len(instance.region.ops))):
                mask = closed[number] | 1 << number
                assert list(row) == [(mask & o).bit_count() for o in on]
                number += 1


@pytest.mark.parametrize("config", CONFIGS)
def test_needs_within_a_region_are_the_latest_hazards(config):
    schedule = made(config)
    oracle, regions = Oracle(schedule), alone(schedule)[0]
    for name, region in regions.items():
        for k, must in enumerate(oracle.hazards(schedule, [(name, 0, 0)])):
            for stream in range(len(STREAMS)):
                latest = max((region.position[m] for m in range(k) if must >> m & 1 and region.stream[m] == stream), default=0)
                if stream != region.stream[k]:
                    assert region.need[k, stream] == latest, (region.ops[k].id, STREAMS[stream])
