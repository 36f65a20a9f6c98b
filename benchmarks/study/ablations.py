"""What each part of a rule does: one number varied at a time, the rest by default."""

import functools
from typing import Any

import optax
from _clippers import zeros_count
from robust_variations import Floored, Geometric, clipper
from rules import NO_LIMIT, Rule
from scenarios import IDLE, REPORT, Event, Scenario

import adagc_jax

# Nothing, bursts short and long, a burst in AdaGC's warm-up, a tensor without gradients
# in the warm-up and after it.
SCENARIOS = (
    *(REPORT[i] for i in (0, 3, 5, 6)),
    Scenario(f"{IDLE}, steps 20 to 79", (Event(IDLE, 20, 60),)),
    Scenario(f"{IDLE}, steps 120 to 179", (Event(IDLE, 120, 60),)),
)


def _adagc(init: str, **options: Any) -> optax.GradientTransformation:
    return adagc_jax.adagc(warmup_init=init, **options)


def _as_printed(**options: Any) -> optax.GradientTransformation:
    """A gradient of zero counts, where the library holds still."""
    return optax.chain(zeros_count(), adagc_jax.adagc(**options))


def _whole_tree(groups: Any, **options: Any) -> optax.GradientTransformation:
    del groups
    return adagc_jax.adagc(groups=adagc_jax.whole_tree(), **options)


def _varied(init: str, name: str, *values: float) -> Rule:
    settings = tuple((value,) for value in values)
    make = functools.partial(_adagc, init)
    return Rule(f"adagc, {init}: {name}", make, (name,), settings)


ABLATIONS = (
    Rule("none", lambda: optax.identity(), groups=False),
    *(
        rule
        for init in ("min", "ema")
        for rule in (
            _varied(init, "lambda_rel", 1.0, 1.02, 1.04, 1.1, 1.5, 2.0),
            _varied(init, "warmup_steps", 0, 20),
            # Without GlobalGC in the warm-up.
            _varied(init, "lambda_abs", NO_LIMIT),
            # The last one keeps the limits of the warm-up: local but not adaptive.
            _varied(init, "beta", 0.9, 0.98, 0.999, 0.99999),
        )
    ),
    Rule("adagc of the whole tree", _whole_tree, ("beta",), ((0.99,),)),
    Rule("adagc, zero gradients count", _as_printed, ("beta",), ((0.99,),)),
    *(
        Rule(name, make, ("tail", "patience"), ((3, 6), (1, 6)))
        for name, make in {
            "robust_gc": adagc_jax.robust_gc,
            "robust_gc, at least half of gamma": clipper(Floored),
            "robust_gc, average of logarithms": clipper(Geometric),
        }.items()
    ),
)
