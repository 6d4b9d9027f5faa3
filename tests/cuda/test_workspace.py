"""Workspace: what a launcher takes from the allocator beside its operands is declared, and no more is declared than is taken."""
from __future__ import annotations

import pytest

from sim.model import Model, model
from tests.cuda.places import EACH, KERNELS, needs_cuda
from tests.cuda.steps import second_step
from tests.engine.hooks import workspaces

pytestmark = needs_cuda
SEQ, CHUNK = 16384, 8192
SLACK_BYTES = 4096
REGIONS = ("fwd", "loss", "bwd")


@pytest.fixture(scope="module", params=("llama3-8b", "gpt-13b"))
def shapes(request) -> Model:
    """GQA with RoPE on whole heads; MHA with RoPE on a part."""
    return model(request.param, layers=1)


@pytest.fixture(scope="module", params=EACH)
def found(ranks, request, shapes) -> dict[str, tuple[int, int]]:
    """op id -> (bytes taken, bytes declared)."""
    return ranks(1).run(second_step, KERNELS[request.param], shapes, SEQ, CHUNK, workspaces)[0]


def test_no_op_takes_more_than_it_declares(found, note):
    shares: dict[str, list[float]] = {}
    for id, (used, declared) in found.items():
        if declared:
            shares.setdefault(id.split("[")[0], []).append(used / declared)
    for op, share in shares.items():
        note(f"taken / declared by {op}", max(share))
    assert {id: both for id, both in found.items() if both[0] > both[1] + SLACK_BYTES} == {}


@pytest.mark.parametrize("region", REGIONS)
def test_a_regions_largest_is_taken_too(found, note, region):
    used, declared = (max(both[k] for id, both in found.items() if id.startswith(f"{region}.")) for k in (0, 1))
    note(f"largest declared / taken in {region}", declared / used)
    assert declared <= 1.1 * used
