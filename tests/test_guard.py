"""The guard: what it skips, what a skip leaves alone, and how it lets go."""

import functools
import pickle
from typing import Any

import equinox as eqx
import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.experimental import checkify
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import adagc_jax as aj
from adagc_jax.accumulate import fresh_windows
from adagc_jax.guard import (
    SKIP_STEP,
    ClipEvidence,
    GuardState,
    guard as typed_guard,
    guard_metrics,
)
from adagc_jax.guard_policies import REASONS
from adagc_jax.metrics import find_clip_states
from adagc_jax.spikes import SpikeRule

# What optax says of a state knows none of the fields that are looked at here.
guard: Any = typed_guard
SMALL = SpikeRule(8, 6.0, direction="up", min_history=4, ddof=1)
BAD = [np.nan, np.inf, -np.inf]


def full_inner() -> optax.GradientTransformationExtraArgs:
    return optax.chain(aj.adagc(warmup_steps=3), optax.adamw(1e-2))


def new_params() -> dict[str, jax.Array]:
    return {
        "a": jnp.asarray([1.0, -0.0, 2.0], jnp.float32),
        "b": jnp.full((2, 2), 0.5, jnp.float32),
    }


def stream(norms: Any, seed: int = 0) -> dict[str, jax.Array]:
    """Gradients of the given global norms, one update after the other."""
    norms = np.asarray(norms, np.float64)
    flat = np.random.default_rng(seed).normal(size=(len(norms), 7))
    flat *= (norms / np.linalg.norm(flat, axis=1))[:, None]
    flat = flat.astype(np.float32)
    return {
        "a": jnp.asarray(flat[:, :3]),
        "b": jnp.asarray(flat[:, 3:].reshape(-1, 2, 2)),
    }


def noisy(steps: int, seed: int = 1) -> np.ndarray:
    return 1.0 + 0.02 * np.random.default_rng(seed).normal(size=steps)


@functools.cache
def runner(optimizer: Any, loss_name: str | None) -> Any:
    optimizer = optax.with_extra_args_support(optimizer)

    def step(carry, inputs):
        params, state = carry
        grads, loss = inputs
        extra = {} if loss_name is None else {loss_name: loss}
        updates, state = optimizer.update(grads, state, params, **extra)
        carry = optax.apply_updates(params, updates), state
        return carry, carry

    return jax.jit(lambda carry, xs: jax.lax.scan(step, carry, xs)[1])


def replay(optimizer: Any, grads: Any, losses: Any = None, name: str = "loss") -> Any:
    """Parameters and states after every update, from one compiled scan."""
    params = new_params()
    steps = len(jax.tree.leaves(grads)[0])
    values = jnp.asarray(np.zeros(steps) if losses is None else losses, jnp.float32)
    run = runner(optimizer, None if losses is None else name)
    return run((params, optimizer.init(params)), (grads, values))


def at(tree: Any, step: int) -> Any:
    return jax.tree.map(lambda x: np.asarray(x[step]), tree)


def bits(tree: Any) -> list[bytes]:
    return [np.asarray(x).tobytes() for x in jax.tree.leaves(tree)]


def frozen_part(states: Any, step: int) -> Any:
    return at((states.inner, states.norm_window, states.loss_window), step)


def skipped_steps(states: Any) -> list[int]:
    return np.flatnonzero(np.asarray(states.last_reason)).tolist()


def reasons(states: Any) -> list[str]:
    return [REASONS[r - 1] for r in np.asarray(states.last_reason) if r]


def put(values: Any, step: int, value: float) -> np.ndarray:
    values = np.array(values, np.float64)
    values[step] = value
    return values


GUARDED = guard(full_inner(), max_norm=100.0, spike=SMALL)
AS_OLMO = guard(optax.identity(), spike=SKIP_STEP, remember="all")
CAREFUL = guard(full_inner(), evidence=ClipEvidence(min_scale=1e-2, warmup_steps=3))
# One bad step, by reason: the guard, and the norm and loss of that step.
FAULTS: dict[str, tuple[Any, float, float]] = {
    "nonfinite_grads": (GUARDED, np.nan, 2.0),
    "nonfinite_loss": (GUARDED, 1.0, np.inf),
    "max_norm": (GUARDED, 1e4, 2.0),
    "norm_spike": (GUARDED, 50.0, 2.0),
    "loss_spike": (GUARDED, 1.0, 50.0),
    "clipping": (CAREFUL, 1e4, 2.0),
}


