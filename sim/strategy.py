"""Strategy: what a user chooses. Each field is real: the builder, the simulator and the engine all read it."""
from __future__ import annotations

import dataclasses
from dataclasses import dataclass, fields

from sim.errors import UserError, unknown
from sim.model import Model
from sim.units import parse_tokens, show_tokens


MOST_CHUNKS = 512
"""u at most: attention is u^2 / 2 operations, and more would take minutes to lint and simulate."""


AUTO = {"order": ("query-up", "query-down", "kv-outer"), "accum": ("hbm", "host"), "resident": (0.0, 0.25, 0.5, 0.75, 1.0)}
"""Fields that may be "auto", and the values that are then tried (sim.search): the fastest that fits a machine is taken."""


@dataclass(frozen=True)
class Strategy:
    """How a model is trained on a sequence."""

    sp: int = 1
    """P, the sequence-parallel degree (Ulysses): ranks that share one sequence."""
    chunk: int = 65536
    """C, the chunk length in global tokens (DeepSpeed's fpdt_chunk_size)."""
    prefetch: int = 2
    """Slots that KV chunks are reloaded into, in rotation: 1 = no prefetch, 2 = double buffer."""
    offload: bool = True
    """Keep KV and saved activations in host memory (True) or in HBM (False)."""
    resident: float | str = 0.0
    """Share (0 to 1, or auto) of the KV chunks, rounded down, that stay in HBM all the same: the earliest, which save most copies, as
    chunk j is met by u - j rows."""
    save: str = "qkvo"
    """What forward keeps for backward; the rest is recomputed. all: everything; qkvo: block input, q, k, v, o and lse; o: block
    input, o and lse; input: the block input (full recompute)."""
    order: str = "query-up"
    """How backward walks. query-up, query-down: query chunks outermost, ascending or descending (then dq, dk and dv of a chunk are
    final together); kv-outer: KV chunks outermost, the paper's; auto."""
    accum: str = "hbm"
    """Where the gradients that the outer walk returns to (dkv, or dq under kv-outer) rest between their uses: hbm, host or auto."""
    hidden: str = "hbm"
    """Where hidden states, their gradients and labels are handed from block to block: hbm, whole; or host, where each chunk is fetched
    from and returned to, so that HBM does not grow with S."""
    rows: str = "ascending"
    """Direction of the inner walk over chunks: ascending, or alternating from row to row (which leaves more chunks in their slots)."""
    skip_resident: bool = False
    """A chunk that a slot still has is not reloaded."""
    reuse_slack: int = 0
    """Ops that a buffer must have been dead for, in issue order, before the plan gives its space away, with the waits that takes.
    0: only where the order holds already, so that the plan adds no waits."""
    ffn_sub: int = 2
    """FFN sub-chunks a chunk (the paper's: 2)."""
    loss_sub: int = 32
    """Loss sub-chunks a chunk (the paper's: 32)."""
    zero: int = 3
    """ZeRO stage of the model states, over all ranks: 0 replicates, 3 shards parameters, gradients and optimizer."""
    host_sync: str = "none"
    """Extra host blocks. none; region: the host waits for each region to end (what foreign code on the CPU needs); chunk: also for a chunk's
    all-to-alls; pair: also for each pair of chunks, and the reloads for the next one."""
    alloc: str = "plan"
    """Host memory: plan, taken and pinned once; chunk, taken for each copy out by a host that waits for it, sums set to zero by it; or cached,
    the same where an allocator has it all from earlier steps, so that only zeroing is left."""
    merge: str = "fused"
    """Partial outputs are merged in the attention operation, fused; or in one of their own, separate."""
    a2a: str = "together"
    """Queries, keys and values (and their gradients, where they are final together) in one all-to-all, together; or each in its own, apart."""
    lookahead: int = 1
    """Chunks whose projections and all-to-alls are issued ahead of a row of forward's attention: 1 or 0."""
    copy_streams: int = 2
    """2: copies out and copies in run beside each other; 1: those of attention's operands wait for each other, in issue order."""
    input: str = "host"
    """Where the block input rests until backward, if it is handed over in HBM and the rest on the host: host (a copy out and back) or hbm."""
    reload_first: bool = False
    """Forward ends by fetching chunk 0 back, which stays in HBM until backward."""

    def __post_init__(self) -> None:
        for name in ("sp", "chunk", "prefetch", "ffn_sub", "loss_sub"):
            value = getattr(self, name)
            if value < 1:
                raise UserError(f"{name}={value} must be positive; try {name}={type(self).__dataclass_fields__[name].default}")
        if self.reuse_slack < 0:
            raise UserError(f"reuse_slack={self.reuse_slack} must not be negative; try reuse_slack=0")
        if self.resident != "auto" and not (isinstance(self.resident, (int, float)) and 0 <= self.resident <= 1):
            raise UserError(f"resident={shown(self.resident)} is no share of the KV chunks, from 0 to 1; try resident=0.5")
        if self.resident and not self.offload:
            raise UserError(f"resident={shown(self.resident)} keeps a share of what goes to the host and offload=false keeps all in HBM; try offload=true")
        for name, built, planned in _CHOICES:
            value = getattr(self, name)
            if value not in built:
                state = "not built yet" if value in planned else "no such value"
                raise UserError(f"{name}={value} is {state}; built: {', '.join(map(str, built))}")
        if self.hidden == "host" and not self.offload:
            raise UserError("hidden=host keeps hidden states on the host and offload=false what backward needs in HBM; try offload=true")

    @property
    def autos(self) -> tuple[str, ...]:
        """The fields that are still to be chosen."""
        return tuple(name for name in AUTO if getattr(self, name) == "auto")

    @property
    def blocks(self) -> bool:
        """Whether the host waits at the end of a region."""
        return self.host_sync != "none"

    def check(self, model: Model, seq: int) -> None:
        """The rules that tie a strategy to a model and a sequence of `seq` tokens. Raises UserError."""
        P = self.sp
        if model.heads % P:
            raise UserError(f"{model.heads} query heads are not divisible by P={P}; P must divide the heads, try P={_divisor(model.heads, P)}")
        if model.kv_heads % P and P % model.kv_heads:
            good = max(p for p in range(1, P) if model.heads % p == 0 and not (model.kv_heads % p and p % model.kv_heads))
            raise UserError(f"{model.kv_heads} KV heads neither split over nor replicate to P={P}; one must divide the other, try P={good}")
        if seq > MOST_CHUNKS * self.chunk:
            raise UserError(f"C={self.chunk} cuts S={seq} into {-(-seq // self.chunk)} chunks; at most {MOST_CHUNKS} are built, try C={-(-seq // MOST_CHUNKS // P) * P}")
        if seq < P:
            raise UserError(f"S={seq} is shorter than P={P}; every rank needs a token, try S={P}")
        if self.chunk < seq and self.chunk % P:
            raise UserError(f"C={self.chunk} is not divisible by P={P}; P must divide C, try C={-(-self.chunk // P) * P}")

    @classmethod
    def parse(cls, settings: list[str], **base) -> "Strategy":
        """A strategy from 'field=value' strings over the fields in `base`. Raises UserError."""
        known = {f.name: f for f in fields(cls)}
        values, seen = dict(base), set()
        for setting in settings:
            name, eq, text = setting.partition("=")
            if not eq:
                raise UserError(f"--set {setting!r} is not field=value; try --set prefetch=2")
            if name not in known:
                raise unknown("strategy field", name, known)
            if name in seen:
                raise UserError(f"--set names {name} twice; keep one of them")
            seen.add(name)
            values[name] = _read(known[name], text)
        return cls(**values)

    @classmethod
    def defaults(cls) -> str:
        """Every field with its default, as --set takes it."""
        return ", ".join(f"{f.name}={shown(f.default)}" for f in fields(cls))

    def replace(self, **changes) -> "Strategy":
        return dataclasses.replace(self, **changes)


