"""fpdt validate: on ranks that answer at once with made-up times, what it writes, resumes and forgives; and once for real, on CPU."""
from __future__ import annotations

import dataclasses
import json

import pytest

from engine import calibrate, probe
from engine.arenas import planned_bytes
from engine.worker import Job, Run
from experiments import cli
from experiments.validate import calibration, case, predict, rows, run
from experiments.validate.calibration import Profile, band, covering, crossed, jobs
from experiments.validate.case import SPACES, Case
from experiments.validate.pool import Pool
from experiments.validate.rows import Row
from sim import text
from sim.build.step import build
from sim.errors import RankLost, UserError
from sim.machine import machine
from sim.metrics import peak_bytes, reserved_bytes
from sim.model import model
from sim.simulate import simulate
from sim.strategy import Strategy
from tests.sim.tiny import tiny_machine

SLOW = {k: {"fixed_ns": 1000, "ns_per_gflop": 1_000_000, "ns_per_MB": 2000, "source": "assumed: a test"} for k in (
    "qkv", "attn", "attn.causal", "attn+merge", "attn+merge.causal", "proj", "ffn", "ce", "ffn_bwd", "proj_bwd", "q_bwd", "kv_bwd", "offload", "reload",
    *(f"attn_bwd{merged}{causal}" for merged in ("", "+merge", "+merge+merge") for causal in ("", ".causal")), "ext_embed", "ext_optimizer")}
TRUTH = dataclasses.replace(tiny_machine(), fits=SLOW)
"""How the made-up machine really is."""


def answer(job: Job, late: float = 1.0) -> Run:
    """What ranks of that machine say, if steps without tracing take `late` times what they should."""
    schedule = text.parse(job.schedule)
    timeline = simulate(schedule, Strategy(sp=schedule.P, chunk=schedule.chunk, zero=job.zero), TRUTH)
    ns, spans = int(timeline.end_ns.max()), timeline.spans()
    traced = [step for step in range(1, job.steps) if step % job.trace_every == 1]
    return Run(step_ns=[10 * ns] + [ns if step in traced else round(ns * late) for step in range(1, job.steps)], traces={step: spans for step in traced},
               touched_bytes={space: planned_bytes(schedule, space) for space in ("hbm", "host")}, memory_bytes={"states": 16 * schedule.model.params} if job.footprint else {})


class Fake:
    """Stands in for a Pool: counts jobs, and fails those that it is told to."""

    late = 1.0

    def __init__(self) -> None:
        self.calibrated, self.done, self.failing = 0, [], lambda number: None

    def __call__(self, device: str) -> "Fake":
        return self

    def do(self, P: int, jobs: list[Job], tick=None, pin=None) -> list[Run]:
        assert all(job.lr == 0 for job in jobs)  # else what a GPU draws changes from step to step
        if len(jobs) > 1:
            self.calibrated += 1
            return [answer(job) for job in jobs]
        self.done.append(jobs[0])
        if error := self.failing(len(self.done) - 1):
            raise error
        return [answer(jobs[0], self.late)]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass


@pytest.fixture
def fake(monkeypatch) -> Fake:
    made = Fake()
    monkeypatch.setattr(run, "Pool", made)
    monkeypatch.setattr(run, "microbenchmarks", lambda bar: lambda plan: [])
    monkeypatch.setattr(probe, "best_gemm_TFLOPS", lambda *_: 1.0)
    monkeypatch.setattr(probe, "launch_ns", lambda *_: 0.0)
    return made


def go(out, **options) -> bool:
    return run.validate(**{"count": 6, "gpus": 1, "out": out} | options)


def table(out) -> list[Row]:
    return rows.load(out / "rows.csv", Row)


