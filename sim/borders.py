"""Borders: where a region meets its caller, who owns weights, their gradients and, in HBM, hidden states.

What comes behind a region waits for its last op on each stream that touches what the caller owns; whatever else it has issued runs on beside what
follows. The streams that touch such memory in any region begin a region behind all that came before it.
"""
from __future__ import annotations

from sim.schedule import Schedule


def touching(schedule: Schedule, region: str) -> dict[str, int]:
    """Stream -> which op of the region is its last that touches what the caller owns."""
    owned = {b.name for b in schedule.regions[region].buffers.values() if b.life == "argument" and b.space == "hbm"}
    return {op.stream: k for k, op in enumerate(schedule.regions[region].ops) if not owned.isdisjoint(op.reads + op.writes)}


def meeting(schedule: Schedule) -> set[str]:
    """The streams that meet the caller as a region begins."""
    return {stream for region in schedule.regions for stream in touching(schedule, region)}
