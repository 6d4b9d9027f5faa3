"""Lines: the cost curve through measured points, ns = fixed + a GFLOPs + b MB."""
from __future__ import annotations

from collections import defaultdict

import numpy as np
from scipy.optimize import nnls

Point = tuple[float, float, float]
"""(GFLOPs, MB, ns)."""

ALIKE, WORSE = 1.01, 0.02
"""A line is as good whose error is no more times as large, and at no size by so much of its time."""


def fit(samples: list[Point]) -> dict[str, float]:
    """The line through points of one key: fixed_ns, ns_per_gflop, ns_per_MB, none negative, least relative error. Nothing is fixed where as good a
    line has nothing fixed: what an op moves whatever its tokens are, its weights, are other bytes in another model."""
    by_size = defaultdict(list)
    for gflop, megabytes, ns in samples:
        by_size[gflop, megabytes].append(ns)
    rows = np.array([(1.0, *size) for size in by_size])
    ns = np.array([np.median(times) for times in by_size.values()])
    scale = np.maximum(np.abs(rows).max(0), 1e-12)
    usable = rows / scale / ns[:, None]
    free = usable * (0, 1, 1)  # of one size no more is told: proportional to work
    (best, error), (moving, as_good) = (nnls(columns, np.ones(len(ns))) for columns in (usable, free))
    worse = np.abs(free @ moving - 1) - np.abs(usable @ best - 1)
    coefficients = moving if len(ns) == 1 or as_good <= ALIKE * error and worse.max() <= WORSE else best
    return dict(zip(("fixed_ns", "ns_per_gflop", "ns_per_MB"), (coefficients / scale).tolist()))
