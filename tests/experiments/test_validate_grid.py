"""The grid: the same for a seed, inside its space, log-uniform in work, within memory and budget."""
from __future__ import annotations

import math

import pytest

from experiments.validate.case import SPACES, Case
from experiments.validate.grid import Deck, draw, tokens, work
from experiments.validate.run import cost, plan, steps
from experiments.validate.calibration import Profile
from engine.calibrate import CHUNKS
from sim.errors import UserError
from sim.machine import machine
from sim.metrics import peak_bytes, times
from sim.simulate import simulate

GPU = SPACES["cuda"]
H200 = machine("h200-141g-sxm").override(host_bytes=240 << 30)
MINUTE = 60


def flat(case: Case) -> float:
    """Ten seconds each."""
    return 10.0


def cards(cases: list[Case], field: str) -> dict:
    values = [getattr(case, field) for case in cases]
    return {value: values.count(value) for value in set(values)}


def test_a_seed_says_it_all():
    drawn = draw(GPU, "cuda", 3, 5, (1, 2), flat, MINUTE)
    assert [case.label for case in drawn] == LABELS
    assert [(case.number, case.group) for case in drawn] == [(0, 0), (1, 0), (2, 0), (3, 0), (4, 1)]
    assert draw(GPU, "cuda", 3, 5, (1, 2), flat, MINUTE) == drawn != draw(GPU, "cuda", 4, 5, (1, 2), flat, MINUTE)


LABELS = [
    "llama3-8b x 1 P=2 S=24K C=8K query-up save=qkvo host, 3 slots",
    "llama3-8b x 1 P=2 S=24K C=8K kv-outer save=all HBM",
    "llama3-8b x 1 P=2 S=24K C=8K query-down save=o host, 2 slots",
    "llama3-8b x 1 P=2 S=24K C=8K query-down save=input HBM",
    "gpt-13b x 2 P=1 S=504K C=48K query-up save=qkvo host, 2 slots",
]


def test_every_field_is_inside_its_space_and_every_value_comes_up():
    cases = draw(GPU, "cuda", 0, 64, (1, 2), flat, 64 * 10)
    assert len(cases) == 64 == len(set(cases))
    for field, values in (("model", GPU.models), ("layers", (1, 2)), ("P", (1, 2)), ("order", GPU.order), ("save", GPU.save), ("prefetch", (1, 2, 3)), ("offload", (True, False))):
        found = cards(cases, field)
        assert set(found) == set(values) and max(found.values()) - min(found.values()) <= 8, field
    assert set(cards(cases, "chunk")) == set(GPU.chunks)
    for case in cases:
        assert 16384 <= case.seq <= 524288 and case.seq % 8192 == 0 and 2 * case.chunk <= case.seq
        assert case.vocab == 8192 and case.shapes.layers == case.layers
        case.strategy.check(case.shapes, case.seq)


def test_groups_differ_in_nothing_but_what_is_compared():
    cases = draw(GPU, "cuda", 0, 30, (1, 2), flat, 30 * 10)
    groups = {number: [case for case in cases if case.group == number] for number in range(8)}
    assert [len(group) for group in groups.values()] == [4] * 7 + [2]
    for group in groups.values():
        assert len({(case.model, case.layers, case.P, case.seq) for case in group}) == 1
        assert len({case.same for case in group}) == len(group)


def test_no_slots_differ_where_nothing_is_reloaded():
    case = Case(0, 0, "gpt-2.7b", 1, 8192, "bf16", 1, 65536, 8192, False, 1, "query-up", "all")
    assert case.same == Case(1, 0, "gpt-2.7b", 1, 8192, "bf16", 1, 65536, 8192, False, 3, "query-up", "all").same


@pytest.mark.parametrize("device", ("cuda", "cpu"))
def test_what_calibration_runs_is_held_out(device):
    assert not set(SPACES[device].chunks) & set(CHUNKS[device])


def test_work_is_log_uniform():
    """One group a stratum: as many S below the middle of the range of logs as above."""
    low, high = (math.log(work("llama3-8b", 1, 8192, S)) for S in GPU.seq)
    space = GPU.__class__(**GPU.__dict__ | {"models": ("llama3-8b",), "layers": (1,)})
    cases = draw(space, "cuda", 1, 80, (1,), flat, 800)
    shares = sorted((math.log(work("llama3-8b", 1, 8192, group)) - low) / (high - low) for group in [c.seq for c in cases[::4]])
    assert all(k / 20 - 0.03 <= share <= (k + 1) / 20 + 0.03 for k, share in enumerate(shares))