@pytest.mark.parametrize("reason", FAULTS)
@pytest.mark.usefixtures("optax_promotion")
def test_skipped_step_leaves_no_trace_but_its_count(reason):
    guarded, norm, loss = FAULTS[reason]
    steps = 41
    grads = stream(put(noisy(steps), 20, norm))
    losses = put(1.0 + noisy(steps, seed=2), 20, loss)
    params, states = replay(guarded, grads, losses)
    assert skipped_steps(states) == [20]
    assert reasons(states) == [reason]
    assert bits(at(params, 20)) == bits(at(params, 19))
    assert bits(frozen_part(states, 20)) == bits(frozen_part(states, 19))
    assert bits(at(params, 21)) != bits(at(params, 20))
    # As if the step had never been: a run without it ends in the same bits.
    without = jax.tree.map(lambda x: jnp.delete(x, 20, axis=0), grads)
    # Padded at the end, so that the two runs share one program.
    without = jax.tree.map(lambda x: jnp.concatenate([x, x[-1:]]), without)
    clean, clean_states = replay(guarded, without, np.append(np.delete(losses, 20), 2))
    assert bits(at(params, -1)) == bits(at(clean, -2))
    assert bits(frozen_part(states, -1)) == bits(frozen_part(clean_states, -2))
    metrics = guard_metrics(at(states, -1))
    assert metrics["guard/skipped"] == metrics[f"guard/skipped_{reason}"] == 1
    assert metrics["guard/step"] == steps
    assert metrics["guard/consecutive"] == metrics["guard/accepted"] == 0
    assert not metrics["guard/gave_up"]


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.usefixtures("optax_promotion")
def test_one_bad_loss_does_not_skip_the_next_window(bad):
    losses = put(1.0 + noisy(300), 100, bad)
    grads = stream(put(noisy(300), 150, bad))
    _, states = replay(AS_OLMO, grads, losses)
    assert skipped_steps(states) == [100, 150]
    assert all(np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(states))


def reference(norms, losses, rule, remember, limit):
    """SkipStep in float64, one step after the other, with lists for windows."""
    windows, skips, in_a_row = ([], []), [], 0
    for step, values in enumerate(zip(norms, losses, strict=True)):
        flagged = False
        for window, value in zip(windows, values, strict=True):
            past = np.asarray(window[-rule.window :])
            if len(past) >= rule.min_history:
                std = past.std(ddof=rule.ddof)
                flagged |= value - past.mean() >= rule.n_sigma * std
        skip = flagged and in_a_row < limit
        in_a_row = in_a_row + skip if flagged else 0
        if skip:
            skips.append(step)
        if not skip or remember == "all":
            for window, value in zip(windows, values, strict=True):
                window.append(value)
    return skips


@pytest.mark.parametrize("remember", ["applied", "all"])
@pytest.mark.parametrize("log_domain", [False, True])
def test_decides_like_a_plain_reference(remember, log_domain):
    rng = np.random.default_rng(0)
    rule = SpikeRule(16, 3.0, direction="up", min_history=8, ddof=1)
    norms, losses = (np.exp(0.1 * rng.normal(size=600)) for _ in range(2))
    norms[rng.random(600) < 0.03] *= 30
    losses[rng.random(600) < 0.03] += 2
    norms[400:] *= 5  # A new level.
    guarded = guard(
        optax.identity(),
        spike=rule,
        log_domain=log_domain,
        remember=remember,
        max_consecutive=5,
    )
    _, states = replay(guarded, stream(norms), losses)
    domain = np.log if log_domain else np.asarray
    want = reference(domain(norms), domain(losses), rule, remember, 5)
    assert skipped_steps(states) == want
    assert len(want) > 15


def test_skip_step_is_active_once_half_full():
    guarded = guard(optax.identity(), spike=SKIP_STEP, watch="norm")
    for spike_at, skipped in ((63, []), (64, [64])):
        norms = put(noisy(90), spike_at, 50.0)
        _, states = replay(guarded, stream(norms))
        assert skipped_steps(states) == skipped


