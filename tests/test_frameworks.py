"""On a mesh, in the frameworks' own train states: nothing to place by hand.

The clipper's state must come out replicated, or sharded like a stacked axis that is;
and a step with it must move no gradient between devices that a step without it leaves
where it is.
"""

import collections
import math
import re
from collections.abc import Iterator
from typing import Any

import equinox as eqx
import flax
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn, nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P

import adagc_jax as aj
from adagc_jax.axis_names import NNX_ENTRIES

pytestmark = pytest.mark.usefixtures("optax_promotion")

WIDTH, HIDDEN, LAYERS, EXPERTS = 8, 16, 2, 4
RULES = (
    ("layers", None),
    ("experts", "fsdp"),
    ("embed", "fsdp"),
    ("mlp", "tensor"),
    ("fsdp", "fsdp"),
    ("tensor", "tensor"),
)
EXPLICIT_NNX = tuple(map(int, flax.__version__.split(".")[:3])) >= (0, 12, 8)
OPTIONS = {"warmup_steps": 1, "lambda_abs": 0.01}
init = nn.initializers.lecun_normal()


def on_mesh(kind: AxisType) -> Iterator[Mesh]:
    if jax.device_count() < 8:
        pytest.skip(f"needs 8 devices, has {jax.device_count()}")
    mesh = jax.make_mesh((4, 2), ("fsdp", "tensor"), axis_types=(kind,) * 2)
    with jax.set_mesh(mesh):
        yield mesh


