"""The bars of a block: judged right on rows made by hand, and a plan runs, resumes and says why a row is missing."""
from __future__ import annotations

import json
import sys

import pytest

from experiments import bench_block
from experiments.block_bars import PEERS, judge, weights_bytes
from sim.model import model

SPEC = {"part": "block", "gpu": "NVIDIA H200", "peak_hbm_bytes": 10}


def rows(*given: tuple) -> dict:
    """(key, seconds, more)."""
    return {key: SPEC | {"name": key.split()[0], "S": key.split()[1][2:], "C": key.split()[2][2:], "row": key.split()[-1], "median_total_s": s} | more
            for key, s, more in given}


def judged(folder, **files: dict) -> dict[str, dict]:
    for stem, found in files.items():
        (folder / f"{stem.replace('_', '-')}.json").write_text(json.dumps({"gpus": 2, "rows": found}))
    return {line["bar"]: line for line in judge(folder)}


def test_offload_bound_mfu_and_issue(tmp_path):
    found = judged(tmp_path, offload_2gpu=rows(
        ("llama3-8b S=512K C=32K engine", 8.0, {"ops": 10_000, "issue_us": 40.0}), ("llama3-8b S=512K C=32K resident", 7.8, {}),
        ("llama3-8b S=512K C=32K bound", 7.0, {}), ("gpt-6.7b S=256K C=8K engine", 1.0, {"ops": 9000, "issue_us": 20.0}), ("gpt-6.7b S=256K C=8K resident", 0.89, {}),
    ))
    case = "llama3-8b S=512K C=32K"
    flops = 6 * 2**19 * (model("llama3-8b").block_params - 2 * 4096) + 6 * 2**38 * 4096
    assert {bar: (line["value"], line["holds"]) for bar, line in found.items()} == {
        f"{case}: resident / offloaded": (0.975, True),
        f"{case}: kernel bound / step": (0.875, False),
        f"{case}: mfu_causal": (round(flops / (8.0 * 2 * 989e12), 4), False),
        f"{case}: host time to issue / step": (0.05, True),
        "gpt-6.7b S=256K C=8K: resident / offloaded": (0.89, True),
    }


def test_memory(tmp_path):
    fixed = weights_bytes(model("llama3-8b"))
    assert fixed == 6 * (4096 * (4096 + 2048 + 4096) + 3 * 4096 * 14336 + 2 * 4096)
    found = judged(tmp_path, memory_2gpu=rows(*(
        (f"llama3-8b S={S} C={C} hidden=host engine", 1.0, {"peak_hbm_bytes": fixed + extra})
        for S, C, extra in (("128K", "16K", 560), ("128K", "32K", 1000), ("1M", "32K", 1000 + fixed // 50)))))
    equal, half = found.values()
    assert equal["bar"] == "HBM peaks at C=32K, S from 128K 1M: largest / smallest - 1" and (equal["value"], equal["holds"]) == (0.02, False)
    assert (half["value"], half["holds"]) == (0.56, False)


def test_memory_of_a_run_that_was_interrupted_is_missed(tmp_path):
    line, = judged(tmp_path, memory_2gpu=rows(("llama3-8b S=128K C=16K hidden=host engine", 1.0, {"peak_hbm_bytes": 560}))).values()
    assert (line["value"], line["holds"]) == (1, False)


@pytest.mark.parametrize("command, error", [
    ("judge", "none of bench_block's files"), ("memory --gpus 1", "none of bench_block's files"), ("memory --gpus 3", "32 query heads are not divisible by P=3"),
    ("memory --gpus 1 --out odd.json/x", "is no folder to write in"),
])
def test_what_is_wrong_is_said_in_a_line_before_anything_runs(tmp_path, monkeypatch, capsys, command, error):
    monkeypatch.chdir(tmp_path)
    for name in ("memory-1gpu.json", "odd.json"):
        (tmp_path / name).write_text('{"rows": {"a"')
    monkeypatch.setattr(sys, "argv", ["bench_block", *("--out . " + command).split()])
    monkeypatch.setattr(bench_block, "measure", lambda *_: pytest.fail("it ran"))
    with pytest.raises(SystemExit) as stop:
        bench_block.main()
    said = capsys.readouterr().err
    assert stop.value.code == 2 and said.count("\n") == 1 and error in said


def test_peers_take_the_median_of_processes(tmp_path):
    def process(mine: float, theirs: float) -> dict:
        return rows(("llama3-8b S=512K C=64K engine", mine, {}), ("llama3-8b S=512K C=64K deepspeed", theirs, {"peak_hbm_bytes": 12}))

    found = judged(tmp_path, peers_2gpu_p1=process(7.0, 13.0), peers_2gpu_p2=process(8.0, 16.0), peers_2gpu_p3=process(7.5, 20.0))
    ratio, peak = found.values()
    assert ratio["bar"] == "llama3-8b S=512K C=64K: DeepSpeed / engine, 3 processes" and (ratio["value"], ratio["holds"]) == (round(16 / 7.5, 4), True)
    assert (peak["value"], peak["holds"]) == (round(10 / 12, 4), True)


def test_every_plan_has_the_rows_its_bars_read():
    keys = {plan: {key for key, _ in rows(2)} for plan, rows in bench_block.PLANS.items()}
    assert {key for case, (other, _) in PEERS.items() for key in (f"{case.removesuffix(' against FA2')} engine", other)} <= keys["peers"]
    assert len(keys["offload"]) == 2 * 2 * 3 * 2 + 2 * 2 + 2 * 2
    assert {key.split()[1] for key in keys["memory"] if "C=32K" in key} == {"S=128K", "S=256K", "S=512K", "S=1M"}


def test_a_plan_runs_and_goes_on(tmp_path, monkeypatch, capsys):
    def tiny(P: int):
        yield from bench_block.row("demo", "512", "128", "engine", repeats=1, **bench_block.HOST)
        yield from bench_block.row("demo", "512", "128", "deepspeed bound", repeats=1)

    monkeypatch.setitem(bench_block.PLANS, "memory", tiny)
    path = tmp_path / "memory-1gpu.json"
    monkeypatch.setattr(sys, "argv", ["bench_block", "memory", "--gpus", "1", "--out", str(tmp_path), "--only", "hidden=host|none"])
    bench_block.main()
    assert len(json.loads(path.read_text())["rows"]) == 1
    monkeypatch.setattr(sys, "argv", sys.argv[:-2])
    bench_block.main()
    first = json.loads(path.read_text())
    key = "demo S=512 C=128 hidden=host accum=host engine"
    assert list(first["rows"]) == [key, "demo S=512 C=128 deepspeed", "demo S=512 C=128 bound"]
    assert "attention half" in first["rows"]["demo S=512 C=128 deepspeed"]["reason"]
    assert first["rows"][key]["ops"] > 50 and first["rows"][key]["issue_us"] > 0
    del first["rows"]["demo S=512 C=128 bound"]
    path.write_text(json.dumps(first))
    bench_block.main()
    second = json.loads(path.read_text())["rows"]
    assert second[key] == first["rows"][key] and "median_total_s" in second["demo S=512 C=128 bound"]
