"""A clipping rule of your own, and a run that shows what it does.

    python examples/custom_rule.py
    python examples/custom_rule.py --spread 3

The rule keeps an average of the logarithm of each tensor's norm, and the average
distance from it. A norm more than `spread` such distances above the average is pulled
back to there. It is an `adagc_jax.Rule` of three functions, elementwise on the norms
of the groups. Which groups, NaN, meshes and metrics are the business of the library.
"""

import argparse
import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import adagc_jax


class LogLevel(NamedTuple):
    """f32 of the groups' shape: average log norm, and average distance from it."""

    mean: jax.Array
    distance: jax.Array


@dataclasses.dataclass(frozen=True)
class LogBand(adagc_jax.Rule):
    """``h = min(1, exp(m + spread * d) / n)``, after `warmup` observations."""

    spread: float = 4.0
    decay: float = 0.9
    warmup: int = 5

    def init(self, shape: tuple[int, ...]) -> LogLevel:
        """Nothing seen yet."""
        return LogLevel(jnp.zeros(shape), jnp.zeros(shape))

    def scale(self, obs: adagc_jax.Observation, state: LogLevel) -> jax.Array:
        """Down to the upper edge of the band."""
        edge = state.mean + self.spread * state.distance
        scale = jnp.minimum(1.0, jnp.exp(edge - jnp.log(obs.norm)))
        return jnp.where(obs.seen < self.warmup, 1.0, scale)

    def update(
        self, obs: adagc_jax.Observation, scale: jax.Array, state: LogLevel
    ) -> LogLevel:
        """Learns from the clipped norm, so an outlier moves the band a little only."""
        value = jnp.log(obs.norm * scale)
        mean = jnp.where(obs.seen == 0, value, state.mean)
        new_mean = self.decay * mean + (1 - self.decay) * value
        away = jnp.abs(value - mean)
        distance = self.decay * state.distance + (1 - self.decay) * away
        return LogLevel(new_mean, distance)


def train(spread: float, steps: int, outlier: int) -> tuple[list[float], Any]:
    """Norms after clipping, and the state; one gradient is 1000 times too large."""
    rule = (LogBand(spread=spread), adagc_jax.per_tensor())
    # A back-stop on the whole tree in the same pass over the gradients.
    stop = (adagc_jax.FixedNorm(100.0), adagc_jax.whole_tree())
    optimizer = optax.chain(adagc_jax.clip_by_rule(rule, stop), optax.sgd(0.01))
    params: Any = {"w": jnp.ones((4, 4)), "b": jnp.ones((4,))}
    state = optimizer.init(params)

    @jax.jit
    def step(params: Any, state: Any, key: jax.Array, factor: jax.Array) -> Any:
        noise = jax.tree.map(
            lambda p: p + 0.3 * jax.random.normal(key, p.shape), params
        )
        grads = {"w": noise["w"] * factor, "b": noise["b"]}
        updates, state = optimizer.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return params, state, adagc_jax.clip_metrics(state, params)["clip/norm_after"]

    norms = []
    for number, key in enumerate(jax.random.split(jax.random.key(0), steps)):
        factor = jnp.float32(1000.0 if number == outlier else 1.0)
        params, state, norm = step(params, state, key, factor)
        norms.append(float(norm))
    return norms, state


def main(argv: Sequence[str] | None = None) -> None:
    """Prints norms around the outlier, and the report of the clipper."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--spread", type=float, default=4.0, help="width of the band")
    parser.add_argument("--steps", type=int, default=40, help="training steps")
    parser.add_argument("--outlier", type=int, default=20, help="step of the outlier")
    args = parser.parse_args(argv)
    norms, state = train(args.spread, args.steps, args.outlier)
    for number in range(max(0, args.outlier - 1), min(args.steps, args.outlier + 2)):
        note = " (the gradient of w was 1000 times larger)" * (number == args.outlier)
        print(f"step {number}: norm after clipping {norms[number]:.2f}{note}")
    print(adagc_jax.clip_report(state))


if __name__ == "__main__":
    main()
