"""fpdt kernels: the whole table, without a GPU and on one that is made up."""
import re
import shlex

import pytest
import torch

from engine.kernels import flash_attn_2, flash_attn_4
from engine.kernels.rates import Rate
from experiments import cli, kernels
from tests.engine.fakes import installed

VERSIONS = {"torch": "2.13.0", "flash-attn-4": "4.0.0b36"}
ON_A_CPU = """\
demo in fp32 on this machine's CPU; a rank has 4 query and 1 KV heads, head_dim 32.

kernel             installed              fwd  bwd  used for  why
torch CPU flash    torch 2.13.0           n/a  n/a  both      the one for CPUs
flash-attn-4       flash-attn-4 4.0.0b36  n/a  n/a  -         needs a GPU of compute capability 9.0 or more
flash-attn-3       no                     n/a  n/a  -         needs a GPU of compute capability 9.0 or more
flash-attn-2       no                     n/a  n/a  -         needs a GPU of compute capability 8.0 or more
cuDNN              torch 2.13.0           n/a  n/a  -         needs a GPU of compute capability 8.0 or more
torch flash (FA2)  torch 2.13.0           n/a  n/a  -         needs a GPU of compute capability 8.0 or more

On a GPU each direction takes the fastest of these, timed there:
GPU               kernels
Ampere (8.0)      none
Ada (8.9)         none
Hopper (9.0)      none
Blackwell (10.0)  none
pip install -e '.[hopper]' brings flash-attn-4, '.[ampere]' flash-attn-2; flash-attn-3 is built from source.
"""
WOULD_USE = """\
GPU               kernels
Ampere (8.0)      flash-attn-2 (not installed), cuDNN, torch flash (FA2)
Ada (8.9)         flash-attn-2 (not installed), cuDNN, torch flash (FA2)
Hopper (9.0)      flash-attn-4, flash-attn-3 (not installed), flash-attn-2 (not installed), cuDNN, torch flash (FA2)
Blackwell (10.0)  flash-attn-4, flash-attn-2 (not installed), cuDNN, torch flash (FA2)
"""
ON_A_GPU = """\
llama3-8b in bf16 on NVIDIA H200, compute capability 9.0; a rank has 16 query and 4 KV heads, head_dim 128.

kernel             installed              fwd  bwd  used for  why
flash-attn-4       flash-attn-4 4.0.0b36  664  615  backward  the fastest
flash-attn-3       no                     n/a  n/a  -         is not installed (No module named 'flash_attn_interface')
flash-attn-2       no                     n/a  n/a  -         fails here (RuntimeError: no kernel image)
cuDNN              torch 2.13.0           687  541  forward   the fastest
torch flash (FA2)  torch 2.13.0           352  308  -         slower

fwd, bwd: TFLOP/s of one chunk, full and causal (2 and 5 products a pair).
"""


@pytest.fixture
def fpdt(capsys, monkeypatch):
    """Runs a command that has to succeed, on a wide screen; returns what it printed."""
    monkeypatch.setenv("COLUMNS", "120")

    def version(package: str) -> str:
        if package not in VERSIONS:
            raise kernels.PackageNotFoundError
        return VERSIONS[package]

    monkeypatch.setattr(kernels, "version", version)

    def run(command: str) -> str:
        with pytest.raises(SystemExit) as stop:
            cli.main(shlex.split(command))
        out, err = capsys.readouterr()
        assert stop.value.code == 0 and err == ""
        return out

    return run


def test_without_a_gpu(fpdt):
    assert fpdt("kernels demo --gpus 2 --dtype fp32") == ON_A_CPU
    assert WOULD_USE in fpdt("kernels")


def test_on_a_gpu(fpdt, monkeypatch):
    asked = []

    def rates(*args):
        asked.append(args)
        found = {"flash-attn-4": Rate(664.4, 614.6), "flash-attn-2": "fails here (RuntimeError: no kernel image)", "cuDNN": Rate(687, 541)}
        return found | {"torch flash (FA2)": Rate(352, 308)}

    for name, value in (("is_available", True), ("get_device_capability", (9, 0)), ("get_device_name", "NVIDIA H200")):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    monkeypatch.setattr(kernels, "rates", rates)
    with installed("flash_attn_4", "flash_attn_2"):
        assert fpdt("kernels --gpus 2") == ON_A_GPU
    (timed, *heads), = asked
    assert timed[:2] == (flash_attn_4, flash_attn_2) and heads == [16, 4, 128]


def test_where_none_can_be_used_each_says_why(fpdt, monkeypatch):
    for name, value in (("is_available", True), ("get_device_capability", (7, 0)), ("get_device_name", "Tesla V100")):
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    said = fpdt("kernels")
    assert len(re.findall("n/a  n/a  -  +needs a GPU of compute capability", said)) == 5 and "TFLOP/s" not in said
