"""AdaGC and AdamW together: the public form of the kernel that does both.

adagc_adamw -> optax.chain(adagc, adamw), or adamw_update where a kernel is named
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import optax

from adagc_jax.checks import Hyper, check_hyper
from adagc_jax.groups import Groups
from adagc_jax.kernels.backend import Backend, as_backend
from adagc_jax.kernels.dispatch import kernel_named
from adagc_jax.leaves import Mask
from adagc_jax.manual import AxisNames, frozen_axis_names

Step = Callable[[Any, Any, Any], tuple[Any, Any]]


class FusedOptimizer(optax.GradientTransformationExtraArgs):
    """An optax transformation that can also write parameters itself.

    Attributes:
      step: ``step(params, state, grads) -> (params, state)``: what ``update`` and
        ``optax.apply_updates`` do one after another. A kernel writes both in place: the
        function that is jitted must take and return them in this order and donate them
        (``donate_argnums=(0, 1)``). JAX gives donated memory to results of the same
        shape in their order, and XLA copies what comes out in another.
    """

    step: Step

    def __new__(cls, init: Any, update: Any, step: Step) -> "FusedOptimizer":
        """The transformation of ``init`` and ``update``, and the step."""
        self = super().__new__(cls, init, update)
        self.step = step
        return self


def adagc_adamw(
    learning_rate: Hyper,
    b1: Any = 0.9,
    b2: Any = 0.999,
    eps: Any = 1e-8,
    weight_decay: Hyper = 1e-4,
    *,
    mu_dtype: Any = None,
    lambda_rel: Hyper = 1.04,
    beta: Hyper = 0.99,
    lambda_abs: Hyper = 1.0,
    warmup_steps: int = 100,
    warmup_init: str = "min",
    clip_eps: float = 0.0,
    release: int | None = None,
    groups: Groups | None = None,
    mask: Mask = None,
    exclude: Sequence[str] = (),
    nonfinite: str = "zero",
    phase: str = "auto",
    backend: str | Backend = "auto",
    axis_names: AxisNames = (),
) -> FusedOptimizer:
    r"""AdaGC and AdamW, in one kernel per tensor where one is named and can serve it.

    With :math:`h_t` AdaGC's scale (see `adagc`) and :math:`\hat m_t, \hat v_t` AdamW's
    corrected moments of :math:`h_t g_t`:

    .. math::
      \theta_t = \theta_{t-1} - \eta\, (\hat m_t / (\sqrt{\hat v_t} + \epsilon)
        + w\, \theta_{t-1})

    The state is that of ``optax.chain(adagc(...), optax.adamw(...))``, field for field:
    a running job may change over to it and back. So are the results, to a few units in
    the last place.

    Args:
      learning_rate: :math:`\eta`, as in ``optax.adamw``: a number or a schedule.
      b1: As in ``optax.adamw``.
      b2: As in ``optax.adamw``.
      eps: :math:`\epsilon` of AdamW.
      weight_decay: :math:`w`, as in ``optax.adamw``: a number or a schedule.
      mu_dtype: As in ``optax.adamw``; the kernel serves float32 only.
      lambda_rel: As in `adagc`, and so are all that follow but for their order.
      beta: As in `adagc`.
      lambda_abs: As in `adagc`.
      warmup_steps: As in `adagc`.
      warmup_init: As in `adagc`.
      clip_eps: ``eps`` of `adagc`.
      release: As in `adagc`.
      groups: As in `adagc`. A kernel takes whole tensors or leading stacked axes.
      mask: As in `adagc`; other leaves are AdamW's alone, by XLA.
      exclude: As in `adagc`; likewise.
      nonfinite: As in `adagc`; ``"zero"`` for a kernel.
      phase: As in `adagc`; ``"steady"`` for a kernel, which cannot wait for a norm over
        the whole tree.
      backend: ``"auto"`` and ``"xla"`` are the chain itself. ``"pallas_tpu"``: one
        kernel reads gradient, moments and parameter of a tensor once each. It serves
        float32 moments and parameters with gradients in float32 or bfloat16 of which a
        slice fits into VMEM, on one device or as a shard inside ``jax.shard_map``; XLA
        updates every other leaf, and `explain` says why. ``"pallas_gpu"``: the chain,
        with norms by a kernel. Not measured on a device.
      axis_names: As in `adagc`. XLA updates the leaves whose norms go over them.

    Returns:
      A `FusedOptimizer`. Under a kernel, ``step`` moves 28 bytes per parameter through
      memory with float32 gradients, the chain 32, and ``update`` with
      ``optax.apply_updates`` 40: call ``step``.

    Raises:
      ValueError: for a bad argument, arguments that no kernel can serve, or a named
        kernel that can serve no leaf.

    Example:
      >>> import jax.numpy as jnp
      >>> from adagc_jax import kernels
      >>> optimizer = kernels.adagc_adamw(1e-3, warmup_steps=0)
      >>> params = {"w": jnp.ones((2, 2))}
      >>> params, state = optimizer.step(params, optimizer.init(params), params)
      >>> print(params["w"][0])
      [0.9989999 0.9989999]

    Reference:
      AdaGC, https://arxiv.org/abs/2502.11034. AdamW, https://arxiv.org/abs/1711.05101.
    """
    # The clippers import this package.
    from adagc_jax.clip import clip_by_rule
    from adagc_jax.kernels import adamw_update
    from adagc_jax.transforms import ema_ratio_rule

    asked = as_backend(backend)
    rule = ema_ratio_rule(
        lambda_rel, beta, lambda_abs, warmup_steps, warmup_init, clip_eps, release
    )
    for name, value in {"b1": b1, "b2": b2}.items():
        check_hyper(name, value, high=1.0, open_high=True)
    numbers = {"b1": b1, "b2": b2, "eps": check_hyper("eps", eps)}
    numbers |= {"weight_decay": weight_decay, "learning_rate": learning_rate}
    adamw = optax.adamw(**numbers, mu_dtype=mu_dtype)
    clip = clip_by_rule(
        rule,
        groups=groups,
        mask=mask,
        exclude=exclude,
        nonfinite=nonfinite,
        phase=phase,
        backend=asked,
        axis_names=axis_names,
    )
    chain = optax.chain(clip, adamw)
    if asked.by_xla:
        return FusedOptimizer(chain.init, chain.update, _step_of(chain.update))
    _check_served(phase, nonfinite, groups)
    program = adamw_update.new_program(
        rule,
        groups or Groups(stack=None),
        mask,
        exclude,
        adamw=adamw,
        numbers=numbers,
        backend=asked,
        axis_names=frozen_axis_names(axis_names),
    )
    return _with_kernel(chain, program)


def _with_kernel(
    chain: optax.GradientTransformationExtraArgs, program: Any
) -> FusedOptimizer:
    from adagc_jax.kernels import adamw_update

    def run(in_place: bool, grads: Any, state: Any, params: Any) -> Any:
        if params is None:
            raise ValueError(
                "adagc_adamw decays weights, but params is None: call "
                "update(updates, state, params)."
            )
        return adamw_update.update(program, grads, state, params, in_place)

    def update(grads: Any, state: Any, params: Any = None, **extra_args: Any) -> Any:
        if _served_by_chain(grads, program.backend):
            return chain.update(grads, state, params, **extra_args)
        return run(False, grads, state, params)

    def step(params: Any, state: Any, grads: Any) -> Any:
        if _served_by_chain(grads, program.backend):
            return _step_of(chain.update)(params, state, grads)
        return run(True, grads, state, params)

    return FusedOptimizer(chain.init, update, step)


def _step_of(update: Any) -> Step:
    def step(params: Any, state: Any, grads: Any) -> Any:
        updates, state = update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step


def _served_by_chain(grads: Any, backend: Backend) -> bool:
    """Whether there is nothing to serve, or a GPU's kernel, which takes norms only."""
    leaves = jax.tree.leaves(grads)
    if not leaves:
        return True
    kernel = kernel_named(leaves[0], backend.name, backend.interpret)
    return kernel == "pallas_gpu"


def _check_served(phase: str, nonfinite: str, groups: Groups | None) -> None:
    """Refuses what makes a tensor's scale depend on other tensors."""
    if phase != "steady":
        raise ValueError(
            f"phase={phase!r} needs the norm of the whole tree before any tensor is "
            'updated, which a kernel that reads it once cannot: use backend="xla" in '
            'warm-up, and phase="steady" with a kernel from then on (same state).'
        )
    if nonfinite != "zero":
        raise ValueError(
            f'nonfinite={nonfinite!r} is not what the kernel does, which is "zero": '
            'use that, or backend="xla".'
        )
    if groups is not None and groups.whole:
        raise ValueError(
            "groups=whole_tree() needs the norm of the whole tree before any tensor is "
            'updated: use per_tensor() or stacked(...), or backend="xla".'
        )
