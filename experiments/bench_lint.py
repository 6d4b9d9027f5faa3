"""The lint at size: how long it takes at 35,000 ops, and whether it agrees with the oracle on 500 random mutations there.

    python -m experiments.bench_lint [--samples 500] [--workers 2] [--unreduced]      # writes results/bars/lint.json

llama3-8b, S = 2M, C = 16K, P = 4. The oracle (tests/sim/oracle.py) closes happens-before over bit sets of every op, executes the
step on symbols in list order and in one random order, and checks a whole step, each pair of regions that may follow each other,
and two steps: the chains whose middle regions occur once. Chains of more layers, and every mutation exhaustively, are
the small schedules' part (tests/sim/test_lint.py): there the oracle unrolls up to three layers.
--unreduced deletes, on the small schedules, each of all waits where every hazard pair is one (5,000 a schedule).
"""
from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import sys
import time
from collections import Counter
from datetime import datetime, timezone
from functools import cache
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path

from experiments.bench_simulate import cpu
from sim.build.step import build
from sim.errors import UserError
from sim.lint import lint
from sim.model import model
from sim.strategy import Strategy

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests" / "sim"))

import mutations  # noqa: E402
from oracle import Oracle  # noqa: E402
from test_lint import CONFIGS, made  # noqa: E402

CHAINS = [
    [("fwd", 0, 0), ("loss", 0, 0), ("bwd", 0, 0)],
    [("bwd", 0, 0), ("fwd", 0, 1)],
    [("fwd", 0, 0), ("fwd", 1, 0)],
    [("bwd", 1, 0), ("bwd", 0, 0)],
    [("fwd", 0, 0), ("bwd", 0, 0), ("fwd", 0, 1)],
    [("fwd", 0, 0), ("loss", 0, 0), ("bwd", 0, 0), ("fwd", 0, 1), ("loss", 0, 1), ("bwd", 0, 1)],
]


def verdict(schedule) -> str | None:
    try:
        lint(schedule)
    except UserError as error:
        return str(error)
    return None


def timed(schedule, rounds: int = 9) -> dict:
    """Seconds of a full lint, every round kept."""
    wall, cpu = [], []
    for _ in range(rounds):
        start, start_cpu = time.perf_counter(), time.process_time()
        lint(schedule)
        wall.append(round(time.perf_counter() - start, 4))
        cpu.append(round(time.process_time() - start_cpu, 4))
    return {"wall_s": wall, "cpu_s": cpu, "median_wall_s": statistics.median(wall), "median_cpu_s": statistics.median(cpu)}


def large():
    """The schedule of 36,000 ops."""
    return build(model("llama3-8b"), Strategy(sp=4, chunk=16384), 2 << 20)


@cache
def judge() -> Oracle:
    """One a process."""
    return Oracle(large(), chains=CHAINS)


def judged(seed: int) -> tuple[str, str | None, str | None]:
    """(mutation, why it is harmful, what the lint says) of the random mutation with that seed."""
    what, mutant = mutations.sample(judge().base, random.Random(seed))
    return what, judge().harm(mutant, orders=seed % 10 == 0), verdict(mutant)


def sampled(samples: int, workers: int) -> dict:
    """Random mutations, seeds 0, 1, 2..., judged by both."""
    counts, wrong = Counter(), []
    with get_context("spawn").Pool(workers) as pool:
        for number, (what, harm, said) in enumerate(pool.imap_unordered(judged, range(samples)), 1):
            counts["harmful" if harm else "harmless"] += 1
            if bool(harm) != bool(said):
                counts["missed" if harm else "refused"] += 1
                wrong.append([what, harm, said])
            if number % 10 == 0:
                print(f"{number} of {samples}: {dict(counts)}", file=sys.stderr, flush=True)
    return {"samples": samples} | {k: counts[k] for k in ("harmful", "harmless", "missed", "refused")} | {"disagreements": wrong}


def unreduced() -> dict:
    """Each wait deleted where every hazard pair is a wait."""
    result = {}
    for config in list(CONFIGS)[:4]:
        base = made(config)
        oracle, counts = Oracle(base, most=2), Counter()
        schedule = oracle.unreduced(base)
        implied = oracle.implied(schedule)
        for region, k, wait in [(r, k, w) for r, k, op in mutations.places(schedule) for w in op.waits]:
            waits = schedule.regions[region].ops[k].waits
            mutant = mutations.changed(schedule, region, k, waits=tuple(w for w in waits if w != wait))
            harm, said = (region, k, wait) not in implied and oracle.harm(mutant), verdict(mutant)
            counts["harmful" if harm else "harmless"] += 1
            counts["missed"] += bool(harm and not said)
            counts["refused"] += bool(said and not harm)
        result[config] = dict(counts)
        print(config, result[config], file=sys.stderr, flush=True)
    return result


def provenance() -> dict:
    return {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "cpu": cpu(), "load": os.getloadavg()[0],
        "python": platform.python_version(), "numpy": version("numpy"), "command": " ".join(["python -m experiments.bench_lint", *sys.argv[1:]]),
    }


def main() -> None:
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--samples", type=int, default=500)
    args.add_argument("--workers", type=int, default=2)
    args.add_argument("--unreduced", action="store_true")
    args = args.parse_args()
    out = ROOT / "results" / "bars" / "lint.json"
    result = json.loads(out.read_text()) if out.exists() else {}

    def keep(what: str, found: dict) -> None:
        result[what] = found | {"provenance": provenance()}
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n")

    start = time.process_time()
    schedule = large()
    size = {"ops": sum(len(r.ops) for r in schedule.regions.values()), "build_cpu_s": round(time.process_time() - start, 3)}
    keep("lint", size | timed(schedule))
    if args.samples:
        keep("mutations", sampled(args.samples, args.workers))
    if args.unreduced:
        keep("unreduced", unreduced())
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
