"""fpdt: schedules for training on ultra-long sequences, proved, predicted and run.

    fpdt simulate llama3-8b --machine a100-80g-sxm --gpus 4 --seq 2M --chunk 64K

A user's mistake gets one line on stderr and exit code 2; a mistake of ours keeps its traceback and exits with 1. Each command
imports what it needs when it runs, so that none waits for torch or matplotlib without using them.
"""
from __future__ import annotations

import json
import math
import os
import shlex
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, NoReturn, Optional

import typer

from sim.errors import RankLost, UserError, unknown
from sim.files import folder, writable, write
from sim.strategy import Strategy
from sim.units import parse_bytes, parse_tokens

app = typer.Typer(help=__doc__.split("\n\n")[0], add_completion=False, pretty_exceptions_enable=False)

STOPPED = 130
"""Exit code after Ctrl-C or SIGTERM."""

ModelName = Annotated[str, typer.Argument(metavar="MODEL", help="A name that `fpdt models` lists.")]
MachineName = Annotated[str, typer.Option("--machine", help="A name that `fpdt machines` lists, or a machine's JSON file.")]
ForAuto = Annotated[Optional[str], typer.Option("--machine", help="For which machine auto is chosen; needed where --set has one.")]
Gpus = Annotated[Optional[int], typer.Option("--gpus", help="P, the ranks that share the sequence; 1 if not given.")]
Seq = Annotated[str, typer.Option("--seq", help="S in tokens: 65536, 64K, 2M.")]
Chunk = Annotated[Optional[str], typer.Option("--chunk", help="C in tokens; 64K if not given.")]
ShortChunk = Annotated[Optional[str], typer.Option("--chunk", help="C in tokens; 2K if not given.")]
Layers = Annotated[Optional[int], typer.Option("--layers", help="Layers instead of the model's own.")]
Settings = Annotated[list[str], typer.Option("--set", metavar="FIELD=VALUE", help=f"Any strategy field; repeatable. Fields and defaults: {Strategy.defaults()}.")]
Preset = Annotated[Optional[str], typer.Option("--strategy", help="Fields that go together, by name: fpdt-upstream, the released DeepSpeed FPDT as it is. --set wins over them.")]
Offload = Annotated[Optional[bool], typer.Option("--offload/--no-offload", help="KV and saved activations on the host, or in HBM; on if not given.")]
DemoName = Annotated[str, typer.Argument(metavar="MODEL", help="A name that `fpdt models` lists.")]
Link = Annotated[Optional[float], typer.Option("--link", metavar="GBPS", help="Paces host copies to this speed, each way.")]
Dtype = Annotated[str, typer.Option("--dtype", help="bf16 or fp32.")]
Zero = Annotated[Optional[int], typer.Option("--zero", help="ZeRO stage of the model states: 0 or 3; 3 if not given.")]
Hbm = Annotated[Optional[str], typer.Option(help="Device memory of one GPU instead of the machine's: 80GiB.")]
Host = Annotated[Optional[str], typer.Option(help="Host memory of one node instead of the machine's: 1TiB.")]
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
def kernels(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A name that `fpdt models` lists.")] = "llama3-8b", gpus: Gpus = None, dtype: Dtype = "bf16",
) -> None:
    """Lists the attention kernels: what is installed, how fast it is here, which is used for what, and why."""
    shapes, strategy = chosen(model, gpus, None, None, [], None)
    strategy.check(shapes, strategy.chunk)
    dtype = one_of_dtypes(dtype)
    from experiments.kernels import kernels_command

    kernels_command(shapes, strategy.sp, dtype)


