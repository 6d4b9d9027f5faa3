"""Attention kernels: what each needs beside its operands while it runs, by shape. engine/kernels has an adapter for each name.

A kernel that allocates its results declares them here; they are copied or added to where they belong. Backward sums dq in fp32.
"""
from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Shape(NamedTuple):
    """One pair of chunks on one rank."""

    q: int
    """Query tokens."""
    kv: int
    heads: int
    """Query heads of this rank."""
    kv_heads: int
    head_dim: int
    item: int
    """Bytes an element."""

    @property
    def q_bytes(self) -> int:
        """Of q, o or dq."""
        return self.q * self.heads * self.head_dim * self.item

    @property
    def kv_bytes(self) -> int:
        """Of keys and values, or their gradients."""
        return 2 * self.kv * self.kv_heads * self.head_dim * self.item

    @property
    def spread_bytes(self) -> int:
        """Of keys and values with a KV head a query head; 0 where they are so already."""
        return 0 if self.heads == self.kv_heads else self.kv_bytes * self.heads // self.kv_heads

    @property
    def row_bytes(self) -> int:
        """One fp32 a query and head."""
        return 4 * self.q * self.heads


class Kernel(NamedTuple):
    """Workspace in bytes, forward and backward."""

    forward: Callable[[Shape], int]
    backward: Callable[[Shape], int]


def _dq_fp32(s: Shape, multiple: int = 1) -> int:
    """The fp32 sum of dq, head_dim rounded up to a multiple."""
    return 4 * s.q * s.heads * -(-s.head_dim // multiple) * multiple


KERNELS = {
    "cuDNN": Kernel(
        lambda s: s.q_bytes + s.row_bytes,
        lambda s: s.q_bytes + s.kv_bytes + s.spread_bytes + _dq_fp32(s) + 2 * s.row_bytes,
    ),
    "torch flash (FA2)": Kernel(
        lambda s: s.q_bytes + s.row_bytes + s.spread_bytes,
        lambda s: s.q_bytes + (2 * s.spread_bytes or s.kv_bytes) + _dq_fp32(s, 32) + s.row_bytes,
    ),
    "torch CPU flash": Kernel(
        lambda s: s.q_bytes + s.row_bytes,
        lambda s: s.q_bytes + (2 * s.spread_bytes or s.kv_bytes),
    ),
}
TYPICAL = "cuDNN"
"""Whose workspace a machine is given that does not name its kernel."""
