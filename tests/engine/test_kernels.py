"""Adapters: layouts, masks, lse and groups of KV heads, each against fp64 alone; what goes straight into the arenas; how they are timed."""
from __future__ import annotations

import pytest
import torch

from engine.kernels import cpu_flash, flash_attn_4, rates
from engine.kernels.choose import Pair
from engine.kernels.rates import Rate
from sim import ops
from tests.engine.cases import CPU, Place, running, schedule, text, tiny, train
from tests.engine.fakes import FAKES, installed
from tests.engine.numerics import SEQ, base, check, measure
from tests.engine.row import row_errors

HEADS = ((4, 4), (8, 2), (4, 1))


@pytest.mark.parametrize("heads, kv_heads", HEADS)
@pytest.mark.parametrize("backward", (*FAKES, "cpu_flash"))
@pytest.mark.parametrize("forward", (*FAKES, "cpu_flash"))
def test_any_backward_takes_any_forwards_merged_row(forward, backward, heads, kv_heads):
    with installed(*FAKES):
        assert max(row_errors(forward, backward, heads, kv_heads, 16, torch.float32).values()) < 2e-6


@pytest.mark.parametrize("heads, kv_heads", HEADS)
def test_flash_attn_4_writes_where_it_is_told(heads, kv_heads):
    with installed("flash_attn_4"):
        assert max(row_errors("flash_attn_4", "flash_attn_4", heads, kv_heads, 16, torch.float32, given=True).values()) < 2e-6


@pytest.mark.parametrize("name", FAKES)
def test_deterministic_algorithms_reach_the_kernel(name, monkeypatch):
    asked = []
    back = next(f for f in vars(FAKES[name]) if f.startswith("_flash_attn_b"))
    right = getattr(FAKES[name], back)
    monkeypatch.setattr(FAKES[name], back, lambda *args, **kw: (asked.append(kw["deterministic"]), right(*args, **kw))[1])
    with installed(name):
        for wanted in (False, True):
            torch.use_deterministic_algorithms(wanted)
            try:
                row_errors(name, name, 2, 2, 16, torch.float32)
            finally:
                torch.use_deterministic_algorithms(False)
    assert asked == [False] * 2 + [True] * 2


@pytest.mark.parametrize("save", ("qkvo", "input"))
@pytest.mark.parametrize("kernel", FAKES)
def test_a_block_on_each(kernel, save):
    model = tiny(4, 2, 16, hidden=96, ffn=160, vocab=8)
    with installed(kernel):
        found = measure(0, None, model, SEQ, "fp32", 28, True, (0,), settings={"save": save}, place=Place("cpu", kernel))
    check(found, base(model, SEQ, "fp32", (0,)), "fp32")


@pytest.mark.parametrize("dtype", ("fp32", "bf16"))
@pytest.mark.parametrize("chunk", (64, 20))
def test_the_engine_gives_what_the_simulator_counts_on(chunk, dtype, monkeypatch):
    """The first part of a row goes where it belongs: lse always, the output where no fp32 is kept for other parts."""
    model, given = tiny(vocab=50), []
    right = flash_attn_4.forward

    def noted(q, kv, causal, out=None, lse=None):
        given.append((lse is not None, out is not None))
        return right(q, kv, causal, out, lse)

    monkeypatch.setattr(flash_attn_4, "forward", noted)
    s = schedule(model, 64, chunk, 1, dtype, save="input")
    with installed("flash_attn_4"), running(s, place=Place("cpu", "flash_attn_4")) as program:
        losses, _ = train(program, 0, None, *text(model, 64), 1)
    assert given == [ops._given_room(op, s) for r in ("fwd", "bwd") for op in s.regions[r].ops if op.kind == "attn"]
    u = len(s.chunks)
    assert given[:u * (u + 1) // 2].count((True, True)) == (u if dtype == "fp32" else 1)
    with running(s, place=CPU) as program:
        assert losses == pytest.approx(train(program, 0, None, *text(model, 64), 1)[0], rel=1e-5 if dtype == "fp32" else 1e-2)


def test_two_kernels_run_as_one():
    s = schedule(tiny(), 64, 20, 1, "fp32")
    with installed("flash_attn_4"), running(s) as program:
        one, _ = train(program, 0, None, *text(tiny(), 64), 2)
        program.runtime.kernel = Pair("torch CPU flash forward, flash-attn-4 backward", cpu_flash.forward, flash_attn_4.backward)
        two, _ = train(program, 0, None, *text(tiny(), 64), 2)
    assert two == pytest.approx(one, rel=1e-5)


class Clock:
    """A GPU's clock that fakes of kernels move."""

    now_ms = 0.0

    def event(self, enable_timing):
        clock = self

        class Event:
            def record(self):
                self.at_ms = clock.now_ms

            def elapsed_time(self, later):
                return later.at_ms - self.at_ms

        return Event()


class Timed:
    """A kernel that takes so many ms (full; half of them causal), and more in its first rounds."""

    def __init__(self, name, clock, forward_ms, backward_ms, calls):
        self.NAME, self._clock, self._ms, self._calls, self._rounds = name, clock, (forward_ms, backward_ms), calls, 0

    def forward(self, q, kv, causal, out=None, lse=None):
        self._spend(0, causal)
        return cpu_flash.forward(q, kv, causal)

    def backward(self, dout, q, kv, out, lse, causal):
        self._spend(1, causal)

    def _spend(self, k, causal):
        self._calls.append(self.NAME)
        slow = 10 if self._calls.count(self.NAME) <= 4 * (1 + rates.WARM) else 1  # a round has 4 calls
        self._clock.now_ms += slow * self._ms[k] / (1 + causal)


@pytest.fixture
def clock(monkeypatch):
    found = Clock()
    monkeypatch.setattr(torch.cuda, "Event", found.event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    return found


def test_rates_are_medians_of_turns_after_warm_up(clock):
    calls = []
    kernels = tuple(Timed(name, clock, *ms, calls) for name, ms in (("a", (2, 4)), ("b", (1, 5))))
    found = rates.rates(kernels, 4, 2, 16, "cpu", 64)
    flops = 4 * 64**2 * 4 * 16
    assert found == {"a": pytest.approx(Rate(flops / 2e9, 2.5 * flops / 4e9)), "b": pytest.approx(Rate(flops / 1e9, 2.5 * flops / 5e9))}
    assert calls[8:] == (["a"] * 4 + ["b"] * 4) * (rates.WARM + rates.ROUNDS), "they take turns"


def test_a_kernel_that_fails_here_is_named_and_left_out(clock):
    class Broken(Timed):
        def backward(self, *_):
            raise RuntimeError("no kernel image\nand more")

    calls = []
    found = rates.rates((Broken("a", clock, 1, 1, calls), Timed("b", clock, 1, 1, calls)), 4, 2, 16, "cpu", 64)
    assert found["a"] == "fails here (RuntimeError: no kernel image)" and isinstance(found["b"], Rate)
