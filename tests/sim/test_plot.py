"""The pictures: what is drawn where, and that the file is a PNG."""
import numpy as np
import pytest
from matplotlib.colors import to_hex

from sim import plot
from sim.timeline import Timeline

SPANS = [("fwd.qkv[0]", 0, "compute", 0, 2_000_000), ("fwd.offload.kv[0]", 0, "d2h", 2_000_000, 5_000_000), ("fwd.proj[0]", 0, "compute", 2_000_000, 3_000_000)]


@pytest.fixture
def timeline():
    made = Timeline.from_spans(SPANS)
    t_ns = np.array([0, 1_000_000])
    rows = {"planned": [9, 9], "live": [1, 3], "arguments": [0, 0], "workspace": [0, 0], "states": [1, 1]}
    made.memory = {space: {"t_ns": t_ns} | {row: np.array(mib) << 20 for row, mib in rows.items()} for space in ("hbm", "host")}
    return made


def test_gantt_has_a_row_a_stream(timeline):
    (axes,) = plot.gantt(timeline, "title").axes
    assert [label.get_text() for label in axes.get_yticklabels()] == ["compute", "d2h"]
    bars = {c.get_label(): [p.get_extents().extents.round(3).tolist() for p in c.get_paths()] for c in axes.collections}
    assert bars == {"compute": [[0, -0.4, 2, 0.4], [2, -0.4, 3, 0.4]], "d2h": [[2, 0.6, 5, 1.4]]}
    colors = {c.get_label(): to_hex(c.get_facecolor()[0]) for c in axes.collections}
    assert colors == {stream: plot.COLORS[stream] for stream in ("compute", "d2h")}
    assert axes.get_title(loc="left") == "title"


def test_overlay(timeline, tmp_path, monkeypatch):
    made = []
    figure = plot._figure
    monkeypatch.setattr(plot, "_figure", lambda *size: made.append(figure(*size)) or made[-1])
    path = tmp_path / "overlay.png"
    plot.overlay(timeline, timeline, path)
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert [p.name for p in tmp_path.iterdir()] == ["overlay.png"]
    top, middle, hbm, host = made[0].axes
    assert [a.get_title(loc="left") for a in (top, middle)] == ["predicted: 5.0 ms", "measured: 5.0 ms"]
    assert [to_hex(c.get_facecolor()[0]) for c in top.collections] == [to_hex(c.get_facecolor()[0]) for c in middle.collections]
    assert [line.get_label() for line in hbm.lines] == ["hbm: plan at predicted times", "hbm: plan at measured times"]
    assert [line.get_ydata().tolist() for line in host.lines] == [[2, 4], [2, 4]]
    assert host.get_xlim() == (0, 5)
