"""The clipping methods as their papers state them, in float64 NumPy.

Slow, scalar and without JAX: the answer the library is compared with. Gradients are a
flat ``dict[str, np.ndarray]``. Every method does the same four things::

    gradients -> groups -> one norm n per group -> rule(n) = h -> h * group

A *group* is whatever shares one norm: the whole tree (``scope="global"``), a tensor
(``scope="tensor"``), or one slice of a tensor along its *kept* axes (a layer of a
stacked tensor, an expert, an output unit). `clip_groups` is that loop, and a method is
the rule passed to it.

Three decisions hold for every method built on norms:

* ``n = 0`` is an *inactive* observation: the group is passed through and its rule is
  not called, so that no state can move.
* ``n`` not finite: the rule is not called either, and the group is emitted as zeros
  (``"zero"``), as it came (``"propagate"``), or, with ``"skip"``, every group is
  emitted as zeros and no rule is called at all in that step.
* The total norm handed to a rule is taken over the finite groups only.
"""

from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np

Tensors = dict[str, np.ndarray]
Axes = Mapping[str, tuple[int, ...]]
Key = tuple[str, tuple[int, ...]]
"""A group: the tensor's name and its index along the kept axes."""

Rule = Callable[[Key, float, float], float]
"""``rule(key, n, total) -> h`` with ``n > 0`` and finite."""

Scope = Literal["tensor", "global"]
NonFinite = Literal["zero", "skip", "propagate"]

GLOBAL: Key = ("", ())


def l2(parts: list[np.ndarray]) -> float:
    """Return ``sqrt(sum |x|^2)`` over all parts, accumulated in float64."""
    with np.errstate(over="ignore", invalid="ignore"):
        return float(np.sqrt(sum(np.sum(np.abs(x) ** 2) for x in parts)))


def kept_first(x: np.ndarray, kept: tuple[int, ...]) -> tuple[np.ndarray, int]:
    """Return a view with the kept axes in front, in their own order, and how many."""
    axes = sorted(axis % x.ndim for axis in kept)
    return np.moveaxis(x, axes, range(len(axes))), len(axes)


def split(
    tensors: Tensors, scope: Scope, kept_axes: Axes
) -> dict[Key, list[np.ndarray]]:
    """Return the groups as views, so that writing to a part writes to its tensor."""
    if scope == "global":
        return {GLOBAL: list(tensors.values())}
    groups: dict[Key, list[np.ndarray]] = {}
    for name, x in tensors.items():
        front, count = kept_first(x, kept_axes.get(name, ()))
        for index in np.ndindex(front.shape[:count]):
            # The ellipsis keeps a 0-d result a view instead of a scalar.
            groups[name, index] = [front[(*index, ...)]]
    return groups


def clip_groups(
    grads: Tensors,
    rule: Rule,
    scope: Scope = "tensor",
    kept_axes: Axes | None = None,
    nonfinite: NonFinite = "zero",
) -> Tensors:
    """Multiply every group of ``grads`` by the factor its rule returns.

    Args:
        grads: the gradients; never written to.
        rule: called once for each active, finite group.
        scope: one group for the tree, or groups within each tensor.
        kept_axes: per tensor, the axes along which groups are told apart.
        nonfinite: what is emitted for a group whose norm is not finite.

    Returns:
        The clipped gradients in float64.
    """
    out = {name: np.array(x, np.float64) for name, x in grads.items()}
    groups = split(out, scope, kept_axes or {})
    norms = {key: l2(parts) for key, parts in groups.items()}
    finite = [n for n in norms.values() if np.isfinite(n)]
    if nonfinite == "skip" and len(finite) < len(norms):
        return {name: np.zeros_like(x) for name, x in out.items()}
    total = float(np.sqrt(sum(n**2 for n in finite)))
    for key, parts in groups.items():
        n = norms[key]
        if np.isfinite(n) and n > 0:
            h = rule(key, n, total)
            for part in parts:
                part *= h
        elif not np.isfinite(n) and nonfinite == "zero":
            for part in parts:
                # Assigned, because 0 * nan is nan.
                part[...] = 0.0
    return out


