"""Real text that every machine has: the source files of Python's own standard library, as bytes, one after the other."""
from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

from sim.errors import UserError


def stdlib_bytes(count: int) -> torch.Tensor:
    """The first `count` bytes, int64 [count], values 0..255. Files in path order, installed packages and tests left out."""
    root = Path(sysconfig.get_path("stdlib"))
    found = bytearray()
    for path in sorted(root.rglob("*.py")):
        if {"site-packages", "dist-packages", "test", "tests", "__pycache__"} & set(path.relative_to(root).parts):
            continue
        found += path.read_bytes()
        if len(found) >= count:
            return torch.frombuffer(found[:count], dtype=torch.uint8).long()
    raise UserError(f"{count} bytes of text were asked for, but the standard library has {len(found)}; take fewer steps or a shorter S")
