"""The state of a clipper: mapped, saved, restored, changed, and read off by name."""

import functools
import pickle
from pathlib import Path
from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from streams import (
    METHODS,
    STACKED,
    assert_same,
    first,
    method,
    norms_of,
    of_norms,
    ones_like_first,
    replay,
    rule_state,
    spiky,
)

import adagc_jax
from adagc_jax import clip_metrics, stacked

BY_ROW = NamedSharding(
    jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,)), PartitionSpec("x")
)

# Optimizers of optax mix int32 counts and float32 moments.
pytestmark = pytest.mark.usefixtures("optax_promotion")


class TestMapParams:
    @pytest.mark.parametrize(
        "clip",
        [pytest.param(f, id=n) for n, f in METHODS.items()]
        + [pytest.param(f, id=f"stacked {n}") for n, f in STACKED.items()]
        + [
            pytest.param(
                functools.partial(adagc_jax.adagc, groups=stacked({"a": 0})),
                id="stacked by pattern",
            ),
            pytest.param(
                functools.partial(adagc_jax.adagc, groups=stacked({"a": 0, "b": ()})),
                id="stacked by prefix",
            ),
            pytest.param(
                functools.partial(adagc_jax.adagc, mask={"a": True, "b": False}),
                id="masked by prefix",
            ),
            pytest.param(
                functools.partial(
                    adagc_jax.adagc,
                    groups=adagc_jax.per_shard({"a": BY_ROW, "b": BY_ROW}),
                ),
                id="shards by prefix",
            ),
        ],
    )
    def test_maps_moments_and_leaves_references_alone(self, clip: Any) -> None:
        """The usual way to give the state of an optimizer its shardings."""
        params = {"a": jnp.ones((4, 3)), "b": jnp.ones((4, 2))}
        optimizer = optax.chain(clip(), optax.adam(1e-3))
        state: Any = optimizer.init(params)
        got: Any = optax.tree.map_params(optimizer, lambda x: x + 1.0, state)
        assert_same(got[0], state[0])
        mu = optax.tree.get(got, "mu")
        assert_same(mu, params)

        specs = {"a": "A", "b": "B"}
        named: Any = optax.tree.map_params(
            optimizer,
            lambda _, spec: spec,
            state,
            specs,
            transform_non_params=lambda _: "replicated",
        )
        assert optax.tree.get(named, "nu") == specs
        assert set(jax.tree.leaves(named[0])) == {"replicated"}


class Run:
    """Eight updates of a chain with Adam, and how to go on from any of them."""

    def __init__(self, clip: Any):
        self.stream = spiky()
        self.params = ones_like_first(self.stream)
        self.optimizer = optax.chain(clip, optax.adam(1e-2))
        self.update = jax.jit(self.optimizer.update)
        self.history: list[Any] = [(None, self.optimizer.init(self.params))]
        self.history += self.from_step(0, self.history[0][1])

    def from_step(self, step: int, state: Any) -> list[Any]:
        out = []
        for t in range(step, 8):
            grads = jax.tree.map(lambda x, t=t: x[t], self.stream)
            emitted, state = self.update(grads, state, self.params)
            out.append((emitted, state))
        return out


@functools.cache
def run(name: str) -> Run:
    stacks = {"stacked": METHODS["adagc"](groups=stacked({"a": 0}))}
    return Run(stacks.get(name) or METHODS[name]())


def by_flax_bytes(state: Any, target: Any, folder: Path) -> Any:
    (folder / "state").write_bytes(flax.serialization.to_bytes(state))
    return flax.serialization.from_bytes(target, (folder / "state").read_bytes())


def by_pickle(state: Any, target: Any, folder: Path) -> Any:
    del target
    (folder / "state").write_bytes(pickle.dumps(jax.device_get(state)))
    return pickle.loads((folder / "state").read_bytes())


def by_orbax(state: Any, target: Any, folder: Path) -> Any:
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "state", state)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder / "state", target)