def factor(n: float, limit: float, eps: float) -> float:
    """Return ``h = limit / (n + eps)`` if ``n > limit``, else 1."""
    return limit / (n + eps) if n > limit else 1.0


def global_gc(
    grads: Tensors, max_norm: float, eps: float = 0.0, nonfinite: NonFinite = "zero"
) -> Tensors:
    """GlobalGC: ``g <- g * max_norm / (n + eps)`` if ``n = ||all g|| > max_norm``."""
    return clip_groups(
        grads, lambda _, n, __: factor(n, max_norm, eps), "global", None, nonfinite
    )


def tensor_gc(
    grads: Tensors,
    max_norm: float,
    eps: float = 0.0,
    kept_axes: Axes | None = None,
    nonfinite: NonFinite = "zero",
) -> Tensors:
    """Fixed threshold per group: GlobalGC's rule on each ``||g_i||`` by itself."""
    return clip_groups(
        grads, lambda _, n, __: factor(n, max_norm, eps), "tensor", kept_axes, nonfinite
    )


def clip_by_value(grads: Tensors, limit: float) -> Tensors:
    """Elementwise ``g <- min(max(g, -limit), limit)``; NaN stays NaN."""
    return {
        k: np.clip(np.array(x, np.float64), -limit, limit) for k, x in grads.items()
    }


def agc(
    grads: Tensors,
    params: Tensors,
    clipping: float = 0.01,
    eps: float = 1e-3,
    reduce_axes: Axes | None = None,
    nonfinite: NonFinite = "zero",
) -> Tensors:
    """Clip each unit ``u`` in proportion to its weights (AGC, arXiv 2102.06171).

    ``g_u <- g_u * min(1, clipping * max(||W_u||, eps) / ||g_u||)``

    Args:
        grads: the gradients.
        params: the weights, of the same names and shapes.
        clipping: the factor, lambda in the paper.
        eps: the least weight norm, so that zero weights can learn.
        reduce_axes: per tensor, the axes a unit's norm runs over; a tensor that is not
            named is one unit.
        nonfinite: what is emitted for a unit whose norm is not finite.
    """
    kept_axes = {
        name: tuple(
            axis
            for axis in range(grads[name].ndim)
            if axis not in {reduced % grads[name].ndim for reduced in axes}
        )
        for name, axes in (reduce_axes or {}).items()
    }
    weights = {name: np.array(w, np.float64) for name, w in params.items()}
    weight_norms = {
        key: l2(parts) for key, parts in split(weights, "tensor", kept_axes).items()
    }

    def rule(key: Key, n: float, _: float) -> float:
        return factor(n, clipping * max(weight_norms[key], eps), 0.0)

    return clip_groups(grads, rule, "tensor", kept_axes, nonfinite)