def test_a_machine_that_does_as_its_curves_say_passes(fake, tmp_path, capsys, monkeypatch):
    """Its untraced steps take 1% more than its spans: errors of -1%, in a band that only repeats make (none here), so the band's bars fail."""
    fake.late = 1.01
    assert go(tmp_path) is False
    done = table(tmp_path)
    assert [row.number for row in done] == list(range(6)) and fake.calibrated == 1 and len(fake.done) == 6
    for row in done:
        assert row.error == pytest.approx(1 / 1.01 - 1, abs=2e-3) and len(row.steps_s) == 4 and row.traced_s < row.measured_s == row.p05_s == row.p95_s
        assert row.planned_hbm_predicted == row.planned_hbm_measured > 0 and row.states_measured == row.states_predicted and row.workspace_measured is None
        assert (row.hidden_predicted is None) == (row.planned_host_predicted == 0) == (not row.offload)
        assert row.predicted_s == row.alone_s == row.factor_s and row.profile == "S1" and row.kinds
        assert [k for k in row.kinds if abs(k[2] - k[3]) > 2e-3 * k[2] + 10] == []
    record = json.loads((tmp_path / "validate.json").read_text())
    missed = [bar["name"] for bar in record["bars"] if bar["holds"] is False]
    assert missed == ["steps inside the predicted 5-95% band"] and record["holds"] is False
    assert list(record["sessions"]) == ["S1"] and record["sessions"]["S1"]["provenance"] == probe.provenance()
    assert (tmp_path / "scatter.png").read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "Where errors come from" in out and out.count("MISSED") == 1
    assert [c.label for c in rows.load(tmp_path / "grid.csv", Case)] == [c.label for c in rows.load(tmp_path / "grid.csv", Case) if c.device == "cpu"]


def test_predictions_are_on_disk_before_anything_runs(fake, tmp_path):
    def check(number: int) -> None:
        assert len(rows.load(tmp_path / "predicted.csv", Row)) == 6 == len(rows.load(tmp_path / "grid.csv", Case))
        assert len(table(tmp_path)) == number, "each row is saved at once"

    fake.failing = check
    go(tmp_path)
    predicted = rows.load(tmp_path / "predicted.csv", Row)
    assert [row.predicted_s for row in predicted] == [row.predicted_s for row in table(tmp_path)] and {row.measured_s for row in predicted} == {None}


def test_it_goes_on_where_it_was_stopped(fake, tmp_path, monkeypatch):
    """On the same day with the same profile; on another with a new one, and rows say which."""
    def stop(number: int):
        return KeyboardInterrupt() if number == 2 else None

    fake.failing = stop
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path)
    first = table(tmp_path)
    assert len(first) == 2 and fake.calibrated == 1
    fake.failing = lambda number: KeyboardInterrupt() if number == 5 else None
    with pytest.raises(KeyboardInterrupt):
        go(tmp_path)
    assert fake.calibrated == 1 and len(table(tmp_path)) == 4
    monkeypatch.setattr(probe, "provenance", lambda: "another day")
    fake.failing = lambda number: None
    go(tmp_path)
    done = table(tmp_path)
    assert done[:2] == first and [row.profile for row in done] == ["S1"] * 4 + ["S2"] * 2 and fake.calibrated == 2
    assert [row.number for row in done] == list(range(6)) and len(fake.done) == 8
    before = rows.load(tmp_path / "predicted.csv", Row)
    assert [(row.number, row.profile, row.predicted_s) for row in before] == [(row.number, row.profile, row.predicted_s) for row in done]
    go(tmp_path)
    assert len(fake.done) == 8 and fake.calibrated == 2, "nothing is left to run"


def test_machines_share_a_grid_that_was_drawn_before(fake, tmp_path, capsys, monkeypatch):
    """Drawn for two ranks by a machine's file; where one can run, half of it is done, and the other half where two can, for which nothing else is calibrated."""
    out, asked = tmp_path / "shared", {"seed": 3, "gpus": 2, "hbm_bytes": 1 << 34, "host_bytes": 1 << 34, "out": tmp_path / "shared"}
    monkeypatch.setattr(run, "_places", lambda device: (1, 1))
    with pytest.raises(UserError, match="2 ranks want a GPU each, this node has 1; try --gpus 1, or draw the grid first with --plan MACHINE --out "):
        go(**asked)
    assert not out.exists()
    cases = run.plan(TRUTH, **asked, count=8)
    assert rows.load(out / "grid.csv", Case) == cases and [sum(case.P == P for case in cases) for P in (1, 2)] == [4, 4]
    with pytest.raises(UserError, match="has a grid already; go on with it without --plan, or name another folder"):
        run.plan(TRUTH, **asked, count=8)
    for places, ranks, left, calibrated in ((1, {1}, 4, 1), (1, {1}, 4, 1), (2, {1, 2}, 0, 2)):
        monkeypatch.setattr(run, "_places", lambda device, places=places: (places, places))
        capsys.readouterr()
        holds, said = go(**asked, count=8), " ".join(capsys.readouterr().out.split())
        record = json.loads((out / "validate.json").read_text())
        assert record["drawn"] == {"machine": TRUTH.name, "command": ""}
        assert {row.P for row in table(out)} == ranks and len(table(out)) == 8 - left == len(fake.done) and record["left"] == left and fake.calibrated == calibrated
        assert ("4 configurations are left, which want 2 GPUs; run the same command where they are." in said) == (left > 0)
        assert holds == record["holds"] and not (holds and left)


