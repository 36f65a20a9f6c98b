"""What other implementations returned, reproduced."""

import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import adagc_jax

DATA = pathlib.Path(__file__).parent / "data"


def load(name: str) -> dict[str, Any]:
    return json.loads((DATA / f"{name}.json").read_text())


def as_tree(tensors: dict[str, Any]) -> dict[str, jax.Array]:
    return {name: jnp.asarray(value, jnp.float32) for name, value in tensors.items()}


def assert_close(got: Any, want: Any, rtol: float) -> None:
    for name, value in want.items():
        np.testing.assert_allclose(got[name], np.asarray(value), rtol=rtol, atol=1e-12)


AUTHORS = load("adagc_authors")
ZCLIP = load("zclip")
TIMM = load("agc_timm")["cases"]


@pytest.mark.parametrize("name", AUTHORS["cases"])
def test_adagc_authors(name: str) -> None:
    case = AUTHORS["cases"][name]
    is_global = name == "adagc_global"
    groups = adagc_jax.whole_tree() if is_global else adagc_jax.per_tensor()
    clip = adagc_jax.adagc(**case["config"], groups=groups)
    state = clip.init(as_tree(AUTHORS["gradients"][0]))
    update = jax.jit(clip.update)
    for step, grads in enumerate(AUTHORS["gradients"]):
        got, state = update(as_tree(grads), state)
        assert_close(got, case["clipped"][step], rtol=1e-6)
        gamma = np.asarray(state.stages[0].rule.gamma)
        want = case["gamma"][step]
        # The packed vector follows the order of the tree: sorted names.
        want = [want] if is_global else [want[k] for k in sorted(want)]
        np.testing.assert_allclose(gamma, want, rtol=1e-6)


@pytest.mark.parametrize("name", ZCLIP["cases"])
def test_zclip(name: str) -> None:
    case = ZCLIP["cases"][name]
    clip = adagc_jax.zclip(**case["config"])
    state = clip.init(as_tree(ZCLIP["gradients"][0]))
    update = jax.jit(clip.update)
    for step, grads in enumerate(ZCLIP["gradients"]):
        got, state = update(as_tree(grads), state)
        assert_close(got, case["clipped"][step], rtol=1e-5)
        mean, var = case["mean_var"][step]
        if mean is not None:
            rule = state.stages[0].rule
            np.testing.assert_allclose(rule.mean, [mean], rtol=1e-5)
            np.testing.assert_allclose(rule.var, [var], rtol=1e-5)


@pytest.mark.parametrize("case", TIMM, ids=lambda c: str(c["shape"]))
def test_agc_timm(case: dict[str, Any]) -> None:
    clip = adagc_jax.agc(0.01, eps=1e-3, layout="OI")
    params = as_tree({"w": case["param"]})
    grads = as_tree({"w": case["grad"]})
    got, _ = jax.jit(clip.update)(grads, clip.init(params), params)
    assert_close(got, {"w": case["clipped"]}, rtol=1e-6)
