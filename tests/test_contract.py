"""What every public transform keeps, whatever its method."""

import functools
from collections.abc import Callable
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import adagc_jax as aj

Factory = Callable[[], optax.GradientTransformationExtraArgs]

# Every public method with its kinds of groups; limits are low enough to clip.
TRANSFORMS: dict[str, Factory] = {
    "adagc": lambda: aj.adagc(warmup_steps=2),
    "adagc_ema": lambda: aj.adagc(warmup_steps=2, warmup_init="ema"),
    "adagc_no_warmup": lambda: aj.adagc(warmup_steps=0),
    "adagc_steady": lambda: aj.adagc(phase="steady"),
    "adagc_global": lambda: aj.adagc(warmup_steps=2, groups=aj.whole_tree()),
    "adagc_stacked": lambda: aj.adagc(warmup_steps=2, groups=aj.stacked({"mat": 0})),
    "adagc_skip": lambda: aj.adagc(warmup_steps=2, nonfinite="skip"),
    "agc": lambda: aj.agc(0.1),
    "agc_tensor": lambda: aj.agc(0.1, unit="tensor"),
    "agc_first": lambda: aj.agc(0.1, layout="OI", stacked={"cube": 0}),
    "global_gc": lambda: aj.global_gc(0.5),
    "global_gc_eps": lambda: aj.global_gc(0.5, eps=1e-6),
    "tensor_gc": lambda: aj.tensor_gc(0.5),
    "zclip": lambda: aj.zclip(warmup_steps=2),
    "zclip_per_tensor": lambda: aj.zclip(warmup_steps=2, groups=aj.per_tensor()),
    "zclip_percentile": lambda: aj.zclip(warmup_steps=2, mode="percentile"),
    "clip_by_value": lambda: aj.clip_by_value(0.1),
    "robust_gc": lambda: aj.robust_gc(warmup_steps=2, release=3),
    "rules_in_sequence": lambda: aj.clip_by_rule(
        (aj.EmaRatio(1.04, 0.99, 1.0, 2), aj.stacked({"mat": 0})),
        (aj.FixedNorm(0.5), aj.whole_tree()),
    ),
}
# One of each structure of state and program, for what does not depend on the rule.
STRUCTURES = pytest.mark.parametrize(
    "name",
    [
        "adagc",
        "adagc_stacked",
        "adagc_steady",
        "agc_first",
        "clip_by_value",
        "global_gc",
        "rules_in_sequence",
        "zclip_per_tensor",
    ],
)
# Clips elements: no norms, no state.
BY_VALUE = {"clip_by_value"}

DTYPES = {
    "float32": (jnp.float32,) * 3,
    "bfloat16": (jnp.bfloat16,) * 3,
    "float16": (jnp.float16,) * 3,
    "mixed": (jnp.float32, jnp.bfloat16, jnp.float16),
}


def tree(dtypes: Any = DTYPES["float32"], seed: int = 0) -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(seed), 4)
    return {
        "mat": jax.random.normal(keys[0], (3, 4), dtypes[0]),
        "vec": jax.random.normal(keys[1], (5,), dtypes[1]),
        "nest": [
            jax.random.normal(keys[2], (2, 3, 4), dtypes[2]),
            jax.random.normal(keys[3], (), dtypes[0]),
        ],
        "cube": jnp.ones((2, 3, 2), dtypes[2]),
    }


@pytest.fixture(params=TRANSFORMS, name="name")
def fixture_name(request: pytest.FixtureRequest) -> str:
    return request.param


@functools.cache
def transform(name: str) -> optax.GradientTransformationExtraArgs:
    return TRANSFORMS[name]()


@functools.cache
def jitted(name: str) -> Callable[..., Any]:
    """One compiled update for all tests of a transform."""
    return jax.jit(transform(name).update)


@pytest.fixture(name="clip")
def fixture_clip(name: str) -> optax.GradientTransformationExtraArgs:
    return transform(name)


@pytest.fixture(name="update")
def fixture_update(name: str) -> Callable[..., Any]:
    return jitted(name)


def bits(x: Any) -> list[bytes]:
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(x)]


def norm(x: Any) -> float:
    leaves = [np.asarray(leaf, np.float64) for leaf in jax.tree.leaves(x)]
    return float(np.sqrt(sum(np.sum(leaf**2) for leaf in leaves)))


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=list(DTYPES))
def test_structure_and_state_are_fixed_points(clip: Any, dtypes: Any) -> None:
    params, grads = tree(dtypes), tree(dtypes, seed=1)
    state = clip.init(params)
    abstract = jax.eval_shape(clip.init, params)
    updates, after = jax.eval_shape(clip.update, grads, abstract, params)
    chex.assert_trees_all_equal_shapes_and_dtypes(updates, grads)
    chex.assert_trees_all_equal_structs(state, abstract, after)
    for a, b, c in zip(*map(jax.tree.leaves, (abstract, after, state)), strict=True):
        assert (a.shape, a.dtype, a.weak_type) == (b.shape, b.dtype, b.weak_type)
        assert (a.shape, a.dtype) == (c.shape, c.dtype)
        assert not a.weak_type
        assert a.dtype in (jnp.float32, jnp.int32)


