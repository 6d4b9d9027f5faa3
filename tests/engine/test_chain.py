"""Chain: hidden states on the host give the bits of hidden states in HBM, from memory that is taken once."""
from __future__ import annotations

import math

import pytest
import torch

from engine.block import Block
from engine.model import LanguageModel
from engine.train import Trainer
from sim.errors import UserError
from sim.model import Model
from sim.schedule import Schedule
from tests.engine.cases import block_inputs, digest, run_block, running, schedule, shard, summed, text, tiny, train

SEQ, CHUNK = 61, 12
SAVES, ORDERS = ("all", "qkvo", "o", "input"), ("query-up", "query-down", "kv-outer")
MODELS = {"llama": tiny(4, 2, 16, layers=2), "gpt": tiny(4, 4, 16, layers=3, kind="gpt")}


def made(model: str, group, hidden: str, dtype: str = "fp32", **settings) -> Schedule:
    return schedule(MODELS[model], SEQ, CHUNK, 1 if group is None else group.size(), dtype, hidden=hidden, **settings)


def block_bits(rank: int, group, model: str, dtype: str, hidden: str, settings: dict) -> dict[str, str]:
    with running(made(model, group, hidden, dtype, **settings), rank, group) as program:
        return {name: digest(t) for name, t in run_block(program, rank, group, block_inputs(MODELS[model], SEQ, dtype, 0)).items()}


@pytest.mark.parametrize("P, dtype", ((1, "bf16"), (2, "fp32")))
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("order", ORDERS)
def test_a_block_gives_the_same_bits(ranks, order, save, model, dtype, P):
    for accum in ("hbm", "host"):
        settings = {"save": save, "order": order, "accum": accum}
        assert ranks(P).run(block_bits, model, dtype, "host", settings) == ranks(P).run(block_bits, model, dtype, "hbm", settings)


def step_bits(rank: int, group, model: str, hidden: str, zero: int, dtype: str, settings: dict) -> list[tuple[float, float]]:
    with running(made(model, group, hidden, dtype, **settings), rank, group) as program:
        trainer = Trainer(program, lr=1e-2, zero=zero, clip=0.5)
        return [tuple(trainer.step(text(MODELS[model], SEQ)[0])) for _ in range(3)]


@pytest.mark.parametrize("P, zero", ((1, 0), (2, 0), (2, 3)))
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("settings", ({}, {"order": "query-down", "save": "o"}, {"order": "kv-outer", "accum": "host", "save": "all"}, {"save": "input"}), ids=str)
def test_training_takes_the_same_steps(ranks, settings, model, P, zero):
    near, far = (ranks(P).run(step_bits, model, hidden, zero, "fp32", settings) for hidden in ("hbm", "host"))
    assert far == near and all(math.isfinite(loss) for loss, _ in far[0])


@pytest.mark.parametrize("P, zero", ((1, 0), (2, 3)))
def test_bf16_training_begins_with_the_same_loss(ranks, P, zero):
    """Its embedding sums in fp32 on the host, and as torch does it (on CPU in bf16) in HBM, so that later ones part by rounding."""
    near, far = (ranks(P).run(step_bits, "llama", hidden, zero, "bf16", {})[0] for hidden in ("hbm", "host"))
    assert far[0][0] == near[0][0] and far[0][1] == pytest.approx(near[0][1], rel=1e-3)
    for (mine, _), (other, _) in zip(far, near):
        assert mine == pytest.approx(other, rel=1e-2)


def gradients(rank: int, group, hidden: str, dtype: str, scale: float, model: Model = MODELS["llama"]) -> dict[str, torch.Tensor]:
    with running(schedule(model, SEQ, CHUNK, 1, dtype, hidden=hidden), rank, group) as program:
        lm = LanguageModel(program)
        (lm(*shard(program.schedule, rank, *text(model, SEQ))) * scale).backward()
        return {name: summed(p.grad, group) for name, p in lm.named_parameters()}


@pytest.mark.parametrize("dtype", ("fp32", "bf16"))
def test_only_the_embedding_sums_otherwise(dtype):
    near, far = (gradients(0, None, hidden, dtype, 1.0) for hidden in ("hbm", "host"))
    differ = {name for name in near if not torch.equal(near[name], far[name])}
    assert differ == (set() if dtype == "fp32" else {"embedding"})
    assert (far["embedding"] - near["embedding"]).norm() <= 1e-2 * near["embedding"].norm()


@pytest.mark.parametrize("scale", (2.0, 0.3, 0.0))
def test_a_loss_that_counts_otherwise_scales_all_gradients(scale):
    """Which is the gradient's gradient on the ticket, as the host's copy stays as it is."""
    once, scaled = (gradients(0, None, "host", "fp32", k) for k in (1.0, scale))
    for name in once:
        torch.testing.assert_close(scaled[name], scale * once[name], rtol=1e-6, atol=0)


