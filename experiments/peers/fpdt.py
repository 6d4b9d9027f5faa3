"""FPDT: DeepSpeed's released FPDT_Attention (deepspeed.sequence.fpdt_layer): projections, all-to-alls and chunked attention, with or without offload."""
from __future__ import annotations

from importlib.metadata import version
from types import SimpleNamespace

import torch

from engine.deal import deal
from experiments.peers import flash, layers
from experiments.peers.case import Place
from experiments.peers.group import some_group
from sim.errors import UserError
from sim.schedule import Schedule

TRY = 'install it with pip install -e ".[peers]"'


class Fpdt:
    """Norm and residual around it are ours, in torch autograd. Chunks are dealt to ranks as the engine's are."""

    def __init__(self, schedule: Schedule, part: str, w: layers.Weights, place: Place, offload: bool) -> None:
        m, device = schedule.model, place.device
        if part != "attention":
            raise UserError("DeepSpeed's FPDT_Attention is the attention half of a block; see --part attention")
        if schedule.seq % schedule.chunk:
            raise UserError(f"DeepSpeed's FPDT wants S to be a multiple of C; {schedule.seq} is none of {schedule.chunk}")
        ours = flash.install(place.kernel)
        layer, group, streams = _deepspeed(place)
        if offload and streams is None and len(schedule.chunks) > 1:
            raise UserError("DeepSpeed's FPDT offloads through streams, and DeepSpeed has none on CPU")
        self.m, self.w, self.offload = m, w, offload
        self.note = f"DeepSpeed {version('deepspeed')} on {place.kernel.NAME if ours else 'its own flash_attn'}"
        self.positions_T = deal(torch.arange(schedule.seq, device=device), schedule.chunk, schedule.P, place.rank)
        dtype = w["Wq"].dtype
        cos, sin = layers.angles(torch.arange(schedule.seq, device=device), m)
        self.angles = tuple(torch.cat((t, t), dim=-1).unsqueeze(1).to(dtype) for t in (cos, sin))
        weight = torch.cat((w["Wq"], w["Wkv"])).detach().requires_grad_()
        bias = torch.cat((w["bq"], w["bkv"])) if "bq" in w else torch.zeros(len(weight), dtype=dtype, device=device)
        config = SimpleNamespace(kv_channels=m.head_dim, num_attention_heads=m.heads, num_key_value_heads=m.kv_heads, hidden_size=m.hidden, attention_dropout=0.0)
        self.own = weight, bias.detach().requires_grad_()
        self.layer = layer(config, *self.own, w["Wo"], w.get("bo"), group, return_bias=True, chunk_size=schedule.chunk, enable_offloading=offload)

    def __call__(self, x_TC: torch.Tensor) -> torch.Tensor:
        xn_T1C = layers.norm1(x_TC, self.w, self.m).unsqueeze(1)
        out_T1C, bias = self.layer(xn_T1C, None, None, self.angles, cpu_offloading=self.offload)
        h_TC = x_TC + out_T1C.squeeze(1)
        return h_TC if bias is None else h_TC + bias


def _deepspeed(place: Place):
    """(FPDT_Attention, process group, type of streams or None), with DeepSpeed's own communication set up. Raises UserError where it is not installed."""
    try:
        import deepspeed
        from deepspeed.accelerator import get_accelerator
        from deepspeed.sequence.fpdt_layer import FPDT_Attention
    except ModuleNotFoundError as error:
        raise UserError(f"deepspeed does not import ({error}); {TRY}") from None
    group = some_group(place)
    deepspeed.init_distributed("nccl" if place.device.type == "cuda" else "gloo", auto_mpi_discovery=False, verbose=False)
    return FPDT_Attention, group, get_accelerator().Stream
