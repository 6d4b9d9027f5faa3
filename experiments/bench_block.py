"""The engine against its bars on GPUs: python -m experiments.bench_block PLAN [--gpus 2] [--process 1] [--only TEXT] [--out results/bars/block]

    offload   KV and saved activations on the host against everything in HBM, and the kernel bound; llama3-8b (GQA) and gpt-6.7b (MHA)
    memory    HBM peak with all long tensors on the host, S from 128K to 1M
    million   S = 1M on one GPU
    peers     the attention half against DeepSpeed's FPDT with offload, on the same kernel and on FA2; once for each --process

All rows of a plan run in one set of ranks, one after the other, so that imports and compilation are paid once. Each is written to
OUT/PLAN-Ngpu[-pK].json as soon as it is there; what an interrupted run left out (of the same day, machine and versions) is measured next time.
`judge` reads the folder and exits with 1 if a bar is missed.
"""
from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path

from engine import probe
from engine.worker import check_gpus
from experiments.bars import progress
from experiments.bench import cases
from experiments.block_bars import judge, read
from experiments.peers.case import Case
from experiments.peers.rows import measure
from sim.errors import UserError
from sim.files import folder, write
from sim.model import model
from sim.strategy import Strategy
from sim.units import parse_tokens

MODELS = ("llama3-8b", "gpt-6.7b")
HOST = {"hidden": "host", "accum": "host"}
"""All long tensors on the host."""


def row(name: str, S: str, C: str, rows: str, part: str = "block", repeats: int = 3, warm_ups: int = 1, load_s: float = 0.0, kernel: str = "", **settings):
    """(key, what to measure) of some rows of one case."""
    for each in rows.split():
        words = (name, f"S={S}", f"C={C}", *(f"{k}={v}" for k, v in settings.items()), *([kernel] if kernel else []), each)
        yield " ".join(words), dict(name=name, S=S, C=C, row=each, part=part, repeats=repeats, warm_ups=warm_ups, load_s=load_s, kernel=kernel, settings=settings)


def offload(P: int) -> Iterator:
    """The first row warms the card up for all."""
    load_s = 3.0
    for name in MODELS if P > 1 else MODELS[:1]:
        for S in ("256K", "512K") if P > 1 else ("256K",):
            for C in ("64K", "32K", "8K"):
                bound = " bound" * (S == "512K" and C != "8K")
                yield from row(name, S, C, "engine resident" + bound, load_s=load_s, warm_ups=1)
                load_s = 0.0
            yield from row(name, S, "16K", "engine", repeats=1)


def memory(P: int) -> Iterator:
    yield from row("llama3-8b", "128K", "16K", "engine", repeats=1, **HOST)
    for S in ("128K", "256K", "512K", "1M"):
        yield from row("llama3-8b", S, "32K", "engine", repeats=1, **HOST)


def million(P: int) -> Iterator:
    yield from row("llama3-8b", "1M", "32K", "engine", repeats=1, warm_ups=0, **HOST)


def peers(P: int) -> Iterator:
    part = {"part": "attention", "repeats": 3, "warm_ups": 2}
    yield from row("llama3-8b", "128K", "64K", "engine deepspeed", load_s=3.0, **part)
    yield from row("llama3-8b", "128K", "64K", "engine", hidden="host", **part)
    part |= {"repeats": 1, "warm_ups": 1}
    yield from row("llama3-8b", "512K", "64K", "engine deepspeed", **part)
    yield from row("gpt-6.7b", "512K", "64K", "engine", accum="host", **part)
    yield from row("gpt-6.7b", "512K", "64K", "deepspeed", **part)
    yield from row("llama3-8b", "512K", "64K", "deepspeed", kernel="torch_flash", **part)


PLANS = {"offload": offload, "memory": memory, "million": million, "peers": peers}


def case(name: str, S: str, C: str, row: str, part: str, repeats: int, warm_ups: int, load_s: float, kernel: str, settings: dict, P: int, device: str) -> Case:
    """What a row's ranks are sent; errors are for fpdt bench and the tests."""
    strategy = Strategy(sp=P, chunk=parse_tokens(C), **settings)
    found = cases(model(name), strategy, parse_tokens(S), "bf16" if device == "cuda" else "fp32", part, [row], repeats, device, kernel)[row]
    found.small, found.warm_ups, found.load_s = "", warm_ups, load_s
    return found


def main() -> None:
    try:
        run()
    except UserError as error:
        print(f"bench_block: {error}", file=sys.stderr)
        sys.exit(2)


def run() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("plan", choices=(*PLANS, "judge"))
    parser.add_argument("--gpus", type=int, default=2)
    parser.add_argument("--only", default="", help="only rows whose name has this in it; or one of several, between |")
    parser.add_argument("--process", type=int, default=0, help="which of several runs of a plan this is")
    parser.add_argument("--out", type=Path, default=Path("results/bars/block"))
    args = parser.parse_args()
    if args.plan == "judge":
        for line in (verdict := judge(args.out)):
            print(f"{'holds ' if line['holds'] else 'MISSED'}  {line['bar']}: {line['value']} ({line['asked']}) {line.get('file', '')}")
        sys.exit(0 if verdict and all(line["holds"] for line in verdict) else 1)
    device = probe.device()
    if device == "cuda":
        check_gpus(args.gpus)
    folder(args.out)
    path = args.out / f"{args.plan}-{args.gpus}gpu{f'-p{args.process}' * bool(args.process)}.json"
    head = {"provenance": probe.provenance(), "command": f"python -m experiments.bench_block {' '.join(sys.argv[1:])}"}
    earlier = read(path) if path.exists() else {}
    results = earlier["rows"] if earlier.get("provenance") == head["provenance"] else {}
    wanted = {key: spec for key, spec in PLANS[args.plan](args.gpus) if "median_total_s" not in results.get(key, {}) and any(part in key for part in args.only.split("|"))}

    def keep(key: str, found: dict) -> None:
        results[key] = {k: v for k, v in wanted[key].items() if k != "row"} | found
        write(path, json.dumps(head | {"gpus": args.gpus, "rows": results}, indent=1) + "\n")

    with progress() as bar:
        measure({key: case(**spec, P=args.gpus, device=device) for key, spec in wanted.items()}, args.gpus, bar, keep)
    for key, found in results.items():
        print(f"{key}: " + (found["reason"] if "reason" in found else f"{found['median_total_s']:.3f} s, peak {(found['peak_hbm_bytes'] or 0) / 2**30:.2f} GiB"))


if __name__ == "__main__":
    main()
