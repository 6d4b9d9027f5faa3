"""Upstream: what each term of the released FPDT costs: the schedule without it alone, and the difference in predicted time; beside what was measured."""
from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from experiments.auto import settled
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
PINNED = {"chunk": "memory pinned anew", "cached": "memory cached"}
NO_FFN = 8
"""FFN width that makes a block its attention half, the part that the released code replaces."""


def measured(model: Model, P: int, seq: int, chunk: int) -> list[dict]:
    """The rows of MEASURED for this attention half, their times as numbers."""
    with MEASURED.open() as file:
        rows = list(csv.DictReader(line for line in file if not line.startswith("#")))
    here = [r for r in rows if (r["model"], int(r["gpus"]), parse_tokens(r["seq"]), parse_tokens(r["chunk"])) == (model.name, P, seq, chunk)]
    return [{k: float(v) if k.endswith("_ms") else v for k, v in row.items()} for row in here]


def spans_ms(t: Timeline) -> tuple[float, float]:
    """(forward, backward): until the loss begins, and after it ends."""
    loss, bwd = t.within("loss."), t.within("bwd.")
    begin = t.start_ns[t.within("fwd.")].min()
    return (t.start_ns[loss].min() - begin) / 1e6, (t.end_ns[bwd].max() - t.end_ns[loss].max()) / 1e6


def explain(model: Model, strategy: Strategy, machine: Machine, seq: int, dtype: str, part: str, say: Callable[[str], object] = print) -> dict:
    """One layer by the released code's schedule, by ours (`strategy`, whose autos are chosen for the machine, which `say` is told), and by the
    released one's without each term alone."""
    one = replace(model, layers=1) if part == "block" else replace(model, layers=1, ffn=NO_FFN)
    strategy = settled(one, strategy, seq, dtype, machine, say)

    def times(way: Strategy) -> tuple[tuple[float, float], Timeline]:
        schedule = build(one, way, seq, dtype)
        lint(schedule)
        timeline = simulate(schedule, way, machine)
        return spans_ms(timeline), timeline

    released = Strategy(sp=strategy.sp, chunk=strategy.chunk, ffn_sub=strategy.ffn_sub, loss_sub=strategy.loss_sub, zero=strategy.zero, **FIELDS)
    (forward, backward), timeline = times(released)
    (ours_forward, ours_backward), _ = times(strategy)
    cached = times(released.replace(alloc="cached"))[0]
    terms = []
    for term in TERMS:
        without = times(released.replace(**term.off))[0]
        terms.append({"term": term.name, "what": term.what, "forward_ms": forward - without[0], "backward_ms": backward - without[1]})
    return {
        "strategy": NAME, "part": part, "forward_ms": forward, "backward_ms": backward, "ours_forward_ms": ours_forward, "ours_backward_ms": ours_backward,
        "cached_forward_ms": cached[0], "cached_backward_ms": cached[1],
        "host_peak_bytes": peak_bytes(timeline, "host"), "terms": terms, "measured": measured(model, strategy.sp, seq, strategy.chunk) if part == "attention" else [],
        "assumptions": timeline.meta["assumptions"],
    }


def report(model: Model, strategy: Strategy, machine: Machine, seq: int, found: dict) -> None:
    """The same for people."""
    part = "attention half of a layer" if found["part"] == "attention" else "a layer"
    print(f"{model.name}, {part}, on {machine.name}: S={show_tokens(seq)} C={show_tokens(strategy.chunk)} P={strategy.sp}; {NAME} is DeepSpeed's released FPDT with offload")
    ms = lambda *values: tuple(f"{v:.1f}".replace("-0.0", "0.0") if abs(v) < 0.05 else f"{v:.1f}" for v in values)
    forward, backward = found["forward_ms"], found["backward_ms"]
    rows = [(NAME, *ms(forward, backward, forward + backward), "as it is")]
    rows.append((f"{NAME}, memory cached", *ms(found["cached_forward_ms"], found["cached_backward_ms"], found["cached_forward_ms"] + found["cached_backward_ms"]),
                 "in later steps, where the allocator has it already"))
    rows += [(f"- {t['term']}", *ms(t["forward_ms"], t["backward_ms"], t["forward_ms"] + t["backward_ms"]), t["what"]) for t in found["terms"]]
    rows += [("ours", *ms(found["ours_forward_ms"], found["ours_backward_ms"], found["ours_forward_ms"] + found["ours_backward_ms"]), "the strategy given")]
    table(("predicted, ms", "forward", "backward", "both", ""), rows)
    print("A term is what switching it off alone saves; terms overlap, so they do not add up. What was never measured (below) costs nothing here: at least so much.")
    if found["measured"]:
        rows = []
        for row in found["measured"]:
            mine = {"chunk": "", "cached": "cached_"}[row["pinned"]]
            for way, name in (("fwd", "forward"), ("bwd", "backward")):
                p, m, ours = found[f"{mine}{name}_ms"], row[f"fpdt_{way}_ms"], found[f"ours_{name}_ms"]
                rows.append((f"{name}, {PINNED[row['pinned']]}", row["kernel"], *ms(p, m), f"{p / m - 1:+.1%}", f"{p / ours:.2f}", f"{m / row[f'ours_{way}_ms']:.2f}"))
        table((NAME, "measured on", "predicted", "measured", "signed error", "/ ours", "measured"), rows)
        print(f"Measured on 2 x H200: experiments/{MEASURED.parent.name}/{MEASURED.name}. '/ ours': times what ours takes, predicted and measured, which another kernel changes less.")
    print(f"Host memory: {show_bytes(found['host_peak_bytes'])} a rank and layer.")
    print("Assumed:")
    for line in found["assumptions"]:
        print("-", line)
