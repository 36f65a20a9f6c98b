"""AdaGC and AdamW in one kernel against the chain of both, run by an interpreter."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import adagc_jax as aj
from adagc_jax import kernels
from adagc_jax.kernels import adamw_leaf, tiling
from adagc_jax.kernels.backend import Backend
from adagc_jax.kernels.routes import watch

pytestmark = pytest.mark.usefixtures("optax_promotion")

SHAPES = {"bias": (7,), "stack": (3, 24, 129), "w": (50, 130)}
CLIP: dict[str, Any] = {
    "groups": aj.stacked({"^stack": 0}),
    "phase": "steady",
    "warmup_steps": 0,
    "lambda_rel": 1.1,
}


@pytest.fixture(autouse=True)
def small_leaves_and_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several blocks per slice, the last one ragged."""
    monkeypatch.setattr(tiling, "SMALLEST", 64)
    monkeypatch.setattr(adamw_leaf, "BLOCK_BYTES", 16 * 256 * 4)


def backend(name: str = "pallas_tpu") -> Backend:
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return Backend(name, shardings=here, interpret=True)


def optimizer(by: Any, rate: Any = 1e-2, **kw: Any) -> Any:
    return kernels.adagc_adamw(rate, backend=by, **{**CLIP, **kw})


def chain(rate: Any = 1e-2, **adamw: Any) -> Any:
    return optax.chain(aj.adagc(**CLIP), optax.adamw(rate, **adamw))


def parameters() -> dict[str, jax.Array]:
    rng = np.random.default_rng(0)
    return {n: jnp.asarray(rng.normal(size=s), jnp.float32) for n, s in SHAPES.items()}


def gradients(number: int, dtype: str = "float32") -> dict[str, jax.Array]:
    """A stream with a NaN in one tensor, an idle layer and a spike."""
    rng = np.random.default_rng(number + 1)
    g = {
        n: rng.normal(size=s) * (40.0 if number == 3 else 1.0)
        for n, s in SHAPES.items()
    }
    if number == 2:
        g["w"][3, 3] = np.nan
        g["stack"][1] = 0.0
    return {n: jnp.asarray(x, dtype) for n, x in g.items()}


