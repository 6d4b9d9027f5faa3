"""Microbenchmarks: what is made of their points, by hand on synthetic data; and every entry of the table, run on this machine's CPU."""
from __future__ import annotations

import dataclasses
import json
import os
import signal
import time
from dataclasses import asdict
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from engine import probe
from engine.lines import fit
from engine.micro import fit as made
from engine.micro import table
from engine.meter import Meter, sample
from engine.micro.place import Plan
from engine.micro.serve import run
from engine.micro.together import rates, sets
from sim.cost import fitted
from sim.model import model
from tests.sim.tiny import tiny_machine


def curve(gflop: float) -> float:
    """A kernel that is slow on small chunks: 1 ns a MFLOP and half as much again at 1 GFLOP, a tenth at 1000."""
    return 1000 * gflop * (1 + 0.5 * gflop ** -0.2)


def test_a_line_is_found_again():
    found = fit([(g, mb, 700 + 3 * g + 11 * mb) for g, mb in ((1, 5), (10, 7), (100, 2), (1000, 90))])
    assert [found[k] for k in ("fixed_ns", "ns_per_gflop", "ns_per_MB")] == pytest.approx([700, 3, 11], rel=1e-6)


def test_what_weights_take_is_not_fixed():
    """MB of weights are the same for every chunk of a model, as a fixed part would be: both lines meet the points, and in a wider model one of them is wrong."""
    weights, tokens = 400.0, (64, 256, 1024)
    found = fit([(t * weights, weights + t, 2 * t * weights + 30 * (weights + t)) for t in tokens])
    assert found["fixed_ns"] == 0 and fitted(found, 256 * 10 * weights, 10 * weights + 256) == pytest.approx(2 * 256 * 10 * weights + 30 * (10 * weights + 256), rel=1e-6)


def test_no_size_pays_for_a_line_without_a_fixed_part():
    """Two hundred sizes that scatter by a fifth would let one small size go, which a fixed part meets."""
    dice = np.random.default_rng(0)
    scatter = [(g, 0.0, (40 + 100 * g) * (1 + 0.2 * float(dice.standard_normal()))) for g in np.linspace(100, 1000, 200).tolist()]
    found = fit([(1.0, 0.0, 140.0), *scatter])
    assert fitted(found, 1, 0) == pytest.approx(140, rel=0.02) and found["fixed_ns"] > 0


def test_sizes_beyond_the_timelines_follow_the_microbenchmark_at_the_level_of_the_op():
    """The op takes 1.2 times its kernel. Timelines saw 10 to 100 GFLOPs, microbenchmarks 1 to 10,000."""
    own = [(g, 0.0, 1.2 * curve(g)) for g in (10, 30, 100)]
    more = [(g, 0.0, curve(g)) for g in (1, 3, 10, 30, 100, 300, 1000, 3000, 10_000)]
    found = made.extended(own, more)
    for gflop in (1, 2, 10, 50, 100, 500, 1000, 5000, 10_000):
        assert fitted(found, gflop, 0) == pytest.approx(1.2 * curve(gflop), rel=0.02)
    line = fit(own)
    assert abs(fitted(line, 10_000, 0) / (1.2 * curve(10_000)) - 1) > 0.04


def test_what_an_op_moves_more_than_its_like_grows_with_it():
    """The op moves three times what its kernel does, and takes 2 ns a MFLOP and 5 a MB."""
    own = [(g, 3 * g ** 0.5, 2000 * g + 5000 * 3 * g ** 0.5) for g in (10.0, 100.0)]
    more = [(g, g ** 0.5, 1000 * g) for g in (1.0, 10.0, 100.0, 1000.0)]
    small, large = made.beyond(own, more)
    assert small[:2] == pytest.approx((1, 3)) and large[:2] == pytest.approx((1000, 3 * 1000 ** 0.5))
    assert large[2] == pytest.approx(1000 * 1000 * own[1][2] / (1000 * 100))


def test_a_line_that_fits_is_not_bent():
    points = [(g, 0.0, 500.0 + 40 * g) for g in (1, 10, 100)]
    assert "bend" not in made.extended(points, [])


