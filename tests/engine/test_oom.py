"""Memory that runs out in a rank is one line of its user's."""
from __future__ import annotations

import os

import pytest
import torch

from engine.oom import out_of_memory
from engine.worker import joined
from sim.errors import UserError

TORCH = ("CUDA out of memory. Tried to allocate 20.00 GiB. GPU 0 has a total capacity of 79.15 GiB of which 3.00 GiB is free. Including non-PyTorch memory, "
         "this process has 76.15 GiB memory in use.")
GPU = "use a smaller chunk (--chunk), a shorter S (--seq) or more GPUs"
HOST = "use a shorter S (--seq), a smaller model or fewer ranks"


@pytest.mark.parametrize("error, line", (
    (torch.OutOfMemoryError(TORCH), f"ran out of GPU memory: 20.00 GiB was asked for, 3.00 GiB of 79.15 GiB is free; {GPU}"),
    (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), f"ran out of GPU memory: 3.00 GiB of 79.15 GiB is free; {GPU}"),
    (torch.distributed.DistBackendError("NCCL error in: x.cpp:1, unhandled cuda error\nLast error:\nCuda failure 2 'out of memory'"), f"ran out of GPU memory: 3.00 GiB of 79.15 GiB is free; {GPU}"),
    (RuntimeError("[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 1073741824 bytes. Error code 12 (Cannot allocate memory)"),
     f"ran out of host memory: 1.00 GiB was asked for; {HOST}"),
    (MemoryError(), f"ran out of host memory; {HOST}"),
    (RuntimeError("something else"), None),
    (ValueError("mat1 and mat2"), None),
))
def test_each_is_one_line(error, line, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (3 << 30, int(79.15 * 2**30)))
    assert out_of_memory(error) == line


def test_a_rank_raises_it(monkeypatch):
    affinity = os.sched_getaffinity(0)
    try:
        with pytest.raises(UserError, match=r"^rank 0 ran out of host memory: [\d.]+ GiB was asked for; use a shorter S"), joined():
            torch.empty(1 << 60, dtype=torch.uint8)
        with pytest.raises(RuntimeError, match="^of another kind$"), joined():
            raise RuntimeError("of another kind")
    finally:
        os.sched_setaffinity(0, affinity)
