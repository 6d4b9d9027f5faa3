"""Search: what auto stands for. Of the values that the fields may have, all combinations are simulated, and the fastest that fits is taken.

Of those within TIE of the fastest it is the one that takes the least HBM. A choice is simulated whole: that costs a few layers, as simulate
replays those that repeat. A sequence of WHOLE chunks or more is extended from three shorter ones: over u memory is a line, and time a
parabola (exactly where compute binds, to 1% or so where copies do).
"""
from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod
from typing import NamedTuple

from sim.build.step import build
from sim.errors import UserError
from sim.machine import Machine
from sim.metrics import overrun, times
from sim.model import Model
from sim.simulate import simulate
from sim.strategy import AUTO, Strategy, shown
from sim.units import show_bytes

TIE = 1.005
"""Step times whose ratio is no larger are equal."""
PERIOD = 8
"""Sequences that differ by so many chunks are alike: a quarter of them is a whole number, and two slots are taken in turn as before."""
WHOLE = 5 * PERIOD
"""From so many chunks on three shorter sequences are simulated, that differ by PERIOD and end alike."""


class Found(NamedTuple):
    """A strategy without autos, and what is predicted for it."""

    strategy: Strategy
    step_s: float
    over: dict[str, int]
    """Space -> bytes beyond its capacity, negative where there is room."""

    @property
    def fits(self) -> bool:
        return max(self.over.values()) <= 0


def settle(model: Model, strategy: Strategy, seq: int, dtype: str, machine: Machine) -> tuple[Strategy, str]:
    """(the strategy with its autos chosen for a machine, a line that says what was chosen, by how much, of how many). Raises UserError if
    nothing fits, by how much the nearest does not, or where model, strategy and S do not fit together."""
    names = strategy.autos
    choices = [strategy.replace(**dict(zip(names, values))) for values in product(*(AUTO[name] for name in names))]
    found = [predict(model, choice, seq, dtype, machine) for choice in choices]
    fit = [f for f in found if f.fits]
    if not fit:
        near = min(found, key=lambda f: max(f.over.values()))
        space = max(near.over, key=near.over.get)
        shorter = "" if strategy.save == "input" else ", or --set save=input"
        raise UserError(f"auto: none of {len(found)} choices fits {machine.name}; the nearest, {_named(near, names)}, takes {show_bytes(near.over[space])} "
                        f"of {space} memory too much; take a shorter sequence{shorter}")
    best = choose(fit)
    line = f"auto: {_named(best, names)}, {best.step_s:.4g} s a step predicted; "
    if others := [f for f in fit if f[1:] != best[1:]]:
        after = choose(others)
        more = after.over["hbm"] - best.over["hbm"]
        line += f"the next, {_named(after, names)}, takes {after.step_s / best.step_s - 1:+.2%} time and {'+' * (more >= 0)}{show_bytes(more)} of HBM; "
    return best.strategy, f"{line}{len(fit)} of {len(found)} choices fit"


def choose(found: list[Found]) -> Found:
    """The fastest, or of those within TIE of it the one that takes the least HBM."""
    fastest = min(f.step_s for f in found)
    return min((f for f in found if f.step_s <= TIE * fastest), key=lambda f: (f.over["hbm"], f.step_s))


def predict(model: Model, strategy: Strategy, seq: int, dtype: str, machine: Machine) -> Found:
    """Simulated, or extended from SHORTER. Raises UserError where model, strategy and S do not fit together."""
    strategy.check(model, seq)

    def ask(tokens: int) -> Found:
        timeline = simulate(build(model, strategy, tokens, dtype), strategy, machine)
        return Found(strategy, times(timeline)["step_s"], overrun(timeline))

    u = -(-seq // strategy.chunk)
    if u < WHOLE:
        return ask(seq)
    shorter = [k * PERIOD + u % PERIOD for k in (2, 3, 4)]
    asked = [ask(seq - (u - n) * strategy.chunk) for n in shorter]
    over = {space: round(_through(shorter[1:], [f.over[space] for f in asked[1:]], u)) for space in asked[0].over}
    return Found(strategy, _through(shorter, [f.step_s for f in asked], u), over)


def _through(x: Sequence[float], y: Sequence[float], at: float) -> float:
    """The polynomial through points (x, y), of the least degree, at a place (Lagrange)."""
    return sum(v * prod((at - b) / (a - b) for b in x if b != a) for a, v in zip(x, y))


def _named(found: Found, names: Sequence[str]) -> str:
    return " ".join(f"{name}={shown(getattr(found.strategy, name))}" for name in names)
