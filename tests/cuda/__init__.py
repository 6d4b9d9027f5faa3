"""Tests on real GPUs, marked `cuda`: skipped where there is no GPU, those for two GPUs where there is one.

    python -m pytest -q tests/cuda --junitxml=cuda.xml                        on a node with one GPU or more
    python -m pytest -q tests/cuda -k P2 --junitxml=cuda.xml                  only what takes two GPUs
    CUDA_TESTS_DEVICE=cpu python -m pytest -q tests/cuda                      a rehearsal without a GPU, at small sizes

Measured values go on record in the XML as properties of their tests; the worst of each are printed in one line at the end. The
rehearsal runs whatever does not ask CUDA itself. Sizes and kernels are in places.py.
"""
