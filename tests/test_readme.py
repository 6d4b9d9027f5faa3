"""README: each fpdt command in a bash block runs, and prints what the text block below it shows ("..." stands for anything)."""
import re
import shlex
import shutil
from pathlib import Path

import pytest

from experiments import cli

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
MEASURED = "results/bars/h200/validate"
"""A folder that a command reads."""
BLOCKS = re.findall(r"```bash\n(.*?)```(?:\n```text\n(.*?)```)?", README, re.DOTALL)


def test_commands(tmp_path, monkeypatch, capsys):
    shutil.copytree(ROOT / MEASURED, tmp_path / MEASURED)
    monkeypatch.chdir(tmp_path)
    for commands, shown in BLOCKS:
        for command in commands.splitlines():
            program, *arguments = shlex.split(command)
            assert program == "fpdt", f"only fpdt commands stand in bash blocks: {command}"
            with pytest.raises(SystemExit) as stop:
                cli.main(arguments)
            assert stop.value.code == 0, command
        said = capsys.readouterr()
        assert said.err == "" and matches(shown, said.out), f"{commands}printed\n{said.out}"


def test_schedule_excerpt(capsys):
    with pytest.raises(SystemExit):
        cli.main("show demo --gpus 2 --seq 1K --chunk 256".split())
    excerpt = re.search(r"```text\n(compute  fwd.*?)```", README, re.DOTALL)[1]
    assert excerpt in capsys.readouterr().out


def test_files_named_in_the_reading_order_exist():
    for name in re.findall(r"`((?:sim|engine|experiments|notebooks|docs)/[\w/.]*)`", README):
        assert (ROOT / name).exists(), name


def matches(shown: str, out: str) -> bool:
    pattern = "".join(".*" if part == "..." else re.escape(part) for part in re.split(r"(\.\.\.)", shown))
    return not shown or re.fullmatch(pattern, out, re.DOTALL) is not None
