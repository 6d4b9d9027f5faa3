"""Lines: the cost curve through measured points, ns = fixed + a GFLOPs + b MB."""
from __future__ import annotations

from collections import defaultdict

import numpy as np
from scipy.optimize import nnls

Point = tuple[float, float, float]
"""(GFLOPs, MB, ns)."""

ALIKE = 1.01
"""Factor of the error of a line that is as good."""


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
    (coefficients, error), (moving, as_good) = (nnls(columns, np.ones(len(ns))) for columns in (usable, free))
    if as_good <= ALIKE * error or len(ns) == 1:
        coefficients = moving
    return dict(zip(("fixed_ns", "ns_per_gflop", "ns_per_MB"), (coefficients / scale).tolist()))
