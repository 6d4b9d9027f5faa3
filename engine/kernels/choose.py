"""Choose: the first attention kernel of a list that takes a model, a dtype and a device."""
from __future__ import annotations

from importlib import import_module
from types import ModuleType

from sim.errors import UserError
from sim.model import Model

CUDA = ("cudnn", "torch_flash")
CPU = ("cpu_flash",)
"""Adapters of this folder, the best first. One whose own package is not installed is passed over."""


def choose(model: Model, dtype: str, capability: tuple[int, int] | None, elements: int = 0) -> ModuleType:
    """The adapter to use on a GPU of this compute capability (None: on a CPU), `elements` in its largest tensor. Raises UserError that says why each was refused."""
    refused = []
    for name in CPU if capability is None else CUDA:
        try:
            kernel = import_module(f"engine.kernels.{name}")
        except ImportError as error:
            refused.append(f"{name} is not installed ({error})")
            continue
        reason = kernel.refuses(model, dtype, capability, elements)
        if reason is None:
            return kernel
        refused.append(f"{kernel.NAME} {reason}")
    where = "a CPU" if capability is None else "a GPU of compute capability {}.{}".format(*capability)
    raise UserError(f"no attention kernel runs {model.name} in {dtype} on {where}: {'; '.join(refused)}")
