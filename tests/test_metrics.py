"""Metrics by name: of every group one, from any state, in and outside of a program."""

import contextlib
import functools
import re
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings, strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from streams import of_norms, replay

import adagc_jax as aj
from adagc_jax.layout import Layout
from adagc_jax.names import leaf_names, names_in_parts
from adagc_jax.readings import read

PER_TENSOR = {
    "norm_before",
    "norm_after",
    "scale",
    "clip_rate",
    "consecutive_clips",
    "active",
    "nonfinite",
}
SEGMENTS = ["layers", "Layer", "q", "0", "1", "experts", "moe", "q[0]", "q[1]", "q~1"]


def layout(
    *leaves: tuple[str, tuple[int, ...], tuple[int, ...]], **rest: Any
) -> Layout:
    paths, axes, shapes = zip(*leaves, strict=True) if leaves else ((), (), ())
    return Layout(paths=paths, axes=axes, shapes=shapes, **rest)


@st.composite
def layouts(draw: Any) -> Layout:
    leaves = []
    for _ in range(draw(st.integers(0, 6))):
        path = "/".join(draw(st.lists(st.sampled_from(SEGMENTS), max_size=4)))
        shape = tuple(draw(st.lists(st.integers(1, 3), max_size=3)))
        leaves.append((path, tuple(range(len(shape))), shape))
    return layout(*leaves)


class TestNames:
    @pytest.mark.parametrize(
        ("path", "index", "name"),
        [
            ("layers/attn/q", (3,), "layers/3/attn/q"),
            ("layers/moe/experts/w", (2, 5), "layers/2/moe/experts/5/w"),
            (
                "params/Layers/self_attention/k",
                (3,),
                "params/Layers/3/self_attention/k",
            ),
            ("decoder/moe_layers/MoeBlock_0/wi", (1, 2), "*/1/MoeBlock_0/2/wi"),
            ("layers/block/experts/w", (1, 2), "layers/1/block/experts/2/w"),
            ("layers/block/w", (1,), "layers/1/block/w"),
            ("stages/layers/w", (1, 2), "stages/1/layers/2/w"),
            ("layers/3/experts/w", (1,), "layers/3/experts/1/w"),
            ("layers/w", (1, 2), "layers/1/w/2"),
            ("ScanBlock_0/w", (1,), "ScanBlock_0/1/w"),
            ("moe/experts/w", (1,), "moe/experts/1/w"),
            ("layers_0/w", (1,), "layers_0/w/1"),
            ("players/w", (1,), "players/w/1"),
            ("q", (3,), "q/3"),
            ("", (3,), "array/3"),
            ("", (), "array"),
        ],
    )
    def test_a_slice_is_named_as_if_it_were_listed(
        self, path: str, index: tuple[int, ...], name: str
    ) -> None:
        shape = tuple(i + 1 for i in index)
        (names,) = leaf_names(layout((path, tuple(range(len(index))), shape)))
        assert names[-1] == name.replace("*", "decoder/moe_layers")

    def test_layers_on_axis_1_keep_their_place(self) -> None:
        """MaxText: kernels ``[E, L, ...]`` beside ``[d, L]``."""
        leaves = [("layers/norm", (1,), (2,)), ("layers/experts/w", (0, 1), (3, 2))]
        _, names = leaf_names(layout(*leaves))
        assert names[1] == "layers/1/experts/0/w"
        assert names[-1] == "layers/1/experts/2/w"
        (alone,) = leaf_names(layout(leaves[1]))
        assert alone[1] == "layers/0/experts/1/w"

    @given(layouts(), layouts())
    @settings(max_examples=80, deadline=None, derandomize=True)
    def test_one_name_for_each_group_and_no_name_twice(
        self, one: Layout, two: Layout
    ) -> None:
        named = names_in_parts([one, two])
        assert [len(names) for names in named] == [
            sum(int(np.prod(shape)) for shape in part.shapes) for part in (one, two)
        ]
        every = [name for names in named for name in names]
        assert len(set(every)) == len(every)
        assert all(every)

    def test_what_collides_is_told_apart(self) -> None:
        leaves = [("layers/1/q", (), ()), ("layers/q", (0,), (2,)), ("k", (0,), (1,))]
        assert leaf_names(layout(*leaves)) == [
            ["layers/1/q"],
            ["layers/q[0]", "layers/q[1]"],
            ["k/0"],
        ]
        same = [("a", (), ()), ("a~1", (), ()), ("a", (), ())]
        assert leaf_names(layout(*same)) == [["a"], ["a~1"], ["a~2"]]

    def test_shards_are_not_layers(self) -> None:
        shards = layout(("layers/q", (0, 2), (2, 1)), shards=("P('x', 'y')",))
        assert leaf_names(shards) == [["layers/q[0,0]", "layers/q[1,0]"]]

    def test_stacked_and_listed_models_have_the_same_names(self) -> None:
        listed = {
            "layers": [{"q": jnp.ones(2), "moe": {"experts": [{"w": jnp.ones(3)}] * 2}}]
            * 3,
            "head": jnp.ones(2),
        }
        stacked = {
            "layers": {
                "q": jnp.ones((3, 2)),
                "moe": {"experts": {"w": jnp.ones((3, 2, 3))}},
            },
            "head": jnp.ones(2),
        }
        groups = aj.stacked({"experts/": (0, 1), "layers/": 0})
        names = aj.group_names(aj.adagc(groups=groups).init(stacked))
        assert sorted(names) == sorted(aj.group_names(aj.adagc().init(listed)))

    def test_numbers_go_with_their_names(self) -> None:
        norms = np.arange(1.0, 7.0).reshape(3, 2)
        grads = {
            "z": jnp.array([7.0]),
            "layers": {
                "experts": jnp.asarray(norms)[:, :, None],
                "a": jnp.array([8.0]),
            },
        }
        grads = jax.tree.map(lambda x: x.astype(jnp.float32), grads)
        clip = aj.tensor_gc(1.0, groups=aj.stacked({"experts": (0, 1)}))
        state = jax.jit(clip.update)(grads, clip.init(grads))[1]
        got = aj.clip_metrics(state, level="all")
        for (layer, expert), norm in np.ndenumerate(norms):
            name = f"clip/layers/{layer}/experts/{expert}"
            assert got[f"{name}/norm_before"] == norm
            assert got[f"{name}/scale"] == np.float32(1.0) / np.float32(norm)
        assert got["clip/z/norm_before"] == 7.0
        assert got["clip/layers/a/norm_before"] == 8.0
        names = aj.group_names(state)
        keys = {k.removeprefix("clip/") for k in got if k.count("/") > 1}
        assert keys == {f"{name}/{field}" for name in names for field in PER_TENSOR}


