"""Run: calibrate, draw, predict, write both down, and only then measure, one row after the other.

A run that was interrupted goes on with the configurations that are missing; on another day or machine it calibrates again first, and each
row says which profile it was predicted with. A machine with fewer GPUs than the grid asks for takes its share of a grid that was drawn
before, by `plan` or on a larger one, and leaves the rest. In the folder: grid.csv, predicted.csv, rows.csv, validate.json, profiles/, scatter.png, and
timelines/ of each row, predicted and measured, for `fpdt explain`.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress

from engine import measure, probe
from engine.calibrate import LOAD_S, beside
from engine.worker import Job, Run
from experiments.bars import pinning, progress
from experiments.calibrate import microbenchmarks
from experiments.validate import bars, calibration, grid, predict, report, rows
from experiments.validate.calibration import Profile
from experiments.validate.case import SPACES, Case
from experiments.validate.pool import Pool
from experiments.validate.record import RANKS, Asked, Record, recorded_gpus
from experiments.validate.rows import Row
from sim import text
from sim.errors import RankLost, UserError
from sim.files import claimed, folder
from sim.machine import Machine
from sim.metrics import peak_bytes, times
from sim.schedule import Schedule
from sim.simulate import simulate
from sim.timeline import Timeline

MOST_RANKS = 2
"""P is drawn up to it, if nothing is said."""
TRACE_EVERY = 3
ROUNDS, LONG_S = {"cuda": 8, "cpu": 2}, (0.1, 0.5, 2.0)
"""Rounds of two untraced steps and a traced one; half as many, and half again, where a step is longer than these."""
FOOTPRINT = 1
"""Steps that take stock of memory."""
SETUP_S, HOST_GBps = {"cuda": 2.0, "cpu": 1.0}, 1.5
"""What it takes to start a job on ranks that are there, and to take, touch and pin host memory."""
IN_A_ROW = 3
"""Configurations that may fail one after the other; then something else is wrong."""


def validate(
    *, seed: int = 0, count: int | None = None, budget_min: float | None = None, gpus: int | None = None, hbm_bytes: int | None = None, host_bytes: int | None = None,
    out: Path, command: str = "", console: Console | None = None,
) -> bool:
    """Whether all has run and all bars hold. Raises UserError, RankLost where configurations fail one after the other."""
    console = console or Console()
    device = probe.device()
    places, most = _places(device)
    asked = Asked(device, seed, count, budget_min, gpus or recorded_gpus(out) or min(MOST_RANKS, places), {"hbm_bytes": hbm_bytes, "host_bytes": host_bytes})
    if asked.ranks[-1] > most and not rows.load(out / "grid.csv", Case):
        raise UserError(f"{asked.ranks[-1]} ranks want a GPU each, this node has {places}; try --gpus {places}, or draw the grid first with --plan MACHINE --out {out}")
    with claimed(out):
        record = Record(out, asked.inputs, command)
        cases, done = asked.drawn(out), rows.load(out / "rows.csv", Row)
        rows.check(out / "rows.csv", done, cases)
        left = _left(cases, done)
        mine = [case for case in left if case.P <= most]
        if not cases or mine:
            with progress(console) as bar, Pool(device) as pool:
                found = profiles(record, sorted({case.P for case in mine}) or asked.ranks, device, asked.given, pool, bar)
                if not cases:
                    mine = cases = asked.draw(cost(found, device))
                    rows.save(out / "grid.csv", cases)
                report.listing(cases, console)
                _measure(mine, done, found, record, pool, bar, console)
    left, verdict = _left(cases, done), bars.judge(done)
    record.finish(verdict, done, len(left))
    report.report(done, verdict, record.data, out, console)
    if left:
        console.print(f"{len(left)} configurations are left, which want {max(case.P for case in left)} GPUs; run the same command where they are.", highlight=False, soft_wrap=True)
    return bars.holds(verdict) and not left


def plan(
    machine: Machine, *, seed: int = 0, count: int | None = None, budget_min: float | None = None, gpus: int | None = None,
    hbm_bytes: int | None = None, host_bytes: int | None = None, out: Path | None = None, command: str = "", console: Console | None = None,
) -> list[Case]:
    """The grid as it would be drawn with this machine for every profile; printed, and nothing is run. With `out` it is written there, for `validate`
    to go on with. Raises UserError."""
    given = {"hbm_bytes": hbm_bytes, "host_bytes": host_bytes}
    machine, asked = machine.override(**given), Asked(machine.kind, seed, count, budget_min, gpus or MOST_RANKS, given)
    price = cost({(name, P): Profile(machine, [1.0], [1.0]) for name in asked.space.models for P in asked.ranks}, asked.device)
    if out is None:
        cases = asked.draw(price)
    else:
        with claimed(out):
            if (out / "grid.csv").exists() or (out / "rows.csv").exists():
                raise UserError(f"{out} has a grid already; go on with it without --plan, or name another folder with --out")
            cases = asked.draw(price)
            record = Record(out, asked.inputs, command)
            record.data["drawn"] = {"machine": machine.name, "command": command}
            record.save()
            rows.save(out / "grid.csv", cases)
    report.listing(cases, console or Console(), [price(case) for case in cases])
    return cases


def _places(device: str) -> tuple[int, int]:
    """(GPUs or cores here, most ranks that can run): a rank has a GPU to itself, cores are shared."""
    import torch

    from engine.worker import CORES

    return (torch.cuda.device_count(),) * 2 if device == "cuda" else (len(CORES), RANKS[-1])


def _left(cases: list[Case], done: list[Row]) -> list[Case]:
    numbers = {row.number for row in done}
    return [case for case in cases if case.number not in numbers]


def profiles(record: Record, ranks: Iterable[int], device: str, given: dict, pool: Pool, bar: Progress) -> dict[tuple[str, int], Profile]:
    """(model, P) -> its profile, measured unless this session has it."""
    found, space, where, pin = {}, SPACES[device], record.begin(), pinning(bar)
    for P in ranks:
        told: list[dict] | None = None
        for name in space.models:
            path = where / f"{name}-P{P}.json"
            if not path.exists():
                told = calibration.contention(space, P, device, microbenchmarks(bar)) if told is None else told
                task = bar.add_task(f"calibrate {name}, P={P}", total=None, state="")

                def do(jobs: list[Job]) -> list[Run]:
                    bar.update(task, total=sum(job.steps for job in jobs))
                    return pool.do(P, jobs, lambda: bar.advance(task), pin)

                calibration.profile(space, name, P, device, told, do).save(path)
            profile = Profile.load(path)
            found[name, P] = replace(profile, machine=profile.machine.override(**given))
    return found


def steps(predicted_s: float, device: str) -> int:
    """Steps of a configuration, the first one included, which is not timed."""
    return 1 + TRACE_EVERY * max(1, ROUNDS[device] >> sum(predicted_s > long for long in LONG_S))


def cost(found: dict[tuple[str, int], Profile], device: str) -> grid.Cost:
    """How long a configuration takes by these profiles."""

    def seconds(case: Case) -> float | None:
        try:
            schedule = case.schedule()
        except UserError:
            return None
        timeline = simulate(schedule, case.strategy, found[case.model, case.P].machine)
        if not predict.fits(timeline):
            return None
        step_s = times(timeline)["step_s"]
        load_s = LOAD_S[device] and max(LOAD_S[device], step_s)  # whole steps
        return (steps(step_s, device) + FOOTPRINT) * step_s + load_s + SETUP_S[device] + case.P * peak_bytes(timeline, "host") / HOST_GBps / 1e9

    return seconds


def _measure(left: list[Case], done: list[Row], found: dict[tuple[str, int], Profile], record: Record, pool: Pool, bar: Progress, console: Console) -> None:
    """Adds a row to `done`, and to the file, for each case that is left."""
    spread = calibration.band(list(found.values()))
    schedules = {case: case.schedule() for case in left}
    predicted, task = [], bar.add_task("predict", total=len(left), state="")
    kept = record.out / "timelines"
    folder(kept)
    for case in left:
        row, timeline = predict.row(case, schedules[case], found[case.model, case.P], record.session, spread)
        timeline.save(kept / f"{case.number}-predicted.json")
        predicted.append(row)
        bar.advance(task)
    path, numbers = record.out / "predicted.csv", {row.number for row in done}
    rows.save(path, [row for row in rows.load(path, Row) if row.number in numbers] + predicted)
    task, failed, pin = bar.add_task("measure", total=len(left), state=""), 0, pinning(bar)
    for case, row in zip(left, predicted):
        bar.update(task, state=case.label)
        try:
            timeline = measured(row, case, schedules[case], found[case.model, case.P].machine, lambda jobs: pool.do(case.P, jobs, pin=pin))
            timeline.save(kept / f"{case.number}-measured.json")
            failed = 0
        except (UserError, RankLost, RuntimeError) as error:
            row.reason, failed = next(filter(str.strip, str(error).splitlines()), type(error).__name__), failed + 1
        done.append(row)
        rows.save(record.out / "rows.csv", done)
        console.print(f"{case.number:3} {case.label}: {row.reason or f'{row.predicted_s:.3f} s predicted, {row.measured_s:.3f} s measured, {row.error:+.1%}'}", highlight=False, markup=False, soft_wrap=True)
        if failed == IN_A_ROW:
            raise RankLost(f"{failed} configurations in a row did not run, the last: {row.reason}")
        bar.advance(task)


def measured(row: Row, case: Case, schedule: Schedule, machine: Machine, do: Callable[[list[Job]], list[Run]]) -> Timeline:
    """Runs a configuration, and adds what was measured to its row; gives its median traced step."""
    run, = do([Job(
        text.show(schedule), steps=steps(row.predicted_s, case.device), lr=0.0, trace_every=TRACE_EVERY, zero=case.strategy.zero, device=case.device,
        load_s=LOAD_S[case.device], footprint=True)])
    bare = [ns / 1e9 for step, ns in enumerate(run.step_ns) if step > 0 and step not in run.traces]
    timeline = measure.timeline(schedule, case.strategy, machine, run)
    row.steps_s, row.measured_s, row.traced_s = bare, float(np.median(bare)), float(np.median([run.step_ns[step] for step in run.traces])) / 1e9
    row.p05_s, row.p95_s = (float(p) for p in np.percentile(bare, (calibration.LOW, calibration.HIGH)))
    row.hidden_measured, row.kernel, row.took_s = predict.hidden(timeline), run.kernel, round(run.took_s, 1)
    for name, value in run.sensed.items():
        setattr(row, name, value)
    row.planned_hbm_measured, row.planned_host_measured = run.touched_bytes["hbm"], run.touched_bytes["host"]
    took = predict.durations(timeline) | {("step", "external"): round(float(np.median(beside(run))))}
    row.kinds = [[kind, stream, ns, took.pop((kind, stream), 0)] for kind, stream, ns, _ in row.kinds] + [[*key, 0, ns] for key, ns in took.items()]
    memory = run.memory_bytes
    row.states_measured = memory["states"]
    if "peak" in memory:
        row.workspace_measured, row.arguments_measured = calibration.spent(schedule, memory)
        row.reserved_measured = memory["reserved"]
    return timeline
