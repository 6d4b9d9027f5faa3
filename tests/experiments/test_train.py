"""fpdt train: cut anywhere, a training goes on to the same losses; two nodes of one rank give those of one node of two."""
from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from engine import worker
from engine.training import Log
from sim.errors import UserError
from sim.files import claimed

TRAIN = ["train", "demo", "--layers", "1", "--seq", "256", "--chunk", "64", "--set", "loss_sub=4", "--clip", "1.0", "--every", "2"]
FPDT = [sys.executable, "-m", "experiments.cli"]
ENV = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}


def begin(*options, starter=FPDT, stdout=subprocess.DEVNULL) -> subprocess.Popen:
    return subprocess.Popen([*starter, *TRAIN, *map(str, options)], env=ENV, stdout=stdout, stderr=subprocess.PIPE, text=True)


def end(process: subprocess.Popen, code: int = 0) -> str:
    """Its stderr, once it has ended with this code."""
    try:
        errors = process.communicate(timeout=180)[1]
    finally:
        process.kill()
    assert process.returncode == code, errors
    return errors


def log(folder: Path) -> list[tuple[int, float, float]]:
    """(step, loss, gradient norm) of each line."""
    lines = (folder / "steps.jsonl").read_text().splitlines() if (folder / "steps.jsonl").exists() else []
    return [(d["step"], d["loss"], d["grad_norm"]) for d in map(json.loads, lines)]


def wait_for(steps: int, folder: Path) -> None:
    until = time.monotonic() + 120
    while len(log(folder)) < steps:
        assert time.monotonic() < until
        time.sleep(0.02)


def ranks_of(process: subprocess.Popen, program: bytes = b"engine.serve") -> list[int]:
    """Process ids of its worker ranks, by rank."""
    found = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command, environment = (entry / "cmdline").read_bytes(), (entry / "environ").read_bytes().split(b"\0")
                parents = (int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1]),)
                parents += (int(Path(f"/proc/{parents[0]}/stat").read_text().rsplit(")", 1)[1].split()[1]),)
            except OSError:
                continue
            if program in command and process.pid in parents:
                rank = next((int(v[5:]) for v in environment if v.startswith(b"RANK=")), None)
                if rank is not None:
                    found[rank] = int(entry.name)
    return [found[rank] for rank in sorted(found)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The folder of a training of 8 steps on two ranks that nothing cut, by ZeRO stage; said.txt beside it has its stdout."""
    folders: dict[int, Path] = {}

    def of(zero: int = 3) -> Path:
        if zero not in folders:
            folder = tmp_path_factory.mktemp(f"zero{zero}")
            with open(folder / "said.txt", "w") as said:
                end(begin("--gpus", 2, "--zero", zero, "--steps", 8, "--checkpoint", folder / "run", stdout=said))
            folders[zero] = folder / "run"
        return folders[zero]

    return of


@pytest.fixture
def refused(capsys):
    """What a command line says that is refused, or done, before anything starts."""
    from experiments import cli

    def said(*options, code: int = 2) -> str:
        with pytest.raises(SystemExit) as stop:
            cli.main([*TRAIN, *map(str, options)])
        assert stop.value.code == code
        out, err = capsys.readouterr()
        return err if code else out

    return said


@pytest.mark.parametrize("zero", (0, 3))
def test_a_killed_rank_ends_the_others_and_resume_goes_on_to_the_same_losses(zero, whole, tmp_path):
    options = ("--gpus", 2, "--zero", zero, "--steps", 8)
    process = begin(*options, "--checkpoint", tmp_path / "cut")
    wait_for(4, tmp_path / "cut")
    os.kill(ranks_of(process)[1], signal.SIGKILL)
    start = time.monotonic()
    assert end(process, 1) == "fpdt: rank 1 was killed by SIGKILL\n"
    assert time.monotonic() - start < 60
    end(begin(*options, "--checkpoint", tmp_path / "cut", "--resume"))
    assert log(tmp_path / "cut") == log(whole(zero)) and len(log(tmp_path / "cut")) == 8


@pytest.mark.parametrize("how", (signal.SIGINT, signal.SIGTERM))
def test_an_interrupt_ends_it_with_a_line_and_nothing_half_written(how, tmp_path):
    process = begin("--gpus", 2, "--steps", 200, "--checkpoint", tmp_path)
    wait_for(3, tmp_path)
    process.send_signal(how)
    assert end(process, 130) == "fpdt: stopped\n"
    assert not list(tmp_path.glob("*.part")) and list(tmp_path.glob("step-*"))


def nodes(*options) -> list[subprocess.Popen]:
    """Two nodes of one rank, each under a torchrun of its own."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}"]
    return [begin(*options, starter=[*torchrun, "--node-rank", str(node), "-m", "experiments.cli"]) for node in range(2)]