def test_how_fast_streams_are_together():
    """Compute has 10 ns of work an op and takes 20 beside the copy, which takes 25 for 20: what is before 5 and after 50 does not count."""
    spans = {"compute": [(0, 10), (10, 30), (30, 50)], "h2d": [(5, 30), (30, 55)]}
    found = rates(spans, {"compute": 10.0, "h2d": 20.0})
    assert found == pytest.approx({"compute": (0.5 + 1 + 1) * 10 / 45, "h2d": (1 + 0.8) * 20 / 45})
    assert rates({"compute": [(0, 10)], "h2d": [(10, 20)]}, {"compute": 10.0, "h2d": 10.0}) == {}


def test_every_pair_and_triple_and_all_four():
    assert len(sets(["compute", "comm", "h2d", "d2h"])) == 6 + 4 + 1
    assert sets(["compute", "h2d"]) == [("compute", "h2d")]


TOGETHER = [
    {"name": "together", "args": {"streams": "compute|h2d"}, "rates": {"compute": [0.9, 0.95, 0.99], "h2d": [0.99, 1.02, 1.03]}, "rounds": 3},
    {"name": "together", "args": {"streams": "comm|compute"}, "rates": {"compute": [0.9, 0.95, 0.99]}, "rounds": 3},
]


def test_the_contention_table_has_medians_and_no_gain():
    """A set in which a stream could not be measured is left out."""
    assert made.slowdown_of(TOGETHER, "measured: here") == {
        "compute|h2d": {"compute": 0.95, "h2d": 1.0, "spread": {"compute": [0.9, 0.99], "h2d": [0.99, 1.03]}, "source": "measured: here"}}


def point(name: str, ns: float | None, MB: float = 0.0, **args) -> dict:
    return {"name": name, "args": args, "GFLOPs": 0.0, "MB": MB, "ns": ns}


def test_numbers_come_from_the_largest_size():
    points = [point("pin", 1e6, bytes=1 << 20), point("pin", 400e6, bytes=10**9), point("h2d", 1e6, 50, bytes=50 * 10**6, ranks=1),
              point("h2d", 2.1e6, 50, bytes=50 * 10**6, ranks=4), point("move", 1e6, 4000, bytes=2 * 10**9), point("sync", 12_000.0),
              {"name": "launch queue", "args": {}, "entries": 1023}, point("d2h", None, 50, bytes=1, ranks=1)]
    assert made.numbers_of(points, 4, 4) == pytest.approx(
        {"pin_GBps": 2.5, "h2d_GBps": 50.0, "gpus_per_uplink": 2, "hbm_GBps": 4000.0, "sync_ns": 12_000.0, "queue_depth": 1023})
    assert made.numbers_of([], 1, 1) == {}


def test_a_node_and_the_network_between_nodes():
    sent = [point("all-to-all", ns, 100, bytes=10**8, ranks=ranks) for ranks, ns in ((2, 1e6), (4, 8e6))]
    assert made.numbers_of(sent, 4, 2) == {"nvlink_GBps": 100.0, "network_GBps": 12.5}
    assert made.numbers_of(sent, 4, 4) == {"nvlink_GBps": 12.5}


def test_a_machine_gains_what_was_measured_and_keeps_the_rest():
    m = dataclasses.replace(tiny_machine(), kind="cuda", fits={"reload": {"fixed_ns": 40, "source": "measured: before"}, "qkv": {"fixed_ns": 1, "source": "measured: before"}})
    copies = [point("h2d", 1000 + 20.0 * mb, mb, bytes=mb, ranks=1) for mb in (1, 10, 100, 1000)]
    better = made.improved(m, [*copies, *TOGETHER], {"reload": [(0, 5, 1100.0), (0, 10, 1200.0)], "qkv": [(1, 1, 5)]}, 1, "measured: now", (2, 2, 4))
    assert better.fits["qkv"] == m.fits["qkv"]
    assert fitted(better.fits["reload"], 0, 1000) == pytest.approx(21_000, rel=0.01)
    assert better.fits["reload"]["source"] == "measured: before; beyond these sizes as h2d alone"
    on_cpu = made.improved(dataclasses.replace(m, kind="cpu"), copies, {"reload": [(0, 5, 1100.0), (0, 10, 1200.0)]}, 1, "measured: now", (2, 2, 4))
    assert on_cpu.fits == m.fits
    assert list(better.slowdown) == ["compute|h2d"] and better.points[0] == copies[0] and better.source("gap_ns") == m.source("gap_ns")


