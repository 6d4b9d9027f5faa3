"""What only GPUs can refuse: too few of them, too little memory on them. One line on stderr, exit code 2."""
from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from sim.build.step import build
from sim.model import model
from sim.strategy import Strategy
from tests.cuda.places import needs_cuda

pytestmark = needs_cuda
ROOT = Path(__file__).parents[2]


def refused(folder: Path, *words: str) -> str:
    """The one line."""
    done = subprocess.run([sys.executable, "-m", "experiments.cli", *words], cwd=folder, env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr
    line, = done.stderr.splitlines()
    return line


@pytest.mark.parametrize("command", (("train",), ("compare", "--dtype", "bf16")), ids=("train", "compare"))
def test_more_ranks_than_gpus(tmp_path, command):
    have = torch.cuda.device_count()
    wanted = 1 << have.bit_length()
    line = refused(tmp_path, command[0], "demo", "--gpus", str(wanted), "--seq", "1K", "--chunk", "256", *command[1:])
    assert line.startswith(f"fpdt: {wanted} ranks want a GPU each, this node has {have}; try --gpus {have}")


def test_an_arena_of_ten_cards(tmp_path):
    needed = build(model("llama3-8b"), Strategy(chunk=1 << 19, offload=False), 1 << 22).arena_bytes("hbm")
    assert needed > 10 * torch.cuda.get_device_properties(0).total_memory
    line = refused(tmp_path, "train", "llama3-8b", "--seq", "4M", "--chunk", "512K", "--no-offload", "--steps", "1")
    assert re.match(r"fpdt: S=4194304 needs [\d.]+ \w+ on each GPU for its arena and states, [\d.]+ \w+ more than the [\d.]+ \w+ free on a GPU here; .*fits", line), line