STREAM = {
    "a": of_norms([1.0, 1.0, 9.0, 9.0, 9.0], (4,)),
    "b": of_norms([1.0, 1.0, 9.0, 1.0, 1.0], (4,)),
    "c": of_norms([2.0, 2.0, 2.0, np.nan, 2.0], (4,)),
}
FIRST = jax.tree.map(lambda x: x[0], STREAM)


@functools.cache
def last_state() -> Any:
    clip = aj.adagc(lambda_rel=1.05, lambda_abs=1e9, warmup_steps=2)
    return jax.tree.map(lambda x: x[-1], replay(clip, STREAM).states)


class TestLevels:
    def test_totals_only_unless_asked(self) -> None:
        metrics = aj.clip_metrics(last_state())
        assert all(key.count("/") == 1 for key in metrics)
        assert metrics["clip/norm_before"] == np.float32(np.sqrt(81.0 + 1.0 + 4.0))
        assert metrics["clip/nonfinite"] == 1
        assert metrics["clip/step"] == 5
        np.testing.assert_allclose(metrics["clip/clip_rate"], 4 / 14, rtol=1e-6)

    def test_every_tensor_has_every_number(self) -> None:
        metrics = aj.clip_metrics(last_state(), level="all", prefix="my")
        for name in "abc":
            fields = {k.split("/")[2] for k in metrics if k.startswith(f"my/{name}/")}
            assert fields >= PER_TENSOR | {"gamma"}
        assert metrics["my/a/consecutive_clips"] == 3
        assert metrics["my/b/consecutive_clips"] == 0
        assert metrics["my/c/nonfinite"] == 1
        assert metrics["my/c/active"] == 4

    @pytest.mark.parametrize(
        ("by", "order"),
        [
            ("clip_rate", "abc"),
            ("consecutive_clips", "acb"),
            ("norm_before", "acb"),
            ("scale", "acb"),
            ("nonfinite", "cab"),
        ],
    )
    def test_the_worst_in_and_outside_of_a_program(self, by: str, order: str) -> None:
        state = last_state()
        names = aj.group_names(state)
        everything = aj.clip_metrics(state, level="all")
        worst = functools.partial(aj.clip_metrics, level="worst", worst=7, by=by)
        metrics = worst(state)
        indices = [int(metrics[f"clip/worst/{rank}/index"]) for rank in range(3)]
        assert "".join(names[index] for index in indices) == order
        assert "clip/worst/3/index" not in metrics
        for rank, name in enumerate(order):
            for field in (*PER_TENSOR, "gamma"):
                got = metrics[f"clip/worst/{rank}/{field}"]
                assert got == everything[f"clip/{name}/{field}"]
        traced = jax.jit(worst)(state)
        assert traced.keys() == metrics.keys()
        for key, value in metrics.items():
            np.testing.assert_allclose(traced[key], value, rtol=1e-6, err_msg=key)
            assert traced[key].dtype == value.dtype, key

    def test_nan_is_the_worst_norm(self) -> None:
        metrics = last_state().metrics
        broken = metrics._replace(norm_before=np.array([5, np.nan, 7], np.float32))
        state = last_state()._replace(metrics=broken)
        got = aj.clip_metrics(state, level="worst", worst=2, by="norm_before")
        assert [int(got[f"clip/worst/{rank}/index"]) for rank in (0, 1)] == [1, 2]

    def test_bad_arguments(self) -> None:
        for arguments, word in (
            ({"level": "some"}, "level"),
            ({"level": "worst", "worst": 0}, "worst"),
            ({"level": "worst", "by": "beauty"}, "by"),
            ({"prefix": 3}, "prefix must be text or None, got 3"),
        ):
            with pytest.raises(ValueError, match=word):
                aj.clip_metrics(last_state(), **arguments)

    @pytest.mark.parametrize("prefix", ["", None])
    def test_without_a_prefix_no_name_begins_with_a_slash(
        self, prefix: str | None
    ) -> None:
        names = aj.clip_metrics(last_state(), level="all", prefix=prefix).keys()
        assert {"norm_before", "a/scale"} <= names
        assert {f"clip/{n}" for n in names} == aj.clip_metrics(
            last_state(), level="all"
        ).keys()


