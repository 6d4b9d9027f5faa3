"""Rows of the bench: each is right against fp64, on one rank and on two; the bound multiplies what the schedule does; what cannot run says why."""
from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import pytest
import torch

from engine.backend.cpu import CpuBackend
from engine.kernels import cpu_flash
from experiments import bench, cli
from experiments.peers import bound, flash, ring
from experiments.peers.case import Place, one_call
from sim import text
from sim.build.step import build
from sim.errors import UserError
from sim.ops import KINDS
from sim.strategy import Strategy
from tests.engine.cases import tiny
from tests.engine.ranks import Ranks
from tests.peers import rehearsal

MODELS = {"gqa": tiny(4, 2), "one-kv": tiny(4, 1), "gpt": tiny(4, 4, kind="gpt")}
BAR = 1e-6
"""fp32; the engine's own is 2e-6 for one piece."""


@pytest.fixture(scope="module")
def ranks():
    """ranks(P) that stay for all tests here; one alone has a process too, as some peers set up a process group."""
    pools: dict[int, Ranks] = {}

    def pool(P: int) -> Ranks:
        if P not in pools or not pools[P].alive:
            pools[P] = Ranks(P)
        return pools[P]

    yield pool
    for each in pools.values():
        each.close()


def case(row: str, model, P: int, part: str, seq: int = 256, **settings):
    return bench.cases(model, Strategy(sp=P, chunk=64, **settings), seq, "fp32", part, [row], 2, "cpu")[row]


@pytest.mark.parametrize("part", ("block", "attention"))
@pytest.mark.parametrize("row", ("engine", "resident", "ulysses", "ring"))
@pytest.mark.parametrize("P", (1, 2), ids="P{}".format)
@pytest.mark.parametrize("model", MODELS)
def test_a_row_is_right(ranks, model, P, row, part):
    for found in ranks(P).run(rehearsal.errors, case(row, MODELS[model], P, part)):
        assert 0 < found["error_y"] < BAR and 0 < found["error_dx"] < BAR


@pytest.mark.parametrize("P", (1, 2), ids="P{}".format)
def test_hidden_states_on_the_host_are_right(ranks, P):
    for found in ranks(P).run(rehearsal.errors, case("engine", MODELS["gqa"], P, "block", hidden="host", accum="host")):
        assert 0 < found["error_y"] < BAR and 0 < found["error_dx"] < BAR


def test_a_wrong_row_is_seen(ranks):
    one, = ranks(1).run(rehearsal.errors_without_rope, case("ulysses", MODELS["gqa"], 1, "attention"))
    assert one["error_y"] > 0.01 and one["error_dx"] > 0.01


@pytest.mark.parametrize("row", ("engine", "bound"))
def test_a_row_is_measured(ranks, row):
    slowest = ranks(2).run(rehearsal.row, case(row, MODELS["gqa"], 2, "block"))
    assert slowest[0]["total_s"] == slowest[1]["total_s"] and len(slowest[0]["total_s"]) == 2
    assert all(0 < forward < total for forward, total in zip(slowest[0]["forward_s"], slowest[0]["total_s"]))
    assert (slowest[0]["kernel"], slowest[0]["peak_hbm_bytes"]) == (cpu_flash.NAME, None)
    if row == "engine":
        s = text.parse(case(row, MODELS["gqa"], 2, "block").schedule)
        assert slowest[0]["ops"] == sum(op.stream != "host" for region in ("fwd", "bwd") for op in s.regions[region].ops)


@pytest.mark.parametrize("save", ("all", "qkvo", "o", "input"))
@pytest.mark.parametrize("model", MODELS)
def test_the_bound_multiplies_what_the_schedule_does(model, save):
    s = build(MODELS[model], Strategy(sp=2, chunk=60, save=save, ffn_sub=4), 250, "fp32")
    for region in ("fwd", "bwd"):
        ours = bound.ops(s, region, "block")
        assert [op.id for op in ours] == [op.id for op in s.regions[region].ops if op.stream == "compute"]
        for op in ours:
            assert sum(2 * T * N * M for _, T, N, M in bound.products(op, s)) == KINDS[op.kind].work(op, s).gemm_flops, op.id
        half = bound.ops(s, region, "attention")
        assert {op.kind for op in ours} - {op.kind for op in half} == {"ffn" if region == "fwd" else "ffn_bwd"}


def test_the_engine_s_attention_half_has_the_model_s_attention():
    model = MODELS["gqa"]
    half, block = (text.parse(case("engine", model, 1, part).schedule) for part in ("attention", "block"))
    assert block.model == model and (half.model.ffn, half.model.weight_shapes()["Wq"]) == (bench.NO_FFN, model.weight_shapes()["Wq"])


@pytest.mark.parametrize("causal", (False, True))
def test_flash_attn_s_name_has_the_kernel_behind_it(causal):
    q, k, v, dout = (torch.randn(1, 24, heads, 16) for heads in (4, 2, 2, 4))
    interface = flash._Interface("any")
    forward, backward = interface._flash_attn_forward, interface._flash_attn_backward  # as a peer has imported them
    interface.kernel = cpu_flash
    out, _, _, _, _, lse, _, _ = forward(q, k, v, 0.0, 0.25, causal=causal, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, return_softmax=False)
    grads = [torch.empty_like(t) for t in (q, k, v)]
    backward(dout, q, k, v, out, lse, *grads, 0.0, 0.25, causal, (-1, -1), softcap=0.0, alibi_slopes=None, deterministic=False, rng_state=None)
    given = [t.double().transpose(1, 2).requires_grad_() for t in (q, k, v)]
    right = torch.nn.functional.scaled_dot_product_attention(*given, is_causal=causal, enable_gqa=True)
    right.backward(dout.double().transpose(1, 2))
    for mine, its in zip((out, *grads), (right, *(t.grad for t in given))):
        torch.testing.assert_close(mine.transpose(1, 2).double(), its, rtol=1e-4, atol=1e-5)


