"""Checkpoints through torch.distributed.checkpoint: model, optimizer, step and random state, whole or not there at all.

    FOLDER/step-12/     what DCP wrote after 12 steps, and of.json, which says what was trained

A save goes to step-12.part, which gets its name once every rank has written; the last two are kept. DCP reshards, so that a run
resumes on other ranks and at another ZeRO stage. Several nodes need a folder that all of them see.
"""
from __future__ import annotations

import json
import shutil
import warnings
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from engine.resume import PART, at, clean, damaged, done, steps, what
from engine.states import States
from sim.schedule import Schedule

KEPT = 2


class Checkpoints:
    """The checkpoints of one training in a folder. Every rank calls the same methods."""

    def __init__(self, folder: Path, states: States, schedule: Schedule) -> None:
        self.folder, self.states = folder, states
        self.schedule = schedule
        self._alone = states.group is None
        self._first = self._alone or states.group.rank() == 0
        self._gpu = f"cuda-{0 if self._alone else states.group.rank()}"

    def start(self, resume: bool) -> int:
        """Steps already done: those of the newest checkpoint, which is loaded, or none. Raises UserError."""
        newest = done(self.folder, self.schedule, resume)
        return self._load(at(self.folder, newest)) if newest else 0

    def save(self, step: int) -> None:
        """Saves the states after `step` steps, then drops all but the last two checkpoints."""
        whole = at(self.folder, step)
        part = whole.with_name(whole.name + PART)
        if self._first:
            clean(self.folder)
            part.mkdir(parents=True)
            (part / "of.json").write_text(json.dumps(what(self.schedule), indent=1) + "\n")
        self._wait()
        with _quiet():
            dcp.save(self._state(step), checkpoint_id=part, process_group=self.states.group, no_dist=self._alone)
        if self._first:
            part.rename(whole)
            for old in steps(self.folder)[:-KEPT]:
                shutil.rmtree(at(self.folder, old).rename(at(self.folder, old).with_suffix(PART)))
        self._wait()

    def _state(self, step: int) -> dict:
        model, optimizer = get_state_dict(self.states.model, self.states.optimizer)
        return {"model": model, "optimizer": optimizer, "step": step, "rng": self._random()}

    def _load(self, path: Path) -> int:
        state = self._state(0)
        try:
            there = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        except Exception as error:  # whatever unpickling makes of bytes that are not its own
            raise damaged(path, error) from None
        state["rng"] = {name: state["rng"][name] for name in state["rng"] if f"rng.{name}" in there}
        try:
            with _quiet():
                dcp.load(state, checkpoint_id=path, process_group=self.states.group, no_dist=self._alone)
        except dcp.CheckpointException as error:
            raise damaged(path, next((failure for failure, _ in error.failures.values()), error)) from None
        set_state_dict(self.states.model, self.states.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        torch.set_rng_state(state["rng"]["cpu"])
        if self._gpu in state["rng"]:
            torch.cuda.set_rng_state(state["rng"][self._gpu], self.states.device)
        return state["step"]

    def _random(self) -> dict[str, torch.Tensor]:
        """The random state of the CPU, and of this rank's GPU if it trains on one, by name. What another rank or device left is no matter."""
        return {"cpu": torch.get_rng_state()} | ({self._gpu: torch.cuda.get_rng_state(self.states.device)} if self.states.device.type == "cuda" else {})

    def _wait(self) -> None:
        if not self._alone:
            dist.barrier(self.states.group)


@contextmanager
def _quiet():
    """Without DCP's warning that one process is one process."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield
