"""Fixtures of the GPU tests: ranks with a GPU each that are started once, and a line of worst values at the end."""
from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.cuda.places import DEVICE
from tests.engine.ranks import Ranks

worst: dict[str, float] = {}
"""The largest value noted by each name."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    have = torch.cuda.device_count() if DEVICE == "cuda" else 2
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker("cuda")
            wanted = item.callspec.params.get("P", 1) if hasattr(item, "callspec") else 1
            item.add_marker(pytest.mark.skipif(wanted > have, reason=f"wants {wanted} GPUs, here are {have}"))


@pytest.fixture(scope="session")
def ranks():
    """ranks(P).run(function, *args) -> a value a rank. Each rank is a process with a GPU of its own, also for P = 1."""
    pools: dict[int, Ranks] = {}

    def pool(P: int) -> Ranks:
        if P not in pools or not pools[P].alive:
            pools[P] = Ranks(P, DEVICE)
        return pools[P]

    yield pool
    for each in pools.values():
        each.close()


@pytest.fixture
def note(record_property):
    """note(name, value): puts a measured value on record."""

    def add(name: str, value: float) -> None:
        record_property(name, value)
        worst[name] = max(value, worst.get(name, value))

    return add


def pytest_terminal_summary(terminalreporter):
    if worst:
        terminalreporter.write_line("worst: " + ", ".join(f"{name} {value:.4g}" for name, value in worst.items()))
