"""Machine: capacities, links and rates of one kind of computer, each number with where it comes from.

A number's source is `published: ...`, `measured: ...`, `assumed: why` or `given by user`. Fits are cost curves that a calibration
measured, one an op kind (sim.ops.key); where there is none, rates price an op. `slowdown` says how fast each of several streams
runs while all of them are busy; a set of streams runs no slower than the slowest part of it that was measured. Points are what
microbenchmarks measured, one by one, with spread, clock and power: the fits and the table come from them and from traces.
"""
from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from sim.errors import UserError, unknown
from sim.files import write
from sim.kernels import KERNELS, parted

NUMBERS = {
    "peak_TFLOPS": ("positive", "what MFU is a share of"),
    "hbm_bytes": ("positive", "device memory of one rank"),
    "host_bytes": ("positive", "host memory of a node"),
    "gpus_per_node": ("count", "ranks that share a node's memory and its fast interconnect"),
    "gpus_per_uplink": ("count", "ranks that share one link to the host"),
    "gemm_TFLOPS": ("positive", "matrix products"),
    "attn_fwd_TFLOPS": ("positive", "attention forward, 2 products a pair"),
    "attn_bwd_TFLOPS": ("positive", "attention backward, 5 products a pair"),
    "hbm_GBps": ("positive", "device memory"),
    "h2d_GBps": ("positive", "host to device, one uplink"),
    "d2h_GBps": ("positive", "device to host, one uplink"),
    "nvlink_GBps": ("positive", "between ranks of a node, one direction, a rank"),
    "network_GBps": ("positive", "between nodes, one direction, a rank"),
    "launch_ns": ("non-negative", "host time until the first work of an op is issued, and all of it where its kind has no issue_ns"),
    "wake_ns": ("non-negative", "from an op's end to the start of one on another stream that had to wait for it"),
    "gap_ns": ("non-negative", "between two ops of one stream"),
    "queue_depth": ("count", "issued ops that are not finished; past it the host blocks"),
}
"""Every number a machine has: (rule, meaning). GBps are 10^9 bytes a second, TFLOPS 10^12 FLOPs a second."""

OPTIONAL = {
    "pin_GBps": ("positive", "host memory taken and pinned at run time"),
    "zero_GBps": ("positive", "pinned host memory set to zero by the host"),
    "sync_ns": ("non-negative", "from the end of what the host waits for until it goes on"),
    "blas_bytes": ("positive", "device memory that the library of matrix products keeps for itself, beside what each op takes"),
    "clock_MHz": ("positive", "clock that cost curves hold at"),
    "clock_max_MHz": ("positive", "the most that its clock rises to"),
    "power_TFLOPS": ("positive", "TFLOP/s that its power allows at clock_max_MHz"),
    "head_dim": ("count", "head_dim of the attention that cost curves, or rates, were measured on"),
    "region_ns": ("non-negative", "the host's own work before each region, autograd's included"),
    "step_ns": ("non-negative", "what a step takes before the first and after the last of its work: data, and the host's wait for the loss"),
}
"""Numbers that a machine may lack: then they are N/A, what they would price costs nothing, and predictions that need them say so."""

TEXTS = ("peak_name",)
"""Numbers that are words: what the peak is."""

_CARDS = {
    "NVIDIA H200": "h200-141g-sxm", "NVIDIA H100 80GB HBM3": "h100-80g-sxm",
    "NVIDIA A100-SXM4-80GB": "a100-80g-sxm", "NVIDIA A100-SXM4-40GB": "a100-40g-sxm",
}
"""GPU, as its driver names it -> its machine."""

NAMED = {"kernel": "torch flash (FA2)", "dtype": "bf16", "model": "llama3-8b"}
"""What a calibration may name beside its numbers, and an example."""

FORMAT = 2
"""Of a file with cost curves; it changes with what these mean: 2 since issue_ns is a sub-chunk's."""
MOST = 1e15
"""Larger numbers, and smaller ones than one in as many, are no machine's."""
NEVER = "never measured"
"""The source of a number that is not there."""
_EXAMPLE = {"positive": 1, "non-negative": 0, "count": 1}
_STREAMS = ("compute", "comm", "h2d", "d2h")
_FIT = ("fixed_ns", "ns_per_gflop", "ns_per_MB", "issue_ns")


