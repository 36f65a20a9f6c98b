"""Clippers inside optax's wrappers, in front of its optimizers, and around them."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import optax.contrib
import pytest
from streams import (
    METHODS,
    assert_close,
    assert_same,
    method,
    norms_of,
    of_norms,
    ones_like_first,
    replay,
    rule_state,
    spiky,
)

import adagc_jax

# Optimizers of optax mix int32 counts and float32 moments.
pytestmark = pytest.mark.usefixtures("optax_promotion")

BAD = [np.nan, np.inf, -np.inf]
LABELS = {"a": "muon", "b": "lion"}


def clip_state(state: Any) -> Any:
    return optax.tree.get(state, "ClipState")


def all_of(tree: Any) -> Any:
    return dict.fromkeys(tree, True)


AFTER: dict[str, Callable[[], Any]] = {
    "adamw": lambda: optax.adamw(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2),
    "muon and lion": lambda: optax.partition(
        {"muon": optax.contrib.muon(1e-2), "lion": optax.lion(1e-3)}, LABELS
    ),
}
AROUND: dict[str, Callable[[Any], Any]] = {
    "named_chain": lambda clip: optax.named_chain(("clip", clip)),
    "masked": lambda clip: optax.masked(clip, {"a": True, "b": True}),
    "callable mask": lambda clip: optax.masked(clip, all_of),
    "partition": lambda clip: optax.partition({"x": clip}, {"a": "x", "b": "x"}),
    "MultiSteps": lambda clip: optax.MultiSteps(clip, 1).gradient_transformation(),
    "apply_if_finite": lambda clip: optax.apply_if_finite(clip, 3),
    "schedule_free": lambda clip: optax.contrib.schedule_free(
        optax.chain(clip, optax.sgd(1e-3)), 1e-3
    ),
}


class TestOptaxCompositions:
    @pytest.mark.parametrize("name", AFTER)
    def test_optimizer_after_the_clip(self, name: str) -> None:
        """It sees what the clipper emits, and the clipper sees raw gradients."""
        stream, clip = spiky(), method("adagc")
        params = ones_like_first(stream)
        alone = replay(clip, stream, params)
        want = replay(AFTER[name](), jax.tree.map(jnp.asarray, alone.emitted), params)
        got = replay(optax.chain(clip, AFTER[name]()), stream, params)
        # Muon's iteration amplifies the last bits of its input.
        assert_close(got.emitted, want.emitted, rtol=1e-3)
        assert_close(got.states[0], alone.states)
        assert got.states[0].metrics.clipped[-1, 0] > 0

    @pytest.mark.parametrize("name", AROUND)
    def test_wrapper_around_the_clip(self, name: str) -> None:
        stream, clip = spiky(), method("adagc")
        params = ones_like_first(stream)
        want = replay(clip, stream, params)
        got = replay(AROUND[name](clip), stream, params)
        assert_close(clip_state(got.states), want.states)
        if name != "schedule_free":
            assert_close(got.emitted, want.emitted)

    def test_clip_per_part_or_for_all_parts(self) -> None:
        """optax#159: inside a partition, each part has a global norm of its own."""
        stream, labels = {"a": jnp.array([[3.0]]), "b": jnp.array([[4.0]])}, LABELS
        clip = adagc_jax.global_gc(1.0)
        parts: Any = {"muon": clip, "lion": clip}
        inside = replay(optax.partition(parts, labels), stream)
        parts = {"muon": optax.identity(), "lion": optax.identity()}
        outside = replay(optax.chain(clip, optax.partition(parts, labels)), stream)
        assert_close(inside.emitted, {"a": np.ones((1, 1)), "b": np.ones((1, 1))})
        assert_close(outside.emitted, {"a": np.array([[0.6]]), "b": np.array([[0.8]])})

    @pytest.mark.parametrize("name", ["adagc", "global_gc"])
    def test_frozen_leaf_does_not_shrink_the_others(self, name: str) -> None:
        stream = {"a": of_norms([0.9] * 6, (4,)), "b": of_norms([1000.0] * 6, (4,))}
        mask = {"a": True, "b": False}
        frozen = optax.masked(optax.set_to_zero(), {"a": False, "b": True})
        options = {"lambda_abs": 1.0} if name.startswith("adagc") else {}
        for clip in (
            METHODS[name](mask=mask, **options),
            optax.masked(METHODS[name](**options), mask),
        ):
            got = replay(optax.chain(clip, frozen), stream).emitted
            np.testing.assert_array_equal(got["a"], stream["a"])
            np.testing.assert_array_equal(got["b"], 0.0)

    def test_nested_masks(self) -> None:
        """optax#271: the structure is kept, and masked leaves have no reference."""
        stream = {k: of_norms([1.0] * 5 + [9.0], (4,)) for k in "abc"}
        for inner_mask, outer_mask in (
            ({"a": True, "b": False, "c": False}, {"a": True, "b": True, "c": False}),
            (lambda t: {k: k == "a" for k in t}, lambda t: {k: k != "c" for k in t}),
        ):
            clip, tighter = METHODS["adagc"](), METHODS["adagc"](lambda_rel=1.01)
            inner = optax.masked(tighter, inner_mask)
            both = optax.masked(optax.chain(clip, inner), outer_mask)
            got = replay(both, stream)
            limits = {"a": 1.01, "b": 1.05, "c": 9.0}
            for name, limit in limits.items():
                np.testing.assert_allclose(
                    norms_of(got.emitted[name]), [1.0] * 5 + [limit], rtol=1e-6
                )
            outer, nested = got.states.inner_state
            assert rule_state(outer).gamma.shape == (6, 2)
            assert rule_state(nested.inner_state).gamma.shape == (6, 1)

    def test_partition_keeps_no_reference_of_other_parts(self) -> None:
        stream = {"a": of_norms([1.0] * 5 + [9.0], (4,)), "b": jnp.ones((6, 3))}
        parts: Any = {"muon": METHODS["adagc"](), "lion": optax.identity()}
        got = replay(optax.partition(parts, LABELS), stream)
        assert rule_state(clip_state(got.states)).gamma.shape == (6, 1)
        np.testing.assert_array_equal(got.emitted["b"], 1.0)
        np.testing.assert_allclose(norms_of(got.emitted["a"])[5], 1.05, rtol=1e-6)

    def test_extra_arguments_reach_others(self) -> None:
        def want_value(
            updates: Any, state: Any, params: Any = None, **extra: Any
        ) -> Any:
            assert set(extra) == {"value", "loss"}
            return updates, state

        spy = optax.GradientTransformationExtraArgs(optax.identity().init, want_value)
        grads = {"a": jnp.ones(2)}
        for factory in METHODS.values():
            optimizer = optax.chain(factory(), spy)
            state = optimizer.init(grads)
            update = functools.partial(optimizer.update, value=1.0, loss=2.0)
            jax.eval_shape(update, grads, state, grads)


