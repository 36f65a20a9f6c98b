"""Random gradients of many steps, methods run over them, and the error between two."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

SHAPES = {"embed": (96, 32), "mlp": (32, 64), "norm": (32,), "out": (16, 3, 24)}

Stream = dict[str, np.ndarray]
Step = Callable[[dict[str, np.ndarray]], Mapping[str, Any]]


def stream(steps: int, seed: int, dtype: Any, *, idle: bool = True) -> Stream:
    """Gradients [steps, ...] by tensor: norms that drift, 1 % spikes, 1 % idle."""
    rng = np.random.default_rng(seed)
    grads = {}
    for name, shape in SHAPES.items():
        drift = np.exp(np.cumsum(rng.normal(0, 0.02, steps)))
        noise = np.exp(rng.normal(0, 0.3, steps))
        spikes = np.where(rng.random(steps) < 0.01, 10 ** rng.uniform(1, 4, steps), 1)
        awake = (rng.random(steps) >= 0.01) if idle else np.ones(steps)
        size = 0.02 * drift * noise * spikes * awake
        values = rng.normal(0, 1, (steps, *shape)) * size.reshape(-1, *[1] * len(shape))
        grads[name] = np.asarray(jnp.asarray(values, dtype))
    return grads


def weights(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        name: rng.normal(0, 0.1, shape).astype(np.float32)
        for name, shape in SHAPES.items()
    }


def scanned(
    clip: optax.GradientTransformation, grads: Stream, params: dict[str, np.ndarray]
) -> dict[str, np.ndarray]:
    """What a transformation emits, step by step."""

    def step(state: Any, g: Any) -> tuple[Any, Any]:
        out, state = clip.update(g, state, params)
        return state, out

    first = {name: g[0] for name, g in grads.items()}
    run = jax.jit(lambda g: jax.lax.scan(step, clip.init(first), g)[1])
    return jax.tree.map(np.asarray, run(grads))


def stepped(step: Step, grads: Stream, dtype: Any) -> dict[str, np.ndarray]:
    """What a function emits that takes one step at a time, as float64 or float32."""
    steps = len(next(iter(grads.values())))
    outs = [
        step({name: g[i].astype(dtype) for name, g in grads.items()})
        for i in range(steps)
    ]
    return {name: np.stack([np.asarray(o[name]) for o in outs]) for name in grads}


def error(got: Mapping[str, np.ndarray], want: Mapping[str, np.ndarray]) -> float:
    """Largest ``||got - want|| / ||want||`` over tensors and steps."""
    worst = 0.0
    for name in want:
        a, b = (
            np.asarray(x[name], np.float64).reshape(len(want[name]), -1)
            for x in (got, want)
        )
        size = np.linalg.norm(b, axis=1)
        apart = np.linalg.norm(a - b, axis=1)
        # Where nothing is wanted, anything at all is infinitely wrong.
        size = np.where((size == 0) & (apart == 0), 1, size)
        with np.errstate(divide="ignore"):
            worst = max(worst, float(np.max(apart / size)))
    return worst


def rounding(want: Mapping[str, np.ndarray], dtype: Any) -> float:
    """What rounding the exact answer to a dtype costs by itself."""
    return error({k: np.asarray(jnp.asarray(v, dtype)) for k, v in want.items()}, want)


def stacked(steps: list[dict[str, Any]]) -> Stream:
    return {
        name: np.array([step[name] for step in steps], np.float32) for name in steps[0]
    }
