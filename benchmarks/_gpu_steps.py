"""Which whole optimizer steps are timed, and by what."""

import concurrent.futures
import dataclasses
import functools
import itertools
import os
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import optax
from _gpu_report import Entry, Pending, attempted
from _steps import Contestant, interleaved
from models import MODELS, Llama, Model, gradients, parameter_count

import adagc_jax
from adagc_jax import kernels

GIB = 1 << 30
SIZES: dict[str, Llama] = {
    "tiny": Llama(layers=1, width=128, hidden=128, vocab=128),
    "2B": Llama(layers=24, width=2560, hidden=6912, vocab=32000),
}
ROUNDS = 10


class Timed(Contestant):
    """A contestant of which less is told, as telling more takes time."""

    def program(self) -> dict[str, Any]:
        """What was compiled."""
        return {
            "trace_s": round(self.trace_seconds, 2),
            "compile_s": round(self.compile_seconds, 2),
            "temp_mb": round(self.temp_bytes / 1e6, 2),
        }


@dataclasses.dataclass(frozen=True)
class Case:
    """One tree of gradients.

    Attributes:
      model: Of `SIZES` or `models.MODELS`.
      layers: "unrolled" or "stacked".
      dtype: Of the gradients.
    """

    model: str
    layers: str
    dtype: str


def cases(tiny: bool) -> Iterator[Case]:
    """What is compiled quickly first: a short run still says something of all sizes."""
    models = ("tiny",) if tiny else ("80M", "1B", "2B", "300M")
    layers = ("unrolled",) if tiny else ("stacked", "unrolled")
    dtypes = ("float32",) if tiny else ("float32", "bfloat16")
    for layer, dtype, model in itertools.product(layers, dtypes, models):
        yield Case(model, layer, dtype)


def steps(named: list[kernels.Backend], tiny: bool) -> Iterator[Pending]:
    """Whole optimizer steps, all contestants of a tree in turn."""
    for case in cases(tiny):
        entry = {"model": case.model, "layers": case.layers, "gradients": case.dtype}
        rounds = 2 if tiny else ROUNDS
        yield entry, functools.partial(measured, case, named[0], rounds)


def model_of(case: Case) -> Model:
    """The shapes of a case."""
    return SIZES.get(case.model) or MODELS[case.model]


def measured(case: Case, kernel: kernels.Backend, rounds: int) -> Entry:
    """The times of as many contestants as there is memory for."""
    model = model_of(case)
    grads = gradients(model, case.layers == "stacked", jnp.dtype(case.dtype))
    count = parameter_count(grads)
    optimizers = contestants(case, kernel)
    names = list(optimizers)[: fitting(count, memory())]
    if "none" not in names:
        return {"parameters": count, "left_out": f"needs {24 * count / GIB:.0f} GiB"}
    ready, rows = compiled({name: optimizers[name] for name in names}, grads)
    if "none" in ready:
        rows |= interleaved({**ready}, rounds)
    left = {name: {"left_out": "no memory"} for name in optimizers if name not in names}
    return {"parameters": count, "rows": rows | left}


def fitting(count: int, room: int) -> int:
    """How many contestants fit into so many bytes; a hundred if it is not known.

    Each holds its parameters and two moments; gradients and their copies are shared.
    """
    return max(0, int(0.9 * room - 8 * count) // (12 * count)) if room else 100


def memory() -> int:
    """Bytes of the device; 0 if it does not say."""
    return (jax.devices()[0].memory_stats() or {}).get("bytes_limit", 0)


def compiled(
    optimizers: dict[str, Any], grads: Any
) -> tuple[dict[str, Timed], dict[str, Entry]]:
    """Those that made a step, and the errors of the others.

    They compile side by side, so that their compile times are upper bounds.
    """

    def start(optimizer: Any) -> Entry:
        return {"contestant": Timed(optimizer, grads)}

    def tried(contestant: Timed) -> Entry:
        contestant.run()
        return {"contestant": contestant}

    workers = min(8, os.cpu_count() or 1)
    with concurrent.futures.ThreadPoolExecutor(workers) as pool:
        started = [functools.partial(start, o) for o in optimizers.values()]
        found = dict(zip(optimizers, pool.map(attempted, started), strict=True))
    for name, entry in found.items():
        if "error" not in entry:
            found[name] = attempted(functools.partial(tried, entry["contestant"]))
    ready = {n: e["contestant"] for n, e in found.items() if "error" not in e}
    return ready, {n: e for n, e in found.items() if "error" in e}


def contestants(
    case: Case, kernel: kernels.Backend
) -> dict[str, optax.GradientTransformation]:
    """AdamW alone, and everything that may stand before it, what matters most first."""
    axes = model_of(case).stacked_axes(case.layers == "stacked")
    groups = adagc_jax.stacked(axes)
    adamw = optax.adamw(1e-3)

    def adagc(**options: Any) -> optax.GradientTransformation:
        clip = adagc_jax.adagc(groups=groups, phase="steady", **options)
        return optax.chain(clip, adamw)

    return {
        "none": adamw,
        "adagc, xla": adagc(backend="xla"),
        f"adagc, {kernel.name}": adagc(backend=kernel),
        "optax.clip_by_global_norm": optax.chain(optax.clip_by_global_norm(1.0), adamw),
        "adagc_adamw": kernels.adagc_adamw(
            1e-3, groups=groups, phase="steady", backend=kernel
        ),
        "fused_clip": optax.chain(_fused_clip(kernel), adamw),
        "adagc, auto": adagc(),
    }


def _fused_clip(backend: kernels.Backend) -> optax.GradientTransformation:
    """The stand-alone operation on every tensor that it can serve, XLA's on others."""

    def keep(x: jax.Array) -> tuple[int, ...]:
        return (0,) if x.ndim > 2 else ()

    def clip(x: jax.Array, gamma: jax.Array) -> Any:
        refused = kernels.why_not(x, keep=keep(x), backend=backend.name)
        named = "xla" if refused else backend.name
        return kernels.fused_clip(
            x,
            gamma,
            lambda_rel=1.04,
            beta=0.99,
            keep=keep(x),
            backend=named,
            interpret=backend.interpret and named != "xla",
        )

    def init(params: Any) -> Any:
        return jax.tree.map(
            lambda p: jnp.ones(p.shape[: len(keep(p))], jnp.float32), params
        )

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        del params
        leaves, treedef = jax.tree.flatten(updates)
        done = [
            clip(*pair) for pair in zip(leaves, jax.tree.leaves(state), strict=True)
        ]
        clipped, _, gammas = zip(*done, strict=True)
        return treedef.unflatten(clipped), treedef.unflatten(gammas)

    return optax.GradientTransformation(init, update)
