"""Twenty steps on text, chunked, offloaded, sharded: the losses and gradient norms of the same training in one piece."""
from __future__ import annotations

import pytest

from engine.text import stdlib_bytes
from engine.train import Step, Trainer
from tests.cuda.places import CUDNN, DEVICE
from tests.engine.cases import Place, running, schedule, tiny

MODEL = tiny(8, 4, 64, layers=2, hidden=256, ffn=512, vocab=256)
SEQ, CHUNK, STEPS = (4096, 512, 20) if DEVICE == "cuda" else (256, 32, 3)
REL = 1e-2


def steps(rank: int, group, place: Place, chunk: int, offload: bool, zero: int) -> list[Step]:
    s = schedule(MODEL, SEQ, chunk, group.size() if group else 1, "bf16", offload)
    with running(s, rank, group, place) as program:
        trainer, text = Trainer(program, lr=1e-3, zero=zero), stdlib_bytes(STEPS * SEQ)
        return [trainer.step(text[k * SEQ:(k + 1) * SEQ]) for k in range(STEPS)]


@pytest.fixture(scope="module")
def whole(ranks):
    return ranks(1).run(steps, CUDNN, SEQ, False, 0)[0]


@pytest.mark.parametrize("P, zero", ((1, 0), (2, 0), (2, 3)), ids=("P1", "P2", "P2-zero3"))
def test_every_step_is_that_of_one_piece(ranks, note, whole, P, zero):
    found = ranks(P).run(steps, CUDNN, CHUNK, True, zero)
    assert all(each == found[0] for each in found) and whole[-1].loss < whole[0].loss
    for name in Step._fields:
        mine, one = ([getattr(step, name) for step in each] for each in (found[0], whole))
        note(f"relative difference of {name}", max(abs(a / b - 1) for a, b in zip(mine, one)))
        assert mine == pytest.approx(one, rel=REL)
