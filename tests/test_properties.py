"""Invariants of the rules, for any gradients."""

from typing import Any

import hypothesis.extra.numpy as hnp
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings, strategies as st

import adagc_jax as aj

finite = st.floats(-1e4, 1e4, width=32).map(lambda x: 0.0 if abs(x) < 1e-4 else x)
matrices = hnp.arrays(np.float32, (4, 6), elements=finite)
powers = st.integers(-20, 20).map(lambda k: 2.0**k)
few = settings(max_examples=25, deadline=None)

ADAGC = aj.adagc(warmup_steps=0)
TENSOR = aj.tensor_gc(1.0)
update_adagc = jax.jit(ADAGC.update)
update_tensor = jax.jit(TENSOR.update)


def gamma(state: Any) -> np.ndarray:
    return np.asarray(jax.tree.leaves(state.stages[0].rule.gamma)[0])


def norm(x: Any) -> float:
    return float(np.sqrt(np.sum(np.square(np.asarray(x, np.float64)))))


@few
@given(matrices)
def test_direction_is_kept_and_the_bound_holds(g: np.ndarray) -> None:
    out, _ = update_tensor({"w": g}, TENSOR.init({"w": g}))
    out = np.asarray(out["w"], np.float64)
    assert norm(out) <= min(norm(g), 1.0) * (1 + 1e-6)
    cross = norm(out) * norm(g) - np.sum(out * g)
    assert abs(cross) <= 1e-5 * norm(out) * norm(g) + 1e-12


@few
@given(matrices)
def test_below_the_limit_nothing_changes_a_bit(g: np.ndarray) -> None:
    clip = aj.tensor_gc(float(np.float32(norm(g)) * 1.001 + 1e-3))
    out, _ = clip.update({"w": g}, clip.init({"w": g}))
    assert np.asarray(out["w"]).tobytes() == g.tobytes()


@few
@given(st.lists(matrices, min_size=2, max_size=5), powers)
def test_scaling_one_tensor_scales_its_output_and_nothing_else(
    stream: list[np.ndarray], factor: float
) -> None:
    fixed = np.ones((4, 6), np.float32)
    one = two = ADAGC.init({"w": fixed, "v": fixed})
    for g in stream:
        a, one = update_adagc({"w": g, "v": fixed}, one)
        scaled = (g * factor).astype(np.float32)
        b, two = update_adagc({"w": scaled, "v": fixed}, two)
        np.testing.assert_allclose(a["w"] * factor, b["w"], rtol=1e-6)
        np.testing.assert_array_equal(a["v"], b["v"])


@few
@given(st.lists(matrices, min_size=2, max_size=5))
def test_a_matrix_equals_the_same_matrix_reshaped(stream: list[np.ndarray]) -> None:
    one, two = ADAGC.init({"w": stream[0]}), ADAGC.init({"w": stream[0].reshape(24)})
    for g in stream:
        a, one = update_adagc({"w": g}, one)
        b, two = update_adagc({"w": g.reshape(24)}, two)
        np.testing.assert_allclose(a["w"].reshape(24), b["w"], rtol=1e-6)
        np.testing.assert_allclose(gamma(one), gamma(two), rtol=1e-6)


@few
@given(st.lists(matrices, min_size=2, max_size=4), st.integers(0, 1))
def test_stacked_layers_equal_listed_ones(stream: list[np.ndarray], axis: int) -> None:
    clip = aj.adagc(warmup_steps=1, groups=aj.stacked(axis))
    listed = aj.adagc(warmup_steps=1)
    names = [f"{i:02d}" for i in range(stream[0].shape[axis])]

    def split(g: np.ndarray) -> dict[str, np.ndarray]:
        return dict(zip(names, np.moveaxis(g, axis, 0), strict=True))

    one, two = clip.init({"w": stream[0]}), listed.init(split(stream[0]))
    for g in stream:
        a, one = clip.update({"w": g}, one)
        b, two = listed.update(split(g), two)
        for name, layer in split(np.asarray(a["w"])).items():
            np.testing.assert_allclose(layer, b[name], rtol=2e-6, atol=1e-7)
        np.testing.assert_allclose(gamma(one), gamma(two), rtol=2e-6)


@few
@given(st.lists(matrices, min_size=2, max_size=6))
def test_gamma_grows_by_a_bounded_factor(stream: list[np.ndarray]) -> None:
    state = ADAGC.init({"w": stream[0]})
    for g in stream:
        before = gamma(state)[0]
        _, state = update_adagc({"w": g}, state)
        if before > 0:
            assert gamma(state)[0] <= before * (1 + 0.01 * 0.04) * (1 + 1e-6)
            assert norm(update_adagc({"w": g}, state)[0]["w"]) <= (
                1.04 * gamma(state)[0] * (1 + 1e-5)
            )


@few
@given(matrices, st.floats(0.1, 10.0))
def test_agc_never_exceeds_its_ratio_per_unit(g: np.ndarray, size: float) -> None:
    clip = aj.agc(0.05)
    params = {"w": jnp.full((4, 6), size, jnp.float32)}
    out, _ = clip.update({"w": g}, clip.init(params), params)
    limit = 0.05 * np.linalg.norm(np.asarray(params["w"]), axis=0)
    assert np.all(np.linalg.norm(np.asarray(out["w"]), axis=0) <= limit * (1 + 1e-5))
