"""The methods that clip a group relative to its own past: AdaGC and robust_gc."""

from collections.abc import Sequence
from typing import Any

import optax

from adagc_jax.checks import Hyper, check_choice, check_count, check_hyper
from adagc_jax.clip import clip_by_rule
from adagc_jax.ema_ratio import EmaRatio
from adagc_jax.groups import Groups
from adagc_jax.kernels.backend import Backend
from adagc_jax.leaves import Mask
from adagc_jax.manual import AxisNames


def adagc(
    lambda_rel: Hyper = 1.04,
    beta: Hyper = 0.99,
    lambda_abs: Hyper = 1.0,
    warmup_steps: int = 100,
    *,
    warmup_init: str = "min",
    eps: float = 0.0,
    release: int | None = None,
    groups: Groups | None = None,
    mask: Mask = None,
    exclude: Sequence[str] = (),
    nonfinite: str = "zero",
    phase: str = "auto",
    backend: str | Backend = "auto",
    axis_names: AxisNames = (),
) -> optax.GradientTransformationExtraArgs:
    r"""AdaGC: clips each tensor relative to its own recent, clipped gradient norm.

    After warm-up, for tensor :math:`i` with gradient :math:`g_{t,i}`:

    .. math::
      h_{t,i} &= \min\{1, \lambda_{rel}\,\gamma_{t-1,i} / (\|g_{t,i}\|_2 + \epsilon)\},
      \qquad g_{t,i} \leftarrow h_{t,i}\, g_{t,i} \\
      \gamma_{t,i} &= \beta\,\gamma_{t-1,i} + (1-\beta)\,
        \min\{\|g_{t,i}\|_2, \lambda_{rel}\,\gamma_{t-1,i}\}

    In the first :math:`T_{start}` updates all tensors together are clipped to the
    global norm :math:`\lambda_{abs}`, and :math:`\gamma_i` is the smallest clipped norm
    of tensor :math:`i` so far.

    Args:
      lambda_rel: :math:`\lambda_{rel}`, how far above its reference a norm may be;
        dimensionless, at least 1 is sensible. May be a schedule of the update number.
      beta: :math:`\beta`, decay of the reference, in [0, 1). May be a schedule.
      lambda_abs: :math:`\lambda_{abs}`, limit of the global norm in warm-up; ``inf``
        for a warm-up without clipping. May be a schedule.
      warmup_steps: :math:`T_{start}`, updates of the warm-up.
      warmup_init: ``"min"``, the paper's running minimum; ``"ema"``, the bias-corrected
        average of the clipped norms, which a spike inside the warm-up cannot leave far
        too small.
      eps: Added to the norm that is divided by. With 0 the rule is scale-equivariant;
        ``1e-6`` reproduces the authors' code.
      release: Updates in a row that may clip a group before its reference starts again
        at the harmonic mean of its norms in them; None, the paper, for never. With
        it :math:`\gamma` follows a lasting rise at once, which it otherwise does by a
        factor of :math:`1 + (1-\beta)(\lambda_{rel}-1)` per update.
      groups: What is clipped together: ``per_tensor()`` (default), ``stacked(...)`` for
        scanned layers and experts, ``whole_tree()`` for AdaGC-Global.
      mask: Leaves to clip, as in `clip_by_rule`.
      exclude: Path patterns of leaves to leave out, as in `clip_by_rule`.
      nonfinite: Policy for NaN and infinite norms, as in `clip_by_rule`.
      phase: ``"auto"``, or ``"steady"`` for the program after warm-up, which has no
        norm over the whole tree in it; same state, same results from then on.
      backend: What reads gradients for their norms, as in `clip_by_rule`.
      axis_names: Mesh axes of sharded gradients inside ``jax.shard_map``, as in
        `clip_by_rule`.

    Returns:
      An ``optax.GradientTransformationExtraArgs``; its state keeps one float32
      reference per group. Needs no parameters.

    Raises:
      ValueError: for a hyper-parameter outside its range.

    Example:
      >>> import adagc_jax, jax.numpy as jnp, optax
      >>> optimizer = optax.chain(adagc_jax.adagc(), optax.adamw(1e-3))
      >>> params = {"w": jnp.ones((2, 2))}
      >>> state = optimizer.init(params)
      >>> updates, state = optimizer.update(params, state, params)

    Reference:
      AdaGC: Improving Training Stability for Large Language Model Pretraining,
      https://arxiv.org/abs/2502.11034.

    Differs from a literal port: a zero gradient is no observation (it can neither pin
    :math:`\gamma` at 0 nor let it decay), a non-finite one leaves :math:`\gamma` as it
    is, and a tensor first active after warm-up starts with its own norm, unclipped.
    """
    rule = ema_ratio_rule(
        lambda_rel, beta, lambda_abs, warmup_steps, warmup_init, eps, release=release
    )
    return clip_by_rule(
        rule,
        groups=groups,
        mask=mask,
        exclude=exclude,
        nonfinite=nonfinite,
        phase=phase,
        backend=backend,
        axis_names=axis_names,
    )


