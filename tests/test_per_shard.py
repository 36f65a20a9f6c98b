"""Groups that are the shards of leaves: AdaGC-Shard."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import adagc_jax as aj

SPECS = {"both": P("fsdp", "tensor"), "layers": P(None, "fsdp"), "norm": P()}
SHAPES = {"both": (8, 6), "layers": (3, 8), "norm": (5,)}
BLOCKS = {"both": (4, 2), "layers": (1, 4), "norm": (1,)}


def make_mesh(kind: AxisType, sizes: tuple[int, int] = (4, 2)) -> jax.sharding.Mesh:
    return jax.make_mesh(sizes, ("fsdp", "tensor"), axis_types=(kind,) * 2)


def shardings(mesh: jax.sharding.Mesh) -> dict[str, NamedSharding]:
    return {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()}


def gradients(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        name: (rng.normal(size=shape) * rng.lognormal()).astype(np.float32)
        for name, shape in SHAPES.items()
    }


def blocks(tree: dict[str, Any]) -> dict[str, np.ndarray]:
    """Every shard as a leaf of its own."""
    pieces = {}
    for name, value in tree.items():
        value = np.asarray(value)
        grid = np.empty(BLOCKS[name], object)
        for index in np.ndindex(*BLOCKS[name]):
            sizes = [n // k for n, k in zip(value.shape, BLOCKS[name], strict=True)]
            at = tuple(
                slice(i * s, (i + 1) * s) for i, s in zip(index, sizes, strict=True)
            )
            grid[index] = value[at]
            pieces[f"{name}{index}"] = value[at]
    return pieces


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("phase", ["auto", "steady"])
def test_shards_equal_a_model_of_its_shards(kind: AxisType, phase: str) -> None:
    mesh = make_mesh(kind)
    with jax.set_mesh(mesh):
        where = shardings(mesh)
        groups = aj.per_shard(where if kind == AxisType.Auto else None)
        clip = aj.adagc(warmup_steps=2, groups=groups, phase=phase)
        listed = aj.adagc(warmup_steps=2, phase=phase)
        put = lambda tree: jax.device_put(tree, where)  # noqa: E731
        state = jax.jit(clip.init)(put(gradients(9)))
        want_state = listed.init(blocks(gradients(9)))
        update = jax.jit(clip.update)
        for seed in range(5):
            grads = gradients(seed)
            if seed == 3:
                grads["both"][7, 5] = np.nan
            got, state = update(put(grads), state)
            want, want_state = listed.update(blocks(grads), want_state)
            for name, block in blocks(got).items():
                np.testing.assert_allclose(block, want[name], rtol=2e-6)
            for name, sharding in where.items():
                assert got[name].sharding.is_equivalent_to(sharding, got[name].ndim)
        vector, both, layers = state.stages[0].rule.gamma
        assert (vector.shape, both.shape, layers.shape) == ((1,), (4, 2), (4,))
        assert both.sharding.is_equivalent_to(NamedSharding(mesh, SPECS["both"]), 2)


def test_no_communication_at_all() -> None:
    mesh = make_mesh(AxisType.Auto)
    clip = aj.adagc(groups=aj.per_shard(shardings(mesh)), phase="steady")
    grads = jax.device_put(gradients(0), shardings(mesh))
    state = jax.jit(clip.init)(grads)
    text = jax.jit(clip.update).lower(grads, state).compile().as_text()
    for collective in ("all-reduce", "all-gather", "all-to-all", "permute"):
        assert collective not in text
    whole = aj.adagc(phase="steady")
    other = jax.jit(whole.update).lower(grads, whole.init(grads)).compile().as_text()
    assert "all-reduce" in other


def test_layers_and_shards_together() -> None:
    mesh = make_mesh(AxisType.Auto)
    where = NamedSharding(mesh, P(None, "fsdp", "tensor"))
    groups = aj.per_shard(where, stacked=0)
    clip = aj.clip_by_rule(
        (aj.FixedNorm(1.0), groups),
        (aj.FixedNorm(10.0), aj.stacked(0)),
        (aj.FixedNorm(5.0), aj.whole_tree()),
    )
    grads = {"w": jax.device_put(jnp.full((3, 4, 4), 2.0), where)}
    updates, state = jax.jit(clip.update)(grads, clip.init(grads))
    # Every block of two numbers is cut to norm 1: a layer of 8 has sqrt(8), the
    # whole sqrt(24) < 5.
    np.testing.assert_allclose(updates["w"], np.full((3, 4, 4), 0.5**0.5), rtol=1e-6)
    assert state.metrics.norm_after[-1].shape == (3, 4, 2) or (
        state.metrics.norm_after.shape == (3, 4, 2)
    )


def test_another_mesh_is_refused() -> None:
    mesh, other = make_mesh(AxisType.Auto), make_mesh(AxisType.Auto, (2, 4))
    grads = {"both": jnp.ones((8, 8))}
    one = aj.adagc(groups=aj.per_shard({"both": NamedSharding(mesh, SPECS["both"])}))
    two = aj.adagc(groups=aj.per_shard({"both": NamedSharding(other, SPECS["both"])}))
    state = one.init(grads)
    with pytest.raises(ValueError, match=r"had .4, 2"):
        two.update(grads, state)
    with pytest.raises(ValueError, match=r"no leaf|transfer_state|regrouped"):
        aj.adagc().update(grads, state)


def test_the_same_blocks_are_the_same_groups() -> None:
    """However the sharding is spelled, and on whichever mesh."""
    mesh, other = make_mesh(AxisType.Auto), make_mesh(AxisType.Auto, (2, 4))
    grads = {"w": jnp.arange(64.0).reshape(8, 8)}
    same = [
        NamedSharding(mesh, P("fsdp", "tensor")),
        NamedSharding(other, P("tensor", "fsdp")),
    ]
    clips = [aj.adagc(groups=aj.per_shard({"w": s}), warmup_steps=0) for s in same]
    (a, one), (b, two) = (c.update(grads, clips[0].init(grads)) for c in clips)
    for x, y in zip(*map(jax.tree.leaves, ((a, one), (b, two))), strict=True):
        np.testing.assert_array_equal(x, y)
    rows = [NamedSharding(mesh, P("fsdp")), NamedSharding(mesh, P("fsdp", None))]
    first, second = (aj.adagc(groups=aj.per_shard({"w": s})) for s in rows)
    second.update(grads, first.init(grads))
    columns = aj.adagc(groups=aj.per_shard({"w": NamedSharding(mesh, P(None, "fsdp"))}))
    with pytest.raises(ValueError, match=r"4 x 1 blocks.*1 x 4 blocks.*transfer_state"):
        columns.update(grads, first.init(grads))


def test_explicit_and_automatic_axes_in_one_spec() -> None:
    mesh = jax.make_mesh(
        (4, 2), ("fsdp", "tensor"), axis_types=(AxisType.Explicit, AxisType.Auto)
    )
    with jax.set_mesh(mesh):
        where = NamedSharding(mesh, P("fsdp", "tensor"))
        grads = {"w": jax.device_put(np.ones((8, 4), np.float32), where)}
        clip = aj.tensor_gc(1.0, groups=aj.per_shard(where))
        updates, _ = jax.jit(clip.update)(grads, jax.jit(clip.init)(grads))
    np.testing.assert_allclose(updates["w"], np.full((8, 4), 0.5), rtol=1e-6)


def test_errors_say_what_to_do() -> None:
    mesh = make_mesh(AxisType.Auto)
    with pytest.raises(ValueError, match=r"prefix tree of jax.sharding"):
        aj.per_shard({"w": P("fsdp")})
    with pytest.raises(ValueError, match="cannot be seen under jit"):
        aj.adagc(groups=aj.per_shard()).init({"w": jnp.ones(4)})
    free = NamedSharding(mesh, P(P.UNCONSTRAINED))
    with pytest.raises(ValueError, match="unconstrained"):
        aj.adagc(groups=aj.per_shard(free)).init({"w": jnp.ones(8)})
    uneven = aj.adagc(groups=aj.per_shard(NamedSharding(mesh, P("fsdp"))))
    with pytest.raises(ValueError, match="not divisible into the 4 shards"):
        uneven.init({"w": jnp.ones(6)})
    clip = aj.adagc(groups=aj.per_shard(NamedSharding(mesh, P("fsdp"))))
    state = clip.init({"w": jnp.ones(8)})
    inside = jax.shard_map(
        lambda g: clip.update(g, state)[0],
        mesh=mesh,
        in_specs=P("fsdp"),
        out_specs=P("fsdp"),
    )
    with pytest.raises(ValueError, match="outside shard_map"):
        jax.jit(inside)({"w": jnp.ones(8)})
