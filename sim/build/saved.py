"""Saved: what forward keeps for backward, and how a chunk gets out of HBM and back."""
from __future__ import annotations

from sim.build.emit import Emit
from sim.layout import Layout
from sim.schedule import Buffer
from sim.strategy import Strategy

SAVE = {"input": ("x",), "o": ("x", "o", "lse"), "qkvo": ("x", "q", "kv", "o", "lse"), "all": ("x", "q", "kv", "o", "lse", "h", "up")}
"""Roles by Strategy.save. Without offload the block input is not copied: backward reads the argument itself."""


def declare(layout: Layout, chunks: list[tuple[int, int]], strategy: Strategy) -> dict[str, Buffer]:
    """The saved buffers of one layer: on the host, or in HBM (all but x, which then is an argument of backward too)."""
    saved = {}
    for i, (_, n) in enumerate(chunks):
        for role in SAVE[strategy.save][0 if strategy.offload else 1:]:
            name, space = (f"{role}[{i}]@host", "host") if strategy.offload else (f"{role}[{i}]", "hbm")
            saved[name] = Buffer(name, space, "saved", role, layout.dtype_of(role), layout.shape(role, n))
    return saved


class Store:
    """Where chunks rest between their uses in a region: on the host, to be copied out and back, or in HBM. `roles` are those that
    this region makes and has to keep; what an earlier one saved is only fetched."""

    def __init__(self, emit: Emit, roles: tuple[str, ...], host: bool, skip_resident: bool) -> None:
        self.e, self.roles, self.host, self.skip = emit, roles, host, skip_resident

    def home(self, role: str, i: int, depth: int) -> str:
        """Where chunk i is computed: in HBM where it rests, or in a slot that is copied out (or, of another role, only used at once)."""
        rests = role in self.roles and not self.host
        return self.e.rest(role, i, False) if rests else self.e.slot(role, i, depth)

    def keep(self, role: str, i: int, buffer: str, place: str = "") -> None:
        """offload.role[i], if it rests on the host."""
        if role in self.roles and self.host:
            self.e.op("d2h", f"offload.{role}[{place or i}]", (buffer,), (self.e.rest(role, i, True),), n=self.e.n(i))

    def fetch(self, role: str, i: int, name: str, depth: int, slot: str | None = None) -> str:
        """The HBM buffer that has chunk i; if it rests on the host, op `name` reloads it into a slot, unless one still has it."""
        if not self.host:
            return self.e.argument("x", i) if role == "x" else self.e.rest(role, i, False)
        found = self.e.resident(role, i) if self.skip else None
        if found is None:
            found = self.e.slot(role, i, depth, slot)
            self.e.op("h2d", name, (self.e.rest(role, i, True),), (found,), n=self.e.n(i))
        return found


def inner(strategy: Strategy, row: int, chunks: range) -> list[int]:
    """The chunks that a row meets, in the strategy's direction."""
    return list(chunks if strategy.rows == "ascending" or row % 2 == 0 else reversed(chunks))
