"""Table: every kind of microbenchmark, once: its name, the stream it runs on, its sizes, what it runs, and the work that is.

A kind is one entry. Groups are measured one after the other, the entries of a group in turns; what comes first matters most.

Legend. T tokens of a rank, S and K tokens of a pair of chunks, H query and G KV heads of a rank, D head_dim, N out, M in.
"""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
import torch.distributed as dist

from engine.launch import _add_mm
from engine.merge import merge
from engine.micro.place import Place, Plan
from engine.pointwise import ACTIVATION, NORM, NORM_BWD, cross_entropy
from sim.errors import UserError
from sim.layout import ITEM

Args = dict[str, int | str | bool]
Call = Callable[[], object]
MIB = 1 << 20


class Micro(NamedTuple):
    """One kind of microbenchmark. `work` is what sim.cost.features counts of the op that it stands for: (GFLOPs, MB)."""

    name: str
    stream: str
    sizes: Callable[[Place], list[Args]]
    make: Callable[[Place, Args], Call]
    work: Callable[[Place, Args], tuple[float, float]]


class Group(NamedTuple):
    """Entries that take turns, for so many of the plan's seconds at most."""

    name: str
    share: float
    entries: tuple[Micro, ...]


SIZES = {
    "cpu": {"pairs": (128, 256), "far": ((64, 256),), "shapes": ((4, 2, 16),), "shape_tokens": 128, "tokens": (64, 256), "MiB": (1, 4), "move": 1 << 20},
    "cuda": {
        "pairs": (4096, 8192, 16384, 32768, 65536), "far": ((8192, 32768), (32768, 8192)), "shape_tokens": 8192,
        "shapes": ((32, 32, 128), (32, 32, 80), (32, 32, 64), (32, 8, 128), (16, 16, 128), (16, 4, 128)),
        "tokens": (2048, 8192, 32768), "MiB": (1, 4, 16, 64, 256), "move": 256 << 20,
    },
}
"""By kind of device: tokens of square pairs; rectangular ones (S, K); (H, G, D) other than the model's, and their tokens (head_dims first, which
sim.heads compares, as the time may not suffice for all); tokens of other work; sizes of what is sent, and of what streams through memory (bytes)."""


def _of(p: Place) -> dict:
    return SIZES[p.plan.device]


# ---- attention ----------------------------------------------------------------------------------------------------------

def own_heads(plan: Plan) -> tuple[int, int, int]:
    """(H, G, D) of a rank of the model."""
    m = plan.shapes
    return m.heads // plan.P, max(1, m.kv_heads // plan.P), m.head_dim


def _attention_sizes(shapes: Callable[[Place], list], pairs: Callable[[Place], list]) -> Callable[[Place], list[Args]]:
    def sizes(p: Place) -> list[Args]:
        return [
            {"kernel": kernel, "causal": causal, "q": S, "kv": K, "heads": H, "kv_heads": G, "head_dim": D}
            for H, G, D in shapes(p) for S, K in pairs(p) for causal in (False, True) if S == K or not causal for kernel in p.kernels
        ]

    return sizes


def _pairs(p: Place) -> list:
    return [(n, n) for n in _of(p)["pairs"]] + list(_of(p)["far"])


def _other_shapes(p: Place) -> list:
    return [shape for shape in _of(p)["shapes"] if shape != own_heads(p.plan)]


def _operands(p: Place, a: Args) -> tuple:
    """(kernel, q, kv). Raises UserError where the kernel refuses these shapes."""
    kernel = p.kernels[a["kernel"]]
    shapes = replace(p.plan.shapes, heads=a["heads"], kv_heads=a["kv_heads"], head_dim=a["head_dim"])
    if reason := kernel.refuses(shapes, p.plan.dtype, p.capability, a["q"] * a["heads"] * a["head_dim"]):
        raise UserError(f"{kernel.NAME} {reason}")
    return kernel, p.tensor("q", a["q"], a["heads"], a["head_dim"]), p.tensor("kv", a["kv"], 2, a["kv_heads"], a["head_dim"])


def _forward(p: Place, a: Args) -> Call:
    kernel, q_SHD, kv_K2GD = _operands(p, a)
    return lambda: kernel.forward(q_SHD, kv_K2GD, a["causal"])


def _backward(p: Place, a: Args) -> Call:
    """lse is of this pair alone, so what the kernel computes is what it would in a row."""
    kernel, q_SHD, kv_K2GD = _operands(p, a)
    out, lse = (t.contiguous() for t in kernel.forward(q_SHD, kv_K2GD, a["causal"]))
    do_SHD = p.tensor("do", *q_SHD.shape)
    return lambda: kernel.backward(do_SHD, q_SHD, kv_K2GD, out, lse, a["causal"])


