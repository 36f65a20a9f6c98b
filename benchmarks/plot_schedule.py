"""Draws the shapes of `schedules.warmup_cosine` for the documentation.

python benchmarks/plot_schedule.py
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib

matplotlib.use("agg")

from matplotlib import pyplot as plt

from adagc_jax.schedules import Restarts, warmup_cosine

OUTPUT = Path(__file__).parent / "results" / "schedule.png"
TOTAL = 1_000
SHAPES = {
    "default: warm-up 5 %, floor 10 %": warmup_cosine(1.0, TOTAL),
    "warmup=0.2, floor=0": warmup_cosine(1.0, TOTAL, warmup=0.2, floor=0.0),
    "restarts: period 250, multiplier 2, peak_decay 0.7": warmup_cosine(
        1.0, TOTAL, restarts=Restarts(period=250, multiplier=2.0, peak_decay=0.7)
    ),
    "the same with a warm-up of 40 steps per cycle": warmup_cosine(
        1.0,
        TOTAL,
        restarts=Restarts(period=250, multiplier=2.0, peak_decay=0.7, warmup=40),
    ),
}


def main() -> None:
    """Writes one picture with a panel per shape."""
    steps = jnp.arange(TOTAL + 101, dtype=jnp.int32)
    figure, axes = plt.subplots(2, 2, figsize=(10, 5.5), sharex=True, sharey=True)
    for panel, (title, schedule) in zip(axes.flat, SHAPES.items(), strict=True):
        panel.plot(steps, jax.jit(schedule)(steps), color="C0", linewidth=1.8)
        panel.axhline(0.1, color="0.8", linestyle="--", linewidth=0.8)
        panel.axvline(TOTAL, color="0.8", linestyle="--", linewidth=0.8)
        panel.set_title(title, fontsize=10)
        panel.set_ylim(-0.03, 1.05)
    for panel in axes[-1]:
        panel.set_xlabel(f"step (total_steps = {TOTAL:,}, then the floor)")
    for panel in axes[:, 0]:
        panel.set_ylabel("rate / peak")
    figure.tight_layout()
    OUTPUT.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(OUTPUT, dpi=110)
    print(OUTPUT)


if __name__ == "__main__":
    main()