@pytest.mark.parametrize("dtypes", [DTYPES["float32"], DTYPES["mixed"]])
def test_compiles_once_and_equals_eager(clip: Any, dtypes: Any) -> None:
    params = tree(dtypes)
    traces = 0

    def update(grads: Any, state: Any) -> Any:
        nonlocal traces
        traces += 1
        return clip.update(grads, state, params)

    jitted = jax.jit(update)
    state = eager_state = clip.init(params)
    for step in range(5):
        grads = tree(dtypes, seed=step)
        updates, state = jitted(grads, state)
        if step < 3:
            eager, eager_state = clip.update(grads, eager_state, params)
            # A 16-bit product may round the other way after another sum.
            chex.assert_trees_all_close(updates, eager, rtol=1e-2, atol=1e-6)
            chex.assert_trees_all_close(state, eager_state, rtol=1e-5, atol=1e-6)
    assert traces == 1


@STRUCTURES
def test_scan(clip: Any, update: Any) -> None:
    params = tree()
    stream = jax.tree.map(lambda *x: jnp.stack(x), *(tree(seed=s) for s in range(6)))

    def body(state: Any, grads: Any) -> Any:
        updates, state = clip.update(grads, state, params)
        return state, updates

    scanned, updates = jax.lax.scan(body, clip.init(params), stream)
    looped = clip.init(params)
    for step in range(6):
        want, looped = update(jax.tree.map(lambda x: x[step], stream), looped, params)  # noqa: B023
    chex.assert_trees_all_close(scanned, looped, rtol=1e-5)
    last = jax.tree.map(lambda x: x[-1], updates)
    chex.assert_trees_all_close(last, want, rtol=1e-5, atol=1e-7)


def test_extra_arguments_are_ignored(clip: Any, update: Any) -> None:
    params, grads = tree(), tree(seed=1)
    state = clip.init(params)
    plain = update(grads, state, params)
    extra = update(grads, state, params, value=1.0, loss=jnp.nan, anything={})
    assert bits(plain) == bits(extra)


def test_emitted_norm_and_direction(clip: Any, update: Any, name: str) -> None:
    params = tree()
    state = clip.init(params)
    for step in range(4):
        grads = jax.tree.map(lambda g: g * 10.0, tree(seed=step))
        updates, state = update(grads, state, params)
        for g, u in zip(*map(jax.tree.leaves, (grads, updates)), strict=True):
            assert norm(u) <= norm(g) * (1 + 1e-6)
            assert float(jnp.sum(g * u)) >= 0.0
    bounds = {"global_gc": 0.5, "global_gc_eps": 0.5, "rules_in_sequence": 0.5}
    if name in bounds:
        assert norm(updates) <= bounds[name] * (1 + 1e-6)
    if name == "tensor_gc":
        assert all(norm(u) <= 0.5 * (1 + 1e-6) for u in jax.tree.leaves(updates))
    assert norm(updates) < norm(grads)


def test_zero_gradients_move_nothing(clip: Any, update: Any) -> None:
    params = tree()
    state = clip.init(params)
    for step in range(3):
        _, state = update(tree(seed=step), state, params)
    zeros = jax.tree.map(jnp.zeros_like, params)
    updates, held = update(zeros, state, params)
    assert bits(updates) == bits(zeros)
    if isinstance(state, aj.ClipState):
        assert bits(held.stages) == bits(state.stages)
        assert bits(held.metrics.clipped) == bits(state.metrics.clipped)
        assert int(held.clip_step) == 4


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_gradients_leave_no_trace_in_the_rules(
    clip: Any, update: Any, name: str, bad: float
) -> None:
    params = tree()
    state = clip.init(params)
    for step in range(3):
        _, state = update(tree(seed=step), state, params)
    broken = tree(seed=3)
    broken["vec"] = broken["vec"].at[2].set(bad)
    updates, held = update(broken, state, params)
    if name in BY_VALUE:
        assert np.isfinite(updates["vec"]).sum() == (4 if np.isnan(bad) else 5)
        return
    assert all(bool(jnp.all(jnp.isfinite(u))) for u in jax.tree.leaves(updates))
    assert not np.any(updates["vec"])
    chex.assert_tree_all_finite(held.stages)
    before, after = (aj.clip_metrics(s, level="all") for s in (state, held))
    memory = [
        f"clip/{owner}{field}"
        for owner in ("", "vec/")
        for field in ("gamma", "mean", "var")
    ]
    for key in {*memory, "clip/vec/active"} & before.keys():
        assert bits(before[key]) == bits(after[key])
    assert int(after["clip/nonfinite"]) == 1
    assert int(after["clip/vec/nonfinite"]) == 1


