"""Layout: dealing and all-to-alls lose, double and misplace nothing; positions are global."""
from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine import launch, pointwise
from engine.deal import IGNORE, deal, gather, padded, shift
from engine.kernels import cpu_flash
from engine.pointwise import angles, rotate
from sim.schedule import Op
from tests.engine.cases import running, schedule, text, tiny, train

CUTS = [(16, 4, 1), (16, 4, 2), (18, 4, 2), (17, 16, 2), (3, 64, 2), (40, 16, 4), (4, 4, 4), (33, 32, 1), (63, 20, 4)]
"""(S, C, P): dividing and not, S < C, S = C + 1, S = P."""


@pytest.mark.parametrize("seq, chunk, P", CUTS)
@pytest.mark.parametrize("more", ((), (3,), (2, 5)))
def test_gather_undoes_deal(seq, chunk, P, more):
    tags = torch.arange(seq * int(np.prod(more))).view(seq, *more)
    whole = padded(tags, P, -1)
    parts = [deal(whole, min(chunk, len(whole)), P, r) for r in range(P)]
    assert len(whole) % P == 0 and len(whole) - seq < P
    assert all(len(part) == len(whole) // P for part in parts)
    assert torch.equal(gather(parts, min(chunk, len(whole))), whole)
    assert torch.equal(whole[:seq], tags) and (whole[seq:] == -1).all()


def test_a_rank_holds_its_part_of_each_chunk():
    assert deal(torch.arange(22), 8, 2, 0).tolist() == [0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18]
    assert deal(torch.arange(22), 8, 2, 1).tolist() == [4, 5, 6, 7, 12, 13, 14, 15, 19, 20, 21]


def test_labels_are_shifted_before_they_are_dealt():
    tokens = torch.arange(100, 123)
    labels = shift(tokens)
    assert labels.tolist() == [*range(101, 123), IGNORE]
    for rank in range(2):
        mine, its = (deal(padded(t, 2, fill), 8, 2, rank) for t, fill in ((tokens, 0), (labels, IGNORE)))
        assert all(label == token + 1 for token, label in zip(mine.tolist(), its.tolist()) if label != IGNORE)
    dealt = [deal(padded(labels, 2, IGNORE), 8, 2, r) for r in range(2)]
    assert sum(int((d != IGNORE).sum()) for d in dealt) == len(tokens) - 1


def test_dealing_takes_memory_of_order_S():
    seen = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            seen.extend(t.numel() for t in (result if isinstance(result, (tuple, list)) else [result]) if isinstance(t, torch.Tensor))
            return result

    x = torch.zeros(1 << 12)
    with Watch():
        parts = [deal(padded(x, 4, 0), 256, 4, r) for r in range(4)]
        gather(parts, 256)
    assert seen and max(seen) <= len(x)


def all_to_all_and_back(rank: int, group, n: int, heads: int, D: int, batch: int):
    """Element for element against slices of the whole."""
    P = group.size()
    rt = launch.Runtime(tiny(heads, heads, D), P, rank, cpu_flash, group, None)
    t, H = n // P, heads // P
    tags = torch.arange(n * heads * D * batch, dtype=torch.int32).view(n, heads, D, batch)
    both = [tags, tags[..., :D // 2, :].short()]  # as q and kv: other sizes, and here another dtype
    mine = [each[rank * t:(rank + 1) * t].unflatten(1, (P, H)).transpose(0, 1).contiguous() for each in both]
    by_heads, back = [torch.full((n, H, *m.shape[3:]), -1, dtype=m.dtype) for m in mine], [torch.full_like(m, -1) for m in mine]
    op = Op("fwd.a2a.qkv[0]", "comm", ("q'", "kv'"), ("q", "kv"), {"n": n})
    launch.LAUNCHERS["a2a"](rt, op, mine, by_heads)
    launch.LAUNCHERS["a2a"](rt, op, by_heads, back)
    return all(torch.equal(b, each[:, rank * H:(rank + 1) * H]) for b, each in zip(by_heads, both)), all(map(torch.equal, back, mine))


@pytest.mark.parametrize("P, n, heads, D, batch", [(2, 6, 4, 8, 1), (2, 2, 2, 4, 3), (4, 12, 8, 2, 1), (4, 4, 4, 6, 2)])
def test_all_to_all_moves_tokens_to_heads_and_back(ranks, P, n, heads, D, batch):
    assert ranks(P).run(all_to_all_and_back, n, heads, D, batch) == [(True, True)] * P


@pytest.mark.parametrize("first", (0, 1000, 2_097_152 - 8, 16_777_300))
def test_angles_are_right_at_millions(first):
    cos, sin = angles(first, 16, 128, 500_000.0, torch.device("cpu"))
    frequency = np.longdouble(500_000.0) ** -(np.arange(0, 128, 2, dtype=np.longdouble) / 128)
    angle = np.outer(np.arange(first, first + 16, dtype=np.longdouble), frequency)
    for found, right in ((cos, np.cos(angle)), (sin, np.sin(angle))):
        assert np.abs(found[:, 0].numpy() - right).max() < 1e-7


def test_positions_count_chunk_and_rank():
    model = tiny(4, 2, 16)
    rt = launch.Runtime(model, 4, 3, cpu_flash, None, None)
    cos, sin = launch._rope(rt, Op("fwd.qkv[9]", "compute", (), (), {"n": 8, "at": 2_000_000}), 2, torch.device("cpu"))
    right = angles(2_000_006, 2, 16, model.rope_theta, torch.device("cpu"))
    assert torch.equal(cos, right[0]) and torch.equal(sin, right[1])


def test_inverse_rotation_is_the_transpose():
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, 5, 3, 16, generator=generator).unbind(0)
    cos, sin = angles(77, 5, 16, 1e4, torch.device("cpu"))
    assert torch.allclose(rotate(rotate(a, cos, sin), cos, sin, inverse=True), a, atol=1e-6)
    assert float((rotate(a, cos, sin) * b).sum()) == pytest.approx(float((a * rotate(b, cos, sin, inverse=True)).sum()), rel=1e-4)


def interleaved(rank: int, group):
    """Two models in one process, alone and taking turns: losses of both, both ways."""
    P = 1 if group is None else group.size()
    models = tiny(8, 8, 16), tiny(4, 1, 32, hidden=48)
    data = [text(m, 50) for m in models]
    alone = []
    for m, (tokens, labels) in zip(models, data):
        with running(schedule(m, 50, 16, P), rank, group) as program:
            alone.append(train(program, rank, group, tokens, labels, 2)[0])
    with running(schedule(models[0], 50, 16, P), rank, group) as one, running(schedule(models[1], 50, 16, P), rank, group) as two:
        together = [train(p, rank, group, *d, 2)[0] for p, d in zip((one, two), data)]
        again = [train(p, rank, group, *d, 2)[0] for p, d in zip((two, one), data[::-1])]
    return alone, together, again[::-1]


@pytest.mark.parametrize("P", (1, 2))
def test_two_models_of_different_heads_keep_their_layouts(ranks, P):
    alone, together, again = ranks(P).run(interleaved)[0]
    assert alone[0] != alone[1]
    assert alone == together == again


@pytest.mark.parametrize("rotary", (8, 32))
def test_compiled_rope_keeps_nothing_but_its_result(rotary):
    """As in the workspaces that its ops declare."""
    from torch._inductor.utils import run_and_get_code

    T, H, D = 64, 4, 32
    cos, sin = pointwise.angles(0, T, rotary, 1e4, torch.device("cpu"))
    q_THD, kv_T2GD = torch.randn(T, H, D), torch.randn(T, 2, H, D)
    for function, args, results in (
        (pointwise.rope_q, (q_THD, cos, sin, torch.empty(1, T, H, D)), 0), (pointwise.rope_kv, (kv_T2GD, cos, sin, torch.empty(1, T, 2, H, D)), 0),
        (pointwise.rope_q_bwd, (q_THD[None], cos, sin, torch.float32), 1), (pointwise.rope_kv_bwd, (kv_T2GD[None], cos, sin, H, torch.float32), 1),
    ):
        _, (code,) = run_and_get_code(torch.compile(function.__wrapped__, fullgraph=True), *args)
        assert code.count("= empty_strided") == results, function.__name__
