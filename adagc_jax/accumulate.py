"""A repair of ``optax.MultiSteps``: bad micro-batches end with their window."""

from typing import Any

import jax
import jax.numpy as jnp
import optax


def fresh_windows(
    multi_steps: optax.MultiSteps,
) -> optax.GradientTransformationExtraArgs:
    r"""Starts every accumulation window of a ``MultiSteps`` from true zeros.

    .. math:: a_{t+1} = 0 \quad \text{if a window ends at } t

    where optax computes :math:`0 \cdot a_t`, which stays NaN for ever after one NaN.
    With this around it, ``MultiSteps(guard(inner), k)`` loses the window of a bad
    micro-batch and nothing else. To lose the micro-batch only, turn it around:
    ``guard(MultiSteps(inner, k))``.

    Args:
      multi_steps: The accumulator, with the guarded optimizer inside.

    Returns:
      An ``optax.GradientTransformationExtraArgs`` with the same
      ``optax.MultiStepsState``; extra arguments go on to the inner optimizer.

    Raises:
      ValueError: if ``multi_steps`` is not an ``optax.MultiSteps``.

    Example:
      >>> import jax.numpy as jnp, optax
      >>> from adagc_jax.guard import guard
      >>> optimizer = fresh_windows(optax.MultiSteps(guard(optax.sgd(1.0)), 2))
      >>> state = optimizer.init({"w": jnp.zeros(())})
      >>> for grad in (1.0, jnp.nan, 1.0, 3.0):
      ...     updates, state = optimizer.update({"w": jnp.array(grad)}, state)
      ...     print(updates["w"] + 0.0)
      0.0
      0.0
      0.0
      -2.0

    Reference:
      https://github.com/google-deepmind/optax/issues/828.

    Differs from ``MultiSteps.gradient_transformation()``: that also drops extra
    arguments, such as the loss, as soon as it is chained.
    """
    if not isinstance(multi_steps, optax.MultiSteps):
        raise ValueError(
            f"multi_steps must be an optax.MultiSteps, got {type(multi_steps)!r}."
        )

    def update_fn(
        updates: optax.Updates,
        state: Any,
        params: optax.Params | None = None,
        **extra_args: Any,
    ) -> tuple[optax.Updates, Any]:
        updates, state = multi_steps.update(updates, state, params, **extra_args)
        ended = state.mini_step == 0
        fresh = jax.tree.map(
            lambda a: jnp.where(ended, jnp.zeros_like(a), a), state.acc_grads
        )
        return updates, state._replace(acc_grads=fresh)

    return optax.GradientTransformationExtraArgs(multi_steps.init, update_fn)