def test_two_nodes_of_one_rank_train_as_one_node_of_two(whole, tmp_path):
    for node in nodes("--steps", 3, "--checkpoint", tmp_path / "two"):
        end(node)
    assert log(tmp_path / "two") == log(whole())[:3]


def test_of_two_nodes_the_one_that_is_left_ends_with_a_line_and_resume_goes_on(whole, tmp_path):
    both = nodes("--steps", 6, "--checkpoint", tmp_path / "cut")
    wait_for(3, tmp_path / "cut")
    victim, = ranks_of(both[1], b"experiments.cli")
    start = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    line, = (line for line in end(both[0], 1).splitlines() if line.startswith("fpdt: "))
    assert time.monotonic() - start < 60 and re.match(r"fpdt: rank [01] (lost another rank: |was told to stop, as another rank had ended$)", line)
    assert "fpdt: " not in end(both[1], 1)
    for node in nodes("--steps", 6, "--checkpoint", tmp_path / "cut", "--resume"):
        end(node)
    assert log(tmp_path / "cut") == log(whole())[:6] and len(log(tmp_path / "cut")) == 6


def test_an_environment_that_is_no_ranks_is_one_line(monkeypatch):
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "two"), ("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1")):
        monkeypatch.setitem(ENV, name, value)
    assert end(begin("--steps", 1), 2) == (
        "fpdt: the environment says RANK=0 WORLD_SIZE=two LOCAL_RANK=0 LOCAL_WORLD_SIZE=1, which is no rank's; start with torchrun, which sets them all, or unset RANK\n")


def test_more_ranks_than_gpus_is_one_line(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match="2 ranks want a GPU each, this node has 1"):
        worker.check_gpus(2)


def test_a_finished_training_says_so_and_its_lines_went_to_the_pipe(whole, refused):
    lines = [json.loads(line) for line in (whole().parent / "said.txt").read_text().splitlines() if line.startswith("{")]
    assert [(line["step"], line["loss"], line["grad_norm"]) for line in lines] == log(whole())
    for steps in (8, 5):
        assert refused("--steps", steps, "--checkpoint", whole(), "--resume", code=0) == f"{whole()} is at step 8 already; for more steps than {steps} give --steps\n"


def test_a_folder_that_cannot_be_used_is_refused_before_anything_starts(whole, refused, tmp_path):
    mine = tmp_path / "run"
    assert refused("--checkpoint", mine, "--resume") == f"fpdt: {mine} holds no checkpoint to resume from; start without --resume\n"
    assert not mine.exists()
    with claimed(mine):
        assert refused("--checkpoint", mine) == f"fpdt: {mine} is being written to by another run; name another folder, or wait\n"
    assert refused("--checkpoint", whole()) == f"fpdt: {whole()} holds a checkpoint of step 8 already; continue it with --resume, or name another folder\n"
    newest = whole() / "step-8"
    assert refused("--checkpoint", whole(), "--resume", "--seq", 128) == (
        f"fpdt: {newest} is a checkpoint of another training: S=256, not 128; resume what it is of, or name another folder\n")
    (mine / "step-4").mkdir()
    (mine / "step-4" / "of.json").write_text("[")
    assert refused("--checkpoint", mine, "--resume").startswith(f"fpdt: {mine / 'step-4'} is damaged (JSONDecodeError: ")


def test_a_log_that_is_none_is_named(tmp_path):
    for text in ("{\n", '{"loss": 1}\n', "3\n"):
        (tmp_path / "steps.jsonl").write_text(text)
        with pytest.raises(UserError, match="steps.jsonl is no log of a training"):
            Log(str(tmp_path / "steps.jsonl"), 1)
    with pytest.raises(UserError, match="cannot be written"):
        Log("/proc/self/status", 0)