def test_a_peer_gets_the_kernel_of_the_latest_row():
    """It has imported the functions once, and rows of other kernels follow in the same process."""
    with patch.dict(sys.modules, {"flash_attn": ModuleType("flash_attn")}):  # as flash-attn 4 alone leaves it
        assert flash.install(SimpleNamespace(forward=lambda q, kv, causal: (q, q)))
        from flash_attn.flash_attn_interface import _flash_attn_forward

        assert flash.install(SimpleNamespace(forward=lambda q, kv, causal: (q + 1, q)))
        out, *_ = _flash_attn_forward(*[torch.zeros(1, 2, 1, 8)] * 3, 0.0, 1.0, False)
        assert out.unique().tolist() == [1.0]


def test_flops_are_those_of_a_step_without_its_head():
    from sim.metrics import model_flops

    m = MODELS["gqa"]
    whole = model_flops(m, 640, "all")["mfu_causal"]
    assert bench.causal_flops(m, 640, "block") == whole - 6 * 640 * m.vocab * m.hidden
    assert bench.causal_flops(m, 640, "block") - bench.causal_flops(m, 640, "attention") == 6 * 640 * 3 * m.hidden * m.ffn


def test_peaks_are_known_or_not():
    rows = [{"reason": "none"}, {"gpu": "NVIDIA H200"}]
    assert bench.peak_TFLOPS(rows, "bf16", None) == 989
    assert bench.peak_TFLOPS(rows, "fp32", None) is None
    assert bench.peak_TFLOPS([{"gpu": "NVIDIA T4"}], "bf16", None) is None


def test_rows_by_name():
    assert bench.chosen_rows("deepspeed,bound,bound") == ["deepspeed", "deepspeed-resident", "bound"]


def test_the_command_says_why_a_row_is_missing(tmp_path, monkeypatch, capsys):
    """DeepSpeed is missing here, or made to be."""
    (tmp_path / "deepspeed.py").write_text("raise ModuleNotFoundError(\"No module named 'deepspeed'\")\n")
    monkeypatch.syspath_prepend(tmp_path)
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as stop:
        cli.main(["bench", "demo", *"--seq 256 --chunk 128 --part attention --rows ulysses,deepspeed --repeats 1 --out".split(), str(out)])
    said = capsys.readouterr().out
    assert stop.value.code == 0
    lines = {line.split()[0]: line for line in said.splitlines() if line.split()[:1] and line.split()[0] in bench.ROWS}
    rows = {row["row"]: row for row in json.loads((out / "bench.json").read_text())["rows"]}
    for name in ("deepspeed", "deepspeed-resident"):
        assert rows[name]["reason"].startswith("deepspeed does not import (No module named 'deepspeed'); install it with")
    for name in ("deepspeed", "deepspeed-resident"):
        assert f"{name:<18}  {rows[name]['reason']}" in said.splitlines()
    assert rows["ulysses"]["error_y"] < BAR and set(lines) >= set(rows)


def test_ring_attention_has_no_kernel_for_cpus():
    streams = CpuBackend()
    try:
        with pytest.raises(UserError, match="torch's context parallel has no attention kernel for CPUs"):
            ring.Ring(build(MODELS["gqa"], Strategy(chunk=64), 128, "fp32"), "block", {}, Place(0, None, streams.device, streams, cpu_flash))
    finally:
        streams.close()


def test_an_interrupted_run_goes_on(tmp_path):
    path, head = Path(tmp_path, "bench.json"), {"provenance": "here", "inputs": {"seq": 8}}
    rows = [{"row": "bound", "total_s": [1]}, {"row": "ring", "reason": "died"}]
    assert bench.earlier(path, head) == {}
    for finished, there, kept in ((False, head, {"bound"}), (True, head, set()), (False, head | {"provenance": "there"}, set())):
        path.write_text(json.dumps(there | {"finished": finished, "rows": rows}))
        assert set(bench.earlier(path, head)) == kept


@pytest.mark.parametrize("record", ('{"finished": fal', "[1]", "[" * 100_000, None), ids=("cut short", "a list", "brackets", "a folder"))
def test_a_record_of_another_make_is_refused(tmp_path, record):
    path = tmp_path / "bench.json"
    path.mkdir() if record is None else path.write_text(record)
    with pytest.raises(UserError, match="bench.json is no record of fpdt bench .*; name another folder with --out"):
        bench.earlier(path, {})


def test_a_kernel_that_is_not_here_is_not_replaced_by_another(tmp_path, capsys, monkeypatch):
    """On a CPU any name was taken, written down with the result, and not used."""
    monkeypatch.chdir(tmp_path)
    for name in ("nope", "cudnn"):
        with pytest.raises(SystemExit) as stop:
            cli.main(["bench", "demo", "--seq", "256", "--chunk", "128", "--rows", "engine", "--kernel", name])
        assert stop.value.code == 2 and capsys.readouterr().err == f"fpdt: unknown attention kernel on cpu '{name}'; closest: cpu_flash\n"
    assert not list(tmp_path.iterdir())


def test_a_whole_sequence_is_not_given_to_a_kernel_that_is_wrong_on_it():
    s = build(MODELS["gpt"], Strategy(sp=2, chunk=1 << 24), 1 << 26, "bf16")
    one_call(s, cpu_flash.NAME)
    with pytest.raises(UserError, match="wrong gradients of keys from 2147483648 elements a tensor on, and S in one call has 2147483648"):
        one_call(s, "flash-attn-4 and cuDNN")
