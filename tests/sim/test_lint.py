"""The lint and the oracle must agree on every mutation of small schedules: nothing harmful missed, nothing harmless refused."""
from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace

import mutations
import pytest
from oracle import Oracle

from sim.build.step import build
from sim.errors import UserError
from sim.lint import LintError, lint
from sim.model import Model
from sim.strategy import Strategy

MHA = Model("tiny", "llama", 2, 64, 4, 4, 16, 64, 64)
GQA = Model("tiny", "llama", 2, 64, 4, 2, 16, 64, 64)
GPT = Model("tiny", "gpt", 2, 64, 4, 4, 16, 64, 64, rotary=0.25)
CONFIGS = {
    "P1-slots1": (MHA, Strategy(sp=1, chunk=32, prefetch=1)),
    "P1-slots3": (MHA, Strategy(sp=1, chunk=32, prefetch=3)),
    "P2-gqa-slots1": (GQA, Strategy(sp=2, chunk=32, prefetch=1)),
    "P2-gqa-slots3": (GQA, Strategy(sp=2, chunk=32, prefetch=3)),
    "P2-resident": (GQA, Strategy(sp=2, chunk=32, offload=False)),
    "P2-partly-resident": (GQA, Strategy(sp=2, chunk=48, resident=0.5)),
    "P2-sync": (GQA, Strategy(sp=2, chunk=32, host_sync="region")),
    "P2-gpt-kv-outer-input": (GPT, Strategy(sp=2, chunk=48, save="input", order="kv-outer", accum="host")),
    "P1-query-down-o-alternating": (MHA, Strategy(chunk=48, save="o", order="query-down", rows="alternating", skip_resident=True, accum="host")),
    "P2-gpt-all-slack": (GPT, Strategy(sp=2, chunk=48, save="all", order="query-down", reuse_slack=4)),
    "P2-hidden-host": (GQA, Strategy(sp=2, chunk=48, hidden="host", accum="host")),
    "P1-gpt-hidden-host-kv-outer": (GPT, Strategy(chunk=48, hidden="host", save="o", order="kv-outer", reuse_slack=4)),
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
@pytest.mark.parametrize("config", [*list(CONFIGS)[:4], "P2-gpt-all-slack", "P2-hidden-host"])
def test_mutations(config, kind):
    schedule = made(config)
    counts = agree(Oracle(schedule, most=2), KINDS[kind](schedule))
    assert counts["harmful" if kind not in ("waits added",) else "harmless"] > 50


@pytest.mark.parametrize("config", ["P1-slots3", "P2-gqa-slots3", "P2-resident"])
def test_plans_edited_by_hand(config):
    """Each buffer put where another one lies: wrong exactly where both are in use at once."""
    base, counts = made(config), Counter()
    for region in base.regions.values():
        planned = [b for b in region.buffers.values() if b.offset is not None]
        for b, other in zip(planned, planned[1:] + planned[:1]):
            if other.space == b.space and other.offset + b.size_bytes <= base.shared[b.space]:
                moved = replace(b, offset=other.offset)
                mutant = replace(base, regions={**base.regions, region.name: replace(region, buffers={**region.buffers, b.name: moved})})
                counts += agree(Oracle(mutant, most=2), [(f"{b.name} at {other.name}", mutant)])
    assert counts["harmful"] > 10


def test_the_line_and_the_drawing():
    schedule = made("P2-gqa-slots3")
    op = next(op for op in schedule.regions["fwd"].ops if op.id == "fwd.reload.kv[2,0]")
    assert op.waits == ()
    with pytest.raises(LintError) as caught:
        lint(mutations.changed(schedule, "fwd", schedule.regions["fwd"].ops.index(op) + 1, waits=()))
    assert str(caught.value).endswith("add 'wait fwd.reload.kv[2,0]' to fwd.attn[2,0]")
    arrows = [row for row in caught.value.drawing.splitlines() if row.startswith("------>")]
    assert len(arrows) == 1 and "fwd.attn[2,0]" in arrows[0]


def test_what_the_line_says_mends_it():
    """For every derived wait deleted: adding the wait that the line names, again and again, makes the schedule pass."""
    schedule = made("P2-gqa-slots3")
    for what, mutant in mutations.delete_waits(schedule):
        for _ in range(20):
            said = verdict(mutant)
            if said is None:
                break
            wait, id = said.rpartition("add 'wait ")[2].split("' to ")
            id = id.split(", and")[0]
            region = id.split(".")[0]
            k = next(k for k, op in enumerate(mutant.regions[region].ops) if op.id == id)
            mutant = mutations.changed(mutant, region, k, waits=mutant.regions[region].ops[k].waits + (wait,))
        assert said is None, (what, said)
