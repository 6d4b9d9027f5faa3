"""The chunked loss: the mean over the valid labels of the whole sequence, however it is cut."""
from __future__ import annotations

import pytest
import torch

from engine import reference
from engine.deal import IGNORE, deal, padded
from engine.loss import Loss
from sim.errors import UserError
from tests.engine.cases import DTYPES, running, schedule, summed, text, tiny, whole

MODEL = tiny(4, 2, 16, vocab=37)


def inputs(seq: int, offset: float = 0.0) -> dict[str, torch.Tensor]:
    """x and the head's weights; offset is added to every logit of a token (about), through one constant feature."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(seq, MODEL.hidden, generator=generator)
    w = {"normf": 1 + 0.1 * torch.randn(MODEL.hidden, generator=generator), "Whead": torch.randn(MODEL.vocab, MODEL.hidden, generator=generator) / 8}
    if offset:
        x[:, 0], w["Whead"][:, 0] = 1.0, offset
    return {"x": x, **w}


def run(rank: int, group, given: dict, labels: torch.Tensor, chunk: int, dtype: str = "fp32"):
    """(loss, gradients of x and the weights) of the whole sequence."""
    s = schedule(MODEL, len(labels), chunk, 1 if group is None else group.size(), dtype)
    with running(s, rank, group) as program:
        head = Loss(program)
        with torch.no_grad():
            for name in head.names:
                head.get_parameter(name).copy_(given[name])
        x, label = (deal(padded(t, s.P, fill), s.chunk, s.P, rank) for t, fill in ((given["x"].to(DTYPES[dtype]), 0), (labels, IGNORE)))
        x.requires_grad_()
        loss = head(x, label, int((labels != IGNORE).sum()))
        loss.backward()
        grads = {"dx": whole(x.grad, s, group)[:len(labels)]} | {f"d{n}": summed(head.get_parameter(n).grad, group) for n in head.names}
        return float(summed(loss.detach().clone(), group)), grads, label


def right(given: dict, labels: torch.Tensor):
    w = {n: t.double().requires_grad_() for n, t in given.items()}
    loss = reference.loss(w["x"], labels, w, MODEL)
    loss.backward()
    return float(loss.detach()), {f"d{n}": t.grad for n, t in w.items()}


def close(found, right, tolerance=1e-5):
    assert found[0] == pytest.approx(right[0], rel=tolerance)
    for name, grad in right[1].items():
        assert (found[1][name].double() - grad).norm() <= tolerance * grad.norm(), name


@pytest.mark.parametrize("P, chunk", [(1, 64), (1, 16), (1, 7), (2, 32), (2, 8), (4, 20), (4, 60)])
def test_mean_over_valid_tokens_however_it_is_cut(ranks, P, chunk):
    labels = text(MODEL, 61)[1]
    given = inputs(61)
    close(ranks(P).run(run, given, labels, chunk)[0], right(given, labels))


def test_many_chunks_give_one_loss_not_as_many():
    labels, given = text(MODEL, 512)[1], inputs(512)
    close(run(0, None, given, labels, 16), right(given, labels))


def test_shards_with_4_0_1_and_3_valid_labels(ranks):
    labels = torch.full((16,), IGNORE)
    labels[:4], labels[9], labels[12:15] = torch.arange(4), 7, torch.arange(3)
    given = inputs(16)
    found = ranks(4).run(run, given, labels, 16)
    assert [int((label != IGNORE).sum()) for _, _, label in found] == [4, 0, 1, 3]
    close(found[0], right(given, labels))


@pytest.mark.parametrize("P", (1, 2))
def test_all_ignored_is_zero_and_so_are_its_gradients(ranks, P):
    loss, grads, _ = ranks(P).run(run, inputs(20), torch.full((20,), IGNORE), 8)[0]
    assert loss == 0.0
    assert all(not grad.any() for grad in grads.values())


@pytest.mark.parametrize("offset", (1e4, -1e4))
def test_a_common_offset_of_all_logits_cancels(offset):
    labels, given = text(MODEL, 24)[1], inputs(24, offset)
    found = run(0, None, given, labels, 10)
    plain = right(given, labels)
    assert found[0] == pytest.approx(plain[0], abs=2e-3)  # logits of 1e4 in fp32 are 1e-3 apart
    assert torch.isfinite(found[1]["dx"]).all()
    without = right(given | {"Whead": torch.cat((torch.zeros(MODEL.vocab, 1), given["Whead"][:, 1:]), 1)}, labels)
    assert plain[0] == pytest.approx(without[0], rel=1e-6)
    assert (found[1]["dWhead"][:, 1:].double() - plain[1]["dWhead"][:, 1:]).norm() <= 2e-3 * plain[1]["dWhead"][:, 1:].norm()


def test_a_wrong_shape_is_refused():
    with running(schedule(MODEL, 30, 8)) as program:
        head = Loss(program)
        for x, label, what in ((31, 30, "inputs"), (30, 31, "labels"), (30, 29, "labels")):
            with pytest.raises(UserError, match=f"loss {what} have shape"):
                head(torch.zeros(x, MODEL.hidden), torch.zeros(label, dtype=torch.int64), 30)


def test_a_label_so_unlikely_that_its_probability_underflows():
    given = inputs(8)
    given["Whead"] *= 2000
    labels = torch.arange(8)
    found = run(0, None, given, labels, 8)
    assert found[0] > 200
    close(found, right(given, labels), 1e-4)


def test_a_label_that_is_no_token_is_never_silently_another():
    labels = text(MODEL, 61)[1]
    for wrong in (-1, -99):
        labels[7] = wrong
        assert torch.isnan(torch.tensor(run(0, None, inputs(61), labels, 16)[0]))
    labels[7] = MODEL.vocab
    with pytest.raises(RuntimeError, match="out of bounds"):
        run(0, None, inputs(61), labels, 16)


def test_backward_twice_is_refused():
    labels = text(MODEL, 61)[1]
    with running(schedule(MODEL, 61, 16)) as program:
        loss = Loss(program)(inputs(61)["x"].requires_grad_(), labels, 5)
        loss.backward(retain_graph=True)
        with pytest.raises(UserError, match="backward ran twice on one loss"):
            loss.backward()
