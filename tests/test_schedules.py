"""The schedule at its edges, between them, and against optax's own."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings, strategies as st

from adagc_jax.schedules import Restarts, warmup_cosine

few = settings(deadline=None, max_examples=15)


def rates(schedule, steps):
    return np.asarray(jax.jit(schedule)(jnp.arange(steps, dtype=jnp.int32)))


def expected(step, peak, total, warmup, floor, init):
    if step >= total:
        return floor
    if step < warmup:
        return init + (peak - init) * step / warmup
    angle = np.pi * (step - warmup) / (total - warmup)
    return floor + (peak - floor) * 0.5 * (1 + np.cos(angle))


@few
@given(
    total=st.integers(1, 300),
    share=st.floats(0, 1),
    floor=st.floats(0, 1),
    init=st.floats(0, 1),
    peak=st.floats(1e-6, 10),
)
def test_equals_the_formula_at_every_step(total, share, floor, init, peak):
    warmup = round(share * total)
    lr = warmup_cosine(peak, total, warmup=warmup, floor=floor, init_value=init * peak)
    got = rates(lr, total + 3)
    want = [
        expected(step, peak, total, warmup, floor * peak, init * peak)
        for step in range(total + 3)
    ]
    np.testing.assert_allclose(got, want, rtol=0, atol=5e-7 * peak)
    slack = 3e-7 * peak
    assert np.all(np.diff(got[:warmup]) >= -slack)
    assert np.all(np.diff(got[warmup:]) <= slack)
    assert got.min() >= 0
    assert got.max() <= np.asarray(peak, got.dtype)
    if warmup < total:
        assert got[warmup] == np.asarray(peak, got.dtype)
    assert np.all(got[total:] == np.asarray(floor * peak, got.dtype))


@few
@given(
    total=st.integers(2, 10**9),
    share=st.floats(0, 1, exclude_max=True),
    floor=st.floats(0, 1),
    peak=st.floats(1e-6, 10),
)
def test_meets_its_ends_exactly(total, share, floor, peak):
    warmup = min(int(share * total), total - 1)
    floor_value = floor * peak
    lr = warmup_cosine(
        peak, total, warmup=warmup, floor_value=floor_value, init_value=peak / 3
    )
    dtype = lr(0).dtype
    assert lr(0) == np.asarray(peak / 3 if warmup else peak, dtype)
    assert lr(warmup) == np.asarray(peak, dtype)
    assert lr(total) == np.asarray(floor_value, dtype)


def test_meets_its_ends_exactly_when_traced():
    share, peak = np.random.default_rng(0).random((2, 10_000), np.float32)
    low = share * peak

    @jax.jit
    @jax.vmap
    def ends(peak, low):
        lr = warmup_cosine(peak, 9, warmup=3, floor_value=low, init_value=low)
        return [lr(step) for step in (0, 2, 3, 4, 9)]

    start, before, top, after, end = (np.asarray(x) for x in ends(peak, low))
    np.testing.assert_array_equal(start, low)
    np.testing.assert_array_equal(top, peak)
    np.testing.assert_array_equal(end, low)
    assert np.all((before <= peak) & (after <= peak))


def test_default_is_five_percent_warmup_and_ten_percent_floor():
    lr = warmup_cosine(3e-4, 1_000)
    assert lr(0) == 0
    assert lr(50) == jnp.asarray(3e-4, float)
    assert lr(49) < lr(50) > lr(51)
    np.testing.assert_allclose(lr(1_000), 3e-5, rtol=1e-6)


@pytest.mark.parametrize(
    ("total", "warmup", "want"),
    [
        (1, 0, [1.0, 0.1, 0.1]),
        (1, 1, [0.0, 0.1, 0.1]),
        (1, 0.05, [1.0, 0.1, 0.1]),
        (2, 1, [0.0, 1.0, 0.1]),
        (4, 4, [0.0, 0.25, 0.5, 0.75, 0.1, 0.1]),
        (4, 0, [1.0, 0.868198, 0.55, 0.231802, 0.1, 0.1]),
    ],
)
def test_smallest_schedules(total, warmup, want):
    got = rates(warmup_cosine(1.0, total, warmup=warmup), len(want))
    np.testing.assert_allclose(got, want, atol=1e-6)


@pytest.mark.parametrize(
    "step",
    [101, 10**12, np.int64(10**12), np.int32(2**31 - 1), jnp.int32(2**31 - 1)],
)
def test_stays_at_the_floor_for_ever(step):
    assert warmup_cosine(1.0, 100, floor_value=0.25)(step) == 0.25


def test_negative_step_counts_as_zero():
    assert warmup_cosine(1.0, 100, init_value=0.5)(-7) == 0.5


def test_longest_schedule_has_no_overflow():
    lr = warmup_cosine(1.0, 2**31 - 1, warmup=2**30, floor=0.0)
    steps = jnp.asarray([0, 2**29, 2**30, 2**31 - 1], jnp.int32)
    np.testing.assert_allclose(lr(steps), [0, 0.5, 1, 0], atol=1e-6)


def test_init_value_makes_use_of_the_first_step():
    got = rates(warmup_cosine(1.0, 100, warmup=4, init_value=0.25), 5)
    np.testing.assert_allclose(got, [0.25, 0.4375, 0.625, 0.8125, 1], rtol=1e-6)


@pytest.mark.parametrize("floor", [0.0, 1.0])
def test_extreme_floors(floor):
    got = rates(warmup_cosine(0.3, 50, warmup=0, floor=floor), 51)
    assert got[-1] == np.asarray(0.3 * floor, got.dtype)
    if floor == 1:
        assert np.all(got == got[0])


def test_zero_peak_is_zero():
    assert not rates(warmup_cosine(0.0, 20), 25).any()


def test_shape_and_dtype_do_not_depend_on_how_the_step_comes():
    lr = warmup_cosine(1e-3, 100)
    dtype = jnp.zeros(()).dtype
    jitted = jax.jit(lr)
    for step in (7, np.int64(7), jnp.int32(7), jnp.float32(7)):
        for got in (lr(step), jitted(step)):
            assert got.shape == ()
            assert got.dtype == dtype
            np.testing.assert_allclose(got, lr(7), rtol=1e-6)
    assert lr(jnp.ones((2, 3), jnp.int32)).shape == (2, 3)
    assert jax.vmap(lr)(jnp.arange(4, dtype=jnp.int32)).shape == (4,)


def test_equals_optax_in_the_plain_case():
    ours = warmup_cosine(2e-3, 200, warmup=20, floor_value=1e-4)
    theirs = optax.warmup_cosine_decay_schedule(0.0, 2e-3, 20, 200, 1e-4)
    steps = jnp.arange(230, dtype=jnp.float32)
    np.testing.assert_allclose(ours(steps), theirs(steps), rtol=2e-6, atol=1e-9)


def test_restarts_equal_optax_sgdr():
    restarts = Restarts(period=40, multiplier=2.0, peak_decay=0.5, warmup=5)
    ours = warmup_cosine(
        1.0, 290, warmup=10, floor_value=0.01, init_value=0.01, restarts=restarts
    )
    cycles = [(10, 50, 1.0), (5, 80, 0.5), (5, 160, 0.25)]
    theirs = optax.sgdr_schedule(
        {
            "init_value": 0.01,
            "peak_value": peak,
            "warmup_steps": warmup,
            "decay_steps": steps,
            "end_value": 0.01,
        }
        for warmup, steps, peak in cycles
    )
    steps = jnp.arange(300, dtype=jnp.float32)
    np.testing.assert_allclose(ours(steps), theirs(steps), atol=1e-6)


def test_restarts_jump_to_the_decayed_peak():
    lr = warmup_cosine(
        1.0, 100, warmup=0, floor=0.3, restarts=Restarts(25, peak_decay=0.5)
    )
    got = rates(lr, 101)
    np.testing.assert_allclose(got[[0, 25, 50, 75, 100]], [1, 0.5, 0.3, 0.3, 0.3])


def test_last_cycle_is_stretched_rather_than_cut():
    lr = warmup_cosine(1.0, 70, warmup=0, floor=0.0, restarts=Restarts(30))
    got = rates(lr, 71)
    assert got[30] == 1
    np.testing.assert_allclose(got[50], 0.5, atol=1e-6)
    assert np.all(np.diff(got[30:]) < 0)


def test_one_cycle_is_no_restart():
    once = warmup_cosine(1.0, 100, restarts=Restarts(80))
    np.testing.assert_array_equal(rates(once, 105), rates(warmup_cosine(1.0, 100), 105))


@few
@given(
    total=st.integers(20, 400),
    period=st.integers(5, 20),
    multiplier=st.floats(1, 3),
    peak_decay=st.floats(0.1, 1),
    warmup=st.integers(0, 4),
)
def test_restarts_stay_between_floor_and_peak(
    total, period, multiplier, peak_decay, warmup
):
    restarts = Restarts(period, multiplier, peak_decay, warmup)
    lr = warmup_cosine(1.0, total, warmup=0, floor_value=0.125, restarts=restarts)
    got = rates(lr, total + 2)
    assert np.all((got >= 0.125) & (got <= 1))
    assert np.all(got[total:] == 0.125)


def test_inject_hyperparams_traces_the_values():
    def sgd(peak, floor_value):
        return optax.sgd(warmup_cosine(peak, 10, warmup=2, floor_value=floor_value))

    optimizer = optax.inject_hyperparams(sgd)(peak=1.0, floor_value=0.1)
    params = jnp.zeros(())
    state = optimizer.init(params)
    update = jax.jit(optimizer.update)
    moved = []
    for _ in range(4):
        step, state = update(jnp.ones(()), state, params)
        moved.append(-float(step))
    want = rates(warmup_cosine(1.0, 10, warmup=2, floor_value=0.1), 4)
    np.testing.assert_allclose(moved, want, atol=1e-6)


def test_drives_an_optax_optimizer_without_a_second_compile():
    optimizer = optax.sgd(warmup_cosine(1e-2, 10, restarts=Restarts(3, warmup=1)))
    traces = []

    @jax.jit
    def step(params, state):
        traces.append(1)
        updates, state = optimizer.update(params, state, params)
        return optax.apply_updates(params, updates), state

    params = {"w": jnp.ones(3, jnp.bfloat16)}
    state = optimizer.init(params)
    for _ in range(12):
        params, state = step(params, state)
    assert len(traces) == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"peak": -1.0}, r"peak must be in \[0, 3.*\], got -1.0"),
        ({"peak": float("nan")}, "peak must be in .*, got nan"),
        ({"peak": float("inf")}, "peak must be in .*, got inf"),
        ({"total_steps": 0}, r"total_steps must be an int in \[1, .*\], got 0"),
        ({"total_steps": 2**31}, "total_steps must be an int in .*, got 2147483648"),
        ({"total_steps": 10.0}, "total_steps must be an int in .*, got 10.0"),
        ({"warmup": 101}, r"warmup must be an int in \[0, 100\], got 101"),
        ({"warmup": True}, r"warmup must be an int in \[0, 100\], got True"),
        ({"warmup": 1.0}, r"warmup must be a fraction in \[0, 1\) .* got 1.0"),
        ({"warmup": -0.1}, r"warmup must be a fraction in \[0, 1\) .* got -0.1"),
        ({"floor": 1.5}, r"floor must be in \[0, 1\], got 1.5"),
        ({"floor_value": 3.0}, r"floor_value must be in \[0, 2\], got 3.0"),
        ({"floor": 0.1, "floor_value": 0.1}, "floor and floor_value exclude"),
        ({"init_value": 2.5}, r"init_value must be in \[0, 2\], got 2.5"),
        ({"restarts": Restarts(96)}, r"restarts.period .* \[1, 95\], got 96"),
        ({"restarts": Restarts(1), "total_steps": 10**9}, "at most 100 cycles"),
    ],
)
def test_bad_arguments_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        warmup_cosine(**{"peak": 2.0, "total_steps": 100} | arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"period": 0}, "period must be an int in .*, got 0"),
        ({"multiplier": 0.5}, "multiplier must be in .*, got 0.5"),
        ({"peak_decay": 0.0}, r"peak_decay must be in \(0, 1\], got 0.0"),
        ({"peak_decay": 1.5}, r"peak_decay must be in \[0, 1\], got 1.5"),
        ({"warmup": 10}, r"warmup must be an int in \[0, 9\], got 10"),
    ],
)
def test_bad_restarts_are_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        Restarts(**{"period": 10} | arguments)
