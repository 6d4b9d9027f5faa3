"""Resume: what a folder of checkpoints holds is told without torch, whatever else lies there."""
from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from engine.resume import clean, done, steps
from sim.errors import UserError
from tests.engine.cases import schedule, tiny

SCHEDULE = schedule(tiny(4, 2, 16, layers=2), 60, 12)
OF = asdict(SCHEDULE.model) | {"S": SCHEDULE.seq, "C": SCHEDULE.chunk, "dtype": SCHEDULE.dtype}


def checkpoint(folder: Path, step: object, of: str = json.dumps(OF)) -> Path:
    path = folder / f"step-{step}"
    path.mkdir()
    (path / "of.json").write_text(of)
    return path


def test_the_newest_counts_and_nothing_else_does(tmp_path):
    for name in (2, 10, "3.part", "²", "x", "", "-1"):
        checkpoint(tmp_path, name)
    assert steps(tmp_path) == [2, 10] and done(tmp_path, SCHEDULE, True) == 10
    clean(tmp_path)
    assert not (tmp_path / "step-3.part").exists() and steps(tmp_path) == [2, 10]
    with pytest.raises(UserError, match="holds a checkpoint of step 10 already; continue it with --resume"):
        done(tmp_path, SCHEDULE, False)


def test_a_folder_without_any_starts_and_cannot_be_resumed(tmp_path):
    assert done(tmp_path, SCHEDULE, False) == 0
    with pytest.raises(UserError, match="holds no checkpoint to resume from; start without --resume"):
        done(tmp_path, SCHEDULE, True)


@pytest.mark.parametrize("of", ("", "[1]", "null", "[" * 200_000), ids=("empty", "a list", "nothing", "too deep"))
def test_what_cannot_be_read_is_damaged(tmp_path, of):
    checkpoint(tmp_path, 1, of)
    with pytest.raises(UserError, match=r"step-1 is damaged \(.*\); remove it to resume from the checkpoint before it"):
        done(tmp_path, SCHEDULE, True)


@pytest.mark.parametrize("name, value", (("S", 61), ("layers", 3), ("dtype", "bf16")))
def test_another_training_s_is_refused(tmp_path, name, value):
    checkpoint(tmp_path, 1, json.dumps(OF | {name: value}))
    with pytest.raises(UserError, match=f"step-1 is a checkpoint of another training: {name}={value}, not {OF[name]}"):
        done(tmp_path, SCHEDULE, True)
