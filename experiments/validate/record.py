"""Record: what was asked for, and validate.json, which says so beside the grid and to whoever goes on with it."""
from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from engine import probe
from experiments.validate import bars, grid, report, rows
from experiments.validate.case import SPACES, Case
from experiments.validate.rows import Row
from sim.errors import UserError
from sim.files import write

COUNT, BUDGET_MIN = {"cuda": 64, "cpu": 8}, {"cuda": 25.0, "cpu": 3.0}
RANKS = (1, 2, 4, 8)
OPTIONS = {"seed": "--seed", "count": "--count", "budget_min": "--budget", "ranks": "--gpus", "hbm_bytes": "--hbm", "host_bytes": "--host"}
"""What was asked for -> the option that says so."""


class Asked:
    """What was asked for: all that a grid depends on but the machine."""

    def __init__(self, device: str, seed: int, count: int | None, budget_min: float | None, gpus: int, given: dict) -> None:
        self.device, self.space, self.given = device, SPACES[device], given
        self.ranks = tuple(P for P in RANKS if P <= gpus)
        self.seed, self.count, self.budget_min = seed, count or COUNT[device], budget_min or BUDGET_MIN[device]
        self.inputs = {"device": device, "seed": seed, "count": self.count, "budget_min": self.budget_min, "ranks": list(self.ranks), **given, "space": asdict(self.space)}

    def draw(self, price: grid.Cost) -> list[Case]:
        """The grid, on a machine with these prices. Raises UserError."""
        return grid.draw(self.space, self.device, self.seed, self.count, self.ranks, price, self.budget_min * 60)

    def drawn(self, out: Path) -> list[Case]:
        """The grid of a folder; none where there is none. Raises UserError where it is not one that was drawn for this."""
        path, space = out / "grid.csv", self.space
        cases = rows.load(path, Case)
        values = {"model": space.models, "layers": space.layers, "vocab": (space.vocab,), "dtype": (space.dtype,), "P": self.ranks, "chunk": space.chunks, "seq": range(space.seq[0], space.seq[1] + 1),
                  "offload": space.offload, "prefetch": space.prefetch, "order": space.order, "save": space.save, "device": (self.device,), "group": range(self.count)}
        for number, case in enumerate(cases):
            for name, of in (values | {"number": (number,)}).items():
                if type(getattr(case, name)) is not type(of[0]) or getattr(case, name) not in of:
                    raise UserError(f"{path}: configuration {number} has {name} {getattr(case, name)}, which is not of this grid; put the file back as it was, or name another folder with --out")
        if cases and len(cases) != self.count:
            raise UserError(f"{path} has {len(cases)} configurations of {self.count}; put the file back as it was, or name another folder with --out")
        return cases


class Record:
    """validate.json: what was asked for, what the grid was drawn with, and the sessions of calibration that there were."""

    def __init__(self, out: Path, inputs: dict, command: str) -> None:
        """Raises UserError where the folder holds a run of other inputs."""
        self.path, self.out = out / "validate.json", out
        drawn = (out / "grid.csv").exists()
        if drawn and not self.path.exists():
            raise UserError(f"{out} holds a grid without its validate.json; put that back, or name another folder with --out")
        before = earlier(self.path) if self.path.exists() else {"inputs": inputs, "sessions": {}}
        differ = {name: before["inputs"].get(name) for name in inputs if before["inputs"].get(name) != json.loads(json.dumps(inputs[name]))}
        begun = drawn or before["sessions"]  # a plan that was killed has neither
        if begun and "device" in differ:
            raise UserError(f"{out} holds a grid for {differ['device']}, this is {inputs['device']}; name another folder with --out")
        if begun and differ:
            asked = " ".join(_option(name, value) for name, value in differ.items() if name in OPTIONS)
            raise UserError(f"{out} holds a run {f'with {asked}' if asked else 'of another grid'}; give the same options, or another folder with --out")
        kept = {"drawn": before["drawn"]} if drawn and "drawn" in before else {}
        self.data = {"inputs": inputs, "command": command, "sessions": before["sessions"], **kept}
        self.session = ""

    def begin(self) -> Path:
        """The session of this day and machine, and where its profiles are."""
        now = {"provenance": probe.provenance(), "gpus": _gpus()}
        known = self.data["sessions"]
        self.session = next((name for name, session in known.items() if session == now), f"S{len(known) + 1}")
        known[self.session] = now
        self.save()
        return self.out / "profiles" / self.session

    def finish(self, verdict: list[bars.Bar], done: list[Row], left: int) -> None:
        """Adds what came of it."""
        self.data |= {"holds": bars.holds(verdict) and not left, "left": left, "bars": [bar._asdict() for bar in verdict], "rivals": report.rivals(done),
                      "sources": [[*key, share] for key, share in report.sources(done).items()]}
        self.save()

    def save(self) -> None:
        write(self.path, json.dumps(self.data, indent=1) + "\n")


def recorded_gpus(out: Path) -> int | None:
    """The most ranks that a folder's grid was drawn for; None where there is no grid."""
    return _gpus_of(earlier(out / "validate.json")["inputs"]) if (out / "grid.csv").exists() and (out / "validate.json").exists() else None


def recorded(out: Path) -> tuple[Asked, dict[str, dict]]:
    """What a folder's grid was drawn for, and its sessions by name. Raises UserError where nothing says so."""
    said = earlier(out / "validate.json")
    device, count, gpus = said["inputs"].get("device"), said["inputs"].get("count"), _gpus_of(said["inputs"])
    if device not in tuple(SPACES) or type(count) is not int or gpus is None:
        raise UserError(f"{out / 'validate.json'} does not say which grid was drawn; put it back as it was, or name another folder with --out")
    return Asked(device, 0, count, None, gpus, {}), said["sessions"]


def _gpus_of(inputs: dict) -> int | None:
    ranks = inputs.get("ranks")
    return max((P for P in ranks if P in RANKS), default=None) if isinstance(ranks, list) else None


def earlier(path: Path) -> dict:
    """What a record says. Raises UserError where it is none."""
    try:
        said = json.loads(path.read_text())
        return said | {"inputs": dict(said["inputs"]), "sessions": {name: dict(session) for name, session in said["sessions"].items()}}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} is no record of fpdt validate ({error}); name another folder with --out") from None


def _option(name: str, value) -> str:
    """As it was given on the command line."""
    if name.endswith("_bytes"):
        return f"no {OPTIONS[name]}" if not value else f"{OPTIONS[name]} {value >> 30}GiB" if value % (1 << 30) == 0 else f"{OPTIONS[name]} {value}B"
    return f"{OPTIONS[name]} {value[-1] if name == 'ranks' and value else value}"


def _gpus() -> list[str]:
    import torch

    return [str(torch.cuda.get_device_properties(k).uuid) for k in range(torch.cuda.device_count())]
