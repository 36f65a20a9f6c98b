"""What the clipper did, as named scalars for any logger.

Everything is in the state already, computed in the update from norms that it needs
anyway: reading costs no pass over gradients and, under ``jit``, no host sync.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np

from adagc_jax.checks import check_choice, check_count
from adagc_jax.readings import (
    Reading,
    Section,
    find_clip_states as find_clip_states,
    named_states,
    read,
)
from adagc_jax.tables import rate, xp_of

Scalars = dict[str, Any]

LEVELS = ("totals", "worst", "all")
RANKINGS = ("clip_rate", "consecutive_clips", "norm_before", "scale", "nonfinite")


def clip_metrics(
    opt_state: Any,
    params: Any = None,
    *,
    level: str = "totals",
    worst: int = 5,
    by: str = "clip_rate",
    prefix: str | None = "clip",
) -> Scalars:
    r"""Named scalars of the last update and counts of all updates.

    Totals, with :math:`n_i` the norm of tensor :math:`i`:
    ``norm_before`` and ``norm_after`` are :math:`\sqrt{\sum_i n_i^2}` of the incoming
    and emitted gradients, ``fraction_clipped`` the fraction of tensors that the last
    update clipped, ``clip_rate`` the same over all updates, ``min_scale`` the smallest
    scale, ``nonfinite`` the non-finite norms met so far, ``step`` the updates made,
    ``norm_seen`` the global norm that a rule worked with, bit for bit, or 0, and the
    numbers of rules over the whole tree, such as ``gamma``. In a step that a guard
    skips the clipper's state is frozen, and so are these numbers.

    Args:
      opt_state: Any optimizer state with a clipper in it, at any depth: chains, masks,
        partitions, ``MultiSteps``, ``inject_hyperparams``, ``nnx.Optimizer.opt_state``.
        Several clippers are merged if they clip different leaves; otherwise they are
        numbered in the order of the state: ``clip/0/norm_before``.
      params: The parameters. Only used for a state that came out of a checkpoint
        format that keeps no names and has not been updated since, and then enough
        unless it has stacked groups or masked leaves.
      level: ``"totals"``; ``"all"`` for the numbers of every tensor as well:
        ``clip/<name>/norm_before``, ``norm_after``, ``scale``, ``clip_rate``,
        ``consecutive_clips``, ``active``, ``nonfinite``, and the rule's own, such as
        ``gamma``, if its groups are the tensors; ``"worst"`` for those of the worst
        tensors only, ``clip/worst/0/clip_rate`` and so on, with ``clip/worst/0/index``
        for their places in `group_names`. Slices of stacked tensors are named one by
        one, as if they were listed: ``layers/3/attn/q``. Under ``jit`` each number of
        level ``"all"`` is an output of its own: from some hundred tensors on that costs
        seconds of compile time, and ``"worst"``, or a call outside, does not.
      worst: How many tensors level ``"worst"`` shows, at least 1.
      by: What makes them the worst: the highest ``"clip_rate"``,
        ``"consecutive_clips"``, ``"norm_before"`` or ``"nonfinite"``, or the lowest
        ``"scale"``. Of equals, the one with the larger norm comes first.
      prefix: First part of every name; ``""`` or None for names without one.

    Returns:
      A flat dict from names to float32 or int32 scalars. Under ``jit`` they are arrays
      of the program. Outside, the state is fetched once and they are NumPy's.

    Raises:
      ValueError: for a bad argument, if there is no clipping state in ``opt_state``, if
        it is abstract, or if it has lost its names and ``params`` do not give them
        back.

    Example:
      >>> import adagc_jax, jax.numpy as jnp
      >>> clip = adagc_jax.tensor_gc(1.0)
      >>> grads = {"a": jnp.array([3.0, 4.0]), "b": jnp.array([0.5])}
      >>> _, state = clip.update(grads, clip.init(grads))
      >>> metrics = adagc_jax.clip_metrics(state, level="all")
      >>> print(metrics["clip/fraction_clipped"], metrics["clip/a/norm_before"])
      0.5 5.0

    Reference:
      The diagnostics of AdaGC, https://arxiv.org/abs/2502.11034.
    """
    check_choice("level", level, LEVELS)
    check_choice("by", by, RANKINGS)
    check_count("worst", worst, low=1)
    scalars: Scalars = {}
    top = _with_slash(prefix)
    first = 0
    for section in read(opt_state, params):
        start = top + section.prefix
        numbers = totals(section)
        if level == "all":
            numbers |= _every_tensor(section)
        elif level == "worst":
            numbers |= _worst_tensors(section, int(worst), by, first)
        scalars |= {f"{start}{name}": value for name, value in numbers.items()}
        first += len(section.names)
    return scalars


def _with_slash(prefix: Any) -> str:
    if not (prefix is None or isinstance(prefix, str)):
        raise ValueError(f"prefix must be text or None, got {prefix!r}.")
    return f"{prefix}/" if prefix else ""


def group_names(opt_state: Any, params: Any = None) -> tuple[str, ...]:
    """The names of all tensors, layers and experts that have metrics.

    They are the middle parts of the names of ``clip_metrics(..., level="all")``, and
    what ``clip/worst/0/index`` of level ``"worst"`` counts. Needs no values: call it
    once, also on a traced or abstract state.

    Args:
      opt_state: Any optimizer state with a clipper in it, as in `clip_metrics`.
      params: The parameters, as in `clip_metrics`.

    Returns:
      One name for each group, no two alike.

    Raises:
      ValueError: if there is no clipping state in ``opt_state``, or it has lost its
        names and ``params`` do not give them back.

    Example:
      >>> import adagc_jax, jax.numpy as jnp
      >>> clip = adagc_jax.adagc(groups=adagc_jax.stacked({"layers/": 0}))
      >>> state = clip.init({"layers": {"q": jnp.ones((2, 3))}, "head": jnp.ones(3)})
      >>> adagc_jax.group_names(state)
      ('head', 'layers/0/q', 'layers/1/q')
    """
    return tuple(
        prefix + name
        for prefix, members in named_states(opt_state, params)
        for member in members
        for name in member.names
    )


def totals(section: Section) -> Scalars:
    """The totals of the clippers that are reported together."""
    scale, active = section.column("scale"), section.column("active")
    xp = xp_of(scale)
    # A scale of zero is that of a group dropped for a non-finite norm.
    clipped = (scale < 1.0) & (scale > 0.0)
    seen = xp.stack([reading.norm_seen for reading in section.readings])
    return {
        "norm_before": _root_sum_squares(section.column("norm_before")),
        "norm_after": _root_sum_squares(section.column("norm_after")),
        # A lone one must keep its bits.
        "norm_seen": seen[0] if len(seen) == 1 else _root_sum_squares(seen),
        "fraction_clipped": rate(xp.sum(clipped.astype(xp.float32)), clipped.size),
        "clip_rate": rate(xp.sum(section.column("clipped")), xp.sum(active)),
        "min_scale": xp.min(scale, initial=1.0),
        "nonfinite": xp.sum(section.column("nonfinite"), dtype=xp.int32),
        "step": section.readings[0].step,
        **_whole_tree(section.readings),
    }


def _root_sum_squares(norms: Any) -> Any:
    xp = xp_of(norms)
    # NumPy warns where XLA does not, of a sum that is infinite.
    with np.errstate(over="ignore", invalid="ignore"):
        return xp.sqrt(xp.sum(xp.square(norms)))


def _whole_tree(readings: tuple[Reading, ...]) -> Scalars:
    """Numbers of rules over the whole tree, numbered if several clippers have them."""
    owners = [reading for reading in readings if reading.whole]
    if len(owners) == 1:
        return owners[0].whole
    return {
        f"{name}_{number}": value
        for number, reading in enumerate(readings)
        for name, value in reading.whole.items()
    }


def _every_tensor(section: Section) -> Scalars:
    return {
        f"{name}/{column}": value
        for reading in section.readings
        for column in _shown(reading.table.pieces)
        for name, value in zip(
            reading.names, reading.table.scalars(column), strict=True
        )
    }


def _worst_tensors(section: Section, count: int, by: str, first: int) -> Scalars:
    order = ranking(section.column(by), section.column("norm_before"), by)[:count]
    xp = xp_of(order)
    columns = {name: section.column(name)[order] for name in _shown(section.columns)}
    columns["index"] = order.astype(xp.int32) + xp.int32(first)
    return {
        f"worst/{place}/{name}": values[place]
        for place in range(min(count, len(section.names)))
        for name, values in columns.items()
    }


def ranking(values: Any, norms: Any, by: str) -> Any:
    """Places of the groups, the worst first; of equals, the larger norm first."""
    xp = xp_of(values)
    badness = values.astype(xp.float32) * xp.float32(-1.0 if by == "scale" else 1.0)
    # NaN is worse than any number.
    first, then = (xp.where(xp.isnan(x), xp.inf, x) for x in (badness, norms))
    return xp.lexsort((-then, -first))


def _shown(columns: Any) -> Iterator[str]:
    return (name for name in columns if name != "clipped")
