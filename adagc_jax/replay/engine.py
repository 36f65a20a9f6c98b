"""Runs a rule on logged norms: the code of the update, between reduce and scale.

Each logged tensor is a group of its own, or all of them are one; each step is one call
of `run_stages`, which is what the transforms call between reading the gradients and
scaling them. Nothing of any method is written down here again.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from adagc_jax.checks import check_choice
from adagc_jax.groups import Groups, per_tensor, whole_tree
from adagc_jax.layout import load
from adagc_jax.plan import Stage, make_plan
from adagc_jax.replay.history import History
from adagc_jax.replay.variants import Variant
from adagc_jax.rules import Observation, Rule
from adagc_jax.stages import Environment, run_stages
from adagc_jax.state import StageState, init_state, rule_structure

CHUNK = 1000
Progress = Callable[[int], Any]  # called with the number of steps just made


class Replayed(NamedTuple):
    """What a rule would have done with the norms of a run.

    Attributes:
      variant: The rule and its options.
      history: The norms of its groups, with the scales and references it would have
        had.
      states: The rule's state before each update, f32 or i32[time, groups] each.
      seen: Active observations of each group before each update.
    """

    variant: Variant
    history: History
    states: Any
    seen: np.ndarray


@dataclasses.dataclass(frozen=True, eq=False)
class GivenTotal(Rule):
    """A rule that sees the logged norm of the whole tree, where there is one.

    The norms of the tensors give that norm only up to rounding.
    """

    rule: Rule
    total: jax.Array

    needs_total: ClassVar[bool] = True

    def init(self, shape: tuple[int, ...]) -> Any:
        """The rule's own state."""
        return self.rule.init(shape)

    def scale(self, obs: Observation, state: Any) -> jax.Array:
        """The rule's scale."""
        return self.rule.scale(self._given(obs), state)

    def update(self, obs: Observation, scale: jax.Array, state: Any) -> Any:
        """The rule's next state."""
        return self.rule.update(self._given(obs), scale, state)

    def _given(self, obs: Observation) -> Observation:
        assert obs.total is not None
        known = self.total > 0.0
        return obs._replace(total=jnp.where(known, self.total, obs.total))


class Inputs(NamedTuple):
    """One step, or with a leading axis several: ``norm`` f32[groups], the rest []."""

    norm: Any
    total: Any
    update: Any


class Outcome(NamedTuple):
    """What a rule did in one step, per group."""

    scale: jax.Array
    dropped: jax.Array


def initial_state(rule: Rule, whole: bool, groups: int) -> StageState:
    """The rule's state before the first update."""
    stage, tree = Stage(rule, _groups(whole)), _tree(groups)
    plan = make_plan(tree, [stage.groups], mask=None, exclude=())
    return init_state(plan, [stage], tree).stages[0]


def step(
    rule: Rule, whole: bool, nonfinite: str, state: StageState, inputs: Inputs
) -> tuple[StageState, Outcome]:
    """One update of the rule, given norms instead of gradients."""
    stage = Stage(_given(rule, inputs.total), _groups(whole))
    tree = _tree(inputs.norm.shape[0])
    plan = make_plan(tree, [stage.groups], mask=None, exclude=())
    env = Environment(inputs.update, nonfinite, steady=False)
    # The root of a float32 square is the number itself, within the range of norms.
    squares = (jnp.square(inputs.norm),)
    run = run_stages(plan, [stage], [state], squares, None, env)
    return run.states[0], Outcome(run.scale[0], run.dropped[0])


def chunks(history: History, size: int = CHUNK) -> Iterator[tuple[Inputs, int]]:
    """The steps of a history, some at a time, and how many there are in each.

    The last chunk is filled up with steps without gradients, in which no rule moves.
    """
    for start in range(0, len(history.steps), size):
        rows = slice(start, start + size)
        inputs = Inputs(
            history.norm[rows], history.total[rows], _as_int32(history.updates[rows])
        )
        count = len(inputs.norm)
        yield jax.tree.map(lambda x, n=count: _filled(x, size - n), inputs), count