@pytest.fixture(params=[AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def mesh(request: pytest.FixtureRequest) -> Iterator[Mesh]:
    yield from on_mesh(request.param)


@pytest.fixture
def auto_mesh() -> Iterator[Mesh]:
    yield from on_mesh(AxisType.Auto)


def is_explicit() -> bool:
    return AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types


def einsum(equation: str, x: jax.Array, w: jax.Array, *spec: Any) -> jax.Array:
    """With explicit axes a contraction has to say how its result is sharded."""
    how: Any = {"out_sharding": P(*spec)} if is_explicit() else {}
    return jnp.einsum(equation, x, w, **how)


def placed(tree: Any, specs: Any) -> Any:
    move = jax.sharding.reshard if is_explicit() else jax.lax.with_sharding_constraint
    return move(tree, specs)


def data(mesh: Mesh) -> jax.Array:
    x = np.random.default_rng(0).normal(size=(8, WIDTH)).astype(np.float32)
    return jax.device_put(x, NamedSharding(mesh, P("fsdp")))


def layer(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    h = jnp.tanh(einsum("bi,ij->bj", x, up, "fsdp", "tensor"))
    return x + einsum("bi,ij->bj", h, down, "fsdp", None)


def mixture(x: jax.Array, w: jax.Array, scale: jax.Array) -> jax.Array:
    y = einsum("bj,eij->ebi", x, w, None, "fsdp", "tensor")
    return jnp.mean(y, axis=0) * scale[None]


def check_state(state: Any, mesh: Mesh, *, experts: P | None) -> None:
    """Every number per tensor or layer is everywhere; those of experts may be split."""
    step, *_ = jax.tree.leaves(state)
    assert int(step) == 2
    for leaf in jax.tree.leaves(state):
        along = NamedSharding(mesh, experts or P())
        is_split = leaf.shape == (EXPERTS,) and leaf.sharding.is_equivalent_to(along, 1)
        assert leaf.sharding.is_fully_replicated or is_split, leaf.sharding
    metrics = aj.clip_metrics(state, level="all")
    references = {k: v for k, v in metrics.items() if k.endswith("/gamma")}
    assert len(references) == 2 * LAYERS + EXPERTS + 1
    assert all(value > 0.0 for value in references.values())
    # The first step clips all of the tree, by the limit of the warm-up.
    assert metrics["clip/clip_rate"] >= 0.5


def gathered(text: str) -> collections.Counter[int]:
    """How many arrays of which size a program gathers, or moves in other ways."""
    moving = r"= (.*?) (?:all-gather|all-to-all|collective-permute)(?:-start)?\("
    shapes = [
        dimensions
        for result in re.findall(moving, text)
        for dimensions in re.findall(r"[a-z0-9]+\[([0-9,]*)\]", result)
    ]
    return collections.Counter(
        math.prod(int(d) for d in shape.split(",") if d) for shape in shapes
    )


def check_no_gradient_is_gathered(clipped: str, plain: str) -> None:
    """Compares a step with the clipper to one without; numbers per group may move.

    Once per framework: it costs a compilation.
    """
    added = gathered(clipped) - gathered(plain)
    assert max(added, default=0) <= LAYERS * EXPERTS, added


def test_what_counts_as_gathered() -> None:
    text = """
      %a = f32[4,8]{1,0} all-gather(%x), dimensions={0}
      %b = (f32[2]{0}, bf16[3,5]{1,0}) all-gather-start(%y, %z), dimensions={0}
      %c = f32[] all-reduce(%x)
      %d = s32[7]{0} collective-permute(%all-gather.1)
    """
    assert gathered(text) == {32: 1, 2: 1, 15: 1, 7: 1}


def nnx_param(rngs: nnx.Rngs, shape: tuple[int, ...], *names: str | None) -> Any:
    return nnx.Param(nnx.with_partitioning(init, names)(rngs.params(), shape))


class NnxLayer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx_param(rngs, (WIDTH, HIDDEN), "fsdp", "tensor")
        self.down = nnx_param(rngs, (HIDDEN, WIDTH), "tensor", "fsdp")

    def __call__(self, x: jax.Array) -> jax.Array:
        return layer(x, self.up[...], self.down[...])


class NnxExpert(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.w = nnx_param(rngs, (WIDTH, WIDTH), "tensor", None)


def several(cls: Any, count: int, name: str, rngs: nnx.Rngs) -> Any:
    @nnx.split_rngs(splits=count)
    @nnx.vmap(transform_metadata={nnx.PARTITION_NAME: name})
    def make(rngs: nnx.Rngs) -> Any:
        return cls(rngs)

    return make(rngs)


class NnxModel(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layers = several(NnxLayer, LAYERS, "layers", rngs)
        self.experts = several(NnxExpert, EXPERTS, "experts", rngs)
        self.scale = nnx.Param(jnp.ones((WIDTH,)))

    def __call__(self, x: jax.Array) -> jax.Array:
        @nnx.scan(
            in_axes=(nnx.Carry, 0),
            out_axes=nnx.Carry,
            transform_metadata={nnx.PARTITION_NAME: "layers"},
        )
        def through(x: jax.Array, layer: NnxLayer) -> jax.Array:
            return layer(x)

        x = through(x, self.layers)
        return mixture(x, self.experts.w[...], self.scale[...])


def nnx_model() -> NnxModel:
    """Made and placed by its metadata: what ``nnx.jit`` is for at the start."""
    model = NnxModel(nnx.Rngs(0))
    state = nnx.state(model)
    nnx.update(model, placed(state, nnx.get_partition_spec(state)))
    return model


@nnx.jit
def nnx_step(model: NnxModel, optimizer: nnx.Optimizer, x: jax.Array) -> jax.Array:
    loss, grads = nnx.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)
    optimizer.update(model, grads)
    return loss


def test_nnx_optimizer(mesh: Mesh) -> None:
    if is_explicit() and not EXPLICIT_NNX:
        pytest.skip(f"flax {flax.__version__} places variables on automatic axes only")
    x = data(mesh)

    @nnx.jit
    def clipped() -> tuple[NnxModel, nnx.Optimizer]:
        model = nnx_model()
        groups = aj.stacked_from_metadata(nnx.state(model, nnx.Param))
        tx = optax.chain(aj.adagc(groups=groups, **OPTIONS), optax.sgd(1.0))
        return model, nnx.Optimizer(model, tx, wrt=nnx.Param)

    with nnx.logical_axis_rules(RULES):
        model, optimizer = clipped()
        losses = [float(nnx_step(model, optimizer, x)) for _ in range(2)]
        assert losses[1] < losses[0]
        state: Any = optimizer.opt_state
        # F6: no number of the clipper takes over a parameter's axis names.
        for variable in jax.tree.leaves(
            state[0], is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)
        ):
            assert not {*NNX_ENTRIES} & {*variable.get_metadata()}
        check_state(state[0], mesh, experts=P("fsdp"))
        if not is_explicit():
            plain = nnx.Optimizer(model, optax.sgd(1.0), wrt=nnx.Param)
            check_no_gradient_is_gathered(
                nnx_step.lower(model, optimizer, x).compile().as_text(),
                nnx_step.lower(model, plain, x).compile().as_text(),
            )


class LinenLayer(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: None) -> tuple[jax.Array, None]:
        def named(*names: str) -> Any:
            return nn.with_logical_partitioning(init, names)

        up = self.param("up", named("embed", "mlp"), (WIDTH, HIDDEN))
        down = self.param("down", named("mlp", "embed"), (HIDDEN, WIDTH))
        return layer(x, up, down), None


class LinenExpert(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        named = nn.with_logical_partitioning(init, ("mlp", None))
        return einsum("bj,ij->bi", x, self.param("w", named, (WIDTH, WIDTH)))


class LinenModel(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        layers = nn.scan(
            LinenLayer,
            variable_axes={"params": 1},
            split_rngs={"params": True},
            length=LAYERS,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        experts = nn.vmap(
            LinenExpert,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=None,
            axis_size=EXPERTS,
            metadata_params={nn.PARTITION_NAME: "experts"},
        )
        x, _ = layers(name="layers")(x, None)
        scale = self.param("scale", nn.initializers.ones, (WIDTH,))
        return jnp.mean(experts(name="experts")(x), axis=0) * scale[None]


def test_linen_train_state(auto_mesh: Mesh) -> None:
    """Linen's boxes constrain parameters, which is for automatic axes."""
    x, model = data(auto_mesh), LinenModel()

    def programs(clip: Any) -> tuple[Any, Any]:
        """The recipe of Flax's guide: shardings from the abstract state's names."""

        def create(key: jax.Array) -> TrainState:
            params = model.init(key, jnp.ones((1, WIDTH)))["params"]
            groups = aj.stacked_from_metadata(params)
            own = aj.adagc(groups=groups, **OPTIONS) if clip is None else clip
            tx = optax.chain(own, optax.sgd(1.0))
            return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

        def step(state: TrainState, x: jax.Array) -> tuple[TrainState, jax.Array]:
            def loss_fn(params: Any) -> jax.Array:
                return jnp.mean(state.apply_fn({"params": params}, x) ** 2)

            loss, grads = jax.value_and_grad(loss_fn)(state.params)
            return state.apply_gradients(grads=grads), loss

        abstract = jax.eval_shape(create, jax.random.key(0))
        specs = nn.get_partition_spec(abstract)
        shardings = nn.logical_to_mesh_sharding(specs, auto_mesh, RULES)
        return (
            jax.jit(create, out_shardings=shardings),
            jax.jit(step, out_shardings=(shardings, None)),
        )

    with nn.logical_axis_rules(RULES):
        create, step = programs(None)
        start = create(jax.random.key(0))
        assert start.params["layers"]["up"].names == ("embed", "layers", "mlp")
        middle, first = step(start, x)
        end, second = step(middle, x)
        assert second < first
        check_state(end.opt_state[0], auto_mesh, experts=None)
        expert = end.params["experts"]["w"].value
        assert expert.sharding.spec == P("fsdp", "tensor", None)

        clipped = step.lower(end, x).compile().as_text()
        create, step = programs(optax.identity())
        plain = jax.eval_shape(create, jax.random.key(0))
        check_no_gradient_is_gathered(clipped, step.lower(plain, x).compile().as_text())


class Plain(eqx.Module):
    layers: dict[str, jax.Array]
    experts: jax.Array
    scale: jax.Array

    def __call__(self, x: jax.Array) -> jax.Array:
        for i in range(LAYERS):
            x = layer(x, self.layers["up"][i], self.layers["down"][i])
        return mixture(x, self.experts, self.scale)


def plain_model(mesh: Mesh) -> Plain:
    rng = np.random.default_rng(1)

    def array(spec: P, *shape: int) -> jax.Array:
        value = rng.normal(size=shape, scale=0.3).astype(np.float32)
        return jax.device_put(value, NamedSharding(mesh, spec))

    return Plain(
        layers={
            "up": array(P(None, "fsdp", "tensor"), LAYERS, WIDTH, HIDDEN),
            "down": array(P(None, "tensor", "fsdp"), LAYERS, HIDDEN, WIDTH),
        },
        experts=array(P("fsdp", "tensor", None), EXPERTS, WIDTH, WIDTH),
        scale=array(P(), WIDTH),
    )


def test_plain_pytree(mesh: Mesh) -> None:
    x, model = data(mesh), plain_model(mesh)
    groups = aj.stacked({"^layers/": 0, "^experts": 0})

    def programs(clip: Any) -> tuple[Any, Any]:
        own = aj.adagc(groups=groups, **OPTIONS) if clip is None else clip
        tx = optax.chain(own, optax.sgd(1.0))

        @jax.jit
        def step(model: Plain, state: Any, x: jax.Array) -> tuple[Plain, Any, Any]:
            loss, grads = jax.value_and_grad(lambda m: jnp.mean(m(x) ** 2))(model)
            updates, state = tx.update(grads, state, model)
            return optax.apply_updates(model, updates), state, loss

        return jax.jit(tx.init), step

    initial, step = programs(None)
    start = initial(model)
    middle, state, first = step(model, start, x)
    end, state, second = step(middle, state, x)
    assert second < first
    assert end.experts.sharding.is_equivalent_to(model.experts.sharding, 3)
    check_state(state[0], mesh, experts=P("fsdp"))
    if is_explicit():
        # The kept axis is sharded by type, and from the first state on.
        types = [jax.tree.map(jax.typeof, each[0]) for each in (start, state)]
        assert types[0] == types[1]
        assert P("fsdp") in [part.sharding.spec for part in types[0].metrics.scale]

        clipped = step.lower(end, state, x).compile().as_text()
        initial, step = programs(optax.identity())
        plain = step.lower(model, initial(model), x).compile().as_text()
        check_no_gradient_is_gathered(clipped, plain)
