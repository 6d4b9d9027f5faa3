"""Need: never less than the simulated peak, and little more; what it adds is counted by hand."""
from __future__ import annotations

import pytest

from sim.build.step import build
from sim.machine import machine
from sim.metrics import peak_bytes, reserved_bytes
from sim.model import model
from sim.need import beside, handed, need, states, transient, workspace
from sim.ops import KINDS
from sim.simulate import simulate
from sim.strategy import Strategy

A100 = machine("a100-80g-sxm")
SETTINGS = ({}, {"offload": False}, {"save": "all", "order": "kv-outer"}, {"save": "input", "accum": "host"}, {"host_sync": "region"},
            {"resident": 0.5}, {"resident": 1.0, "save": "o"}, {"hidden": "host"}, {"hidden": "host", "accum": "host", "order": "kv-outer"})


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("name, layers, P, zero", (("demo", 4, 1, 0), ("demo", 4, 4, 3), ("llama3-8b", 2, 1, 3), ("llama3-8b", 32, 4, 3), ("gpt-2.7b", 3, 4, 0)))
def test_a_little_above_the_simulated_peak(name, layers, P, zero, settings):
    chunk = 1024 if name == "demo" else 8192
    for chunks in (1, 6):
        strategy = Strategy(sp=P, chunk=chunk, zero=zero, **settings)
        schedule = build(model(name, layers=layers), strategy, chunk * chunks)
        timeline, found = simulate(schedule, strategy, A100), need(schedule, zero)
        fixed = schedule.arena_bytes("hbm") + states(schedule, zero)
        assert peak_bytes(timeline, "hbm") <= found["hbm"] <= 1.17 * peak_bytes(timeline, "hbm")
        assert found == {"hbm": fixed + beside(schedule, zero), "host": peak_bytes(timeline, "host")}


def test_what_comes_and_goes_by_hand():
    """Last of all regions, backward of the first layer: two gradients of hidden states, its parameters in bf16, and every weight's gradient but the
    embedding's."""
    m = model("demo", layers=2)
    hidden, labels, loss = 4096 * 256 * 2, 8 * 4096, 2 * m.head_params + 4 * m.head_params
    schedule = build(m, Strategy(sp=2, chunk=1024), 8192)
    assert sorted(handed(schedule)) == [(-1, 0, hidden), (-1, 2, labels), (0, 1, hidden), (1, 2, hidden), (2, 3, hidden), (3, 4, hidden), (4, 4, hidden)]
    assert transient(schedule) == 2 * hidden + 2 * m.block_params + 4 * (m.head_params + 2 * m.block_params + 1) > 2 * hidden + labels + loss  # 1: the loss
    kept = build(m, Strategy(sp=2, chunk=1024, offload=False), 8192)
    assert [h for h in handed(kept) if h not in handed(schedule)] == [(-1, 4, hidden), (0, 3, hidden)]  # every layer's x stays for backward
    wide = model("demo", layers=1, vocab=1 << 20)
    assert transient(build(wide, Strategy(chunk=1024), 1024)) == 4 * (wide.params + 1) + 2 * wide.vocab * wide.hidden  # the embedding's, in both dtypes
    assert transient(build(wide, Strategy(chunk=1024, hidden="host"), 1024)) == 4 * (wide.params + 1) + 6 * 1024 * wide.hidden  # of a chunk, in both dtypes
    assert transient(build(wide, Strategy(chunk=1024), 1024, "fp32")) == 4 * (wide.params + 1)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_pools_of_a_simulated_step_are_arenas_states_workspace_and_what_comes_and_goes(settings):
    for layers, chunks in ((1, 6), (3, 2), (4, 5)):
        m, strategy = model("gpt-2.7b", layers=layers, vocab=8192), Strategy(chunk=8192, zero=0, **settings)
        schedule = build(m, strategy, 8192 * chunks)
        timeline = simulate(schedule, strategy, A100)
        largest = max(workspace(schedule, region, A100.kernel) for region in schedule.regions) + int(A100.get("blas_bytes") or 0)
        assert 0 <= schedule.arena_bytes("hbm") + 12 * m.params + transient(schedule) + largest - reserved_bytes(timeline) <= 4  # the loss is no parameter


def test_its_parts_by_hand():
    m = model("demo", layers=2)
    schedule = build(m, Strategy(sp=2, chunk=1024), 8192)
    assert (states(schedule, 3), states(schedule, 0)) == (8 * m.params, 16 * m.params)
    hidden, labels = 4096 * 256 * 2, 8 * 4096
    bwd = 2 * 4 * m.block_params + workspace(schedule, "bwd")  # a block's gradients while those of the one before are reduced
    whole = 3 * hidden + labels + workspace(schedule, "bwd") + 2 * m.block_params  # cast for one region at a time, gathered one ahead
    assert beside(schedule, 0) == whole  # its gradients are states
    assert beside(schedule, 3) == 3 * hidden + labels + bwd + 2 * 2 * m.block_params
    for region, ops in schedule.regions.items():
        assert workspace(schedule, region) == max(KINDS[op.kind].workspace(op, schedule) for op in ops.ops)
    kept = build(m, Strategy(sp=2, chunk=1024, offload=False), 8192)
    assert beside(kept, 0) == beside(schedule, 0) + 2 * hidden
