"""Every way to save and to walk backward on both kernels: right against fp64, in bf16."""
from __future__ import annotations

import pytest

from tests.cuda.places import CHUNK, KERNELS, SEQ, every_kernel, one_and_two_ranks, refused
from tests.engine.cases import Place, tiny
from tests.engine.numerics import base, check, measure
from tests.engine.test_strategies import MODELS, ORDERS, SAVES, WAYS

TAKEN = MODELS | {"gpt, head_dim 64": tiny(4, 4, 64, hidden=96, ffn=160, vocab=8, kind="gpt")}
"""Not every kernel takes a head_dim of 80."""


def one_piece(rank: int, group, model: str, place: Place):
    """Errors of the same block and kernel with C = S at P = 1."""
    return base(TAKEN[model], SEQ, "bf16", (0,), None, place)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("save", SAVES)
@one_and_two_ranks
@pytest.mark.parametrize("model", TAKEN)
@every_kernel
def test_error_is_at_most_twice_that_of_one_piece(ranks, note, kernel, model, P, save, order):
    if why := refused(kernel, TAKEN[model]):
        pytest.skip(why)
    one, = ranks(1).run(one_piece, model, KERNELS[kernel])
    found = [each for offload, way in WAYS.items() for each in ranks(P).run(
        measure, TAKEN[model], SEQ, "bf16", CHUNK, offload, (0,), None, {"save": save, "order": order, **way}, KERNELS[kernel])]
    note("error of one piece", max(one[0].values()))
    note("error over one piece's", max(each[0][name] / one[0][name] for each in found for name in one[0]))
    for each in found:
        check(each, one, "bf16")
