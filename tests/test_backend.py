"""Clippers with norms taken by kernels, in Pallas's interpreters, against XLA's.

Everything is small, so kernels are told to take small leaves as well.
"""

import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import (
    AxisType,
    NamedSharding,
    PartitionSpec as P,
    SingleDeviceSharding,
)

import adagc_jax as aj
from adagc_jax import kernels
from adagc_jax.kernels import Backend, launches, tiling

NAMES = ["pallas_tpu", "pallas_gpu"]
# What these programs compute does not depend on it, and they compile faster.
QUICKLY: Any = {"xla_backend_optimization_level": 0}
SHAPES = {
    "bias": (3,),
    "head": (24, 130),
    "layers": {"w": (4, 16, 128), "wide": (4, 8, 24)},
}
SPECS = {
    "bias": P(),
    "head": P("rows", "cols"),
    "layers": {"w": P("rows", None, "cols"), "wide": P("rows", "cols")},
}
PER_LAYER = aj.stacked({"layers/": 0})


@pytest.fixture(autouse=True)
def small_leaves_and_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiling, "SMALLEST", 64)
    monkeypatch.setattr(launches, "RING_BYTES", 4 << 10)


def is_shape(node: Any) -> bool:
    return isinstance(node, tuple)


@functools.cache
def gradients(seed: int = 0) -> Any:
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda shape: jnp.asarray(rng.standard_normal(shape), jnp.float32),
        SHAPES,
        is_leaf=is_shape,
    )


def bad_gradients() -> Any:
    """A spike in one layer, NaN in another, an infinity, and zeros."""
    grads = gradients(1)
    w = grads["layers"]["w"].at[0].mul(1e4).at[1, 5, 3].set(jnp.nan).at[2].set(0.0)
    return grads | {
        "head": grads["head"].at[-1, -1].set(jnp.inf),
        "layers": {"w": w, "wide": grads["layers"]["wide"] * 0.0},
    }


def here(name: str) -> Backend:
    """A kernel for arrays of one device, in an interpreter."""
    one = SingleDeviceSharding(jax.devices()[0])
    return Backend(name, shardings=one, interpret=True)


def assert_close(got: Any, want: Any, rtol: float = 4e-6) -> None:
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=rtol), got, want)


METHODS: dict[str, Any] = {
    "adagc": functools.partial(aj.adagc, warmup_steps=1, groups=PER_LAYER),
    "robust_gc": functools.partial(
        aj.robust_gc, warmup_steps=1, groups=PER_LAYER, phase="steady"
    ),
    "agc": functools.partial(aj.agc, unit="tensor", stacked={"layers/": 0}),
    "global_gc": aj.global_gc,
    "tensor_gc": functools.partial(aj.tensor_gc, nonfinite="propagate"),
    "zclip": functools.partial(aj.zclip, warmup_steps=1),
    "clip_by_rule": functools.partial(
        aj.clip_by_rule,
        (aj.FixedNorm(30.0), PER_LAYER),
        (aj.FixedNorm(20.0), aj.whole_tree()),
        nonfinite="skip",
    ),
}


@functools.cache
def every_method(backend: Any) -> Any:
    """Two updates, the second with bad gradients, of every method."""
    clips = {name: make(backend=backend) for name, make in METHODS.items()}
    params = gradients()

    @functools.partial(jax.jit, compiler_options=QUICKLY)
    def update(grads: Any, states: Any) -> Any:
        return {
            name: clip.update(grads, states[name], params)
            for name, clip in clips.items()
        }

    first = update(params, {name: clip.init(params) for name, clip in clips.items()})
    states = {name: state for name, (_, state) in first.items()}
    return {
        name: (first[name], after)
        for name, after in update(bad_gradients(), states).items()
    }


@pytest.mark.filterwarnings("ignore::adagc_jax.StackedTreeWarning")
@pytest.mark.parametrize("name", NAMES)
def test_every_method_equals_itself_with_xla(name: str) -> None:
    results, want = every_method(here(name)), every_method("xla")
    for method in METHODS:
        assert_close(results[method], want[method])
    spread = want["adagc"][1][1].metrics
    assert int(sum(np.sum(part) for part in jax.tree.leaves(spread.nonfinite))) == 2


