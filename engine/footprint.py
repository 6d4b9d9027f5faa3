"""Footprint: the memory that one step takes on a rank, from a step of its own behind those that are timed.

    states      parameters, gradients and moments that the rank holds before its update
and on a GPU, of what torch's allocator was asked for, the arenas' guards left out:
    peak        the most at one time, arenas included
    workspace   the most that one op took beside its operands, while it was launched
    blas        what cuBLAS keeps for itself all the while, a piece a stream
    reserved    the most that the allocator held of the device, for this and to reuse; what earlier steps and the set-up left with it is given back first
"""
from __future__ import annotations

from collections.abc import Callable

import torch

from engine.arenas import GUARD_BYTES
from sim.schedule import Op


def footprint(session) -> dict[str, int]:
    """One more step of a session (engine.worker), watched; its time and loss are in no result."""
    program, states, found = session.program, session.trainer.states, {}
    update = states.update

    def watched(clip=None):
        found["states"] = states.size_bytes()
        return update(clip)

    allocator = _Allocator(session.trainer.make_room) if program.backend.device.type == "cuda" else None
    states.update, program.watch = watched, allocator and allocator.around
    try:
        session.again()
    finally:
        del states.update
        program.watch = None
    return found | (allocator.found() if allocator else {})


class _Allocator:
    """Torch's, with its peaks taken around every op and in between."""

    def __init__(self, make_room: Callable[[], None]) -> None:
        self.peak = self.reserved = self.workspace = 0
        make_room()
        torch.cuda.reset_peak_memory_stats()

    def around(self, op: Op, work: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            before, _ = self._peaks()
            work()
            _, peak = self._peaks()
            self.workspace = max(self.workspace, peak - before)

        return run

    def _peaks(self) -> tuple[int, int]:
        """(bytes asked for now, at most since the last call)."""
        said = torch.cuda.memory_stats()
        self.peak = max(self.peak, said["requested_bytes.all.peak"])
        self.reserved = max(self.reserved, said["reserved_bytes.all.peak"])
        torch.cuda.reset_peak_memory_stats()
        return said["requested_bytes.all.current"], said["requested_bytes.all.peak"]

    def found(self) -> dict[str, int]:
        now, _ = self._peaks()
        torch._C._cuda_clearCublasWorkspaces()
        blas = now - self._peaks()[0]
        return {"peak": self.peak - 2 * GUARD_BYTES, "workspace": self.workspace, "blas": blas, "reserved": self.reserved - 2 * GUARD_BYTES}
