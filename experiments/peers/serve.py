"""The process of one rank that measures rows: python -m experiments.peers.serve CASES DEVICE, under torchrun where there are several.

Of each first the errors at the small size, then the times: the same code, the same kernel. Rank 0 prints lines: `tick DONE OF`, `row JSON`.
"""
from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from engine.serve import pinned, ranked
from engine.worker import Job, backend, emptied
from experiments.peers import inputs
from experiments.peers.case import Case, Place
from experiments.peers.engine import Engine, Handed
from experiments.peers.layers import Weights
from experiments.peers.timing import measure
from sim import text
from sim.schedule import Schedule

ROW, TICK = "row ", "tick "


class Differentiable:
    """Forward and backward of a peer, as a step."""

    def __init__(self, peer, w: Weights, schedule: Schedule, device: torch.device) -> None:
        self.peer, self.w = peer, w
        self.x_TC = inputs.hidden(schedule, device, 1)[peer.positions_T].requires_grad_()
        self.dy_TC = inputs.hidden(schedule, device, 2)[peer.positions_T]
        self.y_TC: torch.Tensor | None = None

    def clear(self) -> None:
        """Gradients are made anew."""
        self.y_TC = None
        getattr(self.peer, "issued_ns", []).clear()
        for t in (self.x_TC, *self.w.values(), *getattr(self.peer, "own", ())):
            t.grad = None

    @property
    def dx_TC(self) -> torch.Tensor:
        return self.x_TC.grad

    def forward(self) -> None:
        self.y_TC = self.peer(self.x_TC)

    def backward(self) -> None:
        self.y_TC.backward(self.dy_TC)


def make(row: str, schedule: Schedule, part: str, w: Weights, place: Place):
    """The peer of a row."""
    if row in ("engine", "resident"):
        return Engine(schedule, part, w, place)
    if row == "ulysses":
        from experiments.peers.ulysses import Ulysses

        return Ulysses(schedule, part, w, place)
    if row == "ring":
        from experiments.peers.ring import Ring

        return Ring(schedule, part, w, place)
    from experiments.peers.fpdt import Fpdt

    return Fpdt(schedule, part, w, place, offload=row == "deepspeed")


def stepping(peer, w: Weights, schedule: Schedule, device: torch.device) -> "Differentiable | Handed":
    """What is timed of a peer."""
    return (Handed if isinstance(peer, Engine) and schedule.hidden == "host" else Differentiable)(peer, w, schedule, device)


def errors(case: Case, place: Place) -> dict[str, float]:
    """Of y and dx, against fp64, at the small size."""
    schedule = text.parse(case.small)
    w = _leaves(inputs.weights(schedule.model, schedule.dtype, case.part, place.device))
    y_SC, dx_SC = inputs.right(schedule, w, place.device)
    peer = make(case.row, schedule, case.part, w, place)
    try:
        step = stepping(peer, w, schedule, place.device)
        step.clear()
        step.forward()
        step.backward()
        place.backend.settle()
        pairs = {"error_y": (step.y_TC, y_SC), "error_dx": (step.dx_TC, dx_SC)}
        return {name: inputs.error(mine, right, peer.positions_T, place.group) for name, (mine, right) in pairs.items()}
    finally:
        _close(peer)


def times(case: Case, schedule: Schedule, place: Place, tick: Callable[[int, int], None]) -> dict:
    """At the size that was asked for."""
    if case.row == "bound":
        from experiments.peers.bound import Bound

        bound = Bound(schedule, case.part, place)
        return measure(bound, place, case, tick) | {"note": bound.note}
    w = _leaves(inputs.weights(schedule.model, schedule.dtype, case.part, place.device))
    peer = make(case.row, schedule, case.part, w, place)
    try:
        found = measure(stepping(peer, w, schedule, place.device), place, case, tick)
        return found | {"note": peer.note} | (peer.issue() if isinstance(peer, Engine) else {})
    finally:
        _close(peer)


def measured(case: Case, rank: int, group, tick: Callable[[int, int], None], pin: Callable[[int, int], None] = lambda done, total: None) -> dict:
    """A row of the results."""
    torch.set_num_threads(1)
    schedule = text.parse(case.schedule)
    streams, kernel = backend(Job(case.schedule, device=case.device), schedule, rank, pin, group, case.kernel)
    try:
        place = Place(rank, group, streams.device, streams, kernel)
        found = {} if case.row == "bound" or not case.small else errors(case, place)
        emptied(case.device)
        gpu = torch.cuda.get_device_name() if case.device == "cuda" else None
        return found | times(case, schedule, place, tick) | {"kernel": kernel.NAME, "gpu": gpu}
    finally:
        streams.close()


def _leaves(w: Weights) -> Weights:
    return {name: torch.nn.Parameter(t) for name, t in w.items()}


def _close(peer) -> None:
    if hasattr(peer, "close"):
        peer.close()


def main(path: str, device: str) -> None:
    cases = [Case(**case) for case in json.loads(Path(path).read_text())]

    def work(rank: int, group) -> None:
        say = (lambda line: print(line, flush=True)) if rank == 0 else (lambda line: None)
        for case in cases:
            found = measured(case, rank, group, lambda done, total: say(f"{TICK}{done} {total}"), pinned(rank))
            say(ROW + json.dumps(found))
            emptied(case.device)

    ranked(device, work)


if __name__ == "__main__":
    main(*sys.argv[1:])