class AdaGC:
    r"""AdaGC (arXiv 2502.11034): clip each group by its own recent clipped norm.

    For update ``t = 0, 1, ...`` and group ``i``, with ``n = ||g_i||`` and
    ``k`` the number of the group's own active observations up to this one::

        t <  T:  limit = lambda_abs,  total = ||all finite g||
                 h = limit / (total + eps)  if total > limit, else 1
                 x = h * n
        t >= T:  limit = lambda_rel * gamma_i
                 h = limit / (n + eps)      if n > limit, else 1
                 x = min(n, limit)
        g_i <- h * g_i

        k = 1:                 gamma_i <- x                      (h = 1 if t >= T)
        "min", t <  T:         gamma_i <- min(gamma_i, x)
        "min", t >= T:         gamma_i <- beta * gamma_i + (1 - beta) * x
        "ema":                 gamma_i <- gamma_i
                                   + (x - gamma_i) * (1 - beta) / (1 - beta^k)

    The last line is the bias-corrected average in recursive form: with
    ``m_k = beta * m_{k-1} + (1 - beta) * x_k`` it gives ``m_k / (1 - beta^k)``.

    With ``scope="global"`` the tree is the only group, and ``x`` in warm-up is exactly
    ``min(n, lambda_abs)``, as in the authors' code.

    Beyond the paper: with ``r`` the norms beyond the limit in a row before this one, a
    norm beyond it gets ``h = (limit / (n + eps))^(1 + tail)`` while ``r < patience``;
    and once there are ``release`` of them ``gamma_i`` becomes their harmonic mean.

    Attributes:
        gamma: reference norm by tensor name, shaped like the tensor's kept axes (in
            the tensor's axis order); the key is ``""`` for the global scope. 0 until
            the first active observation.
        seen: active observations, of the same structure.
        step: updates so far, skipped ones included.
    """

    def __init__(
        self,
        lambda_rel: float = 1.04,
        beta: float = 0.99,
        lambda_abs: float = 1.0,
        warmup_steps: int = 100,
        eps: float = 0.0,
        warmup_init: Literal["min", "ema"] = "min",
        scope: Scope = "tensor",
        nonfinite: NonFinite = "zero",
        kept_axes: Axes | None = None,
        tail: float = 0.0,
        patience: int = 0,
        release: int | None = None,
    ) -> None:
        self.tail = tail
        self.patience = patience
        self.release = release
        self.rows: dict[Key, list[float]] = {}
        self.lambda_rel = lambda_rel
        self.beta = beta
        self.lambda_abs = lambda_abs
        self.warmup_steps = warmup_steps
        self.eps = eps
        self.warmup_init = warmup_init
        self.scope: Scope = scope
        self.nonfinite: NonFinite = nonfinite
        self.kept_axes = dict(kept_axes or {})
        self.gamma: Tensors = {}
        self.seen: Tensors = {}
        self.step = 0

    def update(self, grads: Tensors) -> Tensors:
        """Return the clipped gradients and move the state by one update."""
        if not self.gamma:
            self._allocate(grads)
        out = clip_groups(grads, self._rule, self.scope, self.kept_axes, self.nonfinite)
        self.step += 1
        return out

    def _allocate(self, grads: Tensors) -> None:
        shapes: dict[str, tuple[int, ...]] = {"": ()}
        if self.scope == "tensor":
            views = {
                k: kept_first(x, self.kept_axes.get(k, ())) for k, x in grads.items()
            }
            shapes = {name: x.shape[:count] for name, (x, count) in views.items()}
        self.gamma = {name: np.zeros(shape) for name, shape in shapes.items()}
        self.seen = {name: np.zeros(shape, int) for name, shape in shapes.items()}

    def _rule(self, key: Key, n: float, total: float) -> float:
        name, index = key
        gamma, k = float(self.gamma[name][index]), int(self.seen[name][index]) + 1
        warming = self.step < self.warmup_steps
        if warming:
            h = factor(total, self.lambda_abs, self.eps)
            x = min(n, self.lambda_abs) if self.scope == "global" else h * n
        else:
            limit = n if k == 1 else self.lambda_rel * gamma
            h = factor(n, limit, self.eps)
            x = min(n, limit)
        row = self.rows.get(key, [])
        if h < 1.0 and not warming and len(row) < self.patience:
            h = h ** (1.0 + self.tail)
        self.rows[key] = [*row, n] if n > x and not warming else []
        self.gamma[name][index] = self._averaged(gamma, x, k, warming)
        if self.release is not None and len(self.rows[key]) >= self.release:
            row = self.rows.pop(key)
            self.gamma[name][index] = len(row) / sum(1.0 / r for r in row)
        self.seen[name][index] = k
        return h

    def _averaged(self, gamma: float, x: float, k: int, warming: bool) -> float:
        if k == 1:
            return x
        if self.warmup_init == "ema":
            return gamma + (x - gamma) * (1.0 - self.beta) / (1.0 - self.beta**k)
        if warming:
            return min(gamma, x)
        return self.beta * gamma + (1.0 - self.beta) * x


