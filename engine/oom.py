"""Out of memory: what torch, cuBLAS, cuDNN or NCCL say when an allocation fails, as one line that says what to change."""
from __future__ import annotations

import re

import torch

from sim.units import show_bytes

SIGNS = ("out of memory", "alloc_failed", "can't allocate memory", "cannot allocate memory")
"""Of errors that have no type of their own, in lower case."""


def out_of_memory(error: BaseException) -> str | None:
    """The line, after the rank's name; None where the error is of another kind."""
    said = str(error)
    if not isinstance(error, (torch.OutOfMemoryError, MemoryError)) and not any(sign in said.lower() for sign in SIGNS):
        return None
    on_gpu = not isinstance(error, MemoryError) and "alloc_cpu" not in said and torch.cuda.is_available()
    asked = re.search(r"[Tt]ried to allocate ([\d.]+) ?(GiB|MiB|KiB|bytes)", said)
    sizes = [f"{asked[1]} {asked[2]} was asked for" if asked and asked[2] != "bytes" else f"{show_bytes(int(asked[1]))} was asked for"] if asked else []
    if on_gpu:
        free, total = torch.cuda.mem_get_info()
        sizes.append(f"{show_bytes(free)} of {show_bytes(total)} is free")
    change = "use a smaller chunk (--chunk), a shorter S (--seq) or more GPUs" if on_gpu else "use a shorter S (--seq), a smaller model or fewer ranks"
    return f"ran out of {'GPU' if on_gpu else 'host'} memory{': ' * bool(sizes)}{', '.join(sizes)}; {change}"