def test_auto_is_the_program_of_xla_and_a_kernel_is_another() -> None:
    def program(backend: Any) -> str:
        clip = aj.adagc(backend=backend)
        return str(jax.make_jaxpr(clip.update)(grads, clip.init(grads)))

    grads = gradients() | {"layers": {}}
    assert program("auto") == program("xla")
    assert "pallas_call" not in program("auto")
    assert program(here("pallas_tpu")).count("pallas_call[") == 1


def mesh_of(kind: AxisType) -> Any:
    return jax.make_mesh((4, 2), ("rows", "cols"), axis_types=(kind,) * 2)


def on(mesh: Any, tree: Any) -> Any:
    return jax.device_put(tree, jax.tree.map(lambda s: NamedSharding(mesh, s), SPECS))


def clip_with(backend: Any, **kw: Any) -> Any:
    return aj.adagc(groups=PER_LAYER, phase="steady", backend=backend, **kw)


@functools.cache
def steady_update() -> Any:
    """On one device, by XLA: the state after one update, and the second update."""
    clip, grads = clip_with("xla"), gradients()
    update = jax.jit(clip.update)
    _, state = update(grads, clip.init(grads))
    return state, update(gradients(1), state)


def check_sharded(update: Any, grads: Any, state: Any, kernels: int) -> None:
    """Right, by so many kernels, and with sums as the only traffic between devices."""
    program = str(jax.make_jaxpr(update)(grads, state))
    assert program.count("pallas_call[") == kernels
    compiled = jax.jit(update).lower(grads, state).compile(QUICKLY)
    assert_close(compiled(grads, state), steady_update()[1])
    text = compiled.as_text()
    assert text is not None
    assert "all-reduce(" in text
    for other in ("all-gather", "all-to-all", "collective-permute"):
        assert other not in text


@pytest.mark.parametrize(("name", "kernels"), [("pallas_tpu", 1), ("pallas_gpu", 2)])
def test_shards_under_jit_stay_where_they_are(name: str, kernels: int) -> None:
    mesh = mesh_of(AxisType.Auto)
    grads = on(mesh, gradients(1))
    shardings = jax.tree.map(lambda g: g.sharding, grads)
    clip = clip_with(Backend(name, shardings=shardings, interpret=True))
    check_sharded(clip.update, grads, steady_update()[0], kernels)


def test_explicit_types_say_where_shards_are() -> None:
    mesh = mesh_of(AxisType.Explicit)
    clip = clip_with(Backend("pallas_tpu", interpret=True))
    with jax.set_mesh(mesh):
        grads = on(mesh, gradients(1))
        state = jax.jit(clip.init)(grads)
        known = steady_update()[0]
        state = jax.tree.map(
            lambda new, x: jax.device_put(x, new.sharding), state, known
        )
        check_sharded(clip.update, grads, state, 1)


def test_inside_shard_map_shards_are_arrays() -> None:
    mesh = mesh_of(AxisType.Auto)
    axes = {"head": ("rows", "cols"), "layers/": "cols"}
    clip = clip_with(Backend("pallas_gpu", interpret=True), axis_names=axes)
    # Layers stay whole: without types their split could not be seen.
    specs = SPECS | {"layers": {"w": P(None, None, "cols"), "wide": P(None, "cols")}}
    replicated = jax.tree.map(lambda _: P(), steady_update()[0])
    update = jax.shard_map(
        clip.update,
        mesh=mesh,
        in_specs=(specs, replicated),
        out_specs=(specs, replicated),
        check_vma=False,
    )
    check_sharded(update, gradients(1), steady_update()[0], 2)


def test_outside_of_jit_arrays_know_where_they_are() -> None:
    grads = {"head": gradients()["head"]}
    sharded = {"head": on(mesh_of(AxisType.Auto), gradients())["head"]}
    clip: Any = aj.tensor_gc(backend=Backend("pallas_tpu", interpret=True))
    updates, state = clip.update(sharded, clip.init(sharded))
    norm = np.linalg.norm(grads["head"])
    assert_close(state.metrics.norm_before[0], norm)
    assert_close(updates["head"], grads["head"] / norm)


