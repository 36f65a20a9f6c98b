"""The PyTorch implementations, each as a function of one step's NumPy gradients."""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from pytorch_optimizer.optimizer.agc import (  # pyright: ignore[reportMissingImports]
    agc as clip_units,
)
from zclip import ZClip  # pyright: ignore[reportMissingImports]

Arrays = Mapping[str, np.ndarray]
Step = Callable[[Arrays], dict[str, np.ndarray]]


class _Holder(torch.nn.Module):
    """Parameters whose gradients are set from outside."""

    def __init__(self, arrays: Arrays):
        super().__init__()
        self.named = {
            name: torch.nn.Parameter(torch.tensor(value))
            for name, value in arrays.items()
        }
        for name, parameter in self.named.items():
            self.register_parameter(name, parameter)

    def set_gradients(self, grads: Arrays) -> None:
        for name, parameter in self.named.items():
            parameter.grad = torch.tensor(grads[name])

    def gradients(self) -> dict[str, np.ndarray]:
        found = {name: parameter.grad for name, parameter in self.named.items()}
        return {name: g.numpy() for name, g in found.items() if g is not None}


def _step(clip: Callable[[_Holder], Any], params: Arrays | None = None) -> Step:
    held: list[_Holder] = []

    def step(grads: Arrays) -> dict[str, np.ndarray]:
        if not held:
            held.append(_Holder(params or grads))
        held[0].set_gradients(grads)
        clip(held[0])
        return held[0].gradients()

    return step


def clip_grad_norm(max_norm: float) -> Step:
    clip = torch.nn.utils.clip_grad_norm_
    return _step(lambda holder: clip(holder.parameters(), max_norm))


def clip_grad_value(limit: float) -> Step:
    clip = torch.nn.utils.clip_grad_value_
    return _step(lambda holder: clip(holder.parameters(), limit))


def agc(params: Arrays) -> Step:
    """Out of pytorch_optimizer; a function of one tensor."""

    def clip(holder: _Holder) -> None:
        for parameter in holder.named.values():
            assert parameter.grad is not None
            parameter.grad = clip_units(parameter.detach(), parameter.grad, 1e-3, 1e-2)

    return _step(clip, params)


def zclip() -> Step:
    return _step(ZClip().step)
