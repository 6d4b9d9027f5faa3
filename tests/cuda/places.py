"""Places and sizes: which device and kernels these tests run on, and the small model that most of them take."""
from __future__ import annotations

import os
from contextlib import contextmanager
from importlib import import_module

import pytest
import torch

from engine.kernels.choose import refusal
from sim.model import Model
from tests.engine.cases import CPU, Place, tiny

DEVICE = os.environ.get("CUDA_TESTS_DEVICE", "cuda")
MODEL = tiny(4, 2, 64, layers=2)


def refused(name: str, model: Model = MODEL) -> str | None:
    """Why an adapter cannot be used for a model on this GPU, or None."""
    if not torch.cuda.is_available():
        return None
    return refusal(import_module(f"engine.kernels.{name}"), model, "bf16", torch.cuda.get_device_capability())


CUDNN, FLASH = (Place("cuda", "cudnn"), Place("cuda", "torch_flash")) if DEVICE == "cuda" else (CPU, CPU)
OWN = ("flash_attn_4", "flash_attn_3", "flash_attn_2")
"""Kernels with a package of their own."""
KERNELS = {"cudnn": CUDNN, "torch_flash": FLASH} | {name: Place("cuda", name) for name in OWN if torch.cuda.is_available() and not refused(name)}
EACH = [pytest.param(name, marks=pytest.mark.skipif(name not in KERNELS, reason="not installed, or not for this GPU")) for name in ("cudnn", "torch_flash", *OWN)]
every_kernel = pytest.mark.parametrize("kernel", EACH)
one_and_two_ranks = pytest.mark.parametrize("P", (1, 2), ids="P{}".format)
needs_cuda = pytest.mark.skipif(DEVICE != "cuda", reason="asks CUDA itself, so there is no rehearsal")

SEQ, CHUNK = 272, 56
"""Five chunks, the last one short; multiples of 8."""


@contextmanager
def deterministic():
    """Kernels whose bits repeat. Flash attention's backward has a slower way to sum; cuDNN's has none."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
