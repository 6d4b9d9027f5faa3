"""Bits: offload, repeats and slow copies change none."""
from __future__ import annotations

import time
from collections import Counter
from contextlib import nullcontext
from functools import cache

import torch

from engine.model import LanguageModel
from tests.cuda.places import CHUNK, CUDNN, DEVICE, FLASH, MODEL, SEQ, deterministic, one_and_two_ranks
from tests.engine.cases import Place, digest, running, schedule, shard, text
from tests.engine.hooks import late_copies

REPEATS = 50
LATE_MS = 20
HOST, HALF, NEAR = {}, {"resident": 0.5}, {"offload": False}
"""All that may go to the host does; half of KV stays; nothing does."""


def passes(rank: int, group, place: Place, way: dict, exact: bool, times: int = 1, late_ms: float = 0) -> tuple[list[tuple[str, str]], float]:
    """([digests of (what forward gave, every gradient)] of each pass through one program, seconds of the last); `exact` repeats bits."""
    s = schedule(MODEL, SEQ, CHUNK, group.size() if group else 1, "bf16", **way)
    with deterministic() if exact else nullcontext(), running(s, rank, group, place) as program:
        lm, given, found = LanguageModel(program).to(program.backend.device), [], []
        lm.loss.register_forward_pre_hook(lambda _, arguments: given.append(arguments[0]))
        tokens, labels, valid = shard(s, rank, *(t.to(program.backend.device) for t in text(MODEL, SEQ)))
        if late_ms:
            late_copies(program, lambda: pause(late_ms))
        for _ in range(times):
            program.backend.settle()
            start = time.perf_counter()
            loss = lm(tokens, labels, valid)
            loss.backward()
            program.backend.settle()
            took_s = time.perf_counter() - start
            found.append((digest(given.pop()) + digest(loss), "".join(digest(p.grad) for p in lm.parameters())))
            lm.zero_grad()
        return found, took_s


def pause(ms: float) -> None:
    """Keeps the current stream busy."""
    torch.cuda._sleep(round(ms * cycles_a_ms())) if DEVICE == "cuda" else time.sleep(ms / 1e3)


@cache
def cycles_a_ms() -> float:
    """Of torch.cuda._sleep on this GPU."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for _ in range(2):  # the first one wakes the clock up
        start.record()
        torch.cuda._sleep(10_000_000)
        end.record()
        end.synchronize()
    return 10_000_000 / start.elapsed_time(end)


@one_and_two_ranks
def test_forward_is_bit_equal_with_offload_on_and_off(ranks, P):
    on, half, off = ([found[0][0] for found, _ in ranks(P).run(passes, CUDNN, way, False)] for way in (HOST, HALF, NEAR))
    assert on == half == off


@one_and_two_ranks
def test_forward_and_backward_are_bit_equal_with_offload_on_and_off(ranks, P):
    on, half, off = ([found for found, _ in ranks(P).run(passes, FLASH, way, True)] for way in (HOST, HALF, NEAR))
    assert on == half == off


@one_and_two_ranks
def test_repeats_are_bit_equal(ranks, P):
    for found, _ in ranks(P).run(passes, FLASH, HOST, True, REPEATS):
        assert len(found) == REPEATS and len(set(found)) == 1


def test_slow_copies_change_no_bit(ranks, note):
    s = schedule(MODEL, SEQ, CHUNK, 1, "bf16")
    copies = Counter(op.stream for region, _ in s.order() for op in s.regions[region].ops if op.stream in ("h2d", "d2h"))
    (right, plain_s), (found, late_s) = (ranks(1).run(passes, FLASH, HOST, True, 2, ms)[0] for ms in (0, LATE_MS))
    assert found == right
    note("slow copies: step in s", late_s)
    assert late_s - plain_s > 0.5 * LATE_MS / 1e3 * max(copies.values())
