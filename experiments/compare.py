"""Compare: one schedule, predicted and then measured, side by side.

The order is what makes it honest: calibrate at other sizes, predict, write the prediction down, and only then run.
"""
from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from engine import measure, probe
from engine.arenas import planned_bytes
from engine.ranks import Ranks
from engine.worker import Job, Run
from experiments.auto import settled
from experiments.bars import pinning, progress
from experiments.calibrate import calibrated
from experiments.room import check_memory
from sim import export, text
from sim.build.step import build
from sim.errors import UserError
from sim.files import claimed, write
from sim.lint import lint
from sim.machine import Machine
from sim.metrics import summary
from sim.model import Model
from sim.plot import overlay
from sim.schedule import SPACES, Schedule
from sim.simulate import simulate
from sim.strategy import Strategy
from sim.timeline import Timeline
from sim.units import show_bytes, show_tokens

CONVENTIONS = ("mfu_causal", "mfu_palm", "hfu", "mfu_megatron_ds")


@dataclass
class Comparison:
    """A schedule, what was predicted for it and what was measured."""

    schedule: Schedule
    strategy: Strategy
    machine: Machine
    predicted: Timeline
    measured: Timeline
    run: Run
    reference: list[float] | None
    """Losses of the same training without chunks or offload."""


def compare(
    model: Model, strategy: Strategy, seq: int, dtype: str = "fp32", *, steps: int = 5, machine: Machine | None = None,
    link_GBps: float | None = None, reference: bool = False, out: Path, command: str = "", console: Console | None = None,
) -> Comparison:
    """Calibrates (unless a machine is given), predicts, runs on this machine's CPU cores, and writes and prints both.

    Writes to `out`: schedule.txt, machine.json, predicted.json (before the first step), measured.json, overlay.png, trace.json,
    summary.json. Raises UserError where the plan does not fit this machine.
    """
    console = console or Console()
    device = probe.device()
    if machine is not None and machine.kind != device:
        raise UserError(f"machine {machine.name} is a {machine.kind} machine, this one runs on {device}; give what fpdt calibrate wrote here, or none")
    strategy = strategy if device == "cuda" or strategy.blocks else strategy.replace(host_sync="region")
    strategy = settled(model, strategy, seq, dtype, machine)
    schedule = build(model, strategy, seq, dtype)
    lint(schedule)
    check_memory(schedule, strategy, device)
    with claimed(out):
        return _compare(schedule, strategy, seq, device, machine, steps, link_GBps, reference, out, command, console)


def _compare(
    schedule: Schedule, strategy: Strategy, seq: int, device: str, machine: Machine | None, steps: int, link_GBps: float | None,
    reference: bool, out: Path, command: str, console: Console,
) -> Comparison:
    model, dtype = schedule.model, schedule.dtype
    for stale in ("schedule.txt", "predicted.json", "measured.json", "summary.json", "overlay.png", "trace.json"):
        (out / stale).unlink(missing_ok=True)
    if schedule.seq != seq:
        console.print(f"S={seq} is padded to {schedule.seq}, a multiple of P={schedule.P}, with ignored labels")
    with progress(console) as bar, Ranks(strategy.sp, device) as ranks:
        if machine is None:
            machine = calibrated(model, dtype, ranks, strategy.sp, bar, link_GBps, strategy, device)
        machine.save(out / "machine.json")
        write(out / "schedule.txt", text.show(schedule))
        predicted = simulate(schedule, strategy, machine)
        predicted.meta |= {"source": "predicted", "provenance": probe.provenance(), "command": command}
        predicted.save(out / "predicted.json")
        task = bar.add_task(f"train {model.name}, S={show_tokens(schedule.seq)}, {schedule.P} ranks", total=steps, state="")
        run, = ranks.do([Job(text.show(schedule), steps=steps, link_GBps=link_GBps, zero=strategy.zero, device=device)], lambda: bar.advance(task), pinning(bar))
        plain = None
        if reference:
            whole = build(model, strategy.replace(chunk=schedule.seq, offload=False, resident=0.0, save="all"), seq, dtype)
            task = bar.add_task("the same without chunks or offload", total=steps, state="")
            plain = ranks.do([Job(text.show(whole), steps=steps, trace_every=0, last_update=False, device=device)], lambda: bar.advance(task))[0].losses
    measured = measure.timeline(schedule, strategy, machine, run)
    measured.meta |= {"source": "measured", "provenance": probe.provenance(), "command": command}
    measured.save(out / "measured.json")
    found = Comparison(schedule, strategy, machine, predicted, measured, run, plain)
    overlay(predicted, measured, out / "overlay.png")
    export.save({"predicted": predicted, "measured": measured}, out / "trace.json")
    report(found, console)
    write(out / "summary.json", json.dumps(summary_json(found, command), indent=1) + "\n")
    console.print(f"Look at {out}/overlay.png, open {out}/trace.json in Perfetto, read {out}/schedule.txt.")
    return found


