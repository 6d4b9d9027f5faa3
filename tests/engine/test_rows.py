"""The reference of a few rows is the whole reference."""
from __future__ import annotations

import pytest

from tests.engine.cases import block_inputs, block_reference, tiny
from tests.engine.numerics import errors, split
from tests.engine.rows import only, picked, rows_reference

ROWS = [0, 7, 40, 59, 60]


@pytest.mark.parametrize("kv_heads", (1, 2, 4))
def test_it_equals_the_whole_reference(kv_heads):
    model = tiny(4, kv_heads, 16)
    inputs = block_inputs(model, 61, "fp32", 0)
    inputs["dy"] = only(ROWS, inputs["dy"])
    whole = picked(block_reference(model, inputs), ROWS)
    assert max(errors(rows_reference(model, inputs, ROWS), split(whole)).values()) < 1e-12
