"""Taking packed numbers apart: exact everywhere, and quick to compile on CPU."""

import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import checkify
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import adagc_jax
from adagc_jax.elements import FEW, _by_branches, _hidden, hidden_elements

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


def test_outside_jit_the_second_time_compiles_nothing():
    hidden_elements(jnp.arange(40.0))
    before = _hidden._cache_size()
    hidden_elements(jnp.arange(40.0))
    assert _hidden._cache_size() == before > 0


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


MANY = FEW + 5


def steady():
    """A clipper that takes its state and its scales apart."""
    return adagc_jax.adagc(warmup_steps=1, phase="steady")


def gradients(seed):
    keys = jax.random.split(jax.random.key(seed), MANY)
    return {f"{i:02}": jax.random.normal(key, (8, 4)) for i, key in enumerate(keys)}


def after_a_few_steps(clip):
    """A state with references, from operations one by one."""
    state = clip.init(gradients(0))
    for seed in range(3):
        _, state = clip.update(gradients(seed), state)
    return state


def spike():
    return jax.tree.map(lambda g: 10.0 * g, gradients(7))


def sharded(check_vma):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    clip = adagc_jax.adagc(warmup_steps=1, phase="steady", axis_names={"": "x"})
    specs = (P("x"), P())
    return jax.jit(
        jax.shard_map(
            lambda g, s: clip.update(g, s),
            mesh=mesh,
            in_specs=specs,
            out_specs=specs,
            check_vma=check_vma,
        )
    )


def explicit(grads, state):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        placed = jax.device_put(grads, NamedSharding(mesh, P("x")))
        return jax.jit(steady().update)(placed, state)


def scanned(grads, state):
    def one(state, grads):
        updates, state = steady().update(grads, state)
        return state, updates

    state, updates = jax.lax.scan(one, state, jax.tree.map(lambda g: g[None], grads))
    return jax.tree.map(lambda u: u[0], updates), state


def batched(grads, state):
    def twice(tree):
        return jax.tree.map(lambda x: jnp.stack([x, x]), tree)

    found = jax.vmap(steady().update)(twice(grads), twice(state))
    return jax.tree.map(lambda x: x[1], found)


def checked(grads, state):
    error, found = checkify.checkify(jax.jit(steady().update))(grads, state)
    error.throw()
    return found


def exported(grads, state):
    flat, treedef = jax.tree.flatten((grads, state))

    def update(*leaves):
        return jax.tree.leaves(steady().update(*treedef.unflatten(leaves)))

    every = jax.export.export(jax.jit(update), platforms=("cpu", "tpu", "cuda"))(*flat)
    return treedef.unflatten(every.call(*flat))


WAYS = {
    "one by one": lambda g, s: steady().update(g, s),
    "without jit at all": jax.disable_jit()(lambda g, s: steady().update(g, s)),
    "shard_map": sharded(check_vma=True),
    "shard_map, unchecked": sharded(check_vma=False),
    "explicit axes": explicit,
    "scan": scanned,
    "vmap": batched,
    "checkify": checked,
    "export": exported,
}


@pytest.mark.parametrize("way", WAYS)
def test_many_tensors_are_clipped_alike_in_every_way(way):
    state = after_a_few_steps(steady())
    want = jax.jit(steady().update)(spike(), state)
    assert np.all(np.asarray(want[1].metrics.scale) < 1.0)
    chex.assert_trees_all_close(WAYS[way](spike(), state), want, rtol=1e-6)


def test_many_tensors_have_a_gradient_through_the_clipper():
    state = after_a_few_steps(steady())

    def total(grads):
        updates, _ = steady().update(grads, state)
        return sum(jnp.sum(u) for u in jax.tree.leaves(updates))

    slopes = jax.jit(jax.grad(total))(spike())
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(slopes))
