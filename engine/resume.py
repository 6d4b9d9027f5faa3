"""Resume: which checkpoints a folder holds, and whether a training may go on from its newest. Who only asks waits for no torch."""
from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path

from sim.errors import UserError
from sim.schedule import Schedule

PART = ".part"
"""How the name of a checkpoint ends that is not whole."""


def done(folder: Path, schedule: Schedule, resume: bool) -> int:
    """Steps of a training that its newest checkpoint in a folder holds; 0 of one that starts. Raises UserError where the folder is another's."""
    found = steps(folder)
    if not resume:
        if found:
            raise UserError(f"{folder} holds a checkpoint of step {found[-1]} already; continue it with --resume, or name another folder")
        return 0
    if not found:
        raise UserError(f"{folder} holds no checkpoint to resume from; start without --resume")
    path = at(folder, found[-1])
    try:
        of = dict(json.loads((path / "of.json").read_text()))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise damaged(path, error) from None
    for name, mine in what(schedule).items():
        if of.get(name) != mine:
            raise UserError(f"{path} is a checkpoint of another training: {name}={of.get(name)}, not {mine}; resume what it is of, or name another folder")
    return found[-1]


def what(schedule: Schedule) -> dict:
    """What a checkpoint must agree on; ranks, ZeRO stage and where things are kept may change."""
    return asdict(schedule.model) | {"S": schedule.seq, "C": schedule.chunk, "dtype": schedule.dtype}


def steps(folder: Path) -> list[int]:
    """The steps whose checkpoints are whole, in order."""
    names = [path.name.removeprefix("step-") for path in folder.glob("step-*")]
    return sorted(int(name) for name in names if name.isdecimal())


def clean(folder: Path) -> None:
    """Removes what killed saves left behind."""
    for part in folder.glob("step-*" + PART):
        shutil.rmtree(part, ignore_errors=True)


def damaged(path: Path, error: BaseException) -> UserError:
    return UserError(f"{path} is damaged ({type(error).__name__}: {' '.join(str(error).split())[:200]}); remove it to resume from the checkpoint before it")


def at(folder: Path, step: int) -> Path:
    return folder / f"step-{step}"