def rows(c: Comparison) -> list[tuple[str, float, float, str]]:
    """(what, predicted, measured, unit) of everything that is compared."""
    bare, traced = measure.step_ns(c.run)
    p, m = summary(c.predicted), summary(c.measured)
    found = [("step time", p["step_s"], bare / 1e9, "s"), ("step time, with per-op times taken", p["step_s"], traced / 1e9, "s")]
    for stream in ("compute", "comm", "h2d", "d2h"):
        if c.predicted.on(stream).any():
            found.append((f"busy: {stream}", busy_s(c.predicted, stream), busy_s(c.measured, stream), "s"))
    found.append(("overlap (copies under compute)", p["overlap"], m["overlap"], "%"))
    found += [(f"arena bytes touched: {s}", planned_bytes(c.schedule, s), c.run.touched_bytes[s], "MiB") for s in SPACES]
    found += [(name, p[name], p[name] * p["step_s"] * 1e9 / bare, "%") for name in CONVENTIONS]
    return found


def busy_s(t: Timeline, stream: str) -> float:
    """Seconds a stream was at work."""
    mask = t.on(stream)
    return float((t.end_ns[mask] - t.start_ns[mask]).sum()) / 1e9


def worst_ops(c: Comparison, count: int = 5) -> list[tuple[str, int, int]]:
    """(op, predicted ns, measured ns) with the largest absolute errors, durations summed over layers."""
    total: dict[str, list[int]] = defaultdict(lambda: [0, 0])
    for side, t in enumerate((c.predicted, c.measured)):
        for op, _, stream, start, end in t.spans():
            if stream != "host":
                total[op][side] += end - start
    ranked = sorted(total.items(), key=lambda item: -abs(item[1][1] - item[1][0]))
    return [(op, *times) for op, times in ranked[:count]]


BUSY = 1.3
"""Steps are equal work: if the slowest takes this many times the fastest, something else was running."""
SCALE = {"s": 1.0, "%": 100.0, "MiB": 1 / 2**20}


def report(c: Comparison, console: Console) -> None:
    """Prints the comparison, the losses and the five ops with the largest error."""
    s = c.schedule
    table = Table(title=f"{s.model.name}: S={show_tokens(s.seq)} C={show_tokens(s.chunk)} u={len(s.chunks)} P={s.P} {s.dtype}, {s.layers} layer{'s' * (s.layers > 1)}")
    for name in ("", "predicted", "measured", "signed error"):
        table.add_column(name, justify="right" if name else "left")
    for what, predicted, measured, unit in rows(c):
        scale = SCALE[unit]
        table.add_row(what, f"{predicted * scale:.3f} {unit}", f"{measured * scale:.3f} {unit}", signed(predicted, measured, unit))
    steps = [ns for ns in c.run.step_ns[1:]]
    if max(steps) > BUSY * min(steps):
        console.print(f"This machine was busy: steps took {min(steps) / 1e9:.1f} to {max(steps) / 1e9:.1f} s. Run again when it is idle before judging the times.")
    console.print(table)
    console.print("Signed error: predicted / measured - 1; of shares, the difference in points.")
    console.print(f"MFU peak: {c.machine['peak_name']}, {c.machine['peak_TFLOPS'] * 1e3:.0f} GFLOP/s a rank. "
                  f"Per-op times cost {(measure.step_ns(c.run)[1] / measure.step_ns(c.run)[0] - 1):+.1%} of a step.")
    losses = Table(title="loss of each step (nats a token)")
    for name in ("step", "scheduled", *(("unchunked", "difference") if c.reference else ())):
        losses.add_column(name, justify="right")
    for step, loss in enumerate(c.run.losses):
        losses.add_row(str(step), f"{loss:.6f}", *((f"{c.reference[step]:.6f}", f"{loss - c.reference[step]:+.1e}") if c.reference else ()))
    console.print(losses)
    table = Table(title="the five ops with the largest error (all layers)")
    for name in ("op", "predicted", "measured", "signed error"):
        table.add_column(name, justify="right" if name != "op" else "left")
    for op, predicted, measured in worst_ops(c):
        table.add_row(op, f"{predicted / 1e6:.2f} ms", f"{measured / 1e6:.2f} ms", signed(predicted, measured, "ms"))
    console.print(table)
    console.print(f"Process peak RSS: {show_bytes(c.run.rss_bytes)} a rank.")


def signed(predicted: float, measured: float, unit: str) -> str:
    """The prediction's error with its sign: of the measured value, or in points for shares."""
    if unit == "%":
        return f"{(predicted - measured) * 100:+.2f} points"
    return f"{predicted / measured - 1:+.1%}" if measured else "n/a"


def summary_json(c: Comparison, command: str) -> dict:
    """What summary.json holds: everything printed, and where it comes from."""
    return {
        "provenance": {"machine": probe.provenance(), "command": command, "schedule": text.digest(c.schedule)},
        "rows": [{"what": w, "predicted": p, "measured": m, "unit": u, "signed_error": signed(p, m, u)} for w, p, m, u in rows(c)],
        "predicted": summary(c.predicted), "measured": summary(c.measured),
        "losses": c.run.losses, "grad_norms": c.run.grad_norms, "unchunked_losses": c.reference, "step_s": [ns / 1e9 for ns in c.run.step_ns],
        "copied_bytes": c.run.copied_bytes, "guards_intact": c.run.guards_intact, "peak_rss_bytes": c.run.rss_bytes,
        "worst_ops": [{"op": o, "predicted_ns": p, "measured_ns": m} for o, p, m in worst_ops(c)],
        "strategy": asdict(c.strategy),
    }
