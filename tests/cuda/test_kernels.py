"""Attention kernels alone on a GPU: any backward takes any forward's merged row, results go where they are told, rates are found."""
from __future__ import annotations

import pytest
import torch

from engine.kernels import flash_attn_4
from engine.kernels.choose import choose, usable
from engine.kernels.rates import Rate, rates
from sim.kernels import KERNELS as DECLARED
from sim.kernels import parted
from sim.model import model
from tests.cuda.places import EACH, KERNELS, needs_cuda, refused
from tests.engine.cases import tiny
from tests.engine.row import row_errors

pytestmark = needs_cuda
WORST = 1e-2
"""bf16 results, fp32 sums of two parts."""
SHAPES = ((4, 4, 64), (8, 2, 128), (8, 1, 128), (8, 8, 80))
"""(query heads, KV heads, head_dim)"""


def taken(heads: int, kv_heads: int, head_dim: int, *kernels: str) -> None:
    """Skips what a kernel refuses."""
    for name in kernels:
        if why := refused(name, tiny(heads, kv_heads, head_dim)):
            pytest.skip(f"{name} {why}")


@pytest.mark.parametrize("heads, kv_heads, head_dim", SHAPES)
@pytest.mark.parametrize("backward", EACH)
@pytest.mark.parametrize("forward", EACH)
def test_any_backward_takes_any_forwards_merged_row(note, forward, backward, heads, kv_heads, head_dim):
    taken(heads, kv_heads, head_dim, forward, backward)
    found = row_errors(forward, backward, heads, kv_heads, head_dim, torch.bfloat16, "cuda")
    for name, error in found.items():
        note(f"{name} of {forward}, {backward}", error)
    assert max(found.values()) < WORST


@pytest.mark.skipif("flash_attn_4" not in KERNELS, reason="not installed, or not for this GPU")
@pytest.mark.parametrize("heads, kv_heads, head_dim", SHAPES)
def test_flash_attn_4_writes_where_it_is_told_and_takes_no_more(heads, kv_heads, head_dim):
    taken(heads, kv_heads, head_dim, "flash_attn_4")
    assert max(row_errors("flash_attn_4", "flash_attn_4", heads, kv_heads, head_dim, torch.bfloat16, "cuda", given=True).values()) < WORST
    q, kv = (torch.randn(n, *shape, head_dim, device="cuda", dtype=torch.bfloat16) for n, *shape in ((4096, heads), (4096, 2, kv_heads)))
    room = torch.empty_like(q), torch.empty(heads, 4096, device="cuda")
    for causal in (False, True):
        flash_attn_4.forward(q, kv, causal, *room)
        before = torch.cuda.memory_stats()["requested_bytes.all.current"]
        torch.cuda.reset_peak_memory_stats()
        flash_attn_4.forward(q, kv, causal, *room)
        assert torch.cuda.memory_stats()["requested_bytes.all.peak"] == before


def test_it_runs_on_the_current_stream():
    """Work that a side stream has yet to do is done before a kernel on that stream reads it."""
    q, kv = (torch.randn(2048, *shape, 128, device="cuda", dtype=torch.bfloat16) for shape in ((8,), (2, 2)))
    for name in KERNELS:
        kernel = next(k for k in usable(model("llama3-8b"), "bf16", torch.cuda.get_device_capability()) if k.__name__.endswith(name))
        right = kernel.forward(q, kv, True)[0].clone()
        late, side = torch.zeros_like(q), torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(100_000_000)
            late.copy_(q)
            found = kernel.forward(late, kv, True)[0]
        side.synchronize()
        assert torch.equal(found, right), name


@pytest.mark.parametrize("name", ("llama3-8b", "gpt-2.7b"))
def test_the_choice_is_named_and_declared(note, name):
    m = model(name)
    kernels = usable(m, "bf16", torch.cuda.get_device_capability())
    found = rates(tuple(kernels), m.heads, m.kv_heads, m.head_dim)
    for kernel, rate in found.items():
        assert isinstance(rate, Rate), rate
        note(f"{name}: {kernel} forward TFLOP/s", rate.forward_TFLOPS)
        note(f"{name}: {kernel} backward TFLOP/s", rate.backward_TFLOPS)
    assert set(parted(choose(kernels, m, 1).NAME)) <= set(DECLARED)