@pytest.mark.parametrize(
    ("remember", "limit", "expected"), [("applied", 7, 7), ("all", 16, 4)]
)
def test_new_level_is_accepted_after_the_documented_steps(remember, limit, expected):
    norms = noisy(400)
    norms[200:] *= 10
    guarded = guard(
        optax.identity(),
        spike=SKIP_STEP,
        watch="norm",
        remember=remember,
        max_consecutive=limit,
    )
    _, states = replay(guarded, stream(norms))
    assert skipped_steps(states) == list(range(200, 200 + expected))
    metrics = guard_metrics(at(states, -1))
    # What was let through is on record, and it is no defeat.
    assert (metrics["guard/accepted"] > 0) == (remember == "applied")
    assert not metrics["guard/gave_up"]
    assert metrics["guard/consecutive"] == 0


@pytest.mark.parametrize(("norm", "limit"), [(np.nan, None), (1e3, 10.0)])
def test_what_is_wrong_in_itself_never_gets_through(norm, limit):
    norms = np.concatenate([np.ones(5), np.full(30, norm), np.ones(5)])
    guarded = guard(optax.sgd(0.1), max_norm=limit, max_consecutive=4)
    params, states = replay(guarded, stream(norms))
    assert skipped_steps(states) == list(range(5, 35))
    assert bits(at(params, 34)) == bits(at(params, 4))
    assert np.flatnonzero(np.asarray(states.gave_up)).tolist() == list(range(8, 40))
    assert np.asarray(states.consecutive)[[4, 8, 34, 35]].tolist() == [0, 4, 30, 0]


def run_into_nan(on_give_up, steps):
    guarded = guard(optax.sgd(0.1), max_consecutive=3, on_give_up=on_give_up)

    def run(grads):
        state = guarded.init(grads)
        return jax.lax.scan(
            lambda s, _: (guarded.update(grads, s)[1], None), state, length=steps
        )[0]

    return run, {"a": jnp.asarray([1.0, jnp.nan])}


def test_giving_up_through_checkify():
    run, grads = run_into_nan("checkify", 3)
    checked = jax.jit(checkify.checkify(run))
    checked({"a": jnp.ones(2)})[0].throw()
    error, _ = checked(grads)
    with pytest.raises(checkify.JaxRuntimeError, match="gave up after 3 skipped"):
        error.throw()


def test_giving_up_through_an_exception(capfd):
    run, grads = run_into_nan("raise", 3)
    jax.block_until_ready(jax.jit(run)({"a": jnp.ones(2)}))
    run, grads = run_into_nan("raise", 3)
    with pytest.raises(Exception, match="gave up after 3 skipped"):
        jax.block_until_ready(jax.jit(run)(grads))
    capfd.readouterr()


def test_giving_up_through_a_flag_and_equinox(capfd):
    run, grads = run_into_nan("flag", 3)

    def checked(grads):
        state = run(grads)
        gave_up = guard_metrics(state)["guard/gave_up"]
        return eqx.error_if(grads, gave_up, "the guard gave up")

    with pytest.raises(Exception, match="the guard gave up"):
        jax.block_until_ready(eqx.filter_jit(checked)(grads))
    capfd.readouterr()


@pytest.mark.usefixtures("optax_promotion")
def test_sees_the_norm_before_clipping():
    norms = put(noisy(40), 30, 1e3)
    inner = optax.chain(aj.global_gc(0.1), optax.sgd(0.1))
    _, states = replay(guard(inner, spike=SMALL, watch="norm"), stream(norms))
    assert skipped_steps(states) == [30]
    np.testing.assert_allclose(states.norm, norms, rtol=1e-6)
    assert float(states.z[30, 0]) > 6.0


def test_zero_norms_are_no_observations():
    norms = noisy(60)
    norms[20:40] = 0.0
    norms[50] = 9.0
    for log_domain in (False, True):
        guarded = guard(
            optax.identity(), spike=SMALL, watch="norm", log_domain=log_domain
        )
        _, states = replay(guarded, stream(norms))
        assert skipped_steps(states) == [50]
        assert states.norm_window.seen[39] == states.norm_window.seen[19] == 20


