"""Groups read off Linen boxes, NNX states and scanned trees."""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx
from jax.experimental.layout import Format, Layout

import adagc_jax as aj
from adagc_jax import stacked_from_metadata, stacked_scan

LAYERS, EXPERTS, WIDTH, HIDDEN = 4, 3, 8, 6
named = nn.with_partitioning
dense_init = nn.initializers.lecun_normal()


class Expert(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        init = nn.with_logical_partitioning(dense_init, ("embed", "mlp"))
        return nn.Dense(WIDTH, kernel_init=init, use_bias=False)(x)


class Layer(nn.Module):
    """Named kernels; a bias without a name, as Flax's own layers have by default."""

    experts: bool = False

    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        up = nn.Dense(
            HIDDEN, kernel_init=named(dense_init, ("embed", "mlp")), name="up"
        )
        down = nn.Dense(
            WIDTH,
            kernel_init=named(dense_init, ("mlp", "embed")),
            use_bias=False,
            name="down",
        )
        x = x + down(jnp.tanh(up(x)))
        if self.experts:
            every = nn.vmap(
                Expert,
                variable_axes={"params": 0},
                split_rngs={"params": True},
                in_axes=None,
                axis_size=EXPERTS,
                metadata_params={nn.PARTITION_NAME: "experts"},
            )
            x = x + jnp.mean(every(name="moe")(x), axis=0)
        return x, None


class Scanned(nn.Module):
    axis: int
    experts: bool = False

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.Dense(WIDTH, name="embed")(x)
        scan = nn.scan(
            Layer,
            variable_axes={"params": self.axis},
            split_rngs={"params": True},
            length=LAYERS,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        return scan(experts=self.experts, name="layers")(x, None)[0]


def linen_params(axis: int, *, experts: bool = False) -> Any:
    model = Scanned(axis, experts)
    return jax.eval_shape(model.init, jax.random.key(0), jnp.ones((2, WIDTH)))["params"]


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        # Names without a mesh: nothing is placed when the variable is made.
        def init(*names: str) -> Any:
            return nnx.with_partitioning(dense_init, names, eager_sharding=False)

        self.up = nnx.Linear(WIDTH, HIDDEN, kernel_init=init("embed", "mlp"), rngs=rngs)
        self.down = nnx.Linear(
            HIDDEN, WIDTH, use_bias=False, kernel_init=init("mlp", "embed"), rngs=rngs
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(jnp.tanh(self.up(x)))


class NnxModel(nnx.Module):
    def __init__(self, axis: int, rngs: nnx.Rngs, name: str = "layers"):
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(
            in_axes=0,
            out_axes=axis,
            transform_metadata={nnx.PARTITION_NAME: name},
        )
        def make(rngs: nnx.Rngs) -> Block:
            return Block(rngs)

        self.embed = nnx.Linear(WIDTH, WIDTH, rngs=rngs)
        self.layers = make(rngs)
        self.axis, self.name = axis, name

    def __call__(self, x: jax.Array) -> jax.Array:
        @nnx.scan(
            in_axes=(nnx.Carry, self.axis),
            out_axes=nnx.Carry,
            transform_metadata={nnx.PARTITION_NAME: self.name},
        )
        def through(x: jax.Array, layer: Block) -> jax.Array:
            return layer(x)

        return through(self.embed(x), self.layers)


@functools.cache
def nnx_model(axis: int, name: str = "layers") -> tuple[Any, Any]:
    """Structure and abstract state: metadata are there without any compilation."""
    model = nnx.eval_shape(lambda: NnxModel(axis, nnx.Rngs(0), name))
    return nnx.split(model, nnx.Param)


def filled(tree: Any) -> Any:
    """Arrays of some values for an abstract tree."""
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda x: jnp.asarray(0.5 * rng.normal(size=x.shape), x.dtype), tree
    )


def found(groups: aj.Groups) -> dict[str, tuple[int, ...]]:
    return dict(groups.stack.axes)


class TestLinen:
    @pytest.mark.parametrize("axis", [0, 1])
    def test_the_axis_named_by_the_scan_is_kept(self, axis: int) -> None:
        groups = stacked_from_metadata(linen_params(axis), unnamed={"layers/": axis})
        assert found(groups) == {
            "embed/bias": (),
            "embed/kernel": (),
            "layers/down/kernel": (axis,),
            "layers/up/bias": (axis,),
            "layers/up/kernel": (axis,),
        }

    def test_experts_inside_layers(self) -> None:
        params = linen_params(1, experts=True)
        moe = params["layers"]["moe"]["Dense_0"]["kernel"]
        assert moe.names == ("experts", "layers", "embed", "mlp")
        groups = stacked_from_metadata(params, unnamed={"layers/": 1})
        assert found(groups)["layers/moe/Dense_0/kernel"] == (0, 1)
        some = stacked_from_metadata(params, ["experts"], unnamed={"bias": None})
        assert found(some)["layers/moe/Dense_0/kernel"] == (0,)
        assert found(some)["layers/up/kernel"] == ()

    def test_boxed_unboxed_and_abstract_trees_are_grouped_alike(self) -> None:
        abstract = linen_params(1, experts=True)
        boxed = filled(abstract)
        groups = stacked_from_metadata(boxed, unnamed={"layers/": 1})
        assert groups == stacked_from_metadata(abstract, unnamed={"layers/": 1})
        assert hash(groups) == hash(stacked_from_metadata(boxed, unnamed={"lay": 1}))
        assert "('layers/up/kernel', (1,))" in repr(groups)
        clip, plain = aj.adagc(groups=groups), nn.meta.unbox(boxed)
        init = jax.jit(clip.init)
        states = [init(boxed), jax.eval_shape(clip.init, abstract), init(plain)]
        assert states[0].labels.layouts == states[1].labels.layouts
        assert states[0].labels.layouts == states[2].labels.layouts
        assert states[0].stages[0].rule.gamma[-1].shape == (LAYERS,)
        emitted, _ = jax.eval_shape(clip.update, boxed, states[2])
        assert jax.tree.structure(emitted) == jax.tree.structure(boxed)

    def test_masks_and_partitions_may_leave_leaves_out(self) -> None:
        params = nn.meta.unbox(linen_params(1))
        groups = stacked_from_metadata(linen_params(1), unnamed={"layers/": 1})
        clip = aj.adagc(groups=groups, exclude=["bias", "up"])
        state = jax.eval_shape(clip.init, params)
        assert state.labels.layouts[0].paths == ("embed/kernel", "layers/down/kernel")
        # optax hands each label a tree in which the others' leaves are missing.
        labels = {"embed": "rest", "layers": "stack"}
        parts = {"stack": aj.adagc(groups=groups), "rest": aj.agc()}
        state = jax.eval_shape(optax.partition(parts, labels).init, params)
        stack = state.inner_states["stack"].inner_state
        assert all(path.startswith("layers/") for path in stack.labels.layouts[0].paths)


class TestNnx:
    @pytest.mark.parametrize("axis", [0, 1])
    def test_the_axis_named_by_the_transform_is_kept(self, axis: int) -> None:
        _, state = nnx_model(axis)
        groups = stacked_from_metadata(state, unnamed={"layers/": axis})
        assert found(groups) == {
            "embed/bias": (),
            "embed/kernel": (),
            "layers/down/kernel": (axis,),
            "layers/up/bias": (axis,),
            "layers/up/kernel": (axis,),
        }
        plain = nnx.to_pure_dict(state)
        assert aj.describe(groups, plain) == aj.describe(groups, state)

    def test_a_name_of_your_own(self) -> None:
        _, state = nnx_model(0, "cycles")
        groups = stacked_from_metadata(state, ["cycles"], unnamed={"layers/": 0})
        assert found(groups)["layers/up/kernel"] == (0,)

    @pytest.mark.parametrize("entry", ["out_sharding", "sharding_names", "sharding"])
    @pytest.mark.parametrize("kind", ["spec", "sharding", "format"])
    def test_entries_of_other_releases_and_kinds(self, entry: str, kind: str) -> None:
        mesh = jax.make_mesh((1, 1), ("layers", "x"))
        spec = jax.P(("layers", "x"), None)
        named_sharding = jax.sharding.NamedSharding(mesh, spec)
        names = {
            "spec": spec,
            "sharding": named_sharding,
            "format": Format(Layout((0, 1)), named_sharding),
        }[kind]

        class Variable:
            """What a state of any release holds: a node with metadata."""

            def __init__(self, value: Any):
                self.value = value

            def get_metadata(self) -> dict[str, Any]:
                return {entry: names}

        jax.tree_util.register_pytree_with_keys(
            Variable,
            lambda v: (((jax.tree_util.GetAttrKey("value"), v.value),), None),
            lambda _, children: Variable(*children),
        )
        assert found(stacked_from_metadata({"w": Variable(jnp.ones((4, 2)))})) == {
            "w": (0,)
        }

    def test_the_optimizer_keeps_a_reference_per_layer(self) -> None:
        graph, state = nnx_model(0)
        model = nnx.merge(graph, filled(state))
        groups = stacked_from_metadata(state, unnamed={"layers/": 0})
        optimizer = nnx.Optimizer(
            model, optax.chain(aj.adagc(groups=groups), optax.sgd(0.1)), wrt=nnx.Param
        )

        @nnx.jit
        def step(model: NnxModel, optimizer: nnx.Optimizer) -> None:
            grads = nnx.grad(lambda m: jnp.mean(m(jnp.ones((2, WIDTH))) ** 2))(model)
            optimizer.update(model, grads)

        step(model, optimizer)
        step(model, optimizer)
        metrics = aj.clip_metrics(optimizer.opt_state, level="all")
        step, *_ = jax.tree.leaves(optimizer.opt_state)
        assert int(step) == 2
        for layer in range(LAYERS):
            assert metrics[f"clip/layers/{layer}/up/kernel/gamma"] > 0.0


def unrolled(params: Any, axis: int) -> Any:
    """The same parameters with a list of layers."""
    layers = [
        jax.tree.map(lambda x, i=i: x[(slice(None),) * axis + (i,)], params["layers"])
        for i in range(LAYERS)
    ]
    return {**params, "layers": layers}


def embedded(params: Any, x: jax.Array) -> jax.Array:
    return x @ params["embed"]["kernel"] + params["embed"]["bias"][None]


def linen_losses(axis: int) -> tuple[Any, aj.Groups, Callable[..., Any], Any]:
    model = Scanned(axis)
    boxed = linen_params(axis)

    def stacked_loss(params: Any, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.square(model.apply({"params": params}, x)))

    def listed_loss(params: Any, x: jax.Array) -> jax.Array:
        y = embedded(params, x)
        for layer in params["layers"]:
            y, _ = Layer().apply({"params": layer}, y, None)
        return jnp.mean(jnp.square(y))

    groups = stacked_from_metadata(boxed, unnamed={"layers/": axis})
    return filled(nn.meta.unbox(boxed)), groups, stacked_loss, listed_loss


def nnx_losses(axis: int) -> tuple[Any, aj.Groups, Callable[..., Any], Any]:
    graph, state = nnx_model(axis)
    block = nnx.graphdef(nnx.eval_shape(lambda: Block(nnx.Rngs(0))))

    def stacked_loss(params: Any, x: jax.Array) -> jax.Array:
        full = jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves(params))
        return jnp.mean(jnp.square(nnx.merge(graph, full)(x)))

    def listed_loss(params: Any, x: jax.Array) -> jax.Array:
        y = embedded(params, x)
        for layer in params["layers"]:
            y = nnx.merge(block, nnx.State(layer))(y)
        return jnp.mean(jnp.square(y))

    groups = stacked_from_metadata(state, unnamed={"layers/": axis})
    return filled(nnx.to_pure_dict(state)), groups, stacked_loss, listed_loss


@pytest.mark.parametrize(("losses", "axis"), [(linen_losses, 1), (nnx_losses, 0)])
def test_a_scanned_model_is_clipped_like_an_unrolled_one(
    losses: Callable[[int], Any], axis: int
) -> None:
    params, groups, stacked_loss, listed_loss = losses(axis)
    options = {"warmup_steps": 2, "lambda_abs": 0.05, "beta": 0.9}
    clip, apart = aj.adagc(groups=groups, **options), aj.adagc(**options)
    state, listed_state = jax.jit(
        lambda p: (clip.init(p), apart.init(unrolled(p, axis)))
    )(params)

    @jax.jit
    def both(params: Any, x: jax.Array, state: Any, listed_state: Any) -> Any:
        grads = jax.grad(stacked_loss)(params, x)
        listed_grads = jax.grad(listed_loss)(unrolled(params, axis), x)
        return clip.update(grads, state), apart.update(listed_grads, listed_state)

    scales = []
    for step in range(6):
        x = np.random.default_rng(step).normal(size=(4, WIDTH)).astype(np.float32)
        x *= 5.0 if step == 4 else 1.0
        (got, state), (want, listed_state) = both(params, x, state, listed_state)
        got = jax.device_get(got)
        for a, b in zip(
            *map(jax.tree.leaves, (unrolled(got, axis), want)), strict=True
        ):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6 * np.abs(b).max())
        named, listed = (aj.clip_metrics(s, level="all") for s in (state, listed_state))
        for key, value in listed.items():
            np.testing.assert_allclose(named[key], value, rtol=1e-6, err_msg=key)
        assert "clip/layers/2/up/bias/gamma" in listed
        scales += [v for k, v in listed.items() if re.search(r"layers/.*/scale$", k)]
        params = jax.tree.map(lambda p, g: np.asarray(p) - 0.1 * g, params, got)
    # Not all alike: the burst is clipped, and differently in different layers.
    assert len({round(float(s), 3) for s in scales if s < 1.0}) > LAYERS