def inside(kind: str) -> Any:
    """An optimizer with a clipper of FIRST's leaves somewhere in it."""
    clip = aj.adagc(warmup_steps=1)
    if kind == "chain":
        return optax.chain(optax.identity(), optax.chain(clip, optax.adamw(1e-3)))
    if kind == "masked":
        return optax.masked(clip, {"a": True, "b": True, "c": False})
    if kind == "partition":
        labels = {"a": "x", "b": "y", "c": "x"}
        return optax.partition({"x": clip, "y": aj.tensor_gc(1.0)}, labels)
    if kind == "partition without a leaf":
        labels = dict.fromkeys("abc", "x")
        return optax.partition({"x": clip, "y": aj.tensor_gc(1.0)}, labels)
    if kind == "MultiSteps":
        return optax.MultiSteps(clip, 2).gradient_transformation()
    if kind == "inject_hyperparams":
        return optax.inject_hyperparams(
            aj.adagc, static_args=("warmup_steps",), hyperparam_dtype=jnp.float32
        )(beta=0.9, warmup_steps=1)
    return aj.guard(optax.chain(clip, optax.sgd(0.1)))


@pytest.mark.usefixtures("optax_promotion")
@pytest.mark.parametrize(
    "kind",
    [
        "chain",
        "masked",
        "partition",
        "partition without a leaf",
        "MultiSteps",
        "inject_hyperparams",
        "guard",
    ],
)
def test_found_at_any_depth(kind: str) -> None:
    state = inside(kind).init(FIRST)
    names = ("a", "b") if kind == "masked" else ("a", "b", "c")
    for params in (None, FIRST):
        assert sorted(aj.group_names(state, params)) == list(names)
        metrics = aj.clip_metrics(state, params, level="all")
        assert {k.split("/")[1] for k in metrics if k.count("/") == 2} == set(names)
        ranked = aj.clip_metrics(state, params, level="worst", worst=2)
        assert ranked["clip/worst/1/norm_before"] == 0.0
    # gamma is not a number of every tensor here, and so the worst do not have it.
    assert ("clip/worst/0/gamma" in ranked) == (not kind.startswith("partition"))


