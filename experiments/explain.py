"""Explain: two saved timelines, side by side where they part (see sim.explain)."""
from __future__ import annotations

import json
from pathlib import Path

from experiments.tables import table
from sim import explain, timeline
from sim.errors import UserError
from sim.explain import Step
from sim.metrics import times
from sim.schedule import Schedule
from sim.timeline import Timeline


def explain_command(a_path: Path, b_path: Path, schedule: Schedule | None, top: int, as_json: bool) -> None:
    """Prints the differences, `top` lines a table, or all of them as one JSON object."""
    a, b = timeline.load(a_path), timeline.load(b_path)
    paths = [_path(t, schedule, file) for t, file in ((a, a_path), (b, b_path))]
    if as_json:
        print(json.dumps(found(a, b, paths)))
    else:
        report(a, b, paths, (str(a_path), str(b_path)), top)


def _path(t: Timeline, schedule: Schedule | None, file: Path) -> list[Step]:
    try:
        return explain.critical_path(t, schedule)
    except UserError as error:
        raise UserError(f"{file}: {error}") from None


def found(a: Timeline, b: Timeline, paths: list[list[Step]]) -> dict:
    """Everything, for programs."""
    a_only, b_only = explain.only(a, b)
    return {
        "step_ns": [_step_ns(t) for t in (a, b)], "ops": [pair._asdict() | {"longer_ns": pair.longer_ns} for pair in explain.pairs(a, b)],
        "kinds": [k._asdict() | {"longer_ns": k.longer_ns, "error": k.error} for k in explain.kinds(a, b)], "only": {"a": a_only, "b": b_only},
        "paths": [{"by_stream": explain.by_stream(path), "steps": [step._asdict() for step in path]} for path in paths],
    }


def report(a: Timeline, b: Timeline, paths: list[list[Step]], files: tuple[str, str], top: int) -> None:
    """Tables for people."""
    step_a, step_b = _step_ns(a), _step_ns(b)
    print(f"A {files[0]}: {_ms(step_a)} ms a step\nB {files[1]}: {_ms(step_b)} ms a step\nA - B {_signed(step_a - step_b)} ms{_percent(step_a, step_b)}. All differences are A - B, in percent of B.")
    pairs = explain.pairs(a, b)
    _titled("Kinds by what their spans take", ("kind", "stream", "spans A", "spans B", "A ms", "B ms", "A - B ms", "A / B - 1"), [
        (k.kind, k.stream, k.a_count, k.b_count, _ms(k.a_ns), _ms(k.b_ns), _signed(k.longer_ns), _percent(k.a_ns, k.b_ns).strip(" ()") or "n/a")
        for k in explain.kinds(a, b)[:top]])
    _titled("Ops that take longer or shorter", ("op", "layer", "stream", "A ms", "B ms", "A - B ms"), [
        (p.id, p.layer, p.stream, _ms(p.a_ns), _ms(p.b_ns), _signed(p.longer_ns)) for p in _largest(pairs, lambda p: p.longer_ns, top)])
    _titled("Ops that start later or earlier", ("op", "layer", "stream", "late ms", "gained ms"), [
        (p.id, p.layer, p.stream, _signed(p.late_ns), _signed(p.gained_ns)) for p in _largest(pairs, lambda p: p.late_ns, top)])
    _titled("Where lateness is gained or lost", ("op", "layer", "stream", "late ms", "gained ms"), [
        (p.id, p.layer, p.stream, _signed(p.late_ns), _signed(p.gained_ns)) for p in _largest(pairs, lambda p: p.gained_ns, top)])
    print("gained: what of an op's lateness the end of the op before on its stream did not have yet.")
    for name, ids in zip("AB", explain.only(a, b)):
        if ids:
            more = f", and {len(ids) - top} more" if len(ids) > top else ""
            print(f"\nOnly in {name}: " + ", ".join(id if n == 1 else f"{id} x {n}" for id, n in list(ids.items())[:top]) + more)
    streams = [explain.by_stream(path) for path in paths]
    _titled("Critical paths by stream", ("", "A ms", "B ms", "A - B ms", "share of A", "share of B"), [
        (s, *_both(x, y), _share(x, step_a), _share(y, step_b)) for s in streams[0] if (x := streams[0][s]) | (y := streams[1][s])])
    kinds = [explain.by_kind(path) for path in paths]
    rows = sorted(set(kinds[0]) | set(kinds[1]), key=lambda k: -max(kinds[0].get(k, 0), kinds[1].get(k, 0)))
    _titled("Critical paths by kind", ("kind", "stream", "A ms", "B ms", "A - B ms"), [(*k, *_both(kinds[0].get(k, 0), kinds[1].get(k, 0))) for k in rows[:top]])
    for name, path in zip("AB", paths):
        _titled(f"Critical path of {name}: {len(path)} ops, those that take the most of it", ("op", "layer", "stream", "ms", "idle before, ms", ""), [
            (s.id, s.layer, s.stream, _ms(s.ns), _ms(s.idle_ns), s.idle if s.idle_ns else "") for s in _largest(path, lambda s: s.ns + s.idle_ns, top)])


def _step_ns(t: Timeline) -> int:
    return round(times(t)["step_s"] * 1e9)


def _largest(rows: list, size, top: int) -> list:
    return sorted((r for r in rows if size(r)), key=lambda r: -abs(size(r)))[:top]


def _titled(title: str, columns: tuple[str, ...], rows: list[tuple]) -> None:
    print(f"\n{title}")
    if rows:
        table(columns, [tuple(str(cell) for cell in row) for row in rows])
    else:
        print("none")


def _both(a: int, b: int) -> tuple[str, str, str]:
    return _ms(a), _ms(b), _signed(a - b)


def _ms(ns: int) -> str:
    return f"{ns / 1e6:.3f}"


def _signed(ns: int) -> str:
    return f"{ns / 1e6:+.3f}"


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "n/a"


def _percent(a: int, b: int) -> str:
    return f" ({a / b - 1:+.1%})" if b else ""
