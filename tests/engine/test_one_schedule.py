"""One schedule: what was measured is what was written, line by line, and an edited text runs as it stands or is refused."""
from __future__ import annotations

import pytest

from sim.errors import UserError
from sim.lint import LintError, lint
from sim.schedule import STREAMS, Schedule
from sim.text import parse, show
from tests.engine.cases import running, schedule, text, tiny, train

MODEL, SEQ, CHUNK = tiny(4, 1, 16, layers=2), 61, 12


def recorded(rank: int, group, lines: str):
    """(spans, losses and weights) of two steps of a schedule text."""
    with running(parse(lines), rank, group) as program:
        program.spans = []
        return program.spans, bits(program, rank, group)


def bits(program, rank: int, group):
    losses, weights = train(program, rank, group, *text(MODEL, SEQ), steps=2)
    return losses, {n: w.tolist() for n, w in weights.items()}


def written(lines: str) -> dict[str, list[tuple[str, str]]]:
    """(op id, stream) of each op line, by region, read from the text alone."""
    found: dict[str, list] = {}
    for line in lines.splitlines():
        words = line.split()
        if words[:1] == ["region"]:
            ops = found.setdefault(words[1], [])
        elif words and words[0] in STREAMS:
            ops.append((words[1], words[0]))
    return found


@pytest.mark.parametrize("P", (1, 2))
@pytest.mark.parametrize("how", [{}, {"offload": False}, {"host_sync": "region"}], ids=str)
def test_measured_ops_are_the_written_ones_in_order(ranks, P, how):
    lines = show(schedule(MODEL, SEQ, CHUNK, P, **how))
    ops = written(lines)
    step = [("fwd", 0), ("fwd", 1), ("loss", 1), ("bwd", 1), ("bwd", 0)]
    expected = [(id, layer, stream) for region, layer in step for id, stream in ops[region]] * 2
    assert len(expected) > 300
    for spans, _ in ranks(P).run(recorded, lines):
        external = {id for id, _, stream, _ in spans if stream == "external"}  # measured beside the schedule, not issued by it
        assert external and all(id.startswith("ext.") for id in external)
        assert [span[:3] for span in spans if span[2] != "external"] == expected
        for stream in STREAMS:
            times = [tuple(times) for _, _, s, times in spans if s == stream]
            flat = [t for span in times for t in span]
            assert flat == sorted(flat), f"{stream} runs one op at a time, in order"


@pytest.mark.parametrize("P", (1, 2))
def test_a_parsed_file_gives_equal_bits(ranks, P):
    s = schedule(MODEL, SEQ, CHUNK, P)
    assert parse(show(s)) == s
    built = ranks(P).run(built_bits, P)
    assert [bits for _, bits in ranks(P).run(recorded, show(s))] == built


def built_bits(rank: int, group, P: int):
    with running(schedule(MODEL, SEQ, CHUNK, P), rank, group) as program:
        return bits(program, rank, group)


def swaps(s: Schedule) -> list[str]:
    """Ids of ops that may change places with the next one and share no operand that either writes: one for each pair of streams."""
    found: dict[tuple[str, str], list[str]] = {}
    for region in s.regions.values():
        for a, b in zip(region.ops, region.ops[1:]):
            shared = ({*a.reads, *a.writes} & {*b.writes}) | ({*b.reads, *b.writes} & {*a.writes})
            pair = found.setdefault((a.stream, b.stream), [])
            if not pair and not shared:
                try:
                    lint(parse(swapped(show(s), a.id)))
                except UserError:
                    continue
                pair.append(a.id)
    return [id for pair in found.values() for id in pair]


def swapped(lines: str, first: str) -> str:
    """The text with the line of an op and the next one in each other's place."""
    rows = lines.splitlines()
    k = next(k for k, row in enumerate(rows) if row.split()[1:2] == [first])
    return "\n".join([*rows[:k], rows[k + 1], rows[k], *rows[k + 2:]]) + "\n"


