"""The fpdt command: what it prints, writes and leaves unimported. Errors are in test_errors.py."""
import dataclasses
import json
import shlex
import subprocess
import sys

import pytest

from experiments import cli
from sim import text, timeline, upstream
from sim.schedule import Schedule
from sim.strategy import Strategy
from sim.units import show_tokens
from tests.sim.tiny import tiny_machine

SIMULATE = "simulate llama3-8b --machine a100-80g-sxm --gpus 4 --layers 2 --seq 128K --chunk 32K --json"
KEYS = ["step_s", "fwd_s", "bwd_s", "mfu_causal", "mfu_palm", "hfu", "mfu_megatron_ds", "hbm_peak_bytes", "hbm_reserved_bytes", "host_peak_bytes", "fits", "binding", "overlap", "assumptions"]


@pytest.fixture
def fpdt(capsys):
    """Runs a command that has to succeed; returns what it printed."""

    def run(command: str) -> str:
        with pytest.raises(SystemExit) as stop:
            cli.main(shlex.split(command))
        out, err = capsys.readouterr()
        assert stop.value.code == 0 and err == ""
        return out

    return run


def test_json_keys(fpdt):
    result = json.loads(fpdt(SIMULATE))
    assert list(result) == ["inputs", *KEYS]
    assert result["step_s"] >= result["fwd_s"] + result["bwd_s"] > 0
    assert result["fits"] is True and 0 < result["mfu_causal"] < result["mfu_palm"] < 1


def test_json_has_its_inputs(fpdt):
    inputs = json.loads(fpdt(SIMULATE.replace("128K", "131071") + " --set prefetch=3 --no-offload"))["inputs"]
    assert inputs == {"model": "llama3-8b", "layers": 2, "machine": "a100-80g-sxm", "seq": 131071, "chunk": 32768, "gpus": 4, "dtype": "bf16",
                      "strategy": dataclasses.asdict(Strategy(sp=4, chunk=32768, prefetch=3, offload=False))}


def test_help_lists_the_fields_of_set_with_their_defaults(fpdt):
    said = " ".join(fpdt("simulate --help").replace("│", " ").split())
    assert ("Fields and defaults: sp=1, chunk=64K, prefetch=2, offload=true, resident=0, save=qkvo, order=query-up, accum=hbm, hidden=hbm, rows=ascending, "
            "skip_resident=false, reuse_slack=0, ffn_sub=2, loss_sub=32, zero=3, host_sync=none, alloc=plan, merge=fused, a2a=together, "
            "lookahead=1, copy_streams=2, input=host, reload_first=false.") in said


def test_capacities_decide_whether_it_fits(fpdt):
    tight = json.loads(fpdt(SIMULATE + " --hbm 1GiB"))
    assert (tight["fits"], tight["binding"]) == (False, "hbm")
    tight = json.loads(fpdt(SIMULATE + " --host 1GiB"))
    assert (tight["fits"], tight["binding"]) == (False, "host")
    assert json.loads(fpdt(SIMULATE + " --no-offload"))["host_peak_bytes"] == 0


