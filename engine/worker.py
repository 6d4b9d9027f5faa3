"""What one rank does with a job: train a model by a schedule for some steps, and yield a Run.

The same worker serves calibration, comparison, the demo and training; engine.serve is the process around it.
"""
from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta

from engine.kernels.choose import choose, usable
from engine.pulse import START_S, TIMEOUT_S, Pulse
from engine.stop import leave, stops
from engine.world import world
from sim import text
from sim.errors import RankLost, UserError
from sim.schedule import Schedule

MISTAKE, LOST = "error: ", "lost: "
"""How a rank's one line on stderr begins: a user's mistake, another rank that is gone."""
TOLD = "was told to stop, as another rank had ended"
"""Last words that are never the reason."""
PIN = "pin "
"""How a line of rank 0 on stdout begins that says how many bytes of how many are pinned."""
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
    """0: the weights stay. What a GPU draws, and with it its clock, depends on them: on H200s three steps at 3e-3 became 4% faster."""
    last_update: bool = True
    """Whether the last step ends in an update; without, its loss is all that it gives."""
    zero: int = 0
    """ZeRO stage of the model states."""
    clip: float | None = None
    """Largest global gradient norm."""
    device: str = "cpu"
    """cpu or cuda."""
    trace_every: int = 2
    """Every how many steps the timeline is taken (0: never); the others give the step time."""
    load_s: float = 0.0
    """Seconds of steps that nothing is kept of, behind the first one and before the others: a GPU is at its steady clock then."""
    footprint: bool = False
    """Whether one more step, behind all the others, takes stock of memory (engine.footprint)."""
    issue: bool = False
    """Whether some more steps tell what each op costs the host (engine.issue)."""


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
    kernel: str = ""
    """The attention kernel that was used, or the two (sim.kernels)."""
    guards_intact: bool = True
    memory_bytes: dict[str, int] = field(default_factory=dict)
    """What engine.footprint says, if it was asked for."""
    issue_ns: dict[str, int] = field(default_factory=dict)
    """What engine.issue says, if it was asked for."""
    sensed: dict[str, float | None] = field(default_factory=dict)
    """What engine.meter says of the steps behind the load, if there was any; on a CPU all N/A."""
    took_s: float = 0.0
    """All of it, set-up included."""
    rss_bytes: int = 0
    """Peak resident memory of the process."""


class Session:
    """A job set up on this rank, ready to take steps one at a time."""

    def __init__(self, job: Job, rank: int = 0, group=None, pin: Callable[[int, int], None] = lambda done, total: None) -> None:
        """pin(bytes, of bytes) is called while host memory is pinned."""
        import torch

        from engine.compile import Program
        from engine.text import stdlib_bytes
        from engine.train import Trainer

        torch.set_num_threads(1)
        self.job, self.run = job, Run()
        self.first = 0
        """Steps done before this session."""
        schedule = text.parse(job.schedule)
        self.seq = schedule.seq
        self._data = stdlib_bytes(job.steps * self.seq)
        self._backend, kernel = backend(job, schedule, rank, pin, group)
        try:
            self.program = Program(schedule, self._backend, kernel, rank, group)
            self.trainer = Trainer(self.program, job.seed, job.lr, job.zero, job.clip)
        except BaseException:
            self._backend.close()
            raise
        self._group = group
        self._barrier = (lambda: torch.distributed.barrier(group)) if schedule.P > 1 else (lambda: None)

    def step(self, traced: bool) -> None:
        """One training step; its loss, time and, if traced, spans are added to self.run."""
        run, program, step = self.run, self.program, self.first + len(self.run.losses)
        program.spans = [] if traced else None
        self._barrier()
        self._backend.settle()
        start, begin = time.perf_counter_ns(), []
        with self._backend.timed(begin):
            pass  # where the step begins on the clock of its spans
        found = self._train(step)
        run.step_ns.append(time.perf_counter_ns() - start)
        run.losses.append(found.loss)
        run.grad_norms.append(found.grad_norm)
        self._backend.settle()
        if traced:
            run.traces[step] = [(i, layer, stream, s - begin[0], e - begin[0]) for i, layer, stream, (s, e) in program.spans]

    def load(self, seconds: float) -> None:
        """Steps for so long by the slowest rank's clock, the same number on every rank."""
        from engine.most import most

        self._barrier()
        start = time.perf_counter()
        self.again()
        took, = most([time.perf_counter() - start], self._group)
        for _ in range(math.ceil(seconds / took) - 1):
            self.again()

    def again(self) -> None:
        """One more step that nothing is kept of."""
        self.program.spans = None
        self._train(0)

    def _train(self, step: int):
        self.program.copied_bytes = dict.fromkeys(self.program.copied_bytes, 0)
        at = step % self.job.steps * self.seq
        found = self.trainer.step(self._data[at:at + self.seq], self.job.last_update or step < self.job.steps - 1)
        self._backend.synchronize()
        return found

    def close(self) -> Run:
        """What the steps gave; ends the streams."""
        import resource

        self.run.copied_bytes = self.program.copied_bytes
        self.run.touched_bytes = {s: self.program.arenas.touched_bytes(s) for s in ("hbm", "host")}
        self.run.kernel = self.program.runtime.kernel.NAME
        self.run.guards_intact = self.program.arenas.guards_intact()
        self.run.rss_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        self.end()
        return self.run

    def end(self) -> None:
        """Ends the streams."""
        self._backend.close()


