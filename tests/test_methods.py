"""Each method against float64 references, optax, and formulas written out here."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference

import adagc_jax as aj

SHAPES = {"a": (3, 4), "b": (5,), "c": (2, 3, 4), "d": ()}


def stream(steps: int, seed: int = 0, spike: float = 30.0) -> Iterator[dict[str, Any]]:
    """Float32 gradients with log-normal norms, spikes, an idle and a late tensor."""
    rng = np.random.default_rng(seed)
    for step in range(steps):
        grads = {
            name: rng.normal(size=shape) * np.exp(rng.normal(scale=0.5))
            for name, shape in SHAPES.items()
        }
        if step % 7 == 5:
            grads["a"] = grads["a"] * spike
        if step % 4 == 1:
            grads["b"] = np.zeros(SHAPES["b"])
        if step < 6:
            grads["d"] = np.zeros(())
        if step == 9:
            grads["c"][0, 1, 2] = np.nan
        if step == 12:
            grads["c"][1, 0, 0] = -np.inf
        yield {name: np.asarray(g, np.float32) for name, g in grads.items()}


def assert_close(got: Any, want: Any, rtol: float = 2e-5) -> None:
    for name, value in want.items():
        np.testing.assert_allclose(
            np.asarray(got[name], np.float64), value, rtol=rtol, atol=1e-12
        )


def ulps(a: Any, b: Any) -> float:
    """Largest distance in units of the last place, over all leaves."""
    worst = 0.0
    for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True):
        x, y = np.asarray(x), np.asarray(y)
        spacing = np.spacing(np.maximum(np.abs(x), np.abs(y)).astype(x.dtype))
        worst = max(worst, float(np.max(np.abs(x - y) / spacing, initial=0.0)))
    return worst


@pytest.mark.parametrize("nonfinite", ["zero", "skip", "propagate"])
@pytest.mark.parametrize("warmup_init", ["min", "ema"])
@pytest.mark.parametrize("warmup_steps", [0, 5])
def test_adagc_follows_the_paper(
    nonfinite: str, warmup_init: str, warmup_steps: int
) -> None:
    hyper = {
        "lambda_rel": 1.04,
        "beta": 0.9,
        "lambda_abs": 1.0,
        "warmup_steps": warmup_steps,
    }
    options = {"warmup_init": warmup_init, "nonfinite": nonfinite}
    clip = aj.adagc(**hyper, **options, groups=aj.stacked({"^c$": 0}))
    want = reference.AdaGC(**hyper, **options, kept_axes={"c": (0,)})
    state = clip.init({k: jnp.zeros(s) for k, s in SHAPES.items()})
    update = jax.jit(clip.update)
    for grads in stream(20):
        got, state = update(grads, state)
        assert_close(got, want.update(grads))
        numbers = aj.clip_metrics(state, level="all")
        for name in ("a", "b", "d"):
            np.testing.assert_allclose(
                numbers[f"clip/{name}/gamma"], want.gamma[name], rtol=2e-5
            )
        for layer in range(2):
            np.testing.assert_allclose(
                numbers[f"clip/c/{layer}/gamma"], want.gamma["c"][layer], rtol=2e-5
            )
            assert int(numbers[f"clip/c/{layer}/active"]) >= int(want.seen["c"][layer])


@pytest.mark.parametrize("warmup_init", ["min", "ema"])
def test_adagc_global_follows_the_paper(warmup_init: str) -> None:
    hyper = {"lambda_rel": 1.1, "beta": 0.95, "lambda_abs": 2.0, "warmup_steps": 4}
    clip = aj.adagc(**hyper, warmup_init=warmup_init, groups=aj.whole_tree())
    want = reference.AdaGC(**hyper, warmup_init=warmup_init, scope="global")
    state = clip.init({k: jnp.zeros(s) for k, s in SHAPES.items()})
    for grads in stream(20):
        got, state = jax.jit(clip.update)(grads, state)
        assert_close(got, want.update(grads))
        gamma = aj.clip_metrics(state)["clip/gamma"]
        np.testing.assert_allclose(gamma, want.gamma[""], rtol=2e-5)


@pytest.mark.parametrize("scope", ["global", "tensor"])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"clip_option": "mean", "max_grad_norm": None},
        {"mode": "percentile", "max_grad_norm": None},
        {"clip_factor": 0.8, "max_grad_norm": None, "skip_update_on_spike": True},
        {"z_thresh": 1.0, "max_grad_norm": 3.0, "warmup_steps": 1},
    ],
)
def test_zclip_follows_the_paper(scope: str, options: dict[str, Any]) -> None:
    hyper = {"alpha": 0.9, "warmup_steps": 5} | options
    groups = aj.whole_tree() if scope == "global" else aj.per_tensor()
    clip = aj.zclip(**hyper, groups=groups)
    want = reference.ZClip(**hyper, scope=scope)
    state = clip.init({k: jnp.zeros(s) for k, s in SHAPES.items()})
    update = jax.jit(clip.update)
    for grads in stream(25):
        got, state = update(grads, state)
        assert_close(got, want.update(grads), rtol=1e-4)


def test_agc_follows_the_paper_on_stacked_layers() -> None:
    rng = np.random.default_rng(0)
    params = {"w": rng.normal(size=(4, 3, 5)), "e": rng.normal(size=(6, 2))}
    params = {k: v.astype(np.float32) for k, v in params.items()}
    clip = aj.agc(0.05, unit={"e": 0}, stacked={"w": 0})
    for scale in (1e-4, 0.05, 1.0, 1e3):
        grads = {
            k: (rng.normal(size=v.shape) * scale).astype(np.float32)
            for k, v in params.items()
        }
        got, _ = jax.jit(clip.update)(grads, clip.init(params), params)
        want = reference.agc(
            grads, params, 0.05, 1e-3, reduce_axes={"w": (1,), "e": (1,)}
        )
        assert_close(got, want)


@pytest.mark.parametrize("max_norm", [0.01, 1.0, 10.0, 1e6])
def test_global_gc_equals_optax(max_norm: float) -> None:
    clip, theirs = aj.global_gc(max_norm), optax.clip_by_global_norm(max_norm)
    update, their_update = jax.jit(clip.update), jax.jit(theirs.update)
    for seed in range(20):
        grads = next(stream(1, seed=seed)) | {"d": np.float32(seed)}
        got, _ = update(grads, clip.init(grads))
        want, _ = their_update(grads, theirs.init(grads))
        assert ulps(got, want) <= 2


def test_global_gc_equals_the_formula_of_pytorch() -> None:
    for seed in range(10):
        grads = next(stream(1, seed=seed))
        clip = aj.global_gc(1.0, eps=1e-6)
        got, _ = clip.update(grads, clip.init(grads))
        total = np.sqrt(
            sum(np.sum(np.square(g, dtype=np.float64)) for g in grads.values())
        )
        factor = min(1.0, 1.0 / (total + 1e-6))
        want = {k: (g * factor).astype(np.float32) for k, g in grads.items()}
        assert ulps(got, want) <= 2


@pytest.mark.parametrize(
    "shape", [(), (5,), (4, 3), (3, 4, 5), (2, 3, 4, 5), (2, 2, 3, 4, 5)], ids=str
)
def test_agc_equals_optax(shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(len(shape))
    for scale in (1e-3, 1e-2, 1.0):
        params = {"w": rng.normal(size=shape).astype(np.float32)}
        grads = {"w": (rng.normal(size=shape) * scale).astype(np.float32)}
        clip, theirs = aj.agc(0.01), optax.adaptive_grad_clip(0.01)
        got, _ = jax.jit(clip.update)(grads, clip.init(params), params)
        want, _ = jax.jit(theirs.update)(grads, theirs.init(params), params)
        assert ulps(got, want) <= 2


def test_right_where_optax_is_wrong() -> None:
    many = [jnp.full((4,), 0.5, jnp.bfloat16) for _ in range(1024)]
    clip = aj.global_gc(1.0)
    _, state = jax.jit(clip.update)(many, clip.init(many))
    assert float(aj.clip_metrics(state)["clip/norm_before"]) == 32.0

    half = {"w": jnp.array([300.0, 400.0], jnp.float16)}
    updates, _ = clip.update(half, clip.init(half))
    np.testing.assert_array_equal(updates["w"], np.array([0.6, 0.8], np.float16))

    zero = aj.global_gc(0.0)
    zeros = {"w": jnp.zeros(3)}
    updates, _ = zero.update(zeros, zero.init(zeros))
    np.testing.assert_array_equal(updates["w"], np.zeros(3))
    updates, _ = zero.update({"w": jnp.ones(3)}, zero.init(zeros))
    np.testing.assert_array_equal(updates["w"], np.zeros(3))


@pytest.mark.parametrize("warmup_init", ["min", "ema"])
@pytest.mark.parametrize("groups", [aj.per_tensor(), aj.stacked({"c": 0})], ids=str)
def test_steady_equals_auto_after_warmup(warmup_init: str, groups: aj.Groups) -> None:
    make = functools.partial(
        aj.adagc, warmup_steps=4, warmup_init=warmup_init, groups=groups
    )
    auto, steady = make(), make(phase="steady")
    state = auto.init({k: jnp.zeros(s) for k, s in SHAPES.items()})
    for step, grads in enumerate(stream(15)):
        want, new_state = jax.jit(auto.update)(grads, state)
        if step >= 4:
            got, same = jax.jit(steady.update)(grads, state)
            for a, b in zip(
                *map(jax.tree.leaves, ((want, new_state), (got, same))), strict=True
            ):
                np.testing.assert_array_equal(a, b)
        state = new_state


def test_rules_in_sequence_equal_a_chain() -> None:
    rule = aj.EmaRatio(1.04, 0.9, 1.0, 3)
    once = aj.clip_by_rule(rule, (aj.FixedNorm(0.5), aj.whole_tree()))
    twice = optax.chain(aj.clip_by_rule(rule), aj.global_gc(0.5))
    params = {k: jnp.zeros(s) for k, s in SHAPES.items()}
    one, two = once.init(params), twice.init(params)
    for grads in stream(15):
        got, one = jax.jit(once.update)(grads, one)
        want, two = jax.jit(twice.update)(grads, two)
        assert_close(got, want, rtol=1e-5)


def test_users_own_rule_with_memory() -> None:
    import dataclasses
    from typing import NamedTuple

    class LastState(NamedTuple):
        last: jax.Array

    @dataclasses.dataclass(frozen=True)
    class AtMostTwiceTheLast(aj.Rule):
        def init(self, shape: tuple[int, ...]) -> LastState:
            return LastState(jnp.full(shape, jnp.inf))

        def scale(self, obs: aj.Observation, state: LastState) -> jax.Array:
            return jnp.minimum(1.0, 2.0 * state.last / obs.norm)

        def update(
            self, obs: aj.Observation, scale: jax.Array, state: LastState
        ) -> LastState:
            return LastState(obs.norm * scale)

    clip = aj.clip_by_rule(AtMostTwiceTheLast(), groups=aj.stacked({"s": 0}))
    state = clip.init({"s": jnp.ones((2, 3)), "w": jnp.ones(1)})
    norms = []
    for size in (1.0, 10.0, np.nan, 0.0, 10.0, 10.0):
        grads = {"s": jnp.array([[size, 0, 0], [1.0, 0, 0]]), "w": jnp.array([size])}
        updates, state = clip.update(grads, state)
        norms.append([float(updates["w"][0]), *map(float, updates["s"][:, 0])])
    np.testing.assert_allclose(
        norms,
        [[1, 1, 1], [2, 2, 1], [0, 0, 1], [0, 0, 1], [4, 4, 1], [8, 8, 1]],
        rtol=1e-6,
    )


def test_schedules_as_hyper_parameters() -> None:
    clip = aj.tensor_gc(optax.linear_schedule(1.0, 3.0, 2))
    grads = {"w": jnp.array([30.0, 40.0])}
    state = clip.init(grads)
    for want in (1.0, 2.0, 3.0, 3.0):
        updates, state = clip.update(grads, state)
        np.testing.assert_allclose(jnp.linalg.norm(updates["w"]), want, rtol=1e-6)


@pytest.mark.parametrize(
    "clip",
    [aj.global_gc(1e3), aj.tensor_gc(1e3, nonfinite="skip")],
    ids=["whole", "skip"],
)
def test_a_nan_elsewhere_is_no_clip_of_a_healthy_tensor(clip: Any) -> None:
    grads = {"sick": jnp.array([np.nan, 1.0]), "healthy": jnp.array([0.1, 0.1])}
    updates, state = clip.update(grads, clip.init(grads))
    assert not np.any(updates["healthy"])
    numbers = aj.clip_metrics(state, level="all")
    assert int(numbers["clip/sick/nonfinite"]) == 1
    for name in ("clip_rate", "consecutive_clips", "active", "nonfinite", "norm_after"):
        assert float(numbers[f"clip/healthy/{name}"]) == 0.0
    assert float(numbers["clip/fraction_clipped"]) == 0.0
    assert float(numbers["clip/norm_after"]) == 0.0


def test_gradients_of_a_checkpointed_loss() -> None:
    x = jnp.linspace(-1.0, 1.0, 12).reshape(3, 4)

    def loss(params: dict[str, jax.Array]) -> jax.Array:
        return jnp.sum(jnp.tanh(x @ params["w"]) ** 2)

    clip = aj.adagc(warmup_steps=0)
    params = {"w": jnp.ones((4, 2))}
    emitted = []
    for function in (loss, jax.checkpoint(loss)):
        step = jax.jit(lambda p, s, f=function: clip.update(jax.grad(f)(p), s))
        updates, state = step(params, clip.init(params))
        updates, _ = step({"w": 3.0 * params["w"]}, state)
        emitted.append(updates["w"])
    np.testing.assert_allclose(*emitted, rtol=1e-6)


@pytest.mark.parametrize("nonfinite", ["zero", "propagate"])
def test_warmup_clips_to_the_norm_of_the_finite_tensors(nonfinite: str) -> None:
    hyper = {"lambda_abs": 1.0, "warmup_steps": 3}
    clip = aj.adagc(**hyper, nonfinite=nonfinite)
    want = reference.AdaGC(1.04, 0.99, **hyper, nonfinite=nonfinite)
    grads = {
        "sick": np.array([np.nan, 1.0]),
        "a": np.full(4, 3.0),
        "b": np.full(9, -1.0),
    }
    grads = {name: g.astype(np.float32) for name, g in grads.items()}
    got, state = clip.update(grads, clip.init(grads))
    assert_close(got, want.update(grads))
    np.testing.assert_allclose(
        aj.clip_metrics(state, level="all")["clip/a/gamma"], want.gamma["a"], rtol=1e-6
    )


def test_clip_by_value_clamps_both_signs() -> None:
    clip = aj.clip_by_value(0.25)
    for grads in stream(4):
        got, _ = clip.update(grads, clip.init(grads))
        assert_close(got, reference.clip_by_value(grads, 0.25), rtol=0)
