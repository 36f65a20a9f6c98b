"""Runs and logs that the tests of replay, plots and loggers share."""

import csv
import json
import runpy
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import adagc_jax as aj
from adagc_jax.replay import History

ROOT = Path(__file__).parent.parent
LOGGERS = runpy.run_path(str(ROOT / "examples" / "_loggers.py"))
STEPS = 90


def _loss(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
    hidden = x
    for layer in range(2):
        hidden = jnp.tanh(hidden @ params["layers"][layer])
    return jnp.mean(jnp.square(hidden @ params["head"] + params["bias"] - y))


def train(clip: optax.GradientTransformation, log: Any) -> None:
    """A small model whose batches go bad now and then, once with a NaN."""
    rng = np.random.default_rng(0)
    params = {
        "layers": np.float32(0.5 * rng.standard_normal((2, 6, 6))),
        "head": np.full((6, 2), 0.1, np.float32),
        "bias": np.zeros(2, np.float32),
    }
    optimizer = optax.chain(clip, optax.sgd(0.05))

    @jax.jit
    def step(params, opt_state, x, y):
        loss, grads = jax.value_and_grad(_loss)(params, x, y)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    opt_state = jax.jit(optimizer.init)(params)
    inputs = np.float32(rng.standard_normal((STEPS, 8, 6)))
    for number, x in enumerate(inputs):
        y = np.sin(x[:, :2])
        y = 40 * y if number % 23 == 11 else y
        y = np.nan * y if number == 50 else y
        params, opt_state, loss = step(params, opt_state, x, y)
        log(number, aj.clip_metrics(opt_state, level="all") | {"loss": loss})


def noise(steps: int = 400, tensors: int = 3, seed: int = 0) -> np.ndarray:
    """Norms without spikes, f32[steps, tensors]."""
    rng = np.random.default_rng(seed)
    return np.exp(0.2 * rng.standard_normal((steps, tensors))).astype(np.float32)


def history_of(norm: np.ndarray, **fields: Any) -> History:
    """A history of some norms."""
    steps = np.arange(len(norm))
    names = tuple(f"layers/{i}/w" for i in range(norm.shape[1]))
    total = np.zeros(len(norm), np.float32)
    return History(names, steps, steps, np.float32(norm), total, **fields)


def rows_of(history: History) -> list[dict[str, float]]:
    """A history as logged rows."""
    return [
        {"step": int(step), "loss": 1.5}
        | {
            f"clip/{name}/norm_before": float(value)
            for name, value in zip(history.names, row, strict=True)
        }
        for step, row in zip(history.steps, history.norm, strict=True)
    ]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_csv(path: Path, rows: list[dict[str, Any]]) -> Path:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows(rows)
    return path