def run_job(job: Job, rank: int = 0, group=None, tick: Callable[[], None] = lambda: None, pin: Callable[[int, int], None] = lambda done, total: None) -> Run:
    """Does a job on this rank; `tick` is called after each step, `pin` as Session says."""
    start = time.monotonic()
    session = Session(job, rank, group, pin)
    try:
        session.step(False)
        tick()
        if job.load_s:
            session.load(job.load_s)
        with sensing(session.run, job.device) if job.load_s else nullcontext():
            for step in range(1, job.steps):
                session.step(job.trace_every > 0 and step % job.trace_every == 1 % job.trace_every)
                tick()
        if job.footprint:
            from engine.footprint import footprint

            session.run.memory_bytes = footprint(session)
        if job.issue:
            from engine.issue import issue

            session.run.issue_ns = issue(session)
    finally:
        run = session.close()
    del session
    emptied(job.device)
    run.took_s = time.monotonic() - start
    return run


@contextmanager
def sensing(run: Run, device: str):
    """What the GPU's clock, power and temperature are meanwhile goes to run.sensed."""
    import torch

    from engine.meter import Meter

    meter, begin = Meter(torch.device(device)), time.monotonic()
    try:
        yield
        run.sensed = meter.read(begin, time.monotonic())
    finally:
        meter.close()


def emptied(device: str) -> None:
    """What a job, or a row of a bench, has left behind is gone before the next one takes its memory: cycles, cuBLAS's workspaces of its streams, and what the
    allocator keeps for reuse."""
    gc.collect()
    if device == "cuda":
        import torch

        torch._C._cuda_clearCublasWorkspaces()  # one a handle and stream, and each job has new streams
        torch.cuda.empty_cache()


def placement(rank: int, world: int) -> dict[str, set[int]]:
    """Cores of each stream: alone, compute has one core and all else the others; with several ranks, rank r has core r."""
    if world > 1 or len(CORES) == 1:
        return dict.fromkeys(("compute", "comm", "h2d", "d2h", "host"), {CORES[rank % len(CORES)]})
    return {"compute": {CORES[0]}} | dict.fromkeys(("comm", "h2d", "d2h", "host"), set(CORES[1:]))


def backend(job: Job, schedule: Schedule, rank: int, pin: Callable[[int, int], None] = lambda done, total: None, group=None, only: str = ""):
    """(backend, attention kernel) of this rank; `only` names the adapter to take. Raises UserError where the node has too few GPUs, or ones that no
    kernel runs on."""
    model, dtype, P = schedule.model, schedule.dtype, schedule.P
    if job.device == "cpu":
        from engine.backend.cpu import CpuBackend

        return CpuBackend(placement(rank, P), job.link_GBps), usable(model, dtype, None, only=only)[0]
    import torch

    from engine.backend.cuda import CudaBackend

    here = world()
    check_gpus(here.local_size)
    kernels = usable(model, dtype, torch.cuda.get_device_capability(here.local_rank), schedule.chunk * model.q_dim // P, only)
    torch.cuda.set_device(here.local_rank)
    kernel = choose(kernels, model, P, group)
    return CudaBackend(here.local_rank, pin), kernel


def check_gpus(ranks: int) -> None:
    """Raises UserError where this node has fewer GPUs than ranks."""
    import torch

    if ranks > (have := torch.cuda.device_count()):
        raise UserError(f"{ranks} ranks want a GPU each, this node has {have}; try --gpus {have}, or more nodes through torchrun")


@contextmanager
def joined(device: str = "cpu", prefix: str = LOST):
    """(rank, group) of this process among those that torchrun started; (0, None) where there is one.

    Raises RankLost where another rank is gone, and ends the process with a line (after `prefix`) where that is noticed beside a call
    that does not return, or where it is told to stop, which is what torchrun does when a rank is gone.
    """
    rank, size, _, _ = world()
    if device == "cpu":
        os.sched_setaffinity(0, placement(rank, size)["host"])
    with stops(f"{prefix}rank {rank} {TOLD}"):
        if size == 1:
            with _memory_lasts(rank):
                yield rank, None
            return
        import torch
        import torch.distributed as dist

        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")  # its way is a C++ traceback and SIGABRT
        start = timedelta(seconds=START_S)
        dist.init_process_group("gloo" if device == "cpu" else "cpu:gloo,cuda:nccl", timeout=start)
        try:
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=TIMEOUT_S[device]))
            store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, timeout=start)
            pulse = Pulse(store, rank, size, lambda said: leave(f"{prefix}{said}", 1))
            with _memory_lasts(rank):
                yield rank, dist.group.WORLD
            dist.all_reduce(torch.zeros(1))  # nobody leaves before all are done
            pulse.end()
        except Exception as error:
            if _lost(error):
                raise RankLost(f"rank {rank} lost another rank: {str(error).strip().splitlines()[-1]}") from None
            raise
        dist.destroy_process_group()


@contextmanager
def _memory_lasts(rank: int):
    """Raises UserError where it does not."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # torch's are RuntimeErrors
        from engine.oom import out_of_memory

        if said := out_of_memory(error):
            raise UserError(f"rank {rank} {said}") from None
        raise


def _lost(error: BaseException) -> bool:
    """Says whether a collective failed because of another process; gloo has no type for that."""
    import torch.distributed as dist

    text = str(error).lower()
    return isinstance(error, dist.DistError) or any(sign in text for sign in ("connection closed by peer", "connection reset", "timed out", "broken pipe"))