class TestErrorsOfMetadata:
    def test_a_name_on_no_axis_is_told_with_the_names_there_are(self) -> None:
        params = linen_params(0)
        with pytest.raises(ValueError, match=r"'stages'.*'embed', 'layers', 'mlp'"):
            stacked_from_metadata(params, ["layers", "stages"], {"bias": 0})
        with pytest.raises(ValueError, match=r"'experts'\. Names"):
            stacked_from_metadata(params, ["experts"])
        with pytest.raises(ValueError, match=r"names must be a sequence.*'layers'"):
            stacked_from_metadata(params, "layers")

    def test_a_tree_without_names(self) -> None:
        params = nn.meta.unbox(linen_params(0))
        with pytest.raises(ValueError, match=r"axes: none: pass the boxed variables"):
            stacked_from_metadata(params)

    def test_variables_without_names(self) -> None:
        state = nnx.state(nnx.eval_shape(lambda: nnx.Linear(2, 3, rngs=nnx.Rngs(0))))
        with pytest.raises(ValueError, match=r"made without any.*stacked_scan\(tree"):
            stacked_from_metadata(state)

    @pytest.mark.parametrize("axis", [0, 1])
    def test_an_unnamed_leaf_among_stacked_ones_is_doubtful(self, axis: int) -> None:
        suggestion = rf"unnamed=\{{'layers/up/bias': \({axis},\)\}}"
        for tree in (linen_params(axis), nnx_model(axis)[1]):
            with pytest.raises(ValueError, match=suggestion):
                stacked_from_metadata(tree)
            with pytest.raises(ValueError, match=r"unnamed: .*'layer/' matches no"):
                stacked_from_metadata(tree, unnamed={"layer/": axis})
            with pytest.raises(ValueError, match=r"unnamed: .*axis 2 is out of range"):
                stacked_from_metadata(tree, unnamed={"layers/": 2})

    def test_an_unnamed_leaf_of_another_size_or_place_is_not(self) -> None:
        boxes: dict[str, Any] = {
            "w": nn.Partitioned(jnp.ones((4, 8)), names=("layers", "mlp"))
        }
        boxes["turned"] = jnp.ones((8, 4))
        near = {"decoder": {"layers": boxes, "norm": jnp.ones((8,))}}
        far = {"encoder": {"bias": jnp.ones((4,))}}
        groups = stacked_from_metadata(near)
        assert found(groups) == {
            "decoder/layers/turned": (),
            "decoder/layers/w": (0,),
            "decoder/norm": (),
        }
        with pytest.raises(ValueError, match=r"'encoder/bias': \(0,\)"):
            stacked_from_metadata(near | far)
        groups = stacked_from_metadata(near | far, unnamed={"encoder/bias": None})
        assert found(groups)["encoder/bias"] == ()

    def test_patterns_for_no_unnamed_leaf(self) -> None:
        boxes = {"w": nn.Partitioned(jnp.ones((4, 8)), names=("layers", "mlp"))}
        with pytest.raises(ValueError, match=r"unnamed=\{'b': 0\}, but there is no"):
            stacked_from_metadata(boxes, unnamed={"b": 0})

    def test_more_names_than_axes(self) -> None:
        box = nn.Partitioned(jnp.ones((4,)), names=("layers", "mlp"))
        with pytest.raises(ValueError, match=r"'w' has the axis names .*\(4,\)"):
            stacked_from_metadata({"w": box})

    def test_a_leaf_of_another_tree_is_refused(self) -> None:
        groups = stacked_from_metadata(linen_params(0), unnamed={"layers/": 0})
        whole = {"params": nn.meta.unbox(linen_params(0))}
        with pytest.raises(ValueError, match=r"without a leaf 'params/embed/bias'"):
            aj.adagc(groups=groups).init(whole)


