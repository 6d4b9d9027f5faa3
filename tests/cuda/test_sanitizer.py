"""Torch's stream sanitizer: a training step has no race, and the same step without its waits has one."""
from __future__ import annotations

import subprocess
import sys

import pytest

from tests.cuda.places import needs_cuda


@needs_cuda
@pytest.mark.parametrize("waits, code", (("waits", 0), ("none", 3)))
def test_races_are_reported_where_waits_are_missing_and_nowhere_else(waits, code):
    done = subprocess.run([sys.executable, "-m", "tests.cuda.sanitized", waits], capture_output=True, text=True, timeout=120)
    assert done.returncode == code, done.stderr[-3000:]
    assert ("possible data race" in done.stderr) == (code == 3)
