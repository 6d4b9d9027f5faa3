"""Ranks: worker processes on this machine, started through torchrun where there are several.

    with Ranks(2) as ranks:
        runs = ranks.do(jobs, tick)

    start(training, 2, hear)
"""
from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

from engine.reason import reason
from engine.training import Training
from engine.worker import PIN, Job, Run
from engine.world import NAMES
from sim.errors import UserError

KEEP = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 32), "MALLOC_TOP_PAD_": str(1 << 26)}
"""glibc keeps freed memory instead of giving it back and faulting it in again for every kernel's result."""
Pin = Callable[[int, int], None]
"""Called with bytes pinned, of how many."""
END_S = 30
"""Told to end, ranks have this long."""


class Ranks:
    """P worker processes that stay for several lists of jobs. They end with the block, with an error of any of them, or with this process."""

    def __init__(self, P: int, device: str = "cpu") -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._sent = 0
        self._workers = _Workers(Path(self._folder.name), P, device, Path(self._folder.name, "errors.txt"))

    def do(self, jobs: list[Job], tick: Callable[[], None] = lambda: None, pin: Pin = lambda done, total: None) -> list[Run]:
        """Runs jobs one after the other; `tick` is called after each step, `pin` while host memory is pinned. Raises UserError with a rank's own line, RankLost where one was killed."""
        self._send(jobs)
        for line in self._workers.lines(pin):
            if line.startswith("tick"):
                tick()
            if line.startswith("done"):
                return [_run(r) for r in json.loads(Path(self._folder.name, f"{self._sent - 1}.out").read_text())]
        raise self._workers.failure()

    def _send(self, jobs: list[Job]) -> None:
        path = Path(self._folder.name, f"{self._sent}.json")
        part = path.with_suffix(".part")
        part.write_text(json.dumps([asdict(job) for job in jobs]))
        part.replace(path)
        self._sent += 1

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, kind, *_) -> None:
        if kind is None:
            self._send([])
        self._workers.end(kindly=kind is None)
        self._folder.cleanup()


def start(training: Training, P: int, hear: Callable[[str], None], pin: Pin = lambda done, total: None) -> None:
    """A training on P new ranks, as `run` says."""
    run("engine.serve", asdict(training), P, training.job.device, hear, pin)


def run(module: str, job: dict | list, P: int, device: str, hear: Callable[[str], None], pin: Pin = lambda done, total: None) -> None:
    """A module that is given (file of the job, device) on P new ranks; `hear` gets each line of rank 0, `pin` what Ranks.do says. Raises as that does."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "job.json")
        path.write_text(json.dumps(job))
        workers = _Workers(path, P, device, Path(folder, "errors.txt"), module)
        try:
            for line in workers.lines(pin):
                hear(line)
            if failure := workers.failure():
                raise failure
        finally:
            workers.end(kindly=False)


class _Workers:
    """The processes. A Ctrl-C is the caller's to hear, so they have a session of their own."""

    def __init__(self, job: Path, P: int, device: str, errors: Path, module: str = "engine.serve") -> None:
        starter = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(P), "-m"] if P > 1 else ["-m"]
        env = {k: v for k, v in os.environ.items() if k not in NAMES} | KEEP | {"OMP_NUM_THREADS": "1", "FPDT_SENDER": str(os.getpid()), "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        command = [sys.executable, *starter, module, str(job), device]
        self._errors = errors
        with open(errors, "w") as sink:
            self._process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=sink, text=True, start_new_session=True)

    def lines(self, pin: Pin) -> Iterator[str]:
        """What rank 0 prints, but for what it has pinned, which `pin` is called with."""
        for line in self._process.stdout:
            if line.startswith(PIN):
                pin(*map(int, line.split()[1:]))
            else:
                yield line

    def failure(self) -> Exception | None:
        """Waits for the end; what it came to, if not to success."""
        code, errors = self._process.wait(), self._errors.read_text(errors="replace")
        return reason(code, errors) if code else None

    def end(self, kindly: bool) -> None:
        """Waits for the processes, or tells them to end (torchrun ends its ranks)."""
        if not kindly and self._process.poll() is None:
            self._process.terminate()
        try:
            self._process.wait(timeout=END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _run(data: dict) -> Run:
    return Run(**data | {"traces": {int(k): v for k, v in data["traces"].items()}})
