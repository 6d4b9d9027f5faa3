"""The chunked loss: final norm, LM head and cross entropy, forward and backward fused, chunk by chunk in sub-chunks, so that
no more than one sub-chunk's logits exist at a time."""
from __future__ import annotations

from sim.build.emit import AHEAD, Emit
from sim.build.saved import handed
from sim.strategy import Strategy


def loss(emit: Emit, strategy: Strategy):
    """Writes the loss region."""
    hidden = handed(emit, strategy)
    for i in range(emit.u):
        reads = tuple(hidden.fetch(role, i, f"reload.{role}[{i}]", AHEAD) for role in ("x", "label"))
        dx = hidden.home("dx", i, AHEAD)
        emit.op("compute", f"ce[{i}]", reads, (dx,), n=emit.n(i), sub=strategy.loss_sub)
        hidden.keep("dx", i, dx)
    return emit.close()
