"""Merging partial outputs: exact where it can be, stable for any gap."""
from __future__ import annotations

import pytest
import torch

from engine.merge import merge


def merged(outs, lses, dtype=torch.float32):
    """One head, one token, head_dim 2; the parts come in turn, as chunks do."""
    def part(value):
        return torch.full((1, 1, 2), float(value), dtype=dtype)

    acc, lse = part(outs[0]).float(), torch.tensor([[float(lses[0])]])
    for out, more in zip(outs[1:], lses[1:]):
        merge(acc, lse, part(out), torch.tensor([[float(more)]]), acc, lse)
    return acc, lse


def test_a_gap_that_overflows_exp_in_fp32():
    acc, lse = merged((1, 2, 3), (0, 89, 1))
    assert acc.tolist() == [[[2.0, 2.0]]]
    assert lse.item() == 89.0


@pytest.mark.parametrize("gap", (88.7, 200.0, 1e4, 3e38, float("inf")))
def test_the_larger_side_wins_whichever_comes_first(gap):
    for outs, lses, winner in (((1, 2), (0, gap), 2), ((1, 2), (gap, 0), 1), ((1, 2), (0, -gap), 1), ((1, 2), (-gap, 0), 2)):
        if max(lses) == float("inf"):
            continue
        acc, lse = merged(outs, lses)
        assert acc.tolist() == [[[winner, winner]]]
        assert lse.item() == pytest.approx(max(lses))


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_close_parts_are_the_weighted_mean(dtype):
    generator = torch.Generator().manual_seed(0)
    S, H, D = 7, 3, 4
    outs = torch.randn(5, S, H, D, generator=generator).to(dtype)
    lses = 3 * torch.randn(5, H, S, generator=generator)
    acc, lse = outs[0].float().clone(), lses[0].clone()
    for out, more in zip(outs[1:], lses[1:]):
        merge(acc, lse, out, more, acc, lse)
    weights = torch.softmax(lses.double(), 0)
    right = torch.einsum("nhs,nshd->shd", weights, outs.double())
    assert torch.allclose(acc.double(), right, rtol=0, atol=1e-6)
    assert torch.allclose(lse.double(), torch.logsumexp(lses.double(), 0), rtol=0, atol=1e-6)


def test_the_last_merge_may_write_another_dtype():
    acc, lse, out = torch.ones(1, 1, 2), torch.zeros(1, 1), torch.empty(1, 1, 2, dtype=torch.bfloat16)
    merge(acc, lse, torch.full((1, 1, 2), 3.0, dtype=torch.bfloat16), torch.zeros(1, 1), out, lse)
    assert out.tolist() == [[[2.0, 2.0]]]
    assert acc.tolist() == [[[1.0, 1.0]]]
