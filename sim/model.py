"""Model: the shapes of a transformer and what they cost in parameters and FLOPs."""
from __future__ import annotations

import csv
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from sim.errors import UserError, unknown


@dataclass(frozen=True)
class Model:
    """Shapes of a decoder-only transformer. `kind` llama: RMSNorm, SwiGLU, grouped-query attention, RoPE, no biases."""

    name: str
    kind: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocab: int
    rope_theta: float = 500_000.0
    norm_eps: float = 1e-5
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.kind != "llama":
            raise UserError(f"model kind {self.kind!r} is not built yet; built: llama")
        if self.dropout > 0:
            raise UserError(f"dropout {self.dropout} is refused: backward would need the same random state as forward; use 0")
        for field in ("layers", "hidden", "heads", "kv_heads", "head_dim", "ffn", "vocab"):
            if getattr(self, field) < 1:
                raise UserError(f"model {self.name}: {field}={getattr(self, field)} must be at least 1")
        if self.heads % self.kv_heads:
            raise UserError(f"model {self.name}: {self.heads} query heads are no multiple of {self.kv_heads} KV heads")
        if self.head_dim % 2:
            raise UserError(f"model {self.name}: head_dim={self.head_dim} must be even for RoPE; try {self.head_dim + 1}")

    @property
    def q_dim(self) -> int:
        """Width of the query projection: heads x head_dim."""
        return self.heads * self.head_dim

    @property
    def kv_dim(self) -> int:
        """Width of the key (or value) projection: kv_heads x head_dim."""
        return self.kv_heads * self.head_dim

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Weights of one block, [out, in] like nn.Linear. Wkv stacks K over V, Wgu stacks gate over up."""
        h = self.hidden
        return {
            "norm1": (h,), "Wq": (self.q_dim, h), "Wkv": (2 * self.kv_dim, h), "Wo": (h, self.q_dim),
            "norm2": (h,), "Wgu": (2 * self.ffn, h), "Wd": (h, self.ffn),
        }

    def head_shapes(self) -> dict[str, tuple[int, ...]]:
        """Weights of the final norm and the LM head."""
        return {"normf": (self.hidden,), "Whead": (self.vocab, self.hidden)}

    @property
    def block_params(self) -> int:
        """Parameters of one block, norms included."""
        return sum(_size(shape) for shape in self.weight_shapes().values())

    @property
    def matmul_params(self) -> int:
        """N of the 6N rule: matmul weights, LM head in, embedding lookup out."""
        blocks = self.layers * sum(_size(s) for s in self.weight_shapes().values() if len(s) == 2)
        return blocks + self.vocab * self.hidden

    @property
    def params(self) -> int:
        """All parameters: blocks, final norm, LM head and embedding (untied)."""
        return self.layers * self.block_params + self.hidden + 2 * self.vocab * self.hidden


def _size(shape: tuple[int, ...]) -> int:
    return shape[0] if len(shape) == 1 else shape[0] * shape[1]


@cache
def presets() -> dict[str, Model]:
    """The named models, from models.csv beside this file."""
    with open(Path(__file__).with_name("models.csv")) as file:
        rows = csv.DictReader(line for line in file if not line.startswith("#"))
        return {row["name"]: Model(row["name"], row["kind"], *(int(row[k]) for k in list(row)[2:])) for row in rows}


def model(name: str, **changes) -> Model:
    """A preset by name, with fields replaced (layers=2). Raises UserError with the closest names."""
    if name not in presets():
        raise unknown("model", name, presets())
    return replace(presets()[name], **changes) if changes else presets()[name]