@app.command()
def simulate(
    model: ModelName, seq: Seq, machine: MachineName, gpus: Gpus = None, chunk: Chunk = None, layers: Layers = None,
    preset: Preset = None, settings: Settings = [], offload: Offload = None, dtype: Dtype = "bf16",
    hbm: Hbm = None, host: Host = None,
    save_timeline: Annotated[Optional[Path], typer.Option(metavar="FILE", help="Writes the timeline as JSON.")] = None,
    as_json: Json = False,
) -> None:
    """Predicts one training step: its time, memory and MFU, and whether it fits."""
    from sim.lint import lint
    from sim.metrics import summary
    from sim.simulate import simulate

    writable(save_timeline)
    computer = computer_of(machine, hbm, host)
    said: list[str] = []
    schedule, strategy = built(model, seq, gpus, chunk, layers, preset_settings(preset, settings), offload, dtype, machine=computer, say=said.append)
    lint(schedule)
    timeline = simulate(schedule, strategy, computer)
    result = summary(timeline)
    if schedule.seq != parse_tokens(seq):
        result["assumptions"] += [f"S={parse_tokens(seq)} is padded to {schedule.seq}, a multiple of P={schedule.P}, with ignored labels"]
    if save_timeline:
        timeline.save(save_timeline)
    if as_json:
        print(json.dumps({"inputs": inputs(model, machine, strategy, dtype, said, layers=schedule.layers, seq=parse_tokens(seq))} | result, indent=2))
    else:
        from experiments.tables import prediction

        for line in said:
            print(line)
        prediction(schedule, computer, timeline, result)


@app.command()
def longest(
    model: ModelName, machine: MachineName, gpus: Gpus = None, chunk: Chunk = None, layers: Layers = None,
    preset: Preset = None, settings: Settings = [], offload: Offload = None, dtype: Dtype = "bf16", hbm: Hbm = None, host: Host = None, as_json: Json = False,
) -> None:
    """Predicts the longest S, of 2^k and 3 x 2^k tokens, whose step fits a machine's memory."""
    from sim.metrics import longest_fit
    from sim.units import show_tokens

    computer = computer_of(machine, hbm, host)
    shapes, strategy = chosen(model, gpus, chunk, layers, preset_settings(preset, settings), offload)
    if automatic := strategy.autos:
        raise UserError(f"{automatic[0]}=auto is chosen for one S; give it a value, such as --set {automatic[0]}={getattr(Strategy(), automatic[0])}")
    strategy.check(shapes, strategy.chunk)
    tokens = longest_fit(shapes, strategy, computer, one_of_dtypes(dtype))
    if as_json:
        print(json.dumps({"inputs": inputs(model, machine, strategy, dtype, layers=shapes.layers), "seq": tokens}, indent=2))
    else:
        print(f"{shapes.name}, {shapes.layers} layers, on {computer.name}, C={show_tokens(strategy.chunk)} P={strategy.sp} {dtype}: " + (
            f"S={show_tokens(tokens)} fits, and nothing longer of 2^k and 3 x 2^k" if tokens else "no S fits; try more GPUs, fewer --layers or a smaller --chunk"))


@app.command()
def show(
    model: ModelName, seq: Seq, gpus: Gpus = None, chunk: Chunk = None, layers: Layers = None, preset: Preset = None, settings: Settings = [],
    offload: Offload = None, dtype: Dtype = "bf16", machine: ForAuto = None,
    out: Annotated[Optional[Path], typer.Option(metavar="FILE", help="Writes there instead of to stdout.")] = None,
) -> None:
    """Prints a schedule as text, which `fpdt lint` and the engine read back, edited or not."""
    from sim import text

    writable(out)
    computer = computer_of(machine)
    schedule, _ = built(model, seq, gpus, chunk, layers, preset_settings(preset, settings), offload, dtype, machine=computer, say=note)
    if out:
        write(out, text.show(schedule))
    else:
        print(text.show(schedule), end="")


@app.command()
def lint(file: Annotated[Path, typer.Argument(help="A schedule as `fpdt show` prints it.")]) -> None:
    """Proves that a schedule is safe and right, or draws where it is not (on stdout, below the line on stderr)."""
    from sim import text
    from sim.lint import LintError, lint

    schedule = read_schedule(file)
    try:
        lint(schedule)
    except LintError as error:
        print(error.drawing)
        raise
    count = sum(len(region.ops) for region in schedule.regions.values())
    print(f"{file.name}: {count} ops, order and data proved; {text.digest(schedule)}")


