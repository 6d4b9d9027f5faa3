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