_CHOICES = (
    ("save", ("all", "qkvo", "o", "input"), ()),
    ("order", (*AUTO["order"], "auto"), ()),
    ("accum", (*AUTO["accum"], "auto"), ()),
    ("hidden", ("hbm", "host"), ()),
    ("rows", ("ascending", "alternating"), ()),
    ("zero", (0, 3), (1, 2)),
    ("host_sync", ("none", "region", "chunk", "pair"), ()),
    ("alloc", ("plan", "chunk", "cached"), ()),
    ("merge", ("fused", "separate"), ()),
    ("a2a", ("together", "apart"), ()),
    ("lookahead", (1, 0), ()),
    ("copy_streams", (2, 1), ()),
    ("input", ("host", "hbm"), ()),
)


def _read(field: dataclasses.Field, text: str):
    kind = type(field.default)
    if kind is bool:
        if text.lower() not in ("true", "false", "1", "0", "yes", "no", "on", "off"):
            raise UserError(f"{field.name}={text} is neither true nor false; try {field.name}=true")
        return text.lower() in ("true", "1", "yes", "on")
    if kind is int:
        try:
            return parse_tokens(text)
        except UserError:
            raise UserError(f"{field.name}={text[:40]} is no whole number up to 2^40; try {field.name}={shown(field.default)}") from None
    if kind is float and not (text == "auto" and field.name in AUTO):
        try:
            return float(text)
        except ValueError:
            raise UserError(f"{field.name}={text} is no number; try {field.name}=0.5") from None
    return text


def shown(value) -> str:
    """A field's value as --set takes it."""
    match value:
        case bool():
            return str(value).lower()
        case int():
            return show_tokens(value)
        case float():
            return f"{value:g}"
    return value


def _divisor(heads: int, P: int) -> int:
    return max(p for p in range(1, min(P, heads) + 1) if heads % p == 0)
