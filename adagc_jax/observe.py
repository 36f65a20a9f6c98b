"""What an update did, from numbers that the pass has anyway."""

import functools
from typing import Any

import jax.numpy as jnp

from adagc_jax.layout import Parts, load, store
from adagc_jax.plan import Plan
from adagc_jax.stages import Run
from adagc_jax.state import ClipMetrics


def observe(plan: Plan, old: ClipMetrics, before: Parts, run: Run) -> ClipMetrics:
    """The metrics after an update."""
    gather = functools.partial(plan.report.gather, like=old.norm_before)
    is_clipped = tuple(
        ((s < 1.0) & ~d).astype(jnp.float32)
        for s, d in zip(run.scale, run.dropped, strict=True)
    )
    squares, dropped = gather(before), gather(run.dropped, reduce=jnp.any)
    clipped = gather(is_clipped, reduce=jnp.mean)
    active = tuple(
        jnp.isfinite(s) & (s > 0.0) & ~d for s, d in zip(squares, dropped, strict=True)
    )
    row = load(old.clipped_in_a_row)
    return ClipMetrics(
        norm_before=store(tuple(jnp.sqrt(s) for s in squares)),
        norm_after=store(tuple(jnp.sqrt(s) for s in gather(run.squares))),
        scale=store(gather(run.scale, reduce=jnp.min)),
        clipped=_added(old.clipped, clipped),
        clipped_in_a_row=store(
            tuple(
                jnp.where(a, jnp.where(c > 0.0, r + 1, 0), r)
                for a, c, r in zip(active, clipped, row, strict=True)
            )
        ),
        active=_added(old.active, active),
        nonfinite=_added(old.nonfinite, tuple(~jnp.isfinite(s) for s in squares)),
        norm_seen=run.norm_seen,
    )


def _added(field: Any, more: Parts) -> Any:
    return store(
        tuple(f + m.astype(f.dtype) for f, m in zip(load(field), more, strict=True))
    )