MAXTEXT = {
    "decoder": {
        "layers": {
            "mlp": {"wi": {"kernel": (8, 4, 16)}, "bias": (16, 4)},
            "moe": {"wo": (3, 4, 16, 8)},
            "norm": {"scale": (8, 4)},
        },
        "decoder_norm": {"scale": (8,)},
    },
    "token_embedder": {"embedding": (32, 8)},
}


def maxtext(shapes: Any = MAXTEXT) -> Any:
    return jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, jnp.float32),
        shapes,
        is_leaf=lambda s: isinstance(s, tuple),
    )


class TestScan:
    def test_a_maxtext_tree(self) -> None:
        groups = stacked_scan(maxtext(), axis=1, also={"moe/": 0})
        assert found(groups) == {
            "decoder/decoder_norm/scale": (),
            "decoder/layers/mlp/bias": (1,),
            "decoder/layers/mlp/wi/kernel": (1,),
            "decoder/layers/moe/wo": (0, 1),
            "decoder/layers/norm/scale": (1,),
            "token_embedder/embedding": (),
        }
        table = aj.describe(groups, maxtext())
        assert [row.groups for row in table.rows] == [1, 4, 4, 12, 4, 1]
        state = jax.eval_shape(aj.adagc(groups=groups).init, maxtext())
        assert [x.shape for x in state.stages[0].seen] == [
            (2,),
            (4,),
            (4,),
            (3, 4),
            (4,),
        ]

    def test_several_stacks_of_different_depth(self) -> None:
        tree = {"dense_layers": {"w": (2, 3)}, "moe_layers": {"w": (2, 5)}, "w": (3, 5)}
        groups = stacked_scan(maxtext(tree), under=("dense_layers", "moe_layers"))
        assert found(groups) == {"dense_layers/w": (1,), "moe_layers/w": (1,), "w": ()}

    def test_an_axis_counted_from_the_end(self) -> None:
        tree = maxtext({"layers": {"b": (16, 4), "c": (8, 4)}})
        assert stacked_scan(tree, axis=-1) == stacked_scan(tree, axis=1)

    def test_a_wrong_axis_is_seen_by_its_sizes(self) -> None:
        with pytest.raises(
            ValueError, match=r"axis 0 cannot be.*'layers': sizes differ"
        ):
            stacked_scan(maxtext(), axis=0)
        with pytest.raises(
            ValueError, match=r"axis 2 is out of range for 'decoder/lay"
        ):
            stacked_scan(maxtext(), axis=2)

    @pytest.mark.parametrize("axis", [(0, 1), (1,), None, True, "1"])
    def test_it_is_one_axis(self, axis: Any) -> None:
        with pytest.raises(ValueError, match=r"axis must be one int.*also="):
            stacked_scan(maxtext(), axis=axis)

    def test_stacks_of_different_depth_under_one_name(self) -> None:
        tree = maxtext(
            {n: {"layers": {"w": (2, d)}} for n, d in (("enc", 3), ("dec", 5))}
        )
        with pytest.raises(ValueError, match="one in each of") as caught:
            stacked_scan(tree)
        under = eval(str(caught.value).partition("under=")[2].rstrip("."))
        assert found(stacked_scan(tree, under=under)) == dict.fromkeys(
            ("dec/layers/w", "enc/layers/w"), (1,)
        )

    def test_a_path_with_nothing_below(self) -> None:
        for under in ("blocks", "layer", "layers/mlp/bias", "ayers"):
            with pytest.raises(ValueError, match=f"no leaf is below '{under}'.*decod"):
                stacked_scan(maxtext(), under=under)

    def test_a_list_of_layers_is_no_stack(self) -> None:
        tree = {"layers": [jnp.ones((2, 3)), jnp.ones((2, 3))]}
        with pytest.raises(ValueError, match=r"'layers/0' is in a list of layers"):
            stacked_scan(tree)

    def test_further_axes_need_a_leaf(self) -> None:
        with pytest.raises(ValueError, match=r"also: .*'MoE' matches no leaf"):
            stacked_scan(maxtext(), also={"MoE": 0})
