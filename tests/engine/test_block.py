"""Block and model: the same losses and gradients at any P, and what a block refuses."""
from __future__ import annotations

import pytest
import torch

from engine import reference
from engine.block import Block
from engine.deal import IGNORE
from engine.model import LanguageModel
from sim.errors import UserError
from sim.model import Model
from tests.engine.cases import running, schedule, shard, summed, text, tiny, train

MODEL, SEQ, CHUNK = tiny(8, 2, 16, layers=2, hidden=96), 101, 24


def step(rank: int, group, dtype: str = "fp32", ignore: bool = False, model: Model = MODEL):
    """(loss, gradients as the optimizer sees them, summed over ranks) of one step."""
    tokens, labels = text(model, SEQ)
    if ignore:
        labels[:] = IGNORE
    with running(schedule(model, SEQ, CHUNK, 1 if group is None else group.size(), dtype), rank, group) as program:
        lm = LanguageModel(program)
        loss = lm(*shard(program.schedule, rank, tokens, labels))
        loss.backward()
        return float(summed(loss.detach().clone(), group)), {n: summed(p.grad, group) for n, p in lm.named_parameters()}


def norm(grads: dict[str, torch.Tensor]) -> float:
    return float(torch.stack([g.double().norm() for g in grads.values()]).norm())


@pytest.fixture(scope="module")
def right():
    """Loss and gradients in fp64, no chunks, no ranks."""
    with running(schedule(MODEL, SEQ, CHUNK)) as program:
        weights = {n: w.double().requires_grad_() for n, w in LanguageModel(program).state_dict().items()}
    loss = reference.language_model(weights, *text(MODEL, SEQ), MODEL)
    loss.backward()
    return float(loss.detach()), {n: w.grad for n, w in weights.items()}


@pytest.mark.parametrize("P", (1, 2, 4))
def test_loss_and_gradient_norm_do_not_depend_on_P(ranks, right, P):
    found = ranks(P).run(step)
    for loss, grads in found:
        assert loss == pytest.approx(right[0], rel=1e-6)
        assert norm(grads) == pytest.approx(norm(right[1]), rel=1e-5)
        for name, grad in grads.items():
            assert (grad.double() - right[1][name]).norm() <= 1e-5 * right[1][name].norm(), name
    one = ranks(1).run(step)[0]
    assert found[0][0] == pytest.approx(one[0], rel=1e-6)
    assert norm(found[0][1]) == pytest.approx(norm(one[1]), rel=1e-5)


@pytest.mark.parametrize("P", (1, 2))
def test_all_labels_ignored_gives_zero_gradients_and_not_none(ranks, P):
    loss, grads = ranks(P).run(step, "fp32", True)[0]
    assert loss == 0.0
    assert {n: int(g.count_nonzero()) for n, g in grads.items()} == dict.fromkeys(grads, 0)


@pytest.fixture
def program():
    with running(schedule(tiny(), 30, 8)) as program:
        yield program


@pytest.fixture
def block(program):
    torch.manual_seed(0)
    return Block(program, 0)


def x_TC(grad: bool = True):
    return torch.randn(30, 64, generator=torch.Generator().manual_seed(3)).requires_grad_(grad)


def test_two_forwards_before_a_backward_are_refused(block):
    y = block(x_TC())
    with pytest.raises(UserError, match="layer 0 runs forward twice before a backward"):
        block(x_TC())
    with pytest.raises(UserError, match="forward twice"), torch.no_grad():
        block(x_TC())
    y.sum().backward()
    block(x_TC())


def test_backward_twice_is_refused(block):
    y = block(x_TC()).sum()
    y.backward(retain_graph=True)
    with pytest.raises(UserError, match="backward ran twice on one forward"):
        y.backward()
    y = block(x_TC()).sum()
    y.backward()
    with pytest.raises((UserError, RuntimeError), match="backward"):
        y.backward()


def test_an_old_graph_does_not_run_on_what_a_newer_forward_saved(block):
    old = block(x_TC()).sum()
    old.backward(retain_graph=True)
    new = block(2 * x_TC()).sum()
    with pytest.raises(UserError, match="backward ran twice"):
        old.backward()
    new.backward()


def test_a_forward_without_gradients_leaves_nothing_to_wait_for(program):
    tokens, labels = text(tiny(), 30)
    plain = train(program, 0, None, tokens, labels, 2)
    with torch.no_grad():
        lm = LanguageModel(program)
        first = [float(lm(*shard(program.schedule, 0, tokens, labels))) for _ in range(2)]
    assert first == plain[0][:1] * 2
    again = train(program, 0, None, tokens, labels, 2)
    assert again[0] == plain[0]
    assert all(torch.equal(again[1][n], w) for n, w in plain[1].items())


def test_a_graph_dropped_without_a_backward_frees_its_place(block):
    gradient = []
    for _ in range(2):
        y = block(x_TC())
        del y
        x = x_TC()
        block(x).sum().backward()
        gradient.append(x.grad)
    assert torch.equal(*gradient)


def test_gradients_add_up_over_two_forwards(block):
    block(x_TC()).sum().backward()
    once = {n: p.grad.clone() for n, p in block.named_parameters()}
    block(x_TC()).sum().backward()
    assert all(torch.equal(p.grad, 2 * once[n]) for n, p in block.named_parameters())


def test_a_wrong_shape_is_refused(block):
    for shape in ((29, 64), (30, 63), (1, 30, 64)):
        with pytest.raises(UserError, match=r"the schedule wants \(30, 64\)"):
            block(torch.zeros(shape))


def test_dropout_is_refused():
    with pytest.raises(UserError, match="dropout 0.1 is refused.*use 0"):
        Model("m", "llama", 1, 64, 4, 2, 16, 96, 50, dropout=0.1)


def test_inference_mode_is_refused_and_leaves_the_program_usable(block):
    with pytest.raises(UserError, match="do not run under torch.inference_mode"), torch.inference_mode():
        block(x_TC(False))
    block(x_TC()).sum().backward()