def test_evidence_waits_for_the_clipper_to_warm_up():
    sizes = jnp.asarray(put(np.full(30, 5.0), 20, 500.0), jnp.float32)
    grads = {
        "a": jnp.outer(sizes, jnp.ones(3, jnp.float32)),
        "b": sizes[:, None, None] * jnp.ones((1, 2, 2), jnp.float32),
    }
    # The first limit clips every tensor all through the warm-up, and long after it.
    clips = {limit: aj.adagc(lambda_abs=limit, warmup_steps=8) for limit in (1.0, 1e3)}
    for limit, evidence, skipped in (
        (1e3, ClipEvidence(0.5, min_scale=0.1, warmup_steps=8), [20]),
        (1.0, ClipEvidence(0.5, warmup_steps=8), list(range(8, 24))),
        (1.0, ClipEvidence(), []),
    ):
        _, states = replay(guard(clips[limit], evidence=evidence), grads)
        assert skipped_steps(states) == skipped
    with pytest.raises(ValueError, match="no clipper of adagc_jax"):
        guard(optax.sgd(0.1), evidence=ClipEvidence(0.5)).init(new_params())


def one_by_one(optimizer, values, **extra):
    """Emitted updates for a scalar parameter, and the last state."""
    state = optimizer.init({"w": jnp.zeros(())})
    update = jax.jit(optimizer.update)
    emitted = []
    for value in values:
        grads = {"w": jnp.asarray(value, jnp.float32)}
        updates, state = update(grads, state, {"w": jnp.zeros(())}, **extra)
        emitted.append(float(updates["w"]))
    return emitted, state


@pytest.mark.usefixtures("optax_promotion")
def test_around_multi_steps_drops_the_micro_batch():
    inner = optax.MultiSteps(optax.sgd(1.0), 2)
    emitted, state = one_by_one(guard(inner), [1, np.nan, 3, 1, 1, np.nan])
    assert emitted == [0, 0, -2, 0, -1, 0]
    assert state.inner.mini_step == 0
    assert guard_metrics(state)["guard/skipped"] == 2


@pytest.mark.usefixtures("optax_promotion")
def test_inside_multi_steps_loses_the_window_only():
    inner = optax.chain(aj.adagc(warmup_steps=0), optax.sgd(1.0))
    optimizer = fresh_windows(optax.MultiSteps(guard(inner), 2))
    emitted, state = one_by_one(optimizer, [1, np.nan, 1, 1, np.inf, 1, 1, 1])
    assert emitted == [0, 0, 0, -1, 0, 0, 0, -1]
    metrics = guard_metrics(state)
    assert metrics["guard/skipped_nonfinite_grads"] == 2
    assert metrics["guard/step"] == 4
    # Without the repair the accumulator is lost, but nothing gets through.
    plain = optax.MultiSteps(guard(inner), 2).gradient_transformation()
    emitted, state = one_by_one(plain, [1, np.nan, 1, 1, 1, 1])
    assert emitted == [0] * 6
    with pytest.raises(ValueError, match=r"must be an optax\.MultiSteps"):
        fresh_windows(optax.sgd(1.0))  # pyright: ignore[reportArgumentType]


@pytest.mark.usefixtures("optax_promotion")
def test_extra_arguments_reach_the_inner_optimizer():
    seen = []

    def update(updates, state, params=None, **extra):
        seen.append(sorted(extra))
        return updates, state

    inner = optax.GradientTransformationExtraArgs(lambda params: (), update)
    values = {"loss": jnp.float32(2.0), "value": jnp.float32(1.0), "other": 3}
    grads = {"w": jnp.ones(2)}
    for optimizer in (
        guard(inner),
        guard(optax.MultiSteps(inner, 1)),
        fresh_windows(optax.MultiSteps(guard(inner), 1)),
    ):
        state = optimizer.init(grads)
        jax.eval_shape(
            lambda s, o=optimizer: o.update(grads, s, grads, **values), state
        )
    assert {tuple(keys) for keys in seen} == {("loss", "other", "value")}


def test_loss_is_found_and_checked():
    grads = {"w": jnp.ones(2)}
    guarded = guard(optax.identity(), spike=SMALL)
    state = guarded.init(grads)
    for extra in ({"value": jnp.nan}, {"loss": jnp.bfloat16(jnp.nan), "value": 1.0}):
        _, new = jax.jit(guarded.update)(grads, state, **extra)
        assert reasons(jax.tree.map(lambda x: x[None], new)) == ["nonfinite_loss"]
    with pytest.raises(ValueError, match="watch holds 'loss'"):
        guarded.update(grads, state)
    with pytest.raises(ValueError, match=r"must be a scalar, got shape \(2,\)"):
        guarded.update(grads, state, loss=jnp.ones(2))