@dataclass(frozen=True)
class Machine:
    """One kind of computer. Raises UserError on a missing, negative or unreadable number, naming where it came from."""

    name: str
    kind: str
    """cuda or cpu."""
    numbers: dict[str, dict]
    """name -> {"value", "source"}."""
    fits: dict[str, dict] = field(default_factory=dict)
    """sim.ops.key of an op -> {"fixed_ns", "ns_per_gflop", "ns_per_MB", "issue_ns", "bend", "source"}; a slope that is absent is 0. issue_ns: what
    the host pays to issue it, or each of its sub-chunks, launch_ns for all of it if absent. bend, where the line does not fit at every size: [[ns by
    the line, measured ns / that], ...], ascending, interpolated over the logarithm of the ns, constant beyond."""
    slowdown: dict[str, dict] = field(default_factory=dict)
    """"compute|h2d" -> {"compute": 0.97, "h2d": 0.8, "source"}: rates while these run together, 1 = alone."""
    points: list[dict] = field(default_factory=list)
    """{"name", "args", "ns", "low_ns", "high_ns", "rounds", "clock_MHz", "power_W"}: the median of the rounds, and their spread."""
    where: str = field(default="machine", compare=False)
    """File (or what else) that errors name."""

    def __post_init__(self) -> None:
        if self.kind not in ("cuda", "cpu"):
            raise UserError(f"{self.where}: kind {self.kind!r} must be cuda or cpu; try \"kind\": \"cuda\"")
        for name in TEXTS:
            if not isinstance(self._entry(name, "x").get("value"), str):
                raise UserError(f"{self.where}: {name} must be words; try \"{name}\": {{\"value\": \"published dense bf16\", \"source\": \"...\"}}")
        for table in ("numbers", "fits", "slowdown"):
            for name, entry in _entries(self.where, table, getattr(self, table)):
                if not isinstance(entry.get("source", ""), str):
                    raise UserError(f"{self.where}: {table}.{name} has a source that is no text; try \"source\": \"assumed: why\"")
        for name, example in NAMED.items():
            if not isinstance(value := self.numbers.get(name, {"value": ""}).get("value"), str):
                raise UserError(f"{self.where}: {name}={value} is no name; try \"{name}\": {{\"value\": \"{example}\", \"source\": \"...\"}}")
        for name in parted(self.kernel) if self.kernel else ():
            if name not in KERNELS:
                raise unknown(f"kernel in {self.where}:", name, KERNELS)
        for name, (rule, _) in NUMBERS.items():
            _check(self.where, name, self._entry(name, _EXAMPLE[rule]).get("value"), rule)
        for name, (rule, _) in OPTIONAL.items():
            if name in self.numbers:
                _check(self.where, name, self._entry(name, _EXAMPLE[rule]).get("value"), rule)
        if not isinstance(self.points, list) or not all(isinstance(point, dict) and isinstance(point.get("name"), str) for point in self.points):
            raise UserError(f"{self.where}: points must be a list of objects that have a name; try \"points\": []")
        for point in self.points:
            if not isinstance(args := point.get("args", {}), dict) or not all(isinstance(value, (str, int, float)) for value in args.values()):
                raise UserError(f"{self.where}: points.{point['name']} has args that are no names and values; try \"args\": {{\"bytes\": 4}}")
            if point["name"].startswith("attention") and args.get("kernel") not in tuple(KERNELS):
                raise unknown(f"kernel in {self.where}: points.{point['name']}", str(args.get("kernel")), KERNELS)
            for name in ("ns", "GFLOPs", "clock_MHz"):
                if point.get(name) is not None:
                    _check(self.where, f"points.{point['name']}.{name}", point[name], "non-negative")
        for key, fit in self.fits.items():
            _check_bend(self.where, key, fit.get("bend", []))
            for name in _FIT:
                _check(self.where, f"fits.{key}.{name}", fit.get(name, 0 if name != "fixed_ns" else None), "non-negative")
        for key, rates in self.slowdown.items():
            streams = key.split("|")
            for stream in [s for s in streams if s not in _STREAMS]:
                raise unknown(f"stream in {self.where}: slowdown {key!r}:", stream, _STREAMS)
            for stream in streams:
                _check(self.where, f"slowdown.{key}.{stream}", rates.get(stream), "positive")

    def _entry(self, name: str, example) -> dict:
        entry = self.numbers.get(name)
        if not isinstance(entry, dict) or not entry.get("source"):
            what = "is missing" if entry is None else "has no source"
            raise UserError(f"{self.where}: {name} {what}; every number says where it comes from, "
                            f"try \"{name}\": {{\"value\": {json.dumps(example)}, \"source\": \"assumed: why\"}}")
        return entry

    def __getitem__(self, name: str):
        """A number's value, or its words. KeyError if there is no such number."""
        return self.numbers[name]["value"]

    def get(self, name: str):
        """A number's value, or None where it is N/A."""
        return self.numbers[name]["value"] if name in self.numbers else None

    @property
    def kernel(self) -> str:
        """Name of the attention kernel that was measured, or of the two (sim.kernels); empty if none was."""
        return self.numbers.get("kernel", {}).get("value", "")

    @property
    def dtype(self) -> str:
        """dtype of the schedules that its cost curves were measured on; empty if none was."""
        return self.numbers.get("dtype", {}).get("value", "")

    @property
    def model(self) -> str:
        """Name of the model that its cost curves were measured on; empty if none was."""
        return self.numbers.get("model", {}).get("value", "")

    def source(self, name: str) -> str:
        """Where a number comes from."""
        return self.numbers[name]["source"] if name in self.numbers or name not in OPTIONAL else NEVER

    def override(self, hbm_bytes: int | None = None, host_bytes: int | None = None) -> "Machine":
        """The same machine with the capacities a user gave (host: of a node). Raises UserError."""
        given = {"hbm_bytes": hbm_bytes, "host_bytes": host_bytes}
        for name, value in given.items():
            if value is not None and value <= 0:
                raise UserError(f"{name}={value} as given must be positive; try {'80GiB' if name == 'hbm_bytes' else '1TiB'}")
            if value is not None and value < 1 << 20:
                raise UserError(f"{name}={value} as given is less than a MiB; sizes need a unit, try {value}GiB")
        new = {k: {"value": v, "source": "given by user"} for k, v in given.items() if v is not None}
        return replace(self, numbers=self.numbers | new) if new else self

    def save(self, path: str | Path) -> None:
        """Writes the machine as JSON, whole or not at all."""
        data = {"name": self.name, "kind": self.kind, "format": FORMAT, "numbers": self.numbers, "fits": self.fits, "slowdown": self.slowdown}
        rows = ",\n    ".join(json.dumps(point) for point in self.points)
        points = f',\n  "points": [\n    {rows}\n  ]' if rows else ""
        write(path, json.dumps(data, indent=2).removesuffix("\n}") + points + "\n}\n")