class TestAccumulation:
    def test_one_observation_per_window(self) -> None:
        """transformers#986: the mean of a window is clipped, not its parts."""
        stream = {"a": jnp.array([[2.0, 0.0], [0.0, 2.0]] * 3)}
        for warmup_steps in (0, 100):
            clip = adagc_jax.adagc(lambda_abs=1.0, warmup_steps=warmup_steps)
            inner = optax.chain(clip, optax.sgd(1.0))
            got = replay(optax.MultiSteps(inner, 2).gradient_transformation(), stream)
            state = clip_state(got.states)
            windows = [0, 1, 1, 2, 2, 3]
            np.testing.assert_array_equal(state.clip_step, windows)
            np.testing.assert_array_equal(state.stages[0].seen[:, 0], windows)
            size = -1.0 if warmup_steps == 0 else -np.sqrt(0.5)
            want = np.full((6, 2), size) * np.array([0, 1, 0, 1, 0, 1])[:, None]
            np.testing.assert_allclose(got.emitted["a"], want, rtol=1e-6)

    @pytest.mark.parametrize("bad", BAD)
    def test_order_that_survives_a_bad_micro_step(self, bad: float) -> None:
        """optax#828: MultiSteps multiplies its accumulator by 0, and 0 * NaN is NaN.

        So a clipper inside sees nothing else ever after: it emits zeros, and counts
        it. In front of the accumulator it keeps the bad value out; or MultiSteps does
        so itself, with ``should_skip_update_fn=optax.skip_not_finite``.
        """
        stream = {"a": jnp.array([1.0, bad, 1.0, 1.0, 1.0, 1.0])[:, None]}
        clip, sgd = adagc_jax.tensor_gc(1.0), optax.sgd(1.0)
        orders = {
            "inside": optax.MultiSteps(optax.chain(clip, sgd), 2),
            "in front": optax.chain(
                clip, optax.MultiSteps(sgd, 2).gradient_transformation()
            ),
            "inside, skipping": optax.MultiSteps(
                optax.chain(clip, sgd), 2, should_skip_update_fn=optax.skip_not_finite
            ),
        }
        got: dict[str, Any] = {k: replay(v, stream) for k, v in orders.items()}
        emitted = {k: -v.emitted["a"][:, 0] for k, v in got.items()}
        np.testing.assert_array_equal(emitted["inside"], 0.0)
        np.testing.assert_array_equal(emitted["in front"], [0, 0.5, 0, 1, 0, 1])
        np.testing.assert_array_equal(emitted["inside, skipping"], [0, 0, 1, 0, 1, 0])
        counted = {
            k: clip_state(v.states).metrics.nonfinite[-1, 0] for k, v in got.items()
        }
        assert counted == {"inside": 3, "in front": 1, "inside, skipping": 0}

    @pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
    @pytest.mark.parametrize("name", METHODS)
    def test_narrow_gradients(self, name: str, dtype: str) -> None:
        params = {"a": jnp.ones((3, 2), dtype), "b": jnp.ones((), dtype)}
        optimizer = optax.MultiSteps(METHODS[name](), 2)
        state = jax.eval_shape(optimizer.init, params)
        emitted, after = jax.eval_shape(optimizer.update, params, state, params)
        assert {x.dtype for x in jax.tree.leaves(emitted)} == {jnp.dtype(dtype)}
        for x, y in zip(*map(jax.tree.leaves, (state, after)), strict=True):
            assert (x.shape, x.dtype, x.weak_type) == (y.shape, y.dtype, y.weak_type)


