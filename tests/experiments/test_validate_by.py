"""fpdt validate --by: another machine's word on rows made up by hand."""
from __future__ import annotations

import io
import json
from dataclasses import replace

import pytest
from rich.console import Console

from experiments import cli
from experiments.validate import rows
from experiments.validate.by import ALL, by
from experiments.validate.case import Case
from experiments.validate.rows import Row
from sim.errors import UserError
from sim.machine import machine
from sim.metrics import times
from sim.simulate import simulate

A100 = machine("a100-80g-sxm")
CASES = [
    Case(0, 0, "gpt-2.7b", 1, 8192, "bf16", 1, 32768, 8192, False, 1, "query-up", "all"),
    Case(1, 0, "gpt-2.7b", 1, 8192, "bf16", 1, 32768, 16384, True, 1, "query-up", "input"),
    Case(2, 1, "llama3-8b", 1, 8192, "bf16", 1, 32768, 8192, False, 1, "query-up", "all"),
    Case(3, 1, "llama3-8b", 1, 8192, "bf16", 1, 32768, 16384, True, 1, "query-up", "input"),
]


def predicted(case: Case, m) -> float:
    return times(simulate(case.schedule(), case.strategy, m))["step_s"]


def folder(path, times_longer: tuple[float | None, ...]):
    """A grid whose configurations took so many times as long as an A100 is predicted to take; None: failed. Said at the time: 7 s."""
    rows.save(path / "grid.csv", CASES)
    done = []
    for case, longer in zip(CASES, times_longer):
        row = Row(**rows.of(case), profile="S1", **dict.fromkeys(rows.NEEDED, 7.0))
        done.append(replace(row, reason="out of memory") if longer is None else replace(row, measured_s=longer * predicted(case, A100)))
    rows.save(path / "rows.csv", done)
    (path / "validate.json").write_text(json.dumps({"inputs": {"device": "cuda", "count": len(CASES), "ranks": [1]}, "sessions": {"S1": {"provenance": "a card of 2030"}}}))
    return path


def test_errors_are_the_other_machine_s(tmp_path):
    said = io.StringIO()
    found = by(A100, folder(tmp_path, (0.8, 1.25, 2.0, None)), Console(file=said, width=200))
    assert {name: [round(row.error, 6) for row in mine] for name, mine in found.items()} == {
        ALL: [0.25, -0.2, -0.5], "gpt-2.7b": [0.25, -0.2], "llama3-8b": [-0.5]}
    assert said.getvalue().splitlines()[0] == f"{tmp_path}, measured on a card of 2030"
    assert [line.split() for line in said.getvalue().splitlines()[2:5]] == [
        ["all", "3", "25.0%", "-50.0%", "-15.0%", "100.0%", "0.0%"],
        ["gpt-2.7b", "2", "22.5%", "+25.0%", "+2.5%", "100.0%", "0.0%"],
        ["llama3-8b", "1", "50.0%", "-50.0%", "-50.0%", "n/a", "n/a"],
    ]
    assumed = said.getvalue().splitlines()[5:]
    assert assumed[0] == "Assumed:" and assumed.count("- attention: measured at head_dim 128, taken for 80; most kernels are slower there") == 1


def test_an_order_that_was_told_wrong_costs_what_its_choice_takes_longer(tmp_path):
    said = io.StringIO()
    by(A100, folder(tmp_path, (4.0, 1.0)), Console(file=said, width=200))
    chosen, best = (predicted(case, A100) for case in CASES[:2])
    assert chosen < best < 4 * chosen
    assert said.getvalue().splitlines()[2].split()[-2:] == ["0.0%", f"{4 * chosen / best - 1:.1%}"]


def test_the_regret_is_the_worst_group_s(tmp_path):
    said = io.StringIO()
    by(A100, folder(tmp_path, (1.0, 1.0, 4.0, 1.0)), Console(file=said, width=200))
    chosen, best = (predicted(case, A100) for case in CASES[2:])
    assert chosen < best < 4 * chosen
    assert said.getvalue().splitlines()[2].split()[-2:] == ["50.0%", f"{4 * chosen / best - 1:.1%}"]


@pytest.mark.parametrize("file, change, line", (
    ("rows.csv", lambda text: text.replace("query-down", "query-up").replace("16384,true,1,query-up,input", "8192,true,1,query-up,input"), "row 1 is not the grid's"),
    ("rows.csv", lambda text: text + text.splitlines()[1] + "\n", "row 0 stands there twice"),
    ("grid.csv", lambda text: text.replace("bf16", "fp8", 1), "configuration 0 has dtype fp8, which is not of this grid"),
    ("grid.csv", lambda text: text.replace("gpt-2.7b,1,", "gpt-2.7b,,", 1), "configuration 0 has layers None, which is not of this grid"),
    ("validate.json", lambda text: text.replace("cuda", "tpu"), "does not say which grid was drawn; put it back as it was"),
))
def test_an_edited_file_gets_one_line(file, change, line, tmp_path):
    path = folder(tmp_path, (1.0,) * 4) / file
    assert (text := path.read_text()) != change(text)
    path.write_text(change(text))
    with pytest.raises(UserError, match=line):
        by(A100, tmp_path)


@pytest.mark.parametrize("field, value", [("measured_s", value) for value in (0.0, -1.0, float("nan"), float("inf"), 1e-320)] + [("kinds", None), ("kinds", [1]), ("p95_s", None)])
def test_a_row_that_says_no_time_gets_one_line(field, value, tmp_path):
    folder(tmp_path, (1.0,) * 4)
    done = rows.load(tmp_path / "rows.csv", Row)
    rows.save(tmp_path / "rows.csv", [replace(row, **{field: value} if row.number == 2 else {}) for row in done])
    with pytest.raises(UserError, match="row 2 has neither a whole measurement nor a reason; remove it, and it is measured anew"):
        by(A100, tmp_path)


@pytest.mark.parametrize("longer", ((None,) * 4, ()))
def test_a_folder_without_measurements_gets_one_line(tmp_path, longer):
    with pytest.raises(UserError, match="has no configuration that was measured; name the folder of a run of fpdt validate with --out"):
        by(A100, folder(tmp_path, longer))


def test_a_machine_of_another_kind_gets_one_line(tmp_path):
    with pytest.raises(UserError, match="was measured on cuda, plain is a machine of kind cpu; give --by one of kind cuda"):
        by(replace(A100, name="plain", kind="cpu"), folder(tmp_path, (1.0,)))


def test_the_command_runs_nothing(tmp_path, capsys):
    folder(tmp_path, (1.0, 1.0))
    before = sorted(path.name for path in tmp_path.iterdir())
    with pytest.raises(SystemExit) as end:
        cli.main(["validate", "--by", "a100-80g-sxm", "--out", str(tmp_path)])
    assert end.value.code == 0
    assert capsys.readouterr().out.splitlines()[2].split() == ["all", "2", "0.0%", "+0.0%", "+0.0%", "100.0%", "0.0%"]
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize("options, line", (
    ("--plan h200-1gpu", "--plan draws a grid and --by judges one that was measured; give one of them"),
    ("--seed 3 --gpus 2 --host 1TiB", "--by draws nothing, its rows are those of --out; leave out --seed --gpus --host"),
))
def test_options_that_say_nothing_here_get_one_line(options, line, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main(["validate", "--by", "h200-1gpu", "--out", str(tmp_path), *options.split()])
    assert (end.value.code, capsys.readouterr().err) == (2, f"fpdt: {line}\n")
