"""The references against other implementations, then against arithmetic by hand."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference import AdaGC, ZClip, agc, clip_by_value, global_gc, tensor_gc

DATA = Path(__file__).parent / "data"
NAN, INF = np.nan, np.inf


def golden(name: str) -> dict[str, Any]:
    return json.loads((DATA / f"{name}.json").read_text())


def tree(**tensors: Any) -> dict[str, np.ndarray]:
    return {name: np.array(x, np.float64) for name, x in tensors.items()}


def assert_trees_close(got: Any, want: Any, rtol: float = 1e-12) -> None:
    assert got.keys() == want.keys()
    for name in want:
        np.testing.assert_allclose(got[name], want[name], rtol=rtol, err_msg=name)


def statistics(method: ZClip) -> tuple[float | None, float | None]:
    return method.mean[""], method.var[""]


ADAGC = golden("adagc_authors")
ZCLIP = golden("zclip")
AGC = golden("agc_timm")


class TestGolden:
    @pytest.mark.parametrize("name", ADAGC["cases"])
    def test_adagc_authors(self, name: str) -> None:
        case = ADAGC["cases"][name]
        scope = "global" if name == "adagc_global" else "tensor"
        method = AdaGC(**case["config"], scope=scope)
        steps = zip(ADAGC["gradients"], case["clipped"], case["gamma"], strict=True)
        for grads, clipped, gamma in steps:
            assert_trees_close(method.update(tree(**grads)), clipped, rtol=1e-6)
            want = {"": gamma} if scope == "global" else gamma
            assert_trees_close(method.gamma, want, rtol=1e-6)

    def test_adagc_global_keeps_the_limit_itself_in_warmup(self) -> None:
        # h * n is 2e-7 below the limit because of eps, too close for the tolerance.
        case = ADAGC["cases"]["adagc_global"]
        method = AdaGC(**case["config"], scope="global")
        for grads, gamma in zip(ADAGC["gradients"], case["gamma"], strict=True):
            method.update(tree(**grads))
            np.testing.assert_allclose(method.gamma[""], gamma, rtol=1e-15)

    @pytest.mark.parametrize("name", ZCLIP["cases"])
    def test_zclip(self, name: str) -> None:
        case = ZCLIP["cases"][name]
        method = ZClip(**case["config"])
        steps = zip(ZCLIP["gradients"], case["clipped"], case["mean_var"], strict=True)
        for grads, clipped, (mean, var) in steps:
            assert_trees_close(method.update(tree(**grads)), clipped, rtol=1e-5)
            if mean is None:
                assert statistics(method) == (None, None)
            else:
                assert statistics(method) == pytest.approx((mean, var), rel=1e-5)

    @pytest.mark.parametrize(
        "case", AGC["cases"], ids=lambda c: f"rank{len(c['shape'])}"
    )
    def test_agc_timm(self, case: dict[str, Any]) -> None:
        axes = case["unit_axes_reduced"]
        reduce_axes = {} if axes == "all" else {"w": tuple(axes)}
        got = agc(
            tree(w=case["grad"]),
            tree(w=case["param"]),
            clipping=0.01,
            eps=1e-3,
            reduce_axes=reduce_axes,
        )
        assert_trees_close(got, {"w": case["clipped"]}, rtol=1e-6)


class TestFixedThresholds:
    def test_scope(self) -> None:
        grads = tree(a=[3.0], b=[4.0])
        assert_trees_close(tensor_gc(grads, 1.0), tree(a=[1.0], b=[1.0]))
        assert_trees_close(global_gc(grads, 1.0), tree(a=[0.6], b=[0.8]))

    def test_a_norm_at_the_limit_is_untouched(self) -> None:
        grads = tree(a=[3.0, 4.0])
        assert_trees_close(global_gc(grads, 5.0, eps=1.0), grads)
        assert_trees_close(global_gc(grads, 4.0, eps=1.0), tree(a=[2.0, 8.0 / 3.0]))

    def test_kept_axes_tell_slices_apart(self) -> None:
        grads = tree(w=[[3.0, 8.0], [4.0, 0.0]], s=2.0)
        got = tensor_gc(grads, 1.0, kept_axes={"w": (-1,)})
        assert_trees_close(got, tree(w=[[0.6, 1.0], [0.8, 0.0]], s=1.0))

    def test_inputs_are_never_written_to(self) -> None:
        grads = tree(a=[3.0], b=[NAN])
        tensor_gc(grads, 1.0)
        assert_trees_close(grads, tree(a=[3.0], b=[NAN]))

    def test_by_value(self) -> None:
        got = clip_by_value(tree(a=[-3.0, 0.5, INF, NAN]), 1.0)
        assert_trees_close(got, tree(a=[-1.0, 0.5, 1.0, NAN]))

    @pytest.mark.parametrize("bad", [NAN, INF, -INF])
    def test_non_finite_policies(self, bad: float) -> None:
        grads = tree(a=[bad, 1.0], b=[3.0])
        zeros = [0.0, 0.0]
        emitted: list[tuple[Any, Any, Any]] = [
            ("zero", zeros, [1.0]),
            ("skip", zeros, [0.0]),
            ("propagate", [bad, 1.0], [1.0]),
        ]
        for policy, a, b in emitted:
            got = tensor_gc(grads, 1.0, nonfinite=policy)
            assert_trees_close(got, tree(a=a, b=b))


class TestAGC:
    def test_zero_weights_learn(self) -> None:
        got = agc(
            tree(w=np.ones((4, 4))), tree(w=np.zeros((4, 4))), reduce_axes={"w": (0,)}
        )
        np.testing.assert_allclose(np.linalg.norm(got["w"], axis=0), 1e-5)

    def test_stacked_units_stay_apart(self) -> None:
        # Unit norms of w are 2; only layer 0's unit 1 exceeds 0.5 * 2.
        params = tree(w=np.full((2, 4, 3), 1.0))
        grads = tree(w=np.full((2, 4, 3), 0.5))
        grads["w"][0, :, 1] = 100.0
        got = agc(grads, params, clipping=0.5, reduce_axes={"w": (1,)})
        want = tree(w=np.full((2, 4, 3), 0.5))
        assert_trees_close(got, want)


class TestAdaGC:
    def test_clip_and_average_by_hand(self) -> None:
        method = AdaGC(2.0, 0.5, 1e9, warmup_steps=1, eps=1.0)
        method.update(tree(a=[1.0]))
        # The emitted norm has eps in it; the observation is lambda * gamma without.
        assert_trees_close(method.update(tree(a=[3.0])), tree(a=[3.0 * 2.0 / 4.0]))
        assert_trees_close(method.gamma, tree(a=0.5 * 1.0 + 0.5 * 2.0))

    def test_warmup_clips_globally_and_keeps_the_minimum(self) -> None:
        method = AdaGC(1.05, 0.98, 1.0, warmup_steps=3)
        assert_trees_close(
            method.update(tree(a=[3.0], b=[4.0])), tree(a=[0.6], b=[0.8])
        )
        assert_trees_close(method.gamma, tree(a=0.6, b=0.8))
        method.update(tree(a=[0.7], b=[0.1]))
        assert_trees_close(method.gamma, tree(a=0.6, b=0.1))

    def test_warmup_has_exactly_the_given_number_of_updates(self) -> None:
        method = AdaGC(2.0, 0.5, 1.0, warmup_steps=2)
        emitted = [float(method.update(tree(a=[9.0]))["a"][0]) for _ in range(3)]
        np.testing.assert_allclose(emitted, [1.0, 1.0, 2.0])

    def test_ema_initialisation_is_a_weighted_mean_of_clipped_norms(self) -> None:
        beta = 0.9
        method = AdaGC(1.5, beta, 1e9, warmup_steps=3, warmup_init="ema")
        norms = [1.0, 2.0, 4.0]
        for n in norms:
            method.update(tree(a=[n]))
        weights = beta ** np.arange(3)[::-1]
        gamma = float(weights @ norms / weights.sum())
        assert_trees_close(method.gamma, tree(a=gamma))

        assert_trees_close(method.update(tree(a=[100.0])), tree(a=[1.5 * gamma]))
        weights = beta ** np.arange(4)[::-1]
        gamma = float(weights @ [*norms, 1.5 * gamma] / weights.sum())
        assert_trees_close(method.gamma, tree(a=gamma))

    @pytest.mark.parametrize("warmup_init", ["min", "ema"])
    @pytest.mark.parametrize("warmup_steps", [0, 1])
    def test_first_norm_starts_gamma(self, warmup_init: Any, warmup_steps: int) -> None:
        method = AdaGC(1.05, 0.98, 1e9, warmup_steps, warmup_init=warmup_init)
        assert_trees_close(method.update(tree(a=[7.0])), tree(a=[7.0]))
        assert_trees_close(method.gamma, tree(a=7.0))

    @pytest.mark.parametrize("warmup_init", ["min", "ema"])
    def test_tensor_that_wakes_after_warmup(self, warmup_init: Any) -> None:
        method = AdaGC(2.0, 0.5, 1.0, warmup_steps=2, warmup_init=warmup_init)
        for _ in range(3):
            out = method.update(tree(a=[0.0], b=[0.5]))
            assert_trees_close(out, tree(a=[0.0], b=[0.5]))
        assert method.seen == {"a": 0, "b": 3}
        assert_trees_close(
            method.update(tree(a=[8.0], b=[0.5])), tree(a=[8.0], b=[0.5])
        )
        assert_trees_close(method.gamma, tree(a=8.0, b=0.5))
        assert_trees_close(
            method.update(tree(a=[99.0], b=[0.5])), tree(a=[16.0], b=[0.5])
        )

    def test_first_active_observation_in_warmup_starts_the_minimum(self) -> None:
        method = AdaGC(2.0, 0.5, 1e9, warmup_steps=9)
        for n in [0.0, 3.0, 0.0, 5.0]:
            method.update(tree(a=[n]))
        assert_trees_close(method.gamma, tree(a=3.0))
        assert method.seen == {"a": 2}

    @pytest.mark.parametrize("warmup_init", ["min", "ema"])
    def test_idle_tensor_is_held(self, warmup_init: Any) -> None:
        method = AdaGC(1.05, 0.98, 1e9, warmup_steps=3, warmup_init=warmup_init)
        for _ in range(5):
            method.update(tree(a=[1.0]))
        before = method.gamma["a"].copy()
        for _ in range(100):
            assert_trees_close(method.update(tree(a=[0.0])), tree(a=[0.0]))
        assert method.gamma["a"] == before
        assert_trees_close(method.update(tree(a=[1.0])), tree(a=[1.0]))

    def test_only_the_idle_expert_is_held(self) -> None:
        method = AdaGC(2.0, 0.5, 1e9, warmup_steps=1, kept_axes={"w": (1,)})
        method.update(tree(w=[[3.0, 1.0], [4.0, 0.0]]))
        assert_trees_close(method.gamma, tree(w=[5.0, 1.0]))
        out = method.update(tree(w=[[0.0, 0.0], [0.0, 8.0]]))
        assert_trees_close(out, tree(w=[[0.0, 0.0], [0.0, 2.0]]))
        assert_trees_close(method.gamma, tree(w=[5.0, 1.5]))

    def test_stacked_tensor_equals_its_slices(self) -> None:
        rng = np.random.default_rng(0)
        stacked = AdaGC(1.04, 0.9, 1.0, warmup_steps=3, kept_axes={"w": (0, 2)})
        listed = AdaGC(1.04, 0.9, 1.0, warmup_steps=3)
        for _ in range(8):
            w = rng.normal(size=(2, 5, 3)) * np.exp(rng.normal(size=(2, 1, 3)))
            want = listed.update({f"{i}{j}": w[i, :, j] for i, j in np.ndindex(2, 3)})
            got = stacked.update({"w": w})["w"]
            for i, j in np.ndindex(2, 3):
                np.testing.assert_allclose(got[i, :, j], want[f"{i}{j}"], rtol=1e-12)
                gamma = listed.gamma[f"{i}{j}"]
                np.testing.assert_allclose(stacked.gamma["w"][i, j], gamma, rtol=1e-12)

    @pytest.mark.parametrize("bad", [NAN, INF, -INF])
    @pytest.mark.parametrize("at", [0, 1, 6])
    @pytest.mark.parametrize("policy", ["zero", "propagate"])
    def test_non_finite_tensor_leaves_the_others_alone(
        self, bad: float, at: int, policy: Any
    ) -> None:
        method = AdaGC(1.05, 0.98, 1e9, warmup_steps=3, nonfinite=policy)
        clean = AdaGC(1.05, 0.98, 1e9, warmup_steps=3)
        for t in range(9):
            b = [1.0 + 0.1 * t]
            a = [bad, 1.0] if t == at else [3.0, 4.0]
            before = None if t == 0 else method.gamma["a"].copy()
            out, want = method.update(tree(a=a, b=b)), clean.update(tree(b=b))
            np.testing.assert_array_equal(out["b"], want["b"])
            assert method.gamma["b"] == clean.gamma["b"]
            if t == at:
                emitted = [0.0, 0.0] if policy == "zero" else a
                np.testing.assert_array_equal(out["a"], emitted)
                assert method.gamma["a"] == (0.0 if before is None else before)
        assert method.seen == {"a": 8, "b": 9}

    def test_warmup_total_leaves_the_non_finite_group_out(self) -> None:
        method = AdaGC(1.05, 0.98, 1.0, warmup_steps=3)
        out = method.update(tree(a=[NAN], b=[3.0], c=[4.0]))
        assert_trees_close(out, tree(a=[0.0], b=[0.6], c=[0.8]))

    def test_skip_moves_nothing_but_the_step(self) -> None:
        method = AdaGC(2.0, 0.5, 1e9, warmup_steps=2, nonfinite="skip")
        method.update(tree(a=[1.0], b=[1.0]))
        out = method.update(tree(a=[NAN], b=[9.0]))
        assert_trees_close(out, tree(a=[0.0], b=[0.0]))
        assert_trees_close(method.gamma, tree(a=1.0, b=1.0))
        assert method.seen == {"a": 1, "b": 1}
        # The skipped update was the last of the warm-up.
        assert_trees_close(
            method.update(tree(a=[9.0], b=[1.0])), tree(a=[2.0], b=[1.0])
        )

    def test_global_scope_is_one_group(self) -> None:
        method = AdaGC(2.0, 0.5, 1e9, warmup_steps=1, scope="global")
        method.update(tree(a=[3.0], b=[4.0]))
        out = method.update(tree(a=[30.0], b=[40.0]))
        assert_trees_close(out, tree(a=[6.0], b=[8.0]))
        assert_trees_close(method.gamma, {"": np.array(7.5)})
        out = method.update(tree(a=[NAN], b=[4.0]))
        assert_trees_close(out, tree(a=[0.0], b=[0.0]))
        assert_trees_close(method.gamma, {"": np.array(7.5)})


class TestZClip:
    def test_idle_and_non_finite_norms_are_not_collected(self) -> None:
        method = ZClip(warmup_steps=3, max_grad_norm=None)
        for n in [1.0, NAN, 0.0, INF, 2.0]:
            method.update(tree(a=[n]))
        assert method.mean[""] is None
        method.update(tree(a=[3.0]))
        for n in [NAN, 0.0]:
            assert statistics(method) == pytest.approx((2.0, 2.0 / 3.0))
            method.update(tree(a=[n]))
        assert statistics(method) == pytest.approx((2.0, 2.0 / 3.0))

    def test_spike_by_hand(self) -> None:
        method = ZClip(0.5, 1.0, None, eps=1.0, warmup_steps=2)
        for n in [1.0, 3.0]:
            method.update(tree(a=[n]))
        # mean 2, std 1, z = 4 / (1 + 1): the threshold is 2 + 1 / 2.
        out = method.update(tree(a=[6.0]))
        assert_trees_close(out, tree(a=[6.0 * 2.5 / (6.0 + 1e-6)]))
        assert statistics(method) == pytest.approx((2.25, 0.5 + 0.5 * 0.25**2))

    def test_tensor_scope_equals_one_run_per_tensor(self) -> None:
        rng = np.random.default_rng(0)
        together = ZClip(warmup_steps=4, max_grad_norm=None, scope="tensor")
        alone = {name: ZClip(warmup_steps=4, max_grad_norm=None) for name in "ab"}
        for t in range(12):
            grads = {name: rng.normal(size=5) for name in "ab"}
            if t == 8:
                grads["a"] *= 100.0
            got = together.update(grads)
            for name, method in alone.items():
                want = method.update({name: grads[name]})
                np.testing.assert_array_equal(got[name], want[name])
                assert together.mean[name] == method.mean[""]
                assert together.var[name] == method.var[""]
