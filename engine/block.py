"""The transformer block as an nn.Module whose forward and backward are the two compiled regions of a schedule.

    program = Program(schedule, backend, kernel);  blocks = [Block(program, k) for k in range(layers)]

A forward must be followed by its backward before the next forward of the same layer: what it saves has one place. A forward
without gradients leaves nothing to wait for. Backward twice is refused.
"""
from __future__ import annotations

import weakref

import torch
from torch import nn

from engine.arenas import DTYPES
from engine.compile import Program
from sim.errors import UserError


class _Saved:
    """Stands for what one forward keeps in the arenas; gone with the graph it belongs to."""

    __slots__ = ("used", "__weakref__")

    def __init__(self) -> None:
        self.used = False


class _BlockFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, block: "Block", x: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        passed = block.program.chain.forward(block.layer, x)
        block.program.run("fwd", block.layer, passed.arguments | cast(block, weights))
        block.program.join()
        ctx.block = block
        ctx.saved = _Saved()
        block.pending = weakref.ref(ctx.saved)
        ctx.save_for_backward(*weights, *passed.kept)
        return passed.on

    @staticmethod
    def backward(ctx, dy: torch.Tensor):
        if ctx.saved.used:
            raise UserError("backward ran twice on one forward; what it saved was used up, run forward again")
        ctx.saved.used = True
        block = ctx.block
        weights, kept = ctx.saved_tensors[:len(block.names)], ctx.saved_tensors[len(block.names):]
        passed = block.program.chain.backward(block.layer, dy, kept)
        grads = {f"d{n}": torch.empty(w.shape, dtype=torch.float32, device=w.device) for n, w in zip(block.names, weights)}
        block.program.run("bwd", block.layer, passed.arguments | cast(block, weights) | grads)
        block.program.join()
        block.pending = None
        if passed.factor is not None:
            torch._foreach_mul_(list(grads.values()), passed.factor)
        return (None, passed.on, *(g.to(w.dtype) for g, w in zip(grads.values(), weights)))


class Block(nn.Module):
    """x_TC -> y_TC of this rank's tokens [S/P, hidden], in chunk order, or a ticket -> the next one where hidden states lie on the host
    (engine.chain). Weights as sim.model names them, of any dtype: the schedule's is used."""

    def __init__(self, program: Program, layer: int, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        schedule = program.schedule
        self.program, self.layer = program, layer
        self.pending: weakref.ref | None = None
        shapes = schedule.model.weight_shapes()
        self.names = tuple(shapes)
        self.dtype = DTYPES[schedule.dtype]
        dtype = dtype or self.dtype
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(init(name, shape, schedule.model.layers).to(dtype)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Raises UserError where the shape is not this rank's part of the schedule's S, or a backward is still due."""
        chain = self.program.chain
        if x.shape != chain.shape:
            raise UserError(f"block input has shape {tuple(x.shape)}; the schedule wants {chain.shape}, {chain.what}")
        if torch.is_inference_mode_enabled():
            raise UserError("blocks do not run under torch.inference_mode(), whose tensors other threads and later steps must not write; use torch.no_grad()")
        if self.pending and (saved := self.pending()) and not saved.used:
            raise UserError(f"layer {self.layer} runs forward twice before a backward; what it saves has one place, run backward first")
        self.pending = None
        weights = [self.get_parameter(n) for n in self.names]
        return _BlockFunction.apply(self, x.contiguous(), *weights)


def cast(part: nn.Module, weights) -> dict[str, torch.Tensor]:
    """A Block's or the Loss's weights by name in its dtype, `ext.cast` in the spans; those that have it are taken as they are."""
    if all(w.dtype == part.dtype for w in weights):
        return {name: w.detach() for name, w in zip(part.names, weights)}
    with part.program.external("cast"):
        return {name: w.detach().to(part.dtype) for name, w in zip(part.names, weights)}


def init(name: str, shape: tuple[int, ...], layers: int, generator: torch.Generator | None = None) -> torch.Tensor:
    """fp32 weights: ones for norms, zeros for biases, N(0, 0.02) for matmuls, smaller by sqrt(2 layers) where they end a residual branch."""
    if len(shape) == 1:
        return torch.zeros(shape) if name.startswith("b") else torch.ones(shape)
    device = generator.device if generator else None
    return torch.randn(shape, generator=generator, device=device) * 0.02 / ((2 * layers) ** 0.5 if name in ("Wo", "Wd") else 1)
