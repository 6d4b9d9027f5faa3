"""docs/validate-on-your-node.md: ten commands at most, each with options that its program has; and two nodes calibrated together, on CPU."""
from __future__ import annotations

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from torch.distributed.run import get_args_parser

from experiments.cli import app
from sim.cost import fitted
from sim.machine import load

ROOT = Path(__file__).parents[1]
RUNBOOK = (ROOT / "docs" / "validate-on-your-node.md").read_text()
COMMANDS = [line for block in re.findall(r"```bash\n(.*?)```", RUNBOOK, re.DOTALL) for line in block.splitlines()]
FPDT = typer.main.get_command(app)


def test_at_most_ten_commands():
    assert 0 < len(COMMANDS) <= 10


@pytest.mark.parametrize("line", [part for line in COMMANDS for part in line.split(" && ") if "fpdt " in part])
def test_the_options_exist(line):
    program, *arguments = shlex.split(line.split(" > ")[0])
    if program == "torchrun":
        parsed = get_args_parser().parse_args(arguments)
        assert parsed.no_python and parsed.numa_binding == "node"
        program, *arguments = [parsed.training_script, *parsed.training_script_args]
        if program == "--":  # argparse leaves it in some versions of Python
            program, *arguments = arguments
    assert program == "fpdt"
    name, *rest = arguments
    FPDT.commands[name].make_context(name, rest)  # raises where an option or a value is none


def test_what_is_compared_in_one_line(tmp_path):
    line, = (line for line in COMMANDS if line.startswith("python -c"))
    (tmp_path / "predicted.json").write_text(json.dumps({"step_s": 2.2}))
    (tmp_path / "measured.jsonl").write_text("".join(json.dumps({"step_s": s}) + "\n" for s in (9, 2, 1.9, 2.1)))
    ran = subprocess.run([sys.executable, *shlex.split(line)[1:]], cwd=tmp_path, capture_output=True, text=True)
    assert ran.stdout == "predicted 2.200 s, measured 2.000 s, signed error +10.0%\n"


def test_two_nodes_calibrate_together(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{port}",
               "-m", "experiments.cli", "calibrate", "demo", "--out", "two.json"]
    nodes = [subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for _ in range(2)]
    said = [node.communicate(timeout=300)[0] for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    assert sum(one.count("two.json: use it with --machine two.json") for one in said) == 1
    found = load(tmp_path / "two.json")
    assert found["gpus_per_node"] == 1 and fitted(found.fits["a2a"], 0, 1) > 0
