"""The transformer block as an nn.Module whose forward and backward are the two compiled regions of a schedule.

    program = Program(schedule, backend, kernel);  blocks = [Block(program, k) for k in range(layers)]

A forward must be followed by its backward before the next forward of the same layer: what it saves has one place. A forward
without gradients leaves nothing to wait for. Backward twice is refused.
"""
from __future__ import annotations

import weakref

import torch
from torch import nn

from engine.compile import Program
from sim.errors import UserError


class _Saved:
    """Stands for what one forward keeps in the arenas; gone with the graph it belongs to."""

    __slots__ = ("used", "__weakref__")

    def __init__(self) -> None:
        self.used = False


class _BlockFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block: "Block", x_TC: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        y_TC = torch.empty_like(x_TC)
        block.program.run("fwd", block.layer, {"x": x_TC, "y": y_TC, **cast(block.names, weights, x_TC.dtype)})
        block.program.join()
        ctx.block = block
        ctx.saved = _Saved()
        block.pending = weakref.ref(ctx.saved)
        ctx.save_for_backward(*weights, *(() if block.input_offloaded else (x_TC,)))
        return y_TC

    @staticmethod
    def backward(ctx, dy_TC: torch.Tensor):
        if ctx.saved.used:
            raise UserError("backward ran twice on one forward; what it saved was used up, run forward again")
        ctx.saved.used = True
        block = ctx.block
        weights, kept = ctx.saved_tensors[:len(block.names)], ctx.saved_tensors[len(block.names):]
        arguments = cast(block.names, weights, dy_TC.dtype) | dict(zip(("x",), kept))
        grads = {f"d{n}": torch.empty(w.shape, dtype=torch.float32, device=w.device) for n, w in zip(block.names, weights)}
        dx_TC = torch.empty_like(dy_TC)
        block.program.run("bwd", block.layer, {"dy": dy_TC.contiguous(), "dx": dx_TC, **arguments, **grads})
        block.program.join()
        block.pending = None
        return (None, dx_TC, *(g.to(w.dtype) for g, w in zip(grads.values(), weights)))


class Block(nn.Module):
    """x_TC -> y_TC of this rank's tokens [S/P, hidden], in chunk order. Weights as sim.model names them, of any dtype: x's is used."""

    def __init__(self, program: Program, layer: int, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        schedule = program.schedule
        self.program, self.layer = program, layer
        self.input_offloaded = "x[0]@host" in schedule.saved
        self.pending: weakref.ref | None = None
        shapes = schedule.model.weight_shapes()
        self.names = tuple(shapes)
        dtype = dtype or {"fp32": torch.float32, "bf16": torch.bfloat16}[schedule.dtype]
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(init(name, shape, schedule.model.layers).to(dtype)))

    def forward(self, x_TC: torch.Tensor) -> torch.Tensor:
        """Raises UserError where the shape is not this rank's part of the schedule's S, or a backward is still due."""
        tokens = self.program.schedule.seq // self.program.schedule.P
        if x_TC.shape != (tokens, self.program.schedule.model.hidden):
            raise UserError(f"block input has shape {tuple(x_TC.shape)}; the schedule wants ({tokens}, {self.program.schedule.model.hidden}), S/P tokens of batch 1")
        if torch.is_inference_mode_enabled():
            raise UserError("blocks do not run under torch.inference_mode(), whose tensors other threads and later steps must not write; use torch.no_grad()")
        if self.pending and (saved := self.pending()) and not saved.used:
            raise UserError(f"layer {self.layer} runs forward twice before a backward; what it saves has one place, run backward first")
        self.pending = None
        weights = [self.get_parameter(n) for n in self.names]
        return _BlockFunction.apply(self, x_TC.contiguous(), *weights)


def cast(names: tuple[str, ...], weights, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Weights by name in a dtype; those that have it are taken as they are."""
    return {name: w.detach().to(dtype) for name, w in zip(names, weights)}


def init(name: str, shape: tuple[int, ...], layers: int, generator: torch.Generator | None = None) -> torch.Tensor:
    """fp32 weights: ones for norms, zeros for biases, N(0, 0.02) for matmuls, smaller by sqrt(2 layers) where they end a residual branch."""
    if len(shape) == 1:
        return torch.zeros(shape) if name.startswith("b") else torch.ones(shape)
    device = generator.device if generator else None
    return torch.randn(shape, generator=generator, device=device) * 0.02 / ((2 * layers) ** 0.5 if name in ("Wo", "Wd") else 1)
