"""Bench: this engine beside its kernel bound and its peers: one run, same inputs, same attention kernel, one table.

Each row runs in processes of its own, so that one that fails, or fills memory, is a line in the table and no more. Results are in bench.json
after each row; a run that was interrupted goes on with the rows that are missing.
"""
from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from engine import probe
from engine.kernels.choose import named
from engine.worker import check_gpus
from experiments.auto import settled
from experiments.bars import progress
from experiments.peers.case import PARTS, Case
from experiments.peers.rows import ENGINE, measure
from sim import text
from sim.build.step import build
from sim.errors import UserError, unknown
from sim.files import claimed, write
from sim.machine import Machine, published
from sim.model import Model
from sim.schedule import Schedule
from sim.strategy import Strategy
from sim.units import show_tokens

ROWS = {
    "engine": "a block by its schedule, in chunks; KV and saved activations on the host unless --set says otherwise",
    "resident": "the same with everything in HBM",
    "bound": "the matrix products and attention calls of the engine's schedule, recompute included, back to back on one stream",
    "ulysses": "the sequence in one piece, q, k, v and o by all-to-all, in torch autograd",
    "ring": "torch's context_parallel for the attention, the rest as in ulysses",
    "deepspeed": "DeepSpeed's FPDT_Attention with offload, norm and residual in torch autograd",
    "deepspeed-resident": "the same without offload",
}
"""Row -> what it is."""
BOTH = {"deepspeed": ("deepspeed", "deepspeed-resident")}
"""What a name in --rows stands for, if not for itself alone."""
LOAD_S = {"cpu": 0.0, "cuda": 3.0}
SMALL_CHUNK, SMALL_CHUNKS = 128, 4
"""Errors are taken with chunks of so many tokens a rank, and at most so many chunks."""
NO_FFN = 8
"""FFN width of the engine's rows in the attention half."""


def bench(
    model: Model, strategy: Strategy, seq: int, dtype: str | None = None, *, part: str = "block", rows: list[str] = list(ROWS), repeats: int = 5, kernel: str = "",
    machine: Machine | None = None, out: Path, command: str = "", console: Console | None = None,
) -> list[dict]:
    """Measures the rows, prints them, and writes bench.json to `out`. A row that cannot run has a reason instead of numbers."""
    console = console or Console()
    device = probe.device()
    dtype = dtype or ("bf16" if device == "cuda" else "fp32")
    named(kernel, device)
    strategy = settled(one_layer(model, part), strategy, seq, dtype, machine)
    sent = cases(model, strategy, seq, dtype, part, rows, repeats, device, kernel)
    if device == "cuda":
        check_gpus(strategy.sp)
    one = next(iter(sent.values()))
    schedule, small = text.parse(one.schedule), text.parse(one.small)
    inputs = {"model": model.name, "part": part, "seq": seq, "dtype": dtype, "repeats": repeats, "kernel": kernel, "strategy": asdict(strategy)}
    head = {"provenance": probe.provenance(), "schedule": text.digest(schedule), "inputs": inputs}
    with claimed(out):
        path = out / "bench.json"
        results = {name: row for name, row in earlier(path, head).items() if name in sent}
        with progress(console) as bar:
            def keep(name: str, row: dict) -> None:
                results[name] = row
                _save(path, head, results, command, finished=False)

            for name in [name for name in sent if name not in results]:
                measure({name: sent[name]}, strategy.sp, bar, keep)
        found = [results[name] for name in sent]
        _shares(found)
        _save(path, head, results, command, finished=True)
    if schedule.seq != seq:
        console.print(f"S={seq} is padded to {schedule.seq}, a multiple of P={schedule.P}")
    report(found, schedule, small, part, machine, console)
    console.print(f"All repeats are in {path}.")
    return found


def chosen_rows(names: str) -> list[str]:
    """Rows from a comma-separated list. Raises UserError."""
    found = []
    for name in names.split(","):
        if name not in ROWS:
            raise unknown("row", name, ROWS)
        found += [row for row in BOTH.get(name, (name,)) if row not in found]
    return found


def one_of_parts(part: str) -> str:
    """The part itself. Raises UserError if there is no such one."""
    if part not in PARTS:
        raise unknown("part", part, PARTS)
    return part


def one_layer(model: Model, part: str) -> Model:
    """The model whose only layer is the part that is measured."""
    return replace(model, layers=1) if part == "block" else replace(model, layers=1, ffn=NO_FFN)


def cases(
    model: Model, strategy: Strategy, seq: int, dtype: str, part: str, rows: list[str], repeats: int, device: str, kernel: str = "",
) -> dict[str, Case]:
    """What each row's ranks are sent: one layer, at both sizes."""
    one = one_layer(model, part)
    if device == "cpu" and not strategy.blocks:
        strategy = strategy.replace(host_sync="region")

    def sizes(way: Strategy) -> tuple[str, str]:
        big, chunk = build(one, way, seq, dtype), SMALL_CHUNK * way.sp
        small = build(one, way.replace(chunk=chunk), min(SMALL_CHUNKS, len(big.chunks)) * chunk, dtype)
        return text.show(big), text.show(small)

    own = sizes(strategy)
    resident = sizes(strategy.replace(offload=False, resident=0.0, accum="hbm", hidden="hbm")) if "resident" in rows else own
    return {row: Case(row, part, *(resident if row == "resident" else own), repeats, device, LOAD_S[device], kernel=kernel) for row in rows}


