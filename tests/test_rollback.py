"""The rollback helper: what it keeps, where, and what it gives back."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import adagc_jax as aj
from adagc_jax.guard import guard, guard_metrics
from adagc_jax.rollback import Rollback, Snapshot

PLACES = ["device", "host"]


def moment():
    """What a run consists of: arrays of every kind, and things that are none."""
    return {
        "params": {"w": jnp.arange(6.0).reshape(2, 3), "h": jnp.ones(2, jnp.bfloat16)},
        "weak": jnp.asarray(1.0),
        "key": jax.random.key(3),
        "numpy": np.arange(3),
        "position": 17,
        "nothing": None,
        "names": ["a"],
    }


def stored(rollback: Rollback) -> Snapshot:
    assert rollback.snapshot is not None
    return rollback.snapshot


def values(tree):
    def value(x):
        is_key = isinstance(x, jax.Array) and jnp.issubdtype(
            x.dtype, jax.dtypes.prng_key
        )
        return np.asarray(jax.random.key_data(x)) if is_key else np.asarray(x)

    return [(value(x).tobytes(), value(x).dtype) for x in jax.tree.leaves(tree)]


@pytest.mark.parametrize("place", PLACES)
def test_restores_every_kind_of_leaf(place):
    tree = moment()
    rollback = Rollback(every=1, place=place)
    assert rollback.keep(0, tree)
    back = rollback.restore(0).tree
    assert values(back) == values(tree)
    assert jax.tree.structure(back) == jax.tree.structure(tree)
    assert back["weak"].weak_type
    assert isinstance(back["params"]["w"], jax.Array)
    assert not back["params"]["w"].committed
    assert back["numpy"] is not tree["numpy"]
    kept = stored(rollback).tree["params"]["w"]
    assert isinstance(kept, np.ndarray if place == "host" else jax.Array)


@pytest.mark.parametrize("place", PLACES)
def test_survives_donation_of_the_original_and_of_the_restored(place):
    rollback = Rollback(every=1, place=place, max_rollbacks=5)
    step: Any = jax.jit(lambda x: x + 1.0, donate_argnums=0)
    x = jnp.arange(1 << 16, dtype=jnp.float32)
    rollback.keep(0, x)
    for _ in range(3):
        for _ in range(2):
            x = step(x)
        x = rollback.restore(0).tree
        np.testing.assert_array_equal(x, np.arange(1 << 16))
    x = step(x)
    assert step._cache_size() == 1


@pytest.mark.parametrize("place", PLACES)
def test_keeps_shardings(place):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    rows, whole = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
    tree = {
        "rows": jax.device_put(jnp.arange(16.0), rows),
        "whole": jax.device_put(jnp.ones(3, jnp.float32), whole),
    }
    rollback = Rollback(every=1, place=place)
    rollback.keep(0, tree)
    back = rollback.restore(0).tree
    assert back["rows"].sharding == rows
    assert back["whole"].sharding == whole
    assert values(back) == values(tree)
    if place == "host":
        assert stored(rollback).tree["whole"].nbytes == 12


def test_interval_and_batches_to_skip():
    rollback = Rollback(every=10, skip=5)
    taken = [step for step in range(25) if rollback.keep(step, step)]
    assert taken == [0, 10, 20]
    back = rollback.restore(23)
    assert (back.tree, back.step, back.skip, back.skip_ahead) == (20, 20, 9, 5)
    # The moment that was restored is in store already.
    assert not rollback.keep(20, 20)
    assert rollback.keep(30, 30)


def test_snapshot_must_settle_before_it_counts():
    rollback = Rollback(every=10, settle=15)
    good = []
    for step in range(40):
        rollback.keep(step, step)
        good.append(stored(rollback).step)
    # The first counts at once; that of step 10 has settled at 25, the next due is 30.
    assert good == [0] * 25 + [10] * 15
    assert rollback.keep(50, 50)
    assert stored(rollback).step == 30


def test_a_spike_discards_what_has_not_settled():
    rollback = Rollback(every=10, settle=5)
    for step in range(13):
        rollback.keep(step, step)
    assert rollback.restore(12).step == 0
    for step in range(13):
        rollback.keep(step, -step)
    assert stored(rollback).tree == 0
    for step in range(13, 16):
        rollback.keep(step, -step)
    assert rollback.snapshot == Snapshot(10, -10)


def test_gives_up_loudly():
    rollback = Rollback(every=10, max_rollbacks=2)
    with pytest.raises(RuntimeError, match="no snapshot to go back to"):
        rollback.restore(0)
    rollback.keep(0, 0)
    for _ in range(2):
        rollback.restore(3)
    with pytest.raises(RuntimeError, match="2 rollbacks to step 0 have not helped"):
        rollback.restore(3)
    rollback.keep(10, 0)
    assert rollback.restore(11).step == 10


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.usefixtures("optax_promotion")
def test_round_trip_through_orbax(place, tmp_path):
    optimizer = guard(optax.chain(aj.adagc(), optax.adam(1e-2)))
    params = {"w": jnp.ones((2, 3))}
    run = {"params": params, "state": optimizer.init(params), "position": 40}
    rollback = Rollback(every=4, place=place)
    rollback.keep(40, run)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "good", rollback.snapshot)
    # A new process: same program, nothing in memory.
    target = Snapshot(0, jax.tree.map(jnp.zeros_like, run) | {"position": 0})
    with ocp.StandardCheckpointer() as checkpointer:
        saved = checkpointer.restore(tmp_path / "good", target)
    resumed = Rollback(every=4, place=place)
    resumed.load(saved, like=run)
    back = resumed.restore(41)
    assert (back.step, back.skip) == (40, 2)
    assert values(back.tree) == values(run)
    updates, _ = jax.jit(optimizer.update)(params, back.tree["state"], params)
    assert np.all(np.isfinite(np.asarray(updates["w"])))
    with pytest.raises(ValueError, match="like must have the structure"):
        resumed.load(saved, like={"other": 1})


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.usefixtures("optax_promotion")
def test_training_loop_goes_back_and_around(place):
    """A run of bad batches makes the guard give up; the loop goes around them."""
    optimizer = guard(optax.sgd(0.5), max_consecutive=3)

    @jax.jit
    def train(params, state, target):
        grads = jax.grad(lambda p: jnp.sum((p["w"] - target) ** 2))(params)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    batches = np.ones(60)
    batches[20:30] = np.nan
    params = {"w": jnp.zeros(2)}
    state, position, step, used = optimizer.init(params), 0, 0, []
    rollback = Rollback(every=6, skip=8, place=place)
    while position < len(batches):
        rollback.keep(step, (params, state, position))
        params, state = train(params, state, jnp.float32(batches[position]))
        used.append(position)
        if guard_metrics(state)["guard/gave_up"]:
            back = rollback.restore(step)
            (params, state, position), step = back.tree, back.step
            position += back.skip
        else:
            position, step = position + 1, step + 1
    # Kept at 18, given up at 22: on with 18 + 5 + 8.
    assert used == [*range(23), *range(31, 60)]
    assert not guard_metrics(state)["guard/gave_up"]
    assert guard_metrics(state)["guard/skipped"] == 0
    np.testing.assert_allclose(params["w"], 1.0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every": 0}, "every must be an integer >= 1, got 0"),
        ({"skip": -1}, "skip must be an integer >= 0, got -1"),
        ({"settle": 0.5}, "settle must be an integer >= 0, got 0.5"),
        ({"max_rollbacks": 0}, "max_rollbacks must be an integer >= 1, got 0"),
        ({"place": "disk"}, "place must be one of 'device', 'host', got 'disk'"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        Rollback(**arguments)
