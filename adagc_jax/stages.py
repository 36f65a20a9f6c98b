"""Runs the rules of one update on norms: everything between reduce and scale."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from adagc_jax.layout import Parts, Regroup, load, store
from adagc_jax.plan import Plan, Stage
from adagc_jax.rules import Observation, Rule
from adagc_jax.state import (
    StageState,
    join_rule_states,
    split_rule_state,
    unpack_stage,
)


class Environment(NamedTuple):
    """What all stages of one update share."""

    step: jax.Array
    nonfinite: str
    steady: bool


class Run(NamedTuple):
    """What the stages of one update came to, in the finest groups."""

    scale: Parts
    after: Parts
    states: tuple[StageState, ...]


def is_local(stages: Sequence[Stage], env: Environment) -> bool:
    """Whether the scale of a tensor depends on the norm of that tensor alone."""
    if env.nonfinite == "skip":
        return False
    return all(
        not stage.groups.whole and (env.steady or not stage.rule.needs_total)
        for stage in stages
    )


def local_scales(
    plan: Plan,
    stages: Sequence[Stage],
    states: Sequence[StageState],
    squares: list[jax.Array],
    param_squares: list[jax.Array] | None,
    env: Environment,
) -> list[jax.Array]:
    """The scales once more, each from its own leaf's norm.

    Taken from the packed vector, every scale would wait for all norms, and the compiler
    would have to keep every gradient alive until the last one is there.
    """
    unpacked = [
        unpack_stage(stage, s.coarse, state)
        for stage, s, state in zip(stages, plan.stages, states, strict=True)
    ]
    run = run_stages(plan.apart, stages, unpacked, tuple(squares), param_squares, env)
    return list(run.scale)


def run_stages(
    plan: Plan,
    stages: Sequence[Stage],
    states: Sequence[StageState],
    squares: Parts,
    param_squares: list[jax.Array] | None,
    env: Environment,
) -> Run:
    """Runs the rules one after another on the norms that the one before has left."""
    param_parts = None if param_squares is None else plan.base.pack(param_squares)
    halted = jnp.asarray(False)
    if env.nonfinite == "skip":
        halted = ~jnp.all(jnp.stack([jnp.all(jnp.isfinite(p)) for p in squares]))
    scale = tuple(jnp.where(halted, 0.0, jnp.ones_like(p)) for p in squares)
    new_states = []
    for stage, regroup, state in zip(stages, plan.stages, states, strict=True):
        observations = _observations(
            stage.rule, regroup, state, squares, param_parts, env
        )
        stage_scale, new_state = _run_stage(
            stage.rule, observations, state, env.nonfinite, halted
        )
        new_states.append(new_state)
        fine_scale = regroup.spread(stage_scale)
        scale = tuple(a * b for a, b in zip(scale, fine_scale, strict=True))
        squares = tuple(
            jnp.where(b == 0.0, 0.0, (a * b) * b)
            for a, b in zip(squares, fine_scale, strict=True)
        )
    return Run(scale, squares, tuple(new_states))


def _observations(
    rule: Rule,
    regroup: Regroup,
    state: StageState,
    squares: Parts,
    param_parts: Parts | None,
    env: Environment,
) -> list[Observation]:
    grouped = regroup.gather(squares)
    seen = load(state.seen)
    total = None
    if rule.needs_total and not env.steady:
        total = _total_norm(grouped)
    if rule.needs_params and param_parts is not None:
        param_norms = [jnp.sqrt(p) for p in regroup.gather(param_parts)]
    else:
        param_norms = [None] * len(grouped)
    return [
        Observation(jnp.sqrt(square), seen_part, env.step, total, param_norm)
        for square, seen_part, param_norm in zip(
            grouped, seen, param_norms, strict=True
        )
    ]


def _total_norm(squares: Parts) -> jax.Array:
    """Norm over all finite groups: one bad tensor must not hide the others."""
    finite = [jnp.sum(jnp.where(jnp.isfinite(p), p, 0.0)) for p in squares]
    return jnp.sqrt(jnp.sum(jnp.stack(finite)))


def _run_stage(
    rule: Rule,
    observations: list[Observation],
    state: StageState,
    nonfinite: str,
    halted: jax.Array,
) -> tuple[Parts, StageState]:
    scales, seen, rule_states = [], [], []
    old_states = split_rule_state(rule, state.rule, len(observations))
    for obs, old in zip(observations, old_states, strict=True):
        scale = _settled_scale(rule, obs, old, nonfinite)
        active = jnp.isfinite(obs.norm) & (obs.norm > 0.0) & ~halted
        new = rule.update(obs, scale, old)
        scales.append(scale)
        seen.append(obs.seen + active.astype(jnp.int32))
        rule_states.append(
            jax.tree.map(lambda n, o, a=active: jnp.where(a, n, o), new, old)
        )
    new_state = StageState(store(tuple(seen)), join_rule_states(rule, rule_states))
    return tuple(scales), new_state


def _settled_scale(
    rule: Rule, obs: Observation, state: Any, nonfinite: str
) -> jax.Array:
    """The rule's scale, or what is due where the norm is zero or not finite."""
    scale = jnp.where(obs.norm > 0.0, rule.scale(obs, state), 1.0)
    instead = 1.0 if nonfinite == "propagate" else 0.0
    return jnp.where(jnp.isfinite(obs.norm), scale, instead)
