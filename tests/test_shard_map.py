"""Inside ``shard_map`` with the axes named, every method equals one device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import adagc_jax as aj

MESH = jax.make_mesh(
    (2, 2, 2), ("fsdp", "tensor", "expert"), axis_types=(AxisType.Auto,) * 3
)
NAMES = ("fsdp", "tensor", "expert")
SPECS = {
    "both": P("fsdp", "tensor"),
    "experts": P("expert", "fsdp"),
    "layers": P(None, "tensor"),
    "norm": P(),
    "pair": P(("tensor", "fsdp")),
}
SHAPES = {
    "both": (4, 4),
    "experts": (4, 2, 3),
    "layers": (3, 4),
    "norm": (5,),
    "pair": (8, 2),
}
STACKED = aj.stacked({"layers": 0, "experts": 0})
# Which axes each leaf is summed over, with the kept axis of the experts split.
BY_LEAF = {
    "both": ("fsdp", "tensor"),
    "pair": ("tensor", "fsdp"),
    "experts": "fsdp",
    "layers": "tensor",
}


def gradients(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        name: (rng.normal(size=shape) * rng.lognormal()).astype(np.float32)
        for name, shape in SHAPES.items()
    }


CLIPPERS = {
    "adagc": lambda **kw: aj.adagc(warmup_steps=2, groups=STACKED, **kw),
    "skip": lambda **kw: aj.adagc(
        warmup_steps=1, groups=STACKED, nonfinite="skip", **kw
    ),
    "steady": lambda **kw: aj.robust_gc(groups=STACKED, phase="steady", **kw),
    "global": lambda **kw: aj.global_gc(0.5, **kw),
    "agc": lambda **kw: aj.agc(0.01, stacked={"layers": 0, "experts": 0}, **kw),
    "agc_rows": lambda **kw: aj.agc(0.1, unit={"both": 0, "": "tensor"}, **kw),
    "zclip": lambda **kw: aj.zclip(warmup_steps=2, **kw),
}


@pytest.mark.parametrize("name", CLIPPERS)
def test_equals_one_device(name: str) -> None:
    check_against_one_device(name, NAMES)


def test_equals_one_device_with_axes_by_leaf() -> None:
    check_against_one_device("adagc", BY_LEAF)


def check_against_one_device(name: str, names: Any) -> None:
    inside, alone = CLIPPERS[name](axis_names=names), CLIPPERS[name]()
    params = gradients(9)
    want_state = got_state = alone.init(params)
    specs = aj.state_specs(alone, params, SPECS)
    update = jax.jit(
        jax.shard_map(
            inside.update,
            mesh=MESH,
            in_specs=(SPECS, specs, SPECS),
            out_specs=(SPECS, specs),
        )
    )
    for seed in range(5):
        grads = gradients(seed)
        if seed == 3:
            # On one device only; all must decide alike.
            grads["experts"][3, 1, 0] = np.nan
        want, want_state = alone.update(grads, want_state, params)
        got, got_state = update(grads, got_state, params)
        for a, b in zip(
            *map(jax.tree.leaves, ((want, want_state), (got, got_state))), strict=True
        ):
            np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-7)


def test_replicated_leaves_count_once_without_types() -> None:
    """``check_vma=False``: the mapping says what is sharded."""
    clip = aj.global_gc(1.0, axis_names=BY_LEAF | {"experts": ("expert", "fsdp")})
    grads = gradients(0)
    total = np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in grads.values()))
    update = jax.shard_map(
        lambda g: clip.update(g, clip.init(g))[0],
        mesh=MESH,
        in_specs=(SPECS,),
        out_specs=SPECS,
        check_vma=False,
    )
    for name, got in jax.jit(update)(grads).items():
        np.testing.assert_allclose(got, grads[name] / total, rtol=1e-6)


def run_inside(axis_names: Any, check_vma: bool = True) -> Any:
    clip = aj.tensor_gc(1.0, axis_names=axis_names)
    return jax.jit(
        jax.shard_map(
            lambda g: clip.update(g, clip.init(g))[0],
            mesh=MESH,
            in_specs=(SPECS,),
            out_specs=SPECS,
            check_vma=check_vma,
        )
    )(gradients(0))


@pytest.mark.parametrize(
    ("axis_names", "check_vma", "said"),
    [
        ((), True, "'both' varies over the mesh axes .*axis_names="),
        (("fsdp",), True, "varies over the mesh axes"),
        (("fsdp", "rows"), True, "'rows' is no mesh axis"),
        (NAMES, False, "check_vma=True, or map path patterns"),
        ({"nothing": "fsdp"}, False, "matches no leaf"),
    ],
)
def test_what_is_missing_is_named(axis_names: Any, check_vma: bool, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        run_inside(axis_names, check_vma)


def test_what_splits_kept_axes_must_be_said() -> None:
    """Summing experts over the axis that splits them would add different experts."""

    def inside(names: Any, with_state: bool) -> Any:
        clip = aj.tensor_gc(1.0, groups=STACKED, axis_names=names)
        state, specs = clip.init(gradients(0)), P()
        if with_state:
            specs = aj.state_specs(clip, gradients(0), SPECS)
        init = (lambda _, s: s) if with_state else (lambda g, _: clip.init(g))
        return jax.jit(
            jax.shard_map(
                lambda g, s: clip.update(g, init(g, s))[0],
                mesh=MESH,
                in_specs=(SPECS, specs),
                out_specs=SPECS,
            )
        )(gradients(0), state)

    with pytest.raises(ValueError, match="init inside shard_map: 'experts'"):
        inside(NAMES, with_state=False)
    with pytest.raises(ValueError, match=r"'experts' is to be summed over .'expert'"):
        inside(BY_LEAF | {"experts": NAMES}, with_state=True)
    with pytest.raises(ValueError, match=r"'layers' varies over .*'tensor'"):
        inside(BY_LEAF | {"layers": ()}, with_state=True)
    inside(NAMES, with_state=True)


def test_specs_of_a_whole_optimizer_state() -> None:
    params = gradients(0)
    optimizer = optax.chain(aj.adagc(groups=STACKED), aj.agc(), optax.adam(1.0))
    specs = aj.state_specs(optimizer, params, SPECS)
    state = optimizer.init(params)
    is_spec = lambda x: isinstance(x, P)  # noqa: E731
    assert jax.tree.structure(specs, is_leaf=is_spec) == jax.tree.structure(state)
    assert specs[2][0].mu == SPECS
    vector, experts, layers = specs[0].stages[0].rule.gamma
    assert (vector, experts, layers) == (P(), P("expert"), P(None))
    # Output units: the last axis of a matrix.
    assert specs[1].stages[0].seen[1] == P("tensor")
    placed = jax.device_put(
        state, jax.tree.map(lambda s: NamedSharding(MESH, s), specs, is_leaf=is_spec)
    )
    assert placed[0].metrics.scale[1].sharding.spec == P("expert")
    with pytest.raises(ValueError, match="PartitionSpec for every leaf"):
        aj.state_specs(optimizer, params, {"both": P()})
    with pytest.raises(ValueError, match="got 'fsdp' for 'both'"):
        aj.state_specs(optimizer, params, SPECS | {"both": "fsdp"})


def test_names_outside_shard_map_are_refused() -> None:
    clip = aj.adagc(axis_names="fsdp")
    with pytest.raises(ValueError, match=r"inside jax.shard_map"):
        clip.update({"w": jnp.ones(2)}, clip.init({"w": jnp.ones(2)}))
    with pytest.raises(ValueError, match="axis_names must be names"):
        aj.adagc(axis_names=(0,))  # type: ignore[arg-type]


def test_one_collective_for_all_norms() -> None:
    mesh = jax.make_mesh((8,), ("fsdp",), axis_types=(AxisType.Auto,))
    clip = aj.adagc(axis_names="fsdp")
    grads = {f"w{i}": jnp.ones((8, 2)) for i in range(6)} | {"norm": jnp.ones(3)}
    specs = {name: P() if name == "norm" else P("fsdp") for name in grads}
    state = clip.init(grads)
    update = jax.shard_map(
        clip.update, mesh=mesh, in_specs=(specs, P()), out_specs=(specs, P())
    )
    text = jax.jit(update).lower(grads, state).compile().as_text()
    assert text.count(" all-reduce(") == 1
    assert "all-gather" not in text
