"""Places and sizes: which device and kernels these tests run on, and the small model that most of them take."""
from __future__ import annotations

import os
from contextlib import contextmanager

import pytest
import torch

from tests.engine.cases import CPU, Place, tiny

DEVICE = os.environ.get("CUDA_TESTS_DEVICE", "cuda")
CUDNN, FLASH = (Place("cuda", "cudnn"), Place("cuda", "torch_flash")) if DEVICE == "cuda" else (CPU, CPU)
KERNELS = {"cudnn": CUDNN, "torch_flash": FLASH}
one_and_two_ranks = pytest.mark.parametrize("P", (1, 2), ids="P{}".format)
needs_cuda = pytest.mark.skipif(DEVICE != "cuda", reason="asks CUDA itself, so there is no rehearsal")

SEQ, CHUNK = 272, 56
"""Five chunks, the last one short; multiples of 8."""
MODEL = tiny(4, 2, 64, layers=2)


@contextmanager
def deterministic():
    """Kernels whose bits repeat. Flash attention's backward has a slower way to sum; cuDNN's has none."""
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
