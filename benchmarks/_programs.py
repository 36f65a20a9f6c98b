"""The programs that are compiled ahead of time: optimizer and training steps.

    model + sharding + mesh -> shapes of parameters -> shapes of state -> jitted step

Nothing holds data: a 47B-parameter model is a tree of shapes.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import _steps
import jax
import jax.numpy as jnp
import numpy as np
import optax
from _train import loss
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from models import Model

TENSOR = {"heads": "tensor", "mlp": "tensor", "vocab": "tensor"}

# The mesh axis of each logical axis; a logical axis that is not named is not sharded.
SHARDINGS: dict[str, dict[str, str]] = {
    "replicated": {},
    "FSDP": {"embed": "fsdp"},
    "TP": TENSOR,
    "FSDP x TP": {"embed": "fsdp", **TENSOR},
    "FSDP x EP": {"embed": "fsdp", "experts": "expert"},
}

CLIPPERS = (
    "none",
    "optax.clip_by_global_norm",
    "adagc",
    "adagc (steady)",
    "agc",
    _steps.GUARDED,
)

# Per shard of the batch, in a training step. Few, so that gradients and not activations
# are what memory goes to.
TOKENS = (1, 129)


class Program(NamedTuple):
    """A jitted step and the shapes of its arguments, the parameters first."""

    step: Any
    arguments: tuple[Any, ...]


def optimizer_step(
    clipper: str, model: Model, stacked: bool, sharding: str, dtype: Any, mesh: Mesh
) -> Program:
    """``gradients -> clipper -> AdamW -> parameters``; parameters and state float32.

    ``dtype`` is that of the gradients.
    """
    grads = parameter_shapes(model, stacked, sharding, dtype, mesh)
    params = _cast(grads, jnp.float32)
    return _program(clipper, model, stacked, params, grads, lambda params, grads: grads)


def train_step(
    clipper: str, model: Model, stacked: bool, sharding: str, dtype: Any, mesh: Mesh
) -> Program:
    """The same with the gradients of a loss in it; ``dtype`` is that of all arrays.

    The batch is sharded over the first mesh axis.
    """
    if stacked:
        raise ValueError("the loss is written for listed layers, got stacked ones.")
    params = parameter_shapes(model, stacked, sharding, dtype, mesh)
    axis = mesh.axis_names[0]
    tokens = jax.ShapeDtypeStruct(
        (TOKENS[0] * mesh.shape[axis], TOKENS[1]),
        jnp.int32,
        sharding=NamedSharding(mesh, PartitionSpec(axis)),
    )
    gradients = jax.grad(functools.partial(loss, model))
    return _program(clipper, model, stacked, params, tokens, gradients)


def parameter_shapes(
    model: Model, stacked: bool, sharding: str, dtype: Any, mesh: Mesh
) -> Any:
    """The model's tree of shapes with shardings."""
    mesh_axes = SHARDINGS[sharding]

    def placed(shape: tuple[int, ...], axes: tuple[str | None, ...]) -> Any:
        spec = PartitionSpec(*(mesh_axes.get(axis or "") for axis in axes))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    return jax.tree.map(
        placed,
        model.shapes(stacked),
        model.axes(stacked),
        is_leaf=lambda x: isinstance(x, tuple),
    )


def state_shapes(
    optimizer: optax.GradientTransformation, params: Any, mesh: Mesh
) -> Any:
    """The optimizer state's shapes, sharded as ``init`` itself has it.

    On explicit mesh axes the types of what ``init`` returns say how it is sharded. On
    automatic ones nothing does, and a trainer places moments with their parameters:
    so take the explicit twin's shardings there too.
    """
    twin = Mesh(mesh.devices, mesh.axis_names, axis_types=_explicit(mesh))
    with jax.set_mesh(twin):
        return _on(mesh, jax.eval_shape(optimizer.init, _on(twin, params)))


def local_parameters(params: Any) -> int:
    """Number of parameters that one chip holds."""
    return sum(
        int(np.prod(leaf.sharding.shard_shape(leaf.shape)))
        for leaf in jax.tree.leaves(params)
    )


def group_count(model: Model, stacked: bool) -> int:
    """Number of groups: tensors, with every layer and expert by itself."""
    clip = _steps.CLIPPERS["adagc"](model.stacked_axes(stacked))
    shapes = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        model.shapes(stacked),
        is_leaf=lambda x: isinstance(x, tuple),
    )
    seen = jax.eval_shape(clip.init, shapes).stages[0].seen
    return sum(part.size for part in jax.tree.leaves(seen))


def _program(
    clipper: str,
    model: Model,
    stacked: bool,
    params: Any,
    data: Any,
    gradients: Callable[[Any, Any], Any],
) -> Program:
    optimizer = _steps.adamw_after(clipper, model.stacked_axes(stacked))
    mesh = jax.tree.leaves(params)[0].sharding.mesh

    def step(params: Any, state: Any, data: Any) -> Any:
        updates, state = optimizer.update(gradients(params, data), state, params)
        return optax.apply_updates(params, updates), state

    state = state_shapes(optimizer, params, mesh)
    # As in training: what comes out lies where it came from, and takes its place.
    kept = jax.tree.map(lambda x: x.sharding, (params, state))
    jitted = jax.jit(step, donate_argnums=(0, 1), out_shardings=kept)
    return Program(jitted, (params, state, data))


def _explicit(mesh: Mesh) -> tuple[AxisType, ...]:
    return (AxisType.Explicit,) * len(mesh.axis_names)


def _on(mesh: Mesh, tree: Any) -> Any:
    """The same shapes on another mesh; what has no sharding is replicated."""

    def placed(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        spec = x.sharding.spec if x.sharding else PartitionSpec()
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)

    return jax.tree.map(placed, tree)


def _cast(tree: Any, dtype: Any) -> Any:
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding), tree
    )
