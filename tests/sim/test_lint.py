"""The lint and the oracle must agree on every mutation of small schedules: nothing harmful missed, nothing harmless refused."""
from __future__ import annotations

import random
from collections import Counter
from itertools import islice
from pathlib import Path

import mutations
import pytest
from oracle import Oracle

from sim.build.step import build
from sim.errors import UserError
from sim.lint import LintError, lint
from sim.model import Model, model
from sim.strategy import Strategy
from sim.text import parse, show

GOLDEN = Path(__file__).parents[1] / "golden"
MHA = Model("tiny", "llama", 2, 64, 4, 4, 16, 64, 64)
GQA = Model("tiny", "llama", 2, 64, 4, 2, 16, 64, 64)
CONFIGS = {
    "P1-slots1": (MHA, Strategy(sp=1, chunk=32, prefetch=1)),
    "P1-slots3": (MHA, Strategy(sp=1, chunk=32, prefetch=3)),
    "P2-gqa-slots1": (GQA, Strategy(sp=2, chunk=32, prefetch=1)),
    "P2-gqa-slots3": (GQA, Strategy(sp=2, chunk=32, prefetch=3)),
    "P2-resident": (GQA, Strategy(sp=2, chunk=32, offload=False)),
    "P2-sync": (GQA, Strategy(sp=2, chunk=32, host_sync="region")),
}
SEQ = 5 * 32 - 6  # u = 5, the last chunk short
each = pytest.mark.parametrize("config", CONFIGS)


def made(config: str, **changes):
    shape, strategy = CONFIGS[config]
    return build(shape, strategy.replace(**changes), SEQ)


def verdict(schedule) -> str | None:
    try:
        lint(schedule)
    except UserError as error:
        assert "\n" not in str(error)
        return str(error)


def agree(oracle: Oracle, mutants) -> Counter:
    """Judges each mutant twice; returns how many were harmful and harmless."""
    counts, wrong = Counter(), []
    for what, schedule in mutants:
        harm, said = oracle.harm(schedule), verdict(schedule)
        counts["harmful" if harm else "harmless"] += 1
        if bool(harm) != bool(said):
            wrong.append((what, harm, said))
    assert not wrong, f"{len(wrong)} of {counts.total()}, first {wrong[0]}"
    return counts


@each
@pytest.mark.parametrize("reuse", (True, False))
def test_what_is_built_is_right(config, reuse):
    schedule = build(*CONFIGS[config], SEQ, reuse=reuse)
    lint(schedule)
    assert Oracle(schedule).harm(schedule) is None


@each
def test_every_derived_wait_is_needed(config):
    schedule = made(config)
    derived = [(what, mutant) for what, mutant in mutations.delete_waits(schedule) if ".sync wait" not in what]
    assert agree(Oracle(schedule), derived) == {"harmful": len(derived)}


@each
def test_unreduced_waits(config):
    """With a wait for every hazard pair: all that are needed deleted one by one, and a sample of the rest (bench_lint does all)."""
    schedule = made(config)
    oracle = Oracle(schedule, most=2)
    schedule = oracle.unreduced(schedule)
    assert verdict(schedule) is None
    implied = oracle.implied(schedule)
    for number, (region, k, wait) in enumerate((region, k, w) for region, k, op in mutations.places(schedule) for w in op.waits):
        if (region, k, wait) not in implied or number % 50 == 0:
            waits = schedule.regions[region].ops[k].waits
            mutant = mutations.changed(schedule, region, k, waits=tuple(w for w in waits if w != wait))
            assert bool(verdict(mutant)) == ((region, k, wait) not in implied and bool(oracle.harm(mutant))), (region, k, wait)


KINDS = {
    "waits added": lambda s: mutations.add_waits(s, random.Random(1)),
    "buffers": lambda s: mutations.wrong_buffers(s, 2),
    "moves": lambda s: mutations.moves(s, random.Random(2), 2),
    "repeats": lambda s: mutations.duplicates(s, random.Random(3)),
    "drops": mutations.drops,
    "arguments": mutations.wrong_args,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("config", list(CONFIGS)[:4])
def test_mutations(config, kind):
    schedule = made(config)
    counts = agree(Oracle(schedule, most=2), KINDS[kind](schedule))
    assert counts["harmful" if kind not in ("waits added",) else "harmless"] > 50
