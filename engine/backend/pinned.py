"""Pinned: host memory that copies run from at full speed, exact to the byte, which the stock allocator would round up to a power of two.

Ordinary pages, touched so that they are there, then registered with the driver. What fails leaves nothing taken and nothing registered.
"""
from __future__ import annotations

import mmap
import resource
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import torch

from sim.errors import UserError
from sim.units import show_bytes

PIECE_BYTES, THREADS = 256 << 20, 4
"""Memory is touched in pieces of this size, several at a time: one thread's page faults are slower than a disk."""


class Pinned:
    """A piece of pinned memory: `tensor`, uint8."""

    def __init__(self, size_bytes: int, tick: Callable[[int, int], None] = lambda done, total: None) -> None:
        """tick(bytes, of bytes) is called as pages are touched. Raises UserError where the memory is not there."""
        self._registered = False
        try:
            pages = mmap.mmap(-1, size_bytes)
        except (OSError, OverflowError) as error:
            raise UserError(f"{show_bytes(size_bytes)} of host memory cannot be taken ({error}){_remedy()}") from None
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # fewer faults where the kernel has it
                pages.madvise(mmap.MADV_HUGEPAGE)
        self.tensor: torch.Tensor | None = torch.frombuffer(pages, dtype=torch.uint8, count=size_bytes)
        del pages  # the tensor, and whatever looks at it, has them; closed by hand, they would be gone under it
        try:
            self._touch(tick)
            code = torch.cuda.cudart().cudaHostRegister(self.tensor.data_ptr(), size_bytes, 0)
            if int(code):
                raise UserError(f"pinning {show_bytes(size_bytes)} of host memory failed ({code}){_remedy()}")
            self._registered = True
        except BaseException:
            self.free()
            raise

    def _touch(self, tick: Callable[[int, int], None]) -> None:
        done, pieces = 0, self.tensor.split(PIECE_BYTES)
        pool = ThreadPoolExecutor(THREADS)
        try:
            for piece in [pool.submit(piece.zero_) for piece in pieces]:
                done += len(piece.result())
                tick(done, len(self.tensor))
        finally:
            pool.shutdown(cancel_futures=True)

    def free(self) -> None:
        """Gives it back; nothing may copy any more. The pages go with the last tensor that looks at them."""
        if self._registered:
            torch.cuda.cudart().cudaHostUnregister(self.tensor.data_ptr())
        self._registered, self.tensor = False, None


def _remedy() -> str:
    """What there is, and what to change."""
    lines = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(lines["MemAvailable"].split()[0]) * 1024
    most = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    locked = "" if most == resource.RLIM_INFINITY else f" and {show_bytes(most)} may be locked"
    return f": {show_bytes(available)} is available{locked}; take fewer tokens (--seq), or fewer ranks of this node{', or raise ulimit -l' * bool(locked)}"
