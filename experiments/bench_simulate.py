"""How long `fpdt simulate` takes, cold: python -m experiments.bench_simulate

The two bar cases, each a fresh process from build to lint to simulation, less the start-up of a process that imports python,
numpy, simpy and typer and ends. Medians of five, all rounds kept, in results/bars/simulate.json.
"""
from __future__ import annotations

import json
import os
import platform
import statistics
import sys
import time
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path

START_UP = [sys.executable, "-c", "import numpy, simpy, typer"]
BARS = {"64K": 1.5, "16K": 6.0}
"""C -> seconds beyond start-up."""
BAR_MB = 500
OUT = Path("results/bars/simulate.json")


def command(chunk: str) -> list[str]:
    arguments = f"simulate llama3-8b --machine a100-80g-sxm --gpus 4 --seq 2M --chunk {chunk} --json"
    return [sys.executable, "-m", "experiments.cli", *arguments.split()]


def once(argv: list[str]) -> tuple[float, float]:
    """(seconds, peak MB) of a process, its output thrown away. Raises if it fails."""
    start = time.perf_counter()
    nowhere = (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)
    pid = os.posix_spawn(argv[0], argv, os.environ, file_actions=[nowhere])
    _, status, used = os.wait4(pid, 0)
    if status:
        raise RuntimeError(f"{argv} ended with {status}")
    return time.perf_counter() - start, used.ru_maxrss * 1024 / 1e6


def cpu() -> str:
    """The processor's name, as Linux tells it."""
    info = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores"


def main(rounds: int = 5) -> None:
    """Exits with 1 if a bar is missed."""
    once(command("64K"))
    taken = {"start_up": [], **{chunk: [] for chunk in BARS}}
    for _ in range(rounds):
        taken["start_up"].append(once(START_UP))
        for chunk in BARS:
            taken[chunk].append(once(command(chunk)))
    start_up_s = statistics.median(s for s, _ in taken["start_up"])
    result = {
        "provenance": {
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "cpu": cpu(), "load_before": os.getloadavg()[0], "python": platform.python_version(),
            **{name: version(name) for name in ("numpy", "simpy", "typer")}, "command": "python -m experiments.bench_simulate",
        },
        "start_up_s": {"median": start_up_s, "rounds": [s for s, _ in taken["start_up"]]},
        "cases": {},
    }
    for chunk, bar_s in BARS.items():
        beyond = [s - start_up_s for s, _ in taken[chunk]]
        peak_MB = max(mb for _, mb in taken[chunk])
        met = statistics.median(beyond) <= bar_s and peak_MB < BAR_MB
        result["cases"][f"C={chunk}"] = {
            "command": "fpdt " + " ".join(command(chunk)[3:]), "beyond_start_up_s": {"median": statistics.median(beyond), "rounds": beyond, "bar": bar_s},
            "peak_MB": {"max": peak_MB, "bar": BAR_MB}, "met": met,
        }
        print(f"C={chunk}: {statistics.median(beyond):.2f} s beyond {start_up_s:.2f} s of start-up (bar {bar_s} s), {peak_MB:.0f} MB (bar {BAR_MB}): {'met' if met else 'MISSED'}")
    OUT.parent.mkdir(parents=True, exist_ok=True)
    part = OUT.with_suffix(".part")
    part.write_text(json.dumps(result, indent=1) + "\n")
    part.replace(OUT)
    sys.exit(not all(case["met"] for case in result["cases"].values()))


if __name__ == "__main__":
    main()
