"""fpdt validate --by: another machine's word on rows made up by hand."""
from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from experiments import cli
from experiments.validate import rows
from experiments.validate.by import ALL, by, predicted
from experiments.validate.case import Case
from experiments.validate.rows import Row
from sim.errors import UserError
from sim.machine import machine

A100 = machine("a100-80g-sxm")
CASES = [
    Case(0, 0, "gpt-2.7b", 1, 8192, "bf16", 1, 32768, 8192, False, 1, "query-up", "all"),
    Case(1, 0, "gpt-2.7b", 1, 8192, "bf16", 1, 32768, 16384, True, 1, "query-up", "input"),
    Case(2, 1, "llama3-8b", 1, 8192, "bf16", 1, 32768, 8192, False, 1, "query-up", "all"),
    Case(3, 1, "llama3-8b", 1, 8192, "bf16", 1, 32768, 16384, True, 1, "query-up", "input"),
]


def folder(path, times_longer: tuple[float | None, ...]):
    """A grid whose configurations took so many times as long as an A100 is predicted to take; None: failed. Said at the time: 7 s."""
    rows.save(path / "grid.csv", CASES)
    done = []
    for case, longer in zip(CASES, times_longer):
        row = Row(**rows.of(case), **dict.fromkeys(rows.NEEDED, 7.0))
        done.append(replace(row, reason="out of memory") if longer is None else replace(row, measured_s=longer * predicted(case, A100)))
    rows.save(path / "rows.csv", done)
    return path


def test_errors_are_the_other_machine_s(tmp_path):
    said = io.StringIO()
    found = by(A100, folder(tmp_path, (0.8, 1.25, 2.0, None)), Console(file=said, width=200))
    assert {name: [round(row.error, 6) for row in mine] for name, mine in found.items()} == {
        ALL: [0.25, -0.2, -0.5], "gpt-2.7b": [0.25, -0.2], "llama3-8b": [-0.5]}
    assert [line.split() for line in said.getvalue().splitlines()[1:]] == [
        ["all", "3", "25.0%", "-50.0%", "-15.0%", "100.0%", "0.0%"],
        ["gpt-2.7b", "2", "22.5%", "+25.0%", "+2.5%", "100.0%", "0.0%"],
        ["llama3-8b", "1", "50.0%", "-50.0%", "-50.0%", "n/a", "n/a"],
    ]


def test_an_order_that_was_told_wrong_costs_what_its_choice_takes_longer(tmp_path):
    said = io.StringIO()
    by(A100, folder(tmp_path, (4.0, 1.0)), Console(file=said, width=200))
    chosen, best = (predicted(case, A100) for case in CASES[:2])
    assert chosen < best < 4 * chosen
    assert said.getvalue().splitlines()[1].split()[-2:] == ["0.0%", f"{4 * chosen / best - 1:.1%}"]


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
    assert capsys.readouterr().out.splitlines()[1].split() == ["all", "2", "0.0%", "+0.0%", "+0.0%", "100.0%", "0.0%"]
    assert sorted(path.name for path in tmp_path.iterdir()) == before
