"""Issue: what each op costs the host, from steps of their own behind those that are timed, each region issued to an idle device, so that no
launch waits for room in its queue."""
from __future__ import annotations

from statistics import median

STEPS = 3


def issue(session) -> dict[str, int]:
    """Op id -> host ns from its first wait to its record, and region -> host ns from the end of the region before it to its first op, medians over
    layers and steps, of a session (engine.worker). The first region follows a step's end, which is no border."""
    session.program.issued = found = {}
    for _ in range(STEPS):
        session.again()
    session.program.issued = None
    del found["fwd"]
    return {id: round(median(ns)) for id, ns in found.items()}
