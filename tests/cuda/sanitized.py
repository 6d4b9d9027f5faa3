"""python -m tests.cuda.sanitized waits|none: a training step on each kernel under torch's stream sanitizer, which sees every access
to device memory and every event. With `none` nothing waits. Exit code 3 where it reports a race. A process of its own: it changes torch for good.
"""
from __future__ import annotations

import sys
from contextlib import nullcontext

from torch.cuda._sanitizer import CUDASanitizerErrors, enable_cuda_sanitizer

from engine import fused
from tests.cuda.places import CHUNK, KERNELS, MODEL, SEQ
from tests.engine.cases import running, schedule, text, train
from tests.engine.hooks import unlinted
from tests.engine.test_bits import without_waits


def main(waits: str) -> None:
    fused.devices.clear()  # inside compiled functions it sees nothing
    enable_cuda_sanitizer()
    s = schedule(MODEL, SEQ, CHUNK, 1, "bf16")
    for place in KERNELS.values():
        with unlinted() if waits == "none" else nullcontext(), running(without_waits(s) if waits == "none" else s, place=place) as program:
            train(program, 0, None, *text(MODEL, SEQ), 1)


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except CUDASanitizerErrors as race:
        print(race)
        sys.exit(3)