def replay(
    history: History,
    variant: Variant,
    *,
    nonfinite: str = "zero",
    progress: Progress | None = None,
) -> Replayed:
    """What a rule would have done with the norms of a run.

    With the rule, the options and the non-finite policy of the run itself, and
    ``norm_seen`` in the log, scales and references are those of the run bit for bit
    (on the backend that it ran on; another one may round differently).

    Args:
      history: Of `read_history`.
      variant: Of `make_variant`.
      nonfinite: Policy for NaN and infinite norms, as in `clip_by_rule`.
      progress: Called now and then with the number of steps made since.

    Returns:
      A `Replayed`. A rule on the whole tree has one group, called ``whole tree``.

    Raises:
      ValueError: for an unknown policy, or a history without steps.

    Example:
      >>> import numpy as np
      >>> from adagc_jax.replay import History, make_variant
      >>> steps, norm = np.arange(3), np.array([[1.0], [1.0], [5.0]], np.float32)
      >>> history = History(("w",), steps, steps, norm, np.zeros(3, np.float32))
      >>> replay(history, make_variant("tensor_gc")).history.scale.ravel()
      array([1. , 1. , 0.2], dtype=float32)
    """
    check_choice("nonfinite", nonfinite, ("zero", "skip", "propagate"))
    if not history.norm.size:
        raise ValueError(
            f"history has no {'tensors' if len(history.steps) else 'steps'}: there is "
            "nothing to replay."
        )
    history = history.whole() if variant.whole else history
    rule = variant.rule()
    state = initial_state(rule, variant.whole, len(history.names))
    run_chunk = jax.jit(
        lambda carry, inputs: jax.lax.scan(
            lambda s, x: _recorded(s, *step(rule, variant.whole, nonfinite, s, x)),
            carry,
            inputs,
        )
    )
    size = min(CHUNK, len(history.steps))
    parts = []
    for inputs, count in chunks(history, size):
        state, (before, outcome) = run_chunk(state, inputs)
        parts.append(
            jax.tree.map(lambda x, n=count: np.asarray(x)[:n], (before, outcome))
        )
        if progress is not None:
            progress(count)
    before, outcome = jax.tree.map(lambda *x: np.concatenate(x), *parts)
    del parts
    reference = _reference(rule, before, state)
    return Replayed(
        variant=variant,
        history=history.replace(scale=outcome.scale, reference=reference),
        states=before.rule,
        seen=before.seen,
    )


def _recorded(
    before: StageState, after: StageState, outcome: Outcome
) -> tuple[StageState, tuple[StageState, Outcome]]:
    return after, (before, outcome)


def _given(rule: Rule, total: jax.Array) -> Rule:
    return GivenTotal(rule, total) if rule.needs_total else rule


def _groups(whole: bool) -> Groups:
    return whole_tree() if whole else per_tensor()


def _tree(groups: int) -> list[np.ndarray]:
    """A stand-in for the gradients: one number for each logged norm."""
    return [np.zeros((), np.float32)] * groups


def _reference(rule: Rule, before: StageState, last: StageState) -> np.ndarray | None:
    """The rule's own norm after each update: gamma, a mean; none without memory."""
    if not rule_structure(rule).num_leaves:
        return None
    first = jax.tree.leaves(before.rule)[0]
    final = load(jax.tree.leaves(last.rule)[0])[0]
    after = np.concatenate([first[1:], np.asarray(final)[None]])
    seen = np.concatenate([before.seen[1:], np.asarray(load(last.seen)[0])[None]])
    return np.where(seen > 0, after, np.nan).astype(np.float32)


def _as_int32(updates: np.ndarray) -> np.ndarray:
    return np.minimum(updates, np.iinfo(np.int32).max).astype(np.int32)


def _filled(array: np.ndarray, rows: int) -> np.ndarray:
    return np.pad(array, [(0, rows)] + [(0, 0)] * (array.ndim - 1))
