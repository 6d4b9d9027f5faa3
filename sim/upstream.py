"""Upstream: the released FPDT of DeepSpeed 0.19.8 (deepspeed/sequence/fpdt_layer.py, with offload) as a strategy, and what each of its terms costs.

As it is: the host blocks after each pair of chunks, and for a chunk's all-to-alls; pinned memory is taken for each copy out, fp32 sums of dq
through the host, set to zero; the norm's output is copied out too; keys and values come back one pair ahead, on the stream that also
copies out; at forward's end chunk 0 comes back; q, k and v have all-to-alls of their own, none ahead; the merge is not fused.

Torch's allocator keeps the pinned memory that is given back, so that after warm-up steps of equal size taking it costs nothing and only
zeroing is left: that is the schedule with alloc=cached.

Ours is not theirs: the output projection and FFN run chunk by chunk, gradients of pairs are added where they are made, and the block
input is copied out in place of its norm (as many bytes).
"""
from __future__ import annotations

from typing import NamedTuple

NAME = "fpdt-upstream"
FIELDS = {
    "order": "kv-outer", "accum": "host", "prefetch": 2, "host_sync": "pair", "alloc": "chunk", "merge": "separate", "a2a": "apart",
    "lookahead": 0, "copy_streams": 1, "reload_first": True,
}


class Term(NamedTuple):
    """One of the things that the released code does, and the strategy without it alone."""

    name: str
    off: dict
    what: str


TERMS = (
    Term("pinned allocation", {"alloc": "plan"}, "pinned memory taken for each copy out, and sums of dq set to zero"),
    Term("of this, uncached", {"alloc": "cached"}, "what torch's allocator spares where it has the memory from earlier steps"),
    Term("host blocks", {"host_sync": "none"}, "the host waits for each pair of chunks and for a chunk's all-to-alls"),
    Term("of these, pairs", {"host_sync": "chunk"}, "the host waits for each pair of chunks"),
    Term("dq through the host", {"accum": "hbm"}, "fp32 sums of dq copied out and back at each pair (and their memory taken and set to zero)"),
    Term("prefetch depth one", {"prefetch": 3}, "one pair's reloads ahead, not two"),
    Term("one copy stream", {"copy_streams": 2}, "operands go out and come back on one stream"),
    Term("input copies", {"input": "hbm"}, "the norm's output copied out and back"),
    Term("chunk 0 reloaded", {"reload_first": False}, "chunk 0 fetched back at forward's end, not as backward begins"),
    Term("no lookahead", {"lookahead": 1}, "projections and all-to-alls of a chunk when its row begins, not a row ahead"),
    Term("q, k, v apart", {"a2a": "together"}, "an all-to-all each for queries, keys and values, and for their gradients"),
    Term("unfused merge", {"merge": "fused"}, "partial outputs merged by a kernel for each step of the formula"),
)
