"""Cases: small models, schedules and inputs, and how a rank runs them. Imported by the tests and by their ranks."""
from __future__ import annotations

import hashlib
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import NamedTuple

import torch
import torch.distributed as dist

from engine import deal, reference
from engine.backend.cpu import CpuBackend
from engine.backend.cuda import CudaBackend
from engine.block import Block
from engine.compile import Program
from engine.model import LanguageModel
from sim.build.step import build
from sim.model import Model
from sim.schedule import Schedule
from sim.strategy import Strategy

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Place(NamedTuple):
    """Where programs run, and on which attention kernel of engine.kernels. Rank r of a cuda place has GPU r."""

    device: str = "cpu"
    kernel: str = "cpu_flash"


CPU = Place()


def tiny(heads: int = 4, kv_heads: int = 2, head_dim: int = 16, layers: int = 1, hidden: int = 64, ffn: int = 96, vocab: int = 50, kind: str = "llama") -> Model:
    """A model as small as its heads allow; gpt rotates a quarter of each head."""
    return Model("tiny", kind, layers, hidden, heads, kv_heads, head_dim, ffn, vocab, rotary=1 if kind == "llama" else 0.25)


@cache
def schedule(model: Model, seq: int, chunk: int, P: int = 1, dtype: str = "fp32", offload: bool = True, prefetch: int = 2, reuse: bool = True, **settings) -> Schedule:
    """A built schedule; `settings` are strategy fields. Tests that change one parse a copy of its text."""
    strategy = Strategy(sp=P, chunk=chunk, offload=offload, prefetch=prefetch, **{"ffn_sub": 2, "loss_sub": 4} | settings)
    return build(model, strategy, seq, dtype, reuse)


@contextmanager
def running(schedule: Schedule, rank: int = 0, group=None, place: Place = CPU, link_GBps: float | None = None):
    """A program on a backend that is closed afterwards."""
    backend = CpuBackend(link_GBps=link_GBps) if place.device == "cpu" else CudaBackend(rank)
    try:
        yield Program(schedule, backend, import_module(f"engine.kernels.{place.kernel}"), rank, group)
    finally:
        backend.close()


# ---- one block ----------------------------------------------------------------------------------------------------------

def block_inputs(model: Model, seq: int, dtype: str, seed: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """x, dy and every weight, rounded to dtype; scores of attention are of order one, so that its scale matters."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator)

    found = {"x": normal(seq, model.hidden), "dy": normal(seq, model.hidden)}
    for name, shape in model.weight_shapes().items():
        found[name] = normal(*shape) / shape[1] ** 0.5 if len(shape) == 2 else (not name.startswith("b")) + 0.1 * normal(*shape)
    return {name: t.to(device, DTYPES[dtype]) for name, t in found.items()}


def block_reference(model: Model, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """y, dx and each weight's gradient in fp64."""
    given = {n: t.double().requires_grad_(n != "dy") for n, t in inputs.items()}
    y = reference.block(given["x"], given, model)
    y.backward(given["dy"])
    return {"y": y.detach()} | {f"d{n}": t.grad for n, t in given.items() if n != "dy"}


def run_block(program: Program, rank: int, group, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """y, dx and each weight's gradient of the whole sequence, through one Block; the same on every rank."""
    s, seq = program.schedule, len(inputs["x"])

    def mine(x_SC):
        return deal.deal(deal.padded(x_SC, s.P, 0), s.chunk, s.P, rank)

    block = Block(program, 0).to(program.backend.device)
    with torch.no_grad():
        for name in block.names:
            block.get_parameter(name).copy_(inputs[name])
    x_TC, dy_TC = mine(inputs["x"]), mine(inputs["dy"])
    y_TC, dx_TC = (through_host if s.hidden == "host" else through)(program, block, x_TC, dy_TC)
    found = {"y": whole(y_TC, s, group)[:seq], "dx": whole(dx_TC, s, group)[:seq]}
    for name in block.names:
        found[f"d{name}"] = summed(block.get_parameter(name).grad, group)
    return {name: t.float() for name, t in found.items()}


def through(program: Program, block: Block, x_TC: torch.Tensor, dy_TC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """y and dx of a block."""
    y_TC = block(x_TC.requires_grad_())
    y_TC.backward(dy_TC)
    return y_TC.detach(), x_TC.grad


def through_host(program: Program, block: Block, x_TC: torch.Tensor, dy_TC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The same where hidden states lie on the host: put there and read there by hand."""
    chain, ticket = program.chain, program.chain.ticket().requires_grad_()
    program.backend.settle()
    chain.hidden_TC[0].copy_(x_TC)
    on = block(ticket)
    program.backend.settle()
    y_TC = chain.hidden_TC[1].clone()
    chain.gradient_TC.copy_(dy_TC)
    on.backward(torch.ones_like(on))
    program.backend.settle()
    return y_TC.to(x_TC.device), chain.gradient_TC.to(x_TC.device, copy=True)


def whole(x_TC: torch.Tensor, s: Schedule, group) -> torch.Tensor:
    """All ranks' tokens, in order."""
    if group is None:
        return x_TC
    parts = [torch.empty_like(x_TC) for _ in range(s.P)]
    dist.all_gather(parts, x_TC.contiguous(), group=group)
    return deal.gather(parts, s.chunk)


def summed(grad: torch.Tensor, group) -> torch.Tensor:
    """A gradient summed over the ranks."""
    if group is not None:
        dist.all_reduce(grad, group=group)
    return grad


def digest(t: torch.Tensor) -> str:
    """The same for the same bits."""
    return hashlib.sha256(t.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().tobytes()).hexdigest()


# ---- a model ------------------------------------------------------------------------------------------------------------

def text(model: Model, seq: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens, labels) of a sequence; a fifth of the labels is ignored."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, model.vocab, (seq,), generator=generator)
    labels = deal.shift(tokens)
    labels[torch.rand(seq, generator=generator) < 0.2] = deal.IGNORE
    return tokens, labels


def shard(s: Schedule, rank: int, tokens: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, int]:
    """What a rank feeds LanguageModel."""
    parts = (deal.deal(deal.padded(t, s.P, fill), s.chunk, s.P, rank) for t, fill in ((tokens, 0), (labels, deal.IGNORE)))
    return *parts, int((labels != deal.IGNORE).sum())


def train(program: Program, rank: int, group, tokens: torch.Tensor, labels: torch.Tensor, steps: int = 3) -> tuple[list[float], dict[str, torch.Tensor]]:
    """(loss of each step, weights after the last). AdamW, gradients summed over the ranks."""
    lm = LanguageModel(program).to(program.backend.device)
    tokens, labels = (t.to(program.backend.device) for t in (tokens, labels))
    optimizer = torch.optim.AdamW(lm.parameters(), lr=1e-2)
    losses = []
    for _ in range(steps):
        loss = lm(*shard(program.schedule, rank, tokens, labels))
        loss.backward()
        for p in lm.parameters():
            summed(p.grad, group)
        losses.append(float(summed(loss.detach().clone(), group)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, {n: p.detach() for n, p in lm.named_parameters()}
