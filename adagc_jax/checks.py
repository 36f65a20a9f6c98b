"""Hyper-parameter checks: concrete values are validated, traced ones are let through.

Every public factory passes its scalars through here once, so a bad value is
reported where it was written and not as a NaN a thousand steps later.
"""

from collections.abc import Callable, Collection
from numbers import Real
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
import numpy as np

# A hyper-parameter: a number, a scalar array (traced or not), or a schedule
# that maps the number of updates made so far, int32[], to one.
Hyper = float | jax.Array | Callable[[jax.Array], Any]


def check_hyper(
    name: str,
    value: Any,
    *,
    low: float = 0.0,
    high: float = float("inf"),
    open_low: bool = False,
    open_high: bool = False,
) -> Any:
    """Returns ``value`` unless it is concrete and outside its range.

    Raises:
      ValueError: naming the argument, the value received and the allowed range.
    """
    if callable(value) or isinstance(value, jax.core.Tracer):
        check_precision(name, value)
        return value
    allowed = f"{'(' if open_low else '['}{low}, {high}{')' if open_high else ']'}"
    if isinstance(value, bool) or not _is_real_scalar(value):
        raise ValueError(f"{name} must be a number in {allowed}, got {value!r}.")
    check_precision(name, value)
    number = float(value)
    above = number > low if open_low else number >= low
    below = number < high if open_high else number <= high
    if not (above and below):
        raise ValueError(f"{name} must be in {allowed}, got {value!r}.")
    return value


def check_count(name: str, value: Any, *, low: int = 0) -> Any:
    """Returns ``value`` unless it is concrete and not an integer >= ``low``."""
    if isinstance(value, jax.core.Tracer):
        return value
    integral = _is_real_scalar(value) and float(value).is_integer()
    if isinstance(value, bool) or not integral or int(value) < low:
        raise ValueError(f"{name} must be an integer >= {low}, got {value!r}.")
    if int(value) > jnp.iinfo(jnp.int32).max:
        raise ValueError(f"{name} must be an integer below 2**31, got {value!r}.")
    return value


def check_int(name: str, value: Any, low: int, high: int) -> int:
    """An integer from ``low`` to ``high``, NumPy's included; a bool is none."""
    whole = isinstance(value, int | np.integer) and not isinstance(value, bool)
    if not (whole and low <= value <= high):
        raise ValueError(f"{name} must be an int in [{low}, {high}], got {value!r}")
    return int(value)


def check_choice(name: str, value: Any, choices: Collection[str]) -> Any:
    """Returns ``value`` if it is one of ``choices``."""
    if value not in choices:
        listed = ", ".join(repr(c) for c in choices)
        raise ValueError(f"{name} must be one of {listed}, got {value!r}.")
    return value


def check_state_type(state: Any, kind: type) -> None:
    """Refuses a state that is not a ``kind``, such as one without its types."""
    if not isinstance(state, kind):
        raise ValueError(
            f"state must be a {kind.__name__}, got a {type(state).__name__}. If it "
            "comes from a checkpoint restored without a target, put its types back "
            "with restore_state(opt_state, optimizer, params); if it is that of "
            "another optimizer, take it over with transfer_state."
        )


def check_precision(name: str, value: Any) -> None:
    """Refuses an array hyper-parameter of less than 32 bits.

    ``optax.inject_hyperparams`` casts every number to the parameters' dtype:
    with bfloat16 parameters a beta of 0.99 would silently become 0.9883.
    """
    dtype = getattr(value, "dtype", None)
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
        return
    if jnp.finfo(dtype).bits < 32:
        raise ValueError(
            f"{name} arrived as a {dtype} array, which rounds it to "
            f"{jnp.finfo(dtype).nmant + 1} bits. Pass hyperparam_dtype=jnp.float32 "
            "to optax.inject_hyperparams, or give a Python float or a schedule."
        )


def evaluate(value: Hyper, step: jax.Array) -> jax.Array:
    """The hyper-parameter at update ``step``, as f32[]."""
    value = value(step) if callable(value) else value
    return jnp.asarray(value).astype(jnp.float32)


def evaluate_count(value: int | jax.Array) -> jax.Array:
    """An integer hyper-parameter as i32[]."""
    return jnp.asarray(value).astype(jnp.int32)


def complement(value: Hyper, step: jax.Array) -> jax.Array:
    """``1 - value`` as f32[], subtracted before rounding where the value is known."""
    if isinstance(value, Real):
        return jnp.asarray(1.0 - float(value), jnp.float32)
    return 1.0 - evaluate(value, step)


def _is_real_scalar(value: Any) -> bool:
    if isinstance(value, Real | np.number):
        return True
    return isinstance(value, np.ndarray | jax.Array) and value.ndim == 0
