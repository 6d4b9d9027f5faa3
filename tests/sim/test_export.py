"""The trace: two processes, a thread a stream, microseconds, and memory counters, value for value."""
import json

import numpy as np

from sim import export
from sim.timeline import Timeline


def world(shift_ns: int) -> Timeline:
    spans = [("fwd.qkv[0]", 0, "compute", 0 + shift_ns, 1500 + shift_ns), ("fwd.offload.kv[0]", 0, "d2h", 1500 + shift_ns, 1750 + shift_ns)]
    timeline = Timeline.from_spans(spans)
    timeline.memory = {"hbm": {"t_ns": np.array([0, 2000]), "live": np.array([256, 0]), "states": np.array([10, 10])}}
    return timeline


def test_events():
    made = export.trace({"predicted": world(0), "measured": world(100)})
    assert made["displayTimeUnit"] == "ns"
    events = made["traceEvents"]
    spans = [(e["pid"], e["tid"], e["name"], e["cat"], e["ts"], e["dur"], e["args"]) for e in events if e["ph"] == "X"]
    assert spans == [
        (1, 0, "fwd.qkv[0]", "fwd.qkv", 0.0, 1.5, {"layer": 0}),
        (1, 3, "fwd.offload.kv[0]", "fwd.offload.kv", 1.5, 0.25, {"layer": 0}),
        (2, 0, "fwd.qkv[0]", "fwd.qkv", 0.1, 1.5, {"layer": 0}),
        (2, 3, "fwd.offload.kv[0]", "fwd.offload.kv", 1.6, 0.25, {"layer": 0}),
    ]
    counters = [(e["pid"], e["name"], e["ts"], e["args"]) for e in events if e["ph"] == "C"]
    assert counters[:2] == [
        (1, "hbm", 0.0, {"live_size_bytes": 256, "states_size_bytes": 10}),
        (1, "hbm", 2.0, {"live_size_bytes": 0, "states_size_bytes": 10}),
    ]
    names = [(e["name"], e["pid"], e.get("tid"), e["args"].get("name")) for e in events if e["ph"] == "M" and "name" in e["args"]]
    assert names == [
        ("process_name", 1, None, "predicted"), ("thread_name", 1, 0, "compute"), ("thread_name", 1, 3, "d2h"),
        ("process_name", 2, None, "measured"), ("thread_name", 2, 0, "compute"), ("thread_name", 2, 3, "d2h"),
    ]


def test_saved_whole(tmp_path):
    path = tmp_path / "trace.json"
    export.save({"predicted": world(0)}, path)
    assert json.loads(path.read_text()) == export.trace({"predicted": world(0)})
    assert [p.name for p in tmp_path.iterdir()] == ["trace.json"]
