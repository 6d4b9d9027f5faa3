"""Microbenchmarks on a GPU: every kind answers, and what comes of them is a machine."""
from __future__ import annotations

from dataclasses import asdict
from itertools import chain

from engine.micro import table
from engine.micro.fit import numbers_of, slowdown_of
from engine.micro.place import Plan
from engine.micro.serve import run
from sim.model import model
from tests.cuda.places import needs_cuda

pytestmark = needs_cuda


def measured_by(rank: int, group, plan: Plan) -> list[dict]:
    return list(chain.from_iterable(run(plan, rank, group)))


def test_every_kind_answers(ranks):
    found, = ranks(1).run(measured_by, Plan(asdict(model("llama3-8b")), 1, "bf16", "cuda", budget_s=90.0, rounds=2))
    measured = {p["name"] for p in found if p.get("ns")}
    entries = {m.name for group in table.GROUPS for m in group.entries} - {m.name for m in table.SEND}
    assert entries | {"launch", "sync", "pin", "zero pinned"} <= measured, [p for p in found if p["name"] in entries - measured]
    rates = [rate for p in found if p["name"] == "together" for low, rate, high in p["rates"].values()]
    assert len(rates) == 3 * 2 + 3 and all(0.2 < rate < 1.05 for rate in rates)
    numbers = numbers_of(found, 1, 1)
    assert 0.2 < numbers["pin_GBps"] < 50 and 5 < numbers["h2d_GBps"] < 500 and 300 < numbers["hbm_GBps"] < 20_000 and 0 < numbers["sync_ns"] < 1e6
    assert set(slowdown_of(found, "measured: here")) == {"compute|d2h", "compute|h2d", "d2h|h2d", "compute|d2h|h2d"}
    attention = {p["args"]["q"]: p["GFLOPs"] * 1e3 / p["ns"] for p in found if p["name"] == "attention forward" and p["ns"] and not p["args"]["causal"] and p["args"]["q"] == p["args"]["kv"]}
    assert all(20 < rate < 3000 for rate in attention.values())  # TFLOP/s
