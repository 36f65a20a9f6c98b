"""One suite for every kernel, in Pallas's interpreters, against numpy and XLA.

Blocks are made small, so that small arrays have many of them, ragged ones included.
"""

import functools
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import (
    AxisType,
    NamedSharding,
    PartitionSpec as P,
    SingleDeviceSharding,
)

import adagc_jax as aj
from adagc_jax import kernels
from adagc_jax.kernels import launches, tiling, xla

LAMBDA, BETA = 1.04, 0.9
PALLAS = ["resident", "two_phase", "triton"]
BACKENDS = {"resident": "pallas_tpu", "two_phase": "pallas_tpu", "triton": "pallas_gpu"}
NAMES = ["pallas_tpu", "pallas_gpu"]


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiling, "BLOCK_BYTES", 32 << 10)


@pytest.fixture(params=PALLAS)
def backend(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """A backend by name; on TPU once with room for a slice in VMEM, once without."""
    if request.param == "two_phase":
        monkeypatch.setattr(tiling, "vmem_bytes", lambda kind: 0)
    return BACKENDS[request.param]


def normal(
    shape: tuple[int, ...], dtype: Any = jnp.float32, seed: int = 0
) -> jax.Array:
    values = np.random.default_rng(seed).standard_normal(shape)
    return jnp.asarray(values, jnp.float32).astype(dtype)


def clip(backend: str, keep: Any = (), interpret: Any = True, **kw: Any) -> Any:
    kw = {"lambda_rel": LAMBDA, "beta": BETA, **kw}
    return functools.partial(
        kernels.fused_clip, keep=keep, backend=backend, interpret=interpret, **kw
    )


def expected(x: jax.Array, gamma: Any, keep: tuple[int, ...]) -> Any:
    """The steady rule in double precision, for norms that are positive and finite."""
    wide, gamma = np.asarray(x, np.float64), np.asarray(gamma, np.float64)
    rest = tuple(a for a in range(x.ndim) if a not in keep)
    squares = np.sum(wide**2, axis=rest)
    before, limit = np.sqrt(squares), LAMBDA * gamma
    scale = np.minimum(1.0, limit / before)
    new_gamma = gamma + (1 - BETA) * (np.minimum(before, limit) - gamma)
    return squares, before, wide * np.expand_dims(scale, rest), new_gamma


SHAPES = [
    ((1, 1), (), "float32"),
    ((129, 8), (), "float32"),
    ((127, 1000), (), "float32"),
    ((3, 40, 127), (0,), "bfloat16"),
    ((2, 2, 3, 24, 128), (0, 1), "float32"),
]


@pytest.mark.parametrize(("shape", "keep", "dtype"), SHAPES)
def test_values_and_the_same_bits_in_every_run(
    shape: tuple[int, ...], keep: tuple[int, ...], dtype: str, backend: str
) -> None:
    x = normal(shape, dtype)
    kept = shape[: len(keep)]
    # Above the limit in some slices, below it in others.
    typical = np.sqrt(x.size / np.prod(kept))
    spread = np.linspace(0.5, 1.5, int(np.prod(kept))).reshape(kept)
    gamma = jnp.asarray(typical * spread, jnp.float32)

    run = jax.jit(clip(backend, keep))
    clipped, before, new_gamma = run(x, gamma)
    _, *want = expected(x, gamma, keep)
    assert clipped.dtype == x.dtype
    np.testing.assert_allclose(before, want[0], rtol=2e-6)
    np.testing.assert_allclose(new_gamma, want[2], rtol=2e-6)
    rounding = 4e-6 if dtype == "float32" else 2**-8
    np.testing.assert_allclose(np.float64(clipped), want[1], rtol=rounding)
    again = run(x, gamma)
    jax.tree.map(np.testing.assert_array_equal, again, (clipped, before, new_gamma))


@pytest.mark.parametrize(
    ("shape", "keep", "dtype"),
    [*SHAPES, ((7, 129), (), "bfloat16"), ((8, 8193), (), "float32")],
)
@pytest.mark.parametrize("name", NAMES)
def test_sums(name: str, shape: Any, keep: tuple[int, ...], dtype: str) -> None:
    x = normal(shape, dtype)
    rest = tuple(range(len(keep), x.ndim))
    got = jax.jit(_sums(name, keep))(x)
    np.testing.assert_allclose(got, np.sum(np.float64(x) ** 2, axis=rest), rtol=2e-6)


def _sums(backend: str, keep: tuple[int, ...] = (), interpret: Any = True) -> Any:
    return functools.partial(
        kernels.sum_squares, keep=keep, backend=backend, interpret=interpret
    )


@pytest.mark.parametrize("shape", [(), (5,), (9000,)])
def test_one_axis_and_none(shape: tuple[int, ...]) -> None:
    x = normal(shape)
    got = kernels.sum_squares(x, backend="pallas_gpu", interpret=True)
    np.testing.assert_allclose(got, np.sum(np.square(x)), rtol=2e-6)
    assert "two axes" in kernels.why_not(x, backend="pallas_tpu")


MANY = [
    ((51, 128), (), "float32"),
    ((43, 128), (), "float32"),
    ((100, 275), (), "bfloat16"),
    ((3, 20, 100), (0,), "float32"),
    ((40, 16), (), "float32"),
    ((3,), (), "float32"),
    ((9, 128), (), "float32"),
    ((2, 3, 8, 100), (0, 1), "float32"),
    ((16, 128), (), "float16"),
]


@pytest.mark.parametrize("name", NAMES)
def test_sums_of_many_arrays(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiling, "SMALLEST", 1)
    monkeypatch.setattr(launches, "RING_BYTES", 4 << 10)
    monkeypatch.setattr(launches, "MAX_ARRAYS", 4)
    arrays = [normal(shape, dtype, seed) for seed, (shape, _, dtype) in enumerate(MANY)]
    # The one copies when a copy is started, the other when it is waited for.
    interpreters: list[Any] = [True]
    if name == "pallas_tpu" and jax.__version_info__ >= (0, 9):
        interpreters.append(pltpu.InterpretParams(uninitialized_memory="nan"))
    here = SingleDeviceSharding(jax.devices()[0])
    for interpret in interpreters:
        backend = kernels.Backend(name, shardings=here, interpret=interpret)
        keeps = [keep for _, keep, _ in MANY]
        run = jax.jit(
            functools.partial(kernels.sums_of_squares, keep=keeps, backend=backend)
        )
        sums = run(arrays)
        for x, keep, total in zip(arrays, keeps, sums, strict=True):
            want = np.sum(np.float64(x) ** 2, tuple(range(len(keep), x.ndim)))
            assert total.dtype == jnp.float32
            np.testing.assert_allclose(total, want, rtol=2e-6)
        jax.tree.map(np.testing.assert_array_equal, run(arrays), sums)
        # Seven arrays in two launches on TPU; on GPU twice four, in two each, and one.
        program = str(jax.make_jaxpr(run)(arrays))
        assert program.count("pallas_call[") == {"pallas_tpu": 2, "pallas_gpu": 5}[name]


view = st.builds(
    tiling.View,
    slices=st.sampled_from([1, 3, 900, 4096]),
    rows=st.sampled_from([1, 8, 100, 4096]),
    cols=st.sampled_from([1, 128, 11008, 131_072]),
    swapped=st.just(False),
)


@settings(max_examples=200, deadline=None)
@given(views=st.lists(view, min_size=1, max_size=150), itemsize=st.sampled_from([2, 4]))
def test_launches_are_neighbours_within_all_limits(views: Any, itemsize: int) -> None:
    sizes = [np.prod(v.shape) * itemsize for v in views]
    for made in (
        launches.tpu_launches(views, [itemsize] * len(views)),
        launches.gpu_launches(sizes),
    ):
        assert [p for launch in made for p in launch] == list(range(len(views)))
        several = [launch for launch in made if len(launch) > 1]
        assert all(len(launch) <= launches.MAX_ARRAYS for launch in made)
        for launch in several:
            assert sum(sizes[p] for p in launch) <= launches.LAUNCH_BYTES
    for launch in launches.tpu_launches(views, [itemsize] * len(views)):
        own = [views[p] for p in launch]
        names = ["float32" if itemsize == 4 else "bfloat16"] * len(own)
        rings, walks = launches.launch_rings(own, names, [itemsize] * len(own))
        ends = [w.first + w.view.slices for w in walks]
        assert [0, *ends[:-1]] == [w.first for w in walks]
        for walk in walks:
            ring = rings[walk.ring]
            assert walk.rows <= ring.rows
            assert walk.view.cols == ring.cols
            assert walk.rows == walk.view.rows or walk.rows % (32 // itemsize) == 0
        if len(launch) > 1:
            assert ends[-1] <= tiling.MAX_SLICES
            tile = 32 // itemsize
            held = [-(-r.rows // tile) * tile * -(-r.cols // 128) * 128 for r in rings]
            assert 2 * launches.RING * itemsize * sum(held) <= launches.RINGS_BYTES


def stream(shape: tuple[int, ...]) -> list[np.ndarray]:
    """Ordinary, spike, zeros, NaN, infinity, too large for a norm, and ordinary."""
    step = [np.asarray(normal(shape, seed=i)).copy() for i in range(7)]
    step[1] *= 1e4
    step[2][1] = 0.0
    step[3][0, 5, 3] = np.nan
    step[4][2, -1, -1] = -np.inf
    step[5][0] *= 1e19
    return step


@functools.cache
def steady_adagc() -> tuple[jax.Array, list[tuple[np.ndarray, Any, Any]]]:
    """The first references, and gradients with what adagc made of them."""
    adagc = aj.adagc(
        LAMBDA, BETA, eps=1e-3, groups=aj.stacked({"w": 0}), phase="steady"
    )
    update = jax.jit(adagc.update)
    first, *rest = stream((3, 40, 127))
    _, state = update({"w": first}, adagc.init({"w": first}))
    gamma, steps = state.stages[0].rule.gamma, []
    for x in [*rest, first]:
        updates, state = update({"w": x}, state)
        steps.append((x, updates["w"], state))
    assert state.metrics.nonfinite.tolist() == [2, 0, 1]
    return gamma, steps


@pytest.mark.parametrize("name", ["xla", *PALLAS])
def test_equals_adagc_in_its_steady_phase(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if name == "two_phase":
        monkeypatch.setattr(tiling, "vmem_bytes", lambda kind: 0)
    step = jax.jit(clip(BACKENDS.get(name, name), (0,), eps=1e-3))
    same: Callable[..., None] = np.testing.assert_array_equal
    if name != "xla":
        same = functools.partial(np.testing.assert_allclose, rtol=2e-6)
    gamma, steps = steady_adagc()
    for x, want, state in steps:
        clipped, norm, new_gamma = step(x, gamma)
        same(clipped, want)
        same(norm, state.metrics.norm_before)
        same(new_gamma, state.stages[0].rule.gamma)
        idle = ~np.isfinite(norm) | (np.asarray(norm) == 0.0)
        np.testing.assert_array_equal(new_gamma[idle], gamma[idle])
        gamma = new_gamma


def test_scale_of_one_hands_every_bit_through(backend: str) -> None:
    x = normal((16, 128)).at[0, :2].set(jnp.float32([1e-42, -0.0]))
    clipped, _, _ = jax.jit(clip(backend))(x, jnp.float32(1e6))
    np.testing.assert_array_equal(
        np.asarray(clipped).view(np.int32), np.asarray(x).view(np.int32)
    )


@pytest.mark.skipif(
    jax.__version_info__ < (0, 9),
    reason="this interpreter's effects do not pass custom_vmap in jax 0.8",
)
@pytest.mark.parametrize(("shape", "keep"), [((2, 24, 129), (0,)), ((9, 1100), ())])
def test_memory_that_nothing_was_written_to_is_not_read(
    shape: tuple[int, ...], keep: tuple[int, ...]
) -> None:
    params = pltpu.InterpretParams(uninitialized_memory="nan")
    x, gamma = normal(shape), jnp.full(shape[: len(keep)], 3.0)
    program = str(jax.make_jaxpr(clip("pallas_tpu", keep))(x, gamma))
    assert ("adagc_clip_resident" in program) == bool(keep)  # else in two phases
    got = jax.jit(clip("pallas_tpu", keep, params))(x, gamma)
    squares, before, clipped, new_gamma = expected(x, gamma, keep)
    for value, want in zip(got, (clipped, before, new_gamma), strict=True):
        np.testing.assert_allclose(value, want, rtol=4e-6)
    sums = jax.jit(_sums("pallas_tpu", keep, params))(x)
    np.testing.assert_allclose(sums, squares, rtol=4e-6)


@pytest.mark.parametrize("name", ["xla", *NAMES])
@pytest.mark.parametrize("size", [1e-30, 1e-12, 1.0, 1e20, 1e35])
def test_norms_of_any_size(name: str, size: float) -> None:
    x = normal((16, 128)) * jnp.float32(size / 40)
    norm = _norm(name)(x, jnp.float32(size))
    np.testing.assert_allclose(norm, np.linalg.norm(np.float64(x)), rtol=4e-7)


@functools.cache
def _norm(name: str) -> Any:
    return jax.jit(
        lambda x, reference: kernels.norm(
            x, reference=reference, backend=name, interpret=True
        )
    )


def test_power_of_two_is_exact_and_neutral_where_it_must_be() -> None:
    usual = jnp.float32([1e-37, 1e-30, 0.7, 1.0, 3.0, 1e35])
    scale = np.asarray(xla.power_of_two(usual))
    assert np.all(np.frexp(scale)[0] == 0.5)
    near = np.asarray(usual) * scale
    assert np.all((near >= 1.0) & (near < 2.0))
    strange = jnp.float32([0.0, 1e-40, np.inf, np.nan])
    np.testing.assert_array_equal(xla.power_of_two(strange), 1.0)


def transformed(name: str, x: jax.Array, gamma: jax.Array) -> Any:
    """A backend's operation under every transformation of JAX."""
    op, each = clip(name, (0,)), clip(name)

    def loss(x: jax.Array, gamma: jax.Array) -> jax.Array:
        clipped, norm, new_gamma = op(x, gamma)
        return jnp.sum(clipped**3) + jnp.sum(norm) + jnp.sum(new_gamma)

    def layer(gamma: jax.Array, x: jax.Array) -> Any:
        clipped, _, gamma = each(x, gamma)
        return gamma, clipped

    return (
        jax.grad(loss, (0, 1))(x, gamma),
        jax.jvp(op, (x, gamma), (x, gamma)),
        jax.vmap(each, in_axes=(0, None))(x, gamma[0]),
        jax.vmap(jax.grad(lambda x: each(x, gamma[0])[1]))(x),
        jax.lax.scan(layer, gamma[0], x),
    )


@functools.cache
def transformed_xla() -> Any:
    x, gamma = normal((3, 16, 130)).at[1].set(0.0), jnp.full((3,), 30.0)
    return x, gamma, jax.jit(functools.partial(transformed, "xla"))(x, gamma)


def test_derivatives_and_batches_are_those_of_xla(backend: str) -> None:
    x, gamma, want = transformed_xla()
    got = jax.jit(functools.partial(transformed, backend))(x, gamma)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=4e-6), got, want)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(got))


def test_donation_64_bits_and_abstract_evaluation(backend: str) -> None:
    x, gamma = normal((40, 128)), jnp.float32(3.0)
    op = clip(backend)
    want = expected(x, gamma, ())
    shapes = jax.eval_shape(op, x, gamma)
    assert [s.shape for s in shapes] == [(40, 128), (), ()]
    with jax.enable_x64(True):
        clipped, norm, _ = jax.jit(op, donate_argnums=0)(x + jnp.float32(0.0), gamma)
    assert norm.dtype == jnp.float32
    np.testing.assert_allclose(norm, want[1], rtol=2e-6)
    np.testing.assert_allclose(clipped, want[2], rtol=4e-6)


@pytest.mark.parametrize("name", NAMES)
def test_sharded_arrays_go_through_shard_map_only(name: str) -> None:
    x, op = normal((4, 48, 128)), clip(name, (0,))
    gamma = jnp.full((4,), 30.0)
    mesh = jax.make_mesh((4, 2), ("l", "r"), axis_types=(AxisType.Auto,) * 2)
    explicit = jax.make_mesh((4, 2), ("l", "r"), axis_types=(AxisType.Explicit,) * 2)
    sharded = jax.device_put(x, NamedSharding(mesh, P("l")))
    with pytest.raises(ValueError, match=r"a mesh of 8 devices.*shard_map"):
        op(sharded, gamma)
    with pytest.raises(ValueError, match="8 devices"):
        jax.jit(op)(jax.device_put(x, NamedSharding(explicit, P("l"))), gamma)
    with jax.set_mesh(mesh), pytest.raises(ValueError, match="8 devices"):
        jax.jit(op)(sharded, gamma)

    def over(axis_names: set[str]) -> Any:
        return jax.shard_map(
            lambda x, gamma: op(x, gamma)[:2],
            mesh=mesh,
            in_specs=(P("l"), P("l")),
            out_specs=(P("l"), P("l")),
            axis_names=axis_names,
            check_vma=False,
        )

    with pytest.raises(ValueError, match="2 devices"):
        jax.jit(over({"l"}))(x, gamma)
    clipped, norm = jax.jit(over({"l", "r"}))(sharded, gamma)
    _, before, want, _ = expected(x, gamma, (0,))
    np.testing.assert_allclose(norm, before, rtol=2e-6)
    np.testing.assert_allclose(clipped, want, rtol=4e-6)


@pytest.mark.parametrize("name", ["auto", "xla", *NAMES])
def test_the_named_backend_is_the_one_that_runs(name: str) -> None:
    op = clip(name)
    program = str(jax.make_jaxpr(op)(jnp.ones((8, 128)), jnp.float32(1.0)))
    assert ("pallas_call" in program) == (name in NAMES)


REFUSED = [
    ("pallas_tpu", (8, 128), "float16", (), "float32 and bfloat16, not float16"),
    ("pallas_tpu", (8, 128), "float64", (), "not float64"),
    ("pallas_tpu", (8, 128), "complex64", (), "not complex64"),
    ("pallas_tpu", (8,), "float32", (), "two axes or more"),
    ("pallas_tpu", (8, 128), "float32", (0,), "two axes or more"),
    ("pallas_tpu", (8, 16, 128), "float32", (1,), "not the leading ones"),
    ("pallas_tpu", (8, 512, 16, 64), "float32", (0,), "in tiles of axes 3 and 1"),
    ("pallas_tpu", (3, 3, 12, 128), "float32", (), "12 is no multiple of 8"),
    ("pallas_tpu", (8192, 8, 128), "float32", (0,), "more than 4096 slices"),
    ("pallas_tpu", (0, 128), "float32", (), "nothing in it"),
    ("pallas_gpu", (8, 128), "float64", (), "not float64"),
    ("pallas_gpu", (8, 128), "complex64", (), "not complex64"),
    ("pallas_gpu", (2**16, 2**15), "float32", (), "in 32 bits"),
    ("pallas_gpu", (8, 16), "float32", (1,), "not the leading ones"),
]


@pytest.mark.parametrize(("name", "shape", "dtype", "keep", "reason"), REFUSED)
def test_a_named_backend_that_cannot_serve_says_why(
    name: str, shape: Any, dtype: str, keep: Any, reason: str
) -> None:
    with jax.enable_x64(dtype == "float64"):
        x = jax.ShapeDtypeStruct(shape, dtype)
        assert reason in kernels.why_not(x, keep=keep, backend=name)
        call = functools.partial(kernels.sum_squares, keep=keep, backend=name)
        with pytest.raises(ValueError, match="cannot serve") as error:
            jax.eval_shape(call, x)
    assert reason in str(error.value)


def test_bad_arguments_are_named() -> None:
    x, gamma = jnp.ones((4, 8, 128)), jnp.ones(4)
    op = functools.partial(clip("auto", (0,)), x)
    bad: list[tuple[Callable[[], Any], str]] = [
        (lambda: kernels.sum_squares(x, backend="cuda"), "backend must be one of"),
        (lambda: kernels.sum_squares(x, keep=(3,)), r"keep must name different axes"),
        (lambda: kernels.sum_squares(x, keep=(0, -3)), r"keep must name different"),
        (lambda: kernels.sum_squares(x, backend="pallas"), "no kernel for cpu"),
        (lambda: kernels.sum_squares(x, backend="pallas_tpu"), "array is on cpu"),
        (lambda: kernels.sums_of_squares([x], keep=[(), ()]), "each of the 1 arrays"),
        (lambda: kernels.norm(x, reference=gamma), r"reference must have .* \(\)"),
        (lambda: op(jnp.ones(3)), r"gamma must have the shape .* \(4,\), got \(3,\)"),
        (lambda: op(gamma.astype(jnp.bfloat16)), "gamma arrived as a bfloat16"),
        (lambda: op(gamma, beta=1.0), "beta must be in"),
        (lambda: op(gamma, lambda_rel=0.0), "lambda_rel must be in"),
        (lambda: op(gamma, eps=-1.0), "eps must be in"),
        (lambda: op(gamma, beta=lambda step: 0.9), "evaluate a schedule first"),
    ]
    for call, message in bad:
        with pytest.raises(ValueError, match=message):
            call()


def test_negative_kept_axes_count_from_the_end() -> None:
    x = normal((2, 3, 4))
    got = kernels.sum_squares(x, keep=(-1, 0))
    np.testing.assert_allclose(got, np.sum(np.square(x), axis=1), rtol=1e-6)


def test_importing_the_library_does_not_load_pallas() -> None:
    program = """
import sys, adagc_jax, adagc_jax.kernels as kernels, jax.numpy as jnp
kernels.fused_clip(jnp.ones(3), jnp.float32(1.0), lambda_rel=1.0, beta=0.9)
clip = adagc_jax.tensor_gc()
clip.update(jnp.ones(3), clip.init(jnp.ones(3)))
sys.exit(any("pallas" in name for name in sys.modules if name.startswith("jax")))
"""
    done = subprocess.run([sys.executable, "-c", program], check=False)
    assert done.returncode == 0


sizes = st.sampled_from([1, 2, 7, 8, 100, 127, 128, 129, 1000, 8193, 200_003])


@settings(max_examples=200, deadline=None)
@given(shape=st.lists(sizes, min_size=2, max_size=4), dtype=st.sampled_from("fb"))
def test_blocks_are_legal_and_cover_the_view(shape: list[int], dtype: str) -> None:
    name, itemsize = {"f": ("float32", 4), "b": ("bfloat16", 2)}[dtype]
    assume(not tiling.tpu_refusal(tuple(shape), (), name))
    view = tiling.tpu_view(tuple(shape), (), name)
    blocks = tiling.blocks(view, itemsize)
    assert np.prod(view.shape) == np.prod(shape)
    assert blocks.rows == view.rows or blocks.rows % (32 // itemsize) == 0
    assert blocks.cols == view.cols or blocks.cols % 128 == 0
    for block, count, whole in zip(
        (blocks.rows, blocks.cols), blocks.grid, view.shape[1:], strict=True
    ):
        assert (count - 1) * block < whole <= count * block
    padded_rows = -(-blocks.rows // (32 // itemsize)) * (32 // itemsize)
    padded_cols = -(-blocks.cols // 128) * 128
    smallest = 32 * 128
    assert padded_rows * padded_cols * itemsize <= max(tiling.BLOCK_BYTES, smallest)


def test_a_slice_is_resident_up_to_the_limit_of_its_generation() -> None:
    # The kinds of device as JAX names them.
    limits = {
        "TPU v4": 15,
        "TPU v5 lite": 127,
        "TPU v5": 63,
        "TPU v6 lite": 127,
        "TPU7x": 63,
        "": 15,
    }
    for kind, limit in limits.items():
        assert tiling.vmem_bytes(kind) == limit * tiling.MIB
        rows = (limit * tiling.MIB - 4 * tiling.BLOCK_BYTES) // 1024 // 8 * 8
        views = [tiling.View(1, n, 256, False) for n in (rows, rows + 8)]
        assert [tiling.fits(view, 4, kind) for view in views] == [True, False]
