"""Borders: what follows a region waits for what touches the caller's memory, and for nothing else that was issued."""
from __future__ import annotations

import dataclasses

from sim.borders import meeting, touching
from sim.build.step import build
from sim.machine import machine
from sim.model import model
from sim.simulate import simulate
from sim.strategy import Strategy

KEPT = Strategy(chunk=1024, save="all", zero=0)


def test_what_the_caller_owns():
    schedule = build(model("demo"), KEPT, 3072)
    last = {region: {stream: ops.ops[k].id for stream, k in touching(schedule)[region].items()} for region, ops in schedule.regions.items()}
    assert last == {
        "fwd": {"compute": "fwd.ffn[2]", "d2h": "fwd.offload.x[2]"}, "loss": {"compute": "loss.ce[2]"}, "bwd": {"compute": "bwd.kv_bwd[2]"}}
    assert meeting(touching(schedule)) == {"compute", "d2h"}
    assert meeting(touching(build(model("demo"), KEPT.replace(hidden="host"), 3072))) == {"compute"}


def test_the_next_layer_waits_for_its_input_s_copy_and_not_for_those_behind_it():
    """Copies to the host are far behind compute, which is done with a layer before its input is copied."""
    strategy = KEPT.replace(save="qkvo")
    slow = machine("h200-141g-sxm")
    slow = dataclasses.replace(slow, numbers=slow.numbers | {"d2h_GBps": {"value": 2, "source": "assumed: a test"}})
    timeline = simulate(build(model("demo"), strategy, 3072), strategy, slow)
    times = {(id, layer): (start, end) for id, layer, _, start, end in timeline.spans()}
    casts = [start for id, _, _, start, _ in timeline.spans() if id == "ext.cast"]
    for layer in (0, 1):
        assert times["fwd.ffn[2]", layer][1] < times["fwd.offload.x[2]", layer][1] <= casts[layer + 1]
        assert times["fwd.qkv[0]", layer + 1][0] < times["fwd.offload.o[2]", layer][1]
