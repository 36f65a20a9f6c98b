"""Whole optimizer steps that are timed: which, and how.

    gradients -> Contestant (compiled, with a state of its own) -> interleaved -> rows

In every round each contestant runs beside "none", right before or after it, on the
same gradients; a ratio is the median over rounds of its time divided by that of "none"
beside it, so that a busy machine slows both. "none" itself runs beside "none": its
quartiles are what the machine adds. All have the same parameters and moments: where in
memory these lie, and how long ago they were touched, is worth more than some of the
differences.
"""

import functools
import random
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _hlo import parse

import adagc_jax
from adagc_jax import stacked
from adagc_jax.kernels import FusedOptimizer

WARMUP = 1
CALLS = 30
GUARDED = "guard(adagc)"

# What stands before AdamW, given the axes that hold separate layers and experts.
CLIPPERS: dict[str, Callable[[Any], optax.GradientTransformation]] = {
    "none": lambda axes: optax.identity(),
    "optax.clip_by_global_norm": lambda axes: optax.clip_by_global_norm(1.0),
    "optax.adaptive_grad_clip": lambda axes: optax.adaptive_grad_clip(0.01),
    "optax.clip_by_block_rms": lambda axes: optax.clip_by_block_rms(1.0),
    "adagc": lambda axes: adagc_jax.adagc(groups=stacked(axes)),
    "adagc (steady)": lambda axes: adagc_jax.adagc(
        groups=stacked(axes), phase="steady"
    ),
    "robust_gc": lambda axes: adagc_jax.robust_gc(groups=stacked(axes)),
    "global_gc": lambda axes: adagc_jax.global_gc(),
    "tensor_gc": lambda axes: adagc_jax.tensor_gc(groups=stacked(axes)),
    "agc": lambda axes: adagc_jax.agc(stacked=axes),
    "zclip": lambda axes: adagc_jax.zclip(),
    "adagc + clip_metrics": lambda axes: adagc_jax.adagc(groups=stacked(axes)),
    GUARDED: lambda axes: adagc_jax.adagc(groups=stacked(axes)),
}
# What the step reads out of its new state, besides making it.
READS = {"adagc + clip_metrics": adagc_jax.clip_metrics}


def adamw_after(name: str, axes: Any) -> optax.GradientTransformation:
    """AdamW with one of `CLIPPERS` before it."""
    optimizer = optax.chain(CLIPPERS[name](axes), optax.adamw(1e-3))
    return adagc_jax.guard(optimizer) if name == GUARDED else optimizer


class Contestant:
    """One compiled optimizer step with its own state."""

    def __init__(
        self,
        optimizer: optax.GradientTransformation,
        grads: Any,
        read: Callable[[Any], Any] | None = None,
    ):
        self.grads = grads
        self.params = jax.tree.map(lambda g: jnp.array(g, jnp.float32), grads)
        self.state = optimizer.init(self.params)

        advance = step_of(optimizer)

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def step(params, state, grads):
            params, state = advance(params, state, grads)
            return params, state, read(state) if read else {}

        started = time.perf_counter()
        lowered = step.lower(self.params, self.state, self.grads)
        self.trace_seconds = time.perf_counter() - started
        started = time.perf_counter()
        self.step = lowered.compile()
        self.compile_seconds = time.perf_counter() - started
        memory = self.step.memory_analysis()
        self.temp_bytes = memory.temp_size_in_bytes if memory else 0
        self.seconds: list[float] = []

    def take_over(self, other: "Contestant") -> None:
        """Goes on with the parameters and moments of another, where they lie."""
        moments = {name: optax.tree.get(other.state, name) for name in ("mu", "nu")}
        self.params = other.params
        self.state = optax.tree.set(self.state, **moments)

    def run(self) -> None:
        """Makes two steps and notes the time of the second.

        In training every step finds memory as the step before has left it.
        """
        self._advance()
        started = time.perf_counter()
        self._advance()
        self.seconds.append(time.perf_counter() - started)

    def _advance(self) -> None:
        self.params, self.state, numbers = self.step(
            self.params, self.state, self.grads
        )
        jax.block_until_ready((self.params, numbers))

    def program(self) -> dict[str, Any]:
        """What was compiled, and what it costs to hand its state over."""
        return {
            "trace_s": round(self.trace_seconds, 2),
            "compile_s": round(self.compile_seconds, 2),
            "temp_mb": round(self.temp_bytes / 1e6, 2),
            "instructions": instructions(self.step),
            "state_arrays": len(jax.tree.leaves(self.state)),
            "dispatch_us": round(1e6 * dispatch_seconds(self.state), 1),
        }


def step_of(optimizer: optax.GradientTransformation) -> Callable[..., Any]:
    """The function from parameters, state and gradients to the first two anew."""
    if isinstance(optimizer, FusedOptimizer):
        return optimizer.step

    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def instructions(compiled: Any) -> int:
    """Instructions of an optimised program, those inside fusions too."""
    text = compiled.as_text()
    return sum(len(lines) for lines in parse(text).computations.values())


def dispatch_seconds(state: Any) -> float:
    """The fastest call of a compiled function that takes a state and hands it back.

    Flattening, passing and building the tree again: what a step costs before anything
    is computed, and all that a large number of small arrays costs in each step.
    """
    same = jax.jit(lambda tree: tree, keep_unused=True)
    # As many arrays in the same tree, but nothing in them to copy.
    hollow = jax.tree.map(lambda x: jnp.zeros((), x.dtype), state)
    jax.block_until_ready(same(hollow))
    times = []
    for _ in range(CALLS):
        started = time.perf_counter()
        jax.block_until_ready(same(hollow))
        times.append(time.perf_counter() - started)
    return min(times)


def interleaved(contestants: dict[str, Contestant], rounds: int) -> dict[str, Any]:
    """Runs each beside "none", in rounds and pairs of shuffled order."""
    base = last = contestants["none"]
    for contestant in contestants.values():
        contestant.seconds.clear()
    ratios: dict[str, list[float]] = {name: [] for name in contestants}
    shuffle = random.Random(0)
    for _ in range(rounds + WARMUP):
        for name in shuffle.sample([*contestants], len(contestants)):
            took = {}
            pair = {"own": contestants[name], "base": base}
            for role in shuffle.sample([*pair], 2):
                pair[role].take_over(last)
                last = pair[role]
                last.run()
                took[role] = last.seconds[-1]
            ratios[name].append(took["own"] / took["base"])
    return {
        name: _row(contestant, ratios[name][WARMUP:])
        for name, contestant in contestants.items()
    }


def _row(contestant: Contestant, ratios: list[float]) -> dict[str, Any]:
    low, middle, high = np.percentile(ratios, (25, 50, 75))
    return {
        "ratio": round(float(middle), 3),
        "quartiles": [round(float(low), 3), round(float(high), 3)],
        "ms": round(1e3 * float(np.median(contestant.seconds[WARMUP:])), 2),
        **contestant.program(),
    }


def race(
    optimizers: dict[str, optax.GradientTransformation], grads: Any, rounds: int
) -> dict[str, Any]:
    """A row for every optimizer, one of which is called "none"."""
    contestants: dict[str, Contestant] = {}
    for name, optimizer in optimizers.items():
        contestants[name] = Contestant(optimizer, grads, READS.get(name))
        # So that the memory of one is enough for all.
        contestants[name].take_over(contestants[next(iter(contestants))])
    return interleaved(contestants, rounds)
