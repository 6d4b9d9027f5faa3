"""No host block inside a region: the host has issued all of it before the GPU is half through."""
from __future__ import annotations

from sim.model import model
from tests.cuda.places import CUDNN, needs_cuda
from tests.cuda.steps import second_step
from tests.engine.hooks import issued

pytestmark = needs_cuda
MODEL, SEQ, CHUNK = model("llama3-8b", layers=1, vocab=32000), 1 << 18, 1 << 15


def test_a_region_is_issued_before_the_gpu_is_half_through(ranks, note):
    found, = ranks(1).run(second_step, CUDNN, MODEL, SEQ, CHUNK, issued)
    for each in found:
        note(f"issue of {each.region} in s", each.issue_s)
    assert [each.region for each in found] == ["fwd", "loss", "bwd"]
    assert [each.region for each in found if not each.before_half] == []
