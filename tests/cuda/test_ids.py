"""One schedule: what a training step ran is what is written, op by op, and each op ended after it began."""
from __future__ import annotations

import pytest

from engine.train import Trainer
from tests.cuda.places import CHUNK, CUDNN, MODEL, SEQ
from tests.engine.cases import Place, running, schedule, text


def spans(rank: int, group, place: Place, zero: int) -> list[tuple]:
    """(op id, layer, stream, [start_ns, end_ns]) of one training step."""
    with running(schedule(MODEL, SEQ, CHUNK, group.size() if group else 1, "bf16"), rank, group, place) as program:
        trainer = Trainer(program, zero=zero)
        program.spans = []
        trainer.step(text(MODEL, SEQ)[0])
        program.backend.settle()
        return program.spans


@pytest.mark.parametrize("P, zero", ((1, 0), (2, 0), (2, 3)), ids=("P1", "P2", "P2-zero3"))
def test_measured_ops_are_the_schedules_in_order(ranks, P, zero):
    s = schedule(MODEL, SEQ, CHUNK, P, "bf16")
    written = [(op.id, layer, op.stream) for region, layer in s.order() for op in s.regions[region].ops]
    assert {op.stream for region in s.regions.values() for op in region.ops} >= {"compute", "h2d", "d2h"}
    for found in ranks(P).run(spans, CUDNN, zero):
        assert [span[:3] for span in found if span[2] != "external"] == written
        assert all(span[0].startswith("ext.") for span in found if span[2] == "external")
        assert all(start <= end for *_, (start, end) in found)
