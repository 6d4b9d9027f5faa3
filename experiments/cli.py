"""The `fpdt` command.

    fpdt simulate llama3-8b --machine a100-80g-sxm --gpus 4 --seq 2M --chunk 64K

A user's mistake gets one line on stderr and exit code 2; a mistake of ours keeps its traceback and exits with 1. Each command
imports what it needs when it runs, so that none waits for torch or matplotlib without using them.
"""
from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, NoReturn, Optional

import typer

from sim.errors import UserError, unknown
from sim.units import parse_bytes, parse_tokens

app = typer.Typer(help=__doc__.split("\n\n")[0], add_completion=False, pretty_exceptions_enable=False)

ModelName = Annotated[str, typer.Argument(metavar="MODEL", help="A name that `fpdt models` lists.")]
MachineName = Annotated[str, typer.Option("--machine", help="A name that `fpdt machines` lists, or a machine's JSON file.")]
Gpus = Annotated[Optional[int], typer.Option("--gpus", help="P, the ranks that share the sequence; 1 if not given.")]
Seq = Annotated[str, typer.Option("--seq", help="S in tokens: 65536, 64K, 2M.")]
Chunk = Annotated[Optional[str], typer.Option("--chunk", help="C in tokens; 64K if not given.")]
Layers = Annotated[Optional[int], typer.Option("--layers", help="Layers instead of the model's own.")]
Settings = Annotated[list[str], typer.Option("--set", metavar="FIELD=VALUE", help="Any strategy field; repeatable.")]
Offload = Annotated[Optional[bool], typer.Option("--offload/--no-offload", help="KV and saved activations on the host, or in HBM; on if not given.")]
Dtype = Annotated[str, typer.Option("--dtype", help="bf16 or fp32.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


@app.command()
def models() -> None:
    """Lists the models by name."""
    from experiments.tables import models

    models()


@app.command()
def machines(name: Annotated[Optional[str], typer.Argument(help="One machine, with the source of each number.")] = None) -> None:
    """Lists the machines by name, or one machine's numbers and where they come from."""
    from experiments import tables

    tables.machine(name) if name else tables.machines()


@app.command()
def simulate(
    model: ModelName, seq: Seq, machine: MachineName, gpus: Gpus = None, chunk: Chunk = None, layers: Layers = None,
    settings: Settings = [], offload: Offload = None, dtype: Dtype = "bf16",
    hbm: Annotated[Optional[str], typer.Option(help="Device memory of one GPU instead of the machine's: 80GiB.")] = None,
    host: Annotated[Optional[str], typer.Option(help="Host memory of one node instead of the machine's: 1TiB.")] = None,
    save_timeline: Annotated[Optional[Path], typer.Option(metavar="FILE", help="Writes the timeline as JSON.")] = None,
    as_json: Json = False,
) -> None:
    """Predicts one training step: its time, memory and MFU, and whether it fits."""
    from sim import machine as machines
    from sim.lint import lint
    from sim.metrics import summary
    from sim.simulate import simulate

    writable(save_timeline)
    computer = machines.machine(machine).override(*(parse_bytes(size) if size else None for size in (hbm, host)))
    schedule, strategy = built(model, seq, gpus, chunk, layers, settings, offload, dtype)
    lint(schedule)
    timeline = simulate(schedule, strategy, computer)
    result = summary(timeline)
    if save_timeline:
        timeline.save(save_timeline)
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        from experiments.tables import prediction

        prediction(schedule, computer, result)


@app.command()
def show(
    model: ModelName, seq: Seq, gpus: Gpus = None, chunk: Chunk = None, layers: Layers = None, settings: Settings = [],
    offload: Offload = None, dtype: Dtype = "bf16",
    out: Annotated[Optional[Path], typer.Option(metavar="FILE", help="Writes there instead of to stdout.")] = None,
) -> None:
    """Prints a schedule as text, which `fpdt lint` and the engine read back, edited or not."""
    from sim import text

    writable(out)
    schedule, _ = built(model, seq, gpus, chunk, layers, settings, offload, dtype)
    if out:
        write(out, text.show(schedule))
    else:
        print(text.show(schedule), end="")


@app.command()
def lint(file: Annotated[Path, typer.Argument(help="A schedule as `fpdt show` prints it.")]) -> None:
    """Proves that a schedule is safe and right, or draws where it is not (on stdout, below the line on stderr)."""
    from sim import text
    from sim.lint import LintError, lint

    try:
        written = file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"schedule file {file} cannot be read ({getattr(error, 'strerror', 'not text')}); write one with fpdt show --out") from None
    schedule = text.parse(written, file.name)
    try:
        lint(schedule)
    except LintError as error:
        print(error.drawing)
        raise
    count = sum(len(region.ops) for region in schedule.regions.values())
    print(f"{file.name}: {count} ops, order and data proved; {text.digest(schedule)}")


def built(model: str, seq: str, gpus: int | None, chunk: str | None, layers: int | None, settings: list[str], offload: bool | None, dtype: str):
    """(schedule, strategy) that the options describe. Raises UserError."""
    from sim import model as models
    from sim.build.step import build
    from sim.layout import ITEM
    from sim.strategy import Strategy

    if dtype not in ITEM:
        raise unknown("dtype", dtype, ITEM)
    shapes = models.model(model, **({} if layers is None else {"layers": layers}))
    tokens = None if chunk is None else parse_tokens(chunk)
    given = {name: value for name, value in (("sp", gpus), ("chunk", tokens), ("offload", offload)) if value is not None}
    twice = [name for name in given if any(s.partition("=")[0] == name for s in settings)]
    if twice:
        raise UserError(f"{twice[0]} is given twice, by an option of its own and by --set; drop one of them")
    strategy = Strategy.parse(settings, **given)
    return build(shapes, strategy, parse_tokens(seq), dtype), strategy


def writable(path: Path | None) -> None:
    """Raises UserError, before any work is done, if a file cannot be written there."""
    if path and (path.is_dir() or not path.absolute().parent.is_dir()):
        raise UserError(f"{path} cannot be written: {'it is' if path.is_dir() else 'its folder is not'} a folder; name a file in a folder that exists")


def write(path: Path, content: str) -> None:
    """Writes a file, whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(content)
    part.replace(path)


def main(argv: list[str] | None = None) -> NoReturn:
    """Runs the command line and exits."""
    try:
        code = typer.main.get_command(app).main(argv, prog_name="fpdt", standalone_mode=False)
    except UserError as error:
        fail(str(error))
    except typer.TyperException as error:  # a wrong option or argument
        where = getattr(error, "ctx", None)
        fail(f"{error.format_message().rstrip('.')}; see {where.command_path if where else 'fpdt'} --help")
    except typer.Abort:
        sys.exit(130)
    sys.exit(code or 0)


def fail(message: str) -> NoReturn:
    """One line on stderr, exit code 2."""
    print("fpdt:", " ".join(message.split("\n")), file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
