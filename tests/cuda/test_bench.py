"""Rows of the bench on a GPU: right against fp64 in bf16, and measured. DeepSpeed's too where it is installed."""
from __future__ import annotations

from importlib.util import find_spec

import pytest

from experiments import bench
from sim.strategy import Strategy
from tests.cuda.places import CHUNK, DEVICE, MODEL, SEQ
from tests.engine.numerics import BASE
from tests.peers import rehearsal

ROWS = ("engine", "resident", "ulysses", "ring") + ("deepspeed", "deepspeed-resident") * bool(find_spec("deepspeed") and DEVICE == "cuda")


@pytest.mark.parametrize("row", ROWS)
def test_a_row_is_right(ranks, note, row):
    dtype = "bf16" if DEVICE == "cuda" else "fp32"
    case = bench.cases(MODEL, Strategy(chunk=CHUNK), SEQ // CHUNK * CHUNK, dtype, "attention", [row], 2, DEVICE)[row]
    found, = ranks(1).run(rehearsal.row, case)
    note(f"bench {row}: error of dx", found["error_dx"])
    assert max(found["error_y"], found["error_dx"]) < BASE[dtype]
    assert (found["peak_hbm_bytes"] or 0) > 0 or DEVICE == "cpu"
