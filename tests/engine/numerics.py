"""How right a block is: relative L2 errors against fp64, beside those of the same block and kernel with C = S at P = 1."""
from __future__ import annotations

from functools import cache

import torch

from sim.model import Model
from tests.engine.cases import CPU, Place, block_inputs, block_reference, run_block, running, schedule
from tests.engine.faults import fault

SEQ = 133
CHUNKS = {1: 256, 2: 80, 5: 28, 17: 8}
"""Chunks u -> C: one chunk longer than S, then u chunks with a short last one."""
SEEDS = (0, 1, 2)
BASE = {"fp32": 2e-6, "bf16": 2e-2}
"""The most that one piece may be off, a few units of rounding: without it, a wrong kernel would be compared with itself."""
FACTOR = 2.0


def measure(rank: int, group, model: Model, seq: int, dtype: str, chunk: int, offload: bool, seeds=SEEDS, broken: str | None = None, settings: dict = {}, place: Place = CPU) -> list[dict[str, float]]:
    """Errors of each tensor, for each seed, by strategy `settings`. Runs on one rank; all ranks return the same."""

    def one(seed: int) -> dict[str, float]:
        given = block_inputs(model, seq, dtype, seed, place.device)
        return errors(run_block(program, rank, group, given), right(model, seq, dtype, seed, place.device))

    s = schedule(model, seq, chunk, 1 if group is None else group.size(), dtype, offload, **settings)
    with running(s, rank, group, place) as program, fault(broken):
        return [one(seed) for seed in seeds]


@cache
def right(model: Model, seq: int, dtype: str, seed: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    return split(block_reference(model, block_inputs(model, seq, dtype, seed, device)))


@cache
def base(model: Model, seq: int, dtype: str, seeds=SEEDS, broken: str | None = None, place: Place = CPU) -> list[dict[str, float]]:
    """The errors to compare with: one piece, one rank, nothing offloaded."""
    return measure(0, None, model, seq, dtype, seq, False, seeds, broken, place=place)


def errors(found: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> dict[str, float]:
    """Relative L2 error of each tensor."""
    found = split(found)
    assert found.keys() == right.keys()
    return {n: float((found[n].double() - right[n]).norm() / right[n].norm()) for n in right}


def check(found: list[dict[str, float]], base: list[dict[str, float]], dtype: str) -> None:
    """The bar. Raises AssertionError."""
    for seed, (mine, one) in enumerate(zip(found, base, strict=True)):
        for name in one:
            assert one[name] <= BASE[dtype], f"{name}, seed {seed}: one piece is off by {one[name]:.2g}"
            assert mine[name] <= FACTOR * one[name], f"{name}, seed {seed}: off by {mine[name]:.2g}, one piece by {one[name]:.2g}"


def split(found: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Keys and values apart: they go wrong apart. Not their biases: where keys are not rotated a key bias changes nothing, so
    its gradient is rounding around zero."""
    half = len(found["dWkv"]) // 2
    return {n: t for n, t in found.items() if n != "dWkv"} | {"dWk": found["dWkv"][:half], "dWv": found["dWkv"][half:]}
