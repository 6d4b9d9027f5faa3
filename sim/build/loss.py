"""The chunked loss: final norm, LM head and cross entropy, forward and backward fused, chunk by chunk in sub-chunks, so that
no more than one sub-chunk's logits exist at a time."""
from __future__ import annotations

from sim.build.emit import Emit
from sim.strategy import Strategy


def loss(emit: Emit, strategy: Strategy):
    """Writes the loss region."""
    for i in range(emit.u):
        reads = (emit.argument("x", i), emit.argument("label", i))
        emit.op("compute", f"ce[{i}]", reads, (emit.argument("dx", i),), n=emit.n(i), sub=strategy.loss_sub)
    return emit.close()
