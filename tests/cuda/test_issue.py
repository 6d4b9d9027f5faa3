"""No host block inside a region: the host has issued all of it before the GPU is half through."""
from __future__ import annotations

import pytest

from engine.text import stdlib_bytes
from engine.train import Trainer
from sim.model import model
from tests.cuda.places import CUDNN, needs_cuda
from tests.engine.cases import Place, running, schedule
from tests.engine.hooks import Issued, issued

pytestmark = needs_cuda
MODEL, SEQ, CHUNK = model("llama3-8b", layers=1, vocab=32000), 1 << 18, 1 << 15


def second_step(rank: int, group, place: Place) -> list[Issued]:
    with running(schedule(MODEL, SEQ, CHUNK, 1, "bf16", loss_sub=32), rank, group, place) as program:
        trainer, tokens = Trainer(program), stdlib_bytes(SEQ)
        trainer.step(tokens)
        found = issued(program)
        trainer.step(tokens)
        return found


def test_a_region_is_issued_before_the_gpu_is_half_through(ranks, note):
    found, = ranks(1).run(second_step, CUDNN)
    for each in found:
        note(f"issue of {each.region} in s", each.issue_s)
    assert [each.region for each in found] == ["fwd", "loss", "bwd"]
    assert [each.region for each in found if not each.before_half] == []