@app.command("explain-upstream")
def explain_upstream(
    model: ModelName, seq: Seq, machine: MachineName, gpus: Gpus = None, chunk: Chunk = None, settings: Settings = [],
    part: Annotated[str, typer.Option(help="attention: the half of a block that the released code replaces; or block.")] = "attention",
    dtype: Dtype = "bf16", as_json: Json = False,
) -> None:
    """Predicts one layer by the released DeepSpeed FPDT, and what each thing costs that it does otherwise."""
    from experiments.upstream import explain, report
    from sim.layout import pad

    computer = computer_of(machine)
    if part not in ("attention", "block"):
        raise unknown("part", part, ("attention", "block"))
    shapes, strategy = chosen(model, gpus, chunk, None, settings, None)
    tokens = parse_tokens(seq)
    strategy.check(shapes, tokens)
    said: list[str] = []
    found = explain(shapes, strategy, computer, tokens, one_of_dtypes(dtype), part, said.append)
    if as_json:
        print(json.dumps({"inputs": inputs(model, machine, strategy, dtype, said, seq=tokens)} | found, indent=2))
    else:
        for line in said:
            print(line)
        report(shapes, strategy, computer, pad(tokens, strategy.sp), found)


@app.command()
def calibrate(
    model: DemoName = "demo", gpus: Gpus = None, dtype: Dtype = "fp32", link: Link = None,
    micro: Annotated[bool | None, typer.Option("--micro/--no-micro", help="Microbenchmarks too: streams together, other sizes and kernels, the host. On GPUs they run unless refused; 2 minutes.", show_default=False)] = None,
    out: Annotated[Path, typer.Option(metavar="FILE", help="The machine it writes.")] = Path("cpu.json"),
) -> None:
    """Measures this machine, its GPUs or else its CPU cores, for predictions about it. Under torchrun it uses torchrun's ranks."""
    writable(out)
    positive("--link", link, 10)
    shapes, strategy = chosen(model, all_ranks(gpus), None, None, [], None)
    strategy.check(shapes, strategy.chunk)
    from engine.world import started
    from experiments.calibrate import calibrate_command

    if not started():
        stoppable()
    calibrate_command(shapes, strategy.sp, one_of_dtypes(dtype), link, out, micro)


@app.command()
def compare(
    model: DemoName = "demo", gpus: Gpus = None, layers: Layers = None, seq: Seq = "16K",
    chunk: ShortChunk = None,
    settings: Settings = [], offload: Offload = None, zero: Zero = None, dtype: Dtype = "fp32", link: Link = None,
    steps: Annotated[int, typer.Option(min=3, help="Training steps: one warms up, then traced and untraced ones in turn.")] = 6,
    machine: Annotated[Optional[str], typer.Option(metavar="FILE", help="What `fpdt calibrate` wrote; calibrates first if not given.")] = None,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where the results go.")] = Path("results/compare"),
) -> None:
    """Predicts a schedule, trains by it on this machine's GPUs, or else its CPU cores (launching its own ranks), and prints both."""
    positive("--link", link, 10)
    shapes, strategy = chosen(model, gpus, short(chunk, settings), layers, settings, offload, zero)
    computer = computer_of(machine)
    strategy.check(shapes, parse_tokens(seq))
    dtype = one_of_dtypes(dtype)
    from experiments.compare import compare

    stoppable()
    command = shlex.join(["fpdt", *sys.argv[1:]])
    compare(shapes, strategy, parse_tokens(seq), dtype, steps=steps, machine=computer, link_GBps=link, out=out, command=command)


@app.command()
def explain(
    a: Annotated[Path, typer.Argument(metavar="A.json", help="A timeline: predicted.json or measured.json of `fpdt compare`, or what `fpdt simulate --save-timeline` wrote.")],
    b: Annotated[Path, typer.Argument(metavar="B.json", help="Another one. Differences are A - B: the prediction goes first.")],
    schedule: Annotated[Optional[Path], typer.Option(metavar="FILE", help="The schedule of both, for timelines that do not carry what their ops wait for.")] = None,
    top: Annotated[int, typer.Option(min=1, help="Lines a table.")] = 10,
    as_json: Json = False,
) -> None:
    """Shows where two timelines part: by op, by kind, and on the critical path of each."""
    from experiments.explain import explain_command

    explain_command(a, b, schedule and read_schedule(schedule), top, as_json)


