"""The clippers that can be chosen, how they are spelled, and what they report.

`adagc(lambda_rel=1.1,warmup_steps=20)` is AdaGC with two arguments of its own; the
rest comes from the settings of the job.
"""

import inspect
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax

import adagc_jax

if TYPE_CHECKING:
    from _config import Config

Clipper = Callable[..., optax.GradientTransformation]

# Large enough to be seen in a float32 norm, far too small to train anything.
_ALMOST_ZERO = 1e-15


_EXPERTS = r"mlp/(gate|up|down)$"


def _stacked_axes(config: "Config") -> dict[str, Any] | None:
    """Layers and experts in one array per matrix, each of them clipped by itself."""
    experts = config.model == "mixtral"
    if config.scan_layers:
        return ({_EXPERTS: (0, 1)} if experts else {}) | {"layers/": 0}
    return {_EXPERTS: 0} if experts else None


def _groups(config: "Config") -> adagc_jax.Groups | None:
    axes = _stacked_axes(config)
    return adagc_jax.stacked(axes) if axes else None


def _with(options: dict[str, Any], **defaults: Any) -> dict[str, Any]:
    return defaults | options


def _measure() -> optax.GradientTransformation:
    """Clips nothing, but its state has the norms."""
    return adagc_jax.global_gc(1e30, nonfinite="propagate")


def _none(config: "Config") -> optax.GradientTransformation:
    del config
    return _measure()


def _global(config: "Config", **options: Any) -> optax.GradientTransformation:
    return adagc_jax.global_gc(**_with(options, max_norm=config.max_norm))


def _value(config: "Config", **options: Any) -> optax.GradientTransformation:
    clip = adagc_jax.clip_by_value(**_with(options, limit=config.max_value))
    return optax.chain(_measure(), clip, _measure())


def _tensor(config: "Config", **options: Any) -> optax.GradientTransformation:
    settings = _with(options, max_norm=config.max_norm, groups=_groups(config))
    return adagc_jax.tensor_gc(**settings)


def _agc(config: "Config", **options: Any) -> optax.GradientTransformation:
    units = {"clipping": config.agc_clipping, "stacked": _stacked_axes(config)}
    return adagc_jax.agc(**_with(options, **units))


def _zclip(config: "Config", **options: Any) -> optax.GradientTransformation:
    del config
    return adagc_jax.zclip(**options)


def _adagc(config: "Config", **options: Any) -> optax.GradientTransformation:
    settings: dict[str, Any] = {
        "lambda_rel": config.lambda_rel,
        "beta": config.beta,
        "lambda_abs": config.lambda_abs,
        "warmup_steps": config.clip_warmup_steps,
        "groups": _groups(config),
    }
    return adagc_jax.adagc(**settings | options)


def _adagc_ema(config: "Config", **options: Any) -> optax.GradientTransformation:
    return _adagc(config, **_with(options, warmup_init="ema"))


def _adagc_global(config: "Config", **options: Any) -> optax.GradientTransformation:
    return _adagc(config, **_with(options, groups=adagc_jax.whole_tree()))


def _adagc_literal(config: "Config", **options: Any) -> optax.GradientTransformation:
    """AdaGC as printed: a gradient of zero counts, where the library holds still."""
    return optax.chain(zeros_count(), _adagc(config, **options))


def zeros_count() -> optax.GradientTransformation:
    """Gradients of zero as norms that a clipper learns from."""
    return optax.stateless(
        lambda grads, _: jax.tree.map(
            lambda g: jnp.where(g == 0, jnp.full_like(g, _ALMOST_ZERO), g), grads
        )
    )


def _robust(config: "Config", **options: Any) -> optax.GradientTransformation:
    return adagc_jax.robust_gc(**_with(options, groups=_groups(config)))


CLIPPERS: dict[str, Clipper] = {
    "none": _none,
    "global": _global,
    "value": _value,
    "tensor": _tensor,
    "agc": _agc,
    "zclip": _zclip,
    "adagc": _adagc,
    "adagc-ema": _adagc_ema,
    "adagc-global": _adagc_global,
    "adagc-literal": _adagc_literal,
    "robust": _robust,
}


def _option_value(text: str) -> Any:
    """An int, a float (also inf), True, False, None, or the word itself."""
    if text in (words := {"True": True, "False": False, "None": None}):
        return words[text]
    for number in (int, float):
        try:
            return number(text)
        except ValueError:
            continue
    return text


def read_spec(spec: str) -> tuple[str, dict[str, Any]]:
    """Name and options of `name` or `name(key=value,...)`.

    Raises:
      ValueError: If it is not spelled like this.
    """
    match = re.fullmatch(r"([\w-]+)(?:\((.*)\))?", spec)
    pairs = [p.split("=") for p in (match[2] or "").split(",") if p] if match else []
    if match is None or any(len(pair) != 2 for pair in pairs):
        raise ValueError(
            f"clip {spec!r}: give its options by name, as in adagc(lambda_rel=1.1)"
        )
    options = {key.strip(): _option_value(value.strip()) for key, value in pairs}
    return match[1], options


def new_clipper(spec: str, config: "Config") -> optax.GradientTransformation:
    """The clipper that `spec` spells, with the other arguments from the settings.

    Raises:
      ValueError: If it does not have such an option, or not such a value.
    """
    name, options = read_spec(spec)
    try:
        return CLIPPERS[name](config, **options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"clip {spec!r}: {error}{_valid_options(error)}") from error


def _valid_options(error: Exception) -> str:
    """Those of the function that was not given one of its own."""
    called = re.match(r"(\w+)\(\) got an unexpected", str(error))
    function = getattr(adagc_jax, called[1], None) if called else None
    if function is None:
        return ""
    return f"; it has {', '.join(inspect.signature(function).parameters)}"


def slug(spec: str) -> str:
    """`spec` as a name for files."""
    return re.sub(r"[^\w.=-]+", "-", spec).strip("-")


def clip_numbers(opt_state: optax.OptState, params: optax.Params) -> dict[str, Any]:
    """What the clipper did in the last step, in all and per tensor, as scalars."""
    numbers = adagc_jax.clip_metrics(opt_state, params, level="all")
    if "clip/norm_before" in numbers:
        return numbers
    # A clip by value has no norms of its own: compare those around it.
    before, after = (
        {
            key.removeprefix(f"clip/{place}/").removesuffix("norm_before"): value
            for key, value in numbers.items()
            if key.startswith(f"clip/{place}/") and key.endswith("norm_before")
        }
        for place in (0, 1)
    )
    total, total_after = before.pop(""), after.pop("")
    scales = {path: after[path] / before[path] for path in before}
    clipped = jnp.stack(list(scales.values())) < 1
    return {
        "clip/norm_before": total,
        "clip/norm_after": total_after,
        "clip/fraction_clipped": jnp.mean(clipped.astype(jnp.float32)),
        **{f"clip/{path}scale": scale for path, scale in scales.items()},
    }