class TestApplyIfFinite:
    @pytest.mark.parametrize("policy", ["zero", "propagate"])
    @pytest.mark.parametrize("order", ["around", "after"])
    def test_both_orders_keep_the_reference(self, order: str, policy: str) -> None:
        """optax#1746: what freezes besides the reference depends on the order."""
        clip, adamw = METHODS["adagc"](nonfinite=policy), optax.adamw(1e-2)
        if order == "around":
            optimizer = optax.apply_if_finite(optax.chain(clip, adamw), 5)
        else:
            optimizer = optax.chain(clip, optax.apply_if_finite(adamw, 5))
        stream = spiky()
        for bad in BAD:
            dirty = stream | {"a": stream["a"].at[6, 0, 0].set(bad)}
            got = replay(optimizer, dirty, ones_like_first(stream))
            gamma = rule_state(clip_state(got.states)).gamma
            assert_same(gamma[6, 0], gamma[5, 0])
            assert gamma[7, 0] != gamma[6, 0]
            assert np.isfinite(jax.tree.leaves(got.emitted)[0]).all()
            # The wrapper only sees a bad value that the clipper has not removed.
            wrapper_sees_it = order == "around" or policy == "propagate"
            skipped = optax.tree.get(got.states, "total_notfinite")
            np.testing.assert_array_equal(skipped[5:], [0] + [int(wrapper_sees_it)] * 2)
            moments = optax.tree.get(got.states, "mu")["b"]
            assert (moments[6] == moments[5]).all() == wrapper_sees_it


class TestInjectHyperparams:
    @staticmethod
    def schedule(step: Any) -> Any:
        return 1.01 + 0.01 * step

    def test_schedule_of_a_threshold(self) -> None:
        stream = spiky()
        want = replay(METHODS["adagc"](lambda_rel=self.schedule), stream)
        injected = optax.inject_hyperparams(adagc_jax.adagc)(
            lambda_rel=self.schedule, beta=0.98, lambda_abs=1e9, warmup_steps=3
        )
        got = replay(injected, stream)
        assert_close(got.emitted, want.emitted)
        # 1 - beta is rounded twice for a beta that arrives as a float32 array.
        assert_close(clip_state(got.states).stages, want.states.stages, rtol=1e-5)
        constant = replay(method("adagc"), stream)
        assert norms_of(constant.emitted["a"])[5] != norms_of(got.emitted["a"])[5]

    FACTORIES: tuple[Any, ...] = (
        adagc_jax.adagc,
        adagc_jax.agc,
        adagc_jax.global_gc,
        adagc_jax.tensor_gc,
        adagc_jax.zclip,
        functools.partial(adagc_jax.clip_by_value, limit=0.3),
    )

    @pytest.mark.parametrize("factory", FACTORIES)
    def test_rounded_hyperparameters_are_refused(self, factory: Any) -> None:
        """By default optax rounds them to the dtype of the parameters."""
        injected = optax.inject_hyperparams(factory)()
        with pytest.raises(ValueError, match=r"hyperparam_dtype=jnp\.float32"):
            injected.init({"a": jnp.ones(2, jnp.bfloat16)})

    @pytest.mark.parametrize("place", [0, 4, 5], ids=["adagc", "zclip", "by value"])
    def test_wide_hyperparameters_of_bfloat16_parameters(self, place: int) -> None:
        factory = self.FACTORIES[place]
        stream = jax.tree.map(lambda x: x.astype(jnp.bfloat16), spiky())
        wide = optax.inject_hyperparams(factory, hyperparam_dtype=jnp.float32)()
        got, want = replay(wide, stream), replay(factory(), stream)
        assert_close(got.emitted, want.emitted)
        assert_close(got.states.inner_state, want.states, rtol=1e-5)
