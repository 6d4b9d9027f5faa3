"""Saved: what forward keeps for backward, and how a chunk gets out of HBM and back."""
from __future__ import annotations

from collections.abc import Callable

from sim.build.emit import Emit
from sim.layout import Layout
from sim.schedule import HANDED, Buffer
from sim.strategy import Strategy

SAVE = {"input": ("x",), "o": ("x", "o", "lse"), "qkvo": ("x", "q", "kv", "o", "lse"), "all": ("x", "q", "kv", "o", "lse", "h", "up")}
"""Roles by Strategy.save."""


def saves(strategy: Strategy) -> tuple[str, ...]:
    """The roles that forward copies or leaves for backward. The block input only if backward cannot read where it was handed over."""
    return SAVE[strategy.save][0 if strategy.offload and strategy.hidden == "hbm" else 1:]


def hosted(strategy: Strategy, u: int) -> Callable[[str, int], bool]:
    """(role, chunk of u) -> whether what forward keeps rests on the host, or in HBM. The KV chunks that stay are the earliest: forward
    reloads chunk j in the u - 1 - j rows below its own, backward in u - j rows, or once under kv-outer."""
    stay = int(strategy.resident * u)
    return lambda role, i: strategy.offload and not (role == "kv" and i < stay)


def declare(layout: Layout, chunks: list[tuple[int, int]], strategy: Strategy) -> dict[str, Buffer]:
    """The saved buffers of one layer: on the host, or in HBM."""
    saved, host = {}, hosted(strategy, len(chunks))
    for i, (_, n) in enumerate(chunks):
        for role in saves(strategy):
            name, space = (f"{role}[{i}]@host", "host") if host(role, i) else (f"{role}[{i}]", "hbm")
            saved[name] = Buffer(name, space, "saved", role, layout.dtype_of(role), layout.shape(role, n))
    return saved


def handed(emit: Emit, strategy: Strategy) -> "Store":
    """What comes from other regions and goes to them: where it is handed over."""
    return Store(emit, HANDED, lambda *_: strategy.hidden == "host", True)


class Store:
    """Where chunks rest between their uses in a region: on the host, to be copied out and back, or in HBM, as `host` says of each (role,
    chunk). `roles` are those that this region makes and has to keep; what an earlier one saved is only fetched."""

    def __init__(self, emit: Emit, roles: tuple[str, ...], host: Callable[[str, int], bool], skip_resident: bool) -> None:
        self.e, self.roles, self.host, self.skip = emit, roles, host, skip_resident

    def home(self, role: str, i: int, depth: int) -> str:
        """Where chunk i is computed: in HBM where it rests, or in a slot that is copied out (or, of another role, only used at once)."""
        rests = role in self.roles and not self.host(role, i)
        return self.e.rest(role, i, False) if rests else self.e.slot(role, i, depth)

    def keep(self, role: str, i: int, buffer: str, name: str = "") -> None:
        """offload.role[i] (or offload.name), if it rests on the host."""
        if role in self.roles and self.host(role, i):
            self.e.op("d2h", f"offload.{name or f'{role}[{i}]'}", (buffer,), (self.e.rest(role, i, True),), n=self.e.n(i))

    def fetch(self, role: str, i: int, name: str, depth: int, slot: str | None = None) -> str:
        """The HBM buffer that has chunk i; if it rests on the host, op `name` reloads it into a slot, unless one still has it."""
        if not self.host(role, i):
            return self.e.rest(role, i, False)
        found = self.e.resident(role, i) if self.skip else None
        if found is None:
            found = self.e.slot(role, i, depth, slot)
            self.e.op("h2d", name, (self.e.rest(role, i, True),), (found,), n=self.e.n(i))
        return found


def inner(strategy: Strategy, row: int, chunks: range) -> list[int]:
    """The chunks that a row meets, in the strategy's direction."""
    return list(chunks if strategy.rows == "ascending" or row % 2 == 0 else reversed(chunks))
