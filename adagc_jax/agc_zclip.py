"""AGC and ZClip: limits from the parameters, and from the spread of past norms."""

from collections.abc import Sequence

import optax

from adagc_jax.checks import Hyper, check_choice, check_count, check_hyper
from adagc_jax.clip import clip_by_rule
from adagc_jax.groups import AxesSpec, Groups, UnitSpec, units, whole_tree
from adagc_jax.kernels.backend import Backend
from adagc_jax.leaves import Mask
from adagc_jax.manual import AxisNames
from adagc_jax.rules import ParamRatio
from adagc_jax.z_score import ZScore


def agc(
    clipping: Hyper = 0.01,
    eps: float = 1e-3,
    *,
    unit: UnitSpec = "output",
    layout: str = "IO",
    stacked: AxesSpec = None,
    mask: Mask = None,
    exclude: Sequence[str] = (),
    nonfinite: str = "zero",
    backend: str | Backend = "auto",
    axis_names: AxisNames = (),
) -> optax.GradientTransformationExtraArgs:
    r"""AGC: clips each output unit relative to the norm of its weights.

    .. math::
      g_u \leftarrow g_u \cdot \min\{1,
        \lambda\,\max(\|W_u\|_2, \epsilon) / \|g_u\|_2\}

    Args:
      clipping: :math:`\lambda`, the largest ratio of gradient to weight norm; 0.01 to
        0.16 in the paper. May be a schedule.
      eps: :math:`\epsilon`, smallest weight norm that is assumed, so that weights
        initialised to zero can learn.
      unit: What a unit is: ``"output"``, ``"tensor"`` (whole tensor, Frobenius norm),
        the axes that index the units, or a mapping from path patterns to one of these,
        such as ``{"embed": 0}`` for embeddings by row. See `units`.
      layout: Where the output axis is: ``"IO"`` last, ``"OI"`` first. See `units`.
      stacked: Axes of stacked layers or experts, kept apart. See `stacked`.
      mask: Leaves to clip, as in `clip_by_rule`.
      exclude: Path patterns of leaves to leave out. The paper leaves out the weight of
        the final classifier: ``exclude=("head/kernel",)``.
      nonfinite: Policy for NaN and infinite norms, as in `clip_by_rule`.
      backend: What reads gradients for their norms, as in `clip_by_rule`.
      axis_names: Mesh axes inside ``jax.shard_map``, as in `clip_by_rule`.

    Returns:
      An ``optax.GradientTransformationExtraArgs``; ``update`` needs ``params``.

    Raises:
      ValueError: for a hyper-parameter outside its range or an unknown unit; from
        ``update``, for missing parameters.

    Example:
      >>> import adagc_jax, jax.numpy as jnp
      >>> clip = adagc_jax.agc(clipping=0.1)
      >>> params, grads = {"w": jnp.eye(2)}, {"w": jnp.array([[1.0, 0], [0, 0.05]])}
      >>> updates, _ = clip.update(grads, clip.init(params), params)
      >>> print(updates["w"])
      [[0.1  0.  ]
       [0.   0.05]]

    Reference:
      Brock et al., High-Performance Large-Scale Image Recognition Without
      Normalization, https://arxiv.org/abs/2102.06171.

    Differs from ``optax.adaptive_grad_clip``: stacked axes stay apart, axes of size one
    count (optax drops them before it looks at the rank), and ranks above 5 need
    explicit units.
    """
    rule = ParamRatio(
        check_hyper("clipping", clipping, open_low=True), check_hyper("eps", eps)
    )
    return clip_by_rule(
        rule,
        groups=units(unit, layout, stacked),
        mask=mask,
        exclude=exclude,
        nonfinite=nonfinite,
        backend=backend,
        axis_names=axis_names,
    )