def test_the_longest_sequence_that_fits(fpdt):
    said = fpdt("longest llama3-8b --machine a100-80g-sxm --gpus 4 --layers 2 --hbm 16GiB")
    tokens = json.loads(fpdt("longest llama3-8b --machine a100-80g-sxm --gpus 4 --layers 2 --hbm 16GiB --json"))["seq"]
    assert said == f"llama3-8b, 2 layers, on a100-80g-sxm, C=64K P=4 bf16: S={show_tokens(tokens)} fits, and nothing longer of 2^k and 3 x 2^k\n"
    fits = [json.loads(fpdt(SIMULATE.replace("--seq 128K --chunk 32K", f"--seq {S} --chunk 64K --hbm 16GiB")))["fits"] for S in (tokens, tokens // 2 * 3 if tokens % 3 else tokens // 3 * 4)]
    assert fits == [True, False]
    assert "no S fits" in fpdt("longest llama3-8b --machine a100-80g-sxm --hbm 1GiB")


def test_the_parts_of_a_peak_sum_to_it(fpdt):
    lines = [line.split() for line in fpdt(SIMULATE.replace("--json", "")).splitlines()]
    GiB = {line[0]: float(line[1]) / (1024 if line[2] == "MiB" else 1) for line in lines if len(line) > 2 and line[2] in ("GiB", "MiB")}
    assert sum(GiB[part] for part in ("planned", "arguments", "workspace", "states")) == pytest.approx(GiB["hbm_peak_bytes"], abs=0.02)
    tokens, = (float(line[1]) for line in lines if line[:1] == ["tokens/s"])
    assert tokens == pytest.approx((128 << 10) / json.loads(fpdt(SIMULATE))["step_s"], abs=0.5)


def test_padding_is_said(fpdt):
    said = [line for line in json.loads(fpdt(SIMULATE.replace("128K", "131071")))["assumptions"] if "padded" in line]
    assert said == ["S=131071 is padded to 131072, a multiple of P=4, with ignored labels"]


def test_set_reaches_every_strategy_field(fpdt, tmp_path):
    values = {"sp": 2, "chunk": 8192, "prefetch": 3, "offload": True, "resident": 0.5, "save": "qkvo", "order": "query-up", "ffn_sub": 1, "loss_sub": 4, "zero": 0, "host_sync": "region",
              "accum": "host", "hidden": "host", "skip_resident": True, "rows": "alternating", "reuse_slack": 4, "alloc": "chunk", "merge": "separate",
              "a2a": "apart", "lookahead": 0, "copy_streams": 1, "input": "hbm", "reload_first": True}
    assert set(values) == {f.name for f in dataclasses.fields(Strategy)}
    path = tmp_path / "timeline.json"
    settings = " ".join(f"--set {name}={value}" for name, value in values.items())
    fpdt(f"simulate llama3-8b --machine a100-80g-sxm --layers 1 --seq 32K {settings} --save-timeline {path}")
    assert timeline.load(path).meta["strategy"] == values
    assert [p.name for p in tmp_path.iterdir()] == ["timeline.json"]


def test_a_strategy_by_name_and_what_is_set_beside_it(fpdt):
    found = json.loads(fpdt(SIMULATE + " --strategy fpdt-upstream --set host_sync=none --set prefetch=3"))["inputs"]["strategy"]
    assert found == dataclasses.asdict(Strategy(sp=4, chunk=32768, **upstream.FIELDS).replace(host_sync="none", prefetch=3))
    assert "host     fwd.pin.kv[0]" in fpdt("show demo --gpus 2 --seq 1K --chunk 256 --strategy fpdt-upstream")


def test_what_each_term_of_the_released_code_costs(fpdt):
    """llama3-8b, S = 256K on two H200s: 3.5 GiB and 16 MiB are pinned in forward, at 2.86 GB/s, while the device has nothing to do."""
    command = "explain-upstream llama3-8b --gpus 2 --seq 256K --chunk 64K --machine h200-141g-sxm"
    found = json.loads(fpdt(f"{command} --json"))
    terms = {t["term"]: t for t in found["terms"]}
    assert list(terms) == [t.name for t in upstream.TERMS]
    assert terms["pinned allocation"]["forward_ms"] == pytest.approx((3.5 * 2**30 + 2**24) / 2.86e6, rel=0.01)
    assert 0 < found["ours_forward_ms"] < found["forward_ms"] and 0 < found["ours_backward_ms"] < found["backward_ms"]
    assert found["measured"] == [{"model": "llama3-8b", "gpus": "2", "seq": "256K", "chunk": "64K", "kernel": "cuDNN", "pinned": "chunk", "ours": "prototype",
                                  "ours_fwd_ms": 523, "ours_bwd_ms": 1414, "fpdt_fwd_ms": 1624, "fpdt_bwd_ms": 2607}]
    assert found["cached_forward_ms"] == pytest.approx(found["forward_ms"] - terms["pinned allocation"]["forward_ms"])
    zeroed = found["cached_backward_ms"] - (found["backward_ms"] - terms["pinned allocation"]["backward_ms"])
    assert 0.8 < zeroed / (3 * 2**29 / 10e6) < 1  # fp32 dq of three chunks, 0.5 GiB each, at 10 GB/s, a part of it beside the device's work
    said = fpdt(command)
    assert "backward, memory pinned anew" in said and "zero_GBps: assumed: one thread of a host writes about 10 GB/s" in said
    assert json.loads(fpdt(command.replace("256K", "128K").replace("64K", "32K") + " --part block --json"))["measured"] == []


def test_the_released_code_stays_as_it_is_whatever_ours_does(fpdt):
    command = "explain-upstream llama3-8b --gpus 2 --seq 256K --chunk 64K --machine h200-141g-sxm --json"
    plain = json.loads(fpdt(command))
    ours = {"ours_forward_ms", "ours_backward_ms"}
    for settings in ("--set offload=false", "--set resident=0.5 --set input=hbm", "--set hidden=host --set save=all", "--set order=auto"):
        found = json.loads(fpdt(f"{command} {settings}"))
        assert {k: v for k, v in found.items() if k not in ours | {"inputs"}} == {k: v for k, v in plain.items() if k not in ours | {"inputs"}}
        assert ("auto" in settings) == found["inputs"].get("auto", "").startswith("auto: order=")
        assert "auto" in settings or any(found[key] != plain[key] for key in ours)
    assert fpdt(f"{command.removesuffix(' --json')} --set order=auto").startswith("auto: order=")


AUTO = "auto: resident=1, "


@pytest.fixture
def slow(tmp_path) -> str:
    """The file of a machine whose reloads take a second, for which all KV stays."""
    tiny_machine(ns={"reload": 10**9}, hbm_bytes=1 << 40, host_bytes=1 << 40).save(tmp_path / "slow.json")
    return str(tmp_path / "slow.json")


def test_auto_is_chosen_and_said(fpdt, slow):
    """Beside the result: in a line of its own, or among the inputs."""
    command = f"simulate demo --machine {slow} --seq 4K --chunk 1K"
    inputs = json.loads(fpdt(f"{command} --set resident=auto --json"))["inputs"]
    assert inputs["strategy"]["resident"] == 1.0 and inputs["auto"].startswith(AUTO)
    assert fpdt(f"{command} --set resident=auto").splitlines()[0] == inputs["auto"]
    assert "auto" not in json.loads(fpdt(f"{command} --json"))["inputs"]


def test_show_says_what_is_chosen_on_stderr(slow, capsys):
    printed = []
    for settings in (f"resident=auto --machine {slow}", "resident=1"):
        with pytest.raises(SystemExit) as stop:
            cli.main(shlex.split(f"show demo --seq 4K --chunk 1K --set {settings}"))
        printed.append(capsys.readouterr())
        assert stop.value.code == 0
    assert printed[0].out == printed[1].out and printed[0].err.startswith(AUTO) and printed[1].err == ""


@pytest.mark.parametrize("command, module, stop_at", [
    ("compare demo --seq 4K --chunk 1K", "experiments.compare", "_compare"), ("bench demo --seq 4K --chunk 1K", "experiments.bench", "cases"),
    ("train demo --seq 4K --chunk 1K", "experiments.train", "train_command")])
def test_what_runs_here_runs_what_was_chosen(command, module, stop_at, slow, tmp_path, monkeypatch, capsys):
    """The strategy and the schedule that the run is started with have no auto left."""
    found = []

    def stop(*given, **_):
        found.extend(each for each in given if isinstance(each, (Strategy, Schedule)))
        raise KeyboardInterrupt

    monkeypatch.setattr(f"{module}.{stop_at}", stop)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        cli.main(shlex.split(f"{command} --set resident=auto --machine {slow}"))
    assert found and all(each.resident == 1.0 for each in found if isinstance(each, Strategy))
    assert all(b.space == "hbm" for each in found if isinstance(each, Schedule) for b in each.saved.values() if b.role == "kv")
    assert AUTO in "".join(capsys.readouterr())


def test_show_writes_what_lint_reads(fpdt, tmp_path):
    path = tmp_path / "schedule.txt"
    command = "show demo --gpus 2 --seq 1K --chunk 256 --dtype fp32"
    assert fpdt(f"{command} --out {path}") == ""
    assert path.read_text() == fpdt(command)
    assert text.parse(path.read_text()).dtype == "fp32"
    assert fpdt(f"lint {path}").startswith("schedule.txt: 136 ops, order and data proved; ")


def test_tables(fpdt):
    named = [line.split()[0] for line in fpdt("models").splitlines() if line.strip()]
    assert named[-8:] == ["demo", "llama3-8b", "llama3-70b", "gpt-1.2b", "gpt-2.7b", "gpt-6.7b", "gpt-13b", "gpt-30b"]
    assert {"a100-40g-sxm", "a100-80g-sxm", "h100-80g-sxm", "h200-141g-sxm"} <= {line.split()[0] for line in fpdt("machines").splitlines() if line.strip()}
    assert "published: NVIDIA A100 datasheet" in fpdt("machines a100-80g-sxm")
    said = fpdt(SIMULATE.replace(" --json", ""))
    assert "S=128K C=32K u=4 P=4 bf16" in said
    assert all(key in said for key in KEYS[:-1] if key != "hbm_reserved_bytes") and "  reserved" in said


def test_simulate_imports_neither_torch_nor_matplotlib():
    code = f"""
import sys
from experiments.cli import main
try:
    main({shlex.split(SIMULATE)!r})
except SystemExit:
    pass
print({{"torch", "matplotlib", "scipy", "rich"}} & set(sys.modules), file=sys.stderr)
"""
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ran.stderr, ran.returncode) == ("set()\n", 0)
