"""Upstream: what each term of the released FPDT costs: the schedule without it alone, and the difference in predicted time; beside what was measured."""
from __future__ import annotations

import csv
from dataclasses import replace
from pathlib import Path

from experiments.tables import table
from sim.build.step import build
from sim.lint import lint
from sim.machine import Machine
from sim.metrics import peak_bytes
from sim.model import Model
from sim.simulate import simulate
from sim.strategy import Strategy
from sim.timeline import Timeline
from sim.units import parse_tokens, show_bytes, show_tokens
from sim.upstream import FIELDS, NAME, TERMS

MEASURED = Path(__file__).with_name("paper") / "fpdt_h200.csv"
NO_FFN = 8
"""FFN width that makes a block its attention half, the part that the released code replaces."""


def measured(model: Model, P: int, seq: int, chunk: int) -> dict | None:
    """The row of MEASURED for this attention half, or None."""
    with MEASURED.open() as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    return next((r for r in rows if (r["model"], int(r["gpus"]), parse_tokens(r["seq"]), parse_tokens(r["chunk"])) == (model.name, P, seq, chunk)), None)


def spans_ms(t: Timeline) -> tuple[float, float]:
    """(forward, backward): until the loss begins, and after it ends."""
    loss, bwd = t.within("loss."), t.within("bwd.")
    begin = t.start_ns[t.within("fwd.")].min()
    return (t.start_ns[loss].min() - begin) / 1e6, (t.end_ns[bwd].max() - t.end_ns[loss].max()) / 1e6


def explain(model: Model, strategy: Strategy, machine: Machine, seq: int, dtype: str, part: str) -> dict:
    """One layer by the released code's schedule, by ours, and by the released one's without each term alone."""
    one = replace(model, layers=1) if part == "block" else replace(model, layers=1, ffn=NO_FFN)

    def times(way: Strategy) -> tuple[tuple[float, float], Timeline]:
        schedule = build(one, way, seq, dtype)
        lint(schedule)
        timeline = simulate(schedule, way, machine)
        return spans_ms(timeline), timeline

    released = strategy.replace(**FIELDS)
    (forward, backward), timeline = times(released)
    (ours_forward, ours_backward), _ = times(strategy)
    terms = []
    for term in TERMS:
        without = times(released.replace(**term.off))[0]
        terms.append({"term": term.name, "what": term.what, "forward_ms": forward - without[0], "backward_ms": backward - without[1]})
    return {
        "strategy": NAME, "part": part, "forward_ms": forward, "backward_ms": backward, "ours_forward_ms": ours_forward, "ours_backward_ms": ours_backward,
        "host_peak_bytes": peak_bytes(timeline, "host"), "terms": terms, "measured": measured(model, strategy.sp, seq, strategy.chunk) if part == "attention" else None,
        "assumptions": timeline.meta["assumptions"],
    }


def report(model: Model, strategy: Strategy, machine: Machine, seq: int, found: dict) -> None:
    """The same for people."""
    part = "attention half of a layer" if found["part"] == "attention" else "a layer"
    print(f"{model.name}, {part}, on {machine.name}: S={show_tokens(seq)} C={show_tokens(strategy.chunk)} P={strategy.sp}; {NAME} is DeepSpeed's released FPDT with offload")
    ms = lambda *values: tuple(f"{v:.1f}" for v in values)
    forward, backward = found["forward_ms"], found["backward_ms"]
    rows = [(NAME, *ms(forward, backward, forward + backward), "as it is")]
    rows += [(f"- {t['term']}", *ms(t["forward_ms"], t["backward_ms"], t["forward_ms"] + t["backward_ms"]), t["what"]) for t in found["terms"]]
    rows += [("ours", *ms(found["ours_forward_ms"], found["ours_backward_ms"], found["ours_forward_ms"] + found["ours_backward_ms"]), "the strategy given")]
    table(("predicted, ms", "forward", "backward", "both", ""), rows)
    print("A term is what switching it off alone saves; terms overlap, so they do not add up.")
    if row := found["measured"]:
        pairs = [(NAME, "fpdt", forward, backward), ("ours", "prototype", found["ours_forward_ms"], found["ours_backward_ms"])]
        rows = []
        for name, column, *predicted in pairs:
            real = [float(row[f"{column}_{way}_ms"]) for way in ("fwd", "bwd")]
            rows += [(f"{name}, {way}", *ms(p, m), f"{p / m - 1:+.1%}") for way, p, m in zip(("forward", "backward"), predicted, real)]
        table(("ms", "predicted", "measured", "signed error"), rows)
        print(f"Measured once on 2 x H200, 2026-11-29 ({MEASURED.parent.name}/{MEASURED.name}); ours against a prototype of it.")
    print(f"Host memory: {show_bytes(found['host_peak_bytes'])} a rank and layer.")
    print("Assumed:")
    for line in found["assumptions"]:
        print("-", line)
