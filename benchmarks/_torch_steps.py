"""PyTorch's clipping and AdamW on the shapes of a model, timed like ours.

The same threads, shapes and float32 as in JAX; interleaved, and as ratios to PyTorch's
own AdamW of the same kind. A step is ``clip -> optimizer.step``, in place. Clippers
work on gradients in place, so every step starts from a copy, which is not timed.
"""

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
from zclip import ZClip  # pyright: ignore[reportMissingImports]

WARMUP = 2
Clip = Callable[[list[torch.nn.Parameter]], Any]


def clip_grad_norm(parameters: list[torch.nn.Parameter]) -> None:
    torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=True)


def zclip() -> Clip:
    """The package's step on a module that holds the parameters, past its warm-up."""
    clip = ZClip(warmup_steps=WARMUP)

    def step(parameters: list[torch.nn.Parameter]) -> None:
        clip.step(torch.nn.ParameterList(parameters))

    return step


def nothing(parameters: list[torch.nn.Parameter]) -> None:
    del parameters


class Contestant:
    """Parameters, AdamW of one kind, and what clips before it."""

    def __init__(self, shapes: Sequence[tuple[int, ...]], clip: Clip, kind: str):
        self.clip = clip
        self.parameters = [torch.nn.Parameter(torch.ones(s)) for s in shapes]
        self.optimizer = torch.optim.AdamW(self.parameters, 1e-3, **{kind: True})
        self.seconds: list[float] = []

    def run(self, grads: Sequence[torch.Tensor]) -> None:
        """Makes one step and notes its time."""
        for parameter, grad in zip(self.parameters, grads, strict=True):
            parameter.grad = grad.clone()
        started = time.perf_counter()
        self.clip(self.parameters)
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - started)
        for parameter in self.parameters:
            parameter.grad = None


def measure(shapes: Sequence[tuple[int, ...]], rounds: int) -> dict[str, Any]:
    """Rows of AdamW fused and foreach, alone and after each clipper."""
    torch.set_num_threads(os.cpu_count() or 1)
    torch.manual_seed(0)
    grads = [0.01 * torch.randn(shape) for shape in shapes]
    rows: dict[str, Any] = {}
    # One kind at a time, so that no more than three states are held.
    for kind in ("fused", "foreach"):
        clips = {"": nothing, "clip_grad_norm_, ": clip_grad_norm, "zclip, ": zclip()}
        contestants = {
            f"torch {name}AdamW {kind}": Contestant(shapes, clip, kind)
            for name, clip in clips.items()
        }
        for _ in range(rounds + WARMUP):
            for contestant in contestants.values():
                contestant.run(grads)
        times = {n: np.array(c.seconds[WARMUP:]) for n, c in contestants.items()}
        base = times[f"torch AdamW {kind}"]
        for name, seconds in times.items():
            rows[name] = {
                "ratio": round(float(np.median(seconds / base)), 3),
                "ms": round(1e3 * float(np.median(seconds)), 2),
            }
    return rows
