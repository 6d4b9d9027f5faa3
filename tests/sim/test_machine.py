"""Machines: provenance, and one clear line for each broken number."""
from __future__ import annotations

import json
from dataclasses import replace

import pytest

from sim.errors import UserError
from sim.machine import _CARDS, NUMBERS, TEXTS, load, machine, presets
from tests.sim.tiny import tiny_machine

PUBLISHED = {"a100-40g-sxm": (312, 40), "a100-80g-sxm": (312, 80), "h100-80g-sxm": (989, 80), "h200-141g-sxm": (989, 141)}
MEASURED = {"h200-1gpu": 1}
"""Profile of a real run -> GPUs."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_say_where_every_number_comes_from(name):
    m = machine(name)
    assert (m["peak_TFLOPS"], m["hbm_bytes"]) == (PUBLISHED[name][0], PUBLISHED[name][1] << 30)
    for number in (*NUMBERS, *TEXTS):
        assert m.source(number).split(":")[0] in ("published", "measured", "assumed")


def test_presets_are_these():
    assert set(presets()) == {*PUBLISHED, *MEASURED} and set(_CARDS.values()) == set(PUBLISHED)


@pytest.mark.parametrize("name", MEASURED)
def test_profiles_of_real_runs_say_which(name):
    """Their rates are measured, and their curves: on what, when, with which versions."""
    m = machine(name)
    assert (m["peak_TFLOPS"], m["head_dim"], m.dtype) == (989, 128, "bf16") and m["gpus_per_node"] == MEASURED[name]
    for number in ("gemm_TFLOPS", "attn_fwd_TFLOPS", "attn_bwd_TFLOPS", "hbm_GBps", "h2d_GBps", "d2h_GBps", "launch_ns", "power_TFLOPS"):
        assert m.source(number).startswith("measured: 2026-") and "NVIDIA H200" in m.source(number)
    assert {"attn", "attn.causal", "attn_bwd+merge", "ffn", "ffn_bwd", "ce", "reload", "offload", "ext_optimizer"} <= set(m.fits) and "compute|d2h|h2d" in {"|".join(sorted(k.split("|"))) for k in m.slowdown}


def test_rates_are_peak_times_efficiency():
    m = machine("a100-80g-sxm")
    assert (m["gemm_TFLOPS"], m["attn_fwd_TFLOPS"], m["h2d_GBps"], m["nvlink_GBps"]) == (249.6, 193.44, 24.96, 225.0)


def test_saving_and_loading_gives_the_same_machine(tmp_path):
    m = tiny_machine({"compute|h2d": {"compute": 0.9, "h2d": 1.0, "source": "measured: today"}})
    m.save(tmp_path / "cpu.json")
    assert load(tmp_path / "cpu.json") == m == machine(tmp_path / "cpu.json")
    assert [f.name for f in tmp_path.iterdir()] == ["cpu.json"]


@pytest.mark.parametrize("kernel", ("cuDNN", "cuDNN forward, flash-attn-4 backward"))
def test_a_machine_names_the_kernels_it_was_measured_with(tmp_path, kernel):
    m = tiny_machine()
    replace(m, numbers=m.numbers | {"kernel": {"value": kernel, "source": "measured: today"}}).save(tmp_path / "m.json")
    assert load(tmp_path / "m.json").kernel == kernel


def test_points_and_numbers_that_may_be_missing(tmp_path):
    m = tiny_machine()
    assert (m.get("pin_GBps"), m.source("pin_GBps")) == (None, "never measured")
    known = replace(m, numbers=m.numbers | {"pin_GBps": {"value": 2.5, "source": "measured: today"}}, points=[{"name": "h2d", "args": {"bytes": 4}, "ns": 7}])
    known.save(tmp_path / "m.json")
    assert load(tmp_path / "m.json") == known and known.get("pin_GBps") == 2.5


def test_a_user_may_override_capacities():
    m = machine("a100-80g-sxm").override(hbm_bytes=1 << 30)
    assert (m["hbm_bytes"], m.source("hbm_bytes")) == (1 << 30, "given by user")
    assert m.source("host_bytes") == machine("a100-80g-sxm").source("host_bytes")
    with pytest.raises(UserError, match="^hbm_bytes=0 as given must be positive; try 80GiB$"):
        m.override(hbm_bytes=0)


def test_an_unknown_name_offers_the_closest():
    with pytest.raises(UserError, match="unknown machine 'a100-80gb'; closest: a100-80g-sxm"):
        machine("a100-80gb")
    with pytest.raises(UserError, match="unknown machine 'xxx"):
        machine("x" * 1000)


DELETE = object()
BROKEN = [
    (("numbers", "h2d_GBps"), DELETE, 'm.json: h2d_GBps is missing; every number says where it comes from, try "h2d_GBps": {"value": 1, "source": "assumed: why"}'),
    (("numbers", "h2d_GBps", "source"), DELETE, 'm.json: h2d_GBps has no source; every number says where it comes from, try "h2d_GBps": {"value": 1, "source": "assumed: why"}'),
    (("numbers", "h2d_GBps", "value"), DELETE, 'm.json: h2d_GBps is missing; try "h2d_GBps": 1'),
    (("numbers", "h2d_GBps", "value"), -3, 'm.json: h2d_GBps=-3 must be positive; try "h2d_GBps": 1'),
    (("numbers", "h2d_GBps", "value"), 0, 'm.json: h2d_GBps=0 must be positive; try "h2d_GBps": 1'),
    (("numbers", "h2d_GBps", "value"), "fast", 'm.json: h2d_GBps=fast is no number; try "h2d_GBps": 1'),
    (("numbers", "h2d_GBps", "value"), float("nan"), 'm.json: h2d_GBps=nan is no number; try "h2d_GBps": 1'),
    (("numbers", "wake_ns", "value"), -1, 'm.json: wake_ns=-1 must not be negative; try "wake_ns": 0'),
    (("numbers", "queue_depth", "value"), 0.5, 'm.json: queue_depth=0.5 must be a whole number, 1 or more; try "queue_depth": 1'),
    (("numbers", "peak_name", "value"), 5, 'm.json: peak_name must be words; try "peak_name": {"value": "published dense bf16", "source": "..."}'),
    (("fits", "qkv", "fixed_ns"), DELETE, 'm.json: fits.qkv.fixed_ns is missing; try "fixed_ns": 0'),
    (("fits", "qkv", "fixed_ns"), -7, 'm.json: fits.qkv.fixed_ns=-7 must not be negative; try "fixed_ns": 0'),
    (("slowdown", "compute|pcie"), {}, "unknown stream in m.json: slowdown 'compute|pcie': 'pcie'; closest: comm, compute, d2h, h2d"),
    (("slowdown", "compute|h2d"), {"h2d": 1}, 'm.json: slowdown.compute|h2d.compute is missing; try "compute": 1'),
    (("numbers", "kernel"), {"value": "cuDNN forward, cudn backward", "source": "measured: today"}, "unknown kernel in m.json: 'cudn'; closest: cuDNN"),
    (("numbers", "kernel"), "cuDNN", 'm.json: numbers.kernel must be an object; try {"value": 1, "source": "assumed: why"}'),
    (("numbers", "kernel"), {"value": 3, "source": "x"}, 'm.json: kernel=3 is no name; try "kernel": {"value": "torch flash (FA2)", "source": "..."}'),
    (("numbers", "dtype"), {"value": 3, "source": "x"}, 'm.json: dtype=3 is no name; try "dtype": {"value": "bf16", "source": "..."}'),
    (("fits", "qkv", "bend"), [[1000, 1.0, 2.0]], 'm.json: fits.qkv.bend must be pairs of ns and a factor; try "bend": [[1000, 1.0]]'),
    (("fits", "qkv", "bend"), [[1000, 0]], 'm.json: fits.qkv.bend=0 must be positive; try "bend": 1'),
    (("fits", "qkv", "bend"), [[1000, 1], [1000, 2]], "m.json: fits.qkv.bend must ascend in ns; sort it"),
    (("numbers", "pin_GBps"), {"value": 0, "source": "measured: today"}, 'm.json: pin_GBps=0 must be positive; try "pin_GBps": 1'),
    (("points",), {"name": "h2d"}, 'm.json: points must be a list of objects that have a name; try "points": []'),
    (("points",), [{"name": "h2d", "args": 4}], 'm.json: points.h2d has args that are no names and values; try "args": {"bytes": 4}'),
    (("points",), [{"name": "h2d", "args": {"bytes": [4]}}], 'm.json: points.h2d has args that are no names and values; try "args": {"bytes": 4}'),
    (("points",), [{"name": "h2d", "ns": "7"}], 'm.json: points.h2d.ns=7 is no number; try "ns": 0'),
    (("points",), [{"name": "attention forward", "args": {"kernel": "cuDN"}}], "unknown kernel in m.json: points.attention forward 'cuDN'; closest: cuDNN"),
    (("points",), [{"name": "attention backward", "args": {}}], "unknown kernel in m.json: points.attention backward 'None'; closest: cuDNN, flash-attn-2, flash-attn-3, flash-attn-4, torch CPU flash, torch flash (FA2)"),
    (("format",), DELETE, "m.json: its cost curves are of format 1, as another version of fpdt wrote them, and this one reads 2; calibrate again, it takes minutes"),
    (("format",), "2", "m.json: its cost curves are of format '2', as another version of fpdt wrote them, and this one reads 2; calibrate again, it takes minutes"),
    (("format",), 3, "m.json: its cost curves are of format 3, as another version of fpdt wrote them, and this one reads 2; calibrate again, it takes minutes"),
    (("kind",), "tpu", 'm.json: kind \'tpu\' must be cuda or cpu; try "kind": "cuda"'),
    (("numbers",), DELETE, 'm.json: "numbers" is missing; a machine has name, kind and numbers, copy a preset'),
]


@pytest.mark.parametrize("where, value, line", BROKEN)
def test_a_broken_file_gets_one_line(tmp_path, where, value, line):
    tiny_machine().save(tmp_path / "m.json")
    data = json.loads((tmp_path / "m.json").read_text())
    inner = data
    for name in where[:-1]:
        inner = inner[name]
    if value is DELETE:
        del inner[where[-1]]
    else:
        inner[where[-1]] = value
    (tmp_path / "m.json").write_text(json.dumps(data))
    with pytest.raises(UserError) as error:
        load(tmp_path / "m.json")
    assert str(error.value).replace(str(tmp_path) + "/", "") == line


def test_a_file_that_is_no_json_gets_one_line(tmp_path):
    (tmp_path / "m.json").write_text("{")
    with pytest.raises(UserError, match="not JSON"):
        load(tmp_path / "m.json")
    with pytest.raises(UserError, match="cannot be read"):
        machine("no-such-file.json")
