"""Plot: a Gantt of one timeline, and predicted over measured with their memory curves.

Matplotlib draws into files (Agg); a stream has the same colour everywhere.
"""
from __future__ import annotations

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from sim.files import replaced
from sim.timeline import ROWS, Timeline

COLORS = dict(zip(ROWS, ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#aa3377", "#bbbbbb")))
MEMORY_COLORS = {"hbm": "#4477aa", "host": "#aa3377"}
IN_USE = ("live", "arguments", "workspace", "states")
DASHES = {"predicted": "-", "measured": ":"}


def gantt(timeline: Timeline, title: str = "") -> Figure:
    """A figure of one timeline: one row a stream. A notebook shows it as it is."""
    figure = _figure(10, 2.4)
    axes = figure.subplots()
    draw_gantt(axes, timeline, title)
    axes.set_xlabel("ms")
    return figure


def overlay(predicted: Timeline, measured: Timeline, path: str | Path) -> None:
    """Writes a PNG: the predicted Gantt, the measured one on the same time axis, and below them both memory curves a space."""
    spaces = [s for s in MEMORY_COLORS if s in predicted.memory or s in measured.memory]
    figure = _figure(11, 5 + 1.6 * len(spaces))
    rows = figure.subplots(2 + len(spaces), 1, sharex=True)
    for axes, (name, timeline) in zip(rows, (("predicted", predicted), ("measured", measured))):
        draw_gantt(axes, timeline, f"{name}: {span_ns(timeline) / 1e6:.1f} ms")
    for axes, space in zip(rows[2:], spaces):
        for name, timeline in (("predicted", predicted), ("measured", measured)):
            if space in timeline.memory:
                draw_memory(axes, timeline, space, name)
        axes.set_ylabel("MiB in use")
        axes.set_ylim(bottom=0)
        axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=2, fontsize="small", frameon=False)
    rows[-1].set_xlabel("ms")
    rows[-1].set_xlim(0, max(map(span_ns, (predicted, measured))) / 1e6)
    replaced(path, lambda part: figure.savefig(part, format="png", dpi=120))


def draw_gantt(axes: Axes, timeline: Timeline, title: str = "") -> None:
    """One bar a span, one row a stream that has any, the first stream on top. Bars too thin to have a border still show."""
    thin = span_ns(timeline) / 1e6 / 500
    streams = [s for s in ROWS if timeline.on(s).any()]
    for row, stream in enumerate(streams):
        mask = timeline.on(stream)
        start, end = timeline.start_ns[mask] / 1e6, timeline.end_ns[mask] / 1e6
        bars = list(zip(start.tolist(), (end - start).tolist()))
        edges = ["white" if width > thin else COLORS[stream] for _, width in bars]
        axes.broken_barh(bars, (row - 0.4, 0.8), facecolor=COLORS[stream], edgecolor=edges, linewidth=0.4, label=stream)
    axes.set_yticks(range(len(streams)), streams)
    axes.invert_yaxis()
    axes.set_title(title, loc="left", fontsize="medium")


def draw_memory(axes: Axes, timeline: Timeline, space: str, name: str) -> None:
    """Bytes of a space in use over time, as steps: what is live in the arena, and all that lies beside it."""
    rows = timeline.memory[space]
    used = sum(rows[row] for row in IN_USE)
    axes.step(rows["t_ns"] / 1e6, used / 2**20, where="post", color=MEMORY_COLORS[space], linestyle=DASHES[name], label=f"{space}: plan at {name} times")


def span_ns(timeline: Timeline) -> int:
    """From the step's begin to the last end."""
    return int(timeline.end_ns.max()) if len(timeline) else 0


def _figure(width: float, height: float) -> Figure:
    """A figure outside pyplot, so that nothing global is touched and nothing stays open."""
    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure
