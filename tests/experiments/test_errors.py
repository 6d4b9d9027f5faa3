"""Bad input: every line of tests/golden/errors.txt is the one line on stderr, with exit code 2 and nothing written.

    python tests/experiments/test_errors.py     writes the file anew from the commands in it; read the difference
"""
import contextlib
import io
import json
import shlex
import tempfile
from pathlib import Path

import pytest

from engine import probe
from experiments import cli
from sim import machine, model, text
from sim.build.step import build
from sim.model import Model
from sim.strategy import Strategy

GOLDEN = Path(__file__).parents[1] / "golden" / "errors.txt"


def cases() -> list[tuple[str, str]]:
    """(command, line below it) pairs of the golden file."""
    lines = GOLDEN.read_text().splitlines()
    return [(line, below) for line, below in zip(lines, lines[1:]) if line.startswith("$ fpdt")]


def odd_heads() -> dict[str, Model]:
    """The presets and a model whose heads suit fewer degrees: 28 query and 4 KV heads."""
    return model.presets() | {"heads-28-4": Model("heads-28-4", "llama", 2, 3584, 28, 4, 128, 4864, 1024)}


def write_inputs() -> None:
    """Schedules and machines with one fault each, in the working folder."""
    good = text.show(build(model.model("demo"), Strategy(chunk=256, sp=2), 1024))
    edits = {
        "unknown-op.txt": ("fwd.attn[1,0] ", "fwd.atn[1,0] "),
        "later-wait.txt": ("wait fwd.offload.kv[0]\n", "wait fwd.offload.kv[3]\n"),
        "missing-wait.txt": ("wait fwd.reload.kv[1,0]\n", "\n"),
        "dropout.txt": ("norm_eps=1e-05", "norm_eps=1e-05 dropout=0.1"),
    }
    for name, (old, new) in edits.items():
        assert old in good, name
        Path(name).write_text(good.replace(old, new, 1))
    numbers = json.loads(machine.presets()["a100-80g-sxm"].read_text())
    for name, change in (("missing-number.json", None), ("negative-number.json", {"value": -5, "source": "assumed: a fault"})):
        faulty = {k: v for k, v in numbers["numbers"].items() if k != "h2d_GBps"} | ({"h2d_GBps": change} if change else {})
        Path(name).write_text(json.dumps(numbers | {"numbers": faulty}))


def run(command: str) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main(shlex.split(command)[2:])
    return stop.value.code


@pytest.mark.parametrize("command, line", cases())
def test_one_line(command, line, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    presets = odd_heads()
    monkeypatch.setattr(model, "presets", lambda: presets)
    monkeypatch.setattr(probe, "memory_bytes", lambda: 1 << 30)
    write_inputs()
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}
    assert run(command) == 2
    assert capsys.readouterr().err == line + "\n"
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_a_drawing_comes_with_a_missing_wait(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_inputs()
    assert run("$ fpdt lint missing-wait.txt") == 2
    arrows = [line for line in capsys.readouterr().out.splitlines() if line.startswith(("------>", "  after"))]
    assert [line.split()[2] for line in arrows] == ["fwd.reload.kv[1,0]", "fwd.attn[1,0]"]


def test_internal_errors_keep_their_traceback(monkeypatch):
    monkeypatch.setattr(cli, "built", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        cli.main(["show", "demo", "--seq", "1K"])


def _regenerate() -> None:
    presets = odd_heads()
    model.presets = lambda: presets
    probe.memory_bytes = lambda: 1 << 30
    written = GOLDEN.read_text()
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        write_inputs()
        for command, below in cases():
            with contextlib.redirect_stderr(io.StringIO()) as error:
                run(command)
            written = written.replace(f"{command}\n{below}\n", f"{command}\n{error.getvalue()}" + "\n" * (not below))
    GOLDEN.write_text(written)


if __name__ == "__main__":
    _regenerate()
