"""A whole schedule: build, waits, plan, waits."""
from __future__ import annotations

from sim import ops
from sim.build import saved
from sim.build.backward import Backward
from sim.build.emit import Emit
from sim.build.forward import Forward
from sim.build.loss import loss
from sim.build.rewrites import rewrite
from sim.errors import UserError
from sim.layout import Layout, chunks, pad
from sim.model import Model
from sim.plan import plan
from sim.schedule import Schedule
from sim.strategy import AUTO, Strategy, shown
from sim.waits import wait_across, wait_within

def draft(model: Model, strategy: Strategy, seq: int, dtype: str = "bf16") -> Schedule:
    """Ops and buffers, without waits or offsets. Raises UserError where model, strategy and S do not fit together, or a field is auto."""
    for name in strategy.autos:
        raise UserError(f"{name}=auto is chosen for a machine; name one with --machine, or take {name}={shown(AUTO[name][0])}")
    strategy.check(model, seq)
    seq = pad(seq, strategy.sp)
    layout, parts = Layout(model, strategy.sp, dtype), chunks(seq, min(strategy.chunk, seq))

    kept = saved.declare(layout, parts, strategy)

    def emit(name: str) -> Emit:
        return Emit(name, layout, parts, strategy.blocks, kept)

    regions = {"fwd": Forward(emit("fwd"), strategy).build(), "loss": loss(emit("loss"), strategy), "bwd": Backward(emit("bwd"), strategy).build()}
    require = {name: ops.owes(name, model) for name in regions}
    schedule = Schedule(model, seq, strategy.sp, min(strategy.chunk, seq), dtype, regions, kept, require)
    rewrite(schedule, strategy)
    return schedule


def build(model: Model, strategy: Strategy, seq: int, dtype: str = "bf16", reuse: bool = True) -> Schedule:
    """The schedule that lint, simulator and engine read. `reuse=False` gives every buffer space of its own."""
    schedule = draft(model, strategy, seq, dtype)
    given = [(op, op.waits) for region in schedule.regions.values() for op in region.ops]
    regions = wait_within(schedule)
    plan(schedule, regions, reuse, strategy.reuse_slack)
    if strategy.reuse_slack:  # the plan may share space that no order keeps apart yet
        for op, waits in given:
            op.waits = waits
        regions = wait_within(schedule)
    wait_across(schedule, regions)
    return schedule
