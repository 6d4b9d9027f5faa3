"""The chunked loss as an nn.Module: final norm, LM head and cross entropy, forward and backward in one region."""
from __future__ import annotations

import torch
from torch import nn

from engine.arenas import DTYPES
from engine.block import cast, init
from engine.compile import Program
from sim.errors import UserError


class _LossFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, head: "Loss", x, label_T, *weights):
        chain = head.program.chain
        loss = torch.empty(1, dtype=torch.float32, device=x.device)
        grads = {f"d{n}": torch.empty(w.shape, dtype=torch.float32, device=w.device) for n, w in zip(head.names, weights)}
        passed = chain.loss(x, label_T)
        arguments = passed.arguments | cast(head, weights) | grads | {"loss": loss}
        head.program.run("loss", head.program.schedule.layers - 1, arguments)
        chain.loss_issued()
        head.program.join()
        ctx.used, ctx.chain, ctx.kept = False, chain, len(passed.kept)
        ctx.save_for_backward(*passed.kept, *(g.to(w.dtype) for g, w in zip(grads.values(), weights)))
        return loss[0].clone()  # no view: FSDP2 hooks its gradient

    @staticmethod
    def backward(ctx, scale):  # whatever scale is: asking would block the host
        if ctx.used:
            raise UserError("backward ran twice on one loss; its gradients were handed over, run forward again")
        ctx.used = True
        kept, grads = ctx.saved_tensors[:ctx.kept], ctx.saved_tensors[ctx.kept:]
        return (None, ctx.chain.loss_backward(kept, scale), None, *(g.mul_(scale) for g in grads))


class Loss(nn.Module):
    """(x_TC [S/P, hidden] or its ticket, label_T [S/P] int64) -> this rank's share of the mean over the valid labels of the whole sequence.

    The shares of all ranks sum to the loss. `valid` counts the labels of all ranks that are not IGNORE; 0 gives loss 0 and
    zero gradients.
    """

    def __init__(self, program: Program, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.program = program
        shapes = program.schedule.model.head_shapes()
        self.names = tuple(shapes)
        self.dtype = DTYPES[program.schedule.dtype]
        dtype = dtype or self.dtype
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(init(name, shape, 1).to(dtype)))

    def forward(self, x: torch.Tensor, label_T: torch.Tensor, valid: int) -> torch.Tensor:
        """Raises UserError where a shape is not this rank's part of the schedule's S."""
        s, chain = self.program.schedule, self.program.chain
        for name, t, want, what in (("inputs", x, chain.shape, chain.what), ("labels", label_T, (s.seq // s.P,), "S/P tokens of batch 1")):
            if t.shape != want:
                raise UserError(f"loss {name} have shape {tuple(t.shape)}; the schedule wants {want}, {what}")
        self.program.runtime.valid = valid
        return _LossFunction.apply(self, x.contiguous(), label_T, *(self.get_parameter(n) for n in self.names))
