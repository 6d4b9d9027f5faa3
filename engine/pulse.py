"""Pulse: each rank counts up in the store that all of them share; one whose count stands still is lost.

A rank on another node that is killed is noticed by nobody else in time: NCCL's kernels wait for it on the GPU for ever, and NCCL's own
watchdog would end this process with a C++ traceback. It is therefore told to handle nothing (see engine.worker).
"""
from __future__ import annotations

import threading
from collections.abc import Callable

EVERY_S = 1.0
QUIET_S = 20.0
"""A rank that does not count for so long is lost. It is counted in beats of the one who watches: a stopped machine stops both."""
START_S = 300
"""All ranks are there within this, or none starts."""
TIMEOUT_S = {"cpu": 45, "cuda": 24 * 3600}
"""By device: a collective that takes longer has lost a rank. On GPUs its time counts from when it is issued, before the computation that
it waits for, which may take hours: there the pulse says who is lost."""
_DONE = 1 << 40
"""Added to the count of a rank that has ended well."""


class Pulse:
    """A thread that counts, and watches the counts of the others. Calls `lost` with a text, from that thread, once."""

    def __init__(self, store, rank: int, size: int, lost: Callable[[str], None], every_s: float = EVERY_S, quiet_s: float = QUIET_S) -> None:
        self._store, self._rank, self._lost = store, rank, lost
        self._every_s, self._quiet_s = every_s, quiet_s
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, args=([r for r in range(size) if r != rank],), name="pulse", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Nobody will miss this rank."""
        self._ended.set()
        self._thread.join()

    def _run(self, others: list[int]) -> None:
        counts, still = dict.fromkeys(others, 0), dict.fromkeys(others, 0)
        try:
            while not self._ended.wait(self._every_s):
                self._store.add(_key(self._rank), 1)
                for rank in list(counts):
                    count = self._store.add(_key(rank), 0)
                    counts[rank], still[rank] = count, still[rank] + 1 if count == counts[rank] else 0
                    if count >= _DONE:
                        del counts[rank]
                    elif still[rank] * self._every_s >= self._quiet_s:
                        self._lost(f"rank {self._rank} lost rank {rank}, which gave no sign of life for {self._quiet_s:g} s")
                        return
            self._store.add(_key(self._rank), _DONE)
        except RuntimeError as error:  # torch's errors of stores and networks are such
            if not self._ended.is_set():
                self._lost(f"rank {self._rank} lost the store that all ranks share: {str(error).strip().splitlines()[0]}")


def _key(rank: int) -> str:
    return f"fpdt/pulse/{rank}"
