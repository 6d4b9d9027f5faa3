"""Faults: the engine broken on purpose, in ways that have been seen. The same checks that pass must then fail."""
from __future__ import annotations

from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from engine import launch


def _wrong_scale(stack: ExitStack) -> None:
    """1/sqrt(hidden) for 1/sqrt(head_dim): queries too large or too small by the ratio."""
    def forward(right, rt, op, reads, writes):
        right(rt, op, [reads[0] * (rt.model.head_dim / rt.model.hidden) ** 0.5, *reads[1:]], writes)

    _launcher(stack, "attn", forward)
    _launcher(stack, "attn_bwd", forward)


def _launcher(stack: ExitStack, kind: str, wrong) -> None:
    right = launch.LAUNCHERS[kind]
    stack.enter_context(patch.dict(launch.LAUNCHERS, {kind: lambda rt, op, reads, writes: wrong(right, rt, op, reads, writes)}))


def _zeros(stack: ExitStack) -> None:
    """The block's output is zero."""
    def wrong(right, rt, op, reads, writes):
        writes[0].zero_()

    _launcher(stack, "ffn", wrong)


def _zero_attention(stack: ExitStack) -> None:
    """Attention's output is zero."""
    def wrong(right, rt, op, reads, writes):
        right(rt, op, reads, writes)
        writes[0].zero_()

    _launcher(stack, "attn", wrong)


def _last_chunk_dropped(stack: ExitStack) -> None:
    """Each query chunk misses the last earlier KV chunk."""
    def wrong(right, rt, op, reads, writes):
        i, j = map(int, op.id[op.id.index("[") + 1:-1].split(","))
        if j < i - 1 or j == i or j == 0:
            right(rt, op, reads, writes)

    _launcher(stack, "attn", wrong)


def _kv_sum_skipped(stack: ExitStack) -> None:
    """Of the ranks that share a KV head only the first one's gradient counts."""
    def wrong(right, rt, op, reads, writes):
        each = max(1, rt.P // rt.model.kv_heads)
        dkv = reads[0].view(rt.P, -1).clone()
        dkv[[r for r in range(rt.P) if r % each]] = 0
        right(rt, op, [dkv, *reads[1:]], writes)

    _launcher(stack, "kv_bwd", wrong)


def _rope_local_to_rank(stack: ExitStack) -> None:
    def wrong(rt, op, tokens, device):
        return launch.angles(op.args["at"], tokens, rt.model.rotary_dim, rt.model.rope_theta, device)

    stack.enter_context(patch.object(launch, "_rope", wrong))


def _rope_local_to_chunk(stack: ExitStack) -> None:
    def wrong(rt, op, tokens, device):
        return launch.angles(rt.rank * tokens, tokens, rt.model.rotary_dim, rt.model.rope_theta, device)

    stack.enter_context(patch.object(launch, "_rope", wrong))


def _fp16_accumulators(stack: ExitStack) -> None:
    """Partial outputs and gradients pass through fp16 each time something is added."""
    add, merge = launch.add_attn_grads, launch.merge

    def rounded_add(dq, dk, dv, into_q, into_kv, *more):
        add(dq, dk, dv, into_q, into_kv, *more)
        for into in (into_q, into_kv):
            into.copy_(into.half())

    def rounded_merge(acc, lse, part, part_lse, out, out_lse):
        merge(acc, lse, part, part_lse, out, out_lse)
        out.copy_(out.half())
        out_lse.copy_(out_lse.half())

    stack.enter_context(patch.object(launch, "add_attn_grads", rounded_add))
    stack.enter_context(patch.object(launch, "merge", rounded_merge))


FAULTS = {
    "wrong scale": _wrong_scale, "zeros": _zeros, "zero attention": _zero_attention, "last chunk dropped": _last_chunk_dropped,
    "KV-gradient sum skipped": _kv_sum_skipped, "RoPE local to the rank": _rope_local_to_rank,
    "RoPE local to the chunk": _rope_local_to_chunk, "fp16 accumulators": _fp16_accumulators,
}


@contextmanager
def fault(name: str | None):
    """The engine of this process with a fault in it, or as it is."""
    with ExitStack() as stack:
        if name:
            FAULTS[name](stack)
        yield
