"""Borders: where a region meets its caller, who owns weights, their gradients and, in HBM, hidden states.

What comes behind a region waits for its last op on each stream that touches what the caller owns; whatever else it has issued runs on beside what
follows. The streams that touch such memory in any region begin a region behind all that came before it.
"""
from __future__ import annotations

from sim.schedule import Schedule


def touching(schedule: Schedule) -> dict[str, dict[str, int]]:
    """Region -> stream -> which op of the region is its last that touches what the caller owns."""
    found = {}
    for name, region in schedule.regions.items():
        owned = {b.name for b in region.buffers.values() if b.life == "argument" and b.space == "hbm"}
        found[name] = {op.stream: k for k, op in enumerate(region.ops) if not owned.isdisjoint(op.reads + op.writes)}
    return found


def meeting(touched: dict[str, dict[str, int]]) -> set[str]:
    """The streams that meet the caller as a region begins, of those that touch what it owns."""
    return set().union(*touched.values())
