"""Takes the state of a running optimizer over into another optimizer.

old state --> records --+
                        +--> matches --> arrays: kept, mixed or new --> new state
new optimizer's init ---+       |
(shapes only)                   +--> TransferReport
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from adagc_jax.restore import check_optimizer, check_state
from adagc_jax.transfer_arrays import find_pieces, make_arrays
from adagc_jax.transfer_match import Match, match
from adagc_jax.transfer_records import Key, Record, is_named_tuple, take_apart
from adagc_jax.transfer_report import (
    DROPPED,
    KEPT,
    NEW,
    Row,
    TransferReport as TransferReport,
)


class Transfer(NamedTuple):
    """What `transfer_state` returns.

    Attributes:
      state: State of the new optimizer.
      report: What was kept, new and dropped.
    """

    state: Any
    report: TransferReport


def transfer_state(
    old_state: Any, new_optimizer: Any, params: Any, *, reset: Sequence[str] = ()
) -> Transfer:
    """Goes on with a new optimizer where an old one is: no number is lost silently.

    The named tuples in both states are matched by type, and the numbers in them by
    field, path of the tensor, shape and dtype. So the moments of a tensor follow it
    into another chain, mask, partition, ``MultiSteps``, ``inject_hyperparams`` or
    guard. The rules in full:

    - A clipper's numbers are matched per rule and tensor. A tensor whose groups have
      changed (from one for the tensor to one per layer) starts anew: a reference cannot
      be split. So does one over the whole tree if other tensors are clipped.
    - A clipper's step and metrics come along with its rules. If no rule with memory
      keeps a number (another method), they start anew, and so does the warm-up.
    - Numbers that belong to no tensor, such as Adam's count, are carried over if all of
      their named tuple fit and some tensor of it was kept, if it has any.
    - Where two named tuples of a type fit (two Adams over the same tensors), the one at
      the same site in the state is taken (``inner_states/decay``; positions in a chain
      do not count), preferably with the same tensors, then, if there are as many in
      both states, that at the same place in their order. Otherwise they are new, and
      reported as ambiguous.
    - A schedule goes on in ``optax.inject_hyperparams``, and outside of it.
    - A window of ``optax.MultiSteps`` that is open goes on; no state tells whether
      ``k`` is another now, and with another one it is lost. The report says so.
    - ``hyperparams`` of ``optax.inject_hyperparams`` are those of the new optimizer.

    A tensor that is new to an Adam whose count goes on has no bias correction: its
    first steps are up to ``(1 - b1) / sqrt(1 - b2)`` = 3.2 times the learning rate.
    An Adam of its own (``optax.partition``) avoids that.

    Args:
      old_state: State of the old optimizer, with its types; see `restore_state` for a
        checkpoint that has lost them. Do not use it any more if you donate the new one:
        they share arrays.
      new_optimizer: Anything with an ``init``.
      params: The parameters that the new optimizer will update. Arrays, or
        ``jax.ShapeDtypeStruct`` unless ``init`` reads values that have to be new (an
        average of the parameters).
      reset: Regular expressions searched in paths such as ``layers/0/embed``: rules of
        clippers start anew on these tensors, with the norm that they see first. Step,
        metrics and moments are left alone. ``".*"`` finds the whole tree's as well.

    Returns:
      A pair: the new state, and a `TransferReport` with ``kept``, ``new`` and
      ``dropped`` that prints as a table. Carried arrays keep their sharding. New ones
      have that of the parameter whose path and shape they have, and are replicated on
      the mesh of the parameters otherwise; without a mesh they are where ``init`` puts
      them. In a job of several processes all have to call it.

    Raises:
      ValueError: for a pattern that is none or matches no tensor, a state without types
        or names of tensors, None, or state and optimizer mixed up.

    Example:
      >>> import adagc_jax, jax.numpy as jnp, optax
      >>> params = {"w": jnp.ones(3)}
      >>> old = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3))
      >>> new = optax.chain(adagc_jax.tensor_gc(1.0), optax.adam(1e-3))
      >>> state, report = adagc_jax.transfer_state(old.init(params), new, params)
      >>> report.kept
      ['1/0/count', '1/0/mu/w', '1/0/nu/w']
      >>> report.dropped
      []

    Reference:
      The state that goes on is that of AdaGC, https://arxiv.org/abs/2502.11034.
    """
    check_state("old_state", old_state)
    check_optimizer("new_optimizer", new_optimizer)
    target = jax.eval_shape(new_optimizer.init, params)
    _check_types(old_state, target)
    old, new = take_apart(old_state, params), take_apart(target, params)
    matches = match(old, new, reset)
    pieces = find_pieces(old, new, matches, len(jax.tree.leaves(target)))
    windows = _open_windows(old, jax.tree.leaves(old_state))
    leaves = make_arrays(pieces, old_state, new_optimizer, params, target)
    state = jax.tree.unflatten(jax.tree.structure(target), leaves)
    return Transfer(state, TransferReport(tuple(_rows(old, new, matches, windows))))


def _check_types(old_state: Any, target: Any) -> None:
    def has_types(tree: Any) -> bool:
        return any(map(is_named_tuple, jax.tree.leaves(tree, is_leaf=is_named_tuple)))

    if jax.tree.leaves(old_state) and has_types(target) and not has_types(old_state):
        raise ValueError(
            f"old_state is a {type(old_state).__name__} without any named tuple, as "
            "from a checkpoint restored without a target: put its types back with "
            "restore_state(old_state, old_optimizer, old_params)."
        )


def _open_windows(old: Sequence[Record], leaves: Sequence[Any]) -> dict[int, str]:
    """What to say of each ``MultiSteps`` that is between two of its updates."""
    remarks: dict[int, str] = {}
    for number, record in enumerate(old):
        slot = record.slots.get(("mini_step",))
        if record.kind is optax.MultiStepsState and slot is not None:
            step = leaves[slot.leaf]
            known = not isinstance(step, jax.ShapeDtypeStruct)
            if not known or np.any(np.asarray(step)):
                remarks[number] = (
                    f"a window is open at mini_step {step if known else 'unknown'}: "
                    "with another k it is lost, so change k between windows"
                )
    return remarks


def _rows(
    old: Sequence[Record],
    new: Sequence[Record],
    matches: Sequence[Match],
    windows: dict[int, str],
) -> list[Row]:
    rows, used = [], set()
    for m in matches:
        row = _row(NEW, new[m.record], m.key)._replace(why=m.why)
        if m.source is not None:
            used.add((m.source, m.key))
            origin = _row(KEPT, old[m.source], m.key)
            why = "; ".join(filter(None, (m.why, windows.get(m.source))))
            row = row._replace(
                status=KEPT, origin=origin.path, source=origin.part, why=why
            )
        rows.append(row)
    for number, record in enumerate(old):
        dropped = [key for key in record.slots if (number, key) not in used]
        rows += [_row(DROPPED, record, key) for key in dropped]
    return rows


def _row(status: str, record: Record, key: Key) -> Row:
    path, tensor = record.slots[key].path, "/".join(key[1:])
    return Row(status, path, record.title, key[0], tensor)
