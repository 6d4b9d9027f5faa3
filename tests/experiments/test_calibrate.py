"""Calibrating: microbenchmarks on ranks of their own, with a bar."""
from __future__ import annotations

import io
from dataclasses import asdict

from rich.console import Console

from engine.micro.place import Plan
from experiments.bars import progress
from experiments.calibrate import microbenchmarks
from sim.model import model


def test_two_ranks_measure_what_is_sent_and_each_copy_alone_and_together():
    with progress(Console(file=io.StringIO())) as bar:
        found = microbenchmarks(bar)(Plan(asdict(model("demo")), 2, "fp32", "cpu", budget_s=60.0, load_s=0.0, rounds=1))
        task, = bar.tasks
        assert task.completed == task.total > 100
    assert len([p for p in found if p["name"] == "together"]) == 11
    assert {p["args"]["ranks"] for p in found if p["name"] == "h2d" and p["ns"]} == {1, 2}
    assert {p["name"] for p in found if p["args"].get("ranks") == 2 and p["ns"]} >= {"all-to-all", "all-gather", "reduce-scatter"}