class TestCheckpoints:
    @pytest.mark.parametrize("step", [2, 6], ids=["in warm-up", "after it"])
    @pytest.mark.parametrize("name", ["stacked", "zclip"])
    @pytest.mark.parametrize("through", [by_flax_bytes, by_pickle, by_orbax])
    def test_continues_bit_identically(
        self, through: Any, name: str, step: int, tmp_path: Path
    ) -> None:
        """Named tuples come back as named tuples if there is a target (flax#1432)."""
        original = run(name)
        state = original.history[step][1]
        target = original.optimizer.init(original.params)
        restored = through(state, target, tmp_path)
        assert_same(restored, state)
        continued = original.from_step(step, restored)
        assert_same(continued, original.history[step + 1 :])
        got, want = (
            clip_metrics(history[-1][1], level="all")
            for history in (continued, original.history)
        )
        assert got == want

    @pytest.mark.parametrize("name", ["adagc", "zclip", "tensor_gc"])
    @pytest.mark.parametrize("through", [by_flax_bytes, by_pickle, by_orbax])
    def test_names_can_be_read_before_the_next_update(
        self, through: Any, name: str, tmp_path: Path
    ) -> None:
        """Flax keeps arrays only, and the parameters give the names back."""
        original = run(name)
        state = original.history[4][1]
        target = original.optimizer.init(original.params)
        restored = through(state, target, tmp_path)
        got = clip_metrics(restored, original.params, level="all")
        assert got == clip_metrics(state, level="all")

    @pytest.mark.parametrize("name", ["adagc", "adagc_ema"])
    def test_a_new_threshold_goes_on_with_the_old_reference(self, name: str) -> None:
        stream = {"a": of_norms([1.0] * 5, (4,)), "b": of_norms([0.5] * 5, (4,))}
        clip = METHODS[name]()
        state = jax.tree.map(lambda x: x[-1], replay(clip, stream).states)
        spike = {"a": of_norms([8.0], (4,))[0], "b": of_norms([0.5], (4,))[0]}
        for lambda_rel in (1.05, 1.5, 4.0):
            changed = METHODS[name](lambda_rel=lambda_rel, beta=0.9)
            emitted, after = changed.update(spike, state)
            np.testing.assert_allclose(norms_of(emitted["a"][None]), lambda_rel, 1e-6)
            np.testing.assert_array_equal(emitted["b"], spike["b"])
            assert jax.tree.structure(after) == jax.tree.structure(state)
            if name == "adagc":
                gamma = rule_state(after).gamma
                np.testing.assert_allclose(gamma, [0.9 + 0.1 * lambda_rel, 0.5], 1e-6)


TOTALS = (
    "norm_after",
    "norm_seen",
    "fraction_clipped",
    "clip_rate",
    "min_scale",
    "nonfinite",
    "step",
)


