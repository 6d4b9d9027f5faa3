"""The kernel that is taken for a device, and what is said where there is none."""
from __future__ import annotations

import pytest
import torch

from engine import worker
from engine.backend import cuda
from engine.kernels import choose as chooser
from engine.kernels import cpu_flash, cudnn, torch_flash
from engine.kernels.choose import choose
from sim import text
from sim.errors import UserError
from tests.engine.cases import schedule, tiny

OLD = "needs a GPU of compute capability 8.0 or more"


@pytest.mark.parametrize("head_dim, capability, kernel", (
    (128, (8, 0), cudnn), (64, (9, 0), cudnn), (8, (12, 0), cudnn), (136, (8, 6), torch_flash), (192, (10, 0), torch_flash),
))
def test_the_first_that_takes_it(head_dim, capability, kernel):
    assert choose(tiny(head_dim=head_dim), "bf16", capability) is kernel


def test_cudnn_is_not_trusted_with_tensors_past_2_31_elements():
    assert choose(tiny(head_dim=128), "bf16", (9, 0), 2**31 - 1) is cudnn
    assert choose(tiny(head_dim=128), "bf16", (9, 0), 2**31) is torch_flash


@pytest.mark.parametrize("dtype", ("fp32", "bf16"))
def test_on_a_cpu(dtype):
    assert choose(tiny(head_dim=6), dtype, None) is cpu_flash


@pytest.mark.parametrize("head_dim, dtype, capability, said", (
    (16, "bf16", (7, 5), f"bf16 on a GPU of compute capability 7.5: cuDNN {OLD}; torch flash (FA2) {OLD}"),
    (16, "fp32", (9, 0), "fp32 on a GPU of compute capability 9.0: cuDNN takes no fp32; use --dtype bf16; torch flash (FA2) takes no fp32; use --dtype bf16"),
    (20, "bf16", (8, 0), "bf16 on a GPU of compute capability 8.0: cuDNN takes a head_dim that is a multiple of 8 and at most 128, not 20; "
                         "torch flash (FA2) takes a head_dim that is a multiple of 8 and at most 192, not 20"),
    (200, "bf16", (9, 0), "bf16 on a GPU of compute capability 9.0: cuDNN takes a head_dim that is a multiple of 8 and at most 128, not 200; "
                          "torch flash (FA2) takes a head_dim that is a multiple of 8 and at most 192, not 200"),
))
def test_where_there_is_none_each_says_why(head_dim, dtype, capability, said):
    with pytest.raises(UserError) as caught:
        choose(tiny(head_dim=head_dim), dtype, capability)
    assert str(caught.value) == f"no attention kernel runs tiny in {dtype} on {said.split(' on ', 1)[1]}"


def test_one_that_is_not_installed_is_passed_over(monkeypatch):
    monkeypatch.setattr(chooser, "CUDA", ("flash_attn_9", "cudnn"))
    assert choose(tiny(), "bf16", (9, 0)) is cudnn
    with pytest.raises(UserError, match=r"7\.0: flash_attn_9 is not installed \(No module named 'engine.kernels.flash_attn_9'\); cuDNN needs a GPU"):
        choose(tiny(), "bf16", (7, 0))


def test_a_rank_asks_its_own_gpu(monkeypatch):
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "2"), ("MASTER_ADDR", "here"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: ((9, 0), (7, 0))[gpu])
    monkeypatch.setattr(cuda, "CudaBackend", lambda gpu, pin: f"GPU {gpu}")
    s = schedule(tiny(), 64, 32, P=2, dtype="bf16")
    job = worker.Job(text.show(s), device="cuda")
    with pytest.raises(UserError, match="on a GPU of compute capability 7.0"):
        worker.backend(job, s, 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: (9, 0))
    assert worker.backend(job, s, 1) == ("GPU 1", cudnn)
