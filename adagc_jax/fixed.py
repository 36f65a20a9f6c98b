"""The methods with a fixed limit: on the global norm, on tensors, on elements."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from adagc_jax.checks import Hyper, check_hyper, evaluate
from adagc_jax.clip import clip_by_rule
from adagc_jax.groups import Groups, whole_tree
from adagc_jax.kernels.backend import Backend
from adagc_jax.leaves import Mask, clipped_leaves
from adagc_jax.manual import AxisNames
from adagc_jax.rules import FixedNorm


def global_gc(
    max_norm: Hyper = 1.0,
    *,
    eps: float = 0.0,
    mask: Mask = None,
    exclude: Sequence[str] = (),
    nonfinite: str = "zero",
    backend: str | Backend = "auto",
    axis_names: AxisNames = (),
) -> optax.GradientTransformationExtraArgs:
    r"""GlobalGC: clips the norm of all gradients together.

    .. math:: g \leftarrow g \cdot \min\{1, c / (\|g\|_2 + \epsilon)\}

    Args:
      max_norm: :math:`c`, the largest global norm that is emitted. May be a schedule.
      eps: Added to the norm that is divided by: 0 as in optax, ``1e-6`` as in PyTorch.
      mask: Leaves to clip, as in `clip_by_rule`.
      exclude: Path patterns of leaves to leave out, as in `clip_by_rule`.
      nonfinite: Policy for NaN and infinite norms, as in `clip_by_rule`. There is one
        group, so one NaN anywhere makes ``"zero"`` emit zeros everywhere.
      backend: What reads gradients for their norms, as in `clip_by_rule`.
      axis_names: Mesh axes inside ``jax.shard_map``, as in `clip_by_rule`.

    Returns:
      An ``optax.GradientTransformationExtraArgs``. Needs no parameters.

    Raises:
      ValueError: for a hyper-parameter outside its range.

    Example:
      >>> import adagc_jax, jax.numpy as jnp
      >>> clip = adagc_jax.global_gc(1.0)
      >>> grads = {"a": jnp.array([3.0]), "b": jnp.array([4.0])}
      >>> clip.update(grads, clip.init(grads))[0]
      {'a': Array([0.6], dtype=float32), 'b': Array([0.8], dtype=float32)}

    Reference:
      Pascanu et al., On the difficulty of training recurrent neural networks,
      https://arxiv.org/abs/1211.5063.

    Differs from ``optax.clip_by_global_norm``: squares are summed in float32 for every
    dtype, and a zero norm with a zero limit gives zeros and not NaN.
    """
    rule = FixedNorm(check_hyper("max_norm", max_norm), check_hyper("eps", eps))
    return clip_by_rule(
        rule,
        groups=whole_tree(),
        mask=mask,
        exclude=exclude,
        nonfinite=nonfinite,
        backend=backend,
        axis_names=axis_names,
    )


def tensor_gc(
    max_norm: Hyper = 1.0,
    *,
    eps: float = 0.0,
    groups: Groups | None = None,
    mask: Mask = None,
    exclude: Sequence[str] = (),
    nonfinite: str = "zero",
    backend: str | Backend = "auto",
    axis_names: AxisNames = (),
) -> optax.GradientTransformationExtraArgs:
    r"""Clips the norm of each tensor to one fixed limit: local, not adaptive.

    .. math:: g_i \leftarrow g_i \cdot \min\{1, c / (\|g_i\|_2 + \epsilon)\}

    Args:
      max_norm: :math:`c`, the largest norm that a tensor may emit. May be a schedule.
      eps: Added to the norm that is divided by.
      groups: What is clipped together; default ``per_tensor()``.
      mask: Leaves to clip, as in `clip_by_rule`.
      exclude: Path patterns of leaves to leave out, as in `clip_by_rule`.
      nonfinite: Policy for NaN and infinite norms, as in `clip_by_rule`.
      backend: What reads gradients for their norms, as in `clip_by_rule`.
      axis_names: Mesh axes inside ``jax.shard_map``, as in `clip_by_rule`.

    Returns:
      An ``optax.GradientTransformationExtraArgs``. Needs no parameters.

    Raises:
      ValueError: for a hyper-parameter outside its range.

    Example:
      >>> import adagc_jax, jax.numpy as jnp
      >>> clip = adagc_jax.tensor_gc(1.0)
      >>> grads = {"a": jnp.array([3.0]), "b": jnp.array([4.0])}
      >>> clip.update(grads, clip.init(grads))[0]
      {'a': Array([1.], dtype=float32), 'b': Array([1.], dtype=float32)}

    Reference:
      The fixed-limit ablation of AdaGC, https://arxiv.org/abs/2502.11034; ``clipnorm``
      in Keras, ``clip_gradient_single_norm_to_value`` in Praxis.
    """
    rule = FixedNorm(check_hyper("max_norm", max_norm), check_hyper("eps", eps))
    return clip_by_rule(
        rule,
        groups=groups,
        mask=mask,
        exclude=exclude,
        nonfinite=nonfinite,
        backend=backend,
        axis_names=axis_names,
    )


def clip_by_value(
    limit: float | jax.Array,
    *,
    mask: Mask = None,
    exclude: Sequence[str] = (),
) -> optax.GradientTransformationExtraArgs:
    r"""Clamps every element of the gradients: :math:`\max(-c, \min(g, c))`.

    It changes the direction of a gradient, keeps no state and no metrics, and hands NaN
    through; an infinite element becomes the limit.

    Args:
      limit: :math:`c`, the largest absolute value of an element.
      mask: Leaves to clip, as in `clip_by_rule`.
      exclude: Path patterns of leaves to leave out, as in `clip_by_rule`.

    Returns:
      An ``optax.GradientTransformationExtraArgs`` with an ``optax.EmptyState``.

    Raises:
      ValueError: for a negative limit; from ``update``, for a complex leaf.

    Example:
      >>> import adagc_jax, jax.numpy as jnp
      >>> clip = adagc_jax.clip_by_value(0.5)
      >>> grads = {"w": jnp.array([-2.0, 0.1])}
      >>> clip.update(grads, clip.init(grads))[0]
      {'w': Array([-0.5,  0.1], dtype=float32)}

    Reference:
      The baseline of https://arxiv.org/abs/2502.11034; ``optax.clip``.
    """
    if callable(limit):
        raise ValueError(
            "limit must be a number, got a function: clip_by_value counts no steps; "
            "use optax.inject_hyperparams(clip_by_value)(limit=schedule)."
        )
    check_hyper("limit", limit)

    def init_fn(params: optax.Params) -> optax.EmptyState:
        clipped_leaves(params, mask, exclude)
        return optax.EmptyState()

    def update_fn(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, Any]:
        del params, extra_args
        flat, treedef = jax.tree.flatten(updates)
        bound = evaluate(limit, jnp.zeros((), jnp.int32))
        for leaf in clipped_leaves(updates, mask, exclude):
            flat[leaf.position] = _clamp(leaf.path, jnp.asarray(leaf.value), bound)
        return jax.tree.unflatten(treedef, flat), state

    return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def _clamp(path: str, x: jax.Array, bound: jax.Array) -> jax.Array:
    if jnp.iscomplexobj(x):
        raise ValueError(
            f"clip_by_value cannot order complex numbers, but {path!r} is {x.dtype}: "
            "exclude it, or use tensor_gc, which clips its norm."
        )
    bound = bound.astype(x.dtype)
    return jnp.clip(x, -bound, bound)
