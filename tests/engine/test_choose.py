"""The kernels that a device can use, the one that is taken for each direction, and what is said where there is none."""
from __future__ import annotations

import pytest
import torch

from engine import worker
from engine.backend import cuda
from engine.kernels import choose as chooser
from engine.kernels import cpu_flash, cudnn, flash_attn_2, flash_attn_3, flash_attn_4, torch_flash
from engine.kernels.choose import Pair, choose, fastest, usable
from engine.kernels.rates import Rate
from sim import text
from sim.errors import UserError
from tests.engine.cases import schedule, tiny
from tests.engine.fakes import FAKES, installed

OLD, OLDER = "needs a GPU of compute capability 8.0 or more", "needs a GPU of compute capability 9.0 or more"


@pytest.mark.parametrize("head_dim, capability, kernels", (
    (128, (8, 0), (cudnn, torch_flash)), (64, (9, 0), (cudnn, torch_flash)), (8, (12, 0), (cudnn, torch_flash)), (136, (8, 6), (torch_flash,)),
    (192, (10, 0), (torch_flash,)),
))
def test_without_packages_of_their_own(head_dim, capability, kernels):
    assert tuple(usable(tiny(head_dim=head_dim), "bf16", capability)) == kernels


@pytest.mark.parametrize("head_dim, capability, kernels", (
    (128, (8, 0), (flash_attn_2, cudnn, torch_flash)), (128, (9, 0), (flash_attn_4, flash_attn_3, flash_attn_2, cudnn, torch_flash)),
    (80, (10, 0), (flash_attn_4, flash_attn_2, cudnn, torch_flash)), (256, (9, 0), (flash_attn_3, flash_attn_2)),
    (64, (9, 0), (flash_attn_4, flash_attn_3, flash_attn_2, cudnn, torch_flash)), (80, (9, 0), (flash_attn_3, flash_attn_2, cudnn, torch_flash)),
    (192, (10, 0), (flash_attn_2, torch_flash)), (128, (12, 0), (flash_attn_4, flash_attn_2, cudnn, torch_flash)),
))
def test_with_all_packages(head_dim, capability, kernels):
    with installed(*FAKES):
        assert tuple(usable(tiny(head_dim=head_dim), "bf16", capability)) == kernels


def test_cudnn_is_not_trusted_with_tensors_past_2_31_elements():
    assert usable(tiny(head_dim=128), "bf16", (9, 0), 2**31 - 1) == [cudnn, torch_flash]
    assert usable(tiny(head_dim=128), "bf16", (9, 0), 2**31) == [torch_flash]


@pytest.mark.parametrize("dtype", ("fp32", "bf16"))
def test_on_a_cpu(dtype):
    with installed(*FAKES):
        assert usable(tiny(head_dim=6), dtype, None) == [cpu_flash]


def each(old: str, two: str, four: str | None = None, of_torch: str | None = None, cudnn: str | None = None, three: str | None = None) -> str:
    """The list of reasons."""
    reasons = {"flash-attn-4": four or old, "flash-attn-3": three or four or old, "flash-attn-2": two, "cuDNN": cudnn or old, "torch flash (FA2)": of_torch or old}
    return "; ".join(f"{name} {reason}" for name, reason in reasons.items())


def most(head_dim: int, given: int) -> str:
    return f"takes a head_dim that is a multiple of 8 and at most {head_dim}, not {given}"


NO_FP32 = "takes no fp32; use --dtype bf16"


@pytest.mark.parametrize("head_dim, dtype, capability, said", (
    (16, "bf16", (7, 5), each(OLD, OLD, OLDER)), (16, "fp32", (9, 0), each(NO_FP32, NO_FP32)),
    (20, "bf16", (8, 0), each(most(128, 20), most(256, 20), OLDER, most(192, 20))),
    (264, "bf16", (9, 0), each(most(256, 264), most(256, 264), four=most(128, 264), three=most(256, 264), of_torch=most(192, 264), cudnn=most(128, 264))),
))
def test_where_there_is_none_each_says_why(head_dim, dtype, capability, said):
    with pytest.raises(UserError) as caught:
        usable(tiny(head_dim=head_dim), dtype, capability)
    assert str(caught.value) == f"no attention kernel runs tiny in {dtype} on a GPU of compute capability {capability[0]}.{capability[1]}: {said}"


