"""The losses of the same training without chunks, ranks or offload: plain torch on all cores, what a schedule has to reproduce."""
from __future__ import annotations

import os
from collections.abc import Callable

import torch

from engine.deal import shift
from engine.model import initial
from engine.reference import language_model
from engine.text import stdlib_bytes
from sim.model import Model


def losses(model: Model, seq: int, steps: int, seed: int = 0, lr: float = 3e-3, tick: Callable[[], None] = lambda: None) -> list[float]:
    """fp32 losses of `steps` AdamW steps on the same text, weights and learning rate as engine.train."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    weights = {n: w.requires_grad_() for n, w in initial(model, seed)}
    optimizer, found = torch.optim.AdamW(list(weights.values()), lr=lr), []
    data = stdlib_bytes(steps * seq)
    for tokens_S in data.split(seq):
        loss = language_model(weights, tokens_S, shift(tokens_S), model)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(float(loss.detach()))
        tick()
    return found
