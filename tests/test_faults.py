"""Fault injection: thousands of random gradient streams through every transform.

A fault spoils a whole tensor of one update, or one element of it. What must hold after
every update: emitted gradients and state are finite, groups without faults are bit for
bit those of the clean run, and a group with faults goes on as if these updates had not
been, from the very next one. Stand-alone, this prints the counts:

    python tests/test_faults.py
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import adagc_jax as aj
from adagc_jax.accumulate import fresh_windows
from adagc_jax.guard import guard
from adagc_jax.state import StageState

STREAMS, STEPS = 400, 24
LEAVES = ("a", "b", "c")
SHAPES = {"a": (3,), "b": (2, 2), "c": ()}
DTYPES = {"a": np.float32, "b": jnp.bfloat16, "c": np.float16}
RATE = 0.06

# Of one element, or of all of them (a tensor that is dropped, or has all but died).
NOT_FINITE = (np.nan, np.inf, -np.inf)
TOO_LARGE = (1e38, -1e38)
IDLE = (0.0, 1e-38, 1e-40)


class Kind(NamedTuple):
    """A transform, and the updates that it must treat as if they had not been.

    Attributes:
      make: Makes the transform.
      scope: Whose faults these are: "leaf", each tensor's own; "tree", those of any
        tensor, and updates without a gradient; "step", what is not finite in any
        tensor; "window", the same, for two updates at a time.
      large: Whether a gradient whose norm overflows is among the faults.
    """

    make: Any
    scope: str
    large: bool = True


def with_momentum(clip: Any) -> Any:
    # Not Adam: its float16 moments divide zero by zero on gradients without faults.
    return optax.chain(clip, optax.trace(0.9))


def window_of_two(inner: Any) -> Any:
    return optax.MultiSteps(inner, 2)


adagc = functools.partial(aj.adagc, warmup_steps=0)
zclip = functools.partial(aj.zclip, warmup_steps=3, max_grad_norm=None)
KINDS: dict[str, Kind] = {
    "adagc": Kind(adagc, "leaf"),
    "adagc_ema": Kind(lambda: adagc(warmup_init="ema"), "leaf"),
    "adagc_skip": Kind(lambda: adagc(nonfinite="skip"), "step"),
    "adagc_global": Kind(lambda: adagc(groups=aj.whole_tree()), "tree"),
    "agc": Kind(lambda: aj.agc(0.1, unit="tensor"), "leaf"),
    "global_gc": Kind(lambda: aj.global_gc(1.0), "tree"),
    "tensor_gc": Kind(lambda: aj.tensor_gc(1.0), "leaf"),
    "zclip": Kind(zclip, "tree"),
    "zclip_tensor": Kind(lambda: zclip(groups=aj.per_tensor()), "leaf"),
    "guard": Kind(lambda: guard(with_momentum(aj.adagc(warmup_steps=3))), "step"),
    "guard_around_multi_steps": Kind(
        lambda: guard(window_of_two(with_momentum(adagc()))), "step"
    ),
    "guard_in_multi_steps": Kind(
        lambda: fresh_windows(window_of_two(guard(with_momentum(adagc())))),
        "window",
    ),
    "apply_if_finite": Kind(
        lambda: optax.apply_if_finite(with_momentum(adagc()), STEPS),
        "step",
        large=False,
    ),
}


class Report(NamedTuple):
    """Streams tried, faults injected, and the broken promises by name."""

    streams: int
    faults: int
    violations: dict[str, int]


class Faulty(NamedTuple):
    """Gradients with faults; ``bad`` (not finite) and ``idle`` per tensor and step."""

    grads: dict[str, np.ndarray]
    bad: dict[str, np.ndarray]
    idle: dict[str, np.ndarray]


def clean_streams(rng: np.random.Generator) -> dict[str, np.ndarray]:
    sizes = np.exp(0.3 * rng.normal(size=(STREAMS, STEPS)))
    return {
        leaf: (
            sizes.reshape(STREAMS, STEPS, *(1 for _ in SHAPES[leaf]))
            * rng.normal(size=(STREAMS, STEPS, *SHAPES[leaf]))
        ).astype(DTYPES[leaf])
        for leaf in LEAVES
    }


def spoil(clean: dict[str, np.ndarray], kind: Kind, rng: np.random.Generator) -> Faulty:
    grads = {leaf: clean[leaf].copy() for leaf in LEAVES}
    bad, idle = ({x: np.zeros((STREAMS, STEPS), bool) for x in LEAVES} for _ in "12")
    values = NOT_FINITE + TOO_LARGE * kind.large
    bursts = rng.random((STREAMS, STEPS)) < RATE / 4
    for leaf in LEAVES:
        idle[leaf] = rng.random((STREAMS, STEPS)) < RATE
        # A burst of zeros, three updates long, in all tensors.
        zero = bursts | np.roll(bursts, 1, axis=1) | np.roll(bursts, 2, axis=1)
        fill = np.where(zero, 0.0, rng.choice(IDLE, size=zero.shape))
        idle[leaf] |= zero
        places = np.nonzero(idle[leaf])
        grads[leaf][places] = fill[places].reshape(-1, *(1 for _ in SHAPES[leaf]))
        bad[leaf] = rng.random((STREAMS, STEPS)) < RATE
        idle[leaf] &= ~bad[leaf]
        places = np.nonzero(bad[leaf])
        inside = tuple(rng.integers(0, n, len(places[0])) for n in SHAPES[leaf])
        spoilt = rng.choice(values, size=len(places[0]))
        with np.errstate(over="ignore"):
            grads[leaf][places + inside] = spoilt.astype(DTYPES[leaf])
    return Faulty(grads, bad, idle)


def as_if_not_been(faulty: Faulty, scope: str) -> dict[str, np.ndarray]:
    """The updates, bool[streams, steps] per tensor, that must leave no trace."""
    if scope == "leaf":
        return {leaf: faulty.bad[leaf] | faulty.idle[leaf] for leaf in LEAVES}
    anywhere = np.any([faulty.bad[leaf] for leaf in LEAVES], axis=0)
    if scope == "tree":
        anywhere |= np.all([faulty.idle[leaf] for leaf in LEAVES], axis=0)
    if scope == "window":
        pairs = anywhere.reshape(STREAMS, -1, 2).any(axis=2)
        anywhere = np.repeat(pairs, 2, axis=1)
    return dict.fromkeys(LEAVES, anywhere)


def moved_last(grads: dict[str, np.ndarray], order: dict[str, np.ndarray]) -> Any:
    return {
        leaf: np.take_along_axis(
            grads[leaf],
            order[leaf].reshape(STREAMS, STEPS, *(1 for _ in SHAPES[leaf])),
            axis=1,
        )
        for leaf in LEAVES
    }


def make_run(transform: Any) -> Any:
    """From streams to emitted gradients and states of all updates, in one program."""
    params = {leaf: jnp.ones(SHAPES[leaf], DTYPES[leaf]) for leaf in LEAVES}

    def step(state, grads):
        emitted, state = transform.update(grads, state, params)
        return state, (emitted, state)

    def run(grads):
        return jax.lax.scan(step, transform.init(params), grads)[1]

    return jax.jit(jax.vmap(run))


def without_metrics(states: Any) -> Any:
    """The norms that are only reported may be what they were: not finite."""
    return jax.tree.map(
        lambda x: x._replace(metrics=()) if isinstance(x, aj.ClipState) else x,
        states,
        is_leaf=lambda x: isinstance(x, aj.ClipState),
    )


def between_windows(kind: Kind, states: Any) -> Any:
    """States as they must be finite: an accumulator may hold NaN in its window."""
    start, step = (1, 2) if kind.scope == "window" else (0, 1)
    return jax.tree.map(lambda x: np.asarray(x)[:, start::step], states)


def not_finite(tree: Any) -> int:
    return sum(int((~np.isfinite(np.asarray(x))).sum()) for x in jax.tree.leaves(tree))


def different(one: Any, other: Any) -> int:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return sum(int((np.asarray(x) != np.asarray(y)).sum()) for x, y in pairs)


def memory_of(states: Any) -> list[Any]:
    """The last state of every rule and momentum inside, without counts of updates."""
    kinds = (StageState, optax.TraceState)
    nodes = jax.tree.leaves(states, is_leaf=lambda x: isinstance(x, kinds))
    found = [node for node in nodes if isinstance(node, kinds)]
    return jax.tree.map(lambda x: np.asarray(x)[:, -1], found)


def inject(name: str, seed: int = 0) -> Report:
    """Runs one transform through its streams and counts what is broken."""
    kind = KINDS[name]
    rng = np.random.default_rng(seed)
    clean = clean_streams(rng)
    faulty = spoil(clean, kind, rng)
    run = make_run(optax.with_extra_args_support(kind.make()))
    emitted, states = run(faulty.grads)
    gone = as_if_not_been(faulty, kind.scope)
    order = {leaf: np.argsort(gone[leaf], axis=1, kind="stable") for leaf in LEAVES}
    # The same program on the same updates, those that leave no trace at the end.
    calm_emitted, calm_states = run(moved_last(faulty.grads, order))

    violations = {
        "emitted not finite": not_finite(emitted),
        "state not finite": not_finite(without_metrics(between_windows(kind, states))),
    }
    broken = 0
    moved = moved_last({leaf: np.asarray(emitted[leaf]) for leaf in LEAVES}, order)
    for leaf in LEAVES:
        good = np.arange(STEPS) < (~gone[leaf]).sum(axis=1, keepdims=True)
        calm = np.asarray(calm_emitted[leaf])
        broken += different(moved[leaf][good], calm[good])
    violations["emitted as if nothing had been"] = broken
    violations["state as if nothing had been"] = different(
        memory_of(states), memory_of(calm_states)
    )
    if kind.scope == "leaf":
        clean_emitted, _ = run(clean)
        violations["other groups"] = sum(
            different(
                np.asarray(emitted[leaf])[~gone[leaf].any(axis=1)],
                np.asarray(clean_emitted[leaf])[~gone[leaf].any(axis=1)],
            )
            for leaf in LEAVES
        )
    faults = sum(int((faulty.bad[x] | faulty.idle[x]).sum()) for x in LEAVES)
    return Report(STREAMS, faults, violations)


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.usefixtures("optax_promotion")
def test_nothing_gets_through_and_nothing_is_lost(name):
    report = inject(name)
    assert report.faults > 2_000
    assert not any(report.violations.values()), report


@pytest.mark.parametrize("name", ["adagc", "zclip", "guard"])
@pytest.mark.usefixtures("optax_promotion")
def test_gradients_may_change_their_dtype(name):
    transform = KINDS[name].make()
    grads = {leaf: jnp.ones(SHAPES[leaf], jnp.float32) for leaf in LEAVES}
    state = transform.init(grads)
    update = jax.jit(transform.update)
    types = [x.dtype for x in jax.tree.leaves(state)]
    for dtype in (jnp.float32, jnp.bfloat16, jnp.float16, jnp.float32):
        cast = jax.tree.map(lambda x, d=dtype: x.astype(d), grads)
        emitted, state = update(cast, state, grads)
        assert [x.dtype for x in jax.tree.leaves(state)] == types
        assert not_finite((emitted, state)) == 0


@pytest.mark.parametrize("name", ["adagc", "zclip", "guard"])
@pytest.mark.usefixtures("optax_promotion")
def test_faults_on_random_shards(name):
    rng, steps = np.random.default_rng(0), 300
    clean = {
        "a": rng.normal(size=(steps, 16, 2)).astype(np.float32),
        "b": rng.normal(size=(steps, 4)).astype(np.float32),
    }
    step = np.flatnonzero(rng.random(steps) < 0.2)
    row, column = rng.integers(0, 16, len(step)), rng.integers(0, 2, len(step))
    clean["a"][step, row, column] = rng.choice(NOT_FINITE, len(step))
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    transform = KINDS[name].make()
    params = jax.tree.map(lambda x: jnp.asarray(x[0]), clean)

    @jax.jit
    def run(grads):
        def body(state, grad):
            emitted, state = transform.update(grad, state, params)
            return state, (emitted, state)

        return jax.lax.scan(body, transform.init(params), grads)[1]

    spec = {"a": P(None, "x"), "b": P()}
    sharded = {
        k: jax.device_put(v, NamedSharding(mesh, spec[k])) for k, v in clean.items()
    }
    alone, many = run(clean), run(sharded)
    assert not_finite((many[0], without_metrics(many[1]))) == 0
    for one, other in zip(*map(jax.tree.leaves, (alone, many)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    silent = ~np.asarray(many[0]["a"]).any(axis=(1, 2))
    np.testing.assert_array_equal(np.flatnonzero(silent), step)


def main() -> None:
    """Prints the counts of all transforms."""
    total = np.zeros(3, int)
    for name in KINDS:
        report = inject(name)
        counts = report.streams, report.faults, sum(report.violations.values())
        total += counts
        print("{:26}{:8,} streams{:8,} faults{:4} violations".format(name, *counts))
    print("{:26}{:8,} streams{:8,} faults{:4} violations".format("all", *total))


if __name__ == "__main__":
    main()
