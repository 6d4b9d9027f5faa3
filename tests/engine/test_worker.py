"""The worker: steps that nothing is kept of, and what each op costs the host."""
from __future__ import annotations

from statistics import median

import pytest

from engine import calibrate
from engine.compile import Program
from engine.ranks import Ranks
from engine.train import Trainer
from engine.worker import Job, Run, run_job
from sim import text
from tests.engine.cases import schedule, tiny


def job(P: int = 1, **fields) -> Job:
    return Job(text.show(schedule(tiny(vocab=256), 64, 16, P)), steps=3, **fields)


def test_load_leaves_no_trace_in_the_result(monkeypatch):
    taken, right = [], Trainer.step
    monkeypatch.setattr(Trainer, "step", lambda self, *args: (taken.append(1), right(self, *args))[1])
    loaded, plain = run_job(job(load_s=0.2)), run_job(job())
    assert len(taken) > 3 + 3 and [len(r.losses) for r in (loaded, plain)] == [len(r.step_ns) for r in (loaded, plain)] == [3, 3]
    assert loaded.traces.keys() == plain.traces.keys() and loaded.losses[0] == plain.losses[0]


def test_copied_bytes_are_one_step_s_whatever_ran_behind_it():
    found = [run_job(job(**extra)).copied_bytes for extra in ({}, {"footprint": True}, {"issue": True}, {"load_s": 0.1})]
    assert found[0]["h2d"] > 0 and all(each == found[0] for each in found)


def test_ranks_load_alike():
    """The number of steps is the slowest rank's, or all-to-alls would wait for ever."""
    with Ranks(2) as ranks:
        run, = ranks.do([job(2, load_s=0.2)])
    assert len(run.losses) == 3


def test_each_op_s_issue_is_told():
    s = schedule(tiny(vocab=256), 64, 16)
    run, plain = run_job(job(issue=True)), run_job(job())
    ops = {op.id: op for region in s.regions.values() for op in region.ops if op.stream != "host"}
    assert run.issue_ns.keys() == {"loss", "bwd", *ops} and min(run.issue_ns.values()) > 0 and plain.issue_ns == {}
    assert len(run.losses) == 3
    curves = calibrate.curves([s], [run], "here")
    of_kind = sorted(ns for id, ns in run.issue_ns.items() if id in ops and ops[id].kind == "proj")
    assert of_kind[0] <= curves["proj"]["issue_ns"] <= of_kind[-1] and "issue_ns" not in calibrate.curves([s], [plain], "here")["proj"]
    of_kind = [ns for id, ns in run.issue_ns.items() if id in ops and ops[id].kind == "ce"]
    assert curves["ce"]["issue_ns"] == pytest.approx(median(of_kind) / 4)  # sub-chunks


@pytest.mark.parametrize("slower", ("proj", "reload"))
def test_an_op_that_takes_the_host_longer_is_seen(slower, monkeypatch):
    """By a clock that goes on by 1 ns where it is read, and by 1000 ns more where such an op is bound."""
    clock, right = Clock(), Program._work

    def slow(self, bound, *args):
        clock.ns += 1000 * (bound.kind == slower)
        return right(self, bound, *args)

    monkeypatch.setattr("engine.compile.time", clock)
    monkeypatch.setattr(Program, "_work", slow)
    told = run_job(job(issue=True)).issue_ns
    assert {id: ns for id, ns in told.items() if "." in id} == {id: 1001 if id.split(".")[1].split("[")[0] == slower else 1 for id in told if "." in id}
    assert {told["loss"], told["bwd"]} == {1} and 1001 in told.values()


class Clock:
    """Stands in for the module `time`."""

    ns = 0

    def perf_counter_ns(self) -> int:
        self.ns += 1
        return self.ns


def test_what_a_step_takes_beside_its_spans():
    run = Run(step_ns=[0, 100, 90], traces={1: [("ext.embed", 0, "external", 10, 20), ("fwd.qkv[0]", 0, "compute", 15, 70)], 2: [("ext.embed", 0, "external", 5, 85)]})
    assert calibrate.beside(run) == [100 - 60, 90 - 80]


def test_only_a_job_under_load_is_sensed():
    loaded, plain = run_job(job(load_s=0.01)), run_job(job())
    assert loaded.sensed == {"clock_MHz": None, "power_W": None, "temperature_C": None} and plain.sensed == {}
    assert min(loaded.took_s, plain.took_s) > 0
