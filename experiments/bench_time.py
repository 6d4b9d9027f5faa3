"""Is the simulator right about time? python -m experiments.bench_time [--rounds 9] [--out results/bars/time.json]

One layer of the demo model on one rank, copies paced to one link speed so that they are 30 to 160% of compute. Each round
calibrates (at other S and C), writes its predictions down, then takes one step of every case: predictions and measurements see the
same moods of the machine. All rounds are kept; the verdict is on the medians. Interrupted, it goes on with the rounds that are there
(of the same day, machine and versions). Exits with 1 if a bar is missed.
"""
from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.progress import track

from engine import calibrate, measure, probe
from engine.worker import Job, Session, placement
from experiments.compare import busy_s
from sim import text
from sim.build.step import build
from sim.metrics import summary
from sim.model import model
from sim.simulate import simulate
from sim.strategy import Strategy

CASES = ((8192, 512, 1), (8192, 512, 2), (8192, 1024, 1), (8192, 1024, 3), (12288, 2048, 2), (16384, 1024, 2))
"""(S, C, slots)."""
LINK_GBPS = 0.06
BARS = {"median_error": 0.08, "worst_error": 0.25, "bias": 0.05, "speedup_two_slots": 1.15, "hidden_two_slots": 0.60, "hidden_error": 0.10}


def strategy(C: int, slots: int) -> Strategy:
    return Strategy(sp=1, chunk=C, prefetch=slots, host_sync="region", zero=0, loss_sub=4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--out", type=Path, default=Path("results/bars/time.json"))
    args = parser.parse_args()
    one = replace(model("demo"), layers=1)
    os.sched_setaffinity(0, placement(0, 1)["host"])
    cases = {case: build(one, strategy(*case[1:]), case[0], "fp32") for case in CASES}
    made = calibrate.schedules(one, 1, "fp32")
    assert not {(s.seq, s.chunk) for s in made} & {case[:2] for case in CASES}
    sessions = {case: Session(Job(text.show(s), steps=4, link_GBps=LINK_GBPS)) for case, s in cases.items()}
    samplers = [Session(job) for job in calibrate.jobs(made, LINK_GBPS)]
    for session in [*sessions.values(), *samplers]:
        session.step(False)
    rounds = finished(args.out)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for _ in track(range(len(rounds), args.rounds), description="rounds"):
        for sampler in samplers:
            sampler.run.traces.clear()
            sampler.step(True)
        machine = calibrate.profile(one, 1, "fp32", made, [s.run for s in samplers], LINK_GBPS)
        record = {"predicted": {name(c): predict(cases[c], c, machine) for c in CASES}, "measured": {}}
        rounds.append(record)
        save(args.out, rounds, {})  # predictions are on disk before their runs
        for case, session in sessions.items():
            session.step(False)
            step_s = session.run.step_ns[-1] / 1e9
            session.run.traces.clear()
            session.step(True)
            record["measured"][name(case)] = {"step_s": step_s, **shares(measure.timeline(cases[case], strategy(*case[1:]), machine, session.run))}
    verdict = judge(rounds)
    save(args.out, rounds, verdict)
    print(json.dumps(verdict, indent=1))
    sys.exit(0 if verdict["holds"] else 1)


def finished(path: Path) -> list[dict]:
    """Complete rounds of an earlier run that was interrupted."""
    data = json.loads(path.read_text()) if path.exists() else {}
    same = data.get("provenance") == probe.provenance() and data.get("link_GBps") == LINK_GBPS and not data.get("verdict")
    return [r for r in data["rounds"] if len(r["measured"]) == len(CASES)] if same else []


def name(case: tuple[int, int, int]) -> str:
    return "S={} C={} slots={}".format(*case)


def predict(schedule, case, machine) -> dict:
    timeline = simulate(schedule, strategy(*case[1:]), machine)
    return {"step_s": summary(timeline)["step_s"], "busiest_s": max(busy_s(timeline, s) for s in ("compute", "h2d", "d2h")), **shares(timeline)}


def shares(timeline) -> dict:
    """Copies over compute, and the share of copy time hidden under compute."""
    compute, copies = busy_s(timeline, "compute"), busy_s(timeline, "h2d") + busy_s(timeline, "d2h")
    return {"compute_s": compute, "copies_s": copies, "hidden": summary(timeline)["overlap"]}


def judge(rounds: list[dict]) -> dict:
    """Medians over rounds, errors, and whether each bar holds."""

    def median(side: str, case, what: str) -> float:
        return float(np.median([r[side][name(case)][what] for r in rounds]))

    table = {}
    for case in CASES:
        p, m = median("predicted", case, "step_s"), median("measured", case, "step_s")
        table[name(case)] = {
            "predicted_s": p, "measured_s": m, "signed_error": p / m - 1, "busiest_stream_error": median("predicted", case, "busiest_s") / m - 1,
            "copies_over_compute": median("measured", case, "copies_s") / median("measured", case, "compute_s"),
            "hidden_predicted": median("predicted", case, "hidden"), "hidden_measured": median("measured", case, "hidden"),
        }
    errors = np.array([row["signed_error"] for row in table.values()])
    busiest = np.median([abs(row["busiest_stream_error"]) for row in table.values()])
    one, two = (table[name((8192, 512, slots))] for slots in (1, 2))
    ratios = [row["copies_over_compute"] for row in table.values()]
    found = {
        "median_error": float(np.median(abs(errors))), "worst_error": float(abs(errors).max()), "bias": float(errors.mean()),
        "busiest_stream_median_error": float(busiest), "speedup_two_slots": one["measured_s"] / two["measured_s"],
        "hidden_two_slots": two["hidden_measured"], "hidden_error": max(abs(r["hidden_predicted"] - r["hidden_measured"]) for r in table.values()),
        "copies_over_compute": [min(ratios), max(ratios)],
    }
    holds = {
        "median_error": found["median_error"] <= BARS["median_error"], "worst_error": found["worst_error"] <= BARS["worst_error"],
        "bias": abs(found["bias"]) <= BARS["bias"], "beats_busiest_stream": found["median_error"] < busiest,
        "speedup_two_slots": found["speedup_two_slots"] >= BARS["speedup_two_slots"], "hidden_two_slots": found["hidden_two_slots"] >= BARS["hidden_two_slots"],
        "hidden_error": found["hidden_error"] <= BARS["hidden_error"], "copies_30_to_160": 0.3 <= min(ratios) and max(ratios) <= 1.6,
    }
    holds = {bar: bool(held) for bar, held in holds.items()}
    return {"holds": all(holds.values()), "bars": holds, **found, "cases": table}


def save(path: Path, rounds: list[dict], verdict: dict) -> None:
    part = path.with_suffix(".part")
    command = f"python -m experiments.bench_time --rounds {len(rounds)}"
    part.write_text(json.dumps({"provenance": probe.provenance(), "command": command, "link_GBps": LINK_GBPS, "verdict": verdict, "rounds": rounds}, indent=1) + "\n")
    part.replace(path)


if __name__ == "__main__":
    main()
