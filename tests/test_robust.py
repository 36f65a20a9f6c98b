"""The redescending tail, its patience, and the release of throttled groups."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import reference
from hypothesis import given, settings, strategies as st
from test_methods import SHAPES, assert_close, stream

import adagc_jax as aj
from adagc_jax.ema_ratio import EmaRatio, EmaRatioState

HUGE = 1e18


def rule(**options: Any) -> EmaRatio:
    defaults = {"lambda_rel": 1.3, "beta": 0.99, "lambda_abs": 1.0, "warmup_steps": 0}
    return EmaRatio(**(defaults | {"warmup_init": "ema", "patience": 6} | options))


def observe(norm: Any) -> aj.Observation:
    norm = jnp.asarray(norm, jnp.float32)
    # So many seen that the average has forgotten its bias.
    return aj.Observation(norm, jnp.full(norm.shape, 10**6), jnp.asarray(9))


def state_at(gamma: float, norm: Any, outliers: int = 0) -> EmaRatioState:
    like = jnp.asarray(norm, jnp.float32)
    return EmaRatioState(
        gamma=jnp.full_like(like, gamma),
        outliers=jnp.full(like.shape, outliers),
        level=jnp.ones_like(like),
    )


@functools.partial(jax.jit, static_argnums=0)
def run(rule_: EmaRatio, norms: jax.Array) -> tuple[jax.Array, EmaRatioState]:
    """Scales and states of one group that sees these norms, one after another."""

    def step(carry: Any, norm: jax.Array) -> Any:
        number, state = carry
        obs = aj.Observation(norm, number, number)
        scale = rule_.scale(obs, state)
        return (number + 1, rule_.update(obs, scale, state)), (scale, state)

    _, seen = jax.lax.scan(step, (jnp.asarray(0), rule_.init(())), norms)
    return seen


@pytest.mark.parametrize(
    "options",
    [
        {"tail": 3.0, "patience": 2},
        {"tail": 0.5, "patience": 100, "eps": 0.1},
        {"tail": 1.0, "patience": 1, "release": 3},
        {"tail": 0.0, "release": 2, "warmup_init": "min"},
    ],
    ids=str,
)
def test_follows_the_equations(options: dict[str, Any]) -> None:
    hyper = {"lambda_rel": 1.1, "beta": 0.9, "lambda_abs": 1.0, "warmup_steps": 3}
    hyper |= {"warmup_init": "ema"} | options
    clip = aj.robust_gc(**hyper, groups=aj.stacked({"^c$": 0}))
    want = reference.AdaGC(**hyper, kept_axes={"c": (0,)})
    state = clip.init({k: jnp.zeros(s) for k, s in SHAPES.items()})
    update = jax.jit(clip.update)
    for grads in stream(30, seed=3):
        got, state = update(grads, state)
        assert_close(got, want.update(grads), rtol=1e-4)
        gamma, stacked_gamma = state.stages[0].rule.gamma
        np.testing.assert_allclose(
            gamma, [float(want.gamma[k]) for k in "abd"], rtol=1e-4
        )
        np.testing.assert_allclose(stacked_gamma, want.gamma["c"], rtol=1e-4)


@pytest.mark.parametrize(
    "tail",
    [0.0, jnp.float32(0.0), lambda _: 0.0],
    ids=["number", "array", "schedule"],
)
def test_tail_zero_is_adagc_bit_for_bit(tail: Any) -> None:
    hyper = {"lambda_rel": 1.05, "warmup_steps": 3, "warmup_init": "min"}
    ours, theirs = aj.robust_gc(tail=tail, **hyper), aj.adagc(**hyper)
    params = {k: jnp.zeros(s) for k, s in SHAPES.items()}
    one, two = ours.init(params), theirs.init(params)
    for grads in stream(12):
        got, one = jax.jit(ours.update)(grads, one)
        want, two = jax.jit(theirs.update)(grads, two)
        for a, b in zip(*map(jax.tree.leaves, ((got, one), (want, two))), strict=True):
            np.testing.assert_array_equal(a, b)


@pytest.mark.usefixtures("optax_promotion")
def test_tail_may_be_injected() -> None:
    make = optax.inject_hyperparams(
        aj.robust_gc, static_args=("patience", "warmup_steps", "warmup_init", "release")
    )
    clip = make(tail=1.0, lambda_rel=2.0, warmup_steps=0)
    grads = {"w": jnp.array([3.0, 4.0])}
    _, state = clip.update(grads, clip.init(grads))
    spike = {"w": 100 * grads["w"]}
    muted, _ = clip.update(spike, state)
    np.testing.assert_allclose(jnp.linalg.norm(muted["w"]), 10 * 10 / 500, rtol=1e-5)
    state.hyperparams["tail"] = jnp.float32(0.0)
    flat, _ = clip.update(spike, state)
    np.testing.assert_allclose(jnp.linalg.norm(flat["w"]), 10.0, rtol=1e-5)


@settings(max_examples=40, deadline=None)
@given(
    gamma=st.floats(1e-6, 1e6),
    tail=st.sampled_from([0.5, 1.0, 3.0]),
    lambda_rel=st.sampled_from([1.04, 1.3, 2.0]),
    outliers=st.sampled_from([0, 5]),
)
def test_influence_redescends(
    gamma: float, tail: float, lambda_rel: float, outliers: int
) -> None:
    limit = np.float32(lambda_rel) * np.float32(gamma)
    norms = limit * np.geomspace(1.0, 1e6, 60).astype(np.float32)
    r = rule(tail=tail, lambda_rel=lambda_rel)
    scale = r.scale(observe(norms), state_at(gamma, norms, outliers))
    emitted = np.asarray(scale) * norms
    assert np.all(scale > 0.0)
    assert np.all(emitted <= limit * (1 + 1e-6))
    assert np.all(np.diff(emitted) <= 1e-6 * emitted[:-1])
    np.testing.assert_allclose(
        emitted, limit * (limit / norms.astype(np.float64)) ** tail, rtol=1e-4
    )
    # The reference follows an outlier of any size by the same bounded step.
    new = r.update(observe(norms), scale, state_at(gamma, norms, outliers)).gamma
    growth = 1.0 + (1.0 - r.beta) * (lambda_rel - 1.0)
    assert np.all(new <= gamma * growth * (1 + 1e-6))


@pytest.mark.parametrize("power", [-20, 20])
def test_scale_equivariant(power: int) -> None:
    norms = jnp.asarray(np.random.default_rng(0).lognormal(sigma=1.0, size=200))
    norms = norms.astype(jnp.float32)
    r = rule(tail=2.0, release=5)
    scales, states = run(r, norms)
    moved, moved_states = run(r, norms * 2.0**power)
    np.testing.assert_allclose(moved, scales, rtol=1e-6)
    np.testing.assert_allclose(moved_states.gamma, states.gamma * 2.0**power, rtol=1e-6)


def test_huge_norms_are_muted_counted_and_not_dropped() -> None:
    clip = aj.robust_gc(warmup_steps=0, tail=3.0)
    small = {"w": jnp.array([3e-6, 4e-6])}
    _, state = clip.update(small, clip.init(small))
    updates, state = clip.update({"w": jnp.array([3 * HUGE, 4 * HUGE])}, state)
    assert np.all(np.isfinite(updates["w"]))
    assert float(jnp.linalg.norm(updates["w"])) < 1e-10
    metrics = aj.clip_metrics(state, level="all")
    assert 0.0 < float(metrics["clip/w/scale"]) < 1e-30
    assert float(metrics["clip/fraction_clipped"]) == 1.0
    assert int(metrics["clip/nonfinite"]) == 0


@pytest.mark.parametrize("rise", [3.0, 30.0])
@pytest.mark.parametrize(("lambda_rel", "beta"), [(1.3, 0.99), (1.5, 0.95)])
def test_a_lasting_rise_is_believed_in_the_time_that_the_docs_say(
    rise: float, lambda_rel: float, beta: float
) -> None:
    """log(rise / lambda) / log(1 + (1 - beta)(lambda - 1)) steps, whatever the tail."""
    growth = np.log1p((1 - beta) * (lambda_rel - 1))
    steps = int(np.ceil(np.log(rise / lambda_rel) / growth))
    # Long enough at 1 that the average has forgotten that it began.
    norms = jnp.asarray(np.r_[np.ones(1500), np.full(steps + 50, rise)], jnp.float32)
    scales, _ = run(rule(tail=3.0, lambda_rel=lambda_rel, beta=beta), norms)
    after = np.asarray(scales)[1500:]
    first_unclipped = int(np.argmax(after == 1.0))
    assert abs(first_unclipped - steps) <= 1
    # Muted for the first six updates, flat from then on.
    np.testing.assert_allclose(after[0], (lambda_rel / rise) ** 4, rtol=0.01)
    assert after[5] < 1.7 * after[0]
    np.testing.assert_allclose(after[6], lambda_rel / rise, rtol=0.2)


def test_patience_starts_again_after_a_normal_norm() -> None:
    norms = jnp.asarray([1.0] * 50 + [10.0] * 3 + [1.0] + [10.0] * 3, jnp.float32)
    scales, states = run(rule(tail=1.0, patience=2), norms)
    muted = np.asarray(scales[50:]) < 0.05
    np.testing.assert_array_equal(muted, [1, 1, 0, 0, 1, 1, 0])
    np.testing.assert_array_equal(states.outliers[50:], [0, 1, 2, 3, 0, 1, 2])


def test_idle_updates_neither_end_nor_lengthen_a_row() -> None:
    clip = aj.robust_gc(warmup_steps=0, patience=2, tail=3.0)
    state = clip.init({"w": jnp.ones(1)})
    scales = []
    for norm in [1.0, 0.0, 10.0, 0.0, np.nan, 10.0, 0.0, 10.0]:
        _, state = clip.update({"w": jnp.array([norm])}, state)
        scales.append(float(aj.clip_metrics(state, level="all")["clip/w/scale"]))
    muted, flat = scales[2], scales[7]
    assert muted < 1e-3 < 0.1 < flat < 0.2
    assert scales[5] < 1e-3


def test_a_throttled_tensor_is_released() -> None:
    """A norm of 1 that becomes 10 for good: a factor of 1.001 per step without."""
    norms = jnp.asarray([1.0] * 200 + [10.0] * 3000, jnp.float32)
    options = {"lambda_rel": 1.05, "beta": 0.98, "warmup_init": "min"}
    throttled, _ = run(rule(**options), norms)
    released, states = run(rule(**options, release=100), norms)
    assert np.sum(np.asarray(throttled) < 1.0) > 2000
    assert np.sum(np.asarray(released) < 1.0) == 100
    np.testing.assert_allclose(states.gamma[-1], 10.0, rtol=1e-5)


def test_release_is_not_misled_by_a_spike_in_the_row() -> None:
    row = [10.0] * 50 + [1e6] + [10.0] * 49
    _, states = run(rule(release=100), jnp.asarray([1.0] * 200 + row + [10.0]))
    np.testing.assert_allclose(states.gamma[-1], 10.0, rtol=0.02)


@pytest.mark.parametrize("sigma", [0.3, 1.0, 2.0])
def test_heavy_noise_does_not_starve_a_tensor(sigma: float) -> None:
    """The reference settles near the middle of the norms, and most are left alone."""
    rng = np.random.default_rng(0)
    norms = jnp.asarray(rng.lognormal(sigma=sigma, size=5000), jnp.float32)
    scales, states = run(rule(tail=3.0), norms)
    late = np.asarray(states.gamma)[2000:]
    assert 0.2 < np.median(late) < 3.0
    untouched = np.mean(np.asarray(scales)[2000:] == 1.0)
    assert untouched > 0.3
    assert untouched < 1.0


def test_arguments_are_checked() -> None:
    for name, bad in [
        ("tail", -1.0),
        ("patience", 1.5),
        ("patience", -1),
        ("release", 0),
        ("lambda_rel", 0.0),
    ]:
        with pytest.raises(ValueError, match=name):
            aj.robust_gc(**{name: bad})
    with pytest.raises(ValueError, match="release"):
        aj.adagc(release=0)
