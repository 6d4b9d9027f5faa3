"""Numbers people type and read: 64K tokens, 80GiB of memory."""
from __future__ import annotations

import re
from fractions import Fraction

from sim.errors import UserError

_BINARY = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
MOST = 1 << 40
"""Tokens, at most."""
_DECIMAL = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def parse_tokens(text: str | int) -> int:
    """'64K' -> 65536, '2M' -> 2097152 (K = 1024, as the papers count). Raises UserError."""
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"([+-]?\d+(?:\.\d+)?)([KMG]?)", text.strip().upper())
    value = Fraction(match[1]) * _BINARY[match[2]] if match else Fraction(1, 2)
    if value.denominator > 1:
        raise UserError(f"{text[:40]!r} is not a whole number of tokens; write it like 65536, 64K or 2M")
    if abs(value) > MOST:
        raise UserError(f"{text[:40]!r} is more than 2^40 tokens; write at most 1024G")
    return int(value)


def parse_bytes(text: str | int) -> int:
    """'80GiB' -> 80 * 2**30, '80GB' -> 80 * 10**9, plain digits are bytes. Raises UserError."""
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(I?B)?", text.strip().upper())
    if not match or (match[2] and not match[3]):
        raise UserError(f"{text!r} is not a size; write it like 80GB (10^9), 80GiB (2^30) or plain bytes")
    table = _BINARY if match[3] == "IB" else _DECIMAL
    size = int(Fraction(match[1]) * table[match[2]])
    if size > 1 << 60:
        raise UserError(f"{text[:40]!r} is more than any machine has; write it like 80GB (10^9), 80GiB (2^30) or plain bytes")
    return size


def show_tokens(tokens: int) -> str:
    """65536 -> '64K', 2097152 -> '2M', anything else as plain digits."""
    for unit in ("M", "K"):
        if tokens and tokens % _BINARY[unit] == 0:
            return f"{tokens // _BINARY[unit]}{unit}"
    return str(tokens)


def show_bytes(size_bytes: float) -> str:
    """1610612736 -> '1.50 GiB'."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size_bytes) < 1024 or unit == "GiB":
            return f"{size_bytes:.0f} B" if unit == "B" else f"{size_bytes:.2f} {unit}"
        size_bytes /= 1024
    return ""
