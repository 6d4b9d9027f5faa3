"""The chunked loss as an nn.Module: final norm, LM head and cross entropy, forward and backward in one region."""
from __future__ import annotations

import torch
from torch import nn

from engine.block import cast, init
from engine.compile import Program
from sim.errors import UserError


class _LossFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, head: "Loss", x_TC, label_T, *weights):
        loss = torch.empty(1, dtype=torch.float32, device=x_TC.device)
        grads = {f"d{n}": torch.empty(w.shape, dtype=torch.float32, device=w.device) for n, w in zip(head.names, weights)}
        dx_TC = torch.empty_like(x_TC)
        arguments = {"x": x_TC, "label": label_T, "dx": dx_TC, "loss": loss, **cast(head.names, weights, x_TC.dtype), **grads}
        head.program.run("loss", head.program.schedule.layers - 1, arguments)
        head.program.join()
        ctx.used = False
        ctx.save_for_backward(dx_TC, *(g.to(w.dtype) for g, w in zip(grads.values(), weights)))
        return loss[0].clone()  # no view: FSDP2 hooks its gradient

    @staticmethod
    def backward(ctx, scale):
        if ctx.used:
            raise UserError("backward ran twice on one loss; its gradients were handed over, run forward again")
        ctx.used = True
        dx_TC, *grads = (g.mul_(scale) for g in ctx.saved_tensors)  # whatever scale is: asking would block the host
        return (None, dx_TC, None, *grads)


class Loss(nn.Module):
    """(x_TC [S/P, hidden], label_T [S/P] int64) -> this rank's share of the mean over the valid labels of the whole sequence.

    The shares of all ranks sum to the loss. `valid` counts the labels of all ranks that are not IGNORE; 0 gives loss 0 and
    zero gradients.
    """

    def __init__(self, program: Program, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.program = program
        shapes = program.schedule.model.head_shapes()
        self.names = tuple(shapes)
        dtype = dtype or {"fp32": torch.float32, "bf16": torch.bfloat16}[program.schedule.dtype]
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(init(name, shape, 1).to(dtype)))

    def forward(self, x_TC: torch.Tensor, label_T: torch.Tensor, valid: int) -> torch.Tensor:
        """Raises UserError where a shape is not this rank's part of the schedule's S."""
        s = self.program.schedule
        for what, t, want in (("inputs", x_TC, (s.seq // s.P, s.model.hidden)), ("labels", label_T, (s.seq // s.P,))):
            if t.shape != want:
                raise UserError(f"loss {what} have shape {tuple(t.shape)}; the schedule wants {want}, S/P tokens of batch 1")
        self.program.runtime.valid = valid
        return _LossFunction.apply(self, x_TC.contiguous(), label_T, *(self.get_parameter(n) for n in self.names))
