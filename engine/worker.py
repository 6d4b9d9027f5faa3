"""What one rank does: `python -m engine.worker JOB.json`, under torchrun where there are several.

A job is a list of runs; each trains a model by a schedule for some steps and yields a Run. Rank 0 writes them all to the
job's `out` as JSON. The same worker serves calibration, comparison and the demo.
"""
from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

from sim import text
from sim.errors import UserError

CORES = sorted(os.sched_getaffinity(0))
"""What this process may run on, before it binds itself to a part of them."""


@dataclass
class Job:
    """One training run to do."""

    schedule: str
    """Schedule text."""
    steps: int = 3
    """Steps; the first one warms up and is never timed."""
    link_GBps: float | None = None
    """Pace of host copies on CPU, each direction."""
    seed: int = 0
    lr: float = 3e-3
    zero: int = 0
    """ZeRO stage of the model states."""
    clip: float | None = None
    """Largest global gradient norm."""
    trace_every: int = 2
    """Every how many steps the timeline is taken (0: never); the others give the step time."""


@dataclass
class Run:
    """What one run gave, on rank 0."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    step_ns: list[int] = field(default_factory=list)
    """Wall time of each step."""
    traces: dict[int, list] = field(default_factory=dict)
    """step -> [(op id, layer, stream, start_ns, end_ns)], times from the step's start."""
    touched_bytes: dict[str, int] = field(default_factory=dict)
    copied_bytes: dict[str, int] = field(default_factory=dict)
    """Per step, by direction."""
    guards_intact: bool = True
    rss_bytes: int = 0
    """Peak resident memory of the process."""


class Session:
    """A job set up on this rank, ready to take steps one at a time."""

    def __init__(self, job: Job, rank: int = 0, group=None) -> None:
        import torch

        from engine.backend.cpu import CpuBackend
        from engine.compile import Program
        from engine.kernels import cpu_flash
        from engine.text import stdlib_bytes
        from engine.train import Trainer

        torch.set_num_threads(1)
        self.job, self.run = job, Run()
        schedule = text.parse(job.schedule)
        self.seq = schedule.seq
        self._data = stdlib_bytes(job.steps * self.seq)
        self._backend = CpuBackend(placement(rank, schedule.P), job.link_GBps)
        try:
            self.program = Program(schedule, self._backend, cpu_flash, rank, group)
            self.trainer = Trainer(self.program, job.seed, job.lr, job.zero, job.clip)
        except BaseException:
            self._backend.close()
            raise
        self._barrier = (lambda: torch.distributed.barrier(group)) if schedule.P > 1 else (lambda: None)

    def step(self, traced: bool) -> None:
        """One training step; its loss, time and, if traced, spans are added to self.run."""
        run, program, step = self.run, self.program, len(self.run.losses)
        program.spans = [] if traced else None
        program.copied_bytes = dict.fromkeys(program.copied_bytes, 0)
        self._barrier()
        start = time.perf_counter_ns()
        at = step % self.job.steps * self.seq
        found = self.trainer.step(self._data[at:at + self.seq])
        run.step_ns.append(time.perf_counter_ns() - start)
        run.losses.append(found.loss)
        run.grad_norms.append(found.grad_norm)
        if traced:
            run.traces[step] = [(i, layer, stream, s - start, e - start) for i, layer, stream, (s, e) in program.spans]

    def close(self) -> Run:
        """What the steps gave; ends the streams."""
        import resource

        self.run.copied_bytes = self.program.copied_bytes
        self.run.touched_bytes = {s: self.program.arenas.touched_bytes(s) for s in ("hbm", "host")}
        self.run.guards_intact = self.program.arenas.guards_intact()
        self.run.rss_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        self._backend.close()
        return self.run


def run_job(job: Job, rank: int = 0, group=None, tick: Callable[[], None] = lambda: None) -> Run:
    """Does a job on this rank; `tick` is called after each step."""
    session = Session(job, rank, group)
    try:
        for step in range(job.steps):
            session.step(step > 0 and job.trace_every > 0 and step % job.trace_every == 1 % job.trace_every)
            tick()
    finally:
        run = session.close()
    return run


def placement(rank: int, world: int) -> dict[str, set[int]]:
    """Cores of each stream: alone, compute has one core and all else the others; with several ranks, rank r has core r."""
    if world > 1 or len(CORES) == 1:
        return dict.fromkeys(("compute", "comm", "h2d", "d2h", "host"), {CORES[rank % len(CORES)]})
    return {"compute": {CORES[0]}} | dict.fromkeys(("comm", "h2d", "d2h", "host"), set(CORES[1:]))


def launch(jobs: list[Job], ranks: int, tick: Callable[[], None] = lambda: None) -> list[Run]:
    """Runs jobs on `ranks` new processes through torchrun; `tick` is called after each step. Raises UserError with the ranks' own line."""
    with tempfile.TemporaryDirectory() as folder:
        job, out = Path(folder, "job.json"), Path(folder, "out.json")
        job.write_text(json.dumps({"out": str(out), "jobs": [asdict(j) for j in jobs]}))
        starter = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"] if ranks > 1 else ["-m"]
        env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
        errors = Path(folder, "errors.txt")
        with open(errors, "w") as sink:
            process = subprocess.Popen([sys.executable, *starter, "engine.worker", str(job)], env=env, stdout=subprocess.PIPE, stderr=sink, text=True)
        try:
            for line in process.stdout:
                if line.startswith("tick"):
                    tick()
            if process.wait():
                lines = [line for line in errors.read_text().splitlines() if line.startswith("error: ")]
                if lines:
                    raise UserError(lines[0].removeprefix("error: "))
                raise RuntimeError(f"the ranks ended with {process.returncode}:\n{errors.read_text()[-3000:]}")
        finally:
            if process.poll() is None:
                process.terminate()  # torchrun ends its ranks
                process.wait()
        return [_run(r) for r in json.loads(out.read_text())]


def _run(data: dict) -> Run:
    return Run(**data | {"traces": {int(k): v for k, v in data["traces"].items()}})


def main(path: str) -> None:
    import datetime

    import torch.distributed as dist

    spec = json.loads(Path(path).read_text())
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    os.sched_setaffinity(0, placement(rank, world)["host"])
    group = None
    if world > 1:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
        group = dist.group.WORLD
    tick = (lambda: print("tick", flush=True)) if rank == 0 else (lambda: None)
    try:
        runs = [run_job(Job(**job), rank, group, tick) for job in spec["jobs"]]
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(2)
    if rank == 0:
        Path(spec["out"]).write_text(json.dumps([asdict(r) for r in runs]))
    if world > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
