"""Model: the shapes of a transformer and what they cost in parameters and FLOPs."""
from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from sim.errors import UserError, unknown


KINDS = ("llama", "gpt")


MOST_LAYERS = 10_000
"""A typing error lies beyond."""


@dataclass(frozen=True)
class Model:
    """Shapes of a decoder-only transformer. `kind` llama: RMSNorm, SwiGLU, grouped-query attention, no biases; gpt: LayerNorm, GELU,
    biases (but for the LM head). Positions by RoPE."""

    name: str
    kind: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    rotary: float = 1.0
    """Part of each head that RoPE rotates: its first dims."""
    rope_theta: float = 500_000.0
    norm_eps: float = 1e-5
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise unknown("model kind", self.kind, KINDS)
        if self.dropout != 0:
            raise UserError(f"dropout {self.dropout} is refused: backward would need the same random state as forward; use 0")
        for field in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab"):
            if getattr(self, field) < 1:
                raise UserError(f"model {self.name}: {field}={getattr(self, field)} must be at least 1")
        if self.layers > MOST_LAYERS:
            raise UserError(f"model {self.name}: layers={self.layers} is more than {MOST_LAYERS}; try layers={MOST_LAYERS}")
        for field in ("rotary", "rope_theta", "norm_eps"):
            if not 0 < getattr(self, field) < float("inf"):
                raise UserError(f"model {self.name}: {field}={getattr(self, field)} must be a positive number; try {type(self).__dataclass_fields__[field].default}")
        if self.heads % self.kv_heads:
            raise UserError(f"model {self.name}: {self.heads} query heads are no multiple of {self.kv_heads} KV heads")
        if not 0 < self.rotary <= 1 or self.rotary_dim % 2 or self.rotary_dim < 2:
            raise UserError(f"model {self.name}: RoPE on {self.rotary:g} of head_dim={self.head_dim} rotates {self.rotary_dim} dims; that must be even, try head_dim={-(-self.head_dim // 8) * 8}")

    @property
    def rotary_dim(self) -> int:
        """Dims of each head that RoPE rotates."""
        return round(self.head_dim * self.rotary)

    @property
    def q_dim(self) -> int:
        """Width of the query projection: heads x head_dim."""
        return self.heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Width of the key (or value) projection: kv_heads x head_dim."""
        return self.kv_heads * self.head_dim

    @property
    def up_dim(self) -> int:
        """Width of the FFN's first projection: gate and up side by side, or up alone."""
        return 2 * self.ffn if self.kind == "llama" else self.ffn

    @property
    def groups(self) -> dict[str, tuple[str, ...]]:
        """Each weight of a block or the head with what belongs to it, by what it is for: q -> (Wq,), or (Wq, bq) with biases."""
        return groups(self.kind)

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Weights of one block, [out, in] like nn.Linear, then biases [out]. Wkv stacks K over V, Wgu stacks gate over up."""
        h = self.hidden
        return self._shapes(norm1=(h,), q=(self.q_dim, h), kv=(2 * self.kv_dim, h), o=(h, self.q_dim), norm2=(h,), up=(self.up_dim, h), down=(h, self.ffn))

    def head_shapes(self) -> dict[str, tuple[int, ...]]:
        """Weights of the final norm and the LM head."""
        return self._shapes(normf=(self.hidden,), head=(self.vocab, self.hidden))

    def _shapes(self, **shapes: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        return {name: shape[:len(shape) if k == 0 else 1] for group, shape in shapes.items() for k, name in enumerate(self.groups[group])}

    @property
    def block_params(self) -> int:
        """Parameters of one block, norms included."""
        return sum(_size(shape) for shape in self.weight_shapes().values())

    @property
    def head_params(self) -> int:
        """Parameters of the final norm and the LM head."""
        return sum(_size(shape) for shape in self.head_shapes().values())

    @property
    def matmul_params(self) -> int:
        """N of the 6N rule: matmul weights, LM head in, embedding lookup out."""
        blocks = self.layers * sum(_size(s) for s in self.weight_shapes().values() if len(s) == 2)
        return blocks + self.vocab * self.hidden

    @property
    def params(self) -> int:
        """All parameters: blocks, final norm, LM head and embedding (untied)."""
        return self.layers * self.block_params + self.head_params + self.vocab * self.hidden


def _size(shape: tuple[int, ...]) -> int:
    return shape[0] if len(shape) == 1 else shape[0] * shape[1]


@cache
def groups(kind: str) -> dict[str, tuple[str, ...]]:
    names = {"norm1": "norm1", "q": "Wq", "kv": "Wkv", "o": "Wo", "norm2": "norm2", "up": "Wgu" if kind == "llama" else "Wu", "down": "Wd", "normf": "normf"}
    biased = {group: (name, "b" + name.removeprefix("W")) for group, name in names.items()}
    return {group: pair if kind == "gpt" else pair[:1] for group, pair in biased.items()} | {"head": ("Whead",)}


@cache
def presets() -> dict[str, Model]:
    """The named models, from models.csv beside this file."""
    with open(Path(__file__).with_name("models.csv")) as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        return {row["name"]: Model(row["name"], row["kind"], *(int(row[k]) for k in list(row)[2:-2]), float(row["rotary"]), float(row["rope_theta"])) for row in rows}


def model(name: str, **changes) -> Model:
    """A preset by name, with fields replaced (layers=2). Raises UserError with the closest names."""
    if name not in presets():
        raise unknown("model", name, presets())
    return replace(presets()[name], **changes) if changes else presets()[name]
