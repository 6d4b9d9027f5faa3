"""fpdt explain: what it prints of two tiny timelines, as text and as JSON, and its errors in one line."""
import json

import pytest

from experiments import cli
from sim import text
from tests.sim.test_explain import A, B, hand


@pytest.fixture
def fpdt(capsys, tmp_path, monkeypatch):
    """Runs a command where a.json and b.json are; returns (exit code, stdout, stderr)."""
    monkeypatch.chdir(tmp_path)
    hand(A).save("a.json")
    hand(B).save("b.json")
    hand(A, None).save("bare.json")

    def run(*command: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            cli.main(list(command))
        return stop.value.code, *capsys.readouterr()

    return run


def test_json(fpdt):
    code, out, err = fpdt("explain", "a.json", "b.json", "--json")
    assert (code, err) == (0, "")
    said = json.loads(out)
    assert said["step_ns"] == [230, 130]
    assert said["only"] == {"a": {"bwd.ffn_bwd[0]": 1}, "b": {"fwd.attn[1,1]": 1}}
    assert said["kinds"][0] == {"kind": "ffn", "stream": "compute", "a_count": 1, "b_count": 1, "a_ns": 10, "b_ns": 60, "longer_ns": -50, "error": 10 / 60 - 1}
    assert said["ops"][4] == {"id": "fwd.reload.kv[0]", "layer": 0, "stream": "h2d", "a_ns": 40, "b_ns": 10, "late_ns": 5, "gained_ns": 5, "longer_ns": 30}
    assert said["paths"][0]["by_stream"] == {"compute": 70, "comm": 0, "h2d": 40, "d2h": 18, "host": 0, "external": 19, "latency": 3, "issue": 80}
    assert said["paths"][0]["steps"][5] == {"id": "bwd.ffn_bwd[0]", "layer": 0, "stream": "compute", "ns": 20, "idle_ns": 80, "idle": "issue"}


def test_tables(fpdt):
    code, out, _ = fpdt("explain", "a.json", "b.json", "--top", "2")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert code == 0 and "A - B +0.000 ms (+76.9%). All differences are A - B, in percent of B." in lines
    assert lines[lines.index("Kinds by what their spans take") + 2:][:3] == ["ffn compute 1 1 0.000 0.000 -0.000 -83.3%", "reload h2d 1 1 0.000 0.000 +0.000 +300.0%", ""]
    assert lines[lines.index("Ops that start later or earlier") + 2].startswith("ext.optimizer -1 external")
    assert "Only in A: bwd.ffn_bwd[0]" in lines and "Only in B: fwd.attn[1,1]" in lines
    assert any(line.startswith("issue 0.000 0.000 +0.000 34.8%") for line in lines)


def test_the_same_twice(fpdt):
    code, out, _ = fpdt("explain", "a.json", "a.json")
    assert code == 0 and out.count("\nnone\n") == 3 and "Only in" not in out


@pytest.mark.parametrize("command, line", [
    ("none.json b.json", "none.json is no timeline ([Errno 2] No such file or directory: 'none.json'); write one with fpdt simulate --save-timeline"),
    ("a.json odd.json", "odd.json is no timeline (its columns do not fit each other); write one with fpdt simulate --save-timeline"),
    ("bare.json b.json", "bare.json: a timeline says nothing of what its ops wait for; give its schedule with --schedule, as fpdt show --out writes it"),
    ("a.json b.json --schedule other.txt", "a.json: the schedule is not the timeline's, it has no op fwd.offload.kv[0]; give the one that was run"),
    ("a.json b.json --schedule none.txt", "schedule file none.txt cannot be read (No such file or directory); write one with fpdt show --out"),
])
def test_errors(fpdt, tmp_path, command, line):
    (tmp_path / "odd.json").write_text((tmp_path / "a.json").read_text().replace('"stream": [', '"stream": [0, '))
    fpdt("show", "demo", "--seq", "1K", "--chunk", "256", "--no-offload", "--out", "other.txt")
    assert text.parse((tmp_path / "other.txt").read_text()).chunk == 256
    assert fpdt("explain", *command.split()) == (2, "", f"fpdt: {line}\n")


@pytest.mark.parametrize("where, value, why", [
    (("start_ns", 0), 2**70, ""),
    (("stream", 0), 300, ""),
    (("end_ns", 0), -1, "a span ends before it starts"),
    (("memory",), [], "'list' object has no attribute 'items'"),
    (("op",), [[0]], "its columns do not fit each other"),
    (("names", 0), 3, "its names or what is said beside them are of other types"),
    (("meta", "waits"), {"fwd.qkv[0]": 3}, "its names or what is said beside them are of other types"),
    (("meta", "numbers"), {"gap_ns": "x"}, "its names or what is said beside them are of other types"),
    (("streams", 0), "comm", "its streams are those of another version"),
])
def test_a_file_of_another_make_is_no_timeline(fpdt, where, value, why):
    data = json.loads(open("a.json").read())
    inner = data
    for name in where[:-1]:
        inner = inner[name]
    inner[where[-1]] = value
    open("odd.json", "w").write(json.dumps(data))
    for more in ((), ("--json",)):
        code, out, err = fpdt("explain", "odd.json", "b.json", *more)
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert err.startswith(f"fpdt: odd.json is no timeline ({why}") and err.endswith("; write one with fpdt simulate --save-timeline\n")


def test_a_file_of_brackets_is_no_timeline(fpdt):
    open("deep.json", "w").write("[" * 100_000)
    code, _, err = fpdt("explain", "deep.json", "b.json")
    assert code == 2 and err.count("\n") == 1 and "deep.json is no timeline" in err


def test_a_schedule_instead_of_carried_waits(fpdt):
    show = "demo --seq 1K --chunk 256 --layers 2".split()
    fpdt("show", *show, "--out", "schedule.txt")
    fpdt("simulate", *show, "--machine", "a100-80g-sxm", "--save-timeline", "full.json")
    data = json.loads(open("full.json").read())
    waits = data["meta"].pop("waits")
    assert waits["fwd.reload.kv[1,0]"] == ["fwd.offload.kv[0]"]
    open("less.json", "w").write(json.dumps(data))
    carried, given = (json.loads(fpdt("explain", *files, "--json")[1]) for files in (("full.json", "full.json"), ("less.json", "less.json", "--schedule", "schedule.txt")))
    assert carried == given and sum(carried["paths"][0]["by_stream"].values()) == carried["step_ns"][0]
