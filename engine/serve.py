"""The process of one rank: python -m engine.serve PATH DEVICE, under torchrun where there are several (see engine.ranks).

PATH is a folder, where lists of jobs arrive as files and rank 0 writes what they gave beside them; or a file that holds a training.
"""
from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from engine.stop import leave
from engine.training import Training, train
from engine.worker import LOST, MISTAKE, PIN, Job, joined, run_job
from sim.errors import RankLost, UserError


def main(path: str, device: str) -> None:
    ranked(device, lambda rank, group: (_serve if Path(path).is_dir() else _train)(Path(path), rank, group))


def ranked(device: str, work: Callable[[int, object], None]) -> None:
    """Calls work(rank, group). Exits with 2 on a user's mistake, with 1 where another rank was lost; one line on stderr says which."""
    try:
        with joined(device) as (rank, group):
            work(rank, group)
    except (UserError, RankLost) as error:
        mistake = isinstance(error, UserError)
        leave(f"{MISTAKE if mistake else LOST}{error}", 2 if mistake else 1)


def _train(path: Path, rank: int, group) -> None:
    spec = json.loads(path.read_text())
    train(Training(**spec | {"job": Job(**spec["job"])}), rank, group, pinned(rank))


def _serve(folder: Path, rank: int, group) -> None:
    tick = (lambda: print("tick", flush=True)) if rank == 0 else (lambda: None)
    number = 0
    while jobs := _next(folder, number):
        runs = [run_job(job, rank, group, tick, pinned(rank)) for job in jobs]
        if rank == 0:
            (folder / f"{number}.out").write_text(json.dumps([asdict(r) for r in runs]))
            print("done", flush=True)
        number += 1


def pinned(rank: int) -> Callable[[int, int], None]:
    """Rank 0 prints how much host memory it has pinned."""
    return lambda done, total: print(f"{PIN}{done} {total}", flush=True) if rank == 0 else None


def _next(folder: Path, number: int) -> list[Job]:
    """The next list of jobs once it is there; an empty one ends the worker, as does the end of whoever sends them."""
    path, sender = folder / f"{number}.json", int(os.environ["FPDT_SENDER"])
    while not path.exists():
        if not Path(f"/proc/{sender}").exists():
            return []
        time.sleep(0.02)
    return [Job(**job) for job in json.loads(path.read_text())]


if __name__ == "__main__":
    main(*sys.argv[1:])
