"""Puts the types back onto an optimizer state that a checkpoint gave back without them.

Checkpoint formats keep arrays and the names on the way to them. Restored without a
target, a state is made of dicts and lists; here it becomes again what the optimizer's
own ``init`` would have made, filled with the numbers of the checkpoint.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Names = tuple[str, ...]
_SHOWN = 5


def restore_state(raw: Any, optimizer: Any, params: Any) -> Any:
    """The optimizer state that ``raw`` was before a checkpoint took its types away.

    Every array of ``optimizer.init(params)`` is looked up under its path, in which
    fields of named tuples, keys and indices are all alike: ``inner/0/clip_step``. The
    names of tensors that some formats drop from a clipper's state are there again.

    Args:
      raw: What Orbax (``StandardRestore()``), ``flax.serialization.msgpack_restore``
        and the like give back without a target: dicts and lists, also with indices as
        strings, with NumPy or JAX arrays, or with Python numbers for scalars whose
        dtype holds them exactly. A state that has types already is fine too.
      optimizer: The optimizer that the state belongs to: anything with an ``init``.
      params: Its parameters, or ``jax.ShapeDtypeStruct`` in their place: only shapes
        and dtypes are read.

    Returns:
      The state. JAX arrays stay where they are; NumPy arrays go to the default device
      (``jax.device_put(state, shardings)`` moves all of it).

    Raises:
      ValueError: for arrays that are missing, left over, or of another shape or dtype,
        naming their paths.

    Example:
      >>> import adagc_jax, flax.serialization, jax.numpy as jnp, optax
      >>> params = {"w": jnp.ones(3)}
      >>> optimizer = optax.chain(adagc_jax.adagc(), optax.adam(1e-3))
      >>> data = flax.serialization.to_bytes(optimizer.init(params))
      >>> raw = flax.serialization.msgpack_restore(data)
      >>> print(type(raw), type(restore_state(raw, optimizer, params)[0]).__name__)
      <class 'dict'> ClipState

    Reference:
      https://github.com/google/flax/issues/1432.
    """
    check_state("raw", raw)
    check_optimizer("optimizer", optimizer)
    target = jax.eval_shape(optimizer.init, params)
    flat, treedef = jax.tree_util.tree_flatten_with_path(target)
    wanted = {names_of(keys): form for keys, form in flat}
    have = {names_of(k): x for k, x in jax.tree_util.tree_leaves_with_path(raw)}
    _refuse_other_paths(wanted, have)
    _refuse_other_forms(wanted, have)
    return treedef.unflatten(
        [_as_array(have[names], form) for names, form in wanted.items()]
    )


def check_state(argument: str, state: Any) -> None:
    """Refuses what is no optimizer state at all: None, or an optimizer."""
    if state is None:
        raise ValueError(
            f"{argument} is None: pass the optimizer's state. Without one there is "
            "nothing to go on from, and optimizer.init(params) is all that is needed."
        )
    parts = ("update", "init"), ("update", "opt_state")
    if any(all(hasattr(state, part) for part in both) for both in parts):
        raise ValueError(
            f"{argument} is an optimizer, {type(state).__name__}: pass its state, what "
            "its init and update have returned."
        )


def check_optimizer(argument: str, optimizer: Any) -> None:
    """Refuses what cannot make a state, such as a state."""
    if not callable(getattr(optimizer, "init", None)):
        raise ValueError(
            f"{argument} must have an init that makes a state of parameters, as optax "
            f"has it, got a {type(optimizer).__name__}. Its state is another "
            "argument."
        )


def names_of(keys: Sequence[Any]) -> Names:
    """The keys of a path as strings, the same for fields, keys and indices."""
    return tuple(jax.tree_util.keystr((key,), simple=True) for key in keys)


def _refuse_other_paths(wanted: dict[Names, Any], have: dict[Names, Any]) -> None:
    missing = ["/".join(names) for names in wanted if names not in have]
    left_over = ["/".join(names) for names in have if names not in wanted]
    if missing or left_over:
        raise ValueError(
            "raw does not fit the optimizer: it lacks "
            f"{_shown(missing)}, and has besides {_shown(left_over)}. Pass the part of "
            "the checkpoint that is the optimizer's state, and the optimizer that "
            "wrote it; transfer_state then takes its state to another one."
        )


def _refuse_other_forms(wanted: dict[Names, Any], have: dict[Names, Any]) -> None:
    wrong, inexact = [], []
    for names, form in wanted.items():
        got, path = have[names], "/".join(names)
        shape, dtype = jnp.shape(got), getattr(got, "dtype", type(got).__name__)
        if _is_number(got) and form.shape == ():
            inexact += (
                []
                if _holds(form.dtype, got)
                else [f"{path} is {got!r}, no {form.dtype}"]
            )
        elif shape != form.shape or dtype != form.dtype:
            wrong.append(
                f"{path} is {dtype}{list(shape)}, not {form.dtype}{list(form.shape)}"
            )
    if wrong:
        raise ValueError(
            f"raw does not fit params: {_shown(wrong)}. Pass the parameters that the "
            "state was made for; transfer_state then takes it to others."
        )
    if inexact:
        raise ValueError(
            "raw has Python numbers that their dtype does not hold exactly: "
            f"{_shown(inexact)}. Save arrays, or cast them with "
            "numpy.asarray(number, dtype) if what is lost does not matter."
        )


def _as_array(value: Any, form: Any) -> jax.Array:
    return jnp.asarray(value, form.dtype if _is_number(value) else None)


def _is_number(value: Any) -> bool:
    return type(value) in (bool, int, float)


def _holds(dtype: Any, value: float) -> bool:
    """Whether a Python number is one of ``dtype``; a bool is no number."""
    if jnp.issubdtype(dtype, jnp.bool_) or isinstance(value, bool):
        return isinstance(value, bool) and jnp.issubdtype(dtype, jnp.bool_)
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        return isinstance(value, int) and info.min <= value <= info.max
    if not jnp.issubdtype(dtype, jnp.floating):
        return False
    with np.errstate(over="ignore"):
        return value != value or float(np.asarray(value, dtype)) == value


def _shown(items: list[str]) -> str:
    more = f", and {len(items) - _SHOWN} more" if len(items) > _SHOWN else ""
    return (", ".join(items[:_SHOWN]) or "nothing") + more
