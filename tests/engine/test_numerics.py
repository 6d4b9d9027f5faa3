"""Numerics: the whole grid against fp64, and the faults that must turn it red."""
from __future__ import annotations

import pytest

from tests.engine.cases import tiny
from tests.engine.numerics import CHUNKS, SEQ, base, check, measure

HEADS = {"MHA": 4, "GQA": 2, "one KV head": 1}


def grid_model(heads: str, head_dim: int):
    return tiny(4, HEADS[heads], head_dim, hidden=96, ffn=160, vocab=8)


@pytest.mark.parametrize("u", CHUNKS)
@pytest.mark.parametrize("P", (1, 2))
@pytest.mark.parametrize("head_dim", (64, 128))
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("dtype", ("fp32", "bf16"))
def test_error_is_at_most_twice_that_of_one_piece(ranks, dtype, heads, head_dim, P, u):
    model = grid_model(heads, head_dim)
    for offload in (True, False):
        found = ranks(P).run(measure, model, SEQ, dtype, CHUNKS[u], offload)
        assert all(each == found[0] for each in found)
        check(found[0], base(model, SEQ, dtype), dtype)


@pytest.mark.parametrize("dtype", ("fp32", "bf16"))
def test_error_does_not_grow_with_the_number_of_chunks(dtype):
    model, seq = tiny(4, 4, 64, hidden=96, ffn=160, vocab=8), 128
    for u in (1, 2, 4, 8, 16, 32):
        check(measure(0, None, model, seq, dtype, seq // u, True, (0,)), base(model, seq, dtype, (0,)), dtype)


@pytest.mark.parametrize("kv_heads", (1, 2, 4, 8))
def test_four_ranks_split_and_share_kv_heads(ranks, kv_heads):
    model = tiny(8, kv_heads, 16)
    for offload in (True, False):
        check(ranks(4).run(measure, model, 45, "fp32", 16, offload, (0,))[0], base(model, 45, "fp32", (0,)), "fp32")


@pytest.mark.parametrize("seq, chunk", [(33, 32), (5, 64), (34, 32), (2, 2), (3, 2)])
@pytest.mark.parametrize("P", (1, 2))
def test_lengths_at_the_edges(ranks, P, seq, chunk):
    model = tiny(4, 2, 16)
    check(ranks(P).run(measure, model, seq, "fp32", chunk, True, (0,))[0], base(model, seq, "fp32", (0,)), "fp32")


@pytest.mark.parametrize("broken, P, heads", [
    ("wrong scale", 1, "GQA"), ("zeros", 1, "MHA"), ("zero attention", 1, "MHA"), ("last chunk dropped", 1, "GQA"),
    ("KV-gradient sum skipped", 2, "one KV head"), ("RoPE local to the rank", 2, "GQA"),
    ("RoPE local to the chunk", 1, "GQA"), ("fp16 accumulators", 1, "MHA"),
])
def test_a_planted_fault_turns_the_check_red(ranks, broken, P, heads):
    model = grid_model(heads, 64)
    found = ranks(P).run(measure, model, SEQ, "fp32", CHUNKS[5], True, (0,), broken)[0]
    with pytest.raises(AssertionError, match="off by"):
        check(found, base(model, SEQ, "fp32", (0,), broken), "fp32")
    check(ranks(P).run(measure, model, SEQ, "fp32", CHUNKS[5], True, (0,))[0], base(model, SEQ, "fp32", (0,)), "fp32")