def test_a_configuration_that_fails_is_a_row(fake, tmp_path, capsys):
    fake.failing = lambda number: UserError("rank 0 ran out of GPU memory; use a smaller chunk") if number in (0, 3, 4) else None
    assert go(tmp_path) is False
    assert [row.reason for row in table(tmp_path)] == ["rank 0 ran out of GPU memory; use a smaller chunk" if n in (0, 3, 4) else "" for n in range(6)]
    assert {row.measured_s is None for row in table(tmp_path) if row.reason} == {True}
    assert "0 did not run: rank 0 ran out of GPU memory" in capsys.readouterr().out
    assert json.loads((tmp_path / "validate.json").read_text())["bars"][0] == {"name": "configurations that did not run", "value": 3, "rule": "at most 0", "holds": False}


def test_three_in_a_row_end_the_run(fake, tmp_path):
    fake.failing = lambda number: RankLost("rank 1 was killed by SIGKILL") if number else None
    with pytest.raises(RankLost, match="^3 configurations in a row did not run, the last: rank 1 was killed by SIGKILL$"):
        go(tmp_path)
    assert [bool(row.reason) for row in table(tmp_path)] == [False, True, True, True]


@pytest.mark.parametrize("change, why", [
    (lambda lines: [lines[0], lines[1].replace("0,0,", "0,1,", 1), *lines[2:]], "row 0 is not the grid's"),
    (lambda lines: [lines[0].replace("measured_s,", "gone_s,", 1), *lines[1:]], "is no table that fpdt validate wrote"),
    (lambda lines: [lines[0], lines[1][:40]], "a line ends early"),
    (lambda lines: [lines[0], "9" * 200_000], "is no table that fpdt validate wrote"),
], ids=("another grid's", "another version's", "cut short", "too long a field"))
def test_rows_that_were_changed_are_refused(fake, tmp_path, change, why):
    go(tmp_path)
    lines = (tmp_path / "rows.csv").read_text().splitlines()
    (tmp_path / "rows.csv").write_text("\n".join(change(lines)) + "\n")
    with pytest.raises(UserError, match=why) as error:
        go(tmp_path)
    assert "\n" not in str(error.value) and len(fake.done) == 6


def test_a_row_without_a_measurement_or_a_reason_is_refused(fake, tmp_path):
    go(tmp_path)
    done = table(tmp_path)
    done[2].measured_s = None
    rows.save(tmp_path / "rows.csv", done)
    with pytest.raises(UserError, match="row 2 has neither a whole measurement nor a reason; remove it, and it is measured anew"):
        go(tmp_path)
    rows.save(tmp_path / "rows.csv", done[:2] + done[3:])
    go(tmp_path)
    assert len(fake.done) == 7 and len(table(tmp_path)) == 6


def test_an_error_without_words_is_a_reason_too(fake, tmp_path):
    fake.failing = lambda number: RuntimeError("\nno room") if number == 1 else RuntimeError() if number == 3 else None
    go(tmp_path)
    assert [row.reason for row in table(tmp_path)] == ["", "no room", "", "RuntimeError", "", ""]


@pytest.mark.parametrize("record", ("[" * 100_000, '{"inputs": {}, "sessions": 3}', '{"inputs": {}, "sessions": {"S1": 3}}', None), ids=("brackets", "no sessions", "no session", "a folder"))
def test_a_record_of_another_make_is_refused(fake, tmp_path, record):
    path = tmp_path / "validate.json"
    path.mkdir() if record is None else path.write_text(record)
    with pytest.raises(UserError, match="is no record of fpdt validate"):
        go(tmp_path)


def test_a_folder_of_another_run_is_refused(fake, tmp_path):
    go(tmp_path)
    with pytest.raises(UserError, match="holds a run with --seed 0 --count 6; give the same options, or another folder with --out"):
        go(tmp_path, seed=1, count=7)
    (tmp_path / "validate.json").write_text("[]")
    with pytest.raises(UserError, match="is no record of fpdt validate"):
        go(tmp_path)