def test_what_nvidia_smi_prints():
    assert sample("1665, 687.31, 54\n") == (1665.0, 687.31, 54.0)
    assert sample("1665, [N/A], 54\n") == (1665.0, None, 54.0), "what one sensor lacks, the others need not"
    assert sample("nan, inf, -1\n") == (None, None, None)
    assert sample("1665, 54\n") is None and sample("No devices were found\n") is None
    assert Meter(torch.device("cpu")).read(0, 1) == {"clock_MHz": None, "power_W": None, "temperature_C": None}


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """Makes nvidia-smi a script, and gives a meter that reads it."""
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="0"))

    def made(script: str) -> Meter:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
        return Meter(torch.device("cpu"))

    return made


@pytest.mark.parametrize("lines, read", (
    (("1700, 600.04, 50", "1800, 600.1, 51"), (1750, 600.1, 50)), (("\\377\\376", "1800, 600, 51"), (1800, 600.0, 51)),
    (("nan, inf, 40", "1800, [N/A], 42"), (1800, None, 41)), (("Unable to determine the device handle",), (None, None, None))))
def test_a_meter_reads_what_there_is_of_whatever_is_printed(smi, lines, read):
    meter = smi("\n".join(f"printf '{line}\\n'" for line in lines))
    meter._read_smi(torch.device("cuda"))
    assert tuple(meter.read(0, time.monotonic()).values()) == read


def test_a_meter_that_is_closed_before_nvidia_smi_has_begun_leaves_none_behind(smi):
    meter = smi("exec sleep 5")
    meter.close()
    meter._read_smi(torch.device("cuda"))
    assert meter._smi.wait() == -signal.SIGKILL


@pytest.mark.parametrize("script, MHz", (("echo 1980; echo 1830", 1830.0), ("echo nan", None), ("echo 0", None), ("printf '\\377'", None), ("exit 9", None), ("echo 1980; echo '[N/A]'", None)))
def test_the_largest_clock_is_a_number_or_nothing(smi, script, MHz):
    smi(script)
    assert probe.clock_max_MHz() == MHz


def plan(**changes) -> Plan:
    return Plan(asdict(model("demo")), 1, "fp32", "cpu", **{"budget_s": 60.0, "load_s": 0.0, "rounds": 2} | changes)


def test_every_entry_of_the_table_runs():
    found = list(chain.from_iterable(run(plan(), 0, None)))
    measured = {p["name"] for p in found if p.get("ns")}
    entries = {m.name for group in table.GROUPS for m in group.entries}
    assert measured == entries - {m.name for m in table.SEND}
    for p in found:
        if "ns" in p:
            assert p["low_ns"] <= p["ns"] <= p["high_ns"] and p["rounds"] == 2 and p["clock_MHz"] is None
    assert [p["args"]["streams"] for p in found if p["name"] == "together"] == ["compute|d2h", "compute|h2d", "d2h|h2d", "compute|d2h|h2d"]
    shapes = {(p["args"]["q"], p["args"]["kv"], p["args"]["causal"]) for p in found if p["name"] == "attention backward"}
    assert {(128, 128, True), (128, 128, False), (64, 256, False)} <= shapes and (64, 256, True) not in shapes
    json.dumps(found)


def test_what_time_does_not_suffice_for_is_not_available():
    found = list(chain.from_iterable(run(plan(budget_s=0.0), 0, None)))
    rest = [p for p in found if p["name"] != "together"]
    assert len(rest) > 30 and all(p["ns"] is None and p["why"] == "not reached in the time there was" for p in rest)


def test_what_cannot_run_says_why(monkeypatch):
    def refuse(place, args):
        raise RuntimeError("no such shape\nmore")

    broken = table.COPY[0]._replace(make=refuse)
    monkeypatch.setattr("engine.micro.serve.GROUPS", (table.Group("copies", 1.0, (broken, table.COPY[1])),))
    monkeypatch.setattr("engine.micro.serve.measure_together", lambda *_: [])
    found = list(chain.from_iterable(run(plan(), 0, None)))
    assert {(p["name"], p["ns"] is None, p.get("why")) for p in found} == {("h2d", True, "RuntimeError: no such shape"), ("d2h", False, None)}
