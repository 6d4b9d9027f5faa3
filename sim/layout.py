"""Layout: how a chunk of n global tokens lies in memory on one rank, by role.

Legend. S sequence, P ranks, n tokens of a chunk, H query heads, K KV heads a rank (max(1, Hkv/P)), D head_dim, h hidden.
Token-sharded roles hold n/P tokens with all heads; head-sharded ones (after the all-to-all) hold n tokens with H/P heads.
A token-sharded tensor about to be sent is grouped by destination, so an all-to-all moves contiguous pieces.
A buffer larger than what it holds (a slot with the short last chunk) is used from its start.
"""
from __future__ import annotations

from dataclasses import dataclass

from sim.model import Model

ALIGN = 256
"""Alignment of every planned buffer, bytes."""
ITEM = {"bf16": 2, "fp32": 4}

_FP32 = {"acc", "lse", "dq", "dq'", "dkv", "dkv'"}


@dataclass(frozen=True)
class Layout:
    """Shapes and sizes of every role for one model, P and dtype."""

    model: Model
    P: int
    dtype: str

    def dtype_of(self, role: str) -> str:
        """fp32 for accumulators, log-sum-exps and weight gradients, else the schedule's dtype."""
        return "fp32" if role in _FP32 or role == "grad" else self.dtype

    def shape(self, role: str, n: int) -> tuple[int, ...]:
        """Shape of a chunk of n global tokens; role' is the token-sharded form of a head-sharded role."""
        m, P = self.model, self.P
        H, K, D, t = m.heads // P, max(1, m.kv_heads // P), m.head_dim, n // P
        match role:
            case "x" | "h" | "y" | "dy" | "dh" | "dx":
                return (t, m.hidden)
            case "up":
                return (t, m.up_dim)
            case "q" | "o" | "do" | "acc" | "dq":
                return (n, H, D)
            case "q'" | "o'" | "do'" | "dq'":
                return (P, t, H, D)
            case "kv" | "dkv":
                return (n, 2, K, D)
            case "kv'" | "dkv'":
                return (P, t, 2, K, D)
            case "lse":
                return (H, n)
            case "label":
                return (t,)
        raise KeyError(role)

    def like(self, role: str, other: str) -> bool:
        """Whether chunks of both roles have one shape."""
        try:
            return self.shape(role, 2 * self.P) == self.shape(other, 2 * self.P)
        except KeyError:
            return False

    def size_bytes(self, role: str, n: int) -> int:
        """Bytes of that chunk."""
        size = 8 if role == "label" else ITEM[self.dtype_of(role)]
        for dim in self.shape(role, n):
            size *= dim
        return size


def align(size_bytes: int) -> int:
    """Rounded up to ALIGN."""
    return -(-size_bytes // ALIGN) * ALIGN


def pad(seq: int, P: int) -> int:
    """S rounded up to a multiple of P; the added tokens carry ignored labels."""
    return -(-seq // P) * P


def chunks(seq: int, chunk: int) -> list[tuple[int, int]]:
    """(first token, tokens) of each chunk of a sequence padded to P: u = ceil(S/C), the last one may be short."""
    return [(at, min(chunk, seq - at)) for at in range(0, seq, chunk)]
