"""Fixtures of the engine's tests: one thread a process, and ranks that are started once."""
from __future__ import annotations

import pytest
import torch

from tests.engine.ranks import Ranks


class Alone:
    """P = 1: the same call, in this process."""

    P = 1

    def run(self, function, *args) -> list:
        return [function(0, None, *args)]


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def ranks():
    """ranks(P).run(function, *args) -> a value a rank."""
    pools: dict = {1: Alone()}

    def pool(P: int):
        if P not in pools or not getattr(pools[P], "alive", True):
            pools[P] = Ranks(P)
        return pools[P]

    yield pool
    for P in set(pools) - {1}:
        pools[P].close()
