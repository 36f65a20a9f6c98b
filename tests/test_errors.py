"""Bad input: the error names the argument, the value received and the fix."""

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import adagc_jax as aj

PARAMS = {"layers": {"q": jnp.ones((2, 3)), "bias": jnp.ones(3)}}

BAD_HYPER = [
    (aj.adagc, "lambda_rel", [0.0, -1, float("nan"), "1", None, True]),
    (aj.adagc, "beta", [1.0, -0.1, float("nan"), np.float32(2), "x"]),
    (aj.adagc, "lambda_abs", [0, -2.0, float("nan"), jnp.array([1.0])]),
    (aj.adagc, "warmup_steps", [-1, 1.5, None, True, float("inf"), 3e9]),
    (aj.adagc, "warmup_init", ["mean", None]),
    (aj.adagc, "eps", [-1e-6, float("nan")]),
    (aj.adagc, "nonfinite", ["ignore", None]),
    (aj.adagc, "phase", ["warmup", 3]),
    (aj.agc, "clipping", [0.0, -0.1, jnp.float32(-1)]),
    (aj.agc, "eps", [-1.0]),
    (aj.agc, "layout", ["HW", None]),
    (aj.global_gc, "max_norm", [-1.0, float("nan"), "1"]),
    (aj.tensor_gc, "max_norm", [-1.0, [1.0]]),
    (aj.clip_by_value, "limit", [-1.0, float("nan"), None]),
    (aj.zclip, "alpha", [1.0, -0.5]),
    (aj.zclip, "z_thresh", [0.0, -1.0]),
    (aj.zclip, "max_grad_norm", [-1.0, "no"]),
    (aj.zclip, "warmup_steps", [-3, 0.5]),
    (aj.zclip, "mode", ["z"]),
    (aj.zclip, "clip_option", ["max"]),
    (aj.zclip, "clip_factor", [0.0]),
    (aj.zclip, "skip_update_on_spike", [1, None]),
]


@pytest.mark.parametrize(
    ("factory", "argument", "value"),
    [(f, argument, v) for f, argument, values in BAD_HYPER for v in values],
    ids=lambda x: getattr(x, "__name__", repr(x)),
)
def test_bad_hyper_parameters(factory: Any, argument: str, value: Any) -> None:
    required = {"limit": 1.0} if factory is aj.clip_by_value else {}
    with pytest.raises(ValueError, match=argument) as caught:
        factory(**(required | {argument: value}))
    assert repr(value) in str(caught.value)


def test_traced_values_pass() -> None:
    def emitted(lambda_rel: jax.Array, steps: jax.Array) -> Any:
        clip = aj.adagc(lambda_rel=lambda_rel, warmup_steps=steps)
        return clip.update(PARAMS, clip.init(PARAMS))[0]

    updates = jax.jit(emitted)(jnp.float32(-1.0), jnp.int32(2))
    assert jax.tree.structure(updates) == jax.tree.structure(PARAMS)


def groups_error(groups: aj.Groups) -> Callable[[], Any]:
    return lambda: aj.adagc(groups=groups).init(PARAMS)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (groups_error(aj.stacked({"nothing": 0})), ["'nothing'", "layers/bias"]),
        (groups_error(aj.stacked(2)), ["axis 2", "'layers/bias'", "(3,)"]),
        (groups_error(aj.stacked({"q": (0, -5)})), ["axis -5", "'layers/q'"]),
        (groups_error(aj.stacked(lambda path, leaf: "x")), ["'layers/bias'", "'x'"]),
        (groups_error(aj.stacked([0, 1])), ["prefix"]),
        (groups_error(aj.units(7)), ["unit", "axis 7"]),
        (groups_error(aj.units({"head": 0})), ["unit", "'head'"]),
        (groups_error(aj.units(0, stacked=0)), ["stacked axes as well"]),
        (lambda: aj.stacked("layers"), ["'layers'"]),
        (lambda: aj.units("row"), ["unit", "'row'"]),
        (lambda: aj.adagc(exclude=("head",)).init(PARAMS), ["exclude", "'head'"]),
        (lambda: aj.adagc(mask={"layers": 3}).init(PARAMS), ["mask", "3"]),
        (lambda: aj.adagc(mask={"other": True}).init(PARAMS), ["mask", "prefix"]),
        (lambda: aj.clip_by_rule(), ["rules"]),
        (lambda: aj.clip_by_rule(aj.FixedNorm), ["rules", "FixedNorm"]),  # type: ignore[arg-type]
        (lambda: aj.clip_by_value(lambda s: 1.0), ["limit", "inject_hyperparams"]),  # type: ignore[arg-type]
        (lambda: aj.clip_metrics(optax.EmptyState()), ["opt_state"]),
        (
            lambda: aj.agc().init({"w": jnp.ones((1,) * 6)}),
            ["'w'", "unit axes", "(1, 1, 1, 1, 1, 1)"],
        ),
    ],
)
def test_bad_groups_masks_and_rules(call: Any, words: list[str]) -> None:
    with pytest.raises(ValueError, match=re.escape(words[0])) as caught:
        call()
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize("groups", [{"layers/": 0}, aj.per_tensor, "per_tensor"])
def test_groups_of_another_kind_are_refused(groups: Any) -> None:
    with pytest.raises(ValueError, match=r"groups must come from .*got .*stacked"):
        aj.adagc(groups=groups)
    aj.adagc(axis_names=None)


def test_agc_names_the_parameter_that_is_missing() -> None:
    clip = aj.agc()
    state = clip.init(PARAMS)
    with pytest.raises(ValueError, match="params has no leaf 'layers/bias'"):
        clip.update(PARAMS, state, {"layers": {"q": PARAMS["layers"]["q"]}})
    wrong = {"layers": {"q": jnp.ones((2, 4)), "bias": jnp.ones(3)}}
    with pytest.raises(ValueError, match=r"'layers/q'.*\(2, 4\).*\(2, 3\)"):
        clip.update(PARAMS, state, wrong)


def test_clip_by_value_refuses_complex_leaves() -> None:
    clip = aj.clip_by_value(1.0)
    grads = {"w": jnp.ones(2, jnp.complex64)}
    with pytest.raises(ValueError, match="'w' is complex64"):
        clip.update(grads, clip.init(grads))


def test_low_precision_hyper_parameters_are_refused() -> None:
    params = {"w": jnp.ones(3, jnp.bfloat16)}
    injected = optax.inject_hyperparams(aj.adagc)(beta=0.99)
    with pytest.raises(ValueError, match=r"hyperparam_dtype=jnp\.float32"):
        injected.init(params)


def test_specs_print_and_hash() -> None:
    specs = [
        aj.per_tensor(),
        aj.whole_tree(),
        aj.stacked(0),
        aj.stacked({"a": (0, 1)}),
        aj.stacked({"a": {"b": 0}}),
        aj.units({"embed": 0, "head": "tensor"}, stacked={"layers": 0}),
    ]
    assert len(set(specs)) == len(specs)
    assert all("Groups(" in repr(spec) for spec in specs)
    assert aj.stacked({"a": {"b": 0}}) == aj.stacked({"a": {"b": 0}})
