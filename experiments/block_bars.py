"""The bars of a block on GPUs, judged on what experiments.bench_block measured: one line a bar, what it is and what was asked."""
from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from statistics import median

from experiments.bench import causal_flops, issue_share, peak_TFLOPS
from sim.errors import UserError
from sim.model import Model, model
from sim.units import parse_tokens

OFFLOAD = {"64K": 0.97, "32K": 0.97, "8K": 0.90}
"""By C: least time with everything in HBM over the time with KV and saved activations on the host."""
OFFLOAD_MHA_8K = 0.88
BOUND, MFU, ISSUE, PEAK, HALF_CHUNK = 0.95, 0.48, 0.10, 0.01, 0.55
PEERS = {
    "llama3-8b S=512K C=64K": ("llama3-8b S=512K C=64K deepspeed", 1.75), "llama3-8b S=128K C=64K": ("llama3-8b S=128K C=64K deepspeed", 3.2),
    "llama3-8b S=128K C=64K hidden=host": ("llama3-8b S=128K C=64K deepspeed", 3.2),
    "gpt-6.7b S=512K C=64K accum=host": ("gpt-6.7b S=512K C=64K deepspeed", 1.6),
    "llama3-8b S=512K C=64K against FA2": ("llama3-8b S=512K C=64K torch_flash deepspeed", 2.5),
}
"""Engine's case -> (DeepSpeed's row, least ratio of its time to ours)."""


def judge(folder: Path) -> list[dict]:
    """{"bar", "value", "asked", "holds"} of every bar that a file of the folder has rows for."""
    files = {path.stem: read(path) for path in sorted(folder.glob("*.json")) if path.stem.split("-")[0] in (*_PLANS, "peers")}
    found: list[dict] = []
    for stem, data in files.items():
        if (plan := stem.split("-")[0]) in _PLANS:
            found += [line | {"file": stem} for line in _PLANS[plan](data["rows"], data["gpus"])]
    return found + list(_peers([data["rows"] for stem, data in files.items() if stem.startswith("peers")]))


def read(path: Path) -> dict:
    """A file of experiments.bench_block. Raises UserError."""
    try:
        data = json.loads(path.read_text())
        for row in data["rows"].values():
            row["row"], row["name"]
        data["gpus"]
        return data
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"{path} is none of bench_block's files ({error}); remove it, or name another folder with --out") from None


def _line(bar: str, value: float, asked: float, least: bool = True) -> dict:
    return {"bar": bar, "value": round(value, 4), "asked": f"{'at least' if least else 'at most'} {asked}", "holds": value >= asked if least else value <= asked}


def _offload(rows: dict[str, dict], P: int) -> Iterable[dict]:
    for key, row in rows.items():
        if row["row"] != "engine" or "reason" in row:
            continue
        case, m, S = key.removesuffix(" engine"), model(row["name"]), parse_tokens(row["S"])
        resident, bound = (rows.get(f"{case} {other}", {}) for other in ("resident", "bound"))
        if "median_total_s" in resident:
            asked = OFFLOAD_MHA_8K if row["C"] == "8K" and m.kv_heads == m.heads else OFFLOAD[row["C"]]
            yield _line(f"{case}: resident / offloaded", resident["median_total_s"] / row["median_total_s"], asked)
        if "median_total_s" in bound:
            yield _line(f"{case}: kernel bound / step", bound["median_total_s"] / row["median_total_s"], BOUND)
        if row["S"] == "512K" and row["name"] == "llama3-8b" and row["C"] != "8K":
            peak = peak_TFLOPS([row], "bf16", None)
            yield _line(f"{case}: mfu_causal", causal_flops(m, S, "block") / (row["median_total_s"] * P * peak * 1e12), MFU)
        if parse_tokens(row["C"]) >= 16384:
            yield _line(f"{case}: host time to issue / step", issue_share(row), ISSUE, least=False)


def _memory(rows: dict[str, dict], P: int) -> Iterable[dict]:
    peaks = {(row["S"], row["C"]): row["peak_hbm_bytes"] for row in rows.values() if row.get("peak_hbm_bytes")}
    whole = [peak for (_, C), peak in peaks.items() if C == "32K"]
    if not {("128K", "16K"), ("128K", "32K")} <= peaks.keys():
        yield _line("HBM peaks at S=128K, C=16K and 32K: measured", sum((("128K", C) in peaks) for C in ("16K", "32K")), 2)
        return
    yield _line(f"HBM peaks at C=32K, S from {' '.join(S for S, C in peaks if C == '32K')}: largest / smallest - 1", max(whole) / min(whole) - 1, PEAK, least=False)
    fixed = weights_bytes(model("llama3-8b"))
    half = peaks["128K", "16K"] - fixed
    yield _line("HBM peak beside weights and their gradients: C=16K / C=32K", half / (peaks["128K", "32K"] - fixed), HALF_CHUNK, least=False)


def weights_bytes(m: Model) -> int:
    """A block's weights in bf16 and the fp32 sums of their gradients."""
    return (2 + 4) * m.block_params


def _million(rows: dict[str, dict], P: int) -> Iterable[dict]:
    for key, row in rows.items():
        yield _line(f"{key}: done in s", row.get("median_total_s", 0.0), 0.0) | {"holds": "reason" not in row}


def _peers(processes: list[dict[str, dict]]) -> Iterable[dict]:
    for case, (other, asked) in PEERS.items():
        mine = f"{case.removesuffix(' against FA2')} engine"
        ours, theirs = ([rows[key] for rows in processes if "median_total_s" in rows.get(key, {})] for key in (mine, other))
        if not ours or not theirs:
            continue
        yield _line(f"{case}: DeepSpeed / engine, {min(len(ours), len(theirs))} processes", median(r["median_total_s"] for r in theirs) / median(r["median_total_s"] for r in ours), asked)
        peaks = [[row["peak_hbm_bytes"] for row in rows if row["peak_hbm_bytes"]] for rows in (ours, theirs)]
        if "FA2" not in case and all(peaks):
            mine, other = map(median, peaks)
            yield _line(f"{case}: HBM peak, engine / DeepSpeed", mine / other, 1.0, least=False)


_PLANS = {"offload": _offload, "memory": _memory, "million": _million}
