"""Runs the rules of one update on norms: everything between reduce and scale."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from adagc_jax.layout import Parts, load, store
from adagc_jax.manual import pooled
from adagc_jax.plan import Plan, Stage
from adagc_jax.regroup import Regroup
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
    """What the stages of one update came to, in the finest groups.

    Attributes:
      scale: Factor on each group's gradient.
      squares: Sums of squares of what is emitted.
      dropped: Groups that a non-finite norm, their own or another's, has zeroed.
      states: The state of each stage after the update; none if it was only asked for
        scales.
      norm_seen: The norm over the whole tree that the first rule to need one saw,
        f32[]; 0 if none did.
    """

    scale: Parts
    squares: Parts
    dropped: Parts
    states: tuple[StageState, ...]
    norm_seen: jax.Array


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
    run = run_stages(
        plan.apart, stages, unpacked, tuple(squares), param_squares, env, learn=False
    )
    return list(run.scale)


def run_stages(
    plan: Plan,
    stages: Sequence[Stage],
    states: Sequence[StageState],
    squares: Parts,
    param_squares: list[jax.Array] | None,
    env: Environment,
    *,
    learn: bool = True,
) -> Run:
    """Runs the rules one after another on the norms that the one before has left."""
    param_parts = None if param_squares is None else plan.base.pack(param_squares)
    run, norm_seen = _start(squares, env.nonfinite), None
    for stage, regroup, state in zip(stages, plan.stages, states, strict=True):
        rule = stage.rule
        observations = _observations(rule, regroup, state, run, param_parts, env)
        norm_seen = norm_seen if norm_seen is not None else _seen(stage, observations)
        rule_states = split_rule_state(rule, state.rule, len(observations))
        scales = tuple(
            _settled_scale(rule, obs, rule_state, env.nonfinite)
            for obs, rule_state in zip(observations, rule_states, strict=True)
        )
        if learn:
            new_state = _learn(rule, observations, scales, rule_states)
            run = run._replace(states=(*run.states, new_state))
        broken = tuple(~jnp.isfinite(obs.norm) for obs in observations)
        run = _advance(run, regroup.spread(scales), regroup.spread(broken), env)
    return run if norm_seen is None else run._replace(norm_seen=norm_seen)


def _start(squares: Parts, nonfinite: str) -> Run:
    """Nothing scaled yet; after a non-finite norm, ``"skip"`` zeroes all from here."""
    halted = jnp.asarray(False)
    if nonfinite == "skip":
        bad = [pooled(jnp.sum(~jnp.isfinite(p), dtype=jnp.int32)) for p in squares]
        halted = jnp.sum(jnp.stack(bad)) > 0
    return Run(
        scale=tuple(jnp.where(halted, 0.0, jnp.ones_like(p)) for p in squares),
        # To the rules, a group without a gradient is idle: none of them moves.
        squares=tuple(jnp.where(halted, 0.0, p) for p in squares),
        dropped=tuple(jnp.broadcast_to(halted, p.shape) for p in squares),
        states=(),
        norm_seen=jnp.zeros((), jnp.float32),
    )


def _advance(run: Run, scale: Parts, broken: Parts, env: Environment) -> Run:
    """The run after one more stage has scaled its groups."""
    emits_zero = env.nonfinite != "propagate"
    return run._replace(
        scale=tuple(a * b for a, b in zip(run.scale, scale, strict=True)),
        squares=tuple(
            jnp.where(b == 0.0, 0.0, (a * b) * b)
            for a, b in zip(run.squares, scale, strict=True)
        ),
        dropped=tuple(
            a | (b & emits_zero) for a, b in zip(run.dropped, broken, strict=True)
        ),
    )


def _observations(
    rule: Rule,
    regroup: Regroup,
    state: StageState,
    run: Run,
    param_parts: Parts | None,
    env: Environment,
) -> list[Observation]:
    grouped = regroup.gather(run.squares, state.seen)
    seen = load(state.seen)
    total = None
    if rule.needs_total and not env.steady:
        total = _total_norm(grouped)
    if rule.needs_params and param_parts is not None:
        param_norms = [jnp.sqrt(p) for p in regroup.gather(param_parts, state.seen)]
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
    finite = [pooled(jnp.sum(jnp.where(jnp.isfinite(p), p, 0.0))) for p in squares]
    return jnp.sqrt(jnp.sum(jnp.stack(finite)))


def _seen(stage: Stage, observations: list[Observation]) -> jax.Array | None:
    """The norm over the whole tree among what a rule sees, if it sees one."""
    if stage.groups.whole:
        return observations[0].norm[0]
    total = observations[0].total
    if total is None:
        return None
    return jnp.where(stage.rule.uses_total(observations[0].step), total, 0.0)


def _learn(
    rule: Rule,
    observations: list[Observation],
    scales: Parts,
    rule_states: list[Any],
) -> StageState:
    """The stage's state after active groups have learned from this update."""
    seen, learned = [], []
    for obs, scale, old in zip(observations, scales, rule_states, strict=True):
        active = jnp.isfinite(obs.norm) & (obs.norm > 0.0)
        new = rule.update(obs, scale, old)
        seen.append(obs.seen + active.astype(jnp.int32))
        learned.append(
            jax.tree.map(lambda n, o, a=active: jnp.where(a, n, o), new, old)
        )
    return StageState(store(tuple(seen)), join_rule_states(rule, learned))


def _settled_scale(
    rule: Rule, obs: Observation, state: Any, nonfinite: str
) -> jax.Array:
    """The rule's scale, or what is due where the norm is zero or not finite."""
    scale = jnp.where(obs.norm > 0.0, rule.scale(obs, state), 1.0)
    instead = 1.0 if nonfinite == "propagate" else 0.0
    return jnp.where(jnp.isfinite(obs.norm), scale, instead)
