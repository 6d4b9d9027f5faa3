"""Externals: the work of a step that the schedule does not issue but a step takes: priced here, measured by the engine.

    ext.embed      the embedding lookup                                  before the first region
    ext.embed_bwd  hidden states on the host: its gradient comes back    after the last region
    ext.cast       parameters of a region to bf16, where a rank has them whole in fp32     before the region's first op
    ext.gather     ZeRO-3: all-gather of a region's parameters           once the region before has begun (prefetched one ahead)
    ext.reduce     ZeRO-3: reduce-scatter of a region's gradients        after the region
                   ZeRO-0: all-reduce of all gradients                   after the last region
    ext.optimizer  AdamW: parameter 2, gradient 2, fp32 master, m and v 12 bytes a parameter (fp32 training: 4 + 4 + 8)
    ext.step       what else a step takes, at both its ends, where it was measured

With hidden states on the host, the embedding's output goes there chunk by chunk, each after its lookup. Ranks = P. They take no compute units and no link from the schedule's own ops: an assumption that results list.
"""
from __future__ import annotations

from dataclasses import dataclass, field

from sim.cost import fitted, link_GBps, price
from sim.layout import ITEM
from sim.machine import Machine
from sim.model import Model
from sim.ops import Work
from sim.schedule import Schedule

NAMES = ("ext.embed", "ext.gather", "ext.reduce", "ext.optimizer", "ext.embed_bwd", "ext.cast", "ext.step")
STATE_BYTES = 16
"""Bytes of model states a parameter, bf16 (2 + 2 + 12) or fp32 (4 + 4 + 8)."""
GRADIENT_BYTES = 4
"""Of these, what one rank's whole gradient takes (fp32)."""


@dataclass(frozen=True)
class Externals:
    """Durations in ns; `gather`, `reduce` and `cast` by region, absent where there is none."""

    embed: int
    gather: dict[str, int]
    reduce: dict[str, int]
    final: int
    """The last reduction: of the embedding's gradient (ZeRO-3) or of all gradients (ZeRO-0)."""
    optimizer: int
    embed_bwd: int = 0
    cast: dict[str, int] = field(default_factory=dict)
    step: int = 0


def sharded(schedule: Schedule, zero: int) -> bool:
    """Whether a rank keeps a share of the model states alone; one rank has nothing to share."""
    return zero == 3 and schedule.P > 1


def region_params(model: Model, region: str) -> int:
    """Parameters that a region uses."""
    return model.head_params if region == "loss" else model.block_params


def moved_bytes(schedule: Schedule, zero: int) -> dict[str, int]:
    """Bytes each kind of external work moves in a step: ext_embed, ext_optimizer and ext_cast through HBM, ext_reduce sent by one rank."""
    m, item, ranks = schedule.model, ITEM[schedule.dtype], schedule.P
    states = m.params // (ranks if zero == 3 else 1)
    return {
        "ext_embed": 2 * schedule.seq // ranks * m.hidden * item,
        "ext_reduce": _ring(m.params * item, ranks) * (1 if zero == 3 else 2),
        "ext_optimizer": states * (30 if item == 2 else 28),
        "ext_cast": sum(cast_bytes(schedule, zero, region) for region, _ in schedule.order()),
    }


def cast_bytes(schedule: Schedule, zero: int, region: str) -> int:
    """Bytes read and written as a region's fp32 parameters become bf16; FSDP2 casts those that it gathers."""
    return 0 if sharded(schedule, zero) or ITEM[schedule.dtype] != 2 else region_params(schedule.model, region) * (4 + 2)


def externals(machine: Machine, schedule: Schedule, zero: int) -> Externals:
    """What the external work of one step takes on a machine, with the model states at ZeRO stage `zero`."""
    m, item, P = schedule.model, ITEM[schedule.dtype], schedule.P
    moved = moved_bytes(schedule, zero)

    def through(name: str, size_bytes: int, GBps: float) -> int:
        if size_bytes and name in machine.fits:
            return fitted(machine.fits[name], 0, size_bytes / 1e6)
        return round(size_bytes / GBps)

    def sent(params: int) -> int:
        return through("ext_reduce", _ring(params * item, P), link_GBps(machine, P))

    def copied(kind: str) -> int:
        chunks = [Work(link_bytes=schedule.layout.size_bytes("x", n)) for _, n in schedule.chunks if schedule.hidden == "host"]
        return sum(price(machine, kind, work, P) for work in chunks)

    embed = through("ext_embed", moved["ext_embed"], machine["hbm_GBps"]) + copied("offload")
    back = copied("reload")
    optimizer = through("ext_optimizer", moved["ext_optimizer"], machine["hbm_GBps"])
    cast = {region: ns for region in schedule.regions if (ns := through("ext_cast", cast_bytes(schedule, zero, region), machine["hbm_GBps"]))}
    step = round(machine.get("step_ns") or 0)
    if P == 1:
        return Externals(embed, {}, {}, 0, optimizer, back, cast, step)
    if zero != 3:
        return Externals(embed, {}, {}, through("ext_reduce", moved["ext_reduce"], link_GBps(machine, P)), optimizer, back, cast, step)
    gather = {region: sent(region_params(m, region)) for region in schedule.regions}
    reduce = {region: gather[region] for region in schedule.regions if region != "fwd"}
    embedding = sent(m.vocab * m.hidden)
    return Externals(embed + embedding, gather, reduce, embedding, optimizer, back, {}, step)


def _ring(size_bytes: int, ranks: int) -> int:
    """Bytes one rank sends to gather or to reduce-scatter a tensor of this size."""
    return size_bytes * (ranks - 1) // ranks
