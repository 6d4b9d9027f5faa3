"""Lines: the cost curve through measured points, ns = fixed + a GFLOPs + b MB."""
from __future__ import annotations

from collections import defaultdict

import numpy as np
from scipy.optimize import nnls

Point = tuple[float, float, float]
"""(GFLOPs, MB, ns)."""


def fit(samples: list[Point]) -> dict[str, float]:
    """The line through points of one key: fixed_ns, ns_per_gflop, ns_per_MB, none negative, least relative error."""
    by_size = defaultdict(list)
    for gflop, megabytes, ns in samples:
        by_size[gflop, megabytes].append(ns)
    rows = np.array([(1.0, *size) for size in by_size])
    ns = np.array([np.median(times) for times in by_size.values()])
    scale = np.maximum(np.abs(rows).max(0), 1e-12)
    usable = rows / scale / ns[:, None]
    if len(ns) == 1:
        usable[:, 0] = 0  # one size tells no fixed part: proportional to work
    coefficients, _ = nnls(usable, np.ones(len(ns)))
    return dict(zip(("fixed_ns", "ns_per_gflop", "ns_per_MB"), (coefficients / scale).tolist()))
