"""Dealing tokens to ranks: chunk i goes to rank r as tokens [iC + rC/P, iC + (r+1)C/P). O(S) memory, the inverse is exact."""
from __future__ import annotations

import torch

from sim.layout import chunks, pad

IGNORE = -100
"""The label of a token that counts in no loss."""


def deal(x_S: torch.Tensor, chunk: int, P: int, rank: int) -> torch.Tensor:
    """This rank's tokens of [S, ...], chunk after chunk: [S / P, ...]. S must be a multiple of P (see padded)."""
    parts = [x_S[at + rank * n // P: at + (rank + 1) * n // P] for at, n in chunks(len(x_S), chunk)]
    return torch.cat(parts)


def gather(parts: list[torch.Tensor], chunk: int) -> torch.Tensor:
    """The inverse: all ranks' [S / P, ...] back to [S, ...]."""
    P, pieces = len(parts), []
    for at, n in chunks(sum(map(len, parts)), chunk):
        pieces += [part[at // P: (at + n) // P] for part in parts]
    return torch.cat(pieces)


def shift(tokens_S: torch.Tensor) -> torch.Tensor:
    """Next-token labels of the whole sequence, before it is dealt out, so that no border loses one. The last token has none."""
    return torch.cat((tokens_S[1:], tokens_S.new_full((1,), IGNORE)))


def padded(x_S: torch.Tensor, P: int, value: int) -> torch.Tensor:
    """[S, ...] lengthened to a multiple of P with `value` (IGNORE for labels)."""
    extra = pad(len(x_S), P) - len(x_S)
    return torch.cat((x_S, x_S.new_full((extra, *x_S.shape[1:]), value))) if extra else x_S