def test_found_in_an_nnx_optimizer() -> None:
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, aj.adagc(), wrt=nnx.Param)
    assert aj.group_names(optimizer.opt_state) == ("bias", "kernel")
    assert "clip/kernel/gamma" in aj.clip_metrics(optimizer.opt_state, level="all")


@pytest.mark.usefixtures("optax_promotion")
def test_numbers_of_an_nnx_optimizer_stay_what_they_were() -> None:
    model = nnx.Linear(2, 3, rngs=nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, aj.adagc(), wrt=nnx.Param)

    def step(model: Any, optimizer: Any) -> dict[str, Any]:
        grads = jax.tree.map(jnp.ones_like, nnx.state(model, nnx.Param))
        optimizer.update(model, grads)
        return aj.clip_metrics(optimizer.opt_state, level="all")

    first, second = step(model, optimizer), step(model, optimizer)
    compiled = nnx.jit(step)
    third, fourth = compiled(model, optimizer), compiled(model, optimizer)
    buffered = [first, second, third, fourth]
    assert [int(metrics["clip/step"]) for metrics in buffered] == [1, 2, 3, 4]
    for metrics in buffered:
        for name, value in metrics.items():
            assert isinstance(value, jax.Array | np.generic), (name, type(value))


class TestSeveralClippers:
    def test_overlapping_ones_are_numbered(self) -> None:
        state = optax.chain(aj.tensor_gc(1.0), aj.adagc()).init(FIRST)
        assert aj.group_names(state) == tuple(f"{i}/{n}" for i in (0, 1) for n in "abc")
        metrics = aj.clip_metrics(state, level="worst", worst=1)
        assert metrics["clip/0/worst/0/index"] == 0
        assert metrics["clip/1/worst/0/index"] == 3
        assert "clip/1/worst/0/gamma" in metrics

    def test_no_number_hides_another(self) -> None:
        whole = functools.partial(aj.adagc, groups=aj.whole_tree())
        labels = {"a": "x", "b": "y", "c": "y"}
        state = optax.partition({"x": whole(), "y": whole()}, labels).init(FIRST)
        metrics = aj.clip_metrics(state)
        assert {"clip/gamma_0", "clip/gamma_1"} <= metrics.keys()
        rule = aj.EmaRatio(1.05, 0.9, 1.0, warmup_steps=1)
        twice = aj.clip_by_rule(rule, rule).init(FIRST)
        metrics = aj.clip_metrics(twice, level="all")
        assert {"clip/a/gamma", "clip/a/gamma_1"} <= metrics.keys()

    def test_names_are_unique_over_all_of_them(self) -> None:
        params = {"layers": {"q": jnp.ones((2, 3)), "1": {"q": jnp.ones(3)}}}
        labels = {"layers": {"q": "stacked", "1": {"q": "listed"}}}
        clips = {"stacked": aj.adagc(groups=aj.stacked(0)), "listed": aj.adagc()}
        names = aj.group_names(optax.partition(clips, labels).init(params))
        assert sorted(names) == ["layers/1/q", "layers/q[0]", "layers/q[1]"]

    def test_a_path_that_one_clipper_has_twice_makes_no_second(self) -> None:
        params = {"a/b": jnp.ones(2), "a": {"b": jnp.ones(3)}}
        state = aj.tensor_gc(1.0).init(params)
        assert sorted(aj.group_names(state)) == ["a/b", "a/b~1"]
        metrics = aj.clip_metrics(state, level="all")
        assert {"clip/step", "clip/a/b/scale", "clip/a/b~1/scale"} <= metrics.keys()


