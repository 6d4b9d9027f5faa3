"""World: which rank of how many this process is, as torchrun says in the environment; the only one where it says nothing."""
from __future__ import annotations

import os
from typing import NamedTuple

from sim.errors import UserError

MOST_DIGITS = 6
"""Of a number of ranks, and of a port."""
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")


class World(NamedTuple):
    """A rank's place among all ranks, and among those of its node."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1


def started() -> bool:
    """Whether torchrun has started this process."""
    return "RANK" in os.environ


def world() -> World:
    """Raises UserError where the environment makes no sense."""
    if not started():
        return World()
    found = World(_number("RANK"), _number("WORLD_SIZE"), _number("LOCAL_RANK", 0), _number("LOCAL_WORLD_SIZE", 1))
    good = 0 <= found.rank < found.size and 0 <= found.local_rank < found.local_size <= found.size
    names = NAMES if not good else ("MASTER_ADDR", "MASTER_PORT") if found.size > 1 else ()
    if not good or names and not (os.environ.get("MASTER_ADDR") and 0 < _number("MASTER_PORT") < 1 << 16):
        said = " ".join(f"{name}={os.environ.get(name, '')}" for name in names)
        raise UserError(f"the environment says {said}, which is no rank's; start with torchrun, which sets them all, or unset RANK")
    return found


def _number(name: str, default: int = -1) -> int:
    said = os.environ.get(name)
    return default if said is None else int(said) if said.isascii() and said.isdigit() and len(said) <= MOST_DIGITS else -1
