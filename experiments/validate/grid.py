"""Grid: configurations drawn by a seed, log-uniform over their work, each field dealt from a deck so that every value comes as often as any other.

What does not fit the machine is drawn again. Where the whole takes longer than the budget, the upper end of the work comes down until it
does not. The same seed, machine and budget give the same grid.
"""
from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from experiments.validate.case import Case, Space, shapes
from sim.errors import UserError
from sim.metrics import model_flops

Cost = Callable[[Case], float | None]
"""Seconds that a configuration takes on the machine, set-up and repeats included; None if it does not fit."""
TRIES = 24
"""Draws of one configuration before its group gets a shorter S."""
SHORTER = 0.7
"""Factor of an S that is too long."""
STEP, SPAN, LEAST = 0.04, 8.0, 0.05
"""The range of work (in logs) is narrowed by such a share at a time, or by more where a range of about so many e-folds takes far too long; not below the last."""


def draw(space: Space, device: str, seed: int, count: int, ranks: Sequence[int], cost: Cost, budget_s: float) -> list[Case]:
    """Raises UserError where even the shortest configurations take longer than the budget."""
    share, known = 1.0, {}

    def priced(case: Case) -> float | None:
        key = replace(case, number=0, group=0)
        if key not in known:
            known[key] = cost(case)
        return known[key]

    while True:
        cases = _draw(space, device, seed, count, ranks, priced, share)
        total = sum(priced(case) for case in cases)
        if total <= budget_s:
            return cases
        share -= max(STEP, math.log(total / budget_s) / SPAN)
        if share < LEAST:
            raise UserError(f"{count} configurations take {math.ceil(total / 60)} min at least, the budget is {budget_s / 60:g}; try --budget {math.ceil(total / 60)}, or fewer by --count")


class Deck:
    """Values dealt in random order, all of them before any comes again."""

    def __init__(self, values: Sequence, dice: random.Random) -> None:
        self._values, self._dice, self._left = list(values), dice, []

    def take(self, good: Callable[[object], bool] = lambda value: True):
        """The next value that is good; one of them has to be."""
        if not any(map(good, self._left)):
            self._left += self._dice.sample(self._values, len(self._values))
        return self._left.pop(next(k for k, value in enumerate(self._left) if good(value)))


def _draw(space: Space, device: str, seed: int, count: int, ranks: Sequence[int], cost: Cost, share: float) -> list[Case]:
    dice = random.Random(seed)
    groups = -(-count // space.members)
    decks = {name: Deck(getattr(space, name), dice) for name in ("models", "layers", "chunks", "prefetch", "offload", "order", "save")}
    decks["ranks"] = Deck(ranks, dice)
    strata = dice.sample(range(groups), groups)
    cases: list[Case] = []
    for group, stratum in enumerate(strata):
        name, layers, P = (decks[deck].take() for deck in ("models", "layers", "ranks"))
        seq = tokens(space, name, layers, share * (stratum + dice.random()) / groups)
        size = min(space.members, count - len(cases))
        while not (found := _group(space, device, name, layers, P, seq, size, decks, cost)):
            seq = round(seq * SHORTER / space.unit) * space.unit
            if seq < space.seq[0]:
                raise UserError(f"{name} with {layers} layers on {P} ranks fits at no S from {space.seq[0]} on; give the memory that there is by --hbm and --host")
        cases += [replace(case, number=len(cases) + k, group=group) for k, case in enumerate(found)]
    return cases


def _group(space: Space, device: str, name: str, layers: int, P: int, seq: int, size: int, decks: dict[str, Deck], cost: Cost) -> list[Case]:
    """Different configurations of one model, S and P; empty where too few fit."""
    found: list[Case] = []
    for _ in range(size):
        for _ in range(TRIES):
            chunk = decks["chunks"].take(lambda C: 2 * C <= seq or C == min(space.chunks))
            fields = {f: decks[f].take() for f in ("offload", "prefetch", "order", "save")}
            case = Case(0, 0, name, layers, space.vocab, space.dtype, P, seq, chunk, **fields, device=device)
            if case.same not in {c.same for c in found} and cost(case) is not None:
                found.append(case)
                break
        else:
            return []
    return found


def work(name: str, layers: int, vocab: int, seq: int) -> int:
    """Model FLOPs of a step, whatever the strategy."""
    return model_flops(shapes(name, layers, vocab), seq, "all")["mfu_causal"]


def tokens(space: Space, name: str, layers: int, share: float) -> int:
    """S whose work is, in logs, such a share of the way from the shortest S's to the longest's; to the nearest unit."""
    low, high = (math.log(work(name, layers, space.vocab, S)) for S in space.seq)
    units = range(space.seq[0] // space.unit, space.seq[1] // space.unit + 1)
    return space.unit * min(units, key=lambda k: abs(math.log(work(name, layers, space.vocab, k * space.unit)) - low - share * (high - low)))