@functools.cache
def transformed(backend: Any) -> Any:
    """An update under every transformation of JAX."""
    clip: Any = aj.tensor_gc(backend=backend)
    stack = jnp.stack([gradients(seed)["head"] for seed in range(3)])

    def emitted(x: jax.Array) -> jax.Array:
        return clip.update({"w": x}, clip.init({"w": x}))[0]["w"]

    def loss(x: jax.Array) -> jax.Array:
        return jnp.sum(emitted(x) ** 3)

    def layer(state: Any, x: jax.Array) -> Any:
        updates, state = clip.update({"w": x}, state)
        return state, updates["w"]

    def run(stack: jax.Array) -> Any:
        x = stack[0]
        return (
            jax.grad(loss)(x),
            jax.jvp(emitted, (x,), (stack[1],)),
            jax.vmap(emitted)(stack),
            jax.vmap(jax.grad(loss))(stack),
            jax.lax.scan(layer, clip.init({"w": x}), stack),
        )

    return jax.jit(run, donate_argnums=0, compiler_options=QUICKLY)(stack)


@pytest.mark.parametrize("name", NAMES)
def test_transformations_of_jax_are_those_of_xla(name: str) -> None:
    assert_close(transformed(here(name)), transformed("xla"))


def test_64_bits_and_abstract_evaluation() -> None:
    clip, grads = aj.adagc(backend=here("pallas_tpu")), {"w": gradients()["head"]}
    state = jax.eval_shape(clip.init, grads)
    updates, after = jax.eval_shape(clip.update, grads, state)
    assert updates["w"].shape == (24, 130)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    with jax.enable_x64(True):
        wide = {"w": grads["w"], "wide": np.ones((8, 128), np.float64)}
        updates, state = jax.jit(clip.update)(wide, clip.init(wide))
    assert (updates["wide"].dtype, updates["w"].dtype) == (jnp.float64, jnp.float32)
    assert_close(state.metrics.norm_before, [np.linalg.norm(grads["w"]), 32.0])


def rows_of(*args: Any, **kw: Any) -> dict[str, Any]:
    return {row.path: row for row in aj.explain(*args, **kw).rows}


def test_explain_says_which_leaf_goes_where_and_why() -> None:
    params = gradients() | {
        "half": jnp.ones((16, 128), jnp.float16),
        "vector": jnp.ones(256),
    }
    rows = rows_of(aj.agc(stacked={"layers/": 0}, backend=here("pallas_tpu")), params)
    assert {row.backend for row in rows.values()} == {"xla"}
    assert "not the leading ones" in rows["head"].why
    clip = aj.adagc(groups=PER_LAYER, exclude=("wide",), backend=here("pallas_tpu"))
    table = aj.explain(aj.guard(clip), params, loss=jnp.float32(1.0))
    rows = {row.path: row for row in table.rows}
    assert "3 elements are few" in rows["bias"].why
    assert "not float16" in rows["half"].why
    assert "two axes or more" in rows["vector"].why
    assert rows["head"][1:5] == ((24, 130), "float32", "pallas_tpu", "whole")
    assert set(rows) == {"bias", "half", "head", "layers/w", "vector"}
    lines = str(table).splitlines()
    assert lines[0].split() == ["leaf", "shape", "dtype", "summed", "by", "why"]
    assert lines[-1] == "kernels: 2 of 5 leaves"
    assert {row.why for row in rows_of("auto", params).values()} == {
        "no kernel is known to win"
    }


