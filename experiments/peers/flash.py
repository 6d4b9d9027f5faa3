"""Flash: the engine's kernel under the name flash_attn, for a peer that calls that package and a machine that lacks it."""
from __future__ import annotations

import sys
from types import ModuleType

import torch


class Apart:
    """k [T, K, D] and v as adapters read them, kv[:, 0] or kv[None, :, 1], without a copy into one tensor."""

    def __init__(self, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> None:
        self._parts = k_TKD, v_TKD
        self.shape = (len(k_TKD), 2, *k_TKD.shape[1:])

    def __getitem__(self, at) -> torch.Tensor:
        return self._parts[at[-1]][at[:-1]]


class _Interface(ModuleType):
    """Ours: the two functions as flash-attn 2.6 has them, which DeepSpeed asked for first and still knows, for a batch of one. Scale is
    1/sqrt(head_dim), no dropout, no window. Whoever imported them gets the kernel of the latest install."""

    kernel = None

    def _flash_attn_forward(self, q_1SHD, k_1TKD, v_1TKD, dropout_p, softmax_scale, causal, **ignored):
        out, lse = self.kernel.forward(q_1SHD[0], Apart(k_1TKD[0], v_1TKD[0]), causal)
        return out.unsqueeze(0), q_1SHD, k_1TKD, v_1TKD, out.unsqueeze(0), lse.unsqueeze(0), None, None

    def _flash_attn_backward(self, dout_1SHD, q_1SHD, k_1TKD, v_1TKD, out_1SHD, lse_1HS, dq_1SHD, dk_1TKD, dv_1TKD, dropout_p, softmax_scale, causal, *ignored, **also):
        grads = self.kernel.backward(dout_1SHD[0], q_1SHD[0], Apart(k_1TKD[0], v_1TKD[0]), out_1SHD[0], lse_1HS[0], causal)
        for to, grad in zip((dq_1SHD, dk_1TKD, dv_1TKD), grads):
            to[0].copy_(grad)


def install(kernel) -> bool:
    """Makes flash_attn.flash_attn_interface import. Says whether it is this kernel, not the package's own."""
    try:
        from flash_attn import flash_attn_interface as interface
    except ImportError:
        package = sys.modules.get("flash_attn") or ModuleType("flash_attn")  # flash-attn 4 is a part of that name alone
        package.__version__ = "2.6.3"
        interface = package.flash_attn_interface = _Interface("flash_attn.flash_attn_interface")
        sys.modules |= {"flash_attn": package, "flash_attn.flash_attn_interface": interface}
    if not isinstance(interface, _Interface):
        return False
    interface.kernel = kernel
    return True
