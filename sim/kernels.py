"""Attention kernels: what each needs beside its operands while it runs, by shape. engine/kernels has an adapter for each name.

A kernel that allocates its results declares them here; they are copied or added to where they belong. Backward sums dq in fp32.
Backward's results are always its own: what they are added to is fp32, and no kernel writes that.
"""
from __future__ import annotations

import re
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
    lse_given: bool = False
    """Forward's lse belongs where a kernel may write it: this is the first pair of a row, so nothing is merged."""
    out_given: bool = False
    """So does its output: the row has no other pair, so nothing is kept in fp32 for one."""

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
    return 4 * s.q * s.heads * _up(s.head_dim, multiple)


def _up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


TILE = 128
"""Most tokens of a tile; kernels sum over whole ones."""


def _tiled_backward(s: Shape, head_dim: int) -> int:
    """flash-attn 3 and 4: results; fp32 sums of dq, and under GQA of dk and dv, with head_dim rounded up; two numbers a row. Keys may take a
    tile more, as Blackwell's pairs do."""
    rows, keys = s.q + TILE - 1, s.kv + 2 * TILE - 1
    return s.q_bytes + s.kv_bytes + 4 * rows * s.heads * (head_dim + 2) + (8 * keys * s.kv_heads * head_dim if s.spread_bytes else 0)


def _flash_attn_2_backward(s: Shape) -> int:
    head_dim = _up(s.head_dim, 32 if s.head_dim <= 128 else 64)
    return s.q_bytes + s.kv_bytes + s.spread_bytes + 4 * _up(s.q, TILE) * s.heads * (head_dim + 1)


KERNELS = {
    "flash-attn-4": Kernel(
        lambda s: (0 if s.out_given else s.q_bytes) + (0 if s.lse_given else s.row_bytes),
        lambda s: _tiled_backward(s, _up(s.head_dim, 32 if s.head_dim <= 128 else 64)),
    ),
    "flash-attn-3": Kernel(
        lambda s: s.q_bytes + s.row_bytes,
        lambda s: _tiled_backward(s, max(64, _up(s.head_dim, 32 if s.head_dim <= 128 else 64))),
    ),
    "flash-attn-2": Kernel(lambda s: s.q_bytes + s.row_bytes, _flash_attn_2_backward),
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
_TWO = re.compile("(.+) forward, (.+) backward")


def joined(forward: str, backward: str) -> str:
    """One name for the kernels of both directions."""
    return forward if forward == backward else f"{forward} forward, {backward} backward"


def parted(name: str) -> tuple[str, str]:
    """(forward's kernel, backward's) that a name stands for."""
    two = _TWO.fullmatch(name)
    return (two[1], two[2]) if two else (name, name)
