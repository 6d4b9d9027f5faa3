"""Bars: arithmetic on hand-made rows, exact; and what a table holds is what was written."""
from __future__ import annotations

from dataclasses import replace

import pytest

from experiments.validate import bars, report, rows
from experiments.validate.bars import Bar, covered, judge, ordered, regrets, reserved, workspace_states
from experiments.validate.rows import Row
from sim.errors import UserError

GIB = 1 << 30


def row(number: int, predicted_s: float, measured_s: float | None, group: int = 0, **fields) -> Row:
    """A row without a flaw but its times."""
    good = dict(
        low_s=0.95 * predicted_s, high_s=1.05 * predicted_s, alone_s=predicted_s / 2, factor_s=predicted_s, p05_s=measured_s, p95_s=measured_s, steps_s=[measured_s] * 2,
        hidden_predicted=0.5, hidden_measured=0.5, planned_hbm_predicted=100, planned_hbm_measured=100, planned_host_predicted=0, planned_host_measured=0,
        workspace_predicted=GIB, workspace_measured=GIB, states_predicted=GIB, states_measured=GIB, reserved_predicted=GIB, reserved_measured=GIB)
    return Row(number, group, predicted_s=predicted_s, measured_s=measured_s, **good | fields)


def bar(found: list[Bar], start: str) -> tuple[float | None, bool | None]:
    one, = [b for b in found if b.name.startswith(start)]
    return one.value, one.holds


def test_step_times():
    """Errors of +1, -2, +3.8 and -10%."""
    found = judge([row(k, p, 1.0) for k, p in enumerate((1.01, 0.98, 1.038, 0.9))])
    assert bar(found, "|error| of step time, median") == (pytest.approx(0.029), True)
    assert bar(found, "|error| of step time, 90th") == (pytest.approx(0.038 + 0.7 * 0.062), False)
    assert bar(found, "|error| of step time, worst") == (pytest.approx(0.1), True)
    assert bar(found, "signed bias") == (pytest.approx(-0.018), True)
    assert bar(judge([row(0, 1.121, 1.0)]), "|error| of step time, worst") == (pytest.approx(0.121), False)
    assert bar(judge([row(0, 0.979, 1.0)]), "signed bias") == (pytest.approx(-0.021), False)


