"""Partial residency: the earliest KV chunks stay in HBM, and everything else goes as before."""
from __future__ import annotations

import pytest
from test_lint import GQA, MHA

from sim.build.step import build
from sim.errors import UserError
from sim.lint import lint
from sim.ops import KINDS
from sim.schedule import SPACES, Schedule
from sim.strategy import Strategy

SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
ORDERS, SAVES = ("query-up", "query-down", "kv-outer"), ("all", "qkvo", "o", "input")


def copies(schedule: Schedule, region: str, role: str = "kv") -> list[str]:
    """The copies of KV chunks, as written down, without the region's name."""
    return [op.id.partition(".")[2] for op in schedule.regions[region].ops if op.stream in ("h2d", "d2h") and f".{role}[" in op.id]


def test_which_copies_are_left():
    """u = 4, the first two stay: of six reloads forward keeps one, of ten backward three."""
    schedule = build(GQA, Strategy(sp=2, chunk=16, resident=0.5), 64)
    lint(schedule)
    assert copies(schedule, "fwd") == ["offload.kv[2]", "offload.kv[3]", "reload.kv[3,2]"]
    assert copies(schedule, "bwd") == ["reload.kv[2,2]", "reload.kv[3,2]", "reload.kv[3,3]"]
    assert [(b.name, b.space) for b in schedule.saved.values() if b.role == "kv"] == [("kv[0]", "hbm"), ("kv[1]", "hbm"), ("kv[2]@host", "host"), ("kv[3]@host", "host")]
    assert {b.space for b in schedule.saved.values() if b.role != "kv"} == {"host"}


def test_all_of_it_stays_and_the_rest_still_goes():
    schedule = build(MHA, Strategy(chunk=16, resident=1.0), 64)
    lint(schedule)
    assert copies(schedule, "fwd") == copies(schedule, "bwd") == []
    for role in ("x", "q", "o", "lse"):
        assert copies(schedule, "fwd", role) == [f"offload.{role}[{i}]" for i in range(4)]
    assert not any(b.role == "kv" and b.life == "slot" for r in schedule.regions.values() for b in r.buffers.values())


def test_kv_outer_reloads_a_chunk_that_went_once():
    assert copies(build(GQA, Strategy(chunk=16, order="kv-outer", resident=0.5), 64), "bwd") == ["reload.kv[2]", "reload.kv[3]"]


def test_recomputed_chunks_stay_too():
    """save=o: backward makes KV again and keeps the first two in HBM; nothing of it is saved."""
    schedule = build(GQA, Strategy(chunk=16, save="o", resident=0.5), 64)
    lint(schedule)
    assert copies(schedule, "bwd") == ["offload.kv[2]", "offload.kv[3]", "reload.kv[2,2]", "reload.kv[3,2]", "reload.kv[3,3]"]
    assert not any(b.role == "kv" for b in schedule.saved.values())


def test_it_is_rounded_down_and_never_more_than_asked():
    def stay(share: float) -> int:
        return sum(b.role == "kv" and b.space == "hbm" for b in build(MHA, Strategy(chunk=16, resident=share), 70).saved.values())

    assert [stay(share) for share in (0.0, 0.19, 0.2, 0.5, 0.6, 0.99, 1.0)] == [0, 0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("save", SAVES)
def test_bytes_copied_by_hand(order, save):
    """u = 8; of the n chunks that do not stay, forward reloads the pairs below the diagonal, backward those with it. What is not saved
    goes out in both, but for the last chunk of forward, which no row below reads."""
    for share in SHARES:
        n = 8 - int(8 * share)
        below, met = n * (n - 1) // 2, n if order == "kv-outer" else n * (n + 1) // 2
        left = {"o": max(n - 1, 0) + below + n + met, "input": max(n - 1, 0) + below + n + below + met}.get(save, n + below + met)
        schedule = build(GQA, Strategy(chunk=16, order=order, save=save, resident=share), 8 * 16)
        moved = sum(KINDS[op.kind].work(op, schedule).link_bytes for r in schedule.regions.values() for op in r.ops if op.kind in ("offload", "reload") and ".kv" in op.id)
        assert moved == left * (2 * 16 * 2 * 16 * 2), share  # k and v of 16 tokens, two heads of 16, bf16


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("save", SAVES)
def test_memory_moves_from_the_host_to_HBM_with_it(order, save):
    """With the share HBM planned only grows, and the host's only falls; what is saved by the KV bytes of the chunks that stay."""
    built = [build(GQA, Strategy(sp=2, chunk=16, order=order, save=save, resident=share), 256) for share in SHARES]
    hbm, host = ([s.arena_bytes(space) for s in built] for space in SPACES)
    assert hbm == sorted(hbm) and host == sorted(host, reverse=True)
    kept = [s.stride["hbm"] for s in built]
    assert kept == [4 * k * 2 * 16 * 1 * 16 * 2 if save in ("all", "qkvo") else 0 for k in range(5)]
    assert [s.stride["host"] + s.stride["hbm"] for s in built] == [built[0].stride["host"]] * 5


@pytest.mark.parametrize("fields, line", [
    ({"resident": 1.5}, "resident=1.5 is no share of the KV chunks, from 0 to 1; try resident=0.5"),
    ({"resident": -0.1}, "resident=-0.1 is no share of the KV chunks, from 0 to 1; try resident=0.5"),
    ({"resident": float("nan")}, "resident=nan is no share of the KV chunks, from 0 to 1; try resident=0.5"),
    ({"resident": 0.5, "offload": False}, "resident=0.5 keeps a share of what goes to the host and offload=false keeps all in HBM; try offload=true"),
])
def test_what_it_cannot_be(fields, line):
    with pytest.raises(UserError) as caught:
        Strategy(**fields)
    assert str(caught.value) == line


def test_it_is_read_as_a_number():
    assert Strategy.parse(["resident=.25"]).resident == 0.25 and "resident=0," in Strategy.defaults()
    with pytest.raises(UserError, match="^resident=half is no number; try resident=0.5$"):
        Strategy.parse(["resident=half"])