class ZClip:
    """ZClip (arXiv 2504.02507): clip norms that are outliers by their z-score.

    A group's first ``warmup_steps`` finite, non-zero norms are collected, and the
    group is only clipped to ``max_grad_norm``, if there is one. With the last of them
    ``mean`` and ``var`` become their average and population variance; that update is
    still clipped as warm-up. From the next norm ``n`` on::

        z   = (n - mean) / (std + eps)
        thr = mean + z_thresh * std / (z / z_thresh), * clip_factor     adaptive_scaling
        thr = mean                                                      mean
        thr = mean + z_thresh * std                                     percentile

        spike     = z > z_thresh      ("percentile": n > thr)
        effective = min(thr if spike else n, max_grad_norm)
        g        <- g * effective / (n + 1e-6)                  if n > effective
        x         = thr if spike else n
        mean     <- alpha * mean + (1 - alpha) * x
        var      <- alpha * var + (1 - alpha) * (x - mean_new)^2

    The average sees ``thr``, not ``effective``: ``max_grad_norm`` never enters it.
    ``skip_update_on_spike`` leaves ``mean`` and ``var`` alone at a spike. The 1e-6 is
    a constant of the original, not ``eps``.

    Attributes:
        mean: average norm by tensor name, the key being ``""`` for the global scope;
            None while the group warms up.
        var: the variance, likewise.
    """

    NORM_EPS = 1e-6

    def __init__(
        self,
        alpha: float = 0.97,
        z_thresh: float = 2.5,
        max_grad_norm: float | None = 1.0,
        eps: float = 1e-6,
        warmup_steps: int = 25,
        mode: Literal["zscore", "percentile"] = "zscore",
        clip_option: Literal["adaptive_scaling", "mean"] = "adaptive_scaling",
        clip_factor: float = 1.0,
        skip_update_on_spike: bool = False,
        scope: Scope = "global",
        nonfinite: NonFinite = "zero",
    ) -> None:
        self.alpha = alpha
        self.z_thresh = z_thresh
        self.max_grad_norm = np.inf if max_grad_norm is None else max_grad_norm
        self.eps = eps
        self.warmup_steps = warmup_steps
        self.mode = mode
        self.clip_option = clip_option
        self.clip_factor = clip_factor
        self.skip_update_on_spike = skip_update_on_spike
        self.scope: Scope = scope
        self.nonfinite: NonFinite = nonfinite
        self.mean: dict[str, float | None] = {}
        self.var: dict[str, float | None] = {}
        self._collected: dict[str, list[float]] = {}

    def update(self, grads: Tensors) -> Tensors:
        """Return the clipped gradients and move the state by one update."""
        for name in [""] if self.scope == "global" else grads:
            self.mean.setdefault(name, None)
            self.var.setdefault(name, None)
            self._collected.setdefault(name, [])
        return clip_groups(grads, self._rule, self.scope, None, self.nonfinite)

    def _rule(self, key: Key, n: float, _: float) -> float:
        name, _index = key
        mean, var = self.mean[name], self.var[name]
        if mean is None or var is None:
            self._collect(name, n)
            return factor(n, self.max_grad_norm, self.NORM_EPS)
        thr = self._threshold(n, mean, float(np.sqrt(var)))
        if thr is None or not self.skip_update_on_spike:
            x = n if thr is None else thr
            new_mean = self.alpha * mean + (1.0 - self.alpha) * x
            self.mean[name] = new_mean
            self.var[name] = self.alpha * var + (1.0 - self.alpha) * (x - new_mean) ** 2
        effective = min(n if thr is None else thr, self.max_grad_norm)
        return factor(n, effective, self.NORM_EPS)

    def _collect(self, name: str, n: float) -> None:
        norms = self._collected[name]
        norms.append(n)
        if len(norms) >= self.warmup_steps:
            self.mean[name] = float(np.mean(norms))
            self.var[name] = float(np.var(norms))

    def _threshold(self, n: float, mean: float, std: float) -> float | None:
        """Return ``thr`` if ``n`` is a spike, else None."""
        if self.mode == "percentile":
            thr = mean + self.z_thresh * std
            return thr if n > thr else None
        z = (n - mean) / (std + self.eps)
        if z <= self.z_thresh:
            return None
        if self.clip_option == "mean":
            return mean
        return (mean + self.z_thresh * std / (z / self.z_thresh)) * self.clip_factor
