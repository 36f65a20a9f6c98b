"""Inside ``shard_map`` with the axes named, every method equals one device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec as P

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
# Which axes each leaf is summed over, with the kept axis of the experts sharded.
BY_LEAF = {"both": NAMES, "pair": NAMES, "experts": "fsdp", "layers": "tensor"}
UNSTACKED = BY_LEAF | {"both": ("fsdp", "tensor"), "pair": ("tensor", "fsdp")}


def gradients(seed: int) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {
        name: (rng.normal(size=shape) * rng.lognormal()).astype(np.float32)
        for name, shape in SHAPES.items()
    }


def state_specs(state: Any) -> Any:
    """References of experts live where the experts do; everything else everywhere."""
    return jax.tree.map(lambda x: P("expert") if x.shape == (4,) else P(), state)


CLIPPERS = {
    "adagc": lambda **kw: aj.adagc(warmup_steps=2, groups=STACKED, **kw),
    "skip": lambda **kw: aj.adagc(
        warmup_steps=1, groups=STACKED, nonfinite="skip", **kw
    ),
    "steady": lambda **kw: aj.robust_gc(groups=STACKED, phase="steady", **kw),
    "global": lambda **kw: aj.global_gc(0.5, **kw),
    "agc": lambda **kw: aj.agc(
        0.01, unit="tensor", stacked={"layers": 0, "experts": 0}, **kw
    ),
    "zclip": lambda **kw: aj.zclip(warmup_steps=2, **kw),
}


@pytest.mark.parametrize("name", CLIPPERS)
def test_equals_one_device(name: str) -> None:
    stacked = name not in ("global", "zclip")
    names = BY_LEAF if stacked else NAMES
    inside, alone = CLIPPERS[name](axis_names=names), CLIPPERS[name]()
    params = gradients(9)
    want_state = got_state = alone.init(params)
    specs = state_specs(want_state)
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
    clip = aj.global_gc(1.0, axis_names=UNSTACKED | {"experts": ("expert", "fsdp")})
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