def zclip(
    alpha: Hyper = 0.97,
    z_thresh: Hyper = 2.5,
    max_grad_norm: Hyper | None = 1.0,
    eps: float = 1e-6,
    warmup_steps: int = 25,
    mode: str = "zscore",
    clip_option: str = "adaptive_scaling",
    clip_factor: Hyper = 1.0,
    skip_update_on_spike: bool = False,
    *,
    groups: Groups | None = None,
    mask: Mask = None,
    exclude: Sequence[str] = (),
    nonfinite: str = "zero",
    backend: str | Backend = "auto",
    axis_names: AxisNames = (),
) -> optax.GradientTransformationExtraArgs:
    r"""ZClip: clips norms that stand out by their z-score.

    With mean :math:`\mu` and variance :math:`\sigma^2` of the norms so far, and
    :math:`z = (n - \mu) / (\sigma + \epsilon)`, a norm :math:`n` with
    :math:`z > z_{thresh}` gets the limit

    .. math:: \mu + z_{thresh}\,\sigma / (z / z_{thresh})

    and :math:`\mu \leftarrow \alpha\mu + (1-\alpha)x`,
    :math:`\sigma^2 \leftarrow \alpha\sigma^2 + (1-\alpha)(x - \mu)^2`, where :math:`x`
    is the limit for a spike and :math:`n` otherwise.

    Args:
      alpha: :math:`\alpha`, decay of mean and variance, in [0, 1). May be a schedule.
      z_thresh: :math:`z_{thresh}`, standard deviations. May be a schedule.
      max_grad_norm: Fixed limit on top, also in warm-up; None for none.
      eps: :math:`\epsilon`, added to the standard deviation.
      warmup_steps: Active observations of a group that give its first statistics.
      mode: ``"zscore"`` or ``"percentile"`` (limit :math:`\mu + z_{thresh}\sigma`).
      clip_option: In mode ``"zscore"``: ``"adaptive_scaling"`` (above) or ``"mean"``.
      clip_factor: Factor on the limit of ``"adaptive_scaling"``.
      skip_update_on_spike: Whether a spike leaves mean and variance as they are.
      groups: Whose norms are scored: ``whole_tree()`` (default, the paper) or any.
      mask: Leaves to clip, as in `clip_by_rule`.
      exclude: Path patterns of leaves to leave out, as in `clip_by_rule`.
      nonfinite: Policy for NaN and infinite norms, as in `clip_by_rule`; they never
        enter mean and variance.
      backend: What reads gradients for their norms, as in `clip_by_rule`.
      axis_names: Mesh axes inside ``jax.shard_map``, as in `clip_by_rule`.

    Returns:
      An ``optax.GradientTransformationExtraArgs``; its state keeps two float32 numbers
      per group. Needs no parameters.

    Raises:
      ValueError: for a hyper-parameter outside its range.

    Example:
      >>> import adagc_jax, jax.numpy as jnp
      >>> clip = adagc_jax.zclip(warmup_steps=2)
      >>> grads = {"w": jnp.array([3.0, 4.0])}
      >>> print(clip.update(grads, clip.init(grads))[0]["w"].round(3))
      [0.6 0.8]

    Reference:
      ZClip: Adaptive Spike Mitigation for LLM Pre-Training,
      https://arxiv.org/abs/2504.02507; compared with the package ``zclip`` 1.0.0.

    Differs from the package: any grouping, running statistics instead of a buffer in
    warm-up, and zero or non-finite norms are no observations.
    """
    if not isinstance(skip_update_on_spike, bool):
        raise ValueError(
            f"skip_update_on_spike must be a bool, got {skip_update_on_spike!r}."
        )
    if max_grad_norm is not None:
        check_hyper("max_grad_norm", max_grad_norm)
    rule = ZScore(
        alpha=check_hyper("alpha", alpha, high=1.0, open_high=True),
        z_thresh=check_hyper("z_thresh", z_thresh, open_low=True),
        max_grad_norm=max_grad_norm,
        eps=check_hyper("eps", eps),
        warmup_steps=check_count("warmup_steps", warmup_steps),
        mode=check_choice("mode", mode, ("zscore", "percentile")),
        clip_option=check_choice(
            "clip_option", clip_option, ("adaptive_scaling", "mean")
        ),
        clip_factor=check_hyper("clip_factor", clip_factor, open_low=True),
        skip_update_on_spike=skip_update_on_spike,
    )
    return clip_by_rule(
        rule,
        groups=groups or whole_tree(),
        mask=mask,
        exclude=exclude,
        nonfinite=nonfinite,
        backend=backend,
        axis_names=axis_names,
    )