def test_explain_knows_what_is_known_of_shards() -> None:
    params, auto = gradients(), mesh_of(AxisType.Auto)
    named = Backend("pallas_gpu")
    for mesh in (None, auto):
        rows = rows_of(named, params, mesh=mesh)
        assert "over 8 devices is not known" in rows["head"].why
        assert rows["head"].backend == "xla"
    whole_specs = jax.tree.map(lambda spec: NamedSharding(auto, spec), SPECS)
    said = Backend("pallas_gpu", shardings=whole_specs)
    inner = optax.masked(
        aj.adagc(groups=PER_LAYER, backend=said),
        {"bias": False, "head": True, "layers": True},
    )
    rows = rows_of(inner, params)
    assert set(rows) == {"head", "layers/w", "layers/wide"}
    assert rows["layers/w"].why == f"shards (1, 16, 64) of {SPECS['layers']['w']}"
    assert rows["layers/wide"].why == f"shards (1, 4, 24) of {SPECS['layers']['wide']}"
    layers = {"layers": NamedSharding(auto, P("rows"))}
    rows = rows_of(Backend("pallas_gpu", shardings=layers), params)
    assert rows["layers/w"].why == f"shards (1, 16, 128) of {P('rows')}"
    assert "is not known" in rows["head"].why
    odd = Backend("pallas_gpu", shardings=NamedSharding(auto, P(None, "rows")))
    assert "does not divide" in rows_of(odd, params)["head"].why
    grids = aj.adagc(groups=aj.per_shard(whole_specs), backend=said)
    assert "shards are groups" in rows_of(grids, params)["head"].why
    explicit = mesh_of(AxisType.Explicit)
    with jax.set_mesh(explicit):
        typed = on(explicit, params)
    rows = rows_of(named, typed, mesh=explicit)
    assert rows["head"].why == f"shards (6, 65) of {SPECS['head']}"


def test_what_cannot_be_is_refused() -> None:
    grads = {"a": jnp.ones(100), "w": jnp.ones((16, 128), jnp.float16)}

    def updated(backend: Any) -> Any:
        clip = aj.tensor_gc(backend=backend)
        return clip.update(grads, clip.init(grads))

    with pytest.raises(ValueError, match=r"can serve none of the 2 .*'a': .*two axes"):
        updated(Backend("pallas_tpu", interpret=True))
    with pytest.raises(ValueError, match="no kernel for cpu"):
        updated("pallas")
    with pytest.raises(ValueError, match="runs on gpu, and the array is on cpu"):
        updated("pallas_gpu")
    with pytest.raises(ValueError, match="backend must be one of"):
        aj.zclip(backend="cuda")
    with pytest.raises(ValueError, match=r"shardings=.*got P.* at 'w'"):
        Backend("pallas", shardings={"w": P("rows")})
    with pytest.raises(ValueError, match="no gradients for norms"):
        aj.explain(optax.sgd(1.0), grads)


def test_arguments_that_would_be_taken_for_others_are_refused() -> None:
    x, ones = jnp.ones((2, 8, 128)), jnp.ones(2)
    clip = functools.partial(kernels.fused_clip, lambda_rel=1.0, beta=0.5)
    with pytest.raises(ValueError, match="floating or complex to be scaled, got int32"):
        clip(jnp.ones(3, jnp.int32), jnp.float32(1.0))
    with pytest.raises(ValueError, match=r"a sequence of axes, got 0: say \(0,\)"):
        kernels.sum_squares(x, keep=cast(Any, 0))
    traced = jax.jit(lambda beta: clip(x, ones, keep=(0,), beta=beta))
    with pytest.raises(ValueError, match="beta must be one number"):
        traced(ones)


def test_leaves_of_all_kinds_pass_beside_one_that_a_kernel_serves() -> None:
    """Numbers, nothing at all, ones without axes and weak types."""
    grads = {
        "empty": jnp.ones((0, 4)),
        "number": 3.0,
        "scalar": jnp.float32(2.0),
        "w": jnp.full((17, 131), 0.5),
    }

    def updated(backend: Any) -> Any:
        clip = aj.adagc(phase="steady", backend=backend)
        return jax.jit(lambda: clip.update(grads, clip.init(grads)))()

    for name in NAMES:
        assert_close(updated(here(name)), updated("xla"))


@pytest.mark.usefixtures("optax_promotion")
def test_a_backend_is_an_argument_like_others_to_inject_hyperparams() -> None:
    make = optax.inject_hyperparams(aj.adagc)
    clip, grads = make(lambda_rel=1.1, backend=here("pallas_tpu")), gradients()
    del grads["layers"]
    program = str(jax.make_jaxpr(clip.update)(grads, clip.init(grads)))
    assert "pallas_call" in program