def test_tokens_of_a_share_of_work():
    assert [tokens(GPU, "gpt-13b", 2, share) for share in (0, 1)] == [16384, 524288]
    half = tokens(GPU, "gpt-13b", 2, 0.5)
    assert work("gpt-13b", 2, 8192, half) == pytest.approx(math.sqrt(work("gpt-13b", 2, 8192, 16384) * work("gpt-13b", 2, 8192, 524288)), rel=0.1)


def test_what_does_not_fit_is_drawn_again():
    def small(case: Case) -> float | None:
        return None if case.save == "all" or case.seq > 131072 else 10.0

    cases = draw(GPU, "cuda", 0, 40, (1,), small, 400)
    assert len(cases) == 40 and "all" not in cards(cases, "save") and max(case.seq for case in cases) <= 131072
    with pytest.raises(UserError, match="^(gpt-2.7b|llama3-8b|gpt-13b) with . layers on 1 ranks fits at no S from 16384 on"):
        draw(GPU, "cuda", 0, 4, (1,), lambda case: None, 400)


def test_the_budget_brings_the_longest_down():
    def by_work(case: Case) -> float:
        return work(case.model, case.layers, case.vocab, case.seq) / 1e14

    free, tight = (draw(GPU, "cuda", 0, 64, (1, 2), by_work, budget) for budget in (1e9, 600))
    assert sum(map(by_work, free)) > 1000 and 300 < sum(map(by_work, tight)) <= 600
    assert min(case.seq for case in free) == 16384 == min(case.seq for case in tight) and max(case.seq for case in tight) < max(case.seq for case in free)
    with pytest.raises(UserError, match="64 configurations take 11 min at least, the budget is 1; try --budget 11, or fewer by --count"):
        draw(GPU, "cuda", 0, 64, (1, 2), flat, MINUTE)


def test_a_grid_for_an_h200_takes_its_budget_and_its_memory(capsys):
    cases = plan(H200, seed=0, count=12, budget_min=6)
    profiles = {(name, P): Profile(H200, [1.0], [1.0]) for name in GPU.models for P in (1, 2)}
    price = cost(profiles, "cuda")
    assert 200 < sum(price(case) for case in cases) <= 360
    assert "12 configurations in 3 groups" in capsys.readouterr().out
    tight = cost({key: Profile(H200.override(hbm_bytes=8 << 30), [1.0], [1.0]) for key in profiles}, "cuda")
    assert {tight(case) is None for case in cases} == {True, False}


def test_a_configuration_costs_its_steps_loading_the_footprint_and_the_set_up():
    """Loading is for 2 s, or one step where that is longer; memory is pinned at 1.5 GB/s."""
    price = cost({("llama3-8b", 1): Profile(H200, [1.0], [1.0])}, "cuda")
    for seq, offload in ((16384, False), (262144, True)):
        case = Case(0, 0, "llama3-8b", 1, 8192, "bf16", 1, seq, 8192, offload, 2, "query-up", "qkvo")
        timeline = simulate(case.schedule(), case.strategy, H200)
        step_s, host = times(timeline)["step_s"], peak_bytes(timeline, "host")
        assert (step_s > 2) is (host > 1e9) is offload
        assert price(case) == pytest.approx((steps(step_s, "cuda") + 1) * step_s + max(2.0, step_s) + 2.0 + host / 1.5e9)


def test_long_steps_are_repeated_less():
    assert [steps(s, "cuda") for s in (0.01, 0.4, 1.6, 5.0)] == [25, 13, 7, 4]
    assert [steps(s, "cpu") for s in (0.01, 0.4, 9.0)] == [7, 4, 4]


def test_a_deck_deals_all_before_any_comes_again():
    import random

    deck = Deck((1, 2, 3), random.Random(0))
    assert [sorted(deck.take() for _ in range(3)) for _ in range(4)] == [[1, 2, 3]] * 4
    assert {deck.take(lambda value: value > 2) for _ in range(5)} == {3}
