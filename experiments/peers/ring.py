"""Ring: torch's own context parallel (torch.distributed.tensor.experimental.context_parallel) under F.scaled_dot_product_attention.

It deals tokens to ranks itself, the first with the last, and rotates keys and values by its default, one all-gather.
"""
from __future__ import annotations

from contextlib import ExitStack

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel

from experiments.peers import layers
from experiments.peers.case import Place, one_call
from experiments.peers.group import some_group
from sim.errors import UserError
from sim.schedule import Schedule

BACKENDS = {"cuda": ("cuDNN", SDPBackend.CUDNN_ATTENTION)}
"""By device, torch's fastest attention that context parallel knows. It knows none on CPU."""


class Ring:
    """Attention by context parallel, the rest of the block in torch autograd."""

    def __init__(self, schedule: Schedule, part: str, w: layers.Weights, place: Place) -> None:
        if place.device.type not in BACKENDS:
            raise UserError("torch's context parallel has no attention kernel for CPUs")
        if schedule.seq % (2 * schedule.P):
            raise UserError(f"torch's context parallel wants S to be a multiple of {2 * schedule.P}, twice the ranks, not {schedule.seq}")
        self.m, self.part, self.w = schedule.model, part, w
        kernel, backend = BACKENDS[place.device.type]
        one_call(schedule, kernel)
        self.note = f"on torch's {kernel}"
        mesh = DeviceMesh.from_group(some_group(place), place.device.type)
        self.positions_T = torch.arange(schedule.seq, device=place.device)
        self._inside = ExitStack()
        self._inside.enter_context(sdpa_kernel(backend))
        self._inside.enter_context(context_parallel(mesh, buffers=[self.positions_T], buffer_seq_dims=[0], no_restore_buffers={self.positions_T}))
        self.angles = layers.angles(self.positions_T, self.m)

    def __call__(self, x_TC: torch.Tensor) -> torch.Tensor:
        q_THD, kv_T2GD = layers.project_in(x_TC, self.w, self.m, self.angles)
        q, k, v = (t.transpose(0, 1).unsqueeze(0) for t in (q_THD, *kv_T2GD.unbind(1)))
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.m.kv_heads < self.m.heads)
        h_TC = layers.project_out(x_TC, o[0].transpose(0, 1), self.w, self.m)
        return layers.ffn(h_TC, self.w, self.m) if self.part == "block" else h_TC

    def close(self) -> None:
        """Gives torch its own attention back."""
        self._inside.close()
