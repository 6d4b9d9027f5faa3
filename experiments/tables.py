"""Tables for people: what the `fpdt` command prints when nobody asks for JSON."""
from __future__ import annotations

from rich.console import Console
from rich.table import Table

from sim.machine import NUMBERS, TEXTS, Machine
from sim.machine import machine as find_machine
from sim.machine import presets as machine_presets
from sim.model import presets as model_presets


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
    """One machine: every number with its meaning and source."""
    m = find_machine(name)
    table((m.name, "value", "source"), [(field, m[field], m.source(field)) for field in (*NUMBERS, *TEXTS)])


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
