"""Footprint: a step of its own that takes stock of memory; and what a job leaves is gone before the next one."""
from __future__ import annotations

import weakref

import pytest
import torch

from engine import footprint, worker
from engine.backend.base import CALLER
from engine.worker import Job, run_job
from sim import text
from sim.build.step import build
from sim.model import model
from sim.need import transient
from sim.ops import KINDS
from sim.strategy import Strategy

MODEL = model("demo", layers=2)


def job(**fields) -> Job:
    schedule = build(MODEL, Strategy(sp=1, chunk=256, zero=0, host_sync="region", loss_sub=4), 512, "fp32")
    return Job(text.show(schedule), steps=3, **fields)


def test_states_are_sixteen_bytes_a_parameter_and_nothing_else_changes():
    """Parameters, gradients and two moments in fp32. The step is in no column of the run."""
    plain, watched = run_job(job()), run_job(job(footprint=True))
    assert watched.memory_bytes == {"states": 16 * MODEL.params} and plain.memory_bytes == {}
    assert watched.losses == plain.losses and len(watched.step_ns) == len(watched.grad_norms) == 3


def test_a_job_leaves_no_arenas(monkeypatch):
    arenas = []

    class Watched(worker.Session):
        def __init__(self, *args):
            super().__init__(*args)
            arenas.append(weakref.ref(self.program.arenas))

    monkeypatch.setattr(worker, "Session", Watched)
    run_job(job(footprint=True))
    assert [arena() for arena in arenas] == [None]


def test_touched_bytes_are_counted_over_pieces(monkeypatch):
    whole = run_job(job()).touched_bytes
    monkeypatch.setattr("engine.arenas.PIECE_WORDS", 1000)
    assert run_job(job()).touched_bytes == whole and min(whole.values()) > 0


class Allocator:
    """torch's statistics, of what `take` says."""

    def __init__(self) -> None:
        self.now = self.peak = self.held = 0

    def take(self, size: int) -> None:
        self.now += size
        self.peak, self.held = max(self.peak, self.now), max(self.held, self.now + 7)

    def memory_stats(self) -> dict[str, int]:
        return {"requested_bytes.all.current": self.now, "requested_bytes.all.peak": self.peak, "reserved_bytes.all.peak": self.held}

    def reset_peak_memory_stats(self) -> None:
        self.peak = self.now

    def empty_cache(self) -> None:
        self.held = self.now


def test_room_is_kept_for_the_largest_workspace_and_what_comes_and_goes(monkeypatch):
    asked = []
    monkeypatch.setattr("engine.backend.cpu.CpuBackend.keep", lambda self, sizes: asked.append(sizes))
    schedule = build(MODEL, Strategy(sp=1, chunk=256, zero=0, host_sync="region", loss_sub=4), 512, "fp32")
    largest = max(KINDS[op.kind].workspace(op, schedule, "torch CPU flash") for region in schedule.regions.values() for op in region.ops)
    run_job(job())
    assert asked == [{"compute": largest, CALLER: transient(schedule)}] and largest > 0


@pytest.fixture
def allocator(monkeypatch) -> Allocator:
    made = Allocator()
    for name in ("memory_stats", "reset_peak_memory_stats", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, getattr(made, name))
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: made.take(-4000), raising=False)
    return made


def test_peaks_inside_ops_and_between_them(allocator):
    def op(*sizes: int):
        return watch.around(None, lambda: [allocator.take(size) for size in sizes])

    allocator.take(10_000)
    allocator.take(900), allocator.take(-900)  # the set-up's, which the allocator keeps until it is told not to
    watch = footprint._Allocator(lambda: (torch.cuda.empty_cache(), allocator.take(400), allocator.take(-400)))  # as a backend makes room
    op(50, -50)()
    op(20, -10)()
    allocator.take(300), allocator.take(-300)
    op(40, -40, 5)()
    assert watch.found() == {"peak": 10_310 - 8192, "workspace": 50, "blas": 4000, "reserved": 10_407 - 8192}
