"""Case: one configuration of the grid, and how the grid's space of them looks on each kind of device."""
from __future__ import annotations

from dataclasses import dataclass

from sim.build.step import build
from sim.model import Model, model
from sim.schedule import Schedule
from sim.strategy import Strategy
from sim.units import show_tokens


@dataclass(frozen=True)
class Space:
    """What is drawn from. Everything else is the default, but for model states, which every rank holds whole: a block is what is asked about."""

    models: tuple[str, ...]
    layers: tuple[int, ...]
    vocab: int
    """Instead of the model's own: a block is what is asked about, not the loss."""
    dtype: str
    seq: tuple[int, int]
    """Shortest and longest S."""
    unit: int
    """S is a multiple of it."""
    chunks: tuple[int, ...]
    members: int = 4
    """Configurations a group: same model, layers, S and P, so that they can be ranked."""
    prefetch: tuple[int, ...] = (1, 2, 3)
    offload: tuple[bool, ...] = (True, False)
    order: tuple[str, ...] = ("query-up", "query-down", "kv-outer")
    save: tuple[str, ...] = ("qkvo", "all", "o", "input")
    loss_sub: int = 2
    """Of all: with so small a vocabulary, as many sub-chunks make logits as large as the default's are."""


K = 1024
SPACES = {
    "cuda": Space(("gpt-2.7b", "llama3-8b", "gpt-13b"), (1, 2), 8192, "bf16", (16 * K, 512 * K), 8 * K, (8 * K, 16 * K, 32 * K, 48 * K, 64 * K)),
    "cpu": Space(("demo",), (1,), 256, "fp32", (K, 4 * K), 256, (256, 512, K)),
}
"""By device. On CPU so small that it rehearses, and judges nothing."""


@dataclass(frozen=True)
class Case:
    """One configuration."""

    number: int
    group: int
    model: str
    layers: int
    vocab: int
    dtype: str
    P: int
    seq: int
    chunk: int
    offload: bool
    prefetch: int
    order: str
    save: str
    device: str = "cuda"

    @property
    def shapes(self) -> Model:
        return shapes(self.model, self.layers, self.vocab)

    @property
    def strategy(self) -> Strategy:
        host_sync = "region" if self.device == "cpu" else "none"
        return Strategy(sp=self.P, chunk=self.chunk, prefetch=self.prefetch, offload=self.offload, save=self.save, order=self.order, host_sync=host_sync, loss_sub=SPACES[self.device].loss_sub, zero=0)

    def schedule(self) -> Schedule:
        """Raises UserError where it cannot be built."""
        return build(self.shapes, self.strategy, self.seq, self.dtype)

    @property
    def same(self) -> tuple:
        """What makes the schedule: without offload nothing is reloaded, so slots are none."""
        return self.chunk, self.offload, self.prefetch if self.offload else 0, self.order, self.save

    @property
    def label(self) -> str:
        where = f"host, {self.prefetch} slot{'s' * (self.prefetch > 1)}" if self.offload else "HBM"
        return f"{self.model} x {self.layers} P={self.P} S={show_tokens(self.seq)} C={show_tokens(self.chunk)} {self.order} save={self.save} {where}"


def shapes(name: str, layers: int, vocab: int) -> Model:
    """A preset with so many layers and so small a vocabulary."""
    return model(name, layers=layers, vocab=vocab)
