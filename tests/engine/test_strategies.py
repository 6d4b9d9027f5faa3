"""Every way to save and to walk backward, both kinds of block: right against fp64, and the same bits wherever tensors rest."""
from __future__ import annotations

import pytest
import torch

from sim import upstream
from tests.engine.cases import block_inputs, run_block, running, schedule, tiny
from tests.engine.numerics import CHUNKS, SEQ, base, check, measure

SAVES, ORDERS = ("all", "qkvo", "o", "input"), ("query-up", "query-down", "kv-outer")
WAYS = {
    False: {"accum": "hbm", "rows": "alternating", "skip_resident": False, "reuse_slack": 4},
    True: {"accum": "host", "resident": 0.5, "rows": "alternating", "skip_resident": True, "reuse_slack": 4},
}
"""By offload; ascending rows, accumulators in HBM are test_numerics' and test_bits_depend's."""
TIGHT = {"accum": "host", "skip_resident": True, "reuse_slack": 4}
MODELS = {
    "llama": tiny(4, 2, 64, hidden=96, ffn=160, vocab=8),
    "llama, one KV head": tiny(4, 1, 64, hidden=96, ffn=160, vocab=8),
    "gpt": tiny(4, 4, 80, hidden=96, ffn=160, vocab=8, kind="gpt"),
}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("save", SAVES)
@pytest.mark.parametrize("P", (1, 2))
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("dtype", ("fp32", "bf16"))
def test_error_is_at_most_twice_that_of_one_piece(ranks, dtype, model, P, save, order):
    for offload, way in WAYS.items():
        found = ranks(P).run(measure, MODELS[model], SEQ, dtype, CHUNKS[5], offload, (0,), None, {"save": save, "order": order, **way})
        assert all(each == found[0] for each in found)
        check(found[0], base(MODELS[model], SEQ, dtype, (0,)), dtype)


@pytest.mark.parametrize("u", CHUNKS)
@pytest.mark.parametrize("model", MODELS)
def test_gradients_do_not_get_worse_with_chunks(ranks, model, u):
    for order in ORDERS[1:]:
        check(ranks(2).run(measure, MODELS[model], SEQ, "fp32", CHUNKS[u], True, (0,), None, {"save": "input", "order": order, **WAYS[True]})[0],
              base(MODELS[model], SEQ, "fp32", (0,)), "fp32")


@pytest.mark.parametrize("P", (1, 2))
@pytest.mark.parametrize("dtype", ("fp32", "bf16"))
def test_the_released_schedule_is_right_too(ranks, dtype, P):
    """As it is, but for where its pinned memory comes from: merges of their own, messages in parts, blocks, sums of dq through the host."""
    way = upstream.FIELDS | {"alloc": "plan"}
    found = ranks(P).run(measure, MODELS["llama"], SEQ, dtype, CHUNKS[5], True, (0,), None, way)
    assert all(each == found[0] for each in found)
    check(found[0], base(MODELS["llama"], SEQ, dtype, (0,)), dtype)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("model", MODELS)
def test_bits_depend_on_the_order_of_sums_alone(model, order):
    """Saving or recomputing, host or HBM, slots kept or not, space reused or not: the same bits."""
    inputs, first = block_inputs(MODELS[model], SEQ, "bf16", 0), None
    for save in SAVES:
        for way in ({}, {"offload": False}, {"resident": 0.5}, {"resident": 1.0, "skip_resident": True}, TIGHT, {**TIGHT, "hidden": "host"}, {"hidden": "host"}):
            s = schedule(MODELS[model], SEQ, CHUNKS[5], 1, "bf16", reuse="reuse_slack" in way, save=save, order=order, **way)
            with running(s) as program:
                found = run_block(program, 0, None, inputs)
            first = first or found
            for name in first:
                assert torch.equal(found[name], first[name]), (save, way, name)
