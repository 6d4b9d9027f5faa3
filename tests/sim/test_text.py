"""The text form: what is printed parses back to the same, golden files pin it, and every mistake has one clear line.

    python tests/sim/test_text.py      # writes the golden files anew, after a change that is meant
"""
from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from test_lint import GQA, MHA
from test_waits import LENGTHS, STRATEGIES

from sim import upstream
from sim.build.step import build
from sim.errors import UserError
from sim.lint import LintError, lint
from sim.strategy import Strategy
from sim.text import digest, parse, show

GOLDEN = Path(__file__).parents[1] / "golden"
SCHEDULES = {
    "schedule_P1_resident.txt": lambda: build(MHA, Strategy(chunk=32, offload=False), 70, "fp32"),
    "schedule_P1_partly_resident.txt": lambda: build(MHA, Strategy(chunk=32, resident=0.5), 70, "fp32"),
    "schedule_P2_hidden_host.txt": lambda: build(GQA, Strategy(sp=2, chunk=32, hidden="host", accum="host", save="o", order="query-down"), 70),
    "schedule_P2_upstream.txt": lambda: build(GQA, Strategy(sp=2, chunk=32, **upstream.FIELDS), 64),
    "schedule_P2_gqa_slots2.txt": lambda: build(GQA, Strategy(sp=2, chunk=32, prefetch=2), 90),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_golden_schedule(name):
    assert show(SCHEDULES[name]()) == (GOLDEN / name).read_text()


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_file_is_linted_as_it_stands(name):
    """Nothing is derived again: a parsed file prints as it was, and lint leaves it so."""
    text = (GOLDEN / name).read_text()
    schedule = parse(text)
    lint(schedule)
    assert show(schedule) == text


@given(STRATEGIES, LENGTHS)
@settings(max_examples=40, deadline=None)
def test_parse_is_the_inverse_of_show(strategy, seq):
    schedule = build(GQA, strategy, seq)
    assert parse(show(schedule)) == schedule
    assert digest(parse(show(schedule))) == digest(schedule)


def test_comments_and_blank_lines_are_free():
    text = show(SCHEDULES["schedule_P1_resident.txt"]())
    assert parse("# mine\n\n" + text.replace("\n", "   # note\n")) == parse(text)


def swap(text: str, old: str, new: str) -> str:
    assert old in text, old
    return text.replace(old, new, 1)


def line(text: str, start: str) -> str:
    return next(row for row in text.splitlines() if " ".join(row.split()).startswith(start))


EDITS = {
    "unknown op": lambda t: swap(t, "fwd.reload.kv[1,0]", "fwd.relaod.kv[1,0]"),
    "wait on a later op": lambda t: swap(t, "wait fwd.a2a.qkv[0]", "wait fwd.a2a.qkv[1]"),
    "wait on no op": lambda t: swap(t, "wait fwd.a2a.qkv[0]", "wait fwd.a2a.qkv[7]"),
    "wait on no earlier region": lambda t: swap(t, "wait fwd.a2a.qkv[0]", "wait prev:head:fwd.a2a.qkv[0]"),
    "missing wait": lambda t: swap(t, "wait fwd.reload.kv[1,0]", ""),
    "missing wait on the region before": lambda t: swap(t, " prev:loss:loss.ce[2]", ""),
    "reload dropped": lambda t: swap(t, line(t, "h2d fwd.reload.kv[1,0]"), "").replace("wait fwd.reload.kv[1,0]", ""),
    "wrong chunk reloaded": lambda t: swap(t, "kv[1]@host -> slot.0", "kv[0]@host -> slot.0"),
    "unknown stream": lambda t: swap(t, "h2d      fwd.reload.kv[1,0]", "pcie     fwd.reload.kv[1,0]"),
    "wrong stream": lambda t: swap(t, "h2d      fwd.reload.kv[1,0]", "d2h      fwd.reload.kv[1,0]"),
    "unknown buffer": lambda t: swap(t, "kv[0]@host -> slot.0", "kv[0]@host -> slot.9"),
    "wrong space": lambda t: swap(t, "kv[0]@host -> slot.0", "kv.0 -> slot.0"),
    "id twice": lambda t: swap(t, "fwd.a2a.qkv[1]", "fwd.a2a.qkv[0]"),
    "no arrow": lambda t: swap(t, "kv[0]@host -> slot.0", "kv[0]@host    slot.0"),
    "missing argument": lambda t: swap(t, line(t, "comm fwd.a2a.qkv[0]"), line(t, "comm fwd.a2a.qkv[0]").replace("n=32", "")),
    "unknown argument": lambda t: swap(t, "n=32 at=0", "n=32 at=0 of=3"),
    "wrong length": lambda t: swap(t, line(t, "comm fwd.a2a.qkv[0]"), line(t, "comm fwd.a2a.qkv[0]").replace("n=32", "n=30")),
    "one of two received": lambda t: swap(t, "q'.0 kv'.0 -> q.0 kv.0" if "q'.0 kv'.0 -> q.0 kv.0" in t else "q' kv' -> q.0 kv.0", "q' kv' -> q.0"),
    "another region's op": lambda t: swap(t, "fwd.proj[0]", "bwd.proj[0]"),
    "unknown region": lambda t: swap(t, "region   bwd", "region   bwt"),
    "order": lambda t: swap(t, "fwd*2", "fwd*3"),
    "header": lambda t: swap(t, "S=90", "S=ninety"),
    "header word": lambda t: "model2 x=1\n" + t,
    "no header": lambda t: "\n".join(row for row in t.splitlines() if not row.startswith("schedule ")),
    "model": lambda t: swap(t, "layers=2", "layers=0"),
    "model dropout": lambda t: swap(t, "norm_eps=1e-05", "norm_eps=1e-05 dropout=0.1"),
    "schedule twice": lambda t: swap(t, line(t, "schedule"), line(t, "schedule") + "\n" + line(t, "schedule")),
    "model twice": lambda t: swap(t, line(t, "model"), line(t, "model") + "\n" + line(t, "model")),
    "order twice": lambda t: swap(t, line(t, "order"), line(t, "order") + "\n" + line(t, "order")),
    "require twice": lambda t: swap(t, line(t, "require loss"), line(t, "require loss") + "\nrequire  loss dx"),
    "arena twice": lambda t: swap(t, line(t, "arena hbm"), line(t, "arena hbm") + "\narena    hbm stride=0 shared=0"),
    "heads": lambda t: swap(t, "P=2", "P=3"),
    "buffer": lambda t: swap(t, "hbm    slot", "vram   slot") if "hbm    slot" in t else swap(t, "hbm  slot", "vram slot"),
    "buffer twice": lambda t: swap(t, line(t, "buffer fwd q'"), line(t, "buffer fwd q'") + "\n" + line(t, "buffer fwd q'")),
    "offset": lambda t: swap(t, line(t, "buffer fwd q'"), line(t, "buffer fwd q'").rpartition("@")[0] + "@1000"),
    "past the arena": lambda t: swap(t, line(t, "buffer fwd q'"), line(t, "buffer fwd q'").rpartition("@")[0] + "@2560000"),
    "on its neighbour": lambda t: swap(t, line(t, "buffer fwd q'"), line(t, "buffer fwd q'").rpartition("@")[0] + line(t, "buffer fwd q.0").rpartition("@")[2].join(("@", ""))),
}


def said(edit: str) -> str:
    try:
        lint(parse(EDITS[edit](show(SCHEDULES["schedule_P2_gqa_slots2.txt"]())), "s.txt"))
    except UserError as error:
        return f"{edit}: {error}"
    return f"{edit}: nothing"


@pytest.mark.parametrize("edit", EDITS)
def test_golden_error_line(edit):
    told = dict(row.split(": ", 1) for row in (GOLDEN / "schedule_errors.txt").read_text().splitlines())
    assert said(edit) == f"{edit}: {told[edit]}"


def test_golden_drawing():
    with pytest.raises(LintError) as caught:
        lint(parse(EDITS["missing wait"](show(SCHEDULES["schedule_P2_gqa_slots2.txt"]()))))
    assert caught.value.drawing + "\n" == (GOLDEN / "lint_drawing.txt").read_text()


if __name__ == "__main__":
    for name, make in SCHEDULES.items():
        (GOLDEN / name).write_text(show(make()))
    (GOLDEN / "schedule_errors.txt").write_text("".join(said(edit) + "\n" for edit in EDITS))
    try:
        lint(parse(EDITS["missing wait"](show(SCHEDULES["schedule_P2_gqa_slots2.txt"]()))))
    except LintError as error:
        (GOLDEN / "lint_drawing.txt").write_text(error.drawing + "\n")
