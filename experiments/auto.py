"""Auto: the fields that a command's strategy leaves open, settled for its machine before anything is built."""
from __future__ import annotations

from collections.abc import Callable

from sim.machine import Machine
from sim.model import Model
from sim.strategy import Strategy


def settled(model: Model, strategy: Strategy, seq: int, dtype: str, machine: Machine | None, say: Callable[[str], object] = print) -> Strategy:
    """The strategy with its autos chosen, which `say` is told in a line. Without autos it is left as it is, and without a machine too:
    build refuses what is open then. Raises UserError if nothing fits the machine."""
    if not strategy.autos or machine is None:
        return strategy
    from sim.search import settle

    found, line = settle(model, strategy, seq, dtype, machine)
    say(line)
    return found