@app.command()
def bench(
    model: ModelName, seq: Seq, gpus: Gpus = None, chunk: Chunk = None, settings: Settings = [],
    part: Annotated[str, typer.Option(help="block, or attention: the half that DeepSpeed's FPDT_Attention replaces.")] = "block",
    rows: Annotated[str, typer.Option(help="Which rows, comma-separated.")] = "engine,resident,bound,ulysses,ring,deepspeed",
    repeats: Annotated[int, typer.Option(min=1, help="Times each row is measured, after two warm-ups.")] = 5,
    kernel: Annotated[str, typer.Option(metavar="NAME", help="The attention kernel of every row, by its adapter's name (cudnn, torch_flash, flash_attn_4, ...); the fastest if not given.")] = "",
    dtype: Annotated[Optional[str], typer.Option("--dtype", help="bf16 or fp32; bf16 on GPUs, fp32 on CPU if not given.")] = None,
    machine: Annotated[Optional[str], typer.Option("--machine", help="Whose peak mfu_causal is of; the published one of a known GPU if not given.")] = None,
    out: Annotated[Path, typer.Option(metavar="FOLDER", help="Where bench.json goes.")] = Path("results/bench"),
) -> None:
    """Measures one block by this engine, beside its kernel bound, Ulysses in one piece, ring attention and DeepSpeed's FPDT."""
    shapes, strategy = chosen(model, gpus, chunk, None, settings, None)
    strategy.check(shapes, parse_tokens(seq))
    dtype = dtype and one_of_dtypes(dtype)
    computer = computer_of(machine)
    from experiments.bench import bench, chosen_rows, one_of_parts

    part, rows = one_of_parts(part), chosen_rows(rows)
    stoppable()
    bench(shapes, strategy, parse_tokens(seq), dtype, part=part, rows=rows, repeats=repeats, kernel=kernel, machine=computer, out=out, command=shlex.join(["fpdt", *sys.argv[1:]]))


@app.command()
def validate(
    gpus: Annotated[Optional[int], typer.Option("--gpus", min=1, help="Most ranks of a configuration; two, or as many as there are, if not given.")] = None,
    seed: Annotated[int, typer.Option(help="Draws the grid.")] = 0,
    count: Annotated[Optional[int], typer.Option(min=1, help="Configurations; 64 on GPUs, 8 on CPU if not given.")] = None,
    budget: Annotated[Optional[float], typer.Option(metavar="MINUTES", help="That the configurations may take, as predicted; 25 on GPUs, 3 on CPU if not given.")] = None,
    hbm: Annotated[Optional[str], typer.Option(help="Device memory of one GPU instead of what there is: 80GiB.")] = None,
    host: Annotated[Optional[str], typer.Option(help="Host memory of this node instead of what there is: 1TiB.")] = None,
    plan: Annotated[Optional[str], typer.Option(metavar="MACHINE", help="Only lists the grid that this machine would get: a name that `fpdt machines` lists, or a file. With --out it is written there, to go on with.")] = None,
    by: Annotated[Optional[str], typer.Option(metavar="MACHINE", help="Runs nothing: how well this machine's profile tells what was measured in --out.")] = None,
    out: Annotated[Optional[Path], typer.Option(metavar="FOLDER", help="Where grid, rows and picture go, results/validate if not given; a run that was interrupted goes on there.")] = None,
) -> None:
    """Predicts and measures a grid of held-out configurations on this machine, and holds the errors against bars: exits with 1 if one is missed."""
    positive("--budget", budget, 25)
    sizes = {name: None if size is None else parse_bytes(size) for name, size in (("hbm_bytes", hbm), ("host_bytes", host))}
    asked = {"seed": seed, "count": count, "budget_min": budget, "gpus": gpus, **sizes, "command": shlex.join(["fpdt", *sys.argv[1:]])}
    from sim import machine as machines

    if by is not None and plan is not None:
        raise UserError("--plan draws a grid and --by judges one that was measured; give one of them")
    if by is not None:
        if unused := [f"--{name}" for name, value in (("seed", seed or None), ("count", count), ("budget", budget), ("gpus", gpus), ("hbm", hbm), ("host", host)) if value is not None]:
            raise UserError(f"--by draws nothing, its rows are those of --out; leave out {' '.join(unused)}")
        computer = machines.machine(by)
        from experiments.validate.by import by as told

        told(computer, out or Path("results/validate"))
        return
    if plan is not None:
        computer = machines.machine(plan)
        from experiments.validate.run import plan as listed

        listed(computer, **asked, out=out)
        return
    next(map(machines.load, machines.presets().values())).override(**sizes)  # a wrong size is said before anything starts
    from experiments.validate.run import validate

    stoppable()
    if not validate(**asked, out=out or Path("results/validate")):
        raise typer.Exit(1)


