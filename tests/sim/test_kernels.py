"""Kernels: declared workspace, against what was once measured on an H200 (requested bytes, torch 2.11)."""
from __future__ import annotations

import pytest

from sim.kernels import KERNELS, Shape

MIB = 1 << 20
LLAMA_8B, GPT_2_7B = Shape(8192, 8192, 32, 8, 128, 2), Shape(8192, 8192, 32, 32, 80, 2)


@pytest.mark.parametrize("kernel, shape, forward, backward", [
    ("cuDNN", LLAMA_8B, 65, 354), ("torch flash (FA2)", LLAMA_8B, 193, 449), ("cuDNN", GPT_2_7B, 41, 201), ("torch flash (FA2)", GPT_2_7B, 41, 217),
])
def test_declared_is_what_was_measured(kernel, shape, forward, backward):
    known = KERNELS[kernel]
    assert known.forward(shape) == forward * MIB
    assert backward * MIB <= known.backward(shape) <= 1.01 * backward * MIB


def test_the_largest_chunk_of_the_reference_measurement():
    """16 query heads, 64K tokens, on one H200: forward 260 MiB, backward 1284 (16 KV heads) and 1412 (4)."""
    for kv_heads, backward in ((16, 1284), (4, 1412)):
        shape = Shape(65536, 65536, 16, kv_heads, 128, 2)
        assert KERNELS["cuDNN"].forward(shape) == 260 * MIB
        assert KERNELS["cuDNN"].backward(shape) == pytest.approx(backward * MIB, rel=0.005)
