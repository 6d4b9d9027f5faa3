"""Ranks: worker processes that stay for several lists of jobs, started through torchrun.

    with Ranks(2) as ranks:
        runs = ranks.do(jobs, tick)
"""
from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from engine.worker import Job, Run
from sim.errors import UserError


class Ranks:
    """P worker processes of this machine. They end with the block, with an error of any of them, or with this process."""

    def __init__(self, P: int) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._sent = 0
        self._errors = Path(self._folder.name, "errors.txt")
        starter = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(P), "-m"] if P > 1 else ["-m"]
        env = os.environ | {"OMP_NUM_THREADS": "1", "FPDT_SENDER": str(os.getpid()), "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        with open(self._errors, "w") as sink:
            command = [sys.executable, *starter, "engine.worker", self._folder.name]
            self._process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=sink, text=True)

    def do(self, jobs: list[Job], tick: Callable[[], None] = lambda: None) -> list[Run]:
        """Runs jobs one after the other; `tick` is called after each step. Raises UserError with a rank's own line."""
        number = self._send(jobs)
        for line in self._process.stdout:
            if line.startswith("tick"):
                tick()
            if line.startswith("done"):
                return [_run(r) for r in json.loads(Path(self._folder.name, f"{number}.out").read_text())]
        self._process.wait()
        errors = self._errors.read_text()
        for line in errors.splitlines():
            if line.startswith("error: "):
                raise UserError(line.removeprefix("error: "))
        raise RuntimeError(f"the ranks ended with {self._process.returncode}:\n{errors[-3000:]}")

    def _send(self, jobs: list[Job]) -> int:
        path = Path(self._folder.name, f"{self._sent}.json")
        part = path.with_suffix(".part")
        part.write_text(json.dumps([asdict(job) for job in jobs]))
        part.replace(path)
        self._sent += 1
        return self._sent - 1

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, kind, *_) -> None:
        if kind is None and self._process.poll() is None:
            self._send([])
        else:
            self._process.terminate()  # torchrun ends its ranks
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
        self._folder.cleanup()


def _run(data: dict) -> Run:
    return Run(**data | {"traces": {int(k): v for k, v in data["traces"].items()}})