def _entries(where: str, table: str, entries) -> list[tuple[str, dict]]:
    if not isinstance(entries, dict):
        raise UserError(f"{where}: {table} must be an object; try \"{table}\": {{}}")
    for name, entry in entries.items():
        if not isinstance(entry, dict) or (table == "numbers" and "value" not in entry and name not in NUMBERS and name not in TEXTS):
            raise UserError(f"{where}: {table}.{name} must be an object; try {{\"value\": 1, \"source\": \"assumed: why\"}}")
    return list(entries.items())


def _check_bend(where: str, key: str, bend) -> None:
    pairs = bend if isinstance(bend, list) else [None]
    for pair in pairs:
        if not isinstance(pair, list) or len(pair) != 2:
            raise UserError(f"{where}: fits.{key}.bend must be pairs of ns and a factor; try \"bend\": [[1000, 1.0]]")
        for value in pair:
            _check(where, f"fits.{key}.bend", value, "positive")
    if any(a[0] >= b[0] for a, b in zip(pairs, pairs[1:])):
        raise UserError(f"{where}: fits.{key}.bend must ascend in ns; sort it")


def _check(where: str, name: str, value, rule: str) -> None:
    good = f"try \"{name.rsplit('.', 1)[-1]}\": {_EXAMPLE[rule]}"
    if value is None:
        raise UserError(f"{where}: {name} is missing; {good}")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= MOST or 0 < abs(value) < 1 / MOST:
        raise UserError(f"{where}: {name}={value} is no number; {good}")
    if value < 0 or (rule != "non-negative" and value == 0) or (rule == "count" and value != int(value)):
        need = {"positive": "must be positive", "non-negative": "must not be negative", "count": "must be a whole number, 1 or more"}[rule]
        raise UserError(f"{where}: {name}={value} {need}; {good}")


def load(path: str | Path) -> Machine:
    """A machine from a JSON file. Raises UserError naming file, number and rule."""
    path = Path(path)
    try:
        data = json.loads(path.read_text())
    except OSError as error:
        raise UserError(f"machine file {path} cannot be read ({error.strerror}); try one of {', '.join(presets())}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: not JSON ({error}); write it with fpdt calibrate, or copy a preset") from None
    if not isinstance(data, dict) or not isinstance(data.get("numbers"), dict):
        raise UserError(f"{path}: \"numbers\" is missing; a machine has name, kind and numbers, copy a preset")
    if data.get("fits") and data.get("format") != FORMAT:
        raise UserError(f"{path}: its cost curves are of format {data.get('format', 1)!r}, as another version of fpdt wrote them, and this one reads {FORMAT}; calibrate again, it takes minutes")
    return Machine(str(data.get("name", path.stem)), str(data.get("kind")), data["numbers"], data.get("fits", {}), data.get("slowdown", {}), data.get("points", []), path.name)


@cache
def presets() -> dict[str, Path]:
    """Names of the machines that come along -> their files."""
    return {path.stem: path for path in sorted(Path(__file__).with_name("machines").glob("*.json"))}


def machine(name_or_path: str | Path) -> Machine:
    """A preset by name, or a machine from a JSON file. Raises UserError with the closest names."""
    if str(name_or_path) in presets():
        return load(presets()[str(name_or_path)])
    try:
        if str(name_or_path).endswith(".json") or Path(name_or_path).is_file():
            return load(name_or_path)
    except OSError:  # a name that no file can have
        pass
    raise unknown("machine", str(name_or_path), presets())


def published(gpu: str | None, dtype: str) -> Machine | None:
    """The machine whose published peak a GPU has, by what its driver calls it; None where it is not known, or not for this dtype."""
    return machine(_CARDS[gpu]) if gpu in _CARDS and dtype == "bf16" else None
