"""The fpdt command: what it prints, writes and leaves unimported. Errors are in test_errors.py."""
import dataclasses
import json
import shlex
import subprocess
import sys

import pytest

from experiments import cli
from sim import text, timeline
from sim.strategy import Strategy

SIMULATE = "simulate llama3-8b --machine a100-80g-sxm --gpus 4 --layers 2 --seq 128K --chunk 32K --json"
KEYS = ["step_s", "fwd_s", "bwd_s", "mfu_causal", "mfu_palm", "hfu", "mfu_megatron_ds", "hbm_peak_bytes", "host_peak_bytes", "fits", "binding", "overlap", "assumptions"]


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
    assert ("Fields and defaults: sp=1, chunk=64K, prefetch=2, offload=true, save=qkvo, order=query-up, accum=hbm, hidden=hbm, rows=ascending, "
            "skip_resident=false, reuse_slack=0, ffn_sub=2, loss_sub=32, zero=3, host_sync=none.") in said


def test_capacities_decide_whether_it_fits(fpdt):
    tight = json.loads(fpdt(SIMULATE + " --hbm 1GiB"))
    assert (tight["fits"], tight["binding"]) == (False, "hbm")
    tight = json.loads(fpdt(SIMULATE + " --host 1GiB"))
    assert (tight["fits"], tight["binding"]) == (False, "host")
    assert json.loads(fpdt(SIMULATE + " --no-offload"))["host_peak_bytes"] == 0


def test_padding_is_said(fpdt):
    said = [line for line in json.loads(fpdt(SIMULATE.replace("128K", "131071")))["assumptions"] if "padded" in line]
    assert said == ["S=131071 is padded to 131072, a multiple of P=4, with ignored labels"]


def test_set_reaches_every_strategy_field(fpdt, tmp_path):
    values = {"sp": 2, "chunk": 8192, "prefetch": 3, "offload": True, "hidden": "host", "save": "qkvo", "order": "query-up", "ffn_sub": 1, "loss_sub": 4, "zero": 0, "host_sync": "region",
              "accum": "host", "skip_resident": True, "rows": "alternating", "reuse_slack": 4}
    assert set(values) == {f.name for f in dataclasses.fields(Strategy)}
    path = tmp_path / "timeline.json"
    settings = " ".join(f"--set {name}={value}" for name, value in values.items())
    fpdt(f"simulate llama3-8b --machine a100-80g-sxm --layers 1 --seq 32K {settings} --save-timeline {path}")
    assert timeline.load(path).meta["strategy"] == values
    assert [p.name for p in tmp_path.iterdir()] == ["timeline.json"]


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
    assert all(key in said for key in KEYS[:-1])


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