class TestOutsideOfPrograms:
    def test_numbers_are_numpys_and_come_fast(self) -> None:
        params = {f"layers/{i}/w": np.ones((1,), np.float32) for i in range(300)}
        state = aj.adagc().init(params)
        seconds = []
        for given_state in (state, jax.device_get(state)) * 3:
            started = time.perf_counter()
            metrics = aj.clip_metrics(given_state, level="all")
            seconds.append(time.perf_counter() - started)
            assert len(metrics) > 2700
            assert all(isinstance(value, np.generic) for value in metrics.values())
        # A few milliseconds; one operation of jax for each number took half a second.
        assert min(seconds) < 0.1

    def test_totals_equal_those_of_a_program(self) -> None:
        outside = aj.clip_metrics(last_state())
        inside = jax.jit(aj.clip_metrics)(last_state())
        assert outside.keys() == inside.keys()
        for key, value in outside.items():
            assert value.dtype == inside[key].dtype, key
            np.testing.assert_allclose(value, inside[key], rtol=1e-6, err_msg=key)

    def test_huge_norms_do_not_warn(self) -> None:
        state = last_state()
        huge = state.metrics._replace(norm_before=np.full(3, 3e19, np.float32))
        metrics = aj.clip_metrics(state._replace(metrics=huge))
        assert metrics["clip/norm_before"] == np.inf

    def test_the_norm_that_rules_saw_keeps_its_bits(self) -> None:
        state = last_state()
        seen = np.float32(1e-30)  # its square is zero
        state = state._replace(metrics=state.metrics._replace(norm_seen=seen))
        assert aj.clip_metrics(state)["clip/norm_seen"] == seen
        assert jax.jit(aj.clip_metrics)(state)["clip/norm_seen"] == seen

    def test_states_of_an_ensemble_are_refused(self) -> None:
        clip = aj.tensor_gc(1.0)
        states = jax.vmap(clip.init)(jax.tree.map(lambda x: jnp.stack([x, x]), FIRST))
        with pytest.raises(ValueError, match=r"\(2, 3\).*vmap"):
            aj.clip_metrics(states)
        metrics = jax.jit(jax.vmap(aj.clip_metrics))(states)
        assert metrics["clip/min_scale"].shape == (2,)

    def test_a_bare_array_has_a_name(self) -> None:
        metrics = aj.clip_metrics(aj.adagc().init(jnp.ones(3)), level="all")
        assert "clip/array/norm_before" in metrics


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
def test_sharded_numbers_are_gathered_whole(kind: AxisType) -> None:
    """Scalar by scalar it was a collective for each of them."""
    # Without a mesh in context there is no name for "everywhere".
    explicit = kind == AxisType.Explicit
    mesh = jax.make_mesh((8,), ("x",), axis_types=(kind,))
    shapes = {"layers": {"experts": (2, 8, 2)}, "moe": (8, 2), "head": (3,)}
    specs = {"layers": {"experts": P(None, "x")}, "moe": P("x"), "head": P()}
    where = jax.tree.map(functools.partial(NamedSharding, mesh), specs, is_leaf=is_spec)
    ones = functools.partial(np.ones, dtype=np.float32)
    grads = jax.tree.map(ones, shapes, is_leaf=lambda x: isinstance(x, tuple))
    clip = aj.tensor_gc(1.0, groups=aj.stacked({"layers": (0, 1), "moe": 0}))

    def step(grads: Any, state: Any) -> Any:
        _, state = clip.update(grads, state)
        return aj.clip_metrics(state, level="all")

    with jax.set_mesh(mesh) if explicit else contextlib.nullcontext():
        grads = jax.device_put(grads, where)
        state = jax.jit(clip.init)(grads)
        compiled = jax.jit(step).lower(grads, state).compile()
        got = compiled(grads, state)
    kinds = re.findall(
        r" (all-gather|all-reduce|all-to-all|collective-permute)(?:-start)?\(",
        compiled.as_text(),
    )
    assert set(kinds) <= {"all-gather"}
    assert len(kinds) <= 4  # two arrays, each once for either dtype
    assert got["clip/layers/1/experts/7/norm_before"] == np.float32(np.sqrt(2.0))
    assert got["clip/moe/7/norm_before"] == np.float32(np.sqrt(2.0))
    assert got["clip/head/norm_before"] == np.float32(np.sqrt(3.0))


def is_spec(value: Any) -> bool:
    return isinstance(value, P)


def test_names_need_no_values() -> None:
    abstract = jax.eval_shape(aj.adagc().init, FIRST)
    assert aj.group_names(abstract) == ("a", "b", "c")
    (section,) = read(last_state())
    assert section.names == ("a", "b", "c")


def test_an_abstract_state_is_refused_with_what_to_do() -> None:
    abstract = jax.eval_shape(aj.adagc().init, FIRST)
    with pytest.raises(ValueError, match="opt_state is abstract"):
        aj.clip_metrics(abstract)
    with pytest.raises(ValueError, match="opt_state is abstract"):
        aj.clip_report(abstract)
    shapes = jax.eval_shape(aj.clip_metrics, abstract)
    assert shapes["clip/step"].dtype == jnp.int32
