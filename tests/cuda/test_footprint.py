"""Footprint: memory of jobs on ranks that stay, the same whatever ran before."""
from __future__ import annotations

import pytest
import torch

from engine.ranks import Ranks
from engine.backend.cuda import SPARE, SPARE_BYTES
from engine.worker import Job, Session
from sim import text
from sim.build.step import build
from sim.externals import GRADIENT_BYTES
from sim.model import model
from sim.need import workspace
from sim.strategy import Strategy
from tests.cuda.places import needs_cuda, one_and_two_ranks

pytestmark = needs_cuda
MODEL = model("gpt-2.7b", layers=1, vocab=8192)
SLACK = 0.02
"""The allocator's pools are cut otherwise when their memory comes back."""


@one_and_two_ranks
def test_a_job_takes_what_it_takes_alone(P, note):
    small, large = (build(MODEL, Strategy(sp=P, chunk=chunk), 4 * chunk, "bf16") for chunk in (4096, 16384))
    small, large = ((s, Job(text.show(s), steps=2, zero=3, device="cuda", footprint=True)) for s in (small, large))
    with Ranks(P, "cuda") as ranks:
        first, other, again = (ranks.do([job])[0].memory_bytes for _, job in (small, large, small))
    for found, (schedule, _) in ((first, small), (other, large)):
        assert found["states"] == pytest.approx(16 * MODEL.params / P, rel=1e-3)
        before_embedding = found["states"] - GRADIENT_BYTES * MODEL.vocab * MODEL.hidden // P  # its gradient comes last, behind the peak
        assert schedule.arena_bytes("hbm") + before_embedding + found["workspace"] < found["peak"] <= found["reserved"]
    note("relative difference of reserved memory after a larger job", abs(again["reserved"] / first["reserved"] - 1))
    assert all(again[row] == first[row] for row in ("states", "workspace", "blas"))
    assert again["peak"] == pytest.approx(first["peak"], rel=SLACK) and again["reserved"] == pytest.approx(first["reserved"], rel=SLACK)


@pytest.mark.parametrize("order, save", (("query-up", "qkvo"), ("kv-outer", "input"), ("query-down", "all")))
def test_workspaces_lie_in_one_piece(order, save, note):
    """The compute stream's pool is no larger after three steps than the largest workspace, what cuBLAS keeps, and a piece of small tensors."""
    schedule = build(MODEL, Strategy(chunk=8192, order=order, save=save), 20480, "bf16")
    session = Session(Job(text.show(schedule), steps=4, lr=0.0, zero=0, device="cuda"))
    try:
        for _ in range(3):
            session.step(False)
        mine = session._backend.streams["compute"]._stream.cuda_stream
        held = [segment["total_size"] for segment in torch.cuda.memory_snapshot() if segment["stream"] == mine]
        largest = max(workspace(schedule, region, session.program.runtime.kernel.NAME) for region in schedule.regions)
    finally:
        session.end()
    note("held by the compute stream, MB", sum(held) / 1e6)
    note("of it for workspaces, MB", largest / 1e6)
    assert largest <= max(held) <= (1 + SPARE) * largest + SPARE_BYTES + (2 << 20)
    assert sum(held) - max(held) <= 2 * (34 << 20) + (4 << 20)