def test_gradients_add_up_over_two_steps_and_evaluation_changes_none():
    model = MODELS["llama"]
    with running(schedule(model, SEQ, CHUNK, hidden="host")) as program:
        lm, given = LanguageModel(program), shard(program.schedule, 0, *text(model, SEQ))
        lm(*given).backward()
        once = {name: p.grad.clone() for name, p in lm.named_parameters()}
        with torch.no_grad():
            losses = {float(lm(*given)) for _ in range(2)}
        assert losses == {float(lm(*given).detach())}
        lm(*given).backward()
        assert all(torch.equal(p.grad, 2 * once[name]) for name, p in lm.named_parameters())


def test_memory_is_taken_once():
    """Arenas and the chain's, of exactly the bytes that the simulator counts; nothing as long as S lies in HBM."""
    s, taken = schedule(MODELS["llama"], SEQ, CHUNK, hidden="host"), []
    with running(s) as program:
        arena = program.backend.arena
        program.backend.arena = lambda space, size: taken.append(size) or arena(space, size)
        assert program.chain.memory.numel() == s.handed_bytes == 8 * SEQ + 4 * 64 * SEQ * (s.layers + 2)
        train(program, 0, None, *text(MODELS["llama"], SEQ), 2)
    assert taken == []
    assert not any(b.space == "hbm" and b.life == "argument" and b.role in ("x", "y", "dx", "dy", "label") for r in s.regions.values() for b in r.buffers.values())


def test_only_streams_that_touch_what_the_caller_owns_meet_it_at_borders():
    met = {}
    for hidden in ("hbm", "host"):
        with running(schedule(MODELS["llama"], SEQ, CHUNK, hidden=hidden)) as program:
            met[hidden] = list(program._shared), list(program.backend.streams)
    assert met["hbm"][0] == ["compute", "d2h"] and met["host"][0] == ["compute"]  # d2h: x is kept on the host


def test_the_caller_comes_after_what_touches_its_memory_and_nothing_else():
    """Behind forward: the last use of its weights and the copy of its input, not the copies of what it has saved."""
    s, met = schedule(MODELS["llama"], SEQ, CHUNK), []
    with running(s) as program:
        meet = program.backend.meet
        program.backend.meet = lambda events: meet(met.append(list(events)) or met[-1])
        Block(program, 0)(torch.zeros(SEQ, 64))
        _, issued = program._previous
        program.backend.settle()
    u = len(s.chunks) - 1
    assert met[0] == [issued[f"fwd.ffn[{u}]"], issued[f"fwd.offload.x[{u}]"]]
    assert [op.id for op in s.regions["fwd"].ops if op.stream == "d2h"][-1] == f"fwd.offload.lse[{u}]"


@pytest.mark.parametrize("hidden", ("hbm", "host"))
def test_regions_in_an_order_that_no_lint_has_walked_wait_for_each_other(hidden):
    """A loss without backward, and the next forward: copies of the first may still read what the second writes."""
    s, joined = schedule(MODELS["llama"], SEQ, CHUNK, hidden=hidden), []
    with running(s) as program:
        lm, (tokens, labels) = LanguageModel(program), text(MODELS["llama"], SEQ)
        run, join = program.run, program.backend.join
        program.run = lambda region, layer, arguments: joined.append((region, layer)) or run(region, layer, arguments)
        program.backend.join = lambda streams: joined.append(set(streams)) or join(streams)
        with torch.no_grad():
            losses = [float(lm(*shard(s, 0, tokens, labels))) for _ in range(2)]
        program.backend.join = join
    every = set(program.backend.streams)
    forward = [("fwd", layer) for layer in range(s.layers)]
    assert losses[0] == losses[1]
    assert [met for met in joined[joined.index(("loss", s.layers - 1)):] if met != every][1:] == [*forward, ("loss", s.layers - 1)]
    at = joined.index(forward[0], 1 + joined.index(("loss", s.layers - 1)))
    assert joined[at + 1] == every and every not in joined[at + 2:]


def test_a_hidden_state_itself_is_refused():
    with running(schedule(MODELS["llama"], SEQ, CHUNK, hidden="host")) as program:
        lm = LanguageModel(program)
        with pytest.raises(UserError, match="the schedule wants .., a ticket: hidden states lie on the host"):
            lm.blocks[0](torch.zeros(SEQ, 64))
        with pytest.raises(UserError, match="loss inputs have shape .61, 64.; the schedule wants .., a ticket"):
            lm.loss(torch.zeros(SEQ, 64), torch.zeros(SEQ, dtype=torch.int64), SEQ)
