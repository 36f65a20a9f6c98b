"""On a mesh of eight fake devices, every method equals one device."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import adagc_jax as aj

SPECS = {
    "both": P("fsdp", "tensor"),
    "swapped": P("tensor", "fsdp"),
    "last": P(None, "fsdp"),
    "pair": P(("fsdp", "tensor")),
    "layers": P("fsdp", None, "tensor"),
    "replicated": P(),
}
SHAPES = {
    "both": (8, 8),
    "swapped": (4, 8),
    "last": (3, 8),
    "pair": (16, 2),
    "layers": (4, 3, 6),
    "replicated": (5,),
}
PER_LAYER = aj.stacked({"layers": 0})
CLIPPERS = {
    "adagc": lambda: aj.adagc(warmup_steps=2, groups=PER_LAYER),
    "adagc_per_tensor": lambda: aj.adagc(warmup_steps=2),
    "adagc_skip": lambda: aj.adagc(warmup_steps=2, nonfinite="skip"),
    "adagc_steady": lambda: aj.adagc(phase="steady", groups=PER_LAYER),
    "agc": lambda: aj.agc(0.01, stacked={"layers": 0}),
    "global_gc": lambda: aj.global_gc(0.5),
    "tensor_gc": lambda: aj.tensor_gc(0.5, groups=PER_LAYER),
    "zclip": lambda: aj.zclip(warmup_steps=2),
}


@pytest.fixture(params=[AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def mesh(request: pytest.FixtureRequest) -> Iterator[jax.sharding.Mesh]:
    if jax.device_count() < 8:
        pytest.skip(f"needs 8 devices, has {jax.device_count()}")
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(request.param,) * 2)
    with jax.set_mesh(mesh):
        yield mesh


def host_gradients(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        name: (rng.normal(size=shape) * rng.lognormal()).astype(np.float32)
        for name, shape in SHAPES.items()
    }


def shard(tree: dict[str, np.ndarray], mesh: jax.sharding.Mesh) -> dict[str, Any]:
    return {
        name: jax.device_put(value, NamedSharding(mesh, SPECS[name]))
        for name, value in tree.items()
    }


def types(tree: Any) -> list[Any]:
    return [(x.shape, x.dtype) for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("name", CLIPPERS)
def test_sharded_equals_one_device(name: str, mesh: jax.sharding.Mesh) -> None:
    clip = CLIPPERS[name]()
    params = host_gradients(99)
    sharded_params = shard(params, mesh)
    state, sharded_state = clip.init(params), jax.jit(clip.init)(sharded_params)
    update = jax.jit(clip.update)
    for seed in range(5):
        grads = host_gradients(seed)
        if seed == 3:
            grads["both"][7, 7] = np.nan
        want, state = clip.update(grads, state, params)
        got, sharded_state = update(shard(grads, mesh), sharded_state, sharded_params)
        for a, b in zip(
            *map(jax.tree.leaves, ((want, state), (got, sharded_state))), strict=True
        ):
            np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-7)
        for leaf in SHAPES:
            assert got[leaf].sharding.is_equivalent_to(
                NamedSharding(mesh, SPECS[leaf]), got[leaf].ndim
            )


@pytest.mark.parametrize("name", CLIPPERS)
def test_state_types_are_stable_under_explicit_sharding(name: str) -> None:
    mesh = jax.make_mesh(
        (4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Explicit,) * 2
    )
    with jax.set_mesh(mesh):
        clip = CLIPPERS[name]()
        params = shard(host_gradients(0), mesh)
        eager = jax.tree.map(jax.typeof, clip.init(params))
        compiled = jax.tree.map(jax.typeof, jax.jit(clip.init)(params))
        _, updated = jax.jit(clip.update)(params, clip.init(params), params)
        assert eager == compiled == jax.tree.map(jax.typeof, updated)


@pytest.mark.parametrize("name", CLIPPERS)
def test_no_gradient_is_gathered(name: str) -> None:
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Auto,) * 2)
    clip = CLIPPERS[name]()
    params = shard(host_gradients(0), mesh)
    state = jax.jit(clip.init)(params)
    update = jax.jit(
        clip.update, out_shardings=(jax.tree.map(lambda x: x.sharding, params), None)
    )
    text = update.lower(params, state, params).compile().as_text()
    assert "all-to-all" not in text
    assert "collective-permute" not in text
    # Small vectors of per-layer numbers may be gathered, gradients may not.
    sizes = [line for line in text.splitlines() if " all-gather(" in line]
    assert not any("f32[8,8]" in line or "f32[16,2]" in line for line in sizes)


def test_init_from_abstract_parameters() -> None:
    shapes = {n: jax.ShapeDtypeStruct(s, jnp.float32) for n, s in SHAPES.items()}
    for make in CLIPPERS.values():
        concrete = make().init(host_gradients(0))
        abstract = make().init(shapes)
        assert types(abstract) == types(concrete)
        assert jax.tree.structure(abstract) == jax.tree.structure(concrete)


def test_init_outside_of_a_mesh_context() -> None:
    """References of sharded layers live where the layers do, without ``set_mesh``."""
    mesh = jax.make_mesh(
        (4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Explicit,) * 2
    )
    params = shard(host_gradients(0), mesh)
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), params
    )
    clip = aj.adagc(groups=PER_LAYER)
    for like in (params, abstract):
        state = clip.init(like)
        _, layers = state.stages[0].rule.gamma
        assert layers.sharding.is_equivalent_to(NamedSharding(mesh, P("fsdp")), 1)
    jax.jit(clip.update)(params, state)
