"""How long `fpdt simulate` takes, cold: python -m experiments.bench_simulate

llama3-8b, S = 2M on 4 GPUs: on the A100 profile, and on the H200's, where streams slow each other, with every `save` and backward order. Each is
a fresh process from build to lint to simulation, less the start-up of a process that imports python, numpy, simpy and typer and ends; each finds its
modules' bytecode, as an installed package's. Medians of five (H200: three), all rounds kept, in results/bars/simulate.json.
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
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

from sim.files import write
from sim.strategy import AUTO

START_UP = [sys.executable, "-c", "import numpy, simpy, typer"]
BARS = {"64K": 1.5, "16K": 6.0}
"""C -> seconds beyond start-up."""
BAR_MB = 500
OUT = Path("results/bars/simulate.json")
SAVES = ("qkvo", "all", "o", "input")
ROUNDS = {"a100-80g-sxm": 5, "h200-141g-sxm": 3}


class Case(NamedTuple):
    """What is simulated."""

    machine: str
    chunk: str
    settings: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join((f"{self.machine} C={self.chunk}", *self.settings))

    @property
    def command(self) -> list[str]:
        arguments = f"simulate llama3-8b --machine {self.machine} --gpus 4 --seq 2M --chunk {self.chunk} --json".split()
        return [sys.executable, "-m", "experiments.cli", *arguments, *(word for setting in self.settings for word in ("--set", setting))]


CASES = (*(Case("a100-80g-sxm", chunk) for chunk in BARS), *(Case("h200-141g-sxm", C, (f"save={s}", f"order={o}")) for C, s, o in product(BARS, SAVES, AUTO["order"])))


def once(argv: list[str], environment: dict[str, str]) -> tuple[float, float]:
    """(seconds, peak MB) of a process, its output thrown away. Raises if it fails."""
    start = time.perf_counter()
    nowhere = (os.POSIX_SPAWN_OPEN, 1, os.devnull, os.O_WRONLY, 0)
    pid = os.posix_spawn(argv[0], argv, environment, file_actions=[nowhere])
    _, status, used = os.wait4(pid, 0)
    if status:
        raise RuntimeError(f"{argv} ended with {status}")
    return time.perf_counter() - start, used.ru_maxrss * 1024 / 1e6


def cpu() -> str:
    """The processor's name, as Linux tells it."""
    info = Path("/proc/cpuinfo")
    names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if line.startswith("model name")] if info.exists() else []
    return f"{names[0] if names else platform.processor()}, {os.cpu_count()} cores"


def main() -> None:
    """Exits with 1 if a bar is missed."""
    taken: dict = {"start_up": [], **{case: [] for case in CASES}}
    with TemporaryDirectory() as bytecode:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"} | {"PYTHONPYCACHEPREFIX": bytecode}
        once(START_UP, environment), once(CASES[0].command, environment)
        for k in range(max(ROUNDS.values())):
            taken["start_up"].append(once(START_UP, environment))
            for case in (case for case in CASES if k < ROUNDS[case.machine]):
                taken[case].append(once(case.command, environment))
    start_up_s = statistics.median(s for s, _ in taken["start_up"])
    result = {
        "provenance": {
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"), "cpu": cpu(), "load_before": os.getloadavg()[0], "python": platform.python_version(),
            **{name: version(name) for name in ("numpy", "simpy", "typer")}, "command": "python -m experiments.bench_simulate",
        },
        "start_up_s": {"median": start_up_s, "rounds": [s for s, _ in taken["start_up"]]},
        "cases": {},
    }
    for case in CASES:
        beyond, bar_s = [s - start_up_s for s, _ in taken[case]], BARS[case.chunk]
        peak_MB = max(mb for _, mb in taken[case])
        met = statistics.median(beyond) <= bar_s and peak_MB < BAR_MB
        result["cases"][str(case)] = {
            "command": "fpdt " + " ".join(case.command[3:]), "beyond_start_up_s": {"median": statistics.median(beyond), "rounds": beyond, "bar": bar_s},
            "peak_MB": {"max": peak_MB, "bar": BAR_MB}, "met": met,
        }
        print(f"{case}: {statistics.median(beyond):.2f} s beyond {start_up_s:.2f} s of start-up (bar {bar_s} s), {peak_MB:.0f} MB (bar {BAR_MB}): {'met' if met else 'MISSED'}")
    write(OUT, json.dumps(result, indent=1) + "\n")
    sys.exit(not all(case["met"] for case in result["cases"].values()))


if __name__ == "__main__":
    main()
