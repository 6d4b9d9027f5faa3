"""Model states: parameters, their gradients and the optimizer, whole on every rank (ZeRO 0) or sharded over all ranks (ZeRO 3).

Either way parameters, gradients and AdamW's two moments are fp32, 16 bytes a parameter, and a bf16 schedule sees bf16 copies that
live as long as it uses them: whole parameters are cast by the block that reads them, sharded ones by FSDP2 as it gathers them.
Gradients sum over the ranks (FSDP2 averages unless told otherwise). One rank has nothing to shard: ZeRO 3 is ZeRO 0 there.

    states = States(model, zero, group, device, dtype);  states.load(initial(...))
    loss.backward();  total = states.reduce(loss);  norm = states.update(clip)
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import cache

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from engine.compile import Program
from engine.model import LanguageModel
from engine.pulse import TIMEOUT_S


class States:
    """The states of a model, built on the meta device, on one rank of a group (None: alone)."""

    def __init__(self, model: LanguageModel, zero: int, group: dist.ProcessGroup | None, device: torch.device, dtype: str, lr: float = 3e-3) -> None:
        self.model, self.group, self.device = model, group, device
        self.sharded = zero == 3 and group is not None and group.size() > 1
        if self.sharded:
            _shard(model, group, device, dtype)
        model.to_empty(device=device)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True)
        for p in model.parameters():  # AdamW would make them in its first step, from memory that hidden states have just left: none of those fits there again
            self.optimizer.state[p] = {"step": torch.zeros((), dtype=torch.float32, device=device)} | {m: torch.zeros_like(p) for m in ("exp_avg", "exp_avg_sq")}

    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Fills parameters from whole fp32 tensors by name, the same on every rank, one at a time."""
        with torch.no_grad():
            for name, whole in weights:
                mine = self.model.get_parameter(name)
                if isinstance(mine, DTensor):
                    whole = distribute_tensor(whole.to(mine.device), mine.device_mesh, mine.placements, src_data_rank=None)
                mine.copy_(whole)

    def total(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss of all ranks."""
        loss = loss.detach().clone()
        if self.group is not None:
            dist.all_reduce(loss, group=self.group)
        return loss

    def reduce(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss of all ranks; gradients hold the sum over the ranks after it (FSDP2 has summed its own in backward)."""
        if self.group is None or self.sharded:
            return self.total(loss)
        loss = loss.detach().clone()
        self.group.allreduce_coalesced([loss, *self._grads()], dist.AllreduceCoalescedOptions()).wait()  # in place, and one launch
        return loss

    def update(self, clip: float | None = None) -> torch.Tensor:
        """One optimizer step, gradients scaled to a global norm of at most `clip`; returns the norm they had. Gradients are gone after it."""
        norm = self.grad_norm()
        if clip is not None:
            clip_grads_with_norm_(self.model.parameters(), clip, norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return norm

    def grad_norm(self) -> torch.Tensor:
        """Of the gradients as they are now, over all ranks; the same at every ZeRO stage."""
        norm = get_total_norm(self._grads())
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def size_bytes(self) -> int:
        """What this rank holds now: its part of parameters, of gradients where there are any, and of moments."""
        moments = [m for p in self.model.parameters() for m in self.optimizer.state[p].values() if m.shape == p.shape]
        held = [*self.model.parameters(), *(g for g in self._grads() if g is not None), *moments]
        return sum((t.to_local() if isinstance(t, DTensor) else t).nbytes for t in held)

    def _grads(self) -> list[torch.Tensor]:
        return [p.grad for p in self.model.parameters()]


def _shard(model: LanguageModel, group: dist.ProcessGroup, device: torch.device, dtype: str) -> None:
    """FSDP2 on each block, the loss head and the root, on a communicator of its own: gathers overlap with the schedule's all-to-alls.

    Its collectives are external ops of the schedule: a gather a region (the embedding's is part of ext.embed), a reduction a gradient.
    """
    mesh = DeviceMesh.from_group(_own(group, device.type), device.type)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False) if dtype == "bf16" else MixedPrecisionPolicy()
    for part in (*model.blocks, model.loss, model):
        fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
        part.set_gradient_divide_factor(1.0)
        part.set_force_sum_reduction_for_comms(True)  # a plain sum, which every backend has
        part.set_custom_all_gather(_Collective(model.program, "embed" if part is model else "gather", dist.all_gather_into_tensor))
        part.set_custom_reduce_scatter(_Collective(model.program, "reduce", dist.reduce_scatter_tensor))
        part.set_unshard_in_backward(part in model.blocks)  # the loss has its gradients already, an embedding's needs no weights


@cache
def _own(group: dist.ProcessGroup, device: str) -> dist.ProcessGroup:
    """A second communicator of the same ranks: one for all models of this process, as each takes memory of the GPU and is never given back."""
    return dist.new_group(dist.get_process_group_ranks(group), timeout=timedelta(seconds=TIMEOUT_S[device]))


class _Collective:
    """What FSDP2 calls for a gather or a reduction: torch's own, with its time in the program's spans."""

    def __init__(self, program: Program, name: str, collective: Callable) -> None:
        self._program, self._name, self._collective = program, name, collective

    def allocate(self, size, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(self, output_tensor, input_tensor, group, **options):
        with self._program.external(self._name):
            return self._collective(output_tensor, input_tensor, group=group, **options)
