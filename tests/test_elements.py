"""Taking packed numbers apart: exact everywhere, and quick to compile on CPU."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import adagc_jax
from adagc_jax.elements import FEW, _by_branches, hidden_elements

SIZES = [0, 1, 2, FEW - 1, FEW, FEW + 1, 25, 26, 111]


def numbers(size):
    """Distinct numbers, with all that could be lost on the way among them."""
    values = np.arange(size, dtype=np.float32) - 3.0
    values[: min(size, 4)] = [np.nan, np.inf, -0.0, 1e-42][: min(size, 4)]
    return jnp.asarray(values)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("jit", [False, True])
def test_are_the_bits_of_the_vector_in_order(size, jit):
    vector = numbers(size)
    take = jax.jit(hidden_elements) if jit else hidden_elements
    found = take(vector)
    assert [x.shape for x in found] == [()] * size
    bits = np.array([np.asarray(x).view(np.uint32) for x in found], np.uint32)
    np.testing.assert_array_equal(bits, np.asarray(vector).view(np.uint32))


def test_under_vmap_grad_and_integers():
    rows = jnp.arange(60.0).reshape(3, 20)
    batched = jnp.stack(jax.vmap(hidden_elements)(rows), axis=1)
    chex.assert_trees_all_equal(batched, rows)
    slope = jax.grad(lambda v: sum(i * x for i, x in enumerate(hidden_elements(v))))
    chex.assert_trees_all_equal(slope(jnp.ones(20)), jnp.arange(20.0))
    counts = jnp.arange(20, dtype=jnp.int32)
    chex.assert_trees_all_equal(jnp.stack(hidden_elements(counts)), counts)


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_on_accelerators_no_branch_depends_on_a_number(platform):
    def lowered(take):
        traced = jax.jit(lambda vector: tuple(take(vector))).trace(jnp.ones(40))
        return traced.lower(lowering_platforms=(platform,)).as_text()

    assert "stablehlo.compare" not in lowered(hidden_elements)
    assert "stablehlo.compare" in lowered(lambda v: _by_branches(v))


@pytest.mark.parametrize("phase", ["auto", "steady"])
@pytest.mark.usefixtures("optax_promotion")
def test_tensors_of_one_shape_share_their_kernels(phase):
    """Distinct computations, all but the names of their values."""

    def distinct(tensors):
        optimizer = optax.chain(adagc_jax.adagc(phase=phase), optax.adamw(1e-3))
        params = {f"{i:03}": jnp.ones((8, 8)) for i in range(tensors)}

        @jax.jit
        def step(grads, state, params):
            updates, state = optimizer.update(grads, state, params)
            return optax.apply_updates(params, updates), state

        arguments = params, optimizer.init(params), params
        text = step.lower(*arguments).compile().as_text()
        bodies = re.findall(r"^%?fused[^\n]*\{\n(.*?)^\}", text, re.M | re.S)
        return len({re.sub(r"%[\w.\-]+|metadata=\{[^}]*\}", "", b) for b in bodies})

    # Without it, each tensor brings some of its own.
    assert distinct(100) < distinct(50) + 25
