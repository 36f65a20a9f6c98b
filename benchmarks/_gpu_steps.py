"""Which whole optimizer steps are timed, and by what."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import optax
from step_time import Contestant, per_layer

import adagc_jax
from adagc_jax import kernels


@dataclasses.dataclass(frozen=True)
class Case:
    """One tree of gradients.

    Attributes:
      model: Of `models.MODELS`.
      layers: "unrolled" or "stacked".
      dtype: Of the gradients.
      contestants: How many optimizers are held in memory at once.
    """

    model: str
    layers: str
    dtype: str
    contestants: int = 7


def cases(tiny: bool) -> Iterator[Case]:
    """Small trees first, so that a short run still says something of everything."""
    models = ("tiny",) if tiny else ("80M", "300M", "1B")
    layers = ("unrolled",) if tiny else ("unrolled", "stacked")
    dtypes = ("float32",) if tiny else ("float32", "bfloat16")
    for model, layer, dtype in itertools.product(models, layers, dtypes):
        yield Case(model, layer, dtype)


def new_contestants(
    case: Case, grads: Any, named: list[kernels.Backend]
) -> dict[str, Contestant]:
    """AdamW alone, and everything that may stand before it."""
    groups = per_layer(case.layers == "stacked")
    adamw = optax.adamw(1e-3)
    kernel = named[0]

    def adagc(**options: Any) -> optax.GradientTransformation:
        clip = adagc_jax.adagc(groups=groups, phase="steady", **options)
        return optax.chain(clip, adamw)

    optimizers = {
        "none": adamw,
        "optax.clip_by_global_norm": optax.chain(optax.clip_by_global_norm(1.0), adamw),
        "adagc, xla": adagc(backend="xla"),
        "adagc, auto": adagc(),
        f"adagc, {kernel.name}": adagc(backend=kernel),
        "fused_clip": optax.chain(_fused_clip(kernel), adamw),
        "adagc_adamw": kernels.adagc_adamw(
            1e-3, groups=groups, phase="steady", backend=kernel
        ),
    }
    return {name: Contestant(own, grads) for name, own in optimizers.items()}


def _fused_clip(backend: kernels.Backend) -> optax.GradientTransformation:
    """The stand-alone operation on every tensor that it can serve, XLA's on others."""

    def clip(x: jax.Array, gamma: jax.Array) -> Any:
        refused = kernels.why_not(x, backend=backend.name)
        named = "xla" if refused else backend.name
        return kernels.fused_clip(
            x,
            gamma,
            lambda_rel=1.04,
            beta=0.99,
            backend=named,
            interpret=backend.interpret and named != "xla",
        )

    def init(params: Any) -> Any:
        return jax.tree.map(lambda p: jax.numpy.ones((), "float32"), params)

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        del params
        leaves, treedef = jax.tree.flatten(updates)
        done = [
            clip(*pair) for pair in zip(leaves, jax.tree.leaves(state), strict=True)
        ]
        clipped, _, gammas = zip(*done, strict=True)
        return treedef.unflatten(clipped), treedef.unflatten(gammas)

    return optax.GradientTransformation(init, update)