@pytest.mark.usefixtures("optax_promotion")
def test_one_structure_and_one_program():
    params = new_params()
    guarded = guard(full_inner())
    state = guarded.init(params)
    step: Any = jax.jit(guarded.update, donate_argnums=1)

    def types(tree):
        leaves = jax.tree.leaves(tree)
        return [(x.shape, x.dtype, getattr(x, "weak_type", False)) for x in leaves]

    _, after = jax.eval_shape(guarded.update, params, state, params)
    assert types(after) == types(state) == types(jax.jit(guarded.init)(params))
    assert jax.tree.structure(after) == jax.tree.structure(state)
    grads = params
    for value in (1.0, jnp.nan, 2.0, 3.0):
        grads = jax.tree.map(lambda x, v=value: x * v, params)
        _, state = step(grads, state, params)
    assert step._cache_size() == 1
    assert guard_metrics(state)["guard/skipped"] == 1
    assert not any("count" in field for field in GuardState._fields)
    abstract = jax.eval_shape(guarded.init, params)
    assert types(abstract) == types(state)


def test_state_is_the_same_for_all_policies():
    kinds: list[dict[str, Any]] = [{}, {"spike": SKIP_STEP}, {"max_norm": 1.0}]
    states = [guard(aj.adagc(), **kind).init(new_params()) for kind in kinds]
    shapes = [jax.tree.map(jnp.shape, state) for state in states]
    assert shapes[0] == shapes[1] == shapes[2]


@pytest.mark.usefixtures("optax_promotion")
def test_eight_devices_decide_alike():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    rows, whole = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
    params = {"a": jnp.ones((16, 4)), "b": jnp.ones((3,))}
    guarded = guard(full_inner(), spike=SMALL)
    step = jax.jit(guarded.update)

    def run(place):
        placed = place(params)
        updates, state = None, jax.jit(guarded.init)(placed)
        for number in range(6):
            grads = jax.tree.map(lambda x, n=number: x * (1.0 + 0.1 * n), params)
            if number == 4:
                grads["a"] = grads["a"].at[5, 2].set(jnp.nan)  # On one shard.
            updates, state = step(place(grads), state, placed, loss=jnp.float32(2.0))
        return updates, state

    alone = run(lambda tree: tree)
    sharded = run(
        lambda t: {
            "a": jax.device_put(t["a"], rows),
            "b": jax.device_put(t["b"], whole),
        }
    )
    assert guard_metrics(sharded[1])["guard/skipped_nonfinite_grads"] == 1
    for one, many in zip(*map(jax.tree.leaves, (alone, sharded)), strict=True):
        np.testing.assert_allclose(one, many, rtol=2e-6)
    for leaf in jax.tree.leaves(sharded[1]._replace(inner=())):
        shards = [np.asarray(s.data) for s in leaf.addressable_shards]
        assert all(np.array_equal(s, shards[0]) for s in shards)


@pytest.mark.usefixtures("optax_promotion")
def test_survives_a_checkpoint_between_two_skips():
    guarded = guard(full_inner(), spike=SMALL)
    step = jax.jit(guarded.update)
    params, loss = new_params(), jnp.float32(2.0)

    def advance(state, values):
        for value in values:
            grads = jax.tree.map(lambda x, v=value: jnp.full_like(x, v), params)
            _, state = step(grads, state, params, loss=loss)
        return state

    state = advance(guarded.init(params), [1.0, 1.1, 1.0, 1.1, 1.0, jnp.nan])
    target = guarded.init(params)
    copies = [
        pickle.loads(pickle.dumps(state)),
        flax.serialization.from_bytes(target, flax.serialization.to_bytes(state)),
    ]
    rest = [500.0, 1.0, jnp.nan, 1.1]
    want = advance(state, rest)
    assert guard_metrics(want)["guard/skipped"] == 3
    for restored in copies:
        assert bits(advance(restored, rest)) == bits(want)


