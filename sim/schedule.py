"""Schedule: the intermediate representation that the lint, the simulator and the engine all read.

List order is issue order; a stream runs its operations in list order; a wait orders across streams. That is the model of
CUDA streams and events. A region (fwd, loss, bwd) is written once and run once a layer.
"""
from __future__ import annotations

import math
from dataclasses import dataclass, field
from sys import intern

from sim.layout import ITEM, Layout, chunks
from sim.model import Model

STREAMS = ("compute", "comm", "h2d", "d2h", "host")
"""Device streams, and the host thread: an op there blocks the thread that issues all the others."""
SPACES = ("hbm", "host")
LIVES = ("value", "slot", "saved", "argument")
PREV = "prev:"
HANDED = ("x", "y", "dy", "dx", "label")
"""Arguments that are handed over whole and used chunk by chunk: hidden states, their gradients, labels."""


@dataclass(slots=True)
class Buffer:
    """Memory with a lifetime. `offset` (bytes) is relative to its layer's part if saved, else to the shared part."""

    name: str
    space: str
    life: str
    role: str
    dtype: str
    shape: tuple[int, ...]
    offset: int | None = None

    @property
    def size_bytes(self) -> int:
        return (8 if self.dtype == "int64" else ITEM[self.dtype]) * math.prod(self.shape)


def chunk_of(name: str) -> tuple[str, int]:
    """x[3] or x[3]@host -> (x, 3); a name that says no chunk has -1."""
    tensor, bracket, rest = name.partition("[")
    return tensor, int(rest.partition("]")[0]) if bracket else -1


@dataclass(slots=True)
class Op:
    """One operation. An operand both read and written is accumulated in place. `args` are shape arguments."""

    id: str
    stream: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    args: dict[str, int] = field(default_factory=dict)
    waits: tuple[str, ...] = ()
    kind: str = field(init=False, repr=False, compare=False)
    """fwd.offload.kv[3] -> offload."""

    def __post_init__(self) -> None:
        self.kind = intern(kind_of(self.id))


def kind_of(id: str) -> str:
    """fwd.offload.kv[3] -> offload, ext.gather -> gather; what has no dot is its own kind."""
    return id.split("[", 1)[0].split(".", 2)[1 if "." in id else 0]


@dataclass
class Region:
    """A list of operations with the buffers that live inside it."""

    name: str
    ops: list[Op]
    buffers: dict[str, Buffer]


@dataclass
class Schedule:
    """Everything that has to be known to prove, price or run a training step over one sequence."""

    model: Model
    seq: int
    """S in global tokens, padded to a multiple of P."""
    P: int
    chunk: int
    dtype: str
    regions: dict[str, Region]
    saved: dict[str, Buffer]
    """Buffers from a layer's forward to its backward, one copy a layer."""
    require: dict[str, tuple[str, ...]]
    """Outputs each region owes: y means every chunk y[0..u-1]."""
    stride: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPACES, 0))
    """Bytes of the saved part of one layer, by space."""
    shared: dict[str, int] = field(default_factory=lambda: dict.fromkeys(SPACES, 0))
    """Bytes of the shared part (as large as the largest region), by space."""

    @property
    def layers(self) -> int:
        return self.model.layers

    @property
    def layout(self) -> Layout:
        return Layout(self.model, self.P, self.dtype)

    @property
    def chunks(self) -> list[tuple[int, int]]:
        """(first token, tokens) of each chunk."""
        return chunks(self.seq, self.chunk)

    @property
    def hidden(self) -> str:
        """The space that hidden states are handed over in: host if any argument lies there."""
        return SPACES[any(b.space == "host" and b.life == "argument" for r in self.regions.values() for b in r.buffers.values())]

    @property
    def handed_bytes(self) -> int:
        """Bytes on the host beside the arena: the hidden state at every border between blocks, one gradient that goes through them all, labels."""
        if self.hidden == "hbm":
            return 0
        return self.seq // self.P * ((self.layers + 2) * self.model.hidden * ITEM[self.dtype] + 8)

    def buffer(self, region: str, name: str) -> Buffer:
        """The buffer an op of that region means by a name. KeyError if there is none."""
        found = self.regions[region].buffers.get(name)
        return self.saved[name] if found is None else found

    def arena_bytes(self, space: str) -> int:
        """Size of the one arena of a space: the saved part of every layer, then the shared part."""
        return self.stride[space] * self.layers + self.shared[space]

    def address(self, buffer: Buffer, layer: int) -> int:
        """Byte offset of a planned buffer in its arena, for one layer's instance."""
        base = layer * self.stride[buffer.space] if buffer.life == "saved" else self.layers * self.stride[buffer.space]
        return base + buffer.offset

    def order(self, layers: int | None = None) -> list[tuple[str, int]]:
        """(region, layer) instances of one step, in order."""
        n = self.layers if layers is None else layers
        steps = [("fwd", k) for k in range(n)] + [("loss", n - 1)] + [("bwd", k) for k in reversed(range(n))]
        return [(region, k) for region, k in steps if region in self.regions]
