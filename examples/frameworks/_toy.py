"""The regression that every framework learns, its bad batch, and what is printed."""

import argparse
from collections.abc import Sequence
from typing import Any

import numpy as np
import optax

import adagc_jax

WIDTH, LAYERS = 8, 3
# Short enough for AdaGC's warm-up to end within the default number of steps.
WARMUP = 10


def arguments(doc: str | None, argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line of a script with this module docstring."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40, help="training steps")
    parser.add_argument(
        "--bad-step",
        type=int,
        default=20,
        help="the step whose inputs are a thousand times too large; -1 for none",
    )
    return parser.parse_args(argv)


def batches(steps: int, bad_step: int, size: int = 16) -> np.ndarray:
    """Inputs of all steps, f32[steps, size, WIDTH]; `bad_step` is an outlier."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(steps, size, WIDTH)).astype(np.float32)
    if 0 <= bad_step < steps:
        x[bad_step] *= 1000.0
    return x


def optimizer(groups: adagc_jax.Groups) -> optax.GradientTransformationExtraArgs:
    """AdaGC on these groups, then AdamW."""
    clip = adagc_jax.adagc(groups=groups, warmup_steps=WARMUP, lambda_abs=10.0)
    return optax.chain(clip, optax.adamw(1e-2))


def show(name: str, losses: Sequence[float], bad_step: int, opt_state: Any) -> None:
    """Losses at both ends and after the outlier, and what the clipper did."""
    metrics = adagc_jax.clip_metrics(opt_state)
    line = f"{name}: loss {losses[0]:.4f} at first, {losses[-1]:.4f} at last"
    if 0 <= bad_step < len(losses) - 1:
        line += f", {losses[bad_step + 1]:.4f} after the outlier"
    print(line)
    print(f"clip rate {float(metrics['clip/clip_rate']):.3f}")
    print(adagc_jax.clip_report(opt_state))