def test_vmap_decides_for_each_member():
    guarded = guard(optax.sgd(1.0), on_give_up="raise", max_consecutive=2)
    grads = {"w": jnp.asarray([[1.0, 2.0], [jnp.nan, 1.0], [3.0, 4.0]])}
    states = jax.vmap(guarded.init)(grads)
    updates, states = jax.jit(jax.vmap(guarded.update))(grads, states)
    assert np.asarray(states.last_reason).tolist() == [0, 1, 0]
    np.testing.assert_array_equal(updates["w"], [[-1, -2], [0, 0], [-3, -4]])


def test_unusual_leaves():
    def update(updates, state, params=None):
        key, _ = jax.random.split(state["key"])
        return updates, {"key": key, "wide": state["wide"].astype(jnp.float32) + 1}

    init = {"key": jax.random.key(0), "wide": jnp.zeros(2, jnp.bfloat16)}
    guarded = guard(optax.GradientTransformation(lambda params: init, update))
    grads = {
        "int": jnp.arange(2),
        "none": None,
        "empty": jnp.zeros((0,)),
        "half": jnp.ones(2, jnp.float16),
        "complex": jnp.asarray([1 + 2j], jnp.complex64),
    }
    float0 = {"float0": np.zeros((2,), jax.dtypes.float0)}
    state = guarded.init(grads | float0)

    @jax.jit
    def step(state, loss):
        updates, state = guarded.update(grads | float0, state, loss=loss)
        assert updates.pop("float0") is float0["float0"]
        return updates, state

    updates, applied = step(state, 1.0)
    assert round(float(applied.norm) ** 2) == 7
    assert bits(updates) == bits(grads)
    updates, skipped = step(state, jnp.nan)
    assert not any(np.any(np.asarray(x)) for x in jax.tree.leaves(updates))
    assert [x.dtype for x in jax.tree.leaves(updates)] == [
        x.dtype for x in jax.tree.leaves(grads)
    ]
    assert bits(skipped.inner["wide"]) == bits(np.zeros(2, np.float32))
    assert jnp.all(skipped.inner["key"] == state.inner["key"])
    empty: dict[str, Any] = {"a": None}
    assert guarded.update(empty, state)[0] == empty


def test_metrics_at_any_depth():
    nested = optax.chain(guard(guard(optax.identity()), max_norm=1.0), optax.sgd(0.1))
    grads = {"w": jnp.asarray([3.0, 4.0])}
    _, state = jax.jit(nested.update)(grads, nested.init(grads))
    metrics = jax.jit(guard_metrics)({"deep": (state,)})
    assert metrics["guard/0/skipped_max_norm"] == 1
    assert metrics["guard/1/step"] == 0
    assert metrics["guard/0/norm"] == 5.0
    assert "mine/skipped" in guard_metrics(
        guard(optax.identity()).init(grads), prefix="mine"
    )
    with pytest.raises(ValueError, match="holds no guard"):
        guard_metrics(optax.sgd(0.1).init(grads))


def test_names_that_a_checkpoint_lost_come_back():
    guarded = guard(aj.adagc())
    grads = new_params()
    state = guarded.init(grads)
    nameless = state._replace(
        inner=state.inner._replace(labels=type(state.inner.labels)())
    )
    _, state = jax.jit(guarded.update)(grads, nameless)
    assert "clip/a/gamma" in aj.clip_metrics(state, level="all")


