"""Tiny worlds: a schedule from a few lines, on a machine where each kind of op takes a round number of ns."""
from __future__ import annotations

from sim.machine import NUMBERS, OPTIONAL, Machine
from sim.model import Model
from sim.schedule import Buffer, Op, Region, Schedule
from sim.simulate import simulate
from sim.strategy import Strategy
from sim.timeline import Timeline

NS = {"qkv": 10, "proj": 20, "ffn": 100, "a2a": 5, "reload": 40, "offload": 50, "ext_embed": 0, "ext_reduce": 0, "ext_optimizer": 0, "ext_cast": 0}
MODEL = Model("tiny", "llama", 1, 8, 2, 2, 4, 16, 32)
OPERANDS = {"reload": (("b@host",), ("b",)), "offload": (("b",), ("b@host",)), "a2a": (("b",), ("b",))}
ARGS = {"attn": {"q": 4, "kv": 4}, "pin": {"bytes": 4}}
SAVED = {name: Buffer(name, space, "saved", "x", "bf16", (4, 8), 0) for name, space in (("b", "hbm"), ("b@host", "host"))}


def tiny_machine(slowdown: dict | None = None, ns: dict | None = None, **numbers: float) -> Machine:
    """No latencies, a long queue, NS for the kinds; any number can be given."""
    quiet = {"launch_ns": 0, "wake_ns": 0, "gap_ns": 0, "queue_depth": 1000}
    values = {name: {"value": (quiet | numbers).get(name, 1), "source": "assumed: a test"} for name in (*NUMBERS, *(n for n in OPTIONAL if n in numbers))}
    values["peak_name"] = {"value": "a test's", "source": "assumed: a test"}
    fits = {kind: {"fixed_ns": t, "source": "assumed: a test"} for kind, t in (NS | (ns or {})).items()}
    return Machine("tiny", "cpu", values, fits, slowdown or {})


def tiny_schedule(regions: dict[str, str], layers: int = 1, P: int = 1) -> Schedule:
    """Region -> lines `stream id [wait id ...]`; ids are written without their region."""
    built = {}
    for region, lines in regions.items():
        ops = []
        for line in lines.strip().splitlines():
            stream, name, *waits = line.split()
            waits = tuple(w if w.startswith("prev:") else f"{region}.{w}" for w in waits[1:])
            reads, writes = OPERANDS.get(name.split("[")[0].split(".")[0], ((), ()))
            ops.append(Op(f"{region}.{name}", stream, reads, writes, dict(ARGS.get(name.split("[")[0].split(".")[0], {"n": 4, "sub": 1})), waits))
        built[region] = Region(region, ops, {})
    model = Model(**{f: getattr(MODEL, f) for f in MODEL.__dataclass_fields__} | {"layers": layers})
    return Schedule(model, 4, P, 4, "bf16", built, dict(SAVED), {})


def events(regions: dict[str, str], machine: Machine | None = None, layers: int = 1, P: int = 1, zero: int = 0, external: bool = False) -> list[tuple]:
    """[(id, start, end)] of the simulated step, in issue order."""
    timeline = world(regions, machine, layers, P, zero)
    return [(op, a, b) for op, _, stream, a, b in timeline.spans() if external or stream != "external"]


def world(regions: dict[str, str], machine: Machine | None = None, layers: int = 1, P: int = 1, zero: int = 0, unroll: bool = False) -> Timeline:
    """The simulated timeline."""
    return simulate(tiny_schedule(regions, layers, P), Strategy(sp=P, zero=zero), machine or tiny_machine(), unroll)