def _shares(found: list[dict]) -> None:
    """The kernel bound over the time of each row that runs its schedule."""
    bound = next((row["median_total_s"] for row in found if row["row"] == "bound" and "reason" not in row), None)
    for row in found:
        if bound and row["row"] in ENGINE and "reason" not in row:
            row["share_of_bound"] = bound / row["median_total_s"]


def earlier(path: Path, head: dict) -> dict[str, dict]:
    """Rows that a run of the same day, machine, versions and inputs measured before it was interrupted. Raises UserError where the file is another's."""
    try:
        data = json.loads(path.read_text()) if path.exists() else {}
        same = not data.get("finished", True) and {key: data.get(key) for key in head} == head
        return {row["row"]: row for row in data["rows"] if "reason" not in row} if same else {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} is no record of fpdt bench ({error}); name another folder with --out") from None


def _save(path: Path, head: dict, results: dict[str, dict], command: str, finished: bool) -> None:
    write(path, json.dumps(head | {"command": command, "finished": finished, "rows": list(results.values())}, indent=1) + "\n")


def causal_flops(m: Model, seq: int, part: str) -> int:
    """Model FLOPs of one block, forward and backward: 6 N S and the causal half of attention."""
    names = [name for group in ("q", "kv", "o", *(("up", "down") if part == "block" else ())) for name in m.groups[group][:1]]
    shapes = m.weight_shapes()
    return 6 * seq * sum(shapes[name][0] * shapes[name][1] for name in names) + 6 * seq * seq * m.q_dim


def peak_TFLOPS(found: list[dict], dtype: str, machine: Machine | None) -> float | None:
    """Of a given machine, or the published one of this GPU in bf16; None where neither is known."""
    gpu = next((row["gpu"] for row in found if row.get("gpu")), None)
    machine = machine or published(gpu, dtype)
    return machine["peak_TFLOPS"] if machine else None


def report(found: list[dict], s: Schedule, small: Schedule, part: str, machine: Machine | None, console: Console) -> None:
    """The table, a line a row, and what its columns mean."""
    peak = peak_TFLOPS(found, s.dtype, machine)
    kernel = next((row["kernel"] for row in found if row.get("kernel")), "no kernel ran")
    what = "one block" if part == "block" else "the attention half of one block"
    title = f"{s.model.name}, {what}, forward and backward: S={show_tokens(s.seq)} C={show_tokens(s.chunk)} u={len(s.chunks)} P={s.P} {s.dtype}, {kernel}"
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("", "fwd ms", "bwd ms", "both ms", "spread", "bound/both", "issue", "mfu_causal", "peak GiB", "error y", "error dx"):
        table.add_column(name, justify="right" if name else "left", no_wrap=True)
    for row in found:
        table.add_row(row["row"], *([""] * 10 if "reason" in row else _cells(row, causal_flops(s.model, s.seq, part), s.P, peak)))
    lines = console.render_lines(table, console.options.update(width=WIDE), pad=False)
    said = ["".join(segment.text for segment in line).rstrip() for line in lines]
    said[1:] = [f"{row['row']:<{max(map(len, ROWS))}}  {row['reason']}" if "reason" in row else line for line, row in zip(said[1:], found)]
    repeats = next((len(row["total_s"]) for row in found if "total_s" in row), 0)
    said = [title, *said, *(f"{row['row']}: {ROWS[row['row']]}" + (f" ({row['note']})" if row.get("note") else "") for row in found)]
    said.append(f"Times: medians of {repeats}, of the slowest rank; spread: (slowest - fastest) / median. Sums of weight gradients over ranks are in no row. "
                "issue: the host's median time for one of the first ops, times the ops, over both. peak GiB: the most HBM that torch had allocated, arenas included.")
    said.append(f"Errors: relative L2 of y and of dx against fp64 at S={small.seq} C={small.chunk}, same code and kernel.")
    if part == "attention":
        said.append(f"engine, resident and bound run a schedule whose FFN is {NO_FFN} wide and adds nothing: exactly the attention half. What that FFN still takes "
                    "(a norm, launches) counts against the engine and is not in the bound.")
    said.append("mfu_causal: " + (f"of {peak:.0f} TFLOP/s a rank; 6N + the causal half of attention, no recompute." if peak else "n/a, as no peak is known for this processor; give --machine."))
    for line in said:
        console.print(line, highlight=False, markup=False, soft_wrap=True)


WIDE = 160
"""Columns that the table may take; a narrower terminal wraps its lines."""


def issue_share(row: dict) -> float:
    """Host time to issue all ops of a step, as its first ones are issued, over the step's time."""
    return row["ops"] * row["issue_us"] / 1e6 / row["median_total_s"]


def _cells(row: dict, flops: int, P: int, peak: float | None) -> list[str]:
    both = row["median_total_s"]
    share, hbm = row.get("share_of_bound"), row["peak_hbm_bytes"]
    return [
        *(f"{row[name] * 1e3:.1f}" for name in ("median_forward_s", "median_backward_s", "median_total_s")),
        f"{(max(row['total_s']) - min(row['total_s'])) / both:.1%}", "" if share is None else f"{share:.1%}", f"{issue_share(row):.1%}" if "ops" in row else "",
        f"{flops / (both * P * peak * 1e12):.1%}" if peak else "n/a", "n/a" if hbm is None else f"{hbm / 2**30:.2f}",
        *(f"{row[name]:.1e}" if name in row else "n/a" for name in ("error_y", "error_dx")),
    ]