def test_what_is_not_installed_or_does_not_load_is_said(monkeypatch):
    monkeypatch.setattr(chooser, "CUDA", ("flash_attn_4", "flash_attn_2"))
    load = chooser.import_module

    def broken(name):
        if name == flash_attn_2.MODULE:
            raise OSError("undefined symbol: x\nand more")
        return load(name)

    monkeypatch.setattr(chooser, "import_module", broken)
    with pytest.raises(UserError) as caught:
        usable(tiny(head_dim=64), "bf16", (9, 0))
    assert str(caught.value).endswith(
        "9.0: flash-attn-4 is not installed (No module named 'flash_attn'); flash-attn-2 does not load (OSError: undefined symbol: x)")


@pytest.mark.parametrize("rates, names", (
    ({"a": Rate(600, 500), "b": Rate(700, 450)}, ("b", "a")), ({"a": Rate(600, 500), "b": Rate(700, 600)}, ("b", "b")),
    ({"a": Rate(600, 500), "b": Rate(611, 509)}, ("a", "a")), ({"a": Rate(600, 500), "b": Rate(611, 509), "c": Rate(620, 511)}, ("c", "c")),
    ({"a": "fails here (so)", "b": Rate(1, 1)}, ("b", "b")),
))
def test_each_direction_takes_its_fastest_and_the_first_of_about_equals(rates, names):
    assert fastest(rates) == names


def test_where_all_fail_each_says_why():
    with pytest.raises(UserError, match=r"no attention kernel runs: a fails here \(so\); b fails here \(too\)"):
        fastest({"a": "fails here (so)", "b": "fails here (too)"})


def test_two_kernels_are_one(monkeypatch):
    monkeypatch.setattr(chooser, "rates", lambda kernels, *heads: {"cuDNN": Rate(600, 500), "torch flash (FA2)": Rate(300, 600)})
    assert choose([cudnn, torch_flash], tiny(), 1) == Pair("cuDNN forward, torch flash (FA2) backward", cudnn.forward, torch_flash.backward)


def test_the_only_one_is_not_timed(monkeypatch):
    monkeypatch.setattr(chooser, "rates", None)
    assert choose([torch_flash], tiny(), 1) is torch_flash


def test_a_ranks_own_heads_are_timed(monkeypatch):
    asked = []
    monkeypatch.setattr(chooser, "rates", lambda *args: asked.append(args) or {"cuDNN": Rate(1, 1), "torch flash (FA2)": Rate(1, 1)})
    assert choose([cudnn, torch_flash], tiny(8, 2, 64), 4) is cudnn
    assert asked == [((cudnn, torch_flash), 2, 1, 64)]


def chosen_by(rank: int, group) -> tuple[str, list]:
    """What a rank takes that times kernels its own way, and has one that rank 0 has not; and what it timed."""
    timed = []

    def rates(kernels, *heads):
        timed.append([kernel.NAME for kernel in kernels])
        return {kernel.NAME: Rate(100 + 100 * k * (-1) ** rank, 100) for k, kernel in enumerate(kernels)}

    before, chooser.rates = chooser.rates, rates
    try:
        return choose([*[flash_attn_4] * rank, cudnn, torch_flash], tiny(), 2, group).NAME, timed
    finally:
        chooser.rates = before


def test_ranks_take_what_rank_0_found_of_what_all_have(ranks):
    name = "torch flash (FA2) forward, cuDNN backward"
    assert ranks(2).run(chosen_by) == [(name, [["cuDNN", "torch flash (FA2)"]]), (name, [])]


def none_in_common(rank: int, group) -> str:
    try:
        return choose([(cudnn, torch_flash)[rank]], tiny(), 2, group).NAME
    except UserError as error:
        return str(error)


def test_ranks_that_have_none_in_common_all_say_so(ranks):
    assert ranks(2).run(none_in_common) == ["no attention kernel runs on the GPUs of all ranks; give all of them the same packages (see fpdt kernels)"] * 2


def test_a_rank_asks_its_own_gpu(monkeypatch):
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "2"), ("MASTER_ADDR", "here"), ("MASTER_PORT", "1")):
        monkeypatch.setenv(name, value)
    set_to = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", set_to.append)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: ((9, 0), (7, 0))[gpu])
    monkeypatch.setattr(cuda, "CudaBackend", lambda gpu, pin: f"GPU {gpu}")
    monkeypatch.setattr(chooser, "rates", lambda kernels, *heads: {kernel.NAME: Rate(k, k) for k, kernel in enumerate(kernels, 1)})
    s = schedule(tiny(), 64, 32, P=2, dtype="bf16")
    job = worker.Job(text.show(s), device="cuda")
    with pytest.raises(UserError, match="on a GPU of compute capability 7.0"):
        worker.backend(job, s, 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda gpu: (9, 0))
    assert worker.backend(job, s, 1) == ("GPU 1", torch_flash) and set_to == [1]
