"""One update of AdaGC and AdamW: by the kernel where it serves, by XLA elsewhere.

    gradients, chain's state -> plan -> routes -> kernel    -> moments, out, squares -+
                                          |                                           |
                                          +-> XLA: squares -> scaled -> optax.adamw   |
                                                                      ClipState <-----+

The state is that of ``optax.chain(adagc(...), optax.adamw(...))``, counters included,
which optax counts on.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from adagc_jax.checks import check_state_type, complement, evaluate
from adagc_jax.clip import scaled, settle
from adagc_jax.ema_ratio import EmaRatio
from adagc_jax.groups import Groups, Patterns
from adagc_jax.kernels import xla
from adagc_jax.kernels.adamw_leaf import Done, Hypers, Leaf, fused, why_not_fused
from adagc_jax.kernels.backend import Backend
from adagc_jax.kernels.placement import device_kind
from adagc_jax.kernels.routes import Asked, Route, noted, route_of
from adagc_jax.leaves import Mask, params_at
from adagc_jax.manual import axes_to_sum
from adagc_jax.plan import Plan, Stage, make_plan
from adagc_jax.reduce import Reduce, asked, shards, sums_of_squares
from adagc_jax.shards import from_view, to_view
from adagc_jax.stages import Environment
from adagc_jax.state import ClipState, check_fits, split_axes, unpack_stage


@dataclasses.dataclass(frozen=True)
class Program:
    """What one update is made of.

    Attributes:
      stage: AdaGC's rule and groups.
      plan_for: From a tree to its plan.
      adamw: optax's, for what the kernel does not serve and for the counters.
      numbers: AdamW's arguments ``b1``, ``b2``, ``eps``, ``weight_decay`` and
        ``learning_rate``; the last two may be schedules.
      backend: Which kernel was asked for.
      axis_names: Mesh axes that norms go over inside ``shard_map``.
    """

    stage: Stage
    plan_for: Callable[[Any], Plan]
    adamw: Any
    numbers: dict[str, Any]
    backend: Backend
    axis_names: tuple[str, ...] | Patterns


def new_program(
    rule: EmaRatio, groups: Groups, mask: Mask, exclude: Sequence[str], **rest: Any
) -> Program:
    """The program of AdaGC's arguments and the rest."""
    plan_for = functools.partial(
        make_plan, all_groups=[groups], mask=mask, exclude=exclude
    )
    return Program(Stage(rule, groups), plan_for, **rest)


def update(
    program: Program, grads: Any, state: Any, params: Any, in_place: bool
) -> tuple[Any, Any]:
    """The updates, or with ``in_place`` the new parameters; and the next state."""
    clip_state, (adam, *counts) = state
    check_state_type(clip_state, ClipState)
    plan = program.plan_for(grads)
    check_fits(plan, clip_state)
    flat, treedef = jax.tree.flatten(grads)
    parts = [flat, *map(treedef.flatten_up_to, (adam.mu, adam.nu, params))]
    params_at(params, plan.base.paths, [flat[i] for i in plan.positions])

    done = _by_kernel(program, plan, clip_state, parts, (adam, *counts), in_place)
    new_clip = _clip(program, plan, clip_state, flat, done)
    rest = [i for i in range(len(flat)) if i not in done]
    chosen = [[part[i] for i in rest] for part in parts]
    adam_rest = adam._replace(mu=chosen[1], nu=chosen[2])
    out, (adam_rest, *counts) = program.adamw.update(
        chosen[0], (adam_rest, *counts), chosen[3]
    )
    if in_place:
        out = optax.apply_updates(chosen[3], out)

    def merged(others: Any, field: str) -> Any:
        by_place = dict(zip(rest, others, strict=True))
        by_place |= {i: getattr(leaf, field) for i, leaf in done.items()}
        return treedef.unflatten([by_place[i] for i in range(len(flat))])

    adam = adam_rest._replace(
        mu=merged(adam_rest.mu, "m"), nu=merged(adam_rest.nu, "v")
    )
    return merged(out, "out"), (new_clip, (adam, *counts))