@STRUCTURES
def test_masked_none_empty_and_odd_leaves_pass_through(clip: Any, name: str) -> None:
    odd = {
        "mat": jnp.ones((2, 2)),
        "cube": jnp.ones((2, 2, 2)),
        "none": None,
        "masked": optax.MaskedNode(),
        "int": jnp.arange(3),
        "bool": jnp.array([True]),
        "float0": np.zeros((2,), jax.dtypes.float0),
        "size0": jnp.zeros((0, 3)),
        "empty": {},
    }
    updates, _ = clip.update(odd, clip.init(odd), odd)
    chex.assert_trees_all_equal_structs(updates, odd)
    for key in ("int", "bool", "float0", "size0"):
        assert updates[key] is odd[key]


@pytest.mark.parametrize(
    "empty", [{}, (), None, {"a": None}, {"a": optax.MaskedNode()}]
)
def test_empty_trees(name: str, empty: Any) -> None:
    if name in ("adagc_stacked", "agc_first", "rules_in_sequence"):
        pytest.skip("names leaves by pattern, and there are none")
    clip = TRANSFORMS[name]()
    updates, state = jax.jit(clip.update)(empty, clip.init(empty), empty)
    assert updates == empty
    chex.assert_tree_all_finite(jax.tree.leaves(state))


@STRUCTURES
def test_order_of_leaves_does_not_matter(clip: Any, update: Any) -> None:
    """The same tensors as a dict, in another order and nested, clip alike."""
    first, second = tree(seed=1), tree(seed=2)

    def renamed(t: Any) -> Any:
        return {
            "z_mat": t["mat"],
            "nest": t["nest"],
            "a_cube": t["cube"],
            "inner": {"vec": t["vec"]},
        }

    state, other = clip.init(first), clip.init(renamed(first))
    for grads in (first, second, first):
        updates, state = update(grads, state, first)
        others, other = update(renamed(grads), other, renamed(first))
        chex.assert_trees_all_close(renamed(updates), others, rtol=2e-6)


@STRUCTURES
def test_donated_state(clip: Any, name: str) -> None:
    params = tree()
    donating = jax.jit(clip.update, donate_argnums=(0, 1))
    state = clip.init(params)
    plain = clip.init(params)
    for step in range(3):
        want, plain = jitted(name)(tree(seed=step), plain, params)
        updates, state = donating(tree(seed=step), state, params)
    assert bits(updates) == bits(want)
    assert bits(state) == bits(plain)


@STRUCTURES
def test_float64_when_enabled(clip: Any) -> None:
    with jax.enable_x64(True):
        params = tree((jnp.float64,) * 3)
        state = clip.init(params)
        updates, new_state = jax.jit(clip.update)(params, state, params)
        assert {u.dtype for u in jax.tree.leaves(updates)} == {np.dtype("float64")}
        dtypes = {s.dtype for s in jax.tree.leaves(new_state)}
        assert dtypes <= {np.dtype("float32"), np.dtype("int32")}


@STRUCTURES
def test_vmap_over_an_ensemble(clip: Any, update: Any) -> None:
    members = [tree(seed=s) for s in range(2)]
    stacked = jax.tree.map(lambda *x: jnp.stack(x), *members)
    states = jax.vmap(clip.init)(stacked)
    together = jax.jit(jax.vmap(clip.update))
    updates, states = together(stacked, states, stacked)
    updates, states = together(updates, states, stacked)
    for member, params in enumerate(members):
        want, state = update(params, clip.init(params), params)
        want, _ = update(want, state, params)
        got = jax.tree.map(lambda x, m=member: x[m], updates)
        chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-7)


def test_state_made_for_another_tree_is_refused(clip: Any, name: str) -> None:
    if name in BY_VALUE:
        pytest.skip("has no state")
    state = clip.init(tree())
    other = tree() | {"extra": jnp.ones(2)}
    with pytest.raises(ValueError, match=r"new leaves: \['extra'\]"):
        clip.update(other, state, other)
    fewer = tree()
    del fewer["vec"]
    with pytest.raises(ValueError, match=r"missing leaves: \['vec'\]"):
        clip.update(fewer, state, fewer)


def test_needs_no_parameters_but_for_agc(clip: Any, name: str) -> None:
    grads = tree(seed=1)
    state = clip.init(tree())
    if name.startswith("agc"):
        with pytest.raises(ValueError, match=r"call update\(updates, state, params\)"):
            clip.update(grads, state)
        return
    assert bits(clip.update(grads, state)) == bits(clip.update(grads, state, tree()))