def test_a_table_that_is_not_ours_is_not_written_over(fake, tmp_path):
    (tmp_path / "grid.csv").write_text("hi\n")
    with pytest.raises(UserError, match="holds a grid without its validate.json; put that back, or name another folder"):
        go(tmp_path)
    with pytest.raises(UserError, match="has a grid already"):
        run.plan(TRUTH, out=tmp_path)
    assert (tmp_path / "grid.csv").read_text() == "hi\n"
    go(tmp_path / "ours")
    (tmp_path / "ours" / "grid.csv").write_text("hi\n")
    with pytest.raises(UserError, match="grid.csv is no table that fpdt validate wrote .its first line names other columns.; name another folder"):
        go(tmp_path / "ours")


@pytest.mark.parametrize("old, new, said", (
    ("demo,", "llama3-8b,", "configuration 0 has model llama3-8b, which is not of this grid"), (",1,256,fp32,1,", ",1,256,fp32,,", "configuration 0 has P None,"),
    (",1,256,fp32,1,", ",1,256,fp32,2,", "configuration 0 has P 2,"), ("0,0,demo", "5,0,demo", "configuration 0 has number 5,"), ("fp32", "fp8", "has dtype fp8,"),
    (",cpu", ",cuda", "has device cuda,"), (",cpu\n", ",cpu\n0,0,demo,1,256,fp32,1,1024,256,3,1,query-up,o,cpu\n", "has number 0|has offload 3"),
))
def test_a_grid_that_was_changed_is_refused(old, new, said, fake, tmp_path):
    given = {"gpus": 1, "count": 2, "hbm_bytes": 1 << 34, "host_bytes": 1 << 34, "out": tmp_path}
    run.plan(TRUTH, **given)
    good = (tmp_path / "grid.csv").read_text()
    assert old in good
    (tmp_path / "grid.csv").write_text(good.replace(old, new, 1))
    with pytest.raises(UserError, match=said) as refused:
        run.validate(**given)
    assert "; put the file back as it was, or name another folder with --out" in str(refused.value) and not fake.calibrated
    (tmp_path / "grid.csv").write_text(good[:good.rindex("1,0,demo")])
    with pytest.raises(UserError, match="grid.csv has 1 configurations of 2; put the file back"):
        run.validate(**given)


def test_a_plan_that_was_killed_binds_nobody_and_one_that_was_not_tells_its_ranks(fake, tmp_path, monkeypatch):
    given = {"count": 4, "hbm_bytes": 1 << 34, "host_bytes": 1 << 34, "out": tmp_path}
    run.plan(TRUTH, **given, seed=1, gpus=2)
    (tmp_path / "grid.csv").unlink()  # its record is written first
    cases = run.plan(TRUTH, **given, seed=4, gpus=2)
    monkeypatch.setattr(run, "_places", lambda device: (1, 1))
    run.validate(**given, seed=4)  # drawn for two, said by nobody
    assert len(table(tmp_path)) == sum(case.P == 1 for case in cases) and json.loads((tmp_path / "validate.json").read_text())["inputs"]["ranks"] == [1, 2]


def test_a_grid_for_gpus_is_not_gone_on_with_on_a_cpu(fake, tmp_path):
    run.plan(dataclasses.replace(machine("a100-80g-sxm"), name="a"), count=4, budget_min=9, gpus=1, host_bytes=1 << 37, out=tmp_path)
    with pytest.raises(UserError, match="holds a grid for cuda, this is cpu; name another folder with --out"):
        go(tmp_path)
    with pytest.raises(UserError, match="holds a run with --count 4 --budget 9 --host 128GiB; give the same options"):
        run.Record(tmp_path, run.Asked("cuda", 0, 6, None, 1, {"hbm_bytes": None, "host_bytes": None}).inputs, "")


