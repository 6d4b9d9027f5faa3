"""Ulysses in one piece: q, k and v to heads by all-to-all, one attention call, o back to tokens; the whole block in torch autograd, no chunks."""
from __future__ import annotations

import torch
import torch.distributed as dist

from experiments.peers import layers
from experiments.peers.attention import Attention
from experiments.peers.case import Place, one_call
from sim.schedule import Schedule


class _Exchange(torch.autograd.Function):
    """All-to-all of [P, ...]: part p goes to rank p. Its own transpose."""

    @staticmethod
    def forward(ctx, send_P: torch.Tensor, group) -> torch.Tensor:
        ctx.group = group
        return _exchange(send_P, group)

    @staticmethod
    def backward(ctx, grad_P: torch.Tensor):
        return _exchange(grad_P, ctx.group), None


def _exchange(send_P: torch.Tensor, group) -> torch.Tensor:
    send_P = send_P.contiguous()
    receive_P = torch.empty_like(send_P)
    dist.all_to_all_single(receive_P, send_P, group=group)
    return receive_P


class Ulysses:
    """Rank r has tokens r S/P .. (r + 1) S/P."""

    note = ""

    def __init__(self, schedule: Schedule, part: str, w: layers.Weights, place: Place) -> None:
        one_call(schedule, place.kernel.NAME)
        self.m, self.P, self.part, self.w, self.place = schedule.model, schedule.P, part, w, place
        tokens = schedule.seq // self.P
        self.positions_T = torch.arange(tokens, device=place.device) + place.rank * tokens
        self.angles = layers.angles(self.positions_T, self.m)

    def __call__(self, x_TC: torch.Tensor) -> torch.Tensor:
        q_THD, kv_T2GD = layers.project_in(x_TC, self.w, self.m, self.angles)
        if self.m.kv_heads < self.P:
            kv_T2GD = kv_T2GD.repeat_interleave(self.P // self.m.kv_heads, dim=2)
        o_SHD = Attention.apply(self.place.kernel, self._to_heads(q_THD, 1), self._to_heads(kv_T2GD, 2))
        h_TC = layers.project_out(x_TC, self._to_tokens(o_SHD), self.w, self.m)
        return layers.ffn(h_TC, self.w, self.m) if self.part == "block" else h_TC

    def _to_heads(self, x_T: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's tokens of all heads (counted by dim) -> all tokens of its heads."""
        if self.P == 1:
            return x_T
        return _Exchange.apply(x_T.unflatten(dim, (self.P, -1)).movedim(dim, 0), self.place.group).flatten(0, 1)

    def _to_tokens(self, o_SHD: torch.Tensor) -> torch.Tensor:
        """All tokens of this rank's heads -> its tokens of all heads."""
        if self.P == 1:
            return o_SHD
        return _Exchange.apply(o_SHD.unflatten(0, (self.P, -1)), self.place.group).transpose(0, 1).flatten(1, 2)