def _by_kernel(
    program: Program,
    plan: Plan,
    state: ClipState,
    parts: Sequence[Sequence[jax.Array]],
    adam_states: Any,
    in_place: bool,
) -> dict[int, Done]:
    """What the kernel makes of the leaves that it serves, by place in the tree."""
    stage, rule = program.stage, program.stage.rule
    assert isinstance(rule, EmaRatio)
    past = unpack_stage(stage, plan.stages[0].coarse, state.stages[0])
    gammas = [
        jnp.where(seen > 0, gamma, jnp.inf)
        for seen, gamma in zip(past.seen, past.rule.gamma, strict=True)
    ]
    leaves = [
        Leaf._make([*(part[place] for part in parts), gamma])
        for place, gamma in zip(plan.positions, gammas, strict=True)
    ]
    limits = xla.Hypers(
        lambda_rel=evaluate(rule.lambda_rel, state.clip_step),
        weight=complement(rule.beta, state.clip_step),
        eps=evaluate(rule.eps, state.clip_step),
    )
    hypers = _hypers(program.numbers, adam_states)
    interpret = program.backend.interpret
    return {
        place: fused(leaf, axes, limits, hypers, in_place, interpret)
        for place, leaf, axes, route in zip(
            plan.positions,
            leaves,
            plan.base.axes,
            _routes(program, plan, state, leaves),
            strict=True,
        )
        if route.backend != "xla"
    }


def _routes(
    program: Program, plan: Plan, state: ClipState, leaves: Sequence[Leaf]
) -> list[Route]:
    own = shards(plan, [leaf.g for leaf in leaves], split_axes(plan, state))
    summed = axes_to_sum(own, program.axis_names)
    gradients = asked(plan, [leaf.g for leaf in leaves])
    found = [
        _route(*of_leaf, program.backend)
        for of_leaf in zip(leaves, gradients, summed, strict=True)
    ]
    return noted(found, program.backend)


def _route(
    leaf: Leaf, gradient: Asked, summed: tuple[str, ...], backend: Backend
) -> Route:
    route = route_of(gradient, backend)
    if route.backend == "xla":
        return route
    if summed:
        why = f"its norm goes over {summed}, and the kernel cannot wait for it"
    elif route.sharding is not None:
        why = "it is on several devices, where its kernel runs inside shard_map only"
    else:
        why = why_not_fused(leaf, gradient.keep, device_kind(leaf.g))
    return route._replace(backend="xla", why=why, sharding=None) if why else route


def _clip(
    program: Program,
    plan: Plan,
    state: ClipState,
    flat: list[Any],
    done: dict[int, Done],
) -> ClipState:
    """AdaGC's next state; scales the gradients in ``flat`` that are not done."""
    known = {
        i: done[place].squares
        for i, place in enumerate(plan.positions)
        if place in done
    }
    leaves = [
        to_view(flat[place], view)
        for place, view in zip(plan.positions, plan.views, strict=True)
    ]
    by_xla = Reduce(Backend("xla"), program.axis_names)
    squares = sums_of_squares(plan, leaves, split_axes(plan, state), by_xla, known)
    env = Environment(state.clip_step, "zero", steady=True)
    new_state, scales = settle(plan, [program.stage], state, squares, None, env)
    for i, place in enumerate(plan.positions):
        if place not in done:
            emitted = scaled(leaves[i], plan.base.axes[i], scales[i])
            flat[place] = from_view(emitted, plan.views[i], flat[place].shape)
    return new_state


def _hypers(numbers: dict[str, Any], adam_states: Any) -> Hypers:
    """AdamW's numbers in this update, as optax has them."""
    adam, decay_state, rate_state = adam_states
    b1, b2 = numbers["b1"], numbers["b2"]
    count = jnp.asarray(optax.safe_increment(adam.count)).astype(jnp.float32)
    decay, rate = numbers["weight_decay"], numbers["learning_rate"]
    if callable(decay):
        decay = evaluate(decay, decay_state.count)
    if callable(rate):
        rate = evaluate(rate, rate_state.count)
    return Hypers(
        b1=b1,
        b2=b2,
        eps=numbers["eps"],
        weight_decay=decay,
        step_size=-rate,
        correction1=1.0 - b1**count,
        correction2=1.0 - b2**count,
    )
