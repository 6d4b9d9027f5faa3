"""What a schedule file cannot talk the lint out of: outputs stay outside the arena, every output is owed, roles have the shapes they hold."""
from __future__ import annotations

import re

import pytest

from sim import text
from sim.build.step import build
from sim.errors import UserError
from sim.lint import lint
from sim.model import Model
from sim.strategy import Strategy

MODEL = Model("tiny", "llama", 1, 64, 4, 2, 16, 96, 50)


@pytest.fixture
def written() -> str:
    return text.show(build(MODEL, Strategy(sp=1, chunk=32), 128, "fp32"))


def refused(edited: str, said: str) -> None:
    with pytest.raises(UserError, match=said):
        lint(text.parse(edited))


@pytest.mark.parametrize("region, name", (("fwd", "y[0]"), ("bwd", "dx[3]")))
def test_an_output_in_the_arena_is_refused(written, region, name):
    line = next(s for s in written.splitlines() if re.match(rf"buffer\s+{region}\s+{re.escape(name)}\s", s))
    moved = line.replace("argument", "value").rsplit("-", 1)[0] + "@0"
    refused(written.replace(line, moved), "life value; inputs, outputs, weights and gradients are arguments")


def test_what_a_region_owes_cannot_be_waived(written):
    refused(re.sub(r"require  bwd.*\n", "", written), "region bwd must owe all")
    refused(written.replace(" dWd", "", 1), "must owe all")


def test_a_buffer_of_another_role_is_refused(written):
    line = next(s for s in written.splitlines() if re.match(r"buffer\s+fwd\s+q\.0\s", s))
    refused(written.replace(line, re.sub(r"slot\s+q ", "slot lse ", line)), "a buffer of role lse; give it role q")


def test_an_arena_line_is_needed_for_each_space(written):
    refused(re.sub(r"arena    host.*\n", "", written), "the arena of host")
    refused(re.sub(r"(arena    hbm stride=)\d+", r"\g<1>-256", written), "the arena of hbm")


@pytest.mark.parametrize("op, old, new", (
    ("bwd.kv_bwd[0]", " x.0 ", " x.0 x.0 "), ("bwd.q_bwd[0]", " dq ", " dq dq "), ("bwd.proj_bwd[0]", " o.0 ", " o.0 o.0 "), ("loss.ce[0]", " label[0] ", " label[0] label[0] "),
    ("bwd.kv_bwd[1]", " x.1 ", " "), ("bwd.q_bwd[1]", " x.1 ", " "), ("bwd.proj_bwd[1]", " o.1 ", " "), ("bwd.ffn_bwd[1]", " dy[1] ", " "), ("loss.ce[1]", " label[1] ", " "),
))
def test_an_operand_too_many_or_too_few_is_refused(written, op, old, new):
    """Sums may be absent, so that their number made up for it: the proof held, or broke off, and the engine did not run."""
    line = next(s for s in written.splitlines() if s.split()[1:2] == [op])
    assert old in line
    refused(written.replace(line, line.replace(old, new, 1)), "buffers before its weights")


def test_what_is_handed_over_has_its_shape(written):
    """A larger one was taken for room to spare, and counted as memory."""
    line = next(s for s in written.splitlines() if re.match(r"buffer\s+bwd\s+dWq\s", s))
    refused(written.replace(line, line.replace("64x64", "640x64")), "dWq of bwd is 640x64, but what is handed over there is 64x64")