@pytest.mark.usefixtures("optax_promotion")
def test_limits_may_be_traced_and_scheduled():
    grads = {"w": jnp.asarray([3.0, 4.0])}
    optimizer = optax.inject_hyperparams(guard, hyperparam_dtype=jnp.float32)(
        inner=optax.sgd(0.1), max_norm=1.0, max_consecutive=2
    )
    _, state = jax.jit(optimizer.update)(grads, optimizer.init(grads))
    assert state.inner_state.skipped[REASONS.index("max_norm")] == 1
    guarded = guard(optax.identity(), max_norm=lambda step: 10.0 - 3.0 * step)
    _, states = replay(guarded, stream(np.full(4, 5.0)))
    assert skipped_steps(states) == [2, 3]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_norm": 0.0}, r"max_norm must be in \(0.0, inf\], got 0.0"),
        ({"nonfinite": 1}, "nonfinite must be a bool, got 1"),
        ({"spike": 6.0}, "spike must be a SpikeRule, got 6.0"),
        ({"evidence": 0.5}, "evidence must be a ClipEvidence, got 0.5"),
        ({"watch": ()}, "watch must hold one or both"),
        ({"watch": ("norm", "lr")}, "watch must be one of 'norm', 'loss', got 'lr'"),
        ({"remember": "some"}, "remember must be one of 'applied', 'all'"),
        ({"max_consecutive": 0}, "max_consecutive must be an integer >= 1, got 0"),
        ({"on_give_up": "cry"}, "on_give_up must be one of"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        guard(optax.identity(), **arguments)


def test_bad_evidence_is_named():
    with pytest.raises(ValueError, match="max_fraction must be in"):
        ClipEvidence(max_fraction=1.5)


# Other people's wrappers, with ours inside.


@pytest.mark.usefixtures("optax_promotion")
def test_optax_apply_if_finite_keeps_gamma():
    grads = stream(put(noisy(12), 6, np.nan))
    clip, adam = aj.adagc(warmup_steps=3), optax.scale_by_adam()
    inside = optax.apply_if_finite(optax.chain(clip, adam), 5)
    beside = optax.chain(clip, optax.apply_if_finite(adam, 5))
    for optimizer in (inside, beside):
        params, states = replay(optimizer, grads)
        (found,) = find_clip_states(states)
        gamma = np.asarray(found.stages[0].rule.gamma)
        assert gamma[6].tobytes() == gamma[5].tobytes()
        assert gamma[7].tobytes() != gamma[5].tobytes()
        assert np.all(np.isfinite(np.asarray(params["a"])))


@pytest.mark.usefixtures("optax_promotion")
def test_optax_reduce_on_plateau_inside_never_sees_a_bad_loss():
    plateau = optax.contrib.reduce_on_plateau(factor=0.5, patience=3)
    guarded = guard(optax.chain(full_inner(), plateau))
    losses = np.where(np.arange(20) % 5 == 2, np.nan, 2.0)
    _, states = replay(guarded, stream(noisy(20)), losses, name="value")
    assert len(skipped_steps(states)) == 4
    assert np.all(np.isfinite(np.asarray(states.inner[1].avg_value)))
    assert float(states.inner[1].scale[-1]) < 1.0


@pytest.mark.usefixtures("optax_promotion")
def test_optax_multi_steps_with_its_own_skip_function():
    steps = optax.MultiSteps(
        optax.chain(aj.adagc(warmup_steps=0), guard(optax.sgd(1.0))),
        2,
        should_skip_update_fn=optax.skip_not_finite,
    )
    for optimizer in (guard(steps), fresh_windows(steps)):
        emitted, _ = one_by_one(optimizer, [1, np.nan, 1, 1, 1])
        assert emitted == [0, 0, -1, 0, -1]


# Loss scaling for float16: unscale, then guard, then clip.


def scaled_run(scales, change):
    """Trains in float16 under a loss scale; returns gamma and scale per step."""
    guarded = guard(optax.chain(aj.adagc(warmup_steps=3), optax.sgd(1e-3)))
    params = {"w": jnp.asarray([0.5, -1.0, 2.0], jnp.float32)}

    def step(carry, x):
        params, state, scale, good = carry

        def loss_fn(params):
            out = jnp.sum(params["w"].astype(jnp.float16) * x)
            return out.astype(jnp.float32) * scale

        grads = jax.grad(loss_fn)(params)
        grads = jax.tree.map(lambda g: g.astype(jnp.float32) / scale, grads)
        updates, state = guarded.update(grads, state, params)
        skipped = state.last_reason > 0
        if change:
            # The whole of a dynamic loss scale: halve it, or double it after a while.
            good = jnp.where(skipped, 0, good + 1)
            raised = jnp.where(good % 4 == 0, scale * 2, scale)
            scale = jnp.where(skipped, scale / 2, raised)
        params = optax.apply_updates(params, updates)
        gamma = state.inner[0].stages[0].rule.gamma
        return (params, state, scale, good), (gamma, scale, skipped)

    # Multiples of 1/8 are exact in float16, whatever the scale.
    xs = np.random.default_rng(0).integers(1, 16, (24, 3)) / 8
    start = (params, guarded.init(params), jnp.float32(scales), jnp.int32(0))
    run = jax.jit(lambda c, x: jax.lax.scan(step, c, x)[1])
    return start, run, jnp.asarray(xs, jnp.float16)


@pytest.mark.usefixtures("optax_promotion")
def test_gamma_does_not_see_the_loss_scale():
    start, run, xs = scaled_run(2.0**18, change=True)
    gamma, scale, skipped = map(np.asarray, run(start, xs))
    assert skipped.any()
    assert len(np.unique(scale)) > 2
    start, run, _ = scaled_run(1.0, change=False)
    # The same batches without those that overflowed, padded to the same length.
    kept = xs[np.flatnonzero(~skipped)]
    padded = jnp.concatenate([kept, xs[: len(xs) - len(kept)]])
    plain = np.asarray(run(start, padded)[0])[: len(kept)]
    np.testing.assert_array_equal(gamma[~skipped], plain)


# Memory: nothing but inputs and outputs.


def temporary_bytes(optimizer: Any, params: Any, **options: Any) -> int:
    optimizer = optax.with_extra_args_support(optimizer)

    def step(params, state, grads, loss):
        updates, state = optimizer.update(grads, state, params, loss=loss)
        return optax.apply_updates(params, updates), state

    state = jax.eval_shape(optimizer.init, params)
    loss = jax.ShapeDtypeStruct((), jnp.float32)
    lowered = jax.jit(step, **options).lower(params, state, params, loss)
    memory: Any = lowered.compile().memory_analysis()
    return memory.temp_size_in_bytes


@pytest.mark.usefixtures("optax_promotion")
def test_skipping_needs_no_second_copy_of_the_parameters():
    shape = jax.ShapeDtypeStruct((256, 256), jnp.float32)
    params = {f"w{i}": shape for i in range(4)}
    size = 4 * 4 * 256 * 256
    assert temporary_bytes(guard(full_inner(), spike=SKIP_STEP), params) < 0.01 * size
    # A branch around the update, for comparison, keeps the updates apart.
    branch = optax.apply_if_finite(full_inner(), 5)
    assert temporary_bytes(branch, params) > 0.4 * size


# Many random streams at once.


@pytest.mark.usefixtures("optax_promotion")
def test_thousand_random_streams_end_as_if_the_faults_had_not_been():
    streams, steps, width = 1_000, 24, 5
    rng = np.random.default_rng(0)
    grads = rng.normal(size=(streams, steps, width)).astype(np.float32)
    losses = rng.normal(size=(streams, steps)).astype(np.float32)
    bad = rng.random((streams, steps)) < 0.2
    values = rng.choice([np.nan, np.inf, -np.inf, 1e30], size=bad.sum())
    grads[(*np.nonzero(bad), rng.integers(0, width, bad.sum()))] = values
    in_loss = bad & (rng.random(bad.shape) < 0.3)
    losses[in_loss] = np.nan
    order = np.argsort(bad, axis=1, kind="stable")  # Faults last.
    guarded = guard(full_inner(), max_norm=1e6, spike=SMALL)

    @jax.jit
    @jax.vmap
    def run(grads, losses):
        params = {"a": jnp.ones(2), "b": jnp.ones(3)}

        def step(carry, inputs):
            params, state = carry
            grad, loss = inputs
            tree = {"a": grad[:2], "b": grad[2:]}
            updates, state = guarded.update(tree, state, params, loss=loss)
            return (optax.apply_updates(params, updates), state), state.last_reason

        return jax.lax.scan(step, (params, guarded.init(params)), (grads, losses))

    (params, state), skipped = run(grads, losses)
    (clean, clean_state), _ = run(
        np.take_along_axis(grads, order[..., None], 1),
        np.take_along_axis(losses, order, 1),
    )
    hard = np.asarray(skipped)
    assert np.all((hard > 0) & (hard <= 3) | ~bad)
    assert not np.any((hard > 0) & (hard <= 3) & ~bad)
    for tree in (params, state):
        finite = [np.isfinite(np.asarray(x)).all() for x in jax.tree.leaves(tree)]
        assert all(finite)
    assert bits(params) == bits(clean)
    assert bits(state.inner) == bits(clean_state.inner)
    assert bits(state.norm_window) == bits(clean_state.norm_window)