class TestReadings:
    def test_everything_by_name_from_any_state(self) -> None:
        """optax#326: the norms that the clipper needed anyway."""
        stream, params = spiky(), ones_like_first(spiky())
        clip = method("adagc")
        alone = replay(clip, stream, params)
        deep = optax.chain(
            optax.named_chain(("x", optax.masked(clip, {"a": True, "b": True})))
        )
        deep = optax.apply_if_finite(optax.chain(deep, optax.adamw(1e-3)), 3)
        deep = optax.MultiSteps(deep, 1).gradient_transformation()
        state = jax.tree.map(lambda x: x[5], replay(deep, stream, params).states)
        metrics = jax.jit(functools.partial(clip_metrics, level="all"))(state)
        before = {k: norms_of(v) for k, v in stream.items()}
        after = {k: norms_of(v) for k, v in alone.emitted.items()}
        for name, place in (("a", 0), ("b", 1)):
            clipped = np.sum(after[name][:6] < before[name][:6] * (1 - 1e-6))
            want = {
                "norm_before": before[name][5],
                "norm_after": after[name][5],
                "scale": after[name][5] / before[name][5],
                "gamma": rule_state(alone.states).gamma[5, place],
                "clip_rate": clipped / 6,
                "active": 6,
                "nonfinite": 0,
            }
            for key, value in want.items():
                got = metrics.pop(f"clip/{name}/{key}")
                np.testing.assert_allclose(got, value, rtol=1e-5, err_msg=key)
            for key in ("consecutive_clips", "outliers", "level"):
                metrics.pop(f"clip/{name}/{key}")
        total = np.hypot(before["a"], before["b"])[5]
        np.testing.assert_allclose(metrics.pop("clip/norm_before"), total, rtol=1e-5)
        assert set(metrics) == {f"clip/{k}" for k in TOTALS}

    @pytest.mark.parametrize("name", METHODS)
    def test_count_of_an_optimizer_stays_findable(self, name: str) -> None:
        """A field of that name in our state would make the search ambiguous."""
        params = {"a": jnp.ones((2, 2))}
        state = optax.chain(METHODS[name](), optax.adam(1e-3)).init(params)
        assert optax.tree.get(state, "count") == 0
        assert optax.tree_utils.tree_get(state, "count") == 0
        assert set(optax.tree.get(state, "mu")) == {"a"}

    @pytest.mark.parametrize("name", ["adagc", "global_gc", "tensor_gc"])
    def test_how_often_it_clips(self, name: str, tmp_path: Path) -> None:
        norms = [1.0, 1.0, 1.0, 50.0, 1.0, 50.0, 1.0, 1.0, 50.0, 1.0]
        stream = {"a": of_norms(norms, (2, 2))}
        clip = METHODS[name]()
        state = jax.tree.map(lambda x: x[-1], replay(clip, stream).states)
        again = by_flax_bytes(state, clip.init(first(stream)), tmp_path)
        metrics = clip_metrics(state, level="all")
        np.testing.assert_allclose(metrics["clip/clip_rate"], 0.3, rtol=1e-6)
        np.testing.assert_allclose(metrics["clip/a/clip_rate"], 0.3, rtol=1e-6)
        assert clip_metrics(again, first(stream), level="all") == metrics

    @pytest.mark.parametrize("name", ["adagc", "agc", "zclip"])
    def test_layers_of_a_stack_have_names(self, name: str) -> None:
        norms = np.array([1.0, 2.0, 3.0, 4.0])
        stream = {"w": jnp.stack([of_norms([n], (3, 2)) for n in norms], axis=1)}
        got = replay(STACKED[name](), stream, {"w": jnp.ones((4, 3, 2))})
        metrics = clip_metrics(jax.tree.map(lambda x: x[-1], got.states), level="all")
        columns = {k.rsplit("/", 1)[1] for k in metrics if k.startswith("clip/w")}
        assert columns >= {"norm_before", "norm_after", "scale", "clip_rate"}
        for column in columns:
            names = [
                k
                for k in metrics
                if k.startswith("clip/w") and k.endswith(f"/{column}")
            ]
            assert names == [f"clip/w/{layer}/{column}" for layer in range(4)]
        for layer, norm in enumerate(norms):
            assert metrics[f"clip/w/{layer}/norm_before"] == norm

    @pytest.mark.parametrize("name", ["adagc", "agc", "global_gc"])
    def test_nothing_waits_for_the_device(self, name: str) -> None:
        clip, grads = METHODS[name](), {"a": jnp.ones((2, 2))}

        @jax.jit
        def update(grads: Any, state: Any) -> Any:
            emitted, state = clip.update(grads, state, grads)
            return emitted, state, clip_metrics(state, level="all")

        state = clip.init(grads)
        with jax.transfer_guard("disallow"):
            for _ in range(3):
                _, state, _ = update(grads, state)
        jaxpr = str(jax.make_jaxpr(update)(grads, state))
        assert "callback" not in jaxpr
