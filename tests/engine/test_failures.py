"""Failures: what goes wrong on a stream or a rank comes out on the host, soon, and nothing hangs."""
from __future__ import annotations

import os
import signal
import time
from unittest.mock import patch

import pytest

from engine.launch import LAUNCHERS
from engine.model import LanguageModel
from sim.errors import UserError
from tests.engine.cases import running, schedule, shard, text, tiny, train
from tests.engine.ranks import RankError, Ranks

MODEL, SEQ, CHUNK = tiny(4, 2, 16, layers=2), 61, 12


@pytest.mark.parametrize("kind", ("qkv", "offload", "reload", "attn", "ce", "attn_bwd", "kv_bwd"))
def test_a_launcher_that_raises_surfaces_and_leaves_the_program_usable(kind):
    def broken(*_):
        raise RuntimeError(f"{kind} broke")

    tokens, labels = text(MODEL, SEQ)
    with running(schedule(MODEL, SEQ, CHUNK)) as program:
        plain = train(program, 0, None, tokens, labels, 1)[0]
        start = time.monotonic()
        with patch.dict(LAUNCHERS, {kind: broken}), pytest.raises(RuntimeError, match=f"{kind} broke"):
            LanguageModel(program)(*shard(program.schedule, 0, tokens, labels)).backward()
        assert time.monotonic() - start < 10
        assert train(program, 0, None, tokens, labels, 1)[0] == plain


def until_killed(rank: int, group, victim: int, steps: int):
    """Trains; the victim kills itself inside the all-to-all after `steps` steps."""
    with running(schedule(MODEL, SEQ, CHUNK, group.size()), rank, group) as program:
        tokens, labels = text(MODEL, SEQ)
        train(program, rank, group, tokens, labels, steps)
        with patch.dict(LAUNCHERS, {"a2a": lambda *_: os.kill(os.getpid(), signal.SIGKILL)} if rank == victim else {}):
            train(program, rank, group, tokens, labels, 1)


@pytest.mark.parametrize("P, victim", [(2, 1), (4, 2)])
def test_when_a_rank_is_killed_the_others_end(P, victim):
    ranks = Ranks(P)
    try:
        outcomes = ranks.outcomes(until_killed, victim, 1)
        assert max(outcome.after_s for outcome in outcomes) < outcomes[victim].after_s + 10
        for rank, outcome in enumerate(outcomes):
            assert outcome.error == ("died" if rank == victim else "RuntimeError"), outcome
        assert not ranks.alive and not any(process.is_alive() for process in ranks.processes)
    finally:
        ranks.close()


def hang(rank: int, group):
    time.sleep(60 * rank)


def test_a_rank_that_gives_no_answer_is_ended():
    ranks = Ranks(2)
    with pytest.raises(RankError, match="rank 1: no answer"):
        ranks.run(hang, within_s=3)
    assert not any(process.is_alive() for process in ranks.processes)


def test_what_is_only_priced_is_not_run():
    with pytest.raises(UserError, match=r"^fwd.pin.kv\[0\] takes pinned memory in the middle of a step, which is priced and not run; build the schedule with --set alloc=plan$"):
        with running(schedule(tiny(), 64, 32, alloc="chunk")):
            pass
