"""Gradients that people report trouble with: zero, non-finite, huge, tiny, narrow.

Tests look at what a clipper emits and keeps, never at parameters after an optimizer
like Adam: its scale invariance would hide most faults.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from reference import AdaGC, ZClip
from streams import (
    LOCAL,
    METHODS,
    STACKED,
    WARMUP,
    WHOLE,
    WITH_MEMORY,
    assert_same,
    method,
    noise,
    norms_of,
    of_norms,
    ones_like_first,
    replay,
    rule_state,
)

import adagc_jax
from adagc_jax import clip_metrics, per_tensor, units, whole_tree

BAD = [np.nan, np.inf, -np.inf]
NARROW = ["float32", "bfloat16", "float16"]


class TestZeroGradients:
    @pytest.mark.parametrize("name", ["adagc", "adagc_ema"])
    def test_reference_starts_at_first_gradient_that_is_not_zero(
        self, name: str
    ) -> None:
        """LoRA: B = 0 makes the first gradients of A exactly zero."""
        for idle in (1, 3, 5):
            norms = [0.0] * idle + [0.5] * (10 - idle)
            stream = {f"A {t}": of_norms(norms, (8, 4), t) for t in NARROW}
            stream["B"] = of_norms([0.5] * 10, (4, 8))
            got = replay(method(name), stream)
            assert_same(got.emitted, jax.device_get(stream))
            gamma = rule_state(got.states).gamma
            np.testing.assert_array_equal(gamma[idle:], 0.5)
            np.testing.assert_array_equal(gamma[:, 3], 0.5)
            seen = np.maximum(np.arange(1, 11) - idle, 0)
            np.testing.assert_array_equal(
                got.states.stages[0].seen[:, :3], np.stack([seen] * 3, axis=1)
            )

    @pytest.mark.parametrize("name", WITH_MEMORY)
    def test_idle_steps_leave_no_trace(self, name: str) -> None:
        """An expert without tokens: as if its idle updates had not been made."""
        is_active = np.random.default_rng(1).random(60) < 0.3
        is_active[: WARMUP + 1] = True
        stream = {"a": of_norms(1.0 + 0.3 * np.sin(np.arange(60.0)), (3, 2))}
        idle = {"a": jnp.where(is_active[:, None, None], stream["a"], 0.0)}
        got = replay(method(name), idle)
        want = replay(method(name), {"a": stream["a"][is_active]})
        kept = jax.tree.map(lambda x: x[is_active], got)
        assert_same(kept.emitted, want.emitted)
        assert_same(kept.states.stages, want.states.stages)
        assert not got.emitted["a"][~is_active].any()

    @pytest.mark.parametrize("name", ["adagc", "adagc_ema", "zclip"])
    def test_only_the_idle_slice_of_a_stack_is_held(self, name: str) -> None:
        norms = np.where(np.arange(110) < 4, 1.0, 0.9)
        idle = np.where(np.arange(110) < 4, 1.0, np.where(np.arange(110) < 104, 0, 1))
        experts = [of_norms(idle if e == 2 else norms, (2, 3)) for e in range(4)]
        got = replay(STACKED[name](), {"experts": jnp.stack(experts, axis=1)})
        for key, field in got.states.stages[0].rule._asdict().items():
            assert field.shape == (110, 4)
            np.testing.assert_array_equal(field[3:104, 2], field[3, 2])
            # Rows of outliers are a matter of norms that rise, and these fall.
            moves = key not in ("outliers", "level")
            assert (field[103, [0, 1, 3]] != field[3, [0, 1, 3]]).all() == moves
        # Full length after a hundred idle updates, although it never decayed to less.
        np.testing.assert_array_equal(norms_of(got.emitted["experts"][104:, 2]), 1.0)

    @pytest.mark.parametrize("unit", ["output", "tensor"])
    def test_zero_weights_can_learn(self, unit: str) -> None:
        params = {t: jnp.zeros((4, 4), t) for t in NARROW}
        params |= {f"bias {t}": jnp.zeros((4,), t) for t in NARROW}
        stream = jax.tree.map(lambda p: jnp.ones_like(p)[None], params)
        got = replay(adagc_jax.agc(0.01, 1e-3, unit=unit), stream, params)
        for name, leaf in got.emitted.items():
            by_column = unit == "output" and leaf.ndim == 3
            norms = norms_of(leaf[0], (0,)) if by_column else norms_of(leaf)
            # 5e-6 is a denormal number of float16.
            rtol = 1e-6 if "32" in name else 5e-3
            np.testing.assert_allclose(norms, 1e-5, rtol=rtol, err_msg=name)

    @pytest.mark.parametrize("unit", [0, {"embed": 0}])
    def test_embedding_rows_are_clipped_one_by_one(self, unit: Any) -> None:
        rows = np.zeros((1, 6, 2))
        rows[0, :2] = [[100, 100], [1e-3, 1e-3]]
        stream = {f"embed {t}": jnp.asarray(rows, t) for t in NARROW}
        params = ones_like_first(stream)
        limit = 0.1 * np.sqrt(2.0)
        for clip in (
            adagc_jax.agc(0.1, unit=unit),
            adagc_jax.tensor_gc(limit, groups=units(unit)),
        ):
            got = replay(clip, stream, params).emitted
            for name, leaf in got.items():
                np.testing.assert_allclose(norms_of(leaf[0])[0], limit, rtol=4e-3)
                np.testing.assert_array_equal(leaf[0, 1:], stream[name][0, 1:])


class TestNonFinite:
    @pytest.mark.parametrize(
        ("name", "policy"),
        [(name, "zero") for name in METHODS]
        + [
            (name, policy)
            for name in ("adagc", "agc", "zclip")
            for policy in ("skip", "propagate")
        ],
    )
    def test_bad_gradient_moves_nothing(self, name: str, policy: str) -> None:
        """State goes on, bit for bit, as after an update in which the group was idle.

        So no reference moves, and other tensors cannot tell the difference.
        """
        # A limit that couples all tensors in warm-up, where a total norm is at stake.
        options = {"lambda_abs": 1.0} if name.startswith("adagc") else {}
        clip, clean = METHODS[name](nonfinite=policy, **options), noise(9)
        params = ones_like_first(clean)
        all_idle = name in WHOLE or policy == "skip"
        # One bad element spoils its unit, its tensor or the whole tree.
        unit = (slice(None), 1) if name == "agc" and not all_idle else ...
        # Before the first observation, inside the warm-up, and after it.
        for step, bad in itertools.product((0, 2, 6), BAD):
            dirty = clean | {"a": clean["a"].at[step, 0, 1].set(bad)}
            idle = clean | {"a": clean["a"].at[step].set(0)} if unit is ... else {}
            idle = idle or clean | {"a": clean["a"].at[step, :, 1].set(0)}
            if all_idle:
                idle["b"] = idle["b"].at[step].set(0)
            got, want = replay(clip, dirty, params), replay(clip, idle, params)
            assert_same(got.states.stages, want.states.stages)
            emitted = jax.tree.map(np.copy, want.emitted)
            if policy == "propagate":
                emitted["a"][step][unit] = dirty["a"][step][unit]
                if all_idle:
                    emitted["b"][step] = dirty["b"][step]
            assert_same(got.emitted, emitted)
            for place, leaf in enumerate((got.emitted["a"], got.emitted["b"])):
                after = got.states.metrics.norm_after[:, place]
                np.testing.assert_allclose(after, norms_of(leaf), rtol=5e-3)
            counted = got.states.metrics.nonfinite
            np.testing.assert_array_equal(counted[:, 0], np.arange(9) >= step)
            np.testing.assert_array_equal(counted[:, 1], 0)

    @pytest.mark.parametrize("name", METHODS)
    @pytest.mark.parametrize("bad", BAD)
    def test_culprit_is_counted_and_named(self, name: str, bad: float) -> None:
        stream = {"a": jnp.array([[bad, 1.0]]), "b": jnp.array([[0.01, 0.01]])}
        got = replay(method(name), stream, ones_like_first(stream))
        grads, emitted, state = jax.tree.map(
            lambda x: x[0], (stream, got.emitted, got.states)
        )
        metrics = clip_metrics(state, level="all")
        assert metrics["clip/nonfinite"] == 1
        assert metrics["clip/a/nonfinite"] == 1
        assert metrics["clip/b/nonfinite"] == 0
        assert not np.isfinite(metrics["clip/a/norm_before"])
        np.testing.assert_array_equal(emitted["a"], 0.0)
        if name in LOCAL:
            np.testing.assert_array_equal(emitted["b"], grads["b"])
        else:
            np.testing.assert_array_equal(emitted["b"], 0.0)

    def test_clamping_hands_nan_through_and_bounds_infinity(self) -> None:
        stream = {"a": jnp.array([[np.nan, np.inf, -np.inf, 0.5]])}
        got = replay(adagc_jax.clip_by_value(1.0), stream)
        np.testing.assert_array_equal(got.emitted["a"], [[np.nan, 1.0, -1.0, 0.5]])


class TestRange:
    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    @pytest.mark.parametrize("name", ["global_gc", "tensor_gc", "adagc", "zclip"])
    def test_squares_beyond_float16(self, name: str, dtype: str) -> None:
        limit: dict[str, Any] = {"adagc": {"lambda_abs": 1.0}}
        limit["zclip"] = {"max_grad_norm": 1.0}
        stream = {"a": jnp.array([[300, 400]], dtype)}
        got = replay(METHODS[name](**limit.get(name, {})), stream)
        # The 1e-6 in ZClip's divisor is worth 2e-9 here: below half an ulp.
        assert_same(got.emitted, {"a": np.asarray(jnp.array([[0.6, 0.8]], dtype))})
        assert_same(got.states.metrics.norm_before, np.array([[500.0]], np.float32))

    @pytest.mark.parametrize("warmup_init", ["min", "ema"])
    def test_reference_beyond_float16(self, warmup_init: str) -> None:
        stream = {t: jnp.array([[60_000] * 64] * 2, t) for t in NARROW}
        clip = adagc_jax.adagc(warmup_steps=0, warmup_init=warmup_init)
        gamma = rule_state(replay(clip, stream).states).gamma
        assert gamma.dtype == np.float32
        for place, name in enumerate(sorted(stream)):
            np.testing.assert_allclose(
                gamma[:, place], norms_of(stream[name]), rtol=1e-6
            )

    @pytest.mark.parametrize("name", ["global_gc", "tensor_gc"])
    def test_norms_are_right_over_the_documented_range(self, name: str) -> None:
        scales = np.array([1e-19, 1e-15, 1.0, 1e10, 3e18])[:, None]
        for dtype, rtol in (("float32", 1e-6), ("bfloat16", 4e-3)):
            stream = {"a": jnp.asarray(scales * np.array([3.0, 4.0]), dtype)}
            got = replay(method(name), stream)
            metrics, norms = got.states.metrics, norms_of(stream["a"])
            np.testing.assert_allclose(metrics.norm_before[:, 0], norms, rtol=1e-6)
            np.testing.assert_array_equal(metrics.active[:, 0], range(1, 6))
            np.testing.assert_array_equal(metrics.nonfinite, 0)
            want = np.asarray(stream["a"]).astype(np.float64)
            want[norms > 1.0] = [0.6, 0.8]
            emitted = got.emitted["a"].astype(np.float64)
            np.testing.assert_allclose(emitted, want, rtol=rtol)

    @pytest.mark.parametrize("policy", ["zero", "skip", "propagate"])
    def test_norm_beyond_the_range_is_a_counted_event(self, policy: str) -> None:
        """[3e20, 4e20] is finite, but its norm is not: never silently zero."""
        clip = adagc_jax.adagc(1.05, 0.98, 1e9, 2, nonfinite=policy)
        huge = np.array([[1], [1], [1], [1e20], [1], [5e18]]) * [3.0, 4.0]
        dtypes = {"a": jnp.float32, "b": jnp.bfloat16}
        stream = {name: jnp.asarray(huge, dtype) for name, dtype in dtypes.items()}
        stream["c"] = jnp.ones((6, 4))
        got = replay(clip, stream)
        metrics = got.states.metrics
        np.testing.assert_array_equal(rule_state(got.states).gamma, [[5, 5, 2]] * 6)
        np.testing.assert_array_equal(metrics.nonfinite[:, 2], 0)
        for place, name in enumerate(dtypes):
            np.testing.assert_array_equal(
                metrics.nonfinite[:, place], [0, 0, 0, 1, 1, 2]
            )
            np.testing.assert_array_equal(metrics.norm_before[[3, 5], place], np.inf)
            want = np.array(stream[name])
            if policy != "propagate":
                want[[3, 5]] = 0
            np.testing.assert_array_equal(got.emitted[name], want)
        want = np.ones((6, 4))
        if policy == "skip":
            want[[3, 5]] = 0
        np.testing.assert_array_equal(got.emitted["c"], want)

    @pytest.mark.parametrize("name", METHODS)
    def test_norm_below_the_range_is_handed_through(self, name: str) -> None:
        """Down to denormal numbers: not clipped, not observed, not lost."""
        tiny = np.array([[3e-23, 4e-23], [1e-40, 1e-45]], np.float32)
        stream = {"a": jnp.asarray(tiny)}
        params = {"a": jnp.zeros(2)}
        got = replay(method(name), stream, params)
        assert_same(got.emitted, {"a": tiny})
        np.testing.assert_array_equal(got.states.stages[0].seen, 0)
        np.testing.assert_array_equal(got.states.metrics.nonfinite, 0)


class TestPrecision:
    def test_sums_are_not_accumulated_in_the_leaf_dtype(self) -> None:
        """324 leaves of norm 1: in bfloat16, the sum of squares would stop at 256."""
        leaves = {str(i): jnp.ones((1,), jnp.bfloat16) for i in range(324)}
        clip: Any = adagc_jax.global_gc(9.0)

        @jax.jit
        def update(grads: Any, state: Any) -> tuple[Any, Any]:
            emitted, state = clip.update(grads, state)
            # The other leaves would take seconds to compile, and are the same.
            return emitted["0"], state

        emitted, state = update(leaves, clip.init(leaves))
        assert clip_metrics(state)["clip/norm_before"] == 18.0
        np.testing.assert_array_equal(emitted, [0.5])

    @pytest.mark.parametrize("dtype", NARROW)
    def test_long_sum_in_one_leaf(self, dtype: str) -> None:
        stream = {"a": jnp.ones((1, 1 << 20), dtype)}
        got = replay(adagc_jax.tensor_gc(512.0), stream)
        np.testing.assert_array_equal(got.states.metrics.norm_before, [[1024.0]])
        assert (got.emitted["a"] == 0.5).all()

    def test_averages_move_for_narrow_gradients(self) -> None:
        """At a decay of 0.98, an average kept in bfloat16 would stay at 1 for ever."""
        # A norm of 0.90005 that every dtype represents.
        wide = np.array([[1.0, 0.0]] * 3 + [[0.890625, 0.1298828125]] * 200)
        stream = {t: jnp.asarray(wide, t) for t in NARROW}
        for name in ("adagc", "adagc_ema"):
            gamma = rule_state(replay(method(name), stream).states).gamma
            want = AdaGC(
                1.05, 0.98, 1e9, 3, warmup_init="min" if name == "adagc" else "ema"
            )
            for step, grad in enumerate(wide):
                want.update({"a": grad})
                np.testing.assert_allclose(
                    gamma[step], [want.gamma["a"]] * 3, rtol=1e-5
                )
            assert gamma.dtype == np.float32
            if name == "adagc":
                np.testing.assert_allclose(gamma[-1], [0.9018] * 3, atol=1e-3)
        mean = rule_state(replay(method("zclip_tensor"), stream).states).mean
        reference = ZClip(max_grad_norm=None, warmup_steps=3)
        for grad in wide:
            reference.update({"a": grad})
        assert mean.dtype == np.float32
        want_mean: Any = reference.mean[""]
        np.testing.assert_allclose(mean[-1], [want_mean] * 3, rtol=1e-5)

    @pytest.mark.parametrize("eps", [0.0, 1e-6])
    def test_global_norm_clipping_agrees_with_optax_and_torch(self, eps: float) -> None:
        clip = adagc_jax.global_gc(0.01, eps=eps)
        theirs = optax.with_extra_args_support(optax.clip_by_global_norm(0.01))
        for seed, scale in itertools.product(range(5), (1e-4, 1e-2, 1.0, 1e3)):
            rng = np.random.default_rng(seed)
            stream = {
                "a": jnp.asarray(scale * rng.normal(size=(1, 5, 7)), jnp.float32),
                "b": jnp.asarray(scale * rng.normal(size=(1, 11)), jnp.float32),
            }
            if eps:
                total = np.sqrt(sum(norms_of(x)[0] ** 2 for x in stream.values()))
                coefficient = np.float32(min(1.0, 0.01 / (total + eps)))
                want = {k: np.asarray(x) * coefficient for k, x in stream.items()}
            else:
                want = replay(theirs, stream).emitted
            got = replay(clip, stream).emitted
            for name, leaf in got.items():
                np.testing.assert_array_max_ulp(leaf, want[name], maxulp=2)

    @pytest.mark.parametrize("warmup_steps", [0, 1])
    @pytest.mark.parametrize(
        ("warmup_init", "groups"),
        [
            ("min", per_tensor()),
            ("ema", per_tensor()),
            ("min", whole_tree()),
            ("min", adagc_jax.stacked(0)),
        ],
        ids=["min", "ema", "whole", "stacked"],
    )
    def test_first_norm_initialises_the_reference(
        self, warmup_steps: int, warmup_init: str, groups: Any
    ) -> None:
        clip = adagc_jax.adagc(
            lambda_abs=np.inf,
            warmup_steps=warmup_steps,
            warmup_init=warmup_init,
            groups=groups,
        )
        stream = {"a": jnp.array([[[3.0, 4.0], [6.0, 8.0]]])}
        got = replay(clip, stream)
        axes = (2,) if groups == adagc_jax.stacked(0) else (1, 2)
        gamma = rule_state(got.states).gamma.reshape(-1)
        want = norms_of(stream["a"], axes).reshape(-1)
        np.testing.assert_allclose(gamma, want, rtol=1e-7)
        assert_same(got.emitted, jax.device_get(stream))

    def test_slow_rise_of_the_reference_shows_in_a_metric(self) -> None:
        """A lasting tenfold rise is followed at 1 + (1 - beta)(lambda - 1) per step."""
        norms = np.where(np.arange(3003) < 3, 1.0, 10.0)
        # Neither an idle nor a bad update ends or lengthens the row.
        norms[1000], norms[1001] = 0.0, np.nan
        got = replay(method("adagc"), {"a": of_norms(norms, (2, 2))})
        gamma, row = rule_state(got.states).gamma, got.states.metrics.clipped_in_a_row
        steps = np.arange(1, 998)
        np.testing.assert_allclose(gamma[3:1000, 0], 1.001**steps, rtol=1e-4)
        np.testing.assert_array_equal(row[3:1000, 0], steps)
        np.testing.assert_array_equal(row[[1000, 1001, 1002], 0], [997, 997, 998])
        emitted = norms_of(got.emitted["a"])
        np.testing.assert_allclose(emitted[999], 1.05 * gamma[998, 0], rtol=1e-6)
        # ln(10 / 1.05) / ln(1.001) steps until the limit is at ten.
        released = np.flatnonzero(emitted == 10.0)[0]
        assert released == pytest.approx(
            3 + 2 + np.log(10 / 1.05) / np.log(1.001), abs=2
        )
        np.testing.assert_array_equal(row[released:, 0], 0)