@pytest.mark.parametrize("P", (1, 2))
def test_swapping_independent_lines_changes_the_order_and_not_the_bits(ranks, P):
    s = schedule(MODEL, SEQ, CHUNK, P)
    (spans, bits), *_ = ranks(P).run(recorded, show(s))
    order, free = [span[:2] for span in spans], swaps(s)
    streams = {op.id: op.stream for region in s.regions.values() for op in region.ops}
    pairs = {first: next(id for id, at in order[order.index((first, 0)) + 1:]) for first in free}
    assert {streams[a] == streams[b] for a, b in pairs.items()} == {True, False}
    for first, second in pairs.items():
        for spans, after in ranks(P).run(recorded, swapped(show(s), first)):
            now = [span[:2] for span in spans]
            for layer in range(MODEL.layers):
                assert order.index((second, layer)) == order.index((first, layer)) + 1
                assert now.index((first, layer)) == now.index((second, layer)) + 1
            assert after == bits


def without(lines: str, id: str, waits: bool) -> str:
    """The text less the line of an op, and less every wait for it if `waits`."""
    rows = [row for row in lines.splitlines() if row.split()[1:2] != [id]]
    if waits:
        rows = [" ".join(w for w in row.split() if w.removeprefix(f"prev:{id[:3]}:") != id).removesuffix(" wait") for row in rows]
    return "\n".join(rows) + "\n"


@pytest.mark.parametrize("waits", (False, True), ids=("line", "line and waits"))
@pytest.mark.parametrize("reload, reader", [
    ("fwd.reload.kv[3,2]", "fwd.attn[3,2]"), ("bwd.reload.q[2]", "bwd.attn_bwd[2,0]"), ("bwd.reload.kv[4,0]", "bwd.attn_bwd[4,0]"),
    ("bwd.reload.x_kv[0]", "bwd.kv_bwd[0]"), ("bwd.reload.lse[4]", "bwd.attn_bwd[4,0]"),
])
def test_a_deleted_reload_is_refused(reload, reader, waits):
    with pytest.raises(UserError) as refused, running(parse(without(show(schedule(MODEL, SEQ, CHUNK)), reload, waits))):
        pass
    line = str(refused.value)
    assert "\n" not in line
    if isinstance(refused.value, LintError):
        assert line.startswith(f"{reader} ")
        assert [row.split()[2] for row in refused.value.drawing.splitlines() if row.startswith("------>")] == [reader]
    else:
        assert not waits and f"waits for {reload}" in line and "does not exist" in line


def test_deleting_a_reload_of_what_the_slot_holds_already_changes_no_bit(ranks):
    """fwd.reload.kv[2,1] left chunk 1 where row 3 finds it."""
    lines = show(schedule(MODEL, SEQ, CHUNK))
    (_, bits), (spans, less) = recorded(0, None, lines), recorded(0, None, without(lines, "fwd.reload.kv[3,1]", True))
    assert less == bits
    assert "fwd.reload.kv[3,1]" not in {span[0] for span in spans}


def mismatched(rank: int, group, chunks: tuple[int, ...]):
    with running(schedule(MODEL, SEQ, chunks[rank], group.size()), rank, group) as program:
        return program.arenas.touched_bytes("hbm")


def one_bad(rank: int, group):
    lines = show(schedule(MODEL, SEQ, CHUNK, group.size()))
    with running(parse(without(lines, "fwd.reload.kv[3,2]", True) if rank else lines), rank, group):
        pass


def test_a_bad_schedule_on_one_rank_ends_them_all(ranks):
    """The rank whose own file is fine must not wait for one that has refused."""
    assert [outcome.error for outcome in ranks(2).outcomes(one_bad)] == ["UserError", "UserError"]


def too_many(rank: int, group):
    with running(schedule(MODEL, SEQ, CHUNK, 2), rank, group):
        pass


def test_another_number_of_ranks_is_refused(ranks):
    for outcome in ranks(4).outcomes(too_many):
        assert outcome.error == "UserError" and "the schedule is for P=2, but 4 ranks run it; start 2" in outcome.text
    with pytest.raises(UserError, match="for P=2, but 1 ranks run it"), running(schedule(MODEL, SEQ, CHUNK, 2)):
        pass


def test_ranks_with_different_schedules_refuse_before_the_first_step(ranks):
    for outcome in ranks(2).outcomes(mismatched, (12, 20)):
        assert outcome.error == "UserError"
        assert "the ranks hold different schedules: rank 0 has" in outcome.text
    assert ranks(2).run(mismatched, (12, 12)) == [0, 0]
