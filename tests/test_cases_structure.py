"""What is clipped together: stacks, experts, units, exclusions, odd trees, shards."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from streams import (
    METHODS,
    STACKED,
    assert_close,
    assert_same,
    first,
    method,
    noise,
    norms_of,
    ones_like_first,
    replay,
    replay_as_users,
    rule_state,
)

import adagc_jax
from adagc_jax import clip_metrics, stacked


def with_spike(steps: int, shape: tuple[int, ...], spike: Any) -> tuple[Any, Any]:
    """A calm stream, and the same with 1000 times the gradient at step 6."""
    rng = np.random.default_rng(3)
    calm = 0.1 * rng.normal(size=(steps, *shape)).astype(np.float32)
    spiked = calm.copy()
    spiked[6][spike] *= 1e3
    return calm, spiked


class TestStacks:
    @pytest.mark.parametrize("name", STACKED)
    def test_spike_in_one_layer_leaves_the_others_alone(self, name: str) -> None:
        """Scan-stacked layers (axlearn#288)."""
        calm, spiked = with_spike(10, (4, 3, 2), 0)
        params = {"w": jnp.ones((4, 3, 2))}
        clip = STACKED[name]()
        want = replay(clip, {"w": jnp.asarray(calm)}, params)
        got = replay(clip, {"w": jnp.asarray(spiked)}, params)
        np.testing.assert_array_equal(got.emitted["w"][:, 1:], want.emitted["w"][:, 1:])
        # Of all layers together is only the norm that the warm-up works with.
        per_layer = [
            (s.states.stages, s.states.metrics._replace(norm_seen=()))
            for s in (got, want)
        ]
        for x, y in zip(*map(jax.tree.leaves, per_layer), strict=True):
            assert x.shape[:2] == (10, 4)
            np.testing.assert_array_equal(x[:, 1:], y[:, 1:])
        assert (norms_of(got.emitted["w"][6:7, 0]) < 0.1 * norms_of(spiked[6:7, 0]))[0]

    @pytest.mark.parametrize(
        ("name", "axes", "shape"),
        [
            ("adagc", (0,), (4, 3, 2)),
            ("adagc", (1,), (3, 4)),
            ("adagc", (0, 1), (2, 2, 3, 2)),
            ("agc", (1,), (3, 4)),
            ("agc", (0, 1), (2, 2, 3, 2)),
            ("zclip", (1,), (3, 4)),
            ("zclip", (0, 1), (2, 2, 3, 2)),
        ],
    )
    def test_a_stack_equals_a_list_of_its_slices(
        self, name: str, axes: tuple[int, ...], shape: tuple[int, ...]
    ) -> None:
        """Layers and experts; also in a warm-up whose limit couples all of them."""
        options = {"lambda_abs": 0.3} if name == "adagc" else {}
        together, apart = (
            METHODS[name](stacked=x)
            if name == "agc"
            else METHODS[name](groups=stacked(x), **options)
            for x in (axes, ())
        )
        _, spiked = with_spike(10, shape, (slice(None),) * max(axes) + (0,))
        got = replay(together, {"w": jnp.asarray(spiked)}, {"w": jnp.ones(shape)})
        slices = unstacked(spiked, axes)
        want = replay(apart, slices, [jnp.ones(x.shape[1:]) for x in slices])
        assert_close(unstacked(got.emitted["w"], axes), want.emitted)
        for x, y in zip(rule_state(got.states), rule_state(want.states), strict=True):
            assert x.shape[1:] == tuple(shape[axis] for axis in axes)
            np.testing.assert_allclose(x.reshape(10, -1), y, rtol=1e-5, atol=1e-12)

    def test_layer_axis_is_chosen_by_pattern_prefix_or_function(self) -> None:
        """MaxText stacks layers along axis 1 (``param_scan_axis: 1``)."""
        rng = np.random.default_rng(0)
        shapes = {"kernel": (8, 4, 16), "bias": (16, 4)}
        layers = {
            k: jnp.asarray(rng.normal(size=(3, *s)), jnp.float32)
            for k, s in shapes.items()
        }
        stream = {"layers": layers, "embed": jnp.ones((3, 32, 8))}

        def by_name(path: str, leaf: Any) -> int | None:
            del leaf
            return None if path == "embed" else 1

        specs = (
            {"layers/.*kernel": 1, "layers/.*bias": -1},
            {"layers/": 1},
            {"layers": 1, "embed": None},
            {"layers": {"kernel": 1, "bias": (1,)}, "embed": ()},
            by_name,
        )
        clips = [METHODS["adagc"](groups=stacked(axes)) for axes in specs]
        got = replay(clips[0], stream)
        embed, bias, kernel = rule_state(got.states).gamma
        np.testing.assert_allclose(embed, [[16.0]] * 3, rtol=1e-6)
        # In this warm-up without a limit: the smallest norm of each layer so far.
        lowest = np.minimum.accumulate(norms_of(layers["kernel"], (1, 3)))
        np.testing.assert_allclose(kernel, lowest, rtol=1e-6)
        lowest = np.minimum.accumulate(norms_of(layers["bias"], (1,)))
        np.testing.assert_allclose(bias, lowest, rtol=1e-6)
        # The other specs say the same: their states have the same labels.
        states = [clip.init(first(stream)) for clip in clips]
        for state in states:
            assert_same(state, states[0])

    def test_a_pattern_without_a_leaf_is_refused(self) -> None:
        clip = adagc_jax.adagc(groups=stacked({"layer/": 0}))
        with pytest.raises(ValueError, match=r"layer/.*matches no leaf.*layers/w"):
            clip.init({"layers": {"w": jnp.ones((2, 2))}})

    def test_an_axis_out_of_range_names_the_leaf(self) -> None:
        clip = adagc_jax.adagc(groups=stacked({"layers/": 1}))
        with pytest.raises(ValueError, match="axis 1 is out of range for 'layers/b'"):
            clip.init({"layers": {"b": jnp.ones((2,)), "w": jnp.ones((2, 2))}})


def unstacked(stream: Any, axes: tuple[int, ...]) -> list[Any]:
    """The slices of a stream along stacked axes of its gradients, in C order."""
    front = np.moveaxis(stream, [axis + 1 for axis in axes], range(1, 1 + len(axes)))
    return [front[:, *i] for i in np.ndindex(front.shape[1 : 1 + len(axes)])]


class TestUnits:
    @pytest.mark.parametrize(
        ("layout", "reduced"), [("IO", 0), ("OI", 1)], ids=["IO", "OI"]
    )
    def test_unit_axis_follows_the_layout(self, layout: str, reduced: int) -> None:
        rng = np.random.default_rng(0)
        params = {"w": jnp.asarray(rng.normal(size=(3, 4)), jnp.float32)}
        stream = {"w": jnp.asarray(rng.normal(size=(1, 3, 4)), jnp.float32)}
        got = replay(adagc_jax.agc(0.01, layout=layout), stream, params)
        np.testing.assert_allclose(
            norms_of(got.emitted["w"][0], (reduced,)),
            0.01 * norms_of(params["w"], (reduced,)),
            rtol=1e-6,
        )

    @pytest.mark.parametrize(
        ("layout", "reduced"), [("IO", 0), ("OI", 1)], ids=["IO", "OI"]
    )
    def test_axes_of_size_one_count(self, layout: str, reduced: int) -> None:
        """LoRA of rank 1 and 2 alike; optax drops the axis and sees a vector."""
        rng = np.random.default_rng(0)
        p, g = (jnp.asarray(rng.normal(size=(8, 2)), jnp.float32) for _ in range(2))
        clip = adagc_jax.agc(0.01, layout=layout)
        for rank in (1, 2):
            got = replay(clip, {"w": g[None, :, :rank]}, {"w": p[:, :rank]})
            np.testing.assert_allclose(
                norms_of(got.emitted["w"][0], (reduced,)),
                0.01 * norms_of(p[:, :rank], (reduced,)),
                rtol=1e-6,
            )

    def test_names_state_the_scope(self) -> None:
        """Keras' clipnorm is per tensor, PyTorch's clip_grad_norm_ is global."""
        stream = {"a": jnp.array([[3.0]]), "b": jnp.array([[4.0]])}
        local = replay(adagc_jax.tensor_gc(1.0), stream).emitted
        whole = replay(adagc_jax.global_gc(1.0), stream).emitted
        assert_close(local, {"a": np.array([[1.0]]), "b": np.array([[1.0]])})
        assert_close(whole, {"a": np.array([[0.6]]), "b": np.array([[0.8]])})


class TestLeftOut:
    """Heads, biases, frozen weights, and what is no gradient at all."""

    @pytest.mark.parametrize("name", ["adagc", "agc", "global_gc", "zclip"])
    def test_excluded_leaves_are_untouched_and_in_no_norm(self, name: str) -> None:
        kept = noise(8)
        odd = jnp.array([[1e30, np.nan, -np.inf, 1e-45]] * 8)
        stream = {
            "kernel": kept,
            "head": {"w": odd},
            # The statistics of fp8 training travel in the gradient channel.
            "_overwrite_with_gradient": {"scale": odd[:, 0], "amax": 50.0 * odd},
        }
        want = replay(method(name), kept, ones_like_first(kept))
        params = ones_like_first(stream)
        mask = {"kernel": True, "head": False, "_overwrite_with_gradient": False}
        for options in (
            {"exclude": ("^head/", "_overwrite_with_gradient")},
            {"mask": mask},
            {"mask": lambda tree: jax.tree.map_with_path(is_kernel, tree)},
        ):
            got = replay(METHODS[name](**options), stream, params)
            assert_same(got.emitted, jax.device_get(stream) | {"kernel": want.emitted})
            assert_same(got.states._replace(labels=want.states.labels), want.states)
            if name != "adagc":
                # Masks take the same way through every method.
                break

    @pytest.mark.parametrize(
        "options", [{"mask": {"a": True, "b": False}}, {"exclude": ("b",)}]
    )
    def test_clamping_leaves_excluded_leaves_alone(
        self, options: dict[str, Any]
    ) -> None:
        stream = {"a": jnp.array([[3.0]]), "b": jnp.array([[4.0]])}
        got = replay(adagc_jax.clip_by_value(1.0, **options), stream)
        assert_close(got.emitted, {"a": np.array([[1.0]]), "b": np.array([[4.0]])})


def is_kernel(path: Any, leaf: Any) -> bool:
    del leaf
    return path[0].key == "kernel"


class Pair(NamedTuple):
    w: Any
    b: Any


class TestTrees:
    @pytest.mark.parametrize("name", ["adagc", "agc", "zclip"])
    def test_containers_change_nothing(self, name: str) -> None:
        clip, stream = method(name), noise(8)
        params = ones_like_first(stream)
        want = replay(clip, stream, params)

        def build(tree: Any) -> Any:
            return [{}, Pair(tree["a"], ({"x": None}, [tree["b"]])), (), None]

        got = replay(clip, build(stream), build(params))
        assert jax.tree.structure(got.emitted) == jax.tree.structure(build(stream))
        for x, y in zip(*map(jax.tree.leaves, (got, want)), strict=True):
            np.testing.assert_array_equal(x, y)
        metrics = clip_metrics(jax.tree.map(lambda x: x[-1], got.states), level="all")
        assert "clip/1/w/norm_before" in metrics
        assert "clip/1/b/1/0/norm_before" in metrics

    def test_none_may_come_and_go(self) -> None:
        """A state knows its tensors by path, and None is no tensor."""
        clip: Any = adagc_jax.tensor_gc(1.0)
        state = clip.init({"a": jnp.ones(2), "n": None})
        emitted, _ = clip.update({"a": jnp.array([3.0, 4.0])}, state)
        assert_close(emitted, {"a": np.array([0.6, 0.8])})

    @pytest.mark.parametrize("name", ["adagc", "agc"])
    def test_scalars_of_every_kind(self, name: str) -> None:
        """0-d arrays, Python and NumPy numbers are tensors of one element."""
        clip = METHODS[name]()
        grads = {"p": 3.0, "z": jnp.array(4.0), "n": np.float32(0.0), "k": 7, "f": True}
        arrays = {k: jnp.asarray(v) for k, v in grads.items()}
        ones = {k: jnp.ones(()) for k in grads}
        got, state = clip.update(grads, clip.init(grads), ones)
        want, _ = clip.update(arrays, clip.init(arrays), ones)
        assert {k: float(v) for k, v in got.items()} == {
            k: float(v) for k, v in want.items()
        }
        # Numbers that are not inexact are no gradients.
        assert got["k"] == 7
        assert got["f"] is True
        assert clip_metrics(state, level="all")["clip/p/norm_before"] == 3.0

    @pytest.mark.parametrize("name", ["adagc", "agc_tensor", "zclip"])
    def test_complex_leaf_is_clipped_like_its_two_real_parts(self, name: str) -> None:
        rng = np.random.default_rng(0)
        parts = rng.normal(size=(8, 5, 2)).astype(np.float32)
        parts[6] *= 100.0
        half = {"z": jnp.full((5, 2), np.float32(np.sqrt(0.5)))}
        want = replay(method(name), {"z": jnp.asarray(parts)}, half).emitted["z"]
        both = jnp.asarray(parts[..., 0] + 1j * parts[..., 1])
        ones = {"z": jnp.ones((5,), jnp.complex64)}
        got = replay(method(name), {"z": both}, ones).emitted["z"]
        assert got.dtype == np.complex64
        assert norms_of(want)[6] < 0.1 * norms_of(parts)[6]
        np.testing.assert_allclose(got.real, want[..., 0], rtol=1e-5)
        np.testing.assert_allclose(got.imag, want[..., 1], rtol=1e-5)

    @pytest.mark.parametrize("tree", [{}, None, {"i": 7, "z": np.zeros((0, 2))}])
    @pytest.mark.parametrize("name", ["adagc", "agc", "global_gc", "zclip"])
    def test_metrics_of_a_tree_without_gradients(self, name: str, tree: Any) -> None:
        clip = METHODS[name]()
        _, state = clip.update(tree, clip.init(tree), tree)
        metrics = clip_metrics(state, level="all")
        assert metrics["clip/norm_before"] == 0.0
        assert metrics["clip/nonfinite"] == 0
        assert metrics["clip/fraction_clipped"] == 0.0
        assert metrics["clip/step"] == 1

    @pytest.mark.parametrize("name", ["adagc", "agc"])
    def test_float64_emits_like_float32(self, name: str) -> None:
        stream = jax.tree.map(lambda x: x.astype(jnp.float32), noise(8))
        params = ones_like_first(stream)
        want = replay(method(name), stream, params)
        with jax.enable_x64(True):
            wide, ones = (
                jax.tree.map(lambda x: jnp.asarray(np.asarray(x), jnp.float64), tree)
                for tree in (stream, params)
            )
            got = replay(method(name), wide, ones)
        assert {x.dtype for x in jax.tree.leaves(got.emitted)} == {np.dtype("float64")}
        assert_close(got.emitted, want.emitted, rtol=1e-5)
        assert_close(got.states.stages, want.states.stages, rtol=1e-5)
        dtypes = [[x.dtype for x in jax.tree.leaves(r.states)] for r in (got, want)]
        assert dtypes[0] == dtypes[1]


class TestShards:
    @pytest.mark.parametrize(
        ("name", "spec"),
        [
            ("adagc", P(None, "x")),
            ("adagc", P(("x", "y"))),
            ("agc", P("x")),
            ("zclip", P(("x", "y"))),
            ("stacked", P("x")),
        ],
        ids=str,
    )
    def test_sharded_equals_one_device(self, name: str, spec: P) -> None:
        """Norms of whole tensors, one decision: also with a NaN on one shard only."""
        clip = sharded_methods()[name]
        rng = np.random.default_rng(0)
        stream = {
            "a": rng.normal(size=(9, 16, 8)).astype(np.float32),
            "b": rng.normal(size=(9, 5)).astype(np.float32),
        }
        stream["a"][5] *= 50.0
        stream["a"][6, 3, 1] = np.nan
        params = ones_like_first(stream)
        here = jax.tree.map(jnp.asarray, stream)
        want_emitted, want = replay_as_users(clip, here, params)

        mesh = Mesh(np.array(jax.devices()[:8]).reshape(4, 2), ("x", "y"))
        over = NamedSharding(mesh, P(None, *spec))
        everywhere = NamedSharding(mesh, P())
        placed = {
            "a": jax.device_put(stream["a"], over),
            "b": jax.device_put(stream["b"], everywhere),
        }
        params = {
            "a": jax.device_put(params["a"], NamedSharding(mesh, spec)),
            "b": jax.device_put(params["b"], everywhere),
        }
        emitted, states = replay_as_users(clip, placed, params)
        assert emitted["a"].sharding.is_equivalent_to(over, 3)
        assert_close(emitted, want_emitted)
        assert_close(
            (states.stages, states.clip_step),
            (want.stages, want.clip_step),
        )
        for x, y in zip(
            *(jax.tree.leaves(s.metrics.nonfinite) for s in (states, want)),
            strict=True,
        ):
            np.testing.assert_array_equal(x, y)
        for leaf in jax.tree.leaves(states.stages):
            copies = [np.asarray(s.data) for s in leaf.addressable_shards]
            if all(copy.shape == leaf.shape for copy in copies):
                for copy in copies[1:]:
                    np.testing.assert_array_equal(copy, copies[0])


@functools.cache
def sharded_methods() -> dict[str, Any]:
    names = ("adagc", "agc", "zclip")
    return {name: METHODS[name]() for name in names} | {
        "stacked": METHODS["adagc"](groups=stacked({"a": 0}))
    }