def robust_gc(
    lambda_rel: Hyper = 1.3,
    beta: Hyper = 0.99,
    tail: Hyper = 3.0,
    patience: int = 6,
    lambda_abs: Hyper = 1.0,
    warmup_steps: int = 20,
    *,
    warmup_init: str = "ema",
    eps: float = 0.0,
    release: int | None = None,
    groups: Groups | None = None,
    mask: Mask = None,
    exclude: Sequence[str] = (),
    nonfinite: str = "zero",
    phase: str = "auto",
    backend: str | Backend = "auto",
    axis_names: AxisNames = (),
) -> optax.GradientTransformationExtraArgs:
    r"""AdaGC with a redescending scale: the further out a norm is, the less is left.

    AdaGC emits an outlier of any size with the norm of its limit. Here, after warm-up
    and with :math:`\ell_{t,i} = \lambda_{rel}\,\gamma_{t-1,i}`, an outlier
    :math:`\|g_{t,i}\|_2 > \ell_{t,i}` is emitted with the norm
    :math:`\ell_{t,i}\,(\ell_{t,i} / \|g_{t,i}\|_2)^{tail}`:

    .. math::
      h_{t,i} &= (\ell_{t,i} / (\|g_{t,i}\|_2 + \epsilon))^{1 + tail} \\
      \gamma_{t,i} &= \beta\,\gamma_{t-1,i} + (1-\beta)\,
        \min\{\|g_{t,i}\|_2, \ell_{t,i}\}

    That holds for the first :math:`patience` outliers of a group in a row. Those after
    them are believed, and clipped to :math:`\ell_{t,i}` as in AdaGC: a soft skip of
    single tensors with a time limit.

    Args:
      lambda_rel: :math:`\lambda_{rel}`, how far above its reference a norm may be
        before it is an outlier; dimensionless. Wider than AdaGC's 1.04, so that
        ordinary noise is left alone. May be a schedule.
      beta: :math:`\beta`, decay of the reference, in [0, 1). May be a schedule.
      tail: How fast an outlier is muted: one of :math:`k` times the limit is emitted
        with :math:`k^{-tail}` times the limit. 0 is AdaGC. May be a schedule.
      patience: Outliers of a group in a row, in active updates, that are muted.
      lambda_abs: :math:`\lambda_{abs}`, limit of the global norm in warm-up; ``inf``
        for a warm-up without clipping. May be a schedule.
      warmup_steps: :math:`T_{start}`, updates of the warm-up, clipped by GlobalGC.
      warmup_init: ``"ema"`` or ``"min"``, as in `adagc`.
      eps: Added to the norm that is divided by.
      release: As in `adagc`.
      groups: What is clipped together, as in `adagc`.
      mask: Leaves to clip, as in `clip_by_rule`.
      exclude: Path patterns of leaves to leave out, as in `clip_by_rule`.
      nonfinite: Policy for NaN and infinite norms, as in `clip_by_rule`.
      phase: ``"auto"`` or ``"steady"``, as in `adagc`.
      backend: What reads gradients for their norms, as in `clip_by_rule`.
      axis_names: Mesh axes inside ``jax.shard_map``, as in `clip_by_rule`.

    Returns:
      An ``optax.GradientTransformationExtraArgs``; same state as `adagc`. Needs no
      parameters. Scales stay at or above the smallest normal float32, 1.2e-38: an
      outlier is muted and counted as clipped, never dropped.

    Raises:
      ValueError: for a hyper-parameter outside its range.

    Example:
      >>> import adagc_jax, jax.numpy as jnp
      >>> clip = adagc_jax.robust_gc(lambda_rel=2.0, tail=1.0, warmup_steps=0)
      >>> grads = {"w": jnp.array([3.0, 4.0])}
      >>> _, state = clip.update(grads, clip.init(grads))
      >>> spike = {"w": 100 * grads["w"]}
      >>> print(jnp.linalg.norm(clip.update(spike, state)[0]["w"]))  # 10 * (10 / 500)
      0.2

    Reference:
      A rule of this library, on top of AdaGC, https://arxiv.org/abs/2502.11034, with
      the redescending influence of robust statistics (Hampel et al., 1986). Its
      defaults come from trials with small models; treat them as a start.
    """
    rule = ema_ratio_rule(
        lambda_rel,
        beta,
        lambda_abs,
        warmup_steps,
        warmup_init,
        eps,
        tail=check_hyper("tail", tail),
        patience=check_count("patience", patience),
        release=release,
    )
    return clip_by_rule(
        rule,
        groups=groups,
        mask=mask,
        exclude=exclude,
        nonfinite=nonfinite,
        phase=phase,
        backend=backend,
        axis_names=axis_names,
    )


def ema_ratio_rule(
    lambda_rel: Hyper,
    beta: Hyper,
    lambda_abs: Hyper,
    warmup_steps: int,
    warmup_init: str,
    eps: float,
    release: int | None,
    **redescending: Any,
) -> EmaRatio:
    """The rule of these arguments, which are checked."""
    if release is not None:
        check_count("release", release, low=1)
    return EmaRatio(
        lambda_rel=check_hyper("lambda_rel", lambda_rel, open_low=True),
        beta=check_hyper("beta", beta, high=1.0, open_high=True),
        lambda_abs=check_hyper("lambda_abs", lambda_abs, open_low=True),
        warmup_steps=check_count("warmup_steps", warmup_steps),
        warmup_init=check_choice("warmup_init", warmup_init, ("min", "ema")),
        eps=check_hyper("eps", eps),
        release=release,
        **redescending,
    )
