"""Whole optimizer steps that are timed: which, and how.

    gradients -> Contestant (compiled, with a state of its own) -> interleaved -> rows

Every contestant runs once per round, in turn, on the same gradients; a ratio is the
median over rounds of its time divided by that of "none" in the same round, so that a
busy machine slows both.
"""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _hlo import parse

import adagc_jax
from adagc_jax import stacked
from adagc_jax.kernels import FusedOptimizer

WARMUP = 2
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

    def run(self) -> None:
        """Makes one step and notes its time."""
        started = time.perf_counter()
        self.params, self.state, numbers = self.step(
            self.params, self.state, self.grads
        )
        jax.block_until_ready((self.params, numbers))
        self.seconds.append(time.perf_counter() - started)

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
    """Runs all in turn, round after round; ratios are to the one called "none"."""
    for contestant in contestants.values():
        contestant.seconds.clear()
    for _ in range(rounds + WARMUP):
        for contestant in contestants.values():
            contestant.run()
    base = np.array(contestants["none"].seconds[WARMUP:])
    rows = {}
    for name, contestant in contestants.items():
        seconds = np.array(contestant.seconds[WARMUP:])
        low, middle, high = np.percentile(seconds / base, (25, 50, 75))
        rows[name] = {
            "ratio": round(float(middle), 3),
            "quartiles": [round(float(low), 3), round(float(high), 3)],
            "ms": round(1e3 * float(np.median(seconds)), 2),
            **contestant.program(),
        }
    return rows


def batches(names: Sequence[str], parameters: int, room: float) -> Iterator[list[str]]:
    """The names but "none" in lots whose states fit into ``room`` bytes together.

    Room is left for gradients, the state of "none" and a copy of the gradients, which
    some contestants make.
    """
    state, grads = 12 * parameters, 4 * parameters
    size = int((room - state - 2 * grads) // state)
    if size < 1:
        raise ValueError(
            f"two states of {parameters:,} parameters need "
            f"{(2 * state + 2 * grads) / 1e9:.1f} GB, there are {room / 1e9:.1f}: "
            "leave the model out, or pass a larger --memory-gb."
        )
    others = [name for name in names if name != "none"]
    for start in range(0, max(len(others), 1), size):
        yield others[start : start + size]


def race(
    optimizers: dict[str, optax.GradientTransformation],
    grads: Any,
    rounds: int,
    room: float,
) -> dict[str, Any]:
    """A row for every optimizer, lot after lot, each lot against the same "none"."""
    parameters = sum(leaf.size for leaf in jax.tree.leaves(grads))
    base = Contestant(optimizers["none"], grads)
    rows: dict[str, Any] = {}
    for lot in batches(list(optimizers), parameters, room):
        others = {
            name: Contestant(optimizers[name], grads, READS.get(name)) for name in lot
        }
        rows = interleaved({"none": base, **others}, rounds) | rows
    # The order of the table; "none" is that of the first lot.
    return {name: rows[name] for name in optimizers}