@app.command()
def train(
    model: DemoName = "demo", gpus: Gpus = None, layers: Layers = None, seq: Seq = "16K", chunk: ShortChunk = None,
    settings: Settings = [], offload: Offload = None, zero: Zero = None, machine: ForAuto = None,
    dtype: Annotated[Optional[str], typer.Option("--dtype", help="bf16 or fp32; bf16 on GPUs, fp32 on CPU if not given.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps of the whole training, those of earlier runs included.")] = 20,
    lr: Annotated[float, typer.Option(help="AdamW's learning rate.")] = 3e-3,
    clip: Annotated[Optional[float], typer.Option(min=0, help="Largest global gradient norm; not clipped if not given.")] = None,
    checkpoint: Annotated[Optional[Path], typer.Option(metavar="FOLDER", help="Where checkpoints go; the last two are kept.")] = None,
    every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 10,
    resume: Annotated[bool, typer.Option("--resume", help="Goes on from the newest checkpoint, on any number of ranks.")] = False,
    log: Annotated[Optional[Path], typer.Option(metavar="FILE", help="A line of JSON a step; steps.jsonl beside the checkpoints if not given.")] = None,
) -> None:
    """Trains on the text of Python's standard library: on GPUs where there are any, else on CPU cores. Under torchrun it uses torchrun's ranks."""
    positive("--lr", lr, 3e-3)
    if resume and not checkpoint:
        raise UserError("--resume needs the folder to resume from; name it with --checkpoint")
    ranks = all_ranks(gpus)
    import torch

    from engine.resume import done
    from engine.training import Training
    from engine.worker import Job
    from engine.world import started, world
    from experiments.train import train_command
    from sim import text

    device = "cuda" if torch.cuda.is_available() else "cpu"
    host_sync = [] if device == "cuda" or any(setting.startswith("host_sync=") for setting in settings) else ["host_sync=region"]
    dtype = dtype or ("bf16" if device == "cuda" else "fp32")
    computer = computer_of(machine)
    say = note if world().rank == 0 else lambda line: None
    schedule, strategy = built(model, seq, ranks, short(chunk, settings), layers, settings + host_sync, offload, dtype, zero, computer, say)
    job = Job(text.show(schedule), steps, lr=lr, zero=strategy.zero, clip=clip, device=device)
    if checkpoint:
        at = done(checkpoint, schedule, resume)
        if resume and at >= steps:
            print(f"{checkpoint} is at step {at} already; for more steps than {steps} give --steps")
            return
        if not resume:
            folder(checkpoint)
    log = log or (checkpoint and checkpoint / "steps.jsonl")
    writable(log)
    if not started():
        stoppable()
    train_command(schedule, strategy, Training(job, checkpoint and str(checkpoint), every, resume, log and str(log)))


def all_ranks(gpus: int | None) -> int | None:
    """As many as torchrun has started, else those that were asked for. Raises UserError where both are said and differ."""
    from engine.world import started, world

    ranks = world().size if started() else gpus
    if gpus not in (None, ranks):
        raise UserError(f"--gpus {gpus} is not the {ranks} ranks that torchrun has started; drop it")
    return ranks


def preset_settings(name: str | None, settings: list[str]) -> list[str]:
    """The settings of a strategy known by name that are not given anyway, and those given. Raises UserError."""
    from sim.upstream import FIELDS, NAME

    if name not in (None, NAME):
        raise unknown("strategy", name, [NAME])
    given = {setting.partition("=")[0] for setting in settings}
    return [f"{field}={value}" for field, value in FIELDS.items() if name and field not in given] + settings


def read_schedule(file: Path):
    """A schedule from a file, as `fpdt show` writes it. Raises UserError."""
    from sim import text

    try:
        written = file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"schedule file {file} cannot be read ({getattr(error, 'strerror', 'not text')}); write one with fpdt show --out") from None
    return text.parse(written, file.name)


