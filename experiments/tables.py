"""Tables for people: what the `fpdt` command prints when nobody asks for JSON."""
from __future__ import annotations

from collections import Counter

from rich.console import Console
from rich.table import Table

from sim.machine import NUMBERS, OPTIONAL, TEXTS, Machine
from sim.machine import machine as find_machine
from sim.machine import presets as machine_presets
from sim.metrics import parts_at_peak
from sim.model import presets as model_presets
from sim.schedule import Schedule
from sim.timeline import Timeline
from sim.units import show_bytes, show_tokens

LONG = 100
"""Letters of a source that is a note."""


def models() -> None:
    """The models by name."""
    rows = [(m.name, m.kind, m.layers, m.hidden, m.heads, m.kv_heads, m.head_dim, m.ffn, m.vocab, f"{m.params / 1e9:.3f}") for m in model_presets().values()]
    table(("model", "kind", "layers", "hidden", "heads", "KV", "head dim", "ffn", "vocab", "params 1e9"), rows)


def machines() -> None:
    """The machines by name."""
    rows = []
    for name in machine_presets():
        m = find_machine(name)
        rows.append((name, m["peak_TFLOPS"], m["hbm_bytes"] >> 30, m["host_bytes"] >> 30, m["gpus_per_node"], m["gpus_per_uplink"], m["h2d_GBps"], m["nvlink_GBps"]))
    table(("machine", "peak TFLOPS", "HBM GiB", "host GiB a node", "GPUs a node", "GPUs an uplink", "h2d GBps", "NVLink GBps"), rows)
    print("\nWhere each number comes from: fpdt machines NAME")


def machine(name: str) -> None:
    """One machine: every number with its source; a long one that several share is told once, below."""
    m = find_machine(name)
    values = {field: "N/A" if m.get(field) is None else m[field] for field in (*NUMBERS, *OPTIONAL, *TEXTS)}
    shared = [source for source, times in Counter(map(m.source, values)).items() if times > 1 and len(source) > LONG]
    notes = {source: f"[{k}]" for k, source in enumerate(shared, 1)}
    table((m.name, "value", "source"), [(field, value, notes.get(m.source(field), m.source(field))) for field, value in values.items()])
    for source, note in notes.items():
        print(note, source)


def prediction(schedule: Schedule, m: Machine, timeline: Timeline, result: dict) -> None:
    """What `fpdt simulate` says: the summary of a predicted timeline, beside the capacities it was held against."""
    s, peak = schedule, parts_at_peak(timeline, "hbm")
    print(f"{s.model.name}, {s.layers} layers, on {m.name}: S={show_tokens(s.seq)} C={show_tokens(s.chunk)} u={len(s.chunks)} P={s.P} {s.dtype}")
    on_node = min(s.P, int(m["gpus_per_node"]))
    rows = [(name, f"{result[name]:.3f} s", meaning) for name, meaning in TIMES.items()]
    rows += [("tokens/s", f"{s.seq / result['step_s']:.0f}", "of all ranks together")]
    rows += [(name, f"{result[name]:.2%}", meaning) for name, meaning in SHARES.items()]
    rows += [
        ("", "", f"utilization is of {m['peak_TFLOPS']:g} TFLOP/s, {m['peak_name']}"),
        ("hbm_peak_bytes", show_bytes(result["hbm_peak_bytes"]), f"of {show_bytes(m['hbm_bytes'])} a GPU"),
        *((f"  {part}", show_bytes(size), PARTS[part]) for part, size in peak.items()),
        ("  reserved", show_bytes(result["hbm_reserved_bytes"]), "what torch's allocator holds for all that"),
        ("host_peak_bytes", show_bytes(result["host_peak_bytes"]), f"a rank; {on_node} {'rank has' if on_node == 1 else 'ranks share'} {show_bytes(m['host_bytes'])}"),
        ("fits", "yes" if result["fits"] else "no", ""),
        ("binding", result["binding"], "what limits it"),
    ]
    table(("", "predicted", ""), rows)
    print("Assumed:")
    for line in result["assumptions"]:
        print("-", line)


TIMES = {"step_s": "the whole step", "fwd_s": "forward, to the loss", "bwd_s": "loss to the last gradient"}
SHARES = {
    "mfu_causal": "6N + the causal half of attention, no recompute",
    "mfu_palm": "6N + all S^2 of attention, no recompute",
    "hfu": "causal, with the forward that is recomputed",
    "mfu_megatron_ds": "all S^2, as the released Megatron-DeepSpeed counts",
    "overlap": "of the time copies take, under compute",
}


PARTS = {
    "planned": "KV slots, chunks at work, accumulators: the arena",
    "arguments": "hidden states and gradients of blocks at work",
    "workspace": "of the kernel at work",
    "states": "parameters, gradients, optimizer",
}


def table(columns: tuple[str, ...], rows: list[tuple]) -> None:
    """Prints a plain table: the first column whole, numbers to the right."""
    made = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for k, column in enumerate(columns):
        numeric = bool(rows) and all(_number(row[k]) for row in rows)
        made.add_column(column, justify="right" if numeric else "left", no_wrap=k == 0)
    for row in rows:
        made.add_row(*(f"{cell:g}" if isinstance(cell, float) else str(cell) for cell in row))
    console = Console(highlight=False)
    with console.capture() as text:
        console.print(made)
    print("\n".join(line.rstrip() for line in text.get().rstrip().split("\n")))


def _number(cell) -> bool:
    return isinstance(cell, (int, float)) or cell.replace(".", "", 1).isdigit()