def test_memory():
    good = row(0, 1, 1)
    for change, name, value in (
        ({"planned_hbm_measured": 101}, "planned", 1), ({"planned_host_measured": 1}, "planned", 1),
        ({"states_measured": GIB // 2}, "workspace + states", 1 / 3), ({"reserved_measured": GIB * 5 // 4}, "reserved", -0.2),
    ):
        found = judge([good, replace(good, **change)])
        assert bar(found, name) == (pytest.approx(value), False)
        assert [b.name for b in found if b.holds is False and b.name != "steps inside the predicted 5-95% band"] == [b.name for b in found if b.name.startswith(name)]
    assert workspace_states(replace(good, workspace_measured=GIB * 102 // 100)) == pytest.approx(-0.0099, abs=1e-4)
    assert reserved(replace(good, reserved_measured=None)) is None


def test_pairs_of_a_group():
    """Of group 0, 1.00 and 1.01 s are too close; 1.5 s is told from both. Of group 1, a pair is the wrong way round, and another predicted alike."""
    first = [row(0, 1.1, 1.0), row(1, 1.0, 1.01), row(2, 1.4, 1.5)]
    second = [row(3, 2.0, 3.0, 1), row(4, 2.1, 2.5, 1), row(5, 2.1, 2.0, 1)]
    assert ordered(first) == 1.0 and ordered(second) == 0.0
    assert ordered(first + second) == 2 / 5
    assert ordered(first[:2]) is None and bar(judge(first[:2]), "pairs") == (None, None)
    assert bar(judge(first + second), "pairs") == (0.4, False) and bar(judge(first), "pairs") == (1.0, True)


def test_regret_is_of_the_worst_group():
    found = [row(0, 1.1, 1.0), row(1, 1.0, 1.02), row(2, 2.0, 3.0, 1), row(3, 2.1, 2.5, 1), row(4, 9.0, 1.0, 2)]
    assert regrets(found) == {0: pytest.approx(0.02), 1: pytest.approx(0.2)}
    assert bar(judge(found), "regret") == (pytest.approx(0.2), False) and bar(judge(found[:2]), "regret") == (pytest.approx(0.02), True)


def test_hidden_share_is_worst_with_its_sign_and_rows_without_copies_do_not_count():
    found = [row(0, 1, 1, hidden_predicted=0.52), row(1, 1, 1, hidden_predicted=0.44), row(2, 1, 1, hidden_predicted=None, hidden_measured=None)]
    assert bar(judge(found), "hidden") == (pytest.approx(-0.06), False) and bar(judge(found[:1]), "hidden") == (pytest.approx(0.02), True)
    assert bar(judge(found[2:]), "hidden") == (None, None)


def test_the_band_covers_steps_but_not_all():
    """Every configuration counts the same, however many steps it has."""
    found = [row(0, 1, 1, steps_s=[0.95, 1.0, 1.06, 1.2]), row(1, 1, 1, steps_s=[1.0]), row(2, 1, 1, steps_s=[1.0] * 7)]
    assert covered(found) == pytest.approx((0.5 + 1 + 1) / 3)
    assert bar(judge(found), "steps inside") == (pytest.approx(2.5 / 3), False)
    assert bar(judge(found[1:]), "steps inside") == (1.0, False), "100% is too wide a band"
    assert bar(judge([*found, *(row(k, 1, 1) for k in range(3, 6))]), "steps inside") == (pytest.approx(5.5 / 6), True)
    assert bar(judge(found), "half width") == (pytest.approx(0.05), True)
    assert bar(judge([row(0, 1, 1, low_s=0.9, high_s=1.04)]), "half width") == (pytest.approx(0.07), False)


def test_what_did_not_run_is_judged_as_such_and_nothing_else():
    failed = Row(1, 0, predicted_s=5.0, reason="rank 0 ran out of GPU memory")
    found = judge([row(0, 1, 1), failed])
    assert bar(found, "configurations that did not run") == (1, False) and bar(found, "|error| of step time, worst") == (0.0, True)
    assert not bars.holds(found)
    none = judge([failed])
    assert {b.holds for b in none if not b.name.startswith("configurations")} == {None}


def test_rivals_and_sources():
    found = [row(0, 1.1, 1.0, kinds=[["attn", "compute", 200_000_000, 100_000_000], ["reload", "h2d", 50_000_000, 60_000_000]]),
             row(1, 1.9, 2.0, kinds=[["attn", "compute", 100_000_000, 300_000_000]]), Row(2, 0, reason="why")]
    said = report.rivals(found)
    assert said["the full model"] == {"median": pytest.approx(0.075), "worst": pytest.approx(0.1), "bias": pytest.approx(0.025)}
    assert said["no contention"]["worst"] == pytest.approx(0.95 / 2 - 1)
    assert report.sources(found) == {("reload", "h2d"): pytest.approx(-0.005), ("attn", "compute"): pytest.approx(0.05 - 0.05)}


def test_a_table_holds_what_was_written(tmp_path):
    written = [row(0, 1.25, 1.0, steps_s=[1.0, 0.1 + 0.2], kinds=[["attn", "compute", 3, None]], model="gpt-2.7b", offload=False), Row(1, 0, reason='a "line", with commas')]
    rows.save(tmp_path / "rows.csv", written)
    assert rows.load(tmp_path / "rows.csv", Row) == written
    assert rows.load(tmp_path / "none.csv", Row) == []
    assert (tmp_path / "rows.csv").read_text().splitlines()[0].startswith("number,group,model,layers,P,seq,chunk,offload,prefetch,order,save,profile,predicted_s,alone_s,factor_s,")


@pytest.mark.parametrize("content", ("number,group\n0,zero\n", "number,other\n0,1\n", "number,group\n0,1,2\n"))
def test_a_table_of_another_kind_is_refused(tmp_path, content):
    (tmp_path / "rows.csv").write_text(content)
    with pytest.raises(UserError, match="rows.csv is no table that fpdt validate wrote .*; name another folder with --out"):
        rows.load(tmp_path / "rows.csv", Row)
