"""Kernels: declared workspace, against what was once measured on an H200 (requested bytes, torch 2.11)."""
from __future__ import annotations

import pytest

from sim.build.step import build
from sim.kernels import KERNELS, Shape, joined, parted
from sim.model import model
from sim.ops import KINDS, alike
from sim.strategy import Strategy

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


def test_flash_attn_4_beyond_what_it_is_given():
    """The same chunk: forward nothing, backward 521 MiB (16 KV heads) and 777 (4) beyond dq, dk and dv."""
    for kv_heads, backward in ((16, 521), (4, 777)):
        shape = Shape(65536, 65536, 16, kv_heads, 128, 2)
        known, results = KERNELS["flash-attn-4"], shape.q_bytes + shape.kv_bytes
        assert known.forward(shape._replace(lse_given=True, out_given=True)) == 0
        assert known.forward(shape._replace(lse_given=True)) == 256 * MIB
        assert known.forward(shape) == 260 * MIB
        assert known.backward(shape) - results == pytest.approx(backward * MIB, rel=0.005)


def test_only_one_that_writes_where_it_is_told_needs_less_for_it():
    given = LLAMA_8B._replace(lse_given=True, out_given=True)
    assert {name for name, known in KERNELS.items() if known.forward(given) < known.forward(LLAMA_8B)} == {"flash-attn-4"}
    assert all(known.backward(given) == known.backward(LLAMA_8B) for known in KERNELS.values())


@pytest.mark.parametrize("name, two", [
    ("cuDNN", ("cuDNN", "cuDNN")), ("cuDNN forward, flash-attn-4 backward", ("cuDNN", "flash-attn-4")),
    ("torch flash (FA2) forward, cuDNN backward", ("torch flash (FA2)", "cuDNN")),
])
def test_one_name_may_stand_for_two(name, two):
    assert parted(name) == two and joined(*two) == name


def test_the_first_pair_of_a_row_has_room_for_results():
    """Row 0 has one pair: nothing of its own. Other rows keep their output in fp32 until the last pair: only lse goes there at first."""
    s = build(model("llama3-8b", layers=1), Strategy(chunk=8192), 4 * 8192)
    ops = {op.id: op for op in s.regions["fwd"].ops if op.kind == "attn"}

    def forward(id: str, kernel: str) -> int:
        return KINDS["attn"].workspace(ops[id], s, kernel) // MIB

    pairs = ("fwd.attn[0,0]", "fwd.attn[2,0]", "fwd.attn[2,1]", "fwd.attn[2,2]")
    assert [forward(id, "flash-attn-4") for id in pairs] == [0, 64, 65, 65]
    assert [forward(id, "flash-attn-4 forward, cuDNN backward") for id in pairs] == [0, 64, 65, 65]
    assert [forward(id, "cuDNN forward, flash-attn-4 backward") for id in pairs] == [65] * 4
    sizes: dict[tuple, set[int]] = {}
    for op in ops.values():
        sizes.setdefault(alike(op, s), set()).add(forward(op.id, "flash-attn-4"))
    assert all(len(found) == 1 for found in sizes.values())
    backward = next(op for op in s.regions["bwd"].ops if op.kind == "attn_bwd")
    by = [KINDS["attn_bwd"].workspace(backward, s, name) for name in ("cuDNN", "flash-attn-4 forward, cuDNN backward", "flash-attn-4")]
    assert by[0] == by[1] != by[2]
