"""States: the same losses and gradient norms at ZeRO 0 and 3, on one rank and two, clipped or not; ZeRO 3 holds its share only."""
from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch.distributed.tensor import DTensor

from engine.train import Trainer
from sim.machine import machine
from sim.simulate import simulate
from sim.strategy import Strategy
from tests.engine.cases import running, schedule, text, tiny

MODEL, SEQ, CHUNK, STEPS = tiny(4, 2, 16, layers=3), 61, 12, 3
CLIP = 0.5


def steps(rank: int, group, zero: int, clip: float | None, dtype: str = "fp32", chunk: int = CHUNK):
    """(steps, bytes of this rank's parameters, of its gradients and moments: dtypes) of a short training."""
    with running(schedule(MODEL, SEQ, chunk, group.size() if group else 1, dtype), rank, group) as program:
        trainer = Trainer(program, lr=1e-2, zero=zero, clip=clip)
        tokens = text(MODEL, SEQ)[0]
        found = [trainer.step(tokens) for _ in range(STEPS)]
        held = [p.to_local() if isinstance(p, DTensor) else p for p in trainer.model.parameters()]
        moments = [t for s in trainer.states.optimizer.state.values() for n, t in s.items() if n != "step"]
        kinds = {t.dtype for t in (*held, *moments)}
        return found, sum(p.numel() for p in held), kinds


@pytest.mark.parametrize("clip", (None, CLIP))
@pytest.mark.parametrize("P, zero", ((1, 3), (2, 0), (2, 3)))
def test_every_stage_and_rank_count_gives_the_same_steps(ranks, P, zero, clip):
    alone, _, _ = steps(0, None, 0, clip)
    per_rank = [found for found, _, _ in ranks(P).run(steps, zero, clip)]
    for found in per_rank:
        assert found == per_rank[0]
    for step, (mine, reference) in enumerate(zip(per_rank[0], alone)):
        assert mine.loss == pytest.approx(reference.loss, rel=1e-6 if step == 0 else 1e-5), step
        assert mine.grad_norm == pytest.approx(reference.grad_norm, rel=1e-5), step
    assert alone[0].loss > alone[-1].loss and alone[0].grad_norm > CLIP


def test_clipping_scales_what_the_optimizer_sees():
    """AdamW hides the scale of a constant gradient, so the norm of its first moment is looked at: 0.1 of the clipped gradient's."""
    for clip, want in ((None, None), (CLIP, CLIP)):
        with running(schedule(MODEL, SEQ, CHUNK)) as program:
            trainer = Trainer(program, clip=clip)
            norm = trainer.step(text(MODEL, SEQ)[0]).grad_norm
            moments = [s["exp_avg"] for s in trainer.states.optimizer.state.values()]
        assert float(torch.nn.utils.get_total_norm(moments)) * 10 == pytest.approx(want or norm, rel=1e-4)


def communicators(rank: int, group) -> list[int]:
    """How many process groups this process has, after each of two sharded trainings."""
    found = []
    for _ in range(2):
        steps(rank, group, 3, None)
        found.append(len(torch.distributed.distributed_c10d._world.pg_map))
    return found


def test_a_second_training_takes_no_new_communicator(ranks):
    for found in ranks(2).run(communicators):
        assert found[0] == found[1]


@pytest.mark.parametrize("dtype", ("fp32", "bf16"))
def test_states_are_fp32_and_sharded_over_all_ranks(ranks, dtype):
    found = {zero: ranks(2).run(steps, zero, CLIP, dtype) for zero in (0, 3)}
    sizes = {zero: [size for _, size, _ in per_rank] for zero, per_rank in found.items()}
    assert sizes == {0: [MODEL.params] * 2, 3: [MODEL.params // 2] * 2}
    assert all(kinds == {torch.float32} for per_rank in found.values() for _, _, kinds in per_rank)


@pytest.mark.parametrize("P, zero", ((1, 0), (2, 0), (2, 3)))
def test_bf16_stays_near_one_piece_and_begins_near_fp32(ranks, P, zero):
    """Later steps of bf16 and fp32 part, as AdamW's first updates are as large for a small gradient as for a large one."""
    whole, _, _ = steps(0, None, 0, CLIP, "bf16", SEQ)
    exact, _, _ = steps(0, None, 0, CLIP)
    found = ranks(P).run(steps, zero, CLIP, "bf16")[0][0]
    for mine, reference in zip(found, whole):
        assert mine.loss == pytest.approx(reference.loss, rel=1e-2)
    assert found[0] == pytest.approx(whole[0], rel=1e-2) and found[0] == pytest.approx(exact[0], rel=1e-2)


def externals_of_a_step(rank: int, group, zero: int, hidden: str, dtype: str):
    with running(schedule(MODEL, SEQ, CHUNK, 2, dtype, hidden=hidden), rank, group) as program:
        trainer = Trainer(program, zero=zero)
        program.spans = []
        trainer.step(text(MODEL, SEQ)[0])
        return Counter(id for id, _, stream, (start, end) in program.spans if stream == "external" and start < end)


@pytest.mark.parametrize("zero", (0, 3))
@pytest.mark.parametrize("hidden, dtype", (("hbm", "fp32"), ("host", "fp32"), ("hbm", "bf16")))
def test_measured_externals_are_those_the_simulator_prices(ranks, hidden, dtype, zero):
    s, strategy = schedule(MODEL, SEQ, CHUNK, 2, dtype, hidden=hidden), Strategy(sp=2, chunk=CHUNK, zero=zero, hidden=hidden)
    predicted = Counter(id for id, _, stream, _, _ in simulate(s, strategy, machine("h100-80g-sxm")).spans() if stream == "external")
    measured = ranks(2).run(externals_of_a_step, zero, hidden, dtype)[0]
    if zero == 3:  # the embedding's gather is a span of its own, and so is the reduction of the loss
        predicted += Counter({"ext.embed": 1, "ext.reduce": 1})
    assert measured == predicted
