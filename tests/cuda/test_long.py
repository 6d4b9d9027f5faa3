"""A tensor past 2^31 elements: q of the first chunk has 132096 x 128 x 128. Right against fp64, where 16 rows have queries. cuDNN
refuses it: its dx through keys was off by 9% (tests/engine/test_choose.py)."""
from __future__ import annotations

from functools import cache

import pytest
import torch

from sim.model import Model
from tests.cuda.places import DEVICE, EACH, KERNELS
from tests.engine.cases import Place, block_inputs, run_block, running, schedule
from tests.engine.numerics import check, errors, split
from tests.engine.rows import only, picked, rows_reference

MODEL = Model("long", "llama", 1, 256, 128, 8, 128, 256, 8)
SEQ, CHUNK = (136192, 132096) if DEVICE == "cuda" else (272, 264)
ROWS = sorted({CHUNK - 1, CHUNK, SEQ - 1, *(7 + k * SEQ // 13 for k in range(13))})
"""Some of each chunk, the last of each among them."""
WITHIN_S = 300
"""Indices of 64 bits are compiled anew."""


def inputs() -> dict[str, torch.Tensor]:
    given = block_inputs(MODEL, SEQ, "bf16", 0, DEVICE)
    return given | {"dy": only(ROWS, given["dy"])}


@cache
def right() -> dict[str, torch.Tensor]:
    return split(rows_reference(MODEL, inputs(), ROWS))


def off(rank: int, group, place: Place, chunk: int, offload: bool) -> dict[str, float]:
    """Relative L2 error of each tensor."""
    right()  # in memory that is free again before the arenas are taken
    with running(schedule(MODEL, SEQ, chunk, 1, "bf16", offload), rank, group, place) as program:
        return errors(picked(run_block(program, rank, group, inputs()), ROWS), right())


@pytest.mark.parametrize("kernel", [param for param in EACH if DEVICE == "cpu" or "cudnn" not in param.values])
def test_error_is_at_most_twice_that_of_one_piece(ranks, note, kernel):
    assert DEVICE == "cpu" or CHUNK * MODEL.q_dim > 2**31
    one, = ranks(1).run(off, KERNELS[kernel], SEQ, False, within_s=WITHIN_S)
    found = [ranks(1).run(off, KERNELS[kernel], CHUNK, offload, within_s=WITHIN_S)[0] for offload in (True, False)]
    note("error of one long piece", max(one.values()))
    note("long error over one piece's", max(each[name] / one[name] for each in found for name in one))
    check(found, [one, one], "bf16")