@pytest.mark.parametrize("arguments, line", [
    ("--budget 0", "--budget 0.0 must be a positive number; try --budget 25"),
    ("--plan=", "unknown machine ''; closest: a100-40g-sxm, a100-80g-sxm, h100-80g-sxm, h200-141g-sxm, h200-1gpu"),
    ("--plan a100", "unknown machine 'a100'; closest: a100-80g-sxm, a100-40g-sxm"),
    ("--hbm 80", "hbm_bytes=80 as given is less than a MiB; sizes need a unit, try 80GiB"),
    ("--plan a100-80g-sxm --hbm 1GiB", "gpt-2.7b with 1 layers on 1 ranks fits at no S from 16384 on; give the memory that there is by --hbm and --host"),
    ("--plan a100-80g-sxm --budget 0.5 --count 4", "4 configurations take 1 min at least, the budget is 0.5; try --budget 1, or fewer by --count"),
])
def test_errors(arguments, line, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as stop:
        cli.main(["validate", *arguments.split()])
    assert (stop.value.code, capsys.readouterr().err) == (2, f"fpdt: {line}\n") and not list(tmp_path.iterdir())


def test_cross_validation_finds_no_error_where_curves_are_lines():
    space, made = SPACES["cpu"], []
    for strategy in covering(space, "demo", 1, "cpu"):
        made += calibrate.schedules(case.shapes("demo", 1, 256), 1, "fp32", strategy, "cpu")
    exact = [answer(job) for job in jobs(made, "cpu")]
    assert crossed(TRUTH, made, exact) == pytest.approx([1.0] * len(made), rel=2e-3)
    late = [answer(job, 1.1 if s.chunk == 768 else 1.0) for s, job in zip(made, jobs(made, "cpu"))]
    found = dict(zip(sorted(s.chunk for s in made), crossed(TRUTH, made, late)))
    assert found == pytest.approx({384: 1.0, 768: 1.1, 1536: 1.0, 3072: 1.0}, rel=2e-3)


def test_two_strategies_have_every_op_of_the_grid():
    chosen = covering(SPACES["cuda"], "llama3-8b", 2, "cuda")
    assert [(s.save, s.order, s.offload) for s in chosen] == [("all", "query-up", True), ("qkvo", "query-down", True)]


def test_a_band_holds_every_residual_with_every_repeat():
    """Ratios 0.9 to 1.1 and repeats of 1.0 alone: the percentiles of 21 numbers; repeats widen it."""
    one = Profile(TRUTH, [0.9 + 0.01 * k for k in range(21)], [1.0])
    assert band([one]) == pytest.approx((0.91, 1.09))
    low, high = band([one, Profile(TRUTH, [1.0], [0.9, 1.1])])
    assert low < 0.91 and high > 1.09


def test_a_profile_is_a_machines_file(tmp_path):
    made = Profile(TRUTH, [1.0, 1.01], [0.99])
    made.save(tmp_path / "S1" / "demo-P1.json")
    read = Profile.load(tmp_path / "S1" / "demo-P1.json")
    assert (read.ratios, read.repeats) == ([1.0, 1.01], [0.99]) and machine(tmp_path / "S1" / "demo-P1.json").fits == SLOW
    for residuals in ({}, {"ratios": [], "repeats": [1.0]}, {"ratios": ["x"], "repeats": [1.0]}, {"ratios": [1.0], "repeats": [float("nan")]}):
        (tmp_path / "S1" / "demo-P1.residuals.json").write_text(json.dumps(residuals))
        with pytest.raises(UserError, match="is no profile of fpdt validate .*; remove it, and it is measured anew"):
            Profile.load(tmp_path / "S1" / "demo-P1.json")


def test_reserved_memory_is_told_on_gpus():
    """A pool a stream; and what was measured falls into workspace and arguments, cuBLAS's pieces counting as workspace."""
    one = Case(0, 0, "demo", 1, 1 << 16, "bf16", 1, 2048, 512, True, 2, "query-up", "qkvo", "cuda")  # logits are large, and gone when gradients are most
    schedule = one.schedule()
    row, timeline = predict.row(one, schedule, Profile(TRUTH, [1.0], [1.0]), "S1", (1, 1))
    assert row.reserved_predicted == reserved_bytes(timeline) > 1.01 * peak_bytes(timeline, "hbm")
    memory = {"peak": schedule.arena_bytes("hbm") + 5000 + 1000 + 200, "states": 5000, "workspace": 936, "blas": 64}
    assert calibration.spent(schedule, memory) == (1000, 200)


def test_rivals_take_contention_away_or_make_it_one_number():
    spread = {"spread": {"compute": [0.8, 0.9], "h2d": [0.7, 0.7]}, "source": "measured"}
    assert predict.one_factor({"compute": 0.9, "h2d": 0.7} | spread) == {"compute": 0.8, "h2d": 0.8} | spread
    slow = dataclasses.replace(TRUTH, slowdown={"compute|h2d": {"compute": 0.5, "h2d": 0.7, "source": "assumed: a test"}})
    one = Case(0, 0, "demo", 1, 256, "fp32", 1, 2048, 512, True, 2, "query-up", "qkvo", "cpu")
    row, _ = predict.row(one, one.schedule(), Profile(slow, [1.0], [1.0]), "S1", (0.9, 1.2))
    assert row.predicted_s > row.factor_s > row.alone_s and (row.low_s, row.high_s) == (0.9 * row.predicted_s, 1.2 * row.predicted_s)
    assert row.arguments_predicted > 0 and row.workspace_predicted > 0 and row.states_predicted == 16 * one.shapes.params and row.reserved_predicted is None


def test_ranks_that_failed_are_started_anew(monkeypatch):
    started = []

    class Ranks:
        def __init__(self, P: int, device: str) -> None:
            started.append(P)
            self.P, self.ended = P, None

        def do(self, jobs, tick, pin):
            if jobs == ["fail"]:
                raise UserError("no")
            return [f"{job} on {self.P}" for job in jobs]

        def __enter__(self):
            return self

        def __exit__(self, kind, *_):
            ended.append((self.P, kind))

    ended: list = []
    monkeypatch.setattr("experiments.validate.pool.Ranks", Ranks)
    with Pool("cpu") as pool:
        assert pool.do(1, ["a"]) == ["a on 1"] and pool.do(2, ["b"]) == ["b on 2"] and pool.do(1, ["c"]) == ["c on 1"]
        with pytest.raises(UserError, match="no"):
            pool.do(2, ["fail"])
        assert started == [1, 2] and ended == [(2, UserError)]
        assert pool.do(2, ["d"]) == ["d on 2"] and started == [1, 2, 2]
    assert ended == [(2, UserError), (1, None), (2, None)]


def test_for_real_on_cpu(tmp_path, monkeypatch, capsys):
    """Calibrates, draws two configurations, runs them and judges; what a busy machine's times come to is no matter."""
    monkeypatch.setitem(calibrate.CHUNKS, "cpu", (96, 192))
    monkeypatch.setattr(calibration, "STEPS", 3)
    monkeypatch.setitem(run.SPACES, "cpu", dataclasses.replace(SPACES["cpu"], seq=(1024, 1024)))
    with pytest.raises(SystemExit) as stop:
        cli.main(["validate", "--gpus", "1", "--count", "2", "--out", str(tmp_path)])
    done, record = table(tmp_path), json.loads((tmp_path / "validate.json").read_text())
    assert [row.reason for row in done] == ["", ""] and stop.value.code == (0 if record["holds"] else 1)
    for row in done:
        assert row.planned_hbm_measured == row.planned_hbm_predicted and row.planned_host_measured == row.planned_host_predicted
        assert row.states_measured == row.states_predicted and 0.05 < row.predicted_s / row.measured_s < 20 and row.kernel == "torch CPU flash"
        assert {(kind, stream) for kind, stream, predicted, measured in row.kinds if predicted and measured} >= {("attn", "compute"), ("ffn_bwd", "compute"), ("optimizer", "external")}
    assert "2 configurations in 1 groups" in capsys.readouterr().out


@pytest.mark.parametrize("card, dtype, peak", (("NVIDIA A100-SXM4-40GB", "bf16", 312), ("NVIDIA H200", "bf16", 989), ("NVIDIA H200", "fp32", 55.5), ("NVIDIA T4", "bf16", 55.5)))
def test_a_known_cards_mfu_is_a_share_of_its_published_peak(card, dtype, peak, monkeypatch):
    """In the dtype it is published for; else of the best product of the calibration. What is priced is measured either way."""
    monkeypatch.setattr(probe, "gpu", lambda: card)
    monkeypatch.setattr(probe, "best_gemm_TFLOPS", lambda *_: 55.5)
    monkeypatch.setattr(probe, "launch_ns", lambda *_: 0.0)
    monkeypatch.setattr(probe, "capacities", lambda P, device, cpu=probe.capacities: cpu(P, "cpu"))
    m = model("demo", layers=1)
    made = [build(m, Strategy(chunk=chunk), 2 * chunk, dtype) for chunk in (256, 512)]
    found = calibrate.profile(m, 1, dtype, made, [answer(Job(text.show(s), steps=2, trace_every=1)) for s in made], None, "cuda")
    assert (found["peak_TFLOPS"], found["gemm_TFLOPS"], found["head_dim"]) == (peak, 55.5, 32)
    assert found.numbers["peak_name"]["value"] == ("published dense bf16" if peak != 55.5 else f"best GEMM of the calibration ({dtype}, one GPU)")