def _attention_work(products: int):
    """As sim.ops counts them."""

    def work(p: Place, a: Args) -> tuple[float, float]:
        item = ITEM[p.plan.dtype]
        flops = 2 * products * a["q"] * a["kv"] * a["heads"] * a["head_dim"] // (2 if a["causal"] else 1)
        q, kv = a["q"] * a["heads"] * a["head_dim"], 2 * a["kv"] * a["kv_heads"] * a["head_dim"]
        summed = 12 * (q + kv) if products == 5 else 0
        return flops / 1e9, ((2 * q + kv) * item + summed) / 1e6

    return work


# ---- matrix products ----------------------------------------------------------------------------------------------------

def _products(p: Place) -> list[Args]:
    m = p.plan.shapes
    shapes = {"q": (m.q_dim, m.hidden), "kv": (2 * m.kv_dim, m.hidden), "o": (m.hidden, m.q_dim), "up": (m.up_dim, m.hidden), "down": (m.hidden, m.ffn), "head": (m.vocab, m.hidden)}
    middle = _of(p)["tokens"][len(_of(p)["tokens"]) // 2]
    found = [{"weight": w, "form": "apply", "tokens": T, "out": N, "in": M} for w, (N, M) in shapes.items() for T in _of(p)["tokens"] if w != "head" or T <= middle]
    return found + [{"weight": w, "form": form, "tokens": middle, "out": N, "in": M} for w, (N, M) in shapes.items() for form in ("input", "weight")]


def _product(p: Place, a: Args) -> Call:
    """apply: x W^T; input: the gradient of x; weight: the gradient of W, added up in fp32."""
    T, N, M = a["tokens"], a["out"], a["in"]
    x, g, W = p.tensor("x", T, M), p.tensor("g", T, N), p.tensor("W", N, M)
    if a["form"] == "weight":
        dW = p.tensor("dW", N, M, dtype=torch.float32)
        return lambda: _add_mm(dW, g, x, True)
    left, right, to = (x, W.t(), g) if a["form"] == "apply" else (g, W, x)
    to = torch.empty_like(to)
    return lambda: torch.mm(left, right, out=to)


def _product_work(p: Place, a: Args) -> tuple[float, float]:
    T, N, M = a["tokens"], a["out"], a["in"]
    return 2 * T * N * M / 1e9, (T * M + T * N + N * M) * ITEM[p.plan.dtype] / 1e6


# ---- what streams through memory ----------------------------------------------------------------------------------------

def _tokens(p: Place) -> list[Args]:
    return [{"tokens": T} for T in _of(p)["tokens"]]


def _norm_weights(p: Place) -> list[torch.Tensor]:
    m = p.plan.shapes
    return [p.tensor(f"norm{k}", m.hidden) for k in range(1 + (m.kind == "gpt"))]


def _norm(p: Place, a: Args) -> Call:
    m, x_TC, weights = p.plan.shapes, p.tensor("x", a["tokens"], p.plan.shapes.hidden), _norm_weights(p)
    return lambda: NORM[m.kind](x_TC, *weights, m.norm_eps)


def _norm_bwd(p: Place, a: Args) -> Call:
    m, weights = p.plan.shapes, _norm_weights(p)
    x_TC, g_TC, dx_TC = (p.tensor(role, a["tokens"], m.hidden) for role in ("x", "g", "dx"))
    sums = [p.tensor(f"dnorm{k}", m.hidden, dtype=torch.float32) for k in range(len(weights))]
    return lambda: NORM_BWD[m.kind](x_TC, *weights, g_TC, None, dx_TC, *sums, m.norm_eps, True)


def _activation(p: Place, a: Args) -> Call:
    m, up_TU = p.plan.shapes, p.tensor("up", a["tokens"], p.plan.shapes.up_dim)
    return lambda: ACTIVATION[m.kind](up_TU)


def _loss(p: Place, a: Args) -> Call:
    """Cross entropy of a sub-chunk: logits become their gradients, again and again."""
    T, vocab = a["tokens"], p.plan.shapes.vocab
    logits_TV, loss_1 = p.tensor("logits", T, vocab), p.tensor("loss", 1, dtype=torch.float32)
    label_T = torch.arange(T, device=p.device) % vocab
    return lambda: cross_entropy(logits_TV, label_T, loss_1, 1.0)


def _merge(p: Place, a: Args) -> Call:
    H, _, D = own_heads(p.plan)
    S = a["tokens"]
    acc, part = p.tensor("acc", S, H, D, dtype=torch.float32), p.tensor("part", S, H, D)
    lse, part_lse = (p.tensor(role, H, S, dtype=torch.float32) for role in ("lse", "part_lse"))
    return lambda: merge(acc, lse, part, part_lse, acc, lse)


def _rows(columns: Callable, moved: float):
    """`moved` times T x columns elements, read or written."""
    return lambda p, a: (0.0, moved * a["tokens"] * columns(p) * ITEM[p.plan.dtype] / 1e6)


def _move(p: Place, a: Args) -> Call:
    source, to = (p.tensor(role, a["bytes"], dtype=torch.uint8) for role in ("source", "to"))
    return lambda: to.copy_(source)


# ---- links --------------------------------------------------------------------------------------------------------------

def _copies(p: Place) -> list[Args]:
    """By one rank alone (the others wait), and by all at once."""
    return [{"bytes": n * MIB, "ranks": ranks} for n in _of(p)["MiB"] for ranks in sorted({1, p.plan.P})]


def _copy(to_host: bool):
    def make(p: Place, a: Args) -> Call:
        near, far = p.tensor("near", a["bytes"], dtype=torch.uint8), p.tensor(f"far{to_host}", a["bytes"], dtype=torch.uint8, host=True)
        return (lambda: p.backend.copy(far, near)) if to_host else (lambda: p.backend.copy(near, far))

    return make


def _sent(p: Place) -> list[Args]:
    return [{"bytes": n * MIB, "ranks": ranks} for ranks in sorted(p.groups) if ranks > 1 for n in _of(p)["MiB"]]


def _collective(run: Callable):
    """`run(whole, part, group)`; a rank that is in no group of so many ranks is idle."""

    def make(p: Place, a: Args) -> Call:
        group, size = p.groups[a["ranks"]], a["bytes"] // 4 // a["ranks"]
        whole, part = p.tensor("whole", size * a["ranks"], dtype=torch.float32), p.tensor("part", size, dtype=torch.float32)
        other = p.tensor("other", size * a["ranks"], dtype=torch.float32)
        return lambda: run(whole, part, other, group)

    return make


_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
"""Their names since torch 2.13, and before."""


def _link_work(p: Place, a: Args) -> tuple[float, float]:
    """A rank sends all but its own part; a copy moves all."""
    return 0.0, a["bytes"] / 1e6


def _sent_work(p: Place, a: Args) -> tuple[float, float]:
    return 0.0, a["bytes"] * (a["ranks"] - 1) // a["ranks"] / 1e6


def load(p: Place) -> Call:
    """What keeps a device busy between measurements: one square product."""
    size = 8192 if p.plan.device == "cuda" else 256
    a, to = p.tensor("load", size, size), p.tensor("load_to", size, size)
    return lambda: torch.mm(a, a, out=to)


COPY = (
    Micro("h2d", "h2d", _copies, _copy(False), _link_work),
    Micro("d2h", "d2h", _copies, _copy(True), _link_work),
)
SEND = (
    Micro("all-to-all", "comm", _sent, _collective(lambda whole, part, other, group: dist.all_to_all_single(other, whole, group=group)), _sent_work),
    Micro("all-gather", "comm", _sent, _collective(lambda whole, part, other, group: _gather(other, part, group=group)), _sent_work),
    Micro("reduce-scatter", "comm", _sent, _collective(lambda whole, part, other, group: _scatter(part, whole, group=group)), _sent_work),
)
_own = _attention_sizes(lambda p: [own_heads(p.plan)], _pairs)
_others = _attention_sizes(_other_shapes, lambda p: [(_of(p)["shape_tokens"],) * 2])
ATTENTION = (Micro("attention forward", "compute", _own, _forward, _attention_work(2)), Micro("attention backward", "compute", _own, _backward, _attention_work(5)))
SHAPES = (Micro("attention forward", "compute", _others, _forward, _attention_work(2)), Micro("attention backward", "compute", _others, _backward, _attention_work(5)))
PRODUCTS = (Micro("product", "compute", _products, _product, _product_work),)
STREAMED = (
    Micro("move", "compute", lambda p: [{"bytes": _of(p)["move"]}], _move, lambda p, a: (0.0, 2 * a["bytes"] / 1e6)),
    Micro("norm", "compute", _tokens, _norm, _rows(lambda p: p.plan.shapes.hidden, 2)),
    Micro("norm backward", "compute", _tokens, _norm_bwd, _rows(lambda p: p.plan.shapes.hidden, 3)),
    Micro("activation", "compute", _tokens, _activation, _rows(lambda p: p.plan.shapes.up_dim + p.plan.shapes.ffn, 1)),
    Micro("merge", "compute", _tokens, _merge, _rows(lambda p: own_heads(p.plan)[0] * p.plan.shapes.head_dim, 5)),
    Micro("loss", "compute", lambda p: _tokens(p)[:2], _loss, _rows(lambda p: p.plan.shapes.vocab, 2)),
)
GROUPS = (
    Group("copies", 0.08, COPY), Group("collectives", 0.12, SEND), Group("attention", 0.4, ATTENTION),
    Group("matrix products", 0.12, PRODUCTS), Group("memory", 0.12, STREAMED), Group("attention, other heads", 0.16, SHAPES),
)
"""What they leave is for `together` and `host`."""
