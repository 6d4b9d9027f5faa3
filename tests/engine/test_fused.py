"""Fused: what was compiled for one job of a model serves all its others. Guards are torch's; what would run on a GPU runs here as it is written."""
from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
import torch

from engine import fused
from engine.backend.cpu import Stream
from tests.engine.cases import running, schedule, text, tiny, train

VARIANTS = {"_rms_norm_bwd": 3, "_layer_norm_bwd": 3, "merge": 2, "add_attn_grads": 4, "_columns": 3}
"""Compilations of a function; of all others, one. A norm's backward adds nothing, something else or what it writes over; a merge writes fp32 over
its input or the dtype elsewhere; each of two gradients has begun or not; biases have three widths."""


@pytest.fixture
def compiled(monkeypatch):
    """The name of each function as often as it is compiled. The caller's thread does all work, as it issues all on a GPU: torch 2.11 crashes
    where a thread compiles after another that has ended."""
    names: list[str] = []

    def at_once(stream, work, span=None):
        with torch.no_grad():
            work()

    @cache
    def noted(function):
        return torch.compile(function, fullgraph=True, backend=lambda graph, inputs: (names.append(function.__name__), graph.forward)[1])

    monkeypatch.setattr(Stream, "launch", at_once)
    monkeypatch.setattr(fused, "devices", {"cpu"})
    monkeypatch.setattr(fused, "_compiled", noted)
    torch._dynamo.reset()
    yield names
    torch._dynamo.reset()


def step(model, seq: int, chunk: int, **settings) -> None:
    with running(schedule(model, seq, chunk, **settings)) as program:
        train(program, 0, None, *text(model, seq), steps=1)


@pytest.mark.parametrize("kind", ("llama", "gpt"))
def test_a_second_job_of_a_model_compiles_nothing(compiled, kind):
    model = tiny(kind=kind)
    step(model, 128, 32)
    found = Counter(compiled)
    assert found and not {name: n for name, n in found.items() if n > VARIANTS.get(name, 1)}
    for seq, chunk, settings in (
        (144, 48, {}), (104, 24, {}), (112, 48, {"offload": False}), (256, 64, {"save": "all"}), (128, 32, {"save": "input"}),
        (128, 32, {"save": "o", "order": "kv-outer"}), (128, 16, {"order": "query-down", "ffn_sub": 1}), (128, 64, {"loss_sub": 8}),
    ):
        compiled.clear()
        step(model, seq, chunk, **settings)
        assert compiled == [], (seq, chunk, settings)


def test_each_model_is_compiled_for(compiled):
    """Whatever came before it: torch would make a size that has changed once a variable, and its kernels are others."""
    found = []
    for k in (2, 3, 4):
        compiled.clear()
        step(tiny(2 * k, k, 8 * k, hidden=32 * k, ffn=48 * k, vocab=24 * k), 128, 32)
        found.append(Counter(compiled))
    assert found[0] == found[1] == found[2]