def close(got: Any, want: Any) -> None:
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=5e-7)


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("float32", {"weight_decay": 0.0}),
    "decayed, schedule": (
        "bfloat16",
        {"weight_decay": 0.1, "rate": optax.linear_schedule(1e-2, 1e-3, 4)},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_steps_and_updates_equal_the_chain(case: str) -> None:
    """And a running job changes over in mid-run, both ways."""
    dtype, kw = CASES[case]
    fused, reference = optimizer(backend(), **kw), chain(**kw)

    @jax.jit
    def both(params: Any, state: Any, grads: Any) -> Any:
        updates, next_state = fused.update(grads, state, params)
        by_update = optax.apply_updates(params, updates), next_state
        return fused.step(params, state, grads), by_update

    @jax.jit
    def plain(params: Any, state: Any, grads: Any) -> Any:
        updates, state = reference.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = parameters()
    ours = mixed = want = params, fused.init(params)
    assert jax.tree.structure(ours[1]) == jax.tree.structure(reference.init(params))
    for number in range(5):
        grads = gradients(number, dtype)
        want = plain(*want, grads)
        ours, by_update = both(*ours, grads)
        close(ours, want)
        close(by_update, want)
        mixed = (both(*mixed, grads)[0]) if number % 2 else plain(*mixed, grads)
    close(mixed, want)
    close(aj.clip_metrics(ours[1]), aj.clip_metrics(want[1]))


def test_without_a_kernel_it_is_the_chain() -> None:
    params, grads = parameters(), gradients(0)
    for by in ("auto", "xla"):
        fused = optimizer(by, mu_dtype=jnp.bfloat16)
        want = chain(mu_dtype=jnp.bfloat16)
        programs = [
            str(jax.make_jaxpr(o.update)(grads, o.init(params), params))
            for o in (fused, want)
        ]
        assert programs[0] == programs[1]


def test_explain_says_which_leaf_the_kernel_updates(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def table(**kw: Any) -> dict[str, Any]:
        rows = aj.explain(optimizer(backend(), **kw), parameters()).rows
        return {row.path: row for row in rows}

    rows = table()
    assert {n: r.backend for n, r in rows.items()} == {
        "bias": "xla",
        "stack": "pallas_tpu",
        "w": "pallas_tpu",
    }
    assert "float32 mu, not bfloat16" in table(mu_dtype=jnp.bfloat16)["w"].why
    monkeypatch.setattr(tiling, "vmem_bytes", lambda kind: tiling.MIB)
    assert "of it; there are 1" in table()["w"].why


def test_what_cannot_be_is_refused() -> None:
    for kw, said in (
        ({"phase": "auto"}, "phase='auto' needs"),
        ({"nonfinite": "skip"}, "nonfinite='skip'"),
        ({"groups": aj.whole_tree()}, "whole_tree"),
        ({"b1": 1.0}, "b1 must be in"),
    ):
        with pytest.raises(ValueError, match=said):
            optimizer(backend(), **kw)
    fused, params = optimizer(backend(), mu_dtype=jnp.bfloat16), parameters()
    with pytest.raises(ValueError, match="can serve none of the 3 leaves"):
        fused.update(params, fused.init(params), params)
    with pytest.raises(ValueError, match="params is None"):
        fused.update(params, fused.init(params))


def test_scan_batches_derivatives_and_64_bits_are_those_of_xla() -> None:
    params, grads = {"w": parameters()["w"]}, {"w": gradients(0)["w"]}

    def results(by: Any) -> Any:
        fused = optimizer(by, groups=None)

        def loss(g: Any, state: Any) -> Any:
            return jnp.sum(fused.update(g, state, params)[0]["w"] ** 2)

        @jax.jit
        def run(g: Any) -> Any:
            state = fused.init(params)

            def body(carry: Any, g: Any) -> Any:
                return fused.step(*carry, g), ()

            two = jax.tree.map(lambda x: jnp.stack([x, 2.0 * x]), g)
            scanned = jax.lax.scan(body, (params, state), two)[0]
            batched = jax.vmap(lambda g: fused.step(params, state, g))(two)
            return scanned, batched, jax.grad(loss)(g, state)

        return run(grads)

    close(results(backend()), results("xla"))
    with jax.enable_x64(True):
        fused = optimizer(backend(), groups=None)
        state = jax.eval_shape(fused.init, params)
        shapes = jax.eval_shape(fused.step, params, state, grads)
        assert jax.tree.map(lambda x: x.dtype, shapes) == jax.tree.map(
            lambda x: x.dtype, (params, state)
        )


# What is compiled is small, and computes the same without being optimised.
QUICKLY: Any = {"xla_backend_optimization_level": 0}
MESH_AXES = ("rows", "cols")
SHARDED = {"head": (32, 130), "stack": (4, 16, 128), "w": (16, 128)}
SPECS = {"head": P("rows", "cols"), "stack": P("rows"), "w": P()}


def of_shapes(
    shapes: dict[str, Any], seed: int, size: float = 1.0
) -> dict[str, jax.Array]:
    rng = np.random.default_rng(seed)
    arrays = {name: size * rng.normal(size=s) for name, s in shapes.items()}
    return {name: jnp.asarray(x, jnp.float32) for name, x in arrays.items()}


def steps_of(optimizer: Any) -> Any:
    """What `step` does, from `update`."""

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def kernels_in(function: Any, *args: Any) -> int:
    return str(jax.make_jaxpr(function)(*args)).count("pallas_call[")


# Whatever of these goes to a kernel has the shape (16, 128): quickly compiled.
VARIANTS: dict[str, dict[str, Any]] = {
    "mask, numbers of NumPy": {
        "mask": {"bias": True, "left": False, "w": True},
        "b1": np.float32(0.8),
        "b2": np.array(0.9, np.float32),
        "eps": np.float64(1e-6),
        "weight_decay": np.float32(0.1),
    },
    "exclude, release": {"exclude": ("^left",), "release": 2},
    "schedules": {
        "weight_decay": optax.linear_schedule(0.1, 0.3, 3),
        "lambda_rel": optax.linear_schedule(1.5, 1.05, 3),
        "exclude": ("bias", "left"),
    },
}
ONE_GROUP: dict[str, Any] = CLIP | {"groups": None}
OF_ADAMW = ("b1", "b2", "eps", "weight_decay")


def variants() -> dict[str, tuple[Any, Any]]:
    """Every variant with the chain that it must equal."""
    pairs = {}
    for name, kw in VARIANTS.items():
        adamw = {k: v for k, v in kw.items() if k in OF_ADAMW}
        clip = {k: v for k, v in kw.items() if k not in OF_ADAMW}
        clip = ONE_GROUP | clip
        want = optax.chain(aj.adagc(**clip), optax.adamw(1e-2, **adamw))
        pairs[name] = optimizer(backend(), groups=None, **kw), want
    rate = optax.linear_schedule(1e-2, 1e-3, 3)
    injected = optax.inject_hyperparams(kernels.adagc_adamw)
    kw = {**ONE_GROUP, "exclude": ("bias", "left"), "b1": 0.8}
    by_kernel, by_xla = (injected(rate, backend=b, **kw) for b in (backend(), "xla"))
    pairs["inject_hyperparams"] = by_kernel, by_xla
    return pairs


def test_arguments_mean_under_a_kernel_what_they_mean_in_the_chain() -> None:
    shapes = {"bias": (7,), "left": (16, 128), "w": (16, 128)}
    pairs, params = variants(), of_shapes(shapes, 0)

    def start(which: int) -> Any:
        return {
            name: (params, pair[which].init(params)) for name, pair in pairs.items()
        }

    def all_of(which: int) -> Any:
        steps = {name: steps_of(pair[which]) for name, pair in pairs.items()}

        def run(carries: Any, grads: Any) -> Any:
            return {name: step(*carries[name], grads) for name, step in steps.items()}

        return run

    run = functools.partial(jax.jit, compiler_options=QUICKLY)
    ours, want = run(lambda: (start(0), start(1)))()
    assert kernels_in(all_of(0), ours, params) == len(pairs)
    by_kernel, by_xla = run(all_of(0)), run(all_of(1))
    for size in (1.0, 40.0, 40.0, 40.0, 1.0):
        grads = of_shapes(shapes, 1, size)
        ours, want = by_kernel(ours, grads), by_xla(want, grads)
    close(ours, want)
    state = ours["inject_hyperparams"][1]
    np.testing.assert_allclose(state.hyperparams["learning_rate"], 1e-3, rtol=1e-6)
    largest = {
        name: float(np.max(ours[name][1][0].stages[0].rule.gamma)) for name in VARIANTS
    }
    assert largest["exclude, release"] > 10 * largest["mask, numbers of NumPy"]


def test_a_gpu_takes_the_norms_of_the_chain() -> None:
    params, grads = of_shapes(SHARDED, 0), of_shapes(SHARDED, 1)
    kw = {"groups": aj.stacked({"^stack": 0})}
    fused = optimizer(backend("pallas_gpu"), **kw)
    arguments = params, fused.init(params), grads
    # The sums of blocks of all leaves, and the sums of these.
    assert kernels_in(fused.step, *arguments) == 2
    got = jax.jit(fused.step, compiler_options=QUICKLY)(*arguments)
    close(got, jax.jit(steps_of(chain()))(*arguments))


def test_memory_is_given_back_for_the_results() -> None:
    fused = optimizer(backend(), groups=None)
    params, grads = of_shapes({"w": (16, 128)}, 0), of_shapes({"w": (16, 128)}, 1)
    run = functools.partial(jax.jit, compiler_options=QUICKLY)
    kept = params, fused.init(params)
    given = jax.tree.map(jnp.copy, kept)
    want = run(fused.step)(*kept, grads)
    # An unusable donation is a warning, which is an error here.
    got = run(fused.step, donate_argnums=(0, 1))(*given, grads)
    close(got, want)
    wide = [x for x in jax.tree.leaves(given) if x.shape == (16, 128)]
    assert len(wide) == 3
    assert all(x.is_deleted() for x in wide)
    assert not any(x.is_deleted() for x in jax.tree.leaves((kept, grads)))


def test_its_state_is_one_that_others_know() -> None:
    params = of_shapes({"bias": (7,), "w": (16, 128)}, 0)
    fused = optimizer(backend(), groups=None)
    reference = optax.chain(aj.adagc(**ONE_GROUP), optax.adamw(1e-2, b1=0.8))
    _, used = jax.jit(reference.update)(params, reference.init(params), params)
    state, report = aj.transfer_state(used, fused, params)
    assert not report.new
    assert not report.dropped
    jax.tree.map(np.testing.assert_array_equal, state, used)
    np.testing.assert_array_equal(
        optax.tree_utils.tree_get(state, "mu")["w"], used[1][0].mu["w"]
    )
    state = optax.tree_utils.tree_set(state, nu=params)
    back, report = aj.transfer_state(state, reference, params)
    assert not report.new
    jax.tree.map(np.testing.assert_array_equal, back, state)
    doubled: Any = optax.tree_utils.tree_map_params(fused, lambda x: 2 * x, state)
    close(doubled[1][0].nu, jax.tree.map(lambda x: 2 * x, params))
    assert doubled[1][0].count == used[1][0].count


def mesh_of(kind: AxisType) -> Any:
    return jax.make_mesh((4, 2), MESH_AXES, axis_types=(kind,) * 2)


def test_inside_shard_map_norms_across_devices_are_left_to_xla() -> None:
    mesh, specs = mesh_of(AxisType.Auto), SPECS | {"stack": P(None, None, "cols")}
    # Without types it has to be said which axes a leaf is summed over.
    names = {"head": MESH_AXES, "stack": "cols"}
    fused = optimizer(Backend("pallas_tpu", interpret=True), axis_names=names)
    alone, params = chain(), of_shapes(SHARDED, 0)
    whole = jax.tree.map(lambda _: P(), alone.init(params))
    moments = whole[1][0]._replace(mu=specs, nu=specs)
    states = whole[0], (moments, *whole[1][1:])
    step = jax.shard_map(
        fused.step,
        mesh=mesh,
        in_specs=(specs, states, specs),
        out_specs=(specs, states),
        check_vma=False,
    )
    ours = want = params, alone.init(params)
    with watch() as seen:
        assert kernels_in(step, *ours, params) == 1
    why = {route.path: route.why for route in seen}
    assert why["w"] == "whole"
    assert "norm goes over ('rows', 'cols')" in why["head"]
    assert "norm goes over ('cols',)" in why["stack"]
    inside, outside = jax.jit(step, compiler_options=QUICKLY), jax.jit(steps_of(alone))
    for size in (1.0, 40.0):
        grads = of_shapes(SHARDED, 1, size)
        ours, want = inside(*ours, grads), outside(*want, grads)
    close(ours, want)


def test_types_inside_shard_map_say_which_norms_are_whole() -> None:
    """Layers split over devices are whole on each, and the kernel's."""
    fused = optimizer(Backend("pallas_tpu"), axis_names=MESH_AXES)
    params = of_shapes(SHARDED, 0)
    states = aj.state_specs(fused, params, SPECS)
    step = jax.shard_map(
        fused.step,
        mesh=mesh_of(AxisType.Auto),
        in_specs=(SPECS, states, SPECS),
        out_specs=(SPECS, states),
    )
    with watch() as seen:
        assert kernels_in(step, params, fused.init(params), params) == 2
    assert {r.path: r.backend for r in seen} == {
        "head": "xla",
        "stack": "pallas_tpu",
        "w": "pallas_tpu",
    }


def test_arrays_of_several_devices_are_refused_under_jit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params = of_shapes(SHARDED, 0)

    def refused(mesh: Any, shardings: Any, said: str) -> None:
        placed = jax.tree.map(lambda s: NamedSharding(mesh, s), SPECS)
        sharded = jax.device_put(params, placed)
        shardings = placed if shardings == "placed" else shardings
        by = Backend("pallas_tpu", shardings=shardings, interpret=True)
        fused = optimizer(by)
        state = jax.eval_shape(fused.init, sharded)
        with pytest.raises(ValueError, match=said):
            jax.jit(fused.step).lower(sharded, state, sharded)

    auto, explicit = mesh_of(AxisType.Auto), mesh_of(AxisType.Explicit)
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    refused(auto, None, "over 8 devices is not known")
    refused(auto, "placed", "runs inside shard_map only")
    refused(auto, here, "its type has a mesh of 8")
    with jax.set_mesh(explicit):
        refused(explicit, None, "runs inside shard_map only")


@pytest.mark.parametrize("said", ["nothing", "one device"])
def test_a_program_for_several_devices_is_refused_when_it_is_lowered(
    said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ahead of time, with one device in sight, no type need show the others."""
    monkeypatch.setattr(jax, "device_count", lambda: 1)
    by = backend() if said == "one device" else Backend("pallas_tpu", interpret=True)
    everywhere = NamedSharding(mesh_of(AxisType.Auto), P())
    fused, x = optimizer(by, groups=None), jax.ShapeDtypeStruct((16, 128), "float32")
    state = jax.eval_shape(fused.init, [x])
    for function, arguments in (
        (fused.step, ([x], state, [x])),
        (functools.partial(kernels.sums_of_squares, backend=by), ([x],)),
        (lambda x: kernels.sum_squares(x, backend=by.name, interpret=True), (x,)),
    ):
        # In one that is for one device nothing is wrong.
        jax.jit(function).lower(*arguments)
        with pytest.raises(ValueError, match="in a program for 8 devices"):
            jax.jit(function, in_shardings=everywhere).lower(*arguments)
