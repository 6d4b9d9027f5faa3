"""Room: what does not fit this machine is refused before anything starts, with what would fit, and that does."""
from __future__ import annotations

import re
import subprocess
import sys

import pytest
import torch

from engine import probe
from experiments.room import check_memory
from sim.build.step import build
from sim.errors import UserError
from sim.model import model
from sim.need import need
from sim.strategy import Strategy

GiB = 1 << 30
LLAMA, STRATEGY, SEQ = model("llama3-8b", layers=2), Strategy(sp=2, chunk=32768), 1 << 18


@pytest.fixture
def has(monkeypatch):
    """has(hbm, host): free bytes of a GPU, and the node's memory."""

    def set_(hbm: int, host: int) -> None:
        monkeypatch.setattr(probe, "hbm_bytes", lambda ranks: hbm)
        monkeypatch.setattr(probe, "memory_bytes", lambda: host)

    return set_


def refused(strategy=STRATEGY, seq=SEQ, device="cuda", m=LLAMA, ranks=None) -> str:
    with pytest.raises(UserError) as caught:
        check_memory(build(m, strategy, seq), strategy, device, ranks)
    return str(caught.value)


def test_hbm_that_does_not_suffice_says_what_would(has):
    has(20 * GiB, 1000 * GiB)
    said = refused()
    shown = re.fullmatch(r"S=262144 needs ([\d.]+) GiB on each GPU for its arena and states, ([\d.]+) GiB more than the 20.00 GiB free on a GPU here; "
                         r"the longest S that fits is about (\d+), the largest chunk for this S about (\d+)", said)
    size = need(build(LLAMA, STRATEGY, SEQ), 3)["hbm"]
    assert (shown[1], shown[2]) == (f"{size / GiB:.2f}", f"{size / GiB - 20:.2f}")
    longest, chunk = int(shown[3]), int(shown[4])
    smaller = STRATEGY.replace(chunk=chunk)
    check_memory(build(LLAMA, STRATEGY, longest), STRATEGY, "cuda")
    check_memory(build(LLAMA, smaller, SEQ), smaller, "cuda")
    refused(seq=longest * 17 // 16)
    refused(STRATEGY.replace(chunk=chunk * 17 // 16 // 2 * 2))


def test_just_enough_is_enough(has):
    found = need(build(LLAMA, STRATEGY, SEQ), 3)
    has(found["hbm"], 2 * found["host"])
    check_memory(build(LLAMA, STRATEGY, SEQ), STRATEGY, "cuda")
    has(found["hbm"] - 1, 2 * found["host"])
    assert " on each GPU for its arena and states, 1 B more than the " in refused()
    has(found["hbm"], 2 * found["host"] - 1)
    assert re.search(r" for the host arenas of 2 ranks, 1 B more than the [\d.]+ GiB of host memory here; the longest S that fits is about 26\d+$", refused())


def test_only_the_ranks_of_this_node_share_its_memory(has):
    found = need(build(LLAMA, STRATEGY, SEQ), 3)
    has(found["hbm"], found["host"])
    check_memory(build(LLAMA, STRATEGY, SEQ), STRATEGY, "cuda", 1)
    has(0, found["hbm"] + found["host"])
    check_memory(build(LLAMA, STRATEGY, SEQ), STRATEGY, "cpu", 1)


def test_states_alone_that_do_not_fit(has):
    has(20 * GiB, 1000 * GiB)
    assert refused(m=model("llama3-70b"), strategy=STRATEGY.replace(zero=0)) == (
        "llama3-70b needs 1051.33 GiB for its states alone, 1031.33 GiB more than the 20.00 GiB free on a GPU here; "
        "take fewer layers (--layers) or a smaller model, or more GPUs with --zero 3")
    has(0, 10 * GiB)
    assert refused(device="cpu") == (
        "llama3-8b needs 22.16 GiB for its states alone, 12.16 GiB more than the 10.00 GiB of memory here; take fewer layers (--layers) or a smaller model")


def test_where_no_sequence_fits(has):
    has(12 * GiB, 1000 * GiB)
    assert refused().endswith("; no S fits, take fewer layers (--layers) or a smaller model, or more GPUs with --zero 3")


def test_free_hbm_is_asked_of_the_gpus_of_this_node(monkeypatch):
    asked = []

    def answer(command, **_):
        asked.append(command)
        return subprocess.CompletedProcess(command, 0, "123\n", "")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(subprocess, "run", answer)
    assert probe.hbm_bytes(2) == 123
    assert asked == [[sys.executable, "-c", "import torch; print(min(torch.cuda.mem_get_info(gpu)[0] for gpu in range(2)))"]]
    with pytest.raises(UserError, match="3 ranks want a GPU each, this node has 2"):
        probe.hbm_bytes(3)
    monkeypatch.setattr(subprocess, "run", lambda command, **_: subprocess.CompletedProcess(command, 1, "", "Traceback\nRuntimeError: no driver\n"))
    with pytest.raises(UserError, match=r"^the GPUs do not answer: RuntimeError: no driver; see nvidia-smi$"):
        probe.hbm_bytes(1)


def test_a_rank_of_torchruns_asks_its_own(monkeypatch):
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "2"), ("MASTER_ADDR", "here"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (100 + gpu, 200))
    assert probe.hbm_bytes(2) == 101
