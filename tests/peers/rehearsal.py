"""Rehearsal: rows of the bench on CPU ranks; torch's context parallel too, which is given the CPU flash kernel that it does not know."""
from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental._context_parallel import _attention as templates
from torch.nn.attention import SDPBackend

from engine.backend.cpu import CpuBackend
from engine.kernels import cpu_flash
from experiments.peers import layers, ring, serve
from experiments.peers.case import Case, Place

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
FLASH_BWD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def errors(rank: int, group, case: Case) -> dict[str, float]:
    """Of a row, at the small size."""
    _know_cpu()
    streams = CpuBackend()
    try:
        return serve.errors(case, Place(rank, group, streams.device, streams, cpu_flash))
    finally:
        streams.close()


def row(rank: int, group, case: Case) -> dict:
    """All of a row."""
    _know_cpu()
    return serve.measured(case, rank, group, lambda done, total: None)


def _know_cpu() -> None:
    ring.BACKENDS["cpu"] = "CPU flash", SDPBackend.FLASH_ATTENTION
    templates.custom_ops |= {FLASH: _forward, FLASH_BWD: _backward}


def _forward(op, args, kwargs):
    q, k, v, dropout, causal = args
    mesh = q.device_mesh
    parts = templates._templated_ring_attention(mesh.get_group(), 2, op, *(t.to_local() for t in (q, k, v)), is_causal=causal, dropout_p=dropout)
    return tuple(DTensor.from_local(t, mesh, [Shard(2)], run_check=False) for t in parts)


def _backward(op, args, kwargs):
    *tensors, dropout, causal = args
    mesh = tensors[0].device_mesh
    grad, q, k, v, out, lse = (t.to_local() for t in tensors)
    parts = templates._templated_ring_attention_backward(mesh.get_group(), 2, op, grad, "grad_out", q, k, v, out, lse, causal, dropout_p=dropout)
    return tuple(DTensor.from_local(t, mesh, [Shard(2)], run_check=False) for t in parts)


def errors_without_rope(rank: int, group, case: Case) -> dict[str, float]:
    """Of a row whose queries and keys are not rotated."""
    right, layers.turn = layers.turn, lambda x_THD, cos, sin: x_THD
    try:
        return errors(rank, group, case)
    finally:
        layers.turn = right
