"""Pool: ranks for each P, started once and fed job after job; those that failed are started anew for the next one."""
from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack

from engine.ranks import Pin, Ranks
from engine.worker import Job, Run


class Pool:
    """All of them end with the block."""

    def __init__(self, device: str) -> None:
        self._device, self._ranks = device, {}

    def do(self, P: int, jobs: list[Job], tick: Callable[[], None] = lambda: None, pin: Pin = lambda done, total: None) -> list[Run]:
        """As Ranks.do, on P ranks."""
        if P not in self._ranks:
            stack = ExitStack()
            self._ranks[P] = stack, stack.enter_context(Ranks(P, self._device))
        stack, ranks = self._ranks[P]
        with ExitStack() as failing:
            failing.push(lambda *error: self._drop(P, *error))
            return ranks.do(jobs, tick, pin)

    def _drop(self, P: int, *error) -> None:
        if error[0] is not None:
            self._ranks.pop(P)[0].__exit__(*error)

    def __enter__(self) -> "Pool":
        return self

    def __exit__(self, *error) -> None:
        for P in list(self._ranks):
            self._ranks.pop(P)[0].__exit__(*error)
