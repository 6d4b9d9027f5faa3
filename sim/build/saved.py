"""Saved: what forward keeps for backward, and how a chunk of it gets out of HBM and back."""
from __future__ import annotations

from sim.build.emit import Emit
from sim.layout import Layout
from sim.schedule import Buffer

QKVO = ("x", "q", "kv", "o", "lse")
"""save=qkvo. Without offload the block input is not copied: backward reads the argument itself."""


def declare(layout: Layout, chunks: list[tuple[int, int]], offload: bool) -> dict[str, Buffer]:
    """The saved buffers of one layer: on the host, or in HBM (all but x, which then is an argument of backward too)."""
    saved = {}
    for i, (_, n) in enumerate(chunks):
        for role in QKVO if offload else QKVO[1:]:
            name, space = (f"{role}[{i}]@host", "host") if offload else (f"{role}[{i}]", "hbm")
            saved[name] = Buffer(name, space, "saved", role, layout.dtype_of(role), layout.shape(role, n))
    return saved


def home(emit: Emit, role: str, i: int, depth: int, offload: bool) -> str:
    """Where forward computes chunk i of a saved role: a slot that is copied out, or its place in HBM."""
    return emit.slot(role, i, depth) if offload else f"{role}[{i}]"


def keep(emit: Emit, role: str, i: int, buffer: str, offload: bool) -> None:
    """fwd.offload.role[i], if offloaded."""
    if offload:
        emit.op("d2h", f"offload.{role}[{i}]", (buffer,), (f"{role}[{i}]@host",), n=emit.n(i))


def fetch(emit: Emit, role: str, i: int, name: str, depth: int, offload: bool, slot: str | None = None) -> str:
    """The HBM buffer that holds chunk i of a saved role; if offloaded, op `name` reloads it into a rotation of slots."""
    if not offload:
        return emit.argument("x", i) if role == "x" else f"{role}[{i}]"
    buffer = emit.slot(role, i, depth, slot)
    emit.op("h2d", name, (f"{role}[{i}]@host",), (buffer,), n=emit.n(i))
    return buffer
