"""Chain: what crosses blocks. Hidden states in HBM pass through autograd as they are (`Whole`); on the host one object owns them (`Chain`).

Then autograd passes a ticket from the embedding through the blocks to the loss, one number on the device that stands for a hidden state
on the host. A ticket's gradient is the factor by which the gradient on the host counts: everything behind the loss is linear in it.
Only the embedding's lookup, the loss's labels and the embedding's gradient meet that memory outside the schedule.
"""
from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

import torch
import torch.nn.functional as F

from engine.arenas import DTYPES
from engine.backend.base import Backend, Event
from sim.schedule import Schedule

Tensors = dict[str, torch.Tensor]


class Passed(NamedTuple):
    """What a region is given by the chain, and hands on through autograd."""

    on: torch.Tensor
    """y going forward, dx going back, or the ticket for it."""
    arguments: Tensors
    kept: tuple[torch.Tensor, ...] = ()
    """What autograd has to keep for backward."""
    factor: torch.Tensor | None = None
    """What the gradients of the weights must be multiplied by."""


class Whole:
    """Hidden states in HBM, whole [S/P, hidden]."""

    def __init__(self, s: Schedule, backend: Backend, external: Callable[[str], AbstractContextManager]) -> None:
        """external: Program's."""
        self._external, self._dtype = external, DTYPES[s.dtype]
        self._keeps = "x[0]@host" not in s.saved
        self.shape, self.what = (s.seq // s.P, s.model.hidden), "S/P tokens of batch 1"
        """Of what a block is given."""
        self.label_device = backend.device

    def embed(self, tokens_T: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The hidden state that enters the first block."""
        with self._external("embed"):
            return F.embedding(tokens_T, weight.to(self._dtype))

    def forward(self, layer: int, x_TC: torch.Tensor) -> Passed:
        y_TC = torch.empty_like(x_TC)
        return Passed(y_TC, {"x": x_TC, "y": y_TC}, (x_TC,) if self._keeps else ())

    def loss(self, x_TC: torch.Tensor, label_T: torch.Tensor) -> Passed:
        dx_TC = torch.empty_like(x_TC)
        return Passed(dx_TC, {"x": x_TC, "label": label_T, "dx": dx_TC}, (dx_TC,))

    def loss_issued(self) -> None:
        """To be called behind the loss region."""

    def loss_backward(self, kept: tuple[torch.Tensor, ...], scale: torch.Tensor) -> torch.Tensor:
        """The gradient of the loss's input, for a loss that counts `scale` times."""
        return kept[0].mul_(scale)

    def backward(self, layer: int, dy_TC: torch.Tensor, kept: tuple[torch.Tensor, ...]) -> Passed:
        dx_TC = torch.empty_like(dy_TC)
        return Passed(dx_TC, {"dy": dy_TC.contiguous(), "dx": dx_TC, **dict(zip(("x",), kept))})


class Chain:
    """Hidden states on the host: one at each border between blocks, a gradient that goes back through all of them, and labels, taken once."""

    def __init__(self, s: Schedule, backend: Backend, outside: Callable[[str], AbstractContextManager]) -> None:
        """outside: Program's."""
        self.backend, self.outside = backend, outside
        self.shape, self.what = (), "a ticket: hidden states lie on the host"
        self.label_device = torch.device("cpu")
        self.memory = backend.arena("host", s.handed_bytes)
        """uint8, all of it."""
        tokens, end = s.seq // s.P, 8 * (s.seq // s.P)
        self.label_T = self.memory[:end].view(torch.int64)
        self.gradient_TC, *self.hidden_TC = self.memory[end:].view(DTYPES[s.dtype]).view(s.layers + 2, tokens, s.model.hidden)
        self.rows = [slice(at // s.P, (at + n) // s.P) for at, n in s.chunks]
        """This rank's tokens of each chunk."""
        self._labels_read: Event | None = None

    def ticket(self) -> torch.Tensor:
        """For a hidden state that was put there by hand."""
        return torch.zeros(self.shape, device=self.backend.device)

    def embed(self, tokens_T: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return _Embedding.apply(self, tokens_T, weight)

    def forward(self, layer: int, ticket: torch.Tensor) -> Passed:
        return Passed(torch.zeros_like(ticket), {"x": self.hidden_TC[layer], "y": self.hidden_TC[layer + 1]})

    def loss(self, ticket: torch.Tensor, label_T: torch.Tensor) -> Passed:
        if self._labels_read:
            self._labels_read.block()
        self.label_T.copy_(label_T)
        return Passed(ticket, {"x": self.hidden_TC[-1], "label": self.label_T, "dx": self.gradient_TC})

    def loss_issued(self) -> None:
        self._labels_read = self.backend.streams["h2d"].record()

    def loss_backward(self, kept: tuple[torch.Tensor, ...], scale: torch.Tensor) -> torch.Tensor:
        return scale

    def backward(self, layer: int, factor: torch.Tensor, kept: tuple[torch.Tensor, ...]) -> Passed:
        return Passed(factor, {"x": self.hidden_TC[layer], "dy": self.gradient_TC, "dx": self.gradient_TC}, factor=factor)


class _Embedding(torch.autograd.Function):
    """The lookup, chunk by chunk to the host, and its gradient in fp32, chunk by chunk from there. Both between all that streams do."""

    @staticmethod
    def forward(ctx, chain: Chain, tokens_T: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.chain, ctx.like = chain, (weight.shape, weight.dtype)
        ctx.save_for_backward(tokens_T)
        with chain.outside("embed"):
            weight = weight.to(chain.gradient_TC.dtype)
            for rows in chain.rows:
                chain.backend.copy(chain.hidden_TC[0][rows], F.embedding(tokens_T[rows], weight))
        return chain.ticket()

    @staticmethod
    def backward(ctx, factor: torch.Tensor):
        (tokens_T,), chain, (shape, dtype) = ctx.saved_tensors, ctx.chain, ctx.like
        with chain.outside("embed_bwd"):
            grad = torch.zeros(shape, dtype=torch.float32, device=tokens_T.device)
            for rows in chain.rows:
                dx_TC = torch.empty_like(chain.gradient_TC[rows], device=tokens_T.device)
                chain.backend.copy(dx_TC, chain.gradient_TC[rows])
                grad.index_put_((tokens_T[rows],), dx_TC.float(), accumulate=True)
                del dx_TC
            grad.mul_(factor)
        return None, None, grad.to(dtype)