def short(chunk: str | None, settings: list[str]) -> str | None:
    """The chunk of commands that run here, if none is given: one that cuts their short sequences."""
    return "2K" if chunk is None and not any(setting.startswith("chunk=") for setting in settings) else chunk


def built(model: str, seq: str, gpus: int | None, chunk: str | None, layers: int | None, settings: list[str], offload: bool | None, dtype: str, zero: int | None = None,
          machine=None, say: Callable[[str], object] = print):
    """(schedule, strategy) that the options describe, what is auto chosen for a sim.machine.Machine, which `say` is told. Raises UserError."""
    from experiments.auto import settled
    from sim.build.step import build

    shapes, strategy = chosen(model, gpus, chunk, layers, settings, offload, zero)
    dtype = one_of_dtypes(dtype)
    strategy = settled(shapes, strategy, parse_tokens(seq), dtype, machine, say)
    return build(shapes, strategy, parse_tokens(seq), dtype), strategy


def computer_of(machine: str | None, hbm: str | None = None, host: str | None = None):
    """The sim.machine.Machine of this name or file, with other capacities where they are given; None of None. Raises UserError."""
    from sim.machine import machine as find

    return None if machine is None else find(machine).override(*(None if size is None else parse_bytes(size) for size in (hbm, host)))


def inputs(model: str, machine: str, strategy: Strategy, dtype: str, said: list[str] = [], **also) -> dict:
    """What a result as JSON says it is of; said: the line of what auto came to, if any."""
    return {"model": model, "machine": machine, **also, "chunk": strategy.chunk, "gpus": strategy.sp, "strategy": asdict(strategy), "dtype": dtype} | ({"auto": said[0]} if said else {})


def note(line: str) -> None:
    """A line for people where stdout is for programs."""
    print(line, file=sys.stderr)


def chosen(model: str, gpus: int | None, chunk: str | None, layers: int | None, settings: list[str], offload: bool | None, zero: int | None = None):
    """(model, strategy) that the options describe. Raises UserError."""
    from sim.model import model as find

    tokens = None if chunk is None else parse_tokens(chunk)
    given = {name: value for name, value in (("sp", gpus), ("chunk", tokens), ("offload", offload), ("zero", zero)) if value is not None}
    for name in given:
        if any(setting.partition("=")[0] == name for setting in settings):
            raise UserError(f"{name} is given twice, by an option of its own and by --set; drop one of them")
    return find(model, **({} if layers is None else {"layers": layers})), Strategy.parse(settings, **given)


def one_of_dtypes(dtype: str) -> str:
    """The dtype itself. Raises UserError if there is no such one."""
    from sim.layout import ITEM

    if dtype not in ITEM:
        raise unknown("dtype", dtype, ITEM)
    return dtype


def positive(name: str, value: float | None, example: float) -> None:
    """Raises UserError unless a number that was given is positive and finite."""
    if value is not None and not (math.isfinite(value) and value > 0):
        raise UserError(f"{name} {value} must be a positive number; try {name} {example}")


def stoppable() -> None:
    """From here on SIGTERM ends the command as Ctrl-C does: ranks and temporary files go with it."""

    def stop(*_) -> NoReturn:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, stop)


def main(argv: list[str] | None = None) -> NoReturn:
    """Runs the command line and exits."""
    try:
        code = typer.main.get_command(app).main(argv, prog_name="fpdt", standalone_mode=False)
    except UserError as error:
        fail(str(error))
    except RankLost as error:
        fail(str(error), 1)
    except typer.TyperException as error:  # a wrong option or argument
        where = getattr(error, "ctx", None)
        fail(f"{error.format_message().rstrip('.')} (see {where.command_path if where else 'fpdt'} --help)")
    except typer.Abort:
        code = STOPPED
    if code == STOPPED:  # typer's own for Ctrl-C
        fail("stopped", code)
    sys.exit(code or 0)


def fail(message: str, code: int = 2) -> NoReturn:
    """One line on stderr, and an exit code."""
    line = "fpdt: " + " ".join(message.split("\n"))
    if "RANK" in os.environ:  # one of several ranks
        from engine.stop import leave

        leave(line, code)
    print(line, file=sys.stderr, flush=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
